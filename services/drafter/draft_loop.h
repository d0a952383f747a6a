// The drafter's one owner thread: a queue in front of the engine.
#ifndef COPPICE_SERVICES_DRAFTER_DRAFT_LOOP_H_
#define COPPICE_SERVICES_DRAFTER_DRAFT_LOOP_H_

#include <functional>
#include <memory>
#include <thread>

#include "model/drafter.h"
#include "services/common/clock.h"
#include "services/common/heartbeat.h"
#include "services/common/queue.h"
#include "services/drafter/draft_engine.h"

namespace coppice::drafter {

// What the loop tells as it goes; called on its thread, must not block.  Either may be empty.
struct LoopObserver {
  std::function<void(int blocks, float micros)> on_forward;
  std::function<void(const EngineCounters&)> on_turn;
};

class DraftLoop {
 public:
  // Starts the thread.  The model stays this object's.
  DraftLoop(std::unique_ptr<Drafter> model, const EngineOptions& options,
            LoopObserver observer = {}, const Clock* clock = Clock::Real());
  // As Stop.
  ~DraftLoop();

  // From any thread.  False once stopped: the event is dropped.
  bool Push(Event event) { return events_.Push(std::move(event)); }
  // Ends the thread after the turn it is in; queries that wait are dropped.
  void Stop();

  const Heartbeat& heartbeat() const { return heartbeat_; }
  // Slots in use after the last turn.  Thread-safe.
  int sequences() const { return sequences_.load(std::memory_order_relaxed); }

 private:
  void Run();

  const std::unique_ptr<Drafter> model_;
  const Clock* const clock_;
  const LoopObserver observer_;
  Heartbeat heartbeat_;
  DraftEngine engine_;  // the thread's alone
  Queue<Event> events_;
  std::atomic<int> sequences_{0};
  std::thread thread_;
};

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_DRAFT_LOOP_H_
