// How long ago an owner thread last went round its loop: the source of readiness.
#ifndef COPPICE_SERVICES_COMMON_HEARTBEAT_H_
#define COPPICE_SERVICES_COMMON_HEARTBEAT_H_

#include <atomic>

#include "services/common/clock.h"

namespace coppice {

// The loop beats before each wait and after each unit of work, and never waits longer than
// kMaxIdle, so that an old beat means a stuck loop and not an idle one.  Thread-safe.
class Heartbeat {
 public:
  static constexpr Duration kMaxIdle = std::chrono::seconds(1);

  explicit Heartbeat(const Clock* clock = Clock::Real()) : clock_(clock) { Beat(); }

  void Beat() { last_.store(clock_->Now().time_since_epoch().count(), std::memory_order_relaxed); }
  Duration Age() const {
    return clock_->Now() - TimePoint(Duration(last_.load(std::memory_order_relaxed)));
  }

 private:
  const Clock* clock_;
  std::atomic<Duration::rep> last_{0};
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_HEARTBEAT_H_
