// The verify attention's formula in double precision on the GPU, a plain kernel with nothing shared
// with the fast ones: what tests and benchmarks compare with.  mla_verify_test.cu checks it against
// a host loop.
#ifndef COPPICE_KERNELS_CUDA_MLA_REFERENCE_H_
#define COPPICE_KERNELS_CUDA_MLA_REFERENCE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/cuda/mla_verify.h"

namespace coppice::mla {

// One row of the output: a head of a node of a request.
struct RowId {
  int32_t request;
  int32_t node;
  int32_t head;
};

// How far a row of the kernel's output is from the reference.
struct RowError {
  double difference_squared;  // Σ (out − ref)²; NaN where the output holds one
  double reference_squared;   // Σ ref²
  double lse_difference;  // |lse − ref|, natural logarithm; 0 where both are −∞; NaN stays
  double lse;             // the reference's
};

// Every live row (node < node_counts) of the tensors, in order.
std::vector<RowId> LiveRows(const coppice_mla_shape& shape,
                            const std::vector<int32_t>& node_counts);

// Computes `rows` in double precision from the tensors' query, cache, table, lengths and words, and
// compares tensors.output and tensors.lse with them.  `weights`, where not null, is a device array
// [batch][weights_stride] that multiplies each position's softmax weight (0 leaves a position out,
// 2 counts it twice): with it a test can show that its data would betray a lost or doubled
// position.  Synchronises; `errors` is on the host.
cudaError_t CompareWithReference(const coppice_mla_shape& shape, const coppice_mla_tensors& tensors,
                                 const std::vector<RowId>& rows, const float* weights,
                                 int64_t weights_stride, std::vector<RowError>* errors);

// The reference alone: outputs [rows][512] and natural log-sum-exp [rows], both on the host.
cudaError_t ReferenceAttention(const coppice_mla_shape& shape, const coppice_mla_tensors& tensors,
                               const std::vector<RowId>& rows, std::vector<double>* outputs,
                               std::vector<double>* lse);

// Relative error of all rows together, ‖out − ref‖ / ‖ref‖; NaN where a value is.
double RelativeError(const std::vector<RowError>& errors);

}  // namespace coppice::mla

#endif  // COPPICE_KERNELS_CUDA_MLA_REFERENCE_H_
