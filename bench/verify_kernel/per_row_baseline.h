// The design that the verify kernel replaces, kept to be measured against: flash-decode with one
// thread block per node × head × split.  Every block reads its split of the cache for its row
// alone, so the cache is read nodes × heads times.
#ifndef COPPICE_BENCH_VERIFY_KERNEL_PER_ROW_BASELINE_H_
#define COPPICE_BENCH_VERIFY_KERNEL_PER_ROW_BASELINE_H_

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/mla_verify.h"

namespace coppice::bench {

size_t PerRowWorkspaceBytes(const coppice_mla_shape& shape, int splits);

// bf16 caches alone.  `wide`: 128-bit loads, else one value at a time.  Launches the partial kernel
// and the combine.
void PerRowAttention(const coppice_mla_shape& shape, const coppice_mla_tensors& tensors, int splits,
                     bool wide, void* workspace, cudaStream_t stream);

}  // namespace coppice::bench

#endif  // COPPICE_BENCH_VERIFY_KERNEL_PER_ROW_BASELINE_H_
