// Which of the kernel tables this machine runs.
#ifndef COPPICE_KERNELS_CPU_DISPATCH_H_
#define COPPICE_KERNELS_CPU_DISPATCH_H_

#include "absl/status/statusor.h"
#include "kernels/cpu/kernel_table.h"

namespace coppice::kernels::cpu {

// The widest table the processor supports, or the one that the environment variable COPPICE_CPU_ISA
// names (generic, avx2, avx512).  INVALID_ARGUMENT for another name, FAILED_PRECONDITION for one it
// does not support.
absl::StatusOr<const KernelTable*> SelectKernels();

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_DISPATCH_H_
