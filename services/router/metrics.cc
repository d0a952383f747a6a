#include "services/router/metrics.h"

namespace coppice::router {

RouterMetrics::RouterMetrics(Metrics* metrics, const SchedulerCounters* counters)
    : counters_(counters),
      ready_(metrics->Gauge("router_ready", "1 where new requests are taken")),
      running_(metrics->Gauge("router_requests_running", "streams being generated")),
      waiting_(metrics->Gauge("router_requests_waiting", "streams waiting for admission")),
      speculating_(metrics->Gauge("router_speculating",
                                  "1 while the drafter answers, 0 while all decoding is plain")),
      ttft_(metrics->Histogram("router_time_to_first_token_seconds",
                               "from a request's arrival to its first token",
                               Metrics::ExponentialBuckets(0.001, 2, 17))),
      itl_(metrics->Histogram("router_inter_token_latency_seconds",
                              "mean time between a stream's tokens",
                              Metrics::ExponentialBuckets(0.0005, 2, 14))),
      queue_(metrics->Histogram("router_queue_seconds", "from arrival to admission",
                                Metrics::ExponentialBuckets(0.0001, 4, 12))),
      acceptance_length_(metrics->Histogram("router_acceptance_length",
                                            "tokens committed per round, of a whole stream",
                                            {1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 12, 16})) {
  auto mirror = [&](const std::atomic<uint64_t>& from, const char* name, const char* help) {
    mirrors_.push_back({&from, &metrics->Counter(name, help)});
  };
  mirror(counters->requests, "router_requests_total", "requests taken in");
  mirror(counters->refused, "router_requests_refused_total",
         "requests refused: not ready, queue full, never fitting");
  mirror(counters->finished, "router_requests_finished_total", "streams that ended well");
  mirror(counters->cancelled, "router_requests_cancelled_total",
         "of these, ended by a cancellation, a client that went or a deadline");
  mirror(counters->failed, "router_requests_failed_total", "streams that ended with an error");
  mirror(counters->tokens, "router_generated_tokens_total", "tokens generated");
  mirror(counters->prompt_tokens, "router_prompt_tokens_total", "prompt tokens taken in");
  mirror(counters->steps, "router_steps_total", "steps sent to the verifier");
  mirror(counters->rounds, "router_rounds_total", "rounds (trees verified)");
  mirror(counters->drafted, "router_drafted_tokens_total", "tree nodes below the roots");
  mirror(counters->accepted, "router_accepted_tokens_total", "drafted nodes that were committed");
  mirror(counters->round_tokens, "router_round_tokens_total", "tokens committed by rounds");
  mirror(counters->plain_rounds, "router_plain_rounds_total",
         "rounds that wanted a draft and went without");
  mirror(counters->replays, "router_replays_total",
         "sequences admitted anew with the tokens so far");
  mirror(counters->verifier_breaks, "router_verifier_breaks_total",
         "verifier connections that were lost");
  mirror(counters->drafter_breaks, "router_drafter_breaks_total",
         "drafter connections that were lost");
}

void RouterMetrics::Update(bool ready) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Mirror& mirror : mirrors_) {
    const uint64_t now = mirror.from->load(std::memory_order_relaxed);
    mirror.to->Increment(static_cast<double>(now - mirror.copied));
    mirror.copied = now;
  }
  ready_.Set(ready ? 1 : 0);
  running_.Set(static_cast<double>(counters_->running.load(std::memory_order_relaxed)));
  waiting_.Set(static_cast<double>(counters_->waiting.load(std::memory_order_relaxed)));
  speculating_.Set(counters_->speculating.load(std::memory_order_relaxed) ? 1 : 0);
}

void RouterMetrics::Observe(const Final& final) {
  if (final.completion_tokens > 0) ttft_.Observe(final.ttft_ms / 1e3);
  if (final.completion_tokens > 1) itl_.Observe(final.itl_ms / 1e3);
  queue_.Observe(final.queue_ms / 1e3);
  if (final.rounds > 0) acceptance_length_.Observe(final.acceptance_length);
}

}  // namespace coppice::router
