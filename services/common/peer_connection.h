// Keeps one peer connected: a thread that asks it who it is, serves one stream until it breaks,
// waits, and connects again.
#ifndef COPPICE_SERVICES_COMMON_PEER_CONNECTION_H_
#define COPPICE_SERVICES_COMMON_PEER_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "services/common/bidi_stream.h"
#include "services/common/rpc_status.h"

namespace coppice {

template <typename Request, typename Response>
class PeerConnection {
 public:
  using Stream = BidiStream<Request, Response>;

  // Called on the connection's own thread, never at the same time.
  struct Hooks {
    // Asks the peer who it is, with this context, which has a deadline.
    std::function<absl::Status(grpc::ClientContext* context)> prepare;
    // Makes a stream and binds the call to it.
    std::function<std::shared_ptr<Stream>(uint64_t connection)> open;
    // The stream has begun: a hello can be written to it.
    std::function<void(uint64_t connection, const std::shared_ptr<Stream>& stream)> opened;
    // It could not be had, or is over: nothing about this connection follows.
    std::function<void(uint64_t connection, absl::Status status)> down;
    // Whether to connect at all; where not, the thread sleeps until Wake.  Empty: always.
    std::function<bool()> wanted;
  };
  struct Options {
    // The pause before connecting again: doubled from the first to the longest until Succeeded.
    std::chrono::milliseconds first_retry{500};
    std::chrono::milliseconds longest_retry{500};
    // After a refusal (FAILED_PRECONDITION, INVALID_ARGUMENT, UNIMPLEMENTED), which waiting will
    // hardly cure.
    std::chrono::milliseconds refused_retry{500};
  };

  PeerConnection(Hooks hooks, const Options& options)
      : hooks_(std::move(hooks)), options_(options), retry_(options.first_retry) {}
  ~PeerConnection() { Stop(); }

  // How long a peer may take to say who it is, and to end the stream once told that nothing more
  // comes.
  static constexpr std::chrono::seconds kPrepareLimit{3};
  static constexpr std::chrono::milliseconds kCloseLimit{500};

  void Start() {
    thread_ = std::thread([this] { Run(); });
  }
  // Something may be wanted now.
  void Wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }
  // The peer has shown that it works with us: the next pause is the first again.
  void Succeeded() {
    std::lock_guard<std::mutex> lock(mutex_);
    retry_ = options_.first_retry;
  }

  // Begins to stop; never blocks.
  void Close() {
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      stream = stream_;
      if (preparing_ != nullptr) preparing_->TryCancel();
      changed_.notify_all();
    }
    if (stream != nullptr) stream->Close();
  }
  // Closes the stream and joins the thread.
  void Stop() {
    Close();
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stream = stream_;
    }
    if (stream != nullptr && !stream->WaitFor(kCloseLimit)) stream->Cancel();
    if (thread_.joinable()) thread_.join();
  }

  // From any thread; never blocks.  Dropped where `connection` is not the current one.
  void Write(uint64_t connection, Request request) {
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (connection == connection_) stream = stream_;
    }
    if (stream != nullptr) stream->Write(std::move(request));
  }

 private:
  void Run() {
    uint64_t connection = 0;
    while (Wanted()) {
      ++connection;
      absl::Status status = Prepare();
      if (status.ok()) status = Serve(connection);
      const bool refused = absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) ||
                           absl::IsUnimplemented(status);
      hooks_.down(connection, std::move(status));
      std::unique_lock<std::mutex> lock(mutex_);
      const std::chrono::milliseconds pause = refused ? options_.refused_retry : retry_;
      retry_ = std::min(2 * retry_, options_.longest_retry);
      changed_.wait_for(lock, pause, [&] { return stop_; });
    }
  }

  // False once stopped.
  bool Wanted() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      woken_ = false;
      lock.unlock();
      const bool wanted = !hooks_.wanted || hooks_.wanted();
      lock.lock();
      if (wanted) break;
      changed_.wait(lock, [&] { return stop_ || woken_; });
    }
    return !stop_;
  }

  absl::Status Prepare() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPrepareLimit);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      preparing_ = &context;
      if (stop_) context.TryCancel();
    }
    absl::Status status = hooks_.prepare(&context);
    std::lock_guard<std::mutex> lock(mutex_);
    preparing_ = nullptr;
    return status;
  }

  // Until the stream is over; why it is.
  absl::Status Serve(uint64_t connection) {
    const std::shared_ptr<Stream> stream = hooks_.open(connection);
    stream->Begin();  // before anybody else can reach it
    bool stopped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      connection_ = connection;
      stream_ = stream;
      stopped = stop_;
    }
    if (stopped) stream->Cancel();
    hooks_.opened(connection, stream);
    absl::Status status = FromGrpcStatus(stream->Wait());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stream_.reset();
    }
    return status.ok() ? absl::UnavailableError("the peer closed the stream") : status;
  }

  const Hooks hooks_;
  const Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  bool woken_ = false;
  std::chrono::milliseconds retry_;
  grpc::ClientContext* preparing_ = nullptr;
  uint64_t connection_ = 0;
  std::shared_ptr<Stream> stream_;
  std::thread thread_;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_PEER_CONNECTION_H_
