#include "services/router/service.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/chat_template.h"
#include "model/utf8.h"
#include "services/common/rpc_status.h"
#include "services/common/stream_writer.h"
#include "services/router/wire.h"

namespace coppice::router {
namespace {

using DeltaWriter = StreamWriter<v1::GenerateDelta>;

// So much before a call's deadline its last delta is sent, so that it still arrives.
constexpr Duration kDeadlineMargin = std::chrono::milliseconds(10);

// A later delta joins one that still waits, as long as that is not the last.
bool Coalesce(v1::GenerateDelta* last, const v1::GenerateDelta& next) {
  if (last->has_final()) return false;
  last->mutable_token_ids()->MergeFrom(next.token_ids());
  last->mutable_text()->append(next.text());
  last->mutable_logprobs()->MergeFrom(next.logprobs());
  if (next.has_seed()) last->set_seed(next.seed());
  if (next.has_final()) *last->mutable_final() = next.final();
  return true;
}

std::optional<TimePoint> Deadline(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  const auto now = std::chrono::system_clock::now();
  if (deadline == std::chrono::system_clock::time_point::max() ||
      deadline - now > std::chrono::hours(24 * 365)) {
    return std::nullopt;
  }
  const auto left = std::chrono::duration_cast<Duration>(deadline - now);
  return Clock::Real()->Now() + left - std::min(kDeadlineMargin, left / 10);
}

// One Generate call.  gRPC owns it until OnDone; the scheduler's end is ClientStream.
class GenerateReactor : public grpc::ServerWriteReactor<v1::GenerateDelta> {
 public:
  GenerateReactor(SchedulerLoop* loop, uint64_t handle, size_t buffer_bytes)
      : loop_(loop), handle_(handle) {
    DeltaWriter::Options options;
    options.max_bytes = buffer_bytes;
    options.coalesce = Coalesce;
    writer_ = std::make_shared<DeltaWriter>(
        [this](const v1::GenerateDelta& delta) { StartWrite(&delta); }, std::move(options));
  }

  const std::shared_ptr<DeltaWriter>& writer() const { return writer_; }

  // Ends the call once what waits is written.  The reactor lives until then, whatever thread this
  // is.
  static void End(const std::shared_ptr<DeltaWriter>& writer, GenerateReactor* reactor,
                  const absl::Status& status) {
    writer->Finish([reactor, status] { reactor->Finish(ToGrpcStatus(status)); });
  }

  void OnWriteDone(bool ok) override {
    // OnDone may delete this before the writer returns.
    const std::shared_ptr<DeltaWriter> writer = writer_;
    writer->OnWriteDone(ok);
  }
  void OnCancel() override {
    loop_->Post(ClientGone{handle_});
    const std::shared_ptr<DeltaWriter> writer = writer_;
    writer->FinishNow([this] { Finish(grpc::Status::CANCELLED); });
  }
  void OnDone() override { delete this; }

 private:
  SchedulerLoop* const loop_;
  const uint64_t handle_;
  std::shared_ptr<DeltaWriter> writer_;
};

class ClientStream : public Stream {
 public:
  ClientStream(GenerateReactor* reactor, std::string request_id,
               std::function<void(const Final&)> on_final)
      : reactor_(reactor),
        writer_(reactor->writer()),
        request_id_(std::move(request_id)),
        on_final_(std::move(on_final)) {}

  bool Write(Delta delta) override {
    if (delta.final.has_value() && on_final_) on_final_(*delta.final);
    v1::GenerateDelta message = ToWire(delta);
    message.set_request_id(request_id_);
    return writer_->Write(std::move(message)) != DeltaWriter::Result::kFull;
  }
  void Finish(const absl::Status& status) override {
    GenerateReactor::End(writer_, reactor_, status);
  }

 private:
  // Touched by the writer alone, which calls nothing once the call is finished.
  GenerateReactor* const reactor_;
  const std::shared_ptr<DeltaWriter> writer_;
  const std::string request_id_;
  const std::function<void(const Final&)> on_final_;
};

std::string ReplaceInvalidUtf8(const std::string& bytes) {
  std::string text;
  text.reserve(bytes.size());
  const std::string_view all = bytes;
  for (size_t i = 0; i < all.size();) {
    const Utf8Char c = DecodeUtf8(all.substr(i));
    if (c.kind == Utf8Char::kValid) {
      text.append(all.substr(i, c.length));
    } else {
      text += "\xEF\xBF\xBD";  // U+FFFD
    }
    i += c.length;
  }
  return text;
}

absl::Status Prefixed(const char* field, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(field, ": ", std::string(status.message())));
}

}  // namespace

