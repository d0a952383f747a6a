#include "model/step_rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace coppice {
namespace {

constexpr int64_t kTreeRows = 64;  // bits of an ancestor word

absl::Status Check(const SequenceRows& s, const StepLimits& limits) {
  const int64_t n = static_cast<int64_t>(s.tokens.size());
  const bool tree = !s.depths.empty();
  if (n < 1) return absl::InvalidArgumentError("it has no rows");
  if (s.context_len < 0) return absl::InvalidArgumentError("its context_len is negative");
  if (tree && (n > kTreeRows || static_cast<int64_t>(s.depths.size()) != n ||
               static_cast<int64_t>(s.ancestors.size()) != n)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a tree has 1 to ", kTreeRows, " rows, each with a depth and an ancestor word; got ", n,
        " rows, ", s.depths.size(), " depths, ", s.ancestors.size(), " words"));
  }
  const int64_t slots = static_cast<int64_t>(s.page_table.size()) * limits.page_size;
  if (slots < s.context_len + n) {
    return absl::InvalidArgumentError(absl::StrCat("its page table holds ", slots, " tokens; ",
                                                   s.context_len + n, " are needed"));
  }
  for (const int32_t page : s.page_table) {
    if (page < 0 || page >= limits.pages) {
      return absl::InvalidArgumentError(
          absl::StrCat("page ", page, " is not in the pool of ", limits.pages));
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (s.tokens[i] < 0 || s.tokens[i] >= limits.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token id ", s.tokens[i], " of row ", i,
                                                     " is not in 0 … ", limits.vocab_size - 1));
    }
    const int64_t depth = tree ? s.depths[i] : i;
    if (depth < 0 || s.context_len + depth >= limits.positions) {
      return absl::InvalidArgumentError(absl::StrCat("position ", s.context_len + depth, " of row ",
                                                     i, " is not below ", limits.positions));
    }
    // A row sees itself and earlier rows only.
    if (tree && s.ancestors[i] >> i != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the ancestor word of row ", i, " must have bit ", i, " as its highest"));
    }
  }
  for (const int32_t row : s.logit_rows) {
    if (row < 0 || row >= n) {
      return absl::InvalidArgumentError(
          absl::StrCat("logit row ", row, " is not one of its ", n, " rows"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StepRows> StepRows::Pack(absl::Span<const SequenceRows> sequences,
                                        const StepLimits& limits) {
  StepRows step;
  std::vector<int32_t> token, position, request, row_begin, context_len, causal;
  std::vector<uint64_t> ancestors;
  size_t max_pages = 1;
  for (size_t r = 0; r < sequences.size(); ++r) {
    const SequenceRows& s = sequences[r];
    const absl::Status status = Check(s, limits);
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", r, " of the step: ", status.message()));
    }
    const bool tree = !s.depths.empty();
    const int32_t first = static_cast<int32_t>(token.size());
    row_begin.push_back(first);
    context_len.push_back(static_cast<int32_t>(s.context_len));
    causal.push_back(tree ? 0 : 1);
    for (size_t i = 0; i < s.tokens.size(); ++i) {
      token.push_back(s.tokens[i]);
      position.push_back(
          static_cast<int32_t>(s.context_len + (tree ? s.depths[i] : static_cast<int64_t>(i))));
      request.push_back(static_cast<int32_t>(r));
      ancestors.push_back(tree ? s.ancestors[i] : 0);
    }
    for (const int32_t row : s.logit_rows) {
      step.logit_rows_.push_back(first + row);
      step.logit_sequences_.push_back(static_cast<int32_t>(r));
    }
    max_pages = std::max(max_pages, s.page_table.size());
    if (static_cast<int64_t>(token.size()) > limits.max_rows) {
      return absl::InvalidArgumentError(
          absl::StrCat("the step has more than ", limits.max_rows, " rows"));
    }
  }
  row_begin.push_back(static_cast<int32_t>(token.size()));
  std::vector<int32_t> page_table(sequences.size() * max_pages, 0);
  for (size_t r = 0; r < sequences.size(); ++r) {
    std::copy(sequences[r].page_table.begin(), sequences[r].page_table.end(),
              page_table.begin() + static_cast<int64_t>(r * max_pages));
  }

  using kernels::DType;
  step.rows_ = static_cast<int>(token.size());
  step.requests_ = static_cast<int>(sequences.size());
  step.max_pages_ = static_cast<int>(max_pages);
  step.token_ = step.Append(DType::kI32, step.rows_, 1, token.data());
  step.position_ = step.Append(DType::kI32, step.rows_, 1, position.data());
  step.request_ = step.Append(DType::kI32, step.rows_, 1, request.data());
  step.row_begin_ = step.Append(DType::kI32, step.requests_ + 1, 1, row_begin.data());
  step.context_len_ = step.Append(DType::kI32, step.requests_, 1, context_len.data());
  step.causal_ = step.Append(DType::kI32, step.requests_, 1, causal.data());
  step.ancestors_ = step.Append(DType::kU64, step.rows_, 1, ancestors.data());
  step.page_table_ = step.Append(DType::kI32, step.requests_, step.max_pages_, page_table.data());
  return step;
}

StepRows::Array StepRows::Append(kernels::DType dtype, int64_t rows, int64_t cols,
                                 const void* data) {
  constexpr size_t kAlign = 64;
  const Array array{.offset = (block_.size() + kAlign - 1) / kAlign * kAlign,
                    .dtype = dtype,
                    .rows = rows,
                    .cols = cols};
  const size_t bytes = static_cast<size_t>(rows * cols * kernels::SizeOf(dtype));
  block_.resize(array.offset + bytes);
  if (bytes > 0) std::memcpy(block_.data() + array.offset, data, bytes);
  return array;
}

kernels::RowBatch StepRows::At(void* base) const {
  const auto view = [base](const Array& array) {
    return kernels::Tensor{.data = static_cast<std::byte*>(base) + array.offset,
                           .dtype = array.dtype,
                           .rows = array.rows,
                           .cols = array.cols,
                           .stride = array.cols};
  };
  return {.rows = rows_,
          .requests = requests_,
          .max_pages = max_pages_,
          .token = view(token_),
          .position = view(position_),
          .request = view(request_),
          .row_begin = view(row_begin_),
          .context_len = view(context_len_),
          .causal = view(causal_),
          .ancestors = view(ancestors_),
          .page_table = view(page_table_)};
}

}  // namespace coppice
