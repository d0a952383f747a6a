// The rows of one step as the host packs them and a device reads them.
#ifndef COPPICE_MODEL_STEP_ROWS_H_
#define COPPICE_MODEL_STEP_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/ops.h"
#include "model/target.h"

namespace coppice {

// What Forward's arguments must keep to.
struct StepLimits {
  int vocab_size = 0;
  int page_size = 0;
  int64_t pages = 0;
  int64_t positions = 0;  // positions are below this
  int max_rows = 0;
};

// All arrays of a RowBatch in one block, so that a step is one upload.  Immutable.
class StepRows {
 public:
  // INVALID_ARGUMENT, naming the sequence's index, for tokens, pages, positions or ancestor words
  // out of range.
  static absl::StatusOr<StepRows> Pack(absl::Span<const SequenceRows> sequences,
                                       const StepLimits& limits);

  const std::vector<std::byte>& block() const { return block_; }
  int rows() const { return rows_; }
  // Rows (over all sequences) whose logits are asked for, and the sequence of each.
  const std::vector<int32_t>& logit_rows() const { return logit_rows_; }
  const std::vector<int32_t>& logit_sequences() const { return logit_sequences_; }

  // The batch, its arrays lying in a copy of block() at `base`.
  kernels::RowBatch At(void* base) const;

 private:
  struct Array {
    size_t offset = 0;
    kernels::DType dtype = kernels::DType::kI32;
    int64_t rows = 0;
    int64_t cols = 1;
  };
  Array Append(kernels::DType dtype, int64_t rows, int64_t cols, const void* data);

  std::vector<std::byte> block_;
  int rows_ = 0;
  int requests_ = 0;
  int max_pages_ = 0;
  Array token_, position_, request_, row_begin_, context_len_, causal_, ancestors_, page_table_;
  std::vector<int32_t> logit_rows_;
  std::vector<int32_t> logit_sequences_;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_STEP_ROWS_H_
