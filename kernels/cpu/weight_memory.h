// Memory for weights, in huge pages where the system has them.
#ifndef COPPICE_KERNELS_CPU_WEIGHT_MEMORY_H_
#define COPPICE_KERNELS_CPU_WEIGHT_MEMORY_H_

#include <cstddef>
#include <memory>

namespace coppice::kernels::cpu {

// Zeroed, aligned to 64 bytes; null where there is no memory.  Thread-safe.
//
// A forward reads every weight once, so in pages of 4 KiB it misses the translation buffers once
// per page and leaves none of what was in them: not for itself, nor for the code that sends its
// result.  Weights therefore share slabs of huge pages, which are given back with the last weight
// in them.
std::shared_ptr<void> AllocateWeight(size_t bytes);

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_WEIGHT_MEMORY_H_
