// The router's metrics for Prometheus.
#ifndef COPPICE_SERVICES_ROUTER_METRICS_H_
#define COPPICE_SERVICES_ROUTER_METRICS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "services/common/metrics.h"
#include "services/router/scheduler.h"
#include "services/router/stream.h"

namespace coppice::router {

// Thread-safe.
class RouterMetrics {
 public:
  RouterMetrics(Metrics* metrics, const SchedulerCounters* counters);

  // Copies the scheduler's counters; to be called a few times a second.
  void Update(bool ready);
  // A stream's figures, at its end.
  void Observe(const Final& final);

 private:
  struct Mirror {
    const std::atomic<uint64_t>* from;
    prometheus::Counter* to;
    uint64_t copied = 0;
  };

  const SchedulerCounters* const counters_;
  std::mutex mutex_;
  std::vector<Mirror> mirrors_;
  prometheus::Gauge& ready_;
  prometheus::Gauge& running_;
  prometheus::Gauge& waiting_;
  prometheus::Gauge& speculating_;
  prometheus::Histogram& ttft_;
  prometheus::Histogram& itl_;
  prometheus::Histogram& queue_;
  prometheus::Histogram& acceptance_length_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_METRICS_H_
