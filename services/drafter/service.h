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
  // `info` is what GetInfo answers, but for the slots in use.  `loop` must outlive the server.
  DrafterService(DraftLoop* loop, v1::DrafterInfo info);

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

  // Remembers how to end a stream; returns its number, or 0 while draining.
  uint64_t Register(End end);
  void Unregister(uint64_t stream);

  DraftLoop* const loop_;
  const v1::DrafterInfo info_;
  std::mutex mutex_;
  uint64_t last_stream_ = 0;
  bool draining_ = false;
  absl::flat_hash_map<uint64_t, End> streams_;
};

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_SERVICE_H_
