#include "services/router/scheduler_loop.h"

#include <algorithm>
#include <utility>

namespace coppice::router {

SchedulerLoop::SchedulerLoop(const SchedulerOptions& options, const Tokenizer* tokenizer,
                             const Clock* clock, VerifierLink* verifier, DrafterLink* drafter,
                             std::function<uint64_t()> random)
    : clock_(clock),
      scheduler_(options, tokenizer, clock, verifier, drafter, std::move(random)),
      heartbeat_(clock),
      not_ready_reason_(scheduler_.NotReadyReason()) {}

SchedulerLoop::~SchedulerLoop() { Stop(); }

void SchedulerLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

void SchedulerLoop::Stop() {
  queue_.Close();
  if (thread_.joinable()) thread_.join();
}

bool SchedulerLoop::Post(Event event, ReadTicket ticket) {
  return queue_.Push({std::move(event), std::move(ticket)});
}

std::string SchedulerLoop::NotReadyReason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return not_ready_reason_;
}

void SchedulerLoop::Publish() {
  pool_tokens_.store(scheduler_.pool_tokens(), std::memory_order_relaxed);
  fingerprint_.store(scheduler_.model_fingerprint(), std::memory_order_relaxed);
  std::string reason = scheduler_.NotReadyReason();
  std::lock_guard<std::mutex> lock(mutex_);
  if (reason != not_ready_reason_) not_ready_reason_ = std::move(reason);
}

void SchedulerLoop::Run() {
  std::vector<Posted> posted;
  while (true) {
    heartbeat_.Beat();
    posted.clear();
    const size_t count = queue_.PopAllUntil(
        std::min(scheduler_.NextWake(), clock_->Now() + Heartbeat::kMaxIdle), &posted);
    for (Posted& p : posted) scheduler_.Handle(std::move(p.event));
    const bool stop = count == 0 && queue_.closed();
    if (stop) scheduler_.Handle(Abandon{"the router is shutting down; resume elsewhere"});
    scheduler_.Advance();
    Publish();
    if (stop) return;
  }
}

}  // namespace coppice::router
