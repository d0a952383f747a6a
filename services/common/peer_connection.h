// Keeps one peer connected: a thread that connects, serves one stream until it breaks, waits, and
// connects again.
#ifndef COPPICE_SERVICES_ROUTER_PEER_CONNECTION_H_
#define COPPICE_SERVICES_ROUTER_PEER_CONNECTION_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "services/common/bidi_stream.h"
#include "services/common/clock.h"
#include "services/common/rpc_status.h"

namespace coppice::router {

template <typename Request, typename Response>
class PeerConnection {
 public:
  using Stream = BidiStream<Request, Response>;

  struct Hooks {
    // Asks the peer who it is, on the connection's own thread; may block for as long as its
    // deadline.
    std::function<absl::Status(uint64_t connection)> prepare;
    // Makes a stream and binds the call to it.
    std::function<std::shared_ptr<Stream>(uint64_t connection)> open;
    // The stream has begun: it can be written to.
    std::function<void(uint64_t connection, Stream* stream)> opened;
    // It could not be had, or is over.
    std::function<void(uint64_t connection, absl::Status status)> down;
  };

  PeerConnection(Hooks hooks, Duration retry) : hooks_(std::move(hooks)), retry_(retry) {}
  ~PeerConnection() { Stop(); }
  // How long a peer may take to end the stream when it is told that nothing more comes.
  static constexpr std::chrono::milliseconds kCloseLimit{500};

  void Start() {
    thread_ = std::thread([this] { Run(); });
  }

  // Closes the stream and joins the thread.
  void Stop() {
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      stream = stream_;
    }
    changed_.notify_all();
    if (stream != nullptr) {
      stream->Close();
      if (!stream->WaitFor(kCloseLimit)) stream->Cancel();
    }
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
    while (true) {
      ++connection;
      absl::Status status = hooks_.prepare(connection);
      if (status.ok()) {
        std::shared_ptr<Stream> stream = hooks_.open(connection);
        stream->Begin();  // before anybody else can reach it
        bool stopped;
        {
          std::lock_guard<std::mutex> lock(mutex_);
          connection_ = connection;
          stream_ = stream;
          stopped = stop_;
        }
        if (stopped) stream->Cancel();
        hooks_.opened(connection, stream.get());
        status = FromGrpcStatus(stream->Wait());
        if (status.ok()) status = absl::UnavailableError("the peer closed the stream");
        std::lock_guard<std::mutex> lock(mutex_);
        stream_.reset();
      }
      hooks_.down(connection, std::move(status));
      std::unique_lock<std::mutex> lock(mutex_);
      if (changed_.wait_for(lock, retry_, [&] { return stop_; })) return;
    }
  }

  const Hooks hooks_;
  const Duration retry_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  uint64_t connection_ = 0;
  std::shared_ptr<Stream> stream_;
  std::thread thread_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_PEER_CONNECTION_H_
