#include "kernels/cpu/packed_matrix.h"

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/bf16.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/weight_memory.h"

namespace coppice::kernels::cpu {
namespace {

constexpr int kGroup = 32;          // INT4 weights per scale
constexpr int kNibblesPerWord = 8;  // lowest first

template <typename T>
T LoadUnaligned(const void* base, int64_t byte_offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + byte_offset, sizeof(T));
  return value;
}

absl::Status Check(const HostMatrix& w) {
  if (w.rows <= 0 || w.cols <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a weight of ", w.rows, " x ", w.cols, " has nothing to multiply"));
  }
  if (w.data == nullptr) return absl::InvalidArgumentError("a weight has no data");
  int64_t row_bytes = 0;
  switch (w.encoding) {
    case HostMatrix::Encoding::kBf16:
      row_bytes = w.cols * 2;
      break;
    case HostMatrix::Encoding::kF32:
      row_bytes = w.cols * 4;
      break;
    case HostMatrix::Encoding::kInt4Group32: {
      if (w.scales == nullptr) return absl::InvalidArgumentError("an INT4 weight has no scales");
      if (w.first_col < 0 || w.first_col >= kGroup) {
        return absl::InvalidArgumentError(absl::StrCat("an INT4 rectangle begins at column ",
                                                       w.first_col, " of its group of ", kGroup));
      }
      const int64_t cols = w.first_col + w.cols;
      row_bytes = (cols + kNibblesPerWord - 1) / kNibblesPerWord * 4;
      const int64_t scale_bytes = (cols + kGroup - 1) / kGroup * 2;
      if (w.rows > 1 && w.scale_row_bytes < scale_bytes) {
        return absl::InvalidArgumentError(absl::StrCat("rows of ", w.cols, " INT4 weights need ",
                                                       scale_bytes, " bytes of scales but lie ",
                                                       w.scale_row_bytes, " apart"));
      }
      break;
    }
  }
  if (w.rows > 1 && w.row_bytes < row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("rows of ", w.cols, " weights need ", row_bytes,
                                                   " bytes but lie ", w.row_bytes, " apart"));
  }
  return absl::OkStatus();
}

// Row `row` of the rectangle as bf16 bits.
void DecodeRow(const HostMatrix& w, int64_t row, uint16_t* out) {
  if (w.encoding == HostMatrix::Encoding::kBf16) {
    std::memcpy(out, static_cast<const char*>(w.data) + row * w.row_bytes, w.cols * 2);
    return;
  }
  for (int64_t c = 0; c < w.cols; ++c) {
    const int64_t col = w.first_col + c;
    const uint32_t word =
        LoadUnaligned<uint32_t>(w.data, row * w.row_bytes + col / kNibblesPerWord * 4);
    const int value = static_cast<int>((word >> (col % kNibblesPerWord * 4)) & 15u) - 8;
    const float scale =
        Bf16ToFloat(LoadUnaligned<uint16_t>(w.scales, row * w.scale_row_bytes + col / kGroup * 2));
    out[c] = FloatToBf16(static_cast<float>(value) * scale);
  }
}

void DecodeRow(const HostMatrix& w, int64_t row, float* out) {
  std::memcpy(out, static_cast<const char*>(w.data) + row * w.row_bytes, w.cols * 4);
}

// Where (output, input) lies, in elements.
int64_t PackedIndex(int64_t output, int64_t input, int64_t inputs, bool bf16) {
  const int64_t panel = output / kLanes * (PanelBytes(inputs, bf16) / (bf16 ? 2 : 4));
  const int64_t lane = output % kLanes;
  return bf16 ? panel + input / 2 * 2 * kLanes + lane * 2 + input % 2
              : panel + input * kLanes + lane;
}

template <typename T>
void PackRows(const HostMatrix& w, int64_t inputs, bool bf16, T* panels) {
  std::vector<T> row(w.cols);
  for (int64_t r = 0; r < w.rows; ++r) {
    DecodeRow(w, r, row.data());
    if (w.transposed) {
      for (int64_t c = 0; c < w.cols; ++c) panels[PackedIndex(c, r, inputs, bf16)] = row[c];
    } else {
      for (int64_t c = 0; c < w.cols; ++c) panels[PackedIndex(r, c, inputs, bf16)] = row[c];
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Matrix>> PackedMatrix::Pack(const HostMatrix& weight) {
  if (absl::Status status = Check(weight); !status.ok()) return status;
  const int64_t outputs = weight.transposed ? weight.cols : weight.rows;
  const int64_t inputs = weight.transposed ? weight.rows : weight.cols;
  const bool bf16 = weight.encoding != HostMatrix::Encoding::kF32;
  const size_t bytes = (outputs + kLanes - 1) / kLanes * PanelBytes(inputs, bf16);
  std::shared_ptr<void> panels = AllocateWeight(bytes);
  if (panels == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for a weight of ", outputs, " x ",
                                                     inputs, ": ", bytes, " bytes asked for"));
  }
  if (bf16) {
    PackRows(weight, inputs, true, static_cast<uint16_t*>(panels.get()));
  } else {
    PackRows(weight, inputs, false, static_cast<float*>(panels.get()));
  }
  return std::unique_ptr<Matrix>(new PackedMatrix(outputs, inputs, bf16, std::move(panels)));
}

}  // namespace coppice::kernels::cpu
