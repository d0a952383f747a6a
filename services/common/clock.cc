#include "services/common/clock.h"

namespace coppice {
namespace {

class RealClock : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace

Clock* Clock::Real() {
  static RealClock* clock = new RealClock;
  return clock;
}

TimePoint FakeClock::Now() const {
  return TimePoint(Duration(ticks_.load(std::memory_order_relaxed)));
}

void FakeClock::Advance(Duration by) { ticks_.fetch_add(by.count(), std::memory_order_relaxed); }

}  // namespace coppice
