// The queue in front of an owner thread: many threads push, one pops.
#ifndef COPPICE_SERVICES_COMMON_QUEUE_H_
#define COPPICE_SERVICES_COMMON_QUEUE_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "services/common/clock.h"

namespace coppice {

// First in, first out, unbounded: what is pushed must be bounded by the protocol (one batch in
// flight per stream, …). After Close() pushes are refused and pops return what is left, then
// nothing.
template <typename T>
class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // False after Close(); the item is dropped then.
  bool Push(T item) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return false;
      items_.push_back(std::move(item));
    }
    changed_.notify_one();
    return true;
  }

  // Waits until something is there, or until `deadline`, or until closed; then moves all there is
  // to the end of `out`, in order.  Returns how many; 0 at the deadline or when closed and empty.
  size_t PopAllUntil(TimePoint deadline, std::vector<T>* out) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return closed_ || !items_.empty(); });
    return TakeAll(out);
  }

  // The same without a deadline.
  size_t PopAll(std::vector<T>* out) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return TakeAll(out);
  }

  // The same without waiting.
  size_t TryPopAll(std::vector<T>* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    return TakeAll(out);
  }

  // Waits for one item; nothing at the deadline or when closed and empty.
  std::optional<T> PopUntil(TimePoint deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return closed_ || !items_.empty(); });
    return TakeOne();
  }

  // The same without a deadline.
  std::optional<T> Pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return TakeOne();
  }

  void Close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

  bool closed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return items_.size();
  }

 private:
  size_t TakeAll(std::vector<T>* out) {
    const size_t n = items_.size();
    for (T& item : items_) out->push_back(std::move(item));
    items_.clear();
    return n;
  }

  std::optional<T> TakeOne() {
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_QUEUE_H_
