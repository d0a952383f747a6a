// The verifier on the wire: gRPC in and out of the step loop.
#ifndef COPPICE_SERVICES_VERIFIER_SERVICE_H_
#define COPPICE_SERVICES_VERIFIER_SERVICE_H_

#include <mutex>

#include "coppice/v1/verifier.grpc.pb.h"
#include "services/verifier/step_loop.h"

namespace coppice::verifier {

// Never blocks: what is asked goes into the loop's queue, what is told comes from its last
// snapshot.  Serves from the start, so that a taken port or a question during a long load gets an
// answer; until Ready, calls end UNAVAILABLE.
class VerifierService : public v1::Verifier::CallbackService {
 public:
  VerifierService() = default;

  // `info` is what GetInfo answers, apart from pool and owner.  `loop` must outlive the server.
  void Ready(StepLoop* loop, v1::VerifierInfo info);

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const v1::GetVerifierInfoRequest* request,
                                    v1::VerifierInfo* response) override;
  grpc::ServerUnaryReactor* GetPool(grpc::CallbackServerContext* context,
                                    const v1::GetPoolRequest* request,
                                    v1::PoolState* response) override;
  grpc::ServerBidiReactor<v1::StepRequest, v1::StepResult>* Step(
      grpc::CallbackServerContext* context) override;

 private:
  class StepStream;

  // Null until Ready.
  StepLoop* loop() const;

  mutable std::mutex mutex_;
  StepLoop* loop_ = nullptr;
  v1::VerifierInfo info_;
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_SERVICE_H_
