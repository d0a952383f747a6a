#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/simd_avx512.h"
//
#include "kernels/cpu/kernels_inl.h"

namespace coppice::kernels::cpu {

const KernelTable& Avx512Kernels() {
  static constexpr KernelTable kTable = MakeTable("avx512");
  return kTable;
}

}  // namespace coppice::kernels::cpu
