#include "client/client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coppice/v1/cluster.grpc.pb.h"
#include "coppice/v1/inference.grpc.pb.h"
#include "services/common/channel.h"
#include "services/common/rpc_status.h"

namespace coppice {

// The routers' stubs, and which of them to try first.
class Client::Routers {
 public:
  explicit Routers(ClientOptions options) : options_(std::move(options)) {
    for (const std::string& address : options_.routers) {
      const std::shared_ptr<grpc::Channel> channel = MakeChannel(address);
      inference_.push_back(v1::Inference::NewStub(channel));
      cluster_.push_back(v1::Cluster::NewStub(channel));
      channels_.push_back(channel);
    }
  }

  const ClientOptions& options() const { return options_; }
  size_t size() const { return inference_.size(); }
  v1::Inference::Stub* inference(size_t i) const { return inference_[i].get(); }
  v1::Cluster::Stub* cluster(size_t i) const { return cluster_[i].get(); }
  grpc::Channel* channel(size_t i) const { return channels_[i].get(); }

  // The router that answered last.
  size_t preferred() const { return preferred_.load(std::memory_order_relaxed); }
  void Prefer(size_t i) { preferred_.store(i, std::memory_order_relaxed); }

  absl::Status NoneConfigured() const {
    return absl::InvalidArgumentError("no router's address was given");
  }
  absl::Status Unreachable(const std::string& last) const {
    return absl::UnavailableError(absl::StrCat("no router can take the call at ",
                                               absl::StrJoin(options_.routers, ", "), ": ", last));
  }

  // Calls each router, the preferred first, until one is not UNAVAILABLE.
  template <typename Call>
  absl::Status Unary(const Call& call) {
    if (size() == 0) return NoneConfigured();
    grpc::Status status;
    const size_t first = preferred();
    for (size_t i = 0; i < size(); ++i) {
      const size_t router = (first + i) % size();
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + options_.call_timeout);
      status = call(router, &context);
      if (status.error_code() != grpc::StatusCode::UNAVAILABLE) {
        Prefer(router);
        return FromGrpcStatus(status);
      }
    }
    return Unreachable(status.error_message());
  }

 private:
  const ClientOptions options_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::vector<std::unique_ptr<v1::Inference::Stub>> inference_;
  std::vector<std::unique_ptr<v1::Cluster::Stub>> cluster_;
  std::atomic<size_t> preferred_{0};
};

class Client::Stream : public GenerateStream {
 public:
  Stream(std::shared_ptr<Routers> routers, v1::GenerateRequest request,
         std::optional<std::chrono::system_clock::time_point> deadline)
      : routers_(std::move(routers)),
        request_(std::move(request)),
        deadline_(deadline),
        start_(std::chrono::steady_clock::now()),
        router_(routers_->preferred()) {
    if (request_.has_resume()) {
      seed_known_ = true;
      done_.seed = request_.resume().seed();
      done_.token_ids.assign(request_.resume().token_ids().begin(),
                             request_.resume().token_ids().end());
    }
    if (routers_->size() == 0) Conclude(routers_->NoneConfigured());
  }

  ~Stream() override {
    Cancel();
    Hang();
  }

