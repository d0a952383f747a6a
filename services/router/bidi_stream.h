// The client's end of one bidirectional stream, on the callback API.
#ifndef COPPICE_SERVICES_ROUTER_BIDI_STREAM_H_
#define COPPICE_SERVICES_ROUTER_BIDI_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "services/common/stream_writer.h"

namespace coppice::router {

// Any thread writes; `on_message` is called for each message read, in order, on gRPC's threads.
// Lives, held by itself, until the stream is done.
template <typename Request, typename Response>
class BidiStream : public grpc::ClientBidiReactor<Request, Response>,
                   public std::enable_shared_from_this<BidiStream<Request, Response>> {
 public:
  explicit BidiStream(std::function<void(const Response&)> on_message)
      : on_message_(std::move(on_message)),
        writer_(std::make_shared<StreamWriter<Request>>(
            [this](const Request& request) { this->StartWrite(&request); })) {}

  // For the call that binds this reactor, between construction and Begin.
  grpc::ClientContext* context() { return &context_; }

  void Begin() {
    self_ = this->shared_from_this();
    this->AddHold();  // for writes from outside reactions; dropped by End
    this->StartRead(&message_);
    this->StartCall();
  }

  // Never blocks.  Dropped once the stream is over.
  void Write(Request request) {
    if (writer_->Write(std::move(request)) == StreamWriter<Request>::Result::kFull) Cancel();
  }

  void Cancel() { context_.TryCancel(); }

  // Tells the peer that nothing more will come, so that it ends the stream as it should end.
  void Close() {
    writer_->Finish([this] {
      this->StartWritesDone();
      this->RemoveHold();
    });
  }

  // Waits until the stream is over.
  grpc::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_changed_.wait(lock, [&] { return done_; });
    return status_;
  }
  // False where it is not over after `limit`.
  template <typename Rep, typename Period>
  bool WaitFor(std::chrono::duration<Rep, Period> limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    return done_changed_.wait_for(lock, limit, [&] { return done_; });
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End();
    on_message_(message_);
    this->StartRead(&message_);
  }
  void OnWriteDone(bool ok) override {
    writer_->OnWriteDone(ok);
    if (!ok) End();
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<BidiStream> self = std::move(self_);
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    done_ = true;
    done_changed_.notify_all();
  }

 private:
  void End() {
    writer_->FinishNow([this] { this->RemoveHold(); });
  }

  grpc::ClientContext context_;
  const std::function<void(const Response&)> on_message_;
  const std::shared_ptr<StreamWriter<Request>> writer_;
  Response message_;
  std::shared_ptr<BidiStream> self_;
  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_BIDI_STREAM_H_
