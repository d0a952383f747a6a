#include "services/verifier/metrics.h"

namespace coppice::verifier {
namespace {

struct TotalName {
  const char* name;
  const char* help;
};

// In the order of Update's values.
constexpr TotalName kTotals[] = {
    {"verifier_rounds_total", "Draft trees verified."},
    {"verifier_drafted_tokens_total", "Tree nodes below the roots."},
    {"verifier_accepted_tokens_total", "Drafted tokens that were committed."},
    {"verifier_generated_tokens_total", "Tokens generated."},
    {"verifier_prefilled_tokens_total", "Prompt tokens computed."},
    {"verifier_repeated_answers_total", "Rounds asked for again and answered from memory."},
    {"verifier_truncated_trees_total", "Trees cut because the pool was full."},
    {"verifier_no_pages_total", "Work turned away because the pool was full."},
    {"verifier_preemptions_total", "Sequences freed to let older ones advance."},
    {"verifier_failed_sequences_total", "Sequences whose forward failed."},
    {"verifier_rejected_work_total", "Malformed work."},
    {"verifier_feature_rows_total", "Feature rows sent to drafters."},
    {"verifier_feature_rows_dropped_total", "Feature rows not sent when they came."},
    {"verifier_feature_resends_total", "Requests to send features again."},
    {"verifier_feature_connections_total", "Streams opened to drafters."},
};

}  // namespace

VerifierMetrics::VerifierMetrics(Metrics* metrics)
    : step_seconds_(metrics->Histogram("verifier_step_duration_seconds",
                                       "One step, from its arrival to its result.",
                                       Metrics::ExponentialBuckets(0.0005, 2, 16))),
      queue_seconds_(metrics->Histogram("verifier_step_queue_seconds",
                                        "How long steps wait to be taken.",
                                        Metrics::ExponentialBuckets(0.00001, 4, 10))),
      step_rows_(metrics->Histogram("verifier_step_rows", "Rows of one step's forward.",
                                    Metrics::ExponentialBuckets(1, 2, 12))),
      pages_(metrics->Gauge("verifier_pool_pages", "Pages that can be handed out.")),
      free_pages_(metrics->Gauge("verifier_pool_free_pages", "Pages that are free.")),
      leaked_pages_(metrics->Gauge("verifier_pool_leaked_pages",
                                   "Pages neither free nor owned; anything but 0 is a defect.")),
      longest_run_(metrics->Gauge("verifier_pool_longest_free_run_pages",
                                  "Longest run of adjacent free pages.")),
      sequences_(metrics->Gauge("verifier_sequences", "Sequences that have not ended.")),
      leased_(metrics->Gauge("verifier_leased", "1 while a router holds the lease.")),
      streams_(metrics->Gauge("verifier_drafter_streams", "Drafters connected.")) {
  for (const TotalName& total : kTotals) {
    totals_.push_back({&metrics->Counter(total.name, total.help), 0});
  }
}

void VerifierMetrics::OnStep(const StepResult& result) {
  constexpr double kMicro = 1e-6;
  step_seconds_.Observe(result.timing.total_us * kMicro);
  queue_seconds_.Observe(result.timing.queue_us * kMicro);
  step_rows_.Observe(static_cast<double>(result.timing.rows));
}

void VerifierMetrics::Update(const LoopSnapshot& snapshot, const FeatureCounters& features) {
  const EngineCounters& c = snapshot.counters;
  const uint64_t values[] = {c.rounds,         c.drafted,        c.accepted,          c.tokens,
                             c.prefilled,      c.repeated,       c.truncated,         c.no_pages,
                             c.preempted,      c.failed,         c.rejected,          features.rows,
                             features.dropped, features.resends, features.connections};
  static_assert(std::size(values) == std::size(kTotals));
  for (size_t i = 0; i < std::size(values); ++i) {
    const double value = static_cast<double>(values[i]);
    totals_[i].counter->Increment(value - totals_[i].told);
    totals_[i].told = value;
  }
  pages_.Set(static_cast<double>(snapshot.pool.pages));
  free_pages_.Set(static_cast<double>(snapshot.pool.free_pages));
  leaked_pages_.Set(static_cast<double>(snapshot.pool.leaked_pages));
  longest_run_.Set(static_cast<double>(snapshot.free_runs.longest));
  sequences_.Set(static_cast<double>(snapshot.live_sequences));
  leased_.Set(snapshot.owner.empty() ? 0 : 1);
  streams_.Set(static_cast<double>(features.streams));
}

}  // namespace coppice::verifier
