// The client's end of one bidirectional stream, on the callback API.
#ifndef COPPICE_SERVICES_COMMON_BIDI_STREAM_H_
#define COPPICE_SERVICES_COMMON_BIDI_STREAM_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_callback.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "services/common/read_gate.h"
#include "services/common/stream_writer.h"

namespace coppice {

// Any thread writes.  Messages are read one at a time: the next once the ticket of the last is
// gone.  Lives, held by itself, until the stream is done.
template <typename Request, typename Response>
class BidiStream : public grpc::ClientBidiReactor<Request, Response>,
                   public std::enable_shared_from_this<BidiStream<Request, Response>> {
 public:
  // Called on gRPC's threads, never after Wait has returned; the second may be empty.
  struct Hooks {
    std::function<void(const Response&, ReadTicket)> message;  // in order
    std::function<void()> written;                             // one message has left
  };

  explicit BidiStream(Hooks hooks, typename StreamWriter<Request>::Options options = {})
      : hooks_(std::move(hooks)),
        writer_(std::make_shared<StreamWriter<Request>>(
            [this](const Request& request) { this->StartWrite(&request); }, std::move(options))),
        gate_(std::make_shared<ReadGate>([this] { this->StartRead(&message_); })) {}

  // For the call that binds this reactor, between construction and Begin.
  grpc::ClientContext* context() { return &context_; }

  void Begin() {
    self_ = this->shared_from_this();
    this->AddHold();  // for writes and reads from outside reactions; dropped by End and Close
    this->StartRead(&message_);
    this->StartCall();
  }

  // Never blocks.  Dropped once the stream is over; a peer that lets the queue overflow is cut off.
  void Write(Request request) {
    if (writer_->Write(std::move(request)) == StreamWriter<Request>::Result::kFull) Cancel();
  }
  // Bytes written that have not left.
  size_t queued_bytes() const { return writer_->bytes(); }

  void Cancel() { context_.TryCancel(); }

  // Tells the peer that nothing more will come, so that it ends the stream as it should end.
  void Close() {
    writer_->Finish([this] {
      gate_->Free();
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
    Response message;
    message.Swap(&message_);
    const ReadTicket ticket = gate_->Took();
    hooks_.message(message, ticket);
    if (ticket == nullptr) this->StartRead(&message_);
  }
  void OnWriteDone(bool ok) override {
    writer_->OnWriteDone(ok);
    if (!ok) return End();
    if (hooks_.written) hooks_.written();
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<BidiStream> self = std::move(self_);
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    done_ = true;
    done_changed_.notify_all();
  }

 private:
  // What the peer said before its last word must be read, whoever holds a ticket: only then does
  // gRPC tell the status.
  void End() {
    writer_->FinishNow([this] {
      gate_->Free();
      this->RemoveHold();
    });
  }

  const Hooks hooks_;
  grpc::ClientContext context_;
  const std::shared_ptr<StreamWriter<Request>> writer_;
  const std::shared_ptr<ReadGate> gate_;
  Response message_;
  std::shared_ptr<BidiStream> self_;
  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_BIDI_STREAM_H_