// ---- Inference

InferenceService::InferenceService(const InferenceOptions& options, const Tokenizer* tokenizer,
                                   SchedulerLoop* loop, std::function<uint64_t()> random)
    : options_(options), tokenizer_(tokenizer), loop_(loop), random_(std::move(random)) {}

absl::StatusOr<std::vector<int32_t>> InferenceService::EncodeText(const std::string& text) const {
  absl::StatusOr<std::vector<int32_t>> ids = options_.special_tokens_in_text
                                                 ? tokenizer_->EncodeWithSpecial(text)
                                                 : tokenizer_->Encode(text);
  if (!ids.ok()) return Prefixed("text", ids.status());
  return ids;
}

absl::StatusOr<std::vector<int32_t>> InferenceService::EncodeMessages(const v1::Chat& chat) const {
  if (!options_.chat_template.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("chat: ", std::string(options_.chat_template.status().message())));
  }
  if (chat.messages().empty()) {
    return absl::InvalidArgumentError("chat has no messages; give at least one");
  }
  const absl::StatusOr<std::vector<ChatMessage>> messages = MessagesFromWire(chat);
  if (!messages.ok()) return Prefixed("chat", messages.status());
  ChatOptions options = OptionsFromWire(chat);
  options.special_tokens_in_text = options_.special_tokens_in_text;
  absl::StatusOr<std::vector<int32_t>> ids =
      EncodeChat(*tokenizer_, *options_.chat_template, *messages, options);
  if (!ids.ok()) return Prefixed("chat", ids.status());
  return ids;
}

absl::StatusOr<Request> InferenceService::Check(const v1::GenerateRequest& request) const {
  RequestFields fields = FieldsFromWire(request);
  absl::StatusOr<std::vector<int32_t>> ids = std::vector<int32_t>();
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      ids = EncodeText(request.text());
      break;
    case v1::GenerateRequest::kChat:
      ids = EncodeMessages(request.chat());
      break;
    case v1::GenerateRequest::kTokenIds:
      fields.prompt.assign(request.token_ids().ids().begin(), request.token_ids().ids().end());
      break;
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;  // an empty prompt
  }
  if (!ids.ok()) return ids.status();
  if (!ids->empty()) fields.prompt.assign(ids->begin(), ids->end());
  RequestLimits limits = options_.limits;
  limits.pool_tokens = loop_->pool_tokens();
  return CheckRequest(std::move(fields), limits, random_);
}

