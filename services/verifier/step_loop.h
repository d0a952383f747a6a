// The thread that owns the engine and the lease, and the queue in front of it.
#ifndef COPPICE_SERVICES_VERIFIER_STEP_LOOP_H_
#define COPPICE_SERVICES_VERIFIER_STEP_LOOP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "services/common/clock.h"
#include "services/common/heartbeat.h"
#include "services/common/queue.h"
#include "services/verifier/engine.h"
#include "services/verifier/lease.h"
#include "services/verifier/step.h"

namespace coppice::verifier {

// One router's Step stream, seen from the loop.  Called by the loop's thread; must not block.
class StepClient {
 public:
  virtual ~StepClient() = default;
  // In the order of the steps; the first answers the hello.
  virtual void OnResult(const StepResult& result) = 0;
  // The stream ends; nothing follows.
  virtual void OnEnd(const absl::Status& status) = 0;
};

// What others may know of the loop's state.
struct LoopSnapshot {
  PoolState pool;
  PagePool::Runs free_runs;
  EngineCounters counters;
  int64_t live_sequences = 0;
  std::string owner;  // of the lease; empty: none
  StepTiming last_step;
};

struct StepLoopOptions {
  Duration lease_hold = std::chrono::seconds(10);
};

// All methods but Turn are thread-safe and return at once: they enqueue.  A session's calls are
// handled in their order.
class StepLoop {
 public:
  // `clock` must outlive this.
  StepLoop(std::unique_ptr<Engine> engine, const StepLoopOptions& options,
           const Clock* clock = Clock::Real());
  // As Stop.
  ~StepLoop();

  // Starts the thread.  Without it, tests call Turn.
  void Start();
  // Handles what is in the queue, waiting for something at most until `wait` has passed.
  // False once stopped.
  bool Turn(Duration wait);

  // A number for a stream, which must know it before the loop can answer anything.
  uint64_t NewSession() { return next_session_.fetch_add(1); }
  // The stream said hello.  Answered by a result with `resumed`, or by OnEnd.
  void Open(uint64_t session, const std::string& router, uint64_t epoch,
            std::shared_ptr<StepClient> client);
  void Submit(uint64_t session, Step step);
  // The stream is gone: as it should (`clean`: its router is done and everything is freed), or it
  // broke (everything is kept for a while).
  void Close(uint64_t session, bool clean);
  // See Engine::Resend.
  void Resend(const std::string& drafter, uint64_t sequence, int64_t from, uint64_t request);
  // Refuses admissions from now on, and once no sequence is left, ends the stream, UNAVAILABLE.
  void Drain(const std::string& why);

  // Ends the thread after what is in the queue; what is asked later goes nowhere.
  void Stop();

  LoopSnapshot snapshot() const;
  const Heartbeat& heartbeat() const { return heartbeat_; }
  // Called by the loop's thread after every step, for metrics; set before Start.
  std::function<void(const StepResult&)> on_step;

 private:
  using Event = std::function<void()>;

  void HandleStep(uint64_t session, Step step);
  void EndSession(uint64_t session, const absl::Status& status);
  void Tick();
  void Publish();

  std::unique_ptr<Engine> engine_;
  const Clock* clock_;
  Lease lease_;
  std::string draining_;  // why; empty: not
  absl::flat_hash_map<uint64_t, std::shared_ptr<StepClient>> clients_;
  StepTiming last_step_;
  std::vector<Event> batch_;

  Queue<Event> queue_;
  Heartbeat heartbeat_;
  std::atomic<uint64_t> next_session_{1};
  mutable std::mutex snapshot_mutex_;
  LoopSnapshot snapshot_;
  std::thread thread_;
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_STEP_LOOP_H_
