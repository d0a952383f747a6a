#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/simd_generic.h"
//
#include "kernels/cpu/kernels_inl.h"

namespace coppice::kernels::cpu {

const KernelTable& GenericKernels() {
  static constexpr KernelTable kTable = MakeTable("generic");
  return kTable;
}

}  // namespace coppice::kernels::cpu
