// The write queue of a callback reactor: gRPC allows one write at a time and aborts on a second.
#ifndef COPPICE_SERVICES_COMMON_STREAM_WRITER_H_
#define COPPICE_SERVICES_COMMON_STREAM_WRITER_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace coppice {

// Any thread writes; the reactor forwards OnWriteDone.  Held by shared_ptr, so that an owner thread
// may keep writing to a stream whose reactor is gone: Write returns kClosed then.
//
// Invariant: `start` and `finish` are never called with the lock held, never at the same time, and
// nothing is called after `finish`.  The reactor therefore lives through every `start`: a server
// reactor until its Finish, which only `finish` calls; a client reactor if it took a hold before
// StartCall and `finish` drops that hold (after WritesDone or TryCancel as it likes).
template <typename Message>
class StreamWriter {
 public:
  struct Options {
    // A write that would take the queue beyond this is refused with kFull.  The message being
    // written counts.
    size_t max_bytes = 64 << 20;
    // Where set and a message already waits behind the one being written: joins `next` to the end
    // of `*last` and returns true, or returns false where they cannot be joined.  So a slow reader
    // gets fewer, larger messages.
    std::function<bool(Message* last, const Message& next)> coalesce;
  };
  enum class Result { kQueued, kFull, kClosed };

  // `start` begins one write (StartWrite(&message)); the message stays until OnWriteDone.
  // `finish` ends the stream; it is called once, after the last write, with what Finish was given.
  StreamWriter(std::function<void(const Message&)> start, Options options = {})
      : start_(std::move(start)), options_(std::move(options)) {}

  Result Write(Message message) {
    const size_t bytes = message.ByteSizeLong();
    const Message* first = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_ || broken_) return Result::kClosed;
      if (bytes_ + bytes > options_.max_bytes && !queue_.empty()) return Result::kFull;
      bytes_ += bytes;
      if (writing_ && queue_.size() > 1 && options_.coalesce &&
          options_.coalesce(&queue_.back().message, message)) {
        queue_.back().bytes += bytes;
        return Result::kQueued;
      }
      queue_.push_back({std::move(message), bytes});
      if (writing_) return Result::kQueued;
      writing_ = true;
      first = &queue_.front().message;
    }
    start_(*first);
    return Result::kQueued;
  }

  // From the reactor.  `ok` false means that the peer is gone: what waits is dropped.
  void OnWriteDone(bool ok) {
    std::function<void()> finish;
    const Message* next = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      bytes_ -= queue_.front().bytes;
      queue_.pop_front();
      if (!ok) {
        broken_ = true;
        queue_.clear();
        bytes_ = 0;
      }
      if (!queue_.empty()) {
        next = &queue_.front().message;
      } else {
        writing_ = false;
        finish = std::exchange(finish_, nullptr);
      }
    }
    if (next) start_(*next);
    if (finish) finish();
  }

  // Closes the stream once all that waits is written.  Later calls do nothing.
  void Finish(std::function<void()> finish) { End(std::move(finish), false); }
  // The same, but drops what waits; for a cancelled stream.
  void FinishNow(std::function<void()> finish) { End(std::move(finish), true); }

  size_t bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

 private:
  struct Waiting {
    Message message;
    size_t bytes;
  };

  void End(std::function<void()> finish, bool drop) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) {
        if (drop) DropWaiting();
        return;
      }
      closed_ = true;
      if (drop) DropWaiting();
      if (writing_) {
        finish_ = std::move(finish);
        return;
      }
    }
    finish();
  }

  // All but the message being written, which gRPC still reads.
  void DropWaiting() {
    while (queue_.size() > (writing_ ? 1u : 0u)) {
      bytes_ -= queue_.back().bytes;
      queue_.pop_back();
    }
  }

  const std::function<void(const Message&)> start_;
  const Options options_;
  mutable std::mutex mutex_;
  std::deque<Waiting> queue_;  // the front is being written while writing_
  size_t bytes_ = 0;
  bool writing_ = false;
  bool closed_ = false;
  bool broken_ = false;  // a write failed: the stream only awaits its Finish
  std::function<void()> finish_;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_STREAM_WRITER_H_
