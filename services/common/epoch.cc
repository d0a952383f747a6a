#include "services/common/epoch.h"

#include <random>

namespace coppice {

uint64_t RandomEpoch() {
  std::random_device entropy;
  uint64_t epoch = 0;
  while (epoch == 0) epoch = (static_cast<uint64_t>(entropy()) << 32) | entropy();
  return epoch;
}

}  // namespace coppice
