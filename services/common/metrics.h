// Prometheus metrics and where they are served.
#ifndef COPPICE_SERVICES_COMMON_METRICS_H_
#define COPPICE_SERVICES_COMMON_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace coppice {

// Names are in base units with the unit as suffix (`drafter_draft_duration_seconds`), counters end
// in `_total`; label sets are fixed and small.  What the functions return lives as long as this and
// is thread-safe.
class Metrics {
 public:
  // Serves /metrics on `port`, where the service itself listens (host:port): who may reach the one
  // may reach the other.  Port 0: nowhere.  INVALID_ARGUMENT where `listen` is no host:port,
  // FAILED_PRECONDITION where the port cannot be had.
  static absl::StatusOr<std::unique_ptr<Metrics>> Create(const std::string& listen, int port);

  prometheus::Counter& Counter(const std::string& name, const std::string& help,
                               const prometheus::Labels& labels = {});
  prometheus::Gauge& Gauge(const std::string& name, const std::string& help,
                           const prometheus::Labels& labels = {});
  prometheus::Histogram& Histogram(const std::string& name, const std::string& help,
                                   const std::vector<double>& buckets,
                                   const prometheus::Labels& labels = {});
  prometheus::Registry& registry() { return *registry_; }

  // `count` buckets from `first`, each `factor` times the one before.
  static std::vector<double> ExponentialBuckets(double first, double factor, int count);

 private:
  Metrics() = default;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_METRICS_H_
