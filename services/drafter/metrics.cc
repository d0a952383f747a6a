#include "services/drafter/metrics.h"

#include <memory>

namespace coppice::drafter {
namespace {

// Brings a Prometheus counter up to a running total.
void Raise(prometheus::Counter* counter, double total) {
  if (total > counter->Value()) counter->Increment(total - counter->Value());
}

}  // namespace

LoopObserver MakeObserver(Metrics* metrics) {
  LoopObserver out;
  auto* duration = &metrics->Histogram("drafter_draft_duration_seconds",
                                       "Time of one forward over a batch of blocks.",
                                       Metrics::ExponentialBuckets(0.0001, 2, 16));
  auto* blocks = &metrics->Histogram("drafter_draft_blocks", "Blocks in one forward.",
                                     Metrics::ExponentialBuckets(1, 2, 8));
  out.on_forward = [=](int count, float micros) {
    duration->Observe(micros * 1e-6);
    blocks->Observe(count);
  };

  auto* rows = &metrics->Counter("drafter_feature_rows_total", "Feature rows taken into contexts.");
  auto* gaps =
      &metrics->Counter("drafter_feature_gaps_total", "Times that lost rows were asked for again.");
  auto* ahead =
      &metrics->Counter("drafter_blocks_ahead_total", "Blocks drafted before they were asked for.");
  auto* used =
      &metrics->Counter("drafter_blocks_ahead_used_total", "Questions answered by those blocks.");
  auto* sequences = &metrics->Gauge("drafter_sequences", "Context slots in use.");
  auto* waiting = &metrics->Gauge("drafter_sequences_waiting", "Sequences without a slot.");
  auto* tokens = &metrics->Gauge("drafter_context_tokens", "Context positions held.");
  const std::string name = "drafter_answers_total", help = "Answers to questions, by outcome.";
  prometheus::Counter* outcomes[] = {&metrics->Counter(name, help, {{"outcome", "drafted"}}),
                                     &metrics->Counter(name, help, {{"outcome", "gap"}}),
                                     &metrics->Counter(name, help, {{"outcome", "unknown"}}),
                                     &metrics->Counter(name, help, {{"outcome", "late"}})};
  out.on_turn = [=](const EngineCounters& counters) {
    Raise(rows, counters.rows);
    Raise(gaps, counters.gaps);
    Raise(ahead, counters.ahead);
    Raise(used, counters.ahead_used);
    sequences->Set(counters.sequences);
    waiting->Set(counters.waiting);
    tokens->Set(counters.context_tokens);
    for (int i = 0; i < 4; ++i) Raise(outcomes[i], counters.outcomes[i]);
  };
  return out;
}

}  // namespace coppice::drafter
