// gRPC in and out of the router: checks and translates, hands to the scheduler, writes what it
// says.
#ifndef COPPICE_SERVICES_ROUTER_SERVICE_H_
#define COPPICE_SERVICES_ROUTER_SERVICE_H_

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "coppice/v1/cluster.grpc.pb.h"
#include "coppice/v1/inference.grpc.pb.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "services/common/clock.h"
#include "services/router/request.h"
#include "services/router/scheduler_loop.h"
#include "services/router/stream.h"

namespace coppice::router {

struct InferenceOptions {
  RequestLimits limits;
  std::string model_name;
  // How chats are laid out; where it is not known, chats are refused with its sentence.
  absl::StatusOr<ChatTemplate> chat_template = ChatTemplate();
  // As ChatOptions::special_tokens_in_text, for texts too.
  bool special_tokens_in_text = false;
  BuildLabel build;
  // What waits for one client that does not read; beyond it the stream ends RESOURCE_EXHAUSTED.
  size_t client_buffer_bytes = 4 << 20;
  // Called with every last delta's figures.
  std::function<void(const Final&)> on_final;
};

// No call blocks: tokenizing is done on gRPC's threads, all else by the scheduler's.
class InferenceService : public v1::Inference::CallbackService {
 public:
  // Everything must outlive the service.
  InferenceService(const InferenceOptions& options, const Tokenizer* tokenizer, SchedulerLoop* loop,
                   std::function<uint64_t()> random);

  grpc::ServerWriteReactor<v1::GenerateDelta>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const v1::CancelRequest* request,
                                   v1::CancelResponse* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::Model* response) override;

 private:
  absl::StatusOr<Request> Check(const v1::GenerateRequest& request) const;
  absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text) const;
  absl::StatusOr<std::vector<int32_t>> EncodeMessages(const v1::Chat& chat) const;

  const InferenceOptions options_;
  const Tokenizer* const tokenizer_;
  SchedulerLoop* const loop_;
  const std::function<uint64_t()> random_;
  std::atomic<uint64_t> next_handle_{1};
};

struct ClusterOptions {
  std::string name;
  uint64_t epoch = 0;
  std::string verifier_address;
  std::string drafter_address;
  BuildLabel build;
};

class ClusterService : public v1::Cluster::CallbackService {
 public:
  ClusterService(const ClusterOptions& options, SchedulerLoop* loop);

  grpc::ServerUnaryReactor* GetState(grpc::CallbackServerContext* context,
                                     const v1::GetStateRequest* request,
                                     v1::ClusterState* response) override;

 private:
  void Fill(const SchedulerState& state, v1::ClusterState* response) const;

  const ClusterOptions options_;
  SchedulerLoop* const loop_;
  const TimePoint started_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_SERVICE_H_
