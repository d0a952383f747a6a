// A weight in the CPU backend's layout.
#ifndef COPPICE_KERNELS_CPU_PACKED_MATRIX_H_
#define COPPICE_KERNELS_CPU_PACKED_MATRIX_H_

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace coppice::kernels::cpu {

// Panels as kernel_table.h describes them.
class PackedMatrix : public Matrix {
 public:
  // INVALID_ARGUMENT for an empty or inconsistent rectangle, RESOURCE_EXHAUSTED if it does not fit.
  static absl::StatusOr<std::unique_ptr<Matrix>> Pack(const HostMatrix& weight);

  bool bf16() const { return bf16_; }
  const void* panels() const { return panels_.get(); }

 private:
  PackedMatrix(int64_t outputs, int64_t inputs, bool bf16, std::shared_ptr<void> panels)
      : Matrix(outputs, inputs), bf16_(bf16), panels_(std::move(panels)) {}

  bool bf16_;
  std::shared_ptr<void> panels_;
};

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_PACKED_MATRIX_H_
