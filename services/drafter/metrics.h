// What the draft loop tells, as Prometheus metrics.
#ifndef COPPICE_SERVICES_DRAFTER_METRICS_H_
#define COPPICE_SERVICES_DRAFTER_METRICS_H_

#include "services/common/metrics.h"
#include "services/drafter/draft_loop.h"

namespace coppice::drafter {

// `metrics` must outlive the loop.
LoopObserver MakeObserver(Metrics* metrics);

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_METRICS_H_
