// What the verifier tells Prometheus.
#ifndef COPPICE_SERVICES_VERIFIER_METRICS_H_
#define COPPICE_SERVICES_VERIFIER_METRICS_H_

#include <string>
#include <vector>

#include "services/common/metrics.h"
#include "services/verifier/feature_sender.h"
#include "services/verifier/step_loop.h"

namespace coppice::verifier {

class VerifierMetrics {
 public:
  // `metrics` must outlive this.
  explicit VerifierMetrics(Metrics* metrics);

  // After every step, on the loop's thread.
  void OnStep(const StepResult& result);
  // Brings totals and levels up to date; from any thread, but one at a time.
  void Update(const LoopSnapshot& snapshot, const FeatureCounters& features);

 private:
  prometheus::Histogram& step_seconds_;
  prometheus::Histogram& queue_seconds_;
  prometheus::Histogram& step_rows_;
  struct Total {
    prometheus::Counter* counter;
    double told = 0;
  };
  std::vector<Total> totals_;
  prometheus::Gauge& pages_;
  prometheus::Gauge& free_pages_;
  prometheus::Gauge& leaked_pages_;
  prometheus::Gauge& longest_run_;
  prometheus::Gauge& sequences_;
  prometheus::Gauge& leased_;
  prometheus::Gauge& streams_;
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_METRICS_H_
