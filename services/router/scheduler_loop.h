// The scheduler on a thread of its own, behind a queue.
#ifndef COPPICE_SERVICES_ROUTER_SCHEDULER_LOOP_H_
#define COPPICE_SERVICES_ROUTER_SCHEDULER_LOOP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "services/common/heartbeat.h"
#include "services/common/queue.h"
#include "services/common/read_gate.h"
#include "services/router/scheduler.h"

namespace coppice::router {

class SchedulerLoop {
 public:
  // All pointers must outlive this.
  SchedulerLoop(const SchedulerOptions& options, const Tokenizer* tokenizer, const Clock* clock,
                VerifierLink* verifier, DrafterLink* drafter, std::function<uint64_t()> random);
  // Stops.
  ~SchedulerLoop();

  void Start();
  // Handles what is queued, ends every stream UNAVAILABLE and joins the thread.  Later events are
  // refused.
  void Stop();

  // From any thread; never blocks.  False once stopped: the event is dropped.  The ticket, if any,
  // is dropped after the turn: what answers the event has been sent by then.
  bool Post(Event event, ReadTicket ticket = nullptr);

  // From any thread.
  const SchedulerCounters& counters() const { return scheduler_.counters(); }
  const Heartbeat& heartbeat() const { return heartbeat_; }
  std::string NotReadyReason() const;
  int64_t pool_tokens() const { return pool_tokens_.load(std::memory_order_relaxed); }
  uint64_t model_fingerprint() const { return fingerprint_.load(std::memory_order_relaxed); }

 private:
  struct Posted {
    Event event;
    ReadTicket ticket;
  };

  void Run();
  void Publish();

  const Clock* const clock_;
  Scheduler scheduler_;  // the thread's alone
  Queue<Posted> queue_;
  Heartbeat heartbeat_;
  std::atomic<int64_t> pool_tokens_{0};
  std::atomic<uint64_t> fingerprint_{0};
  mutable std::mutex mutex_;
  std::string not_ready_reason_;
  std::thread thread_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_SCHEDULER_LOOP_H_
