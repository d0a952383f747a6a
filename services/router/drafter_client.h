// The scheduler's link to a drafter: holds its Draft stream.
#ifndef COPPICE_SERVICES_ROUTER_DRAFTER_CLIENT_H_
#define COPPICE_SERVICES_ROUTER_DRAFTER_CLIENT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "coppice/v1/drafter.grpc.pb.h"
#include "services/common/clock.h"
#include "services/common/peer_connection.h"
#include "services/router/peers.h"
#include "services/router/scheduler.h"

namespace coppice::router {

class DrafterClient : public DrafterLink {
 public:
  struct Options {
    std::string address;  // empty: there is none, and nothing is done
    std::chrono::milliseconds retry{500};
  };

  // `post` takes DrafterUp, DrafterReplied and DrafterDown, from several threads, and with them
  // what lets the stream be read on.
  DrafterClient(const Options& options, std::function<void(Event, ReadTicket)> post);
  ~DrafterClient() override;

  void Start();
  void Send(uint64_t connection, DraftBatch batch) override;

 private:
  absl::Status Prepare(grpc::ClientContext* context);

  const Options options_;
  const std::function<void(Event, ReadTicket)> post_;
  std::unique_ptr<v1::Drafter::Stub> stub_;
  DrafterInfo info_;  // the connection thread's
  PeerConnection<v1::DraftBatch, v1::DraftReply> connection_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_DRAFTER_CLIENT_H_
