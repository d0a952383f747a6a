// The monotonic clock, injected so that what waits can be tested without waiting.
#ifndef COPPICE_SERVICES_COMMON_CLOCK_H_
#define COPPICE_SERVICES_COMMON_CLOCK_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace coppice {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;

  // The machine's own; lives for ever.
  static Clock* Real();
};

// Stands still until told otherwise.
class FakeClock : public Clock {
 public:
  TimePoint Now() const override;
  void Advance(Duration by);

 private:
  std::atomic<int64_t> ticks_{1'000'000'000};
};

// Microseconds from `from` to `to`, as the wire's timings have them.
inline float MicrosBetween(TimePoint from, TimePoint to) {
  return std::chrono::duration<float, std::micro>(to - from).count();
}

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_CLOCK_H_
