#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/simd_avx2.h"
//
#include "kernels/cpu/kernels_inl.h"

namespace coppice::kernels::cpu {

const KernelTable& Avx2Kernels() {
  static constexpr KernelTable kTable = MakeTable("avx2");
  return kTable;
}

}  // namespace coppice::kernels::cpu
