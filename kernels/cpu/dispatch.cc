#include "kernels/cpu/dispatch.h"

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace coppice::kernels::cpu {

absl::StatusOr<const KernelTable*> SelectKernels() {
  const char* wanted = std::getenv("COPPICE_CPU_ISA");
  const std::string name = wanted == nullptr ? "" : wanted;
  if (!name.empty() && name != "generic" && name != "avx2" && name != "avx512") {
    return absl::InvalidArgumentError(absl::StrCat(
        "COPPICE_CPU_ISA is '", name, "'; use generic, avx2 or avx512, or leave it unset"));
  }
#ifdef COPPICE_CPU_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
  if (avx512 && (name.empty() || name == "avx512")) return &Avx512Kernels();
  if (avx2 && (name.empty() || name == "avx2")) return &Avx2Kernels();
#endif
  if (name.empty() || name == "generic") return &GenericKernels();
  return absl::FailedPreconditionError(absl::StrCat(
      "COPPICE_CPU_ISA asks for ", name, ", which this processor does not have; leave it unset"));
}

}  // namespace coppice::kernels::cpu
