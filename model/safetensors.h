// One safetensors file: u64 header length (little-endian), a JSON header, then the tensors' bytes.
#ifndef COPPICE_MODEL_SAFETENSORS_H_
#define COPPICE_MODEL_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace coppice {

enum class DType {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};

size_t DTypeSize(DType dtype);       // bytes per element
const char* DTypeName(DType dtype);  // as safetensors writes it: "BF16", "F8_E4M3", …

// A tensor inside a mapped file; valid as long as the mapping's owner (Checkpoint) lives.
struct TensorView {
  std::string name;
  std::string file;  // path, for messages
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;  // row-major
  const std::byte* data =
      nullptr;  // aligned to 8 bytes at best: read through memcpy or unaligned loads
  size_t bytes = 0;

  int64_t num_elements() const;
};

// The tensors of one whole file image, in order of their offsets.  Refuses (INVALID_ARGUMENT;
// DATA_LOSS for a file shorter or longer than its header says) a header that is too long, is not
// JSON, names a tensor twice, has unknown dtypes, negative or overflowing shapes, offsets that
// overlap, leave a hole or run past the end, or byte counts that do not fit shape and dtype.  Never
// reads outside `image`.
absl::StatusOr<std::vector<TensorView>> ParseSafetensors(absl::Span<const std::byte> image,
                                                         const std::string& file);

// INVALID_ARGUMENT naming file, tensor, what was found and what was expected, unless `tensor` has
// one of `dtypes` and exactly `shape`.
absl::Status CheckTensor(const TensorView& tensor, absl::Span<const DType> dtypes,
                         absl::Span<const int64_t> shape);

// Index of the first NaN or infinity; nullopt where all values are finite (always, for integers).
// Runs at memory speed.
std::optional<size_t> FirstNonFinite(const TensorView& tensor);

// INVALID_ARGUMENT naming file, tensor and element where FirstNonFinite finds one.
absl::Status CheckFinite(const TensorView& tensor);

}  // namespace coppice

#endif  // COPPICE_MODEL_SAFETENSORS_H_
