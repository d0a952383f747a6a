// A number drawn once per process start, which tells a restarted peer from its former self.
#ifndef COPPICE_SERVICES_COMMON_EPOCH_H_
#define COPPICE_SERVICES_COMMON_EPOCH_H_

#include <cstdint>

namespace coppice {

// From the system's entropy; never 0.
uint64_t RandomEpoch();

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_EPOCH_H_
