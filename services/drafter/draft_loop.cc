#include "services/drafter/draft_loop.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace coppice::drafter {

DraftLoop::DraftLoop(std::unique_ptr<Drafter> model, const EngineOptions& options,
                     LoopObserver observer, const Clock* clock)
    : model_(std::move(model)),
      clock_(clock),
      observer_(std::move(observer)),
      heartbeat_(clock),
      engine_(model_.get(), options, clock, observer_.on_forward),
      thread_([this] { Run(); }) {}

DraftLoop::~DraftLoop() { Stop(); }

void DraftLoop::Stop() {
  events_.Close();
  if (thread_.joinable()) thread_.join();
}

void DraftLoop::Run() {
  std::vector<Event> events;
  while (!events_.closed()) {
    heartbeat_.Beat();
    const TimePoint idle = clock_->Now() + Heartbeat::kMaxIdle;
    events_.PopAllUntil(std::min(idle, engine_.NextDeadline().value_or(idle)), &events);
    heartbeat_.Beat();
    engine_.Turn(absl::MakeSpan(events));
    // A round waits for answers and nothing for acknowledgements: what came during the forward, as
    // a rule the question that was drafted ahead of, goes first.
    if (std::vector<Event> more; events_.TryPopAll(&more) > 0) {
      engine_.Turn(absl::MakeSpan(more));
      std::move(more.begin(), more.end(), std::back_inserter(events));
    }
    engine_.SendAcks();
    events.clear();
    const EngineCounters counters = engine_.counters();
    sequences_.store(counters.sequences, std::memory_order_relaxed);
    if (observer_.on_turn) observer_.on_turn(counters);
  }
}

}  // namespace coppice::drafter
