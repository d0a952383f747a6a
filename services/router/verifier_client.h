// The scheduler's link to a verifier: holds its Step stream, which is the lease on it.
#ifndef COPPICE_SERVICES_ROUTER_VERIFIER_CLIENT_H_
#define COPPICE_SERVICES_ROUTER_VERIFIER_CLIENT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "coppice/v1/verifier.grpc.pb.h"
#include "services/common/clock.h"
#include "services/common/peer_connection.h"
#include "services/router/peers.h"
#include "services/router/scheduler.h"

namespace coppice::router {

class VerifierClient : public VerifierLink {
 public:
  struct Options {
    std::string address;
    std::string router;  // told to others who want the lease
    uint64_t router_epoch = 0;
    std::chrono::milliseconds retry{500};
  };

  // `check` decides whether the verifier that was found is the right one, before its lease is
  // taken.  `post` takes VerifierUp, VerifierStep and VerifierDown, and with them what lets the
  // stream be read on; both are called from several threads.
  VerifierClient(const Options& options, std::function<absl::Status(const VerifierInfo&)> check,
                 std::function<void(Event, ReadTicket)> post);
  ~VerifierClient() override;

  void Start();
  void Send(uint64_t connection, StepRequest request) override;

 private:
  absl::Status Prepare(grpc::ClientContext* context);
  void OnResult(uint64_t connection, const v1::StepResult& result, ReadTicket ticket);

  const Options options_;
  const std::function<absl::Status(const VerifierInfo&)> check_;
  const std::function<void(Event, ReadTicket)> post_;
  std::unique_ptr<v1::Verifier::Stub> stub_;
  std::mutex mutex_;
  // Until the stream's first result has come: what Prepare was told.
  std::optional<VerifierInfo> greeting_;
  PeerConnection<v1::StepRequest, v1::StepResult> connection_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_VERIFIER_CLIENT_H_
