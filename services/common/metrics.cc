#include "services/common/metrics.h"

#include <exception>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/common/server.h"

namespace coppice {

absl::StatusOr<std::unique_ptr<Metrics>> Metrics::Create(const std::string& listen, int port) {
  std::unique_ptr<Metrics> out(new Metrics);
  out->registry_ = std::make_shared<prometheus::Registry>();
  if (port == 0) return out;
  const absl::StatusOr<std::string> host = ListenHost(listen);
  if (!host.ok()) return host.status();
  const std::string at = absl::StrCat(*host, ":", port);
  try {
    out->exposer_ = std::make_unique<prometheus::Exposer>(at, 1);
    out->exposer_->RegisterCollectable(out->registry_);
  } catch (const std::exception&) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot serve metrics on ", at,
                     ": the port is in use or may not be bound; choose another with "
                     "--metrics-port (0: no metrics)"));
  }
  return out;
}

prometheus::Counter& Metrics::Counter(const std::string& name, const std::string& help,
                                      const prometheus::Labels& labels) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add(labels);
}

prometheus::Gauge& Metrics::Gauge(const std::string& name, const std::string& help,
                                  const prometheus::Labels& labels) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add(labels);
}

prometheus::Histogram& Metrics::Histogram(const std::string& name, const std::string& help,
                                          const std::vector<double>& buckets,
                                          const prometheus::Labels& labels) {
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add(labels, buckets);
}

std::vector<double> Metrics::ExponentialBuckets(double first, double factor, int count) {
  std::vector<double> out;
  for (double edge = first; count > 0; --count, edge *= factor) out.push_back(edge);
  return out;
}

}  // namespace coppice
