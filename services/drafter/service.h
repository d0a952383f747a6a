// The drafter on the wire: translates between drafter.proto and the draft loop, and never blocks.
#ifndef COPPICE_SERVICES_DRAFTER_SERVICE_H_
#define COPPICE_SERVICES_DRAFTER_SERVICE_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "coppice/v1/drafter.grpc.pb.h"
#include "services/drafter/draft_loop.h"

namespace coppice::drafter {

class DrafterService : public v1::Drafter::CallbackService {
 public:
  // Until the model is loaded every call is refused, UNAVAILABLE.
  DrafterService() = default;
  // From now on calls are served.  `info` is what GetInfo answers, but for the slots in use. `loop`
  // must outlive the server.
  void Ready(DraftLoop* loop, v1::DrafterInfo info);

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const v1::GetDrafterInfoRequest* request,
                                    v1::DrafterInfo* response) override;
  grpc::ServerBidiReactor<v1::ContextBatch, v1::ContextAck>* AppendContext(
      grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<v1::DraftBatch, v1::DraftReply>* Draft(
      grpc::CallbackServerContext* context) override;

  // Ends every stream, and those still to come, with UNAVAILABLE: peers go on without this drafter.
  void Drain();

 private:
  class ContextReactor;
  class DraftReactor;
  using End = std::function<void(const grpc::Status&)>;

  // Remembers how to end a stream; returns its number, or 0 while loading or draining.
  uint64_t Register(End end);
  // Why a stream was not registered, or none is to be any more.
  grpc::Status WhyNot();
  void Unregister(uint64_t stream);

  std::mutex mutex_;
  DraftLoop* loop_ = nullptr;  // this and info_ stand still once a stream is registered
  v1::DrafterInfo info_;
  uint64_t last_stream_ = 0;
  bool draining_ = false;
  absl::flat_hash_map<uint64_t, End> streams_;
};

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_SERVICE_H_