grpc::ServerWriteReactor<v1::GenerateDelta>* InferenceService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const uint64_t handle = next_handle_.fetch_add(1);
  auto* reactor = new GenerateReactor(loop_, handle, options_.client_buffer_bytes);
  const std::shared_ptr<DeltaWriter> writer = reactor->writer();
  absl::StatusOr<Request> checked = Check(*request);
  if (!checked.ok()) {
    GenerateReactor::End(writer, reactor, checked.status());
    return reactor;
  }
  Submit submit;
  submit.handle = handle;
  submit.deadline = Deadline(*context);
  submit.stream = std::make_shared<ClientStream>(reactor, checked->id, options_.on_final);
  submit.request = *std::move(checked);
  if (!loop_->Post(std::move(submit))) {
    GenerateReactor::End(writer, reactor,
                         absl::UnavailableError("the router is shutting down; try another"));
  }
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::Cancel(grpc::CallbackServerContext* context,
                                                   const v1::CancelRequest* request,
                                                   v1::CancelResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (request->request_id().empty()) {
    reactor->Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                                 "request_id is empty; name the request to cancel"));
    return reactor;
  }
  CancelById cancel;
  cancel.request_id = request->request_id();
  cancel.done = [reactor, response](bool found) {
    response->set_found(found);
    reactor->Finish(grpc::Status::OK);
  };
  if (!loop_->Post(std::move(cancel))) reactor->Finish(grpc::Status::OK);  // nothing runs
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context,
                                                     const v1::TokenizeRequest* request,
                                                     v1::TokenizeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::StatusOr<std::vector<int32_t>> ids = std::vector<int32_t>();
  switch (request->prompt_case()) {
    case v1::TokenizeRequest::kText:
      ids = EncodeText(request->text());
      break;
    case v1::TokenizeRequest::kChat:
      ids = EncodeMessages(request->chat());
      break;
    case v1::TokenizeRequest::PROMPT_NOT_SET:
      ids = absl::InvalidArgumentError("prompt is missing; give text or chat");
  }
  if (ids.ok()) response->mutable_ids()->Add(ids->begin(), ids->end());
  reactor->Finish(ToGrpcStatus(ids.status()));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::Detokenize(grpc::CallbackServerContext* context,
                                                       const v1::DetokenizeRequest* request,
                                                       v1::DetokenizeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const uint32_t vocab_size = static_cast<uint32_t>(options_.limits.vocab_size);
  std::vector<int32_t> ids;
  ids.reserve(request->ids_size());
  absl::Status status;
  for (int i = 0; i < request->ids_size() && status.ok(); ++i) {
    if (request->ids(i) >= vocab_size) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "ids[", i, "] is ", request->ids(i), "; the model's ids go from 0 to ", vocab_size - 1));
    } else {
      ids.push_back(static_cast<int32_t>(request->ids(i)));
    }
  }
  if (status.ok()) {
    absl::StatusOr<std::string> bytes = tokenizer_->Decode(ids);
    status = bytes.status();
    if (bytes.ok()) response->set_text(ReplaceInvalidUtf8(*bytes));
  }
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::GetModel(grpc::CallbackServerContext* context,
                                                     const v1::GetModelRequest*,
                                                     v1::Model* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  response->set_name(options_.model_name);
  if (const uint64_t fingerprint = loop_->model_fingerprint(); fingerprint != 0) {
    response->set_fingerprint(absl::StrFormat("%016x", fingerprint));
  }
  response->set_vocab_size(options_.limits.vocab_size);
  response->set_max_position_embeddings(options_.limits.max_position_embeddings);
  for (int32_t id : options_.limits.eos_token_ids) response->add_eos_token_ids(id);
  *response->mutable_build() = ToWire(options_.build);
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

// ---- Cluster

ClusterService::ClusterService(const ClusterOptions& options, SchedulerLoop* loop)
    : options_(options), loop_(loop), started_(Clock::Real()->Now()) {}

grpc::ServerUnaryReactor* ClusterService::GetState(grpc::CallbackServerContext* context,
                                                   const v1::GetStateRequest*,
                                                   v1::ClusterState* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  AskState ask;
  ask.done = [this, reactor, response](const SchedulerState& state) {
    Fill(state, response);
    reactor->Finish(grpc::Status::OK);
  };
  if (!loop_->Post(std::move(ask))) {
    reactor->Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the router is shutting down"));
  }
  return reactor;
}

void ClusterService::Fill(const SchedulerState& state, v1::ClusterState* response) const {
  const SchedulerCounters& counters = loop_->counters();
  v1::ClusterState::Router* router = response->mutable_router();
  router->set_name(options_.name);
  router->set_epoch(options_.epoch);
  router->set_ready(state.not_ready_reason.empty());
  router->set_not_ready_reason(state.not_ready_reason);
  router->set_running(static_cast<uint32_t>(counters.running.load()));
  router->set_waiting(static_cast<uint32_t>(counters.waiting.load()));
  router->set_requests(counters.requests.load());
  router->set_tokens(counters.tokens.load());
  router->set_uptime_seconds(
      std::chrono::duration<double>(Clock::Real()->Now() - started_).count());
  *router->mutable_build() = ToWire(options_.build);

  v1::ClusterState::VerifierState* verifier = response->add_verifiers();
  verifier->set_address(options_.verifier_address);
  verifier->set_connected(state.verifier_connected);
  verifier->set_error(state.verifier_error);
  *verifier->mutable_info() = ToWire(state.verifier);
  if (!options_.drafter_address.empty()) {
    v1::ClusterState::DrafterState* drafter = response->add_drafters();
    drafter->set_address(options_.drafter_address);
    drafter->set_connected(state.drafter_connected);
    drafter->set_speculating(state.speculating);
    drafter->set_error(state.drafter_error);
    *drafter->mutable_info() = ToWire(state.drafter);
  }
  v1::ClusterState::Speculation* speculation = response->mutable_speculation();
  const uint64_t rounds = counters.rounds.load();
  speculation->set_rounds(rounds);
  speculation->set_drafted(counters.drafted.load());
  speculation->set_accepted(counters.accepted.load());
  speculation->set_acceptance_length(
      rounds > 0 ? static_cast<double>(counters.round_tokens.load()) / rounds : 0.0);
  speculation->set_round_overhead_us_p50(state.round_overhead_us_p50);
}

}  // namespace coppice::router