  bool Next(v1::GenerateDelta* delta) override {
    while (!ended_) {
      if (!reader_ && !Open()) break;
      if (reader_->Read(delta)) {
        const Verdict verdict = Accept(delta);
        if (verdict == Verdict::kNew) return true;
        if (verdict == Verdict::kOld) continue;
        Hang();
        Broke("the router skipped tokens");
        continue;
      }
      const grpc::Status status = reader_->Finish();
      Close();
      if (finished_) {
        Conclude(FromGrpcStatus(status));
      } else if (Cancelled()) {
        Conclude(absl::CancelledError("cancelled"));
      } else if (status.ok()) {
        Broke("the router ended the stream too early");
      } else if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
        Broke(status.error_message());
      } else {
        Conclude(FromGrpcStatus(status));
      }
    }
    return false;
  }

  absl::StatusOr<Completion> Finish() override {
    if (!ended_) return absl::FailedPreconditionError("the stream has not been read to its end");
    if (!status_.ok()) return status_;
    return done_;
  }

  void Cancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    if (context_) context_->TryCancel();
    changed_.notify_all();
  }

 private:
  enum class Verdict { kNew, kOld, kBroken };

  bool Cancelled() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cancelled_;
  }

  double SinceStart() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_)
        .count();
  }

  // Starts an attempt; false where cancelled.
  bool Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cancelled_) {
      Conclude(absl::CancelledError("cancelled"));
      return false;
    }
    context_ = std::make_unique<grpc::ClientContext>();
    if (deadline_) context_->set_deadline(*deadline_);
    v1::GenerateRequest request = request_;
    if (seed_known_) {
      request.mutable_resume()->set_seed(done_.seed);
      request.mutable_resume()->mutable_token_ids()->Assign(done_.token_ids.begin(),
                                                            done_.token_ids.end());
    }
    reader_ = routers_->inference(router_)->Generate(context_.get(), request);
    return true;
  }

  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    reader_.reset();
    context_.reset();
  }

  // Gives up the attempt under way.
  void Hang() {
    if (!reader_) return;
    context_->TryCancel();
    v1::GenerateDelta rest;
    while (reader_->Read(&rest)) {
    }
    reader_->Finish();
    Close();
  }

  // Takes a delta in.  Text cannot be cut, so a delta that is half known already counts as broken.
  Verdict Accept(v1::GenerateDelta* delta) {
    const size_t have = done_.token_ids.size();
    const size_t first = delta->token_offset();
    const size_t end = first + delta->token_ids_size();
    if (first > have || (first < have && end > have)) return Verdict::kBroken;
    if (!delta->request_id().empty()) done_.request_id = delta->request_id();
    if (delta->has_seed() && !seed_known_) {
      seed_known_ = true;
      done_.seed = delta->seed();
    }
    if (first < have && !delta->has_final()) return Verdict::kOld;
    if (first < have) {
      delta->clear_token_ids();
      delta->clear_text();
      delta->clear_logprobs();
      delta->set_token_offset(static_cast<uint32_t>(have));
    }
    if (delta->token_ids_size() > 0 && done_.ttft_ms == 0) done_.ttft_ms = SinceStart();
    done_.token_ids.insert(done_.token_ids.end(), delta->token_ids().begin(),
                           delta->token_ids().end());
    done_.text += delta->text();
    done_.logprobs.insert(done_.logprobs.end(), delta->logprobs().begin(), delta->logprobs().end());
    if (delta->has_final()) {
      done_.final = delta->final();
      finished_ = true;
    }
    failures_ = 0;
    received_ = true;
    routers_->Prefer(router_);
    return Verdict::kNew;
  }

  // An attempt failed in a way that another may not: waits and turns to the next router, or gives
  // up.
  void Broke(const std::string& why) {
    const ClientOptions& options = routers_->options();
    const int limit = received_
                          ? options.attempts_to_resume
                          : options.attempts_before_first * static_cast<int>(routers_->size());
    if (++failures_ >= limit) return Conclude(routers_->Unreachable(why));
    router_ = (router_ + 1) % routers_->size();
    if (received_) ++done_.resumes;
    // The first pass over the routers needs no pause.
    const int pass = (failures_ - 1) / static_cast<int>(routers_->size());
    const bool pause = failures_ % static_cast<int>(routers_->size()) == 0;
    if (!pause) return;
    const auto backoff = std::min<std::chrono::milliseconds>(
        options.max_backoff, options.first_backoff * (1 << std::min(pass, 10)));
    auto until = std::chrono::system_clock::now() + backoff;
    if (deadline_) until = std::min(until, *deadline_);
    Pause(until);
  }

  // Waits, but no longer than until the next router can be connected to.  In a process that only
  // calls, gRPC makes connections on the thread that waits for it: one that merely slept would
  // never see them made.
  void Pause(std::chrono::system_clock::time_point until) {
    grpc::Channel* channel = routers_->channel(router_);
    for (;;) {
      const auto now = std::chrono::system_clock::now();
      if (now >= until || Cancelled()) return;
      const auto slice = std::min(until, now + std::chrono::milliseconds(50));
      if (channel->GetState(false) == GRPC_CHANNEL_READY) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_until(lock, slice, [&] { return cancelled_; });
      } else if (channel->WaitForConnected(slice)) {
        return;
      }
    }
  }

  void Conclude(absl::Status status) {
    status_ = std::move(status);
    done_.total_ms = SinceStart();
    ended_ = true;
  }

  const std::shared_ptr<Routers> routers_;
  const v1::GenerateRequest request_;
  const std::optional<std::chrono::system_clock::time_point> deadline_;
  const std::chrono::steady_clock::time_point start_;
  size_t router_;
  Completion done_;
  bool seed_known_ = false;
  bool received_ = false;
  bool finished_ = false;  // the last delta has come
  bool ended_ = false;
  int failures_ = 0;  // in a row, without a new delta
  absl::Status status_;

  std::mutex mutex_;  // of what Cancel touches
  std::condition_variable changed_;
  bool cancelled_ = false;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateDelta>> reader_;
};

Client::Client(ClientOptions options) : routers_(std::make_shared<Routers>(std::move(options))) {}
Client::~Client() = default;

std::unique_ptr<GenerateStream> Client::StartGenerate(
    const v1::GenerateRequest& request,
    std::optional<std::chrono::system_clock::time_point> deadline) {
  return std::make_unique<Stream>(routers_, request, deadline);
}

absl::StatusOr<Completion> Client::Generate(
    const v1::GenerateRequest& request,
    const std::function<bool(const v1::GenerateDelta&)>& on_delta) {
  const std::unique_ptr<GenerateStream> stream = StartGenerate(request);
  v1::GenerateDelta delta;
  while (stream->Next(&delta)) {
    if (on_delta && !on_delta(delta)) stream->Cancel();
  }
  return stream->Finish();
}

absl::StatusOr<bool> Client::Cancel(const std::string& request_id) {
  if (routers_->size() == 0) return routers_->NoneConfigured();
  v1::CancelRequest request;
  request.set_request_id(request_id);
  bool found = false, reached = false;
  grpc::Status status;
  for (size_t i = 0; i < routers_->size() && !found; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + routers_->options().call_timeout);
    v1::CancelResponse response;
    status = routers_->inference(i)->Cancel(&context, request, &response);
    reached = reached || status.ok();
    found = status.ok() && response.found();
  }
  if (!reached) return routers_->Unreachable(status.error_message());
  return found;
}

absl::StatusOr<std::vector<uint32_t>> Client::Tokenize(const v1::TokenizeRequest& request) {
  v1::TokenizeResponse response;
  const absl::Status status = routers_->Unary([&](size_t router, grpc::ClientContext* context) {
    return routers_->inference(router)->Tokenize(context, request, &response);
  });
  if (!status.ok()) return status;
  return std::vector<uint32_t>(response.ids().begin(), response.ids().end());
}

absl::StatusOr<std::vector<uint32_t>> Client::Tokenize(const std::string& text) {
  v1::TokenizeRequest request;
  request.set_text(text);
  return Tokenize(request);
}

absl::StatusOr<std::vector<uint32_t>> Client::Tokenize(const v1::Chat& chat) {
  v1::TokenizeRequest request;
  *request.mutable_chat() = chat;
  return Tokenize(request);
}

absl::StatusOr<std::string> Client::Detokenize(const std::vector<uint32_t>& ids) {
  v1::DetokenizeRequest request;
  request.mutable_ids()->Assign(ids.begin(), ids.end());
  v1::DetokenizeResponse response;
  const absl::Status status = routers_->Unary([&](size_t router, grpc::ClientContext* context) {
    return routers_->inference(router)->Detokenize(context, request, &response);
  });
  if (!status.ok()) return status;
  return response.text();
}

absl::StatusOr<v1::Model> Client::GetModel() {
  v1::Model response;
  const absl::Status status = routers_->Unary([&](size_t router, grpc::ClientContext* context) {
    return routers_->inference(router)->GetModel(context, {}, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::ClusterState> Client::GetState() {
  v1::ClusterState response;
  const absl::Status status = routers_->Unary([&](size_t router, grpc::ClientContext* context) {
    return routers_->cluster(router)->GetState(context, {}, &response);
  });
  if (!status.ok()) return status;
  return response;
}

}  // namespace coppice
