#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "model/json_file.h"

namespace coppice {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

// The format's own limit on the header.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxRank = 16;

struct DTypeInfo {
  DType dtype;
  const char* name;
  size_t size;
};

constexpr DTypeInfo kDTypes[] = {
    {DType::kBool, "BOOL", 1},      {DType::kU8, "U8", 1},          {DType::kI8, "I8", 1},
    {DType::kF8E4M3, "F8_E4M3", 1}, {DType::kF8E5M2, "F8_E5M2", 1}, {DType::kU16, "U16", 2},
    {DType::kI16, "I16", 2},        {DType::kF16, "F16", 2},        {DType::kBF16, "BF16", 2},
    {DType::kU32, "U32", 4},        {DType::kI32, "I32", 4},        {DType::kF32, "F32", 4},
    {DType::kU64, "U64", 8},        {DType::kI64, "I64", 8},        {DType::kF64, "F64", 8},
};

const DTypeInfo& Info(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info;
  }
  return kDTypes[1];
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

absl::Status TensorError(const std::string& file, const std::string& tensor, std::string what) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": tensor ", tensor, " ", what));
}

// The value as a number in [0, 2^63), or nullopt.
std::optional<uint64_t> Natural(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return number;
}

// Reads one header entry; on return `*begin` is its offset into the data section.
absl::StatusOr<TensorView> ParseEntry(const std::string& name, const json& entry,
                                      absl::Span<const std::byte> data, const std::string& file,
                                      uint64_t* begin) {
  if (!entry.is_object())
    return TensorError(file, name, "has a header entry that is not an object");
  const auto dtype = entry.find("dtype");
  const auto shape = entry.find("shape");
  const auto offsets = entry.find("data_offsets");
  if (dtype == entry.end() || !dtype->is_string()) {
    return TensorError(file, name, "has no dtype in the header");
  }
  if (shape == entry.end() || !shape->is_array() || shape->size() > kMaxRank) {
    return TensorError(
        file, name,
        absl::StrCat("has no shape in the header (a list of at most ", kMaxRank, " sizes)"));
  }
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
    return TensorError(file, name, "has no data_offsets in the header (a list of begin and end)");
  }

  TensorView view;
  view.name = name;
  view.file = file;
  const std::string& dtype_name = dtype->get_ref<const std::string&>();
  const DTypeInfo* info = nullptr;
  for (const DTypeInfo& candidate : kDTypes) {
    if (dtype_name == candidate.name) info = &candidate;
  }
  if (info == nullptr) {
    return TensorError(file, name, absl::StrCat("has the unknown dtype \"", dtype_name, "\""));
  }
  view.dtype = info->dtype;

  uint64_t expected_bytes = info->size;
  bool empty = false;
  for (const json& dim : *shape) {
    const std::optional<uint64_t> size = Natural(dim);
    if (!size.has_value()) {
      return TensorError(file, name,
                         "has a size in its shape that is not a whole number from 0 to 2^63-1");
    }
    view.shape.push_back(static_cast<int64_t>(*size));
    if (*size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(expected_bytes, *size, &expected_bytes)) {
      return TensorError(file, name, "has a shape whose byte count overflows 64 bits");
    }
  }
  if (empty) expected_bytes = 0;

  const std::optional<uint64_t> first = Natural((*offsets)[0]);
  const std::optional<uint64_t> last = Natural((*offsets)[1]);
  if (!first.has_value() || !last.has_value() || *first > *last) {
    return TensorError(file, name, "has data_offsets that are not two ascending whole numbers");
  }
  if (*last - *first != expected_bytes) {
    return TensorError(
        file, name,
        absl::StrCat("takes ", *last - *first, " bytes in the header, but ", dtype_name, " ",
                     ShapeText(view.shape), " takes ", expected_bytes));
  }
  if (*last > data.size()) {
    return absl::DataLossError(absl::StrCat(file, ": tensor ", name, " ends at byte ", *last,
                                            " of the data, but the file holds ", data.size(),
                                            ": the file is truncated (copy it again)"));
  }
  view.data = data.data() + *first;
  view.bytes = static_cast<size_t>(expected_bytes);
  *begin = *first;
  return view;
}

// Index of the first of n values whose exponent bits, `mask`, are all set.  The mask ends below the
// sign bit, so adding its lowest bit to a value's exponent carries into the sign bit exactly where
// all are set; no carry leaves the value, which lets one 64-bit addition test several.
template <typename Word>
std::optional<size_t> FirstWithExponent(const std::byte* data, size_t n, Word mask) {
  constexpr size_t kPerWord = sizeof(uint64_t) / sizeof(Word);
  constexpr size_t kBlock = 64 * kPerWord;
  const uint64_t ones = ~uint64_t{0} / static_cast<Word>(~Word{0});  // 1 in every lane
  const uint64_t masks = ones * mask;
  const uint64_t lowest = ones * static_cast<Word>(mask & (~mask + 1));
  const uint64_t signs = masks + lowest;

  size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    uint64_t found = 0;
    for (size_t k = 0; k < kBlock; k += kPerWord) {
      uint64_t word;
      std::memcpy(&word, data + (i + k) * sizeof(Word), sizeof(word));
      found |= (word & masks) + lowest;
    }
    // `masks` has no sign bits, so what remains of a lane's carry is its sign bit.
    if ((found & signs) != 0) break;
  }
  for (; i < n; ++i) {
    Word value;
    std::memcpy(&value, data + i * sizeof(Word), sizeof(value));
    if ((value & mask) == mask) return i;
  }
  return std::nullopt;
}

}  // namespace

size_t DTypeSize(DType dtype) { return Info(dtype).size; }

const char* DTypeName(DType dtype) { return Info(dtype).name; }

int64_t TensorView::num_elements() const { return static_cast<int64_t>(bytes / DTypeSize(dtype)); }

absl::StatusOr<std::vector<TensorView>> ParseSafetensors(absl::Span<const std::byte> image,
                                                         const std::string& file) {
  uint64_t header_bytes = 0;
  if (image.size() < sizeof(header_bytes)) {
    return absl::DataLossError(
        absl::StrCat(file, " is ", image.size(), " bytes long, too short for a safetensors file"));
  }
  std::memcpy(&header_bytes, image.data(), sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(file, " claims a header of ", header_bytes,
                                                   " bytes (at most ", kMaxHeaderBytes,
                                                   "): it is not a safetensors file"));
  }
  image.remove_prefix(sizeof(header_bytes));
  if (header_bytes > image.size()) {
    return absl::DataLossError(absl::StrCat(file, " ends inside its header (", image.size(), " of ",
                                            header_bytes,
                                            " bytes): the file is truncated (copy it again)"));
  }
  const std::string_view text(reinterpret_cast<const char*>(image.data()),
                              static_cast<size_t>(header_bytes));
  const absl::Span<const std::byte> data = image.subspan(static_cast<size_t>(header_bytes));
  absl::StatusOr<json> header = ParseJsonObject(text, absl::StrCat(file, ": the header"));
  if (!header.ok()) return header.status();

  std::vector<std::pair<uint64_t, TensorView>> found;
  found.reserve(header->size());
  for (const auto& [name, entry] : header->items()) {
    if (name == "__metadata__") continue;
    uint64_t begin = 0;
    absl::StatusOr<TensorView> view = ParseEntry(name, entry, data, file, &begin);
    if (!view.ok()) return view.status();
    found.emplace_back(begin, *std::move(view));
  }
  // An empty tensor may share its offset with the next one.
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first, a.second.bytes) < std::make_pair(b.first, b.second.bytes);
  });

  std::vector<TensorView> tensors;
  tensors.reserve(found.size());
  uint64_t end = 0;
  for (auto& [begin, view] : found) {
    if (begin < end) {
      return TensorError(file, view.name,
                         absl::StrCat("overlaps tensor ", tensors.back().name,
                                      " (it begins at byte ", begin, ", before byte ", end, ")"));
    }
    if (begin > end) {
      return TensorError(
          file, view.name,
          absl::StrCat("begins at byte ", begin, ", which leaves a hole after byte ", end));
    }
    end = begin + view.bytes;
    tensors.push_back(std::move(view));
  }
  if (end != data.size()) {
    return absl::DataLossError(absl::StrCat(file, " holds ", data.size(),
                                            " bytes of data, but its header accounts for ", end,
                                            ": the file is oversized (copy it again)"));
  }
  return tensors;
}

absl::Status CheckTensor(const TensorView& tensor, absl::Span<const DType> dtypes,
                         absl::Span<const int64_t> shape) {
  const bool known = std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end();
  const bool fits = absl::MakeConstSpan(tensor.shape) == shape;
  if (known && fits) return absl::OkStatus();
  const std::string expected = absl::StrJoin(dtypes, " or ", [](std::string* out, DType dtype) {
    absl::StrAppend(out, DTypeName(dtype));
  });
  return TensorError(tensor.file, tensor.name,
                     absl::StrCat("is ", DTypeName(tensor.dtype), " ", ShapeText(tensor.shape),
                                  "; expected ", expected, " ", ShapeText(shape)));
}

std::optional<size_t> FirstNonFinite(const TensorView& tensor) {
  const size_t n = static_cast<size_t>(tensor.num_elements());
  switch (tensor.dtype) {
    case DType::kBF16:
      return FirstWithExponent<uint16_t>(tensor.data, n, 0x7F80);
    case DType::kF16:
      return FirstWithExponent<uint16_t>(tensor.data, n, 0x7C00);
    case DType::kF32:
      return FirstWithExponent<uint32_t>(tensor.data, n, 0x7F800000u);
    case DType::kF64:
      return FirstWithExponent<uint64_t>(tensor.data, n, 0x7FF0000000000000ull);
    case DType::kF8E4M3:  // no infinity; NaN is all ones
      return FirstWithExponent<uint8_t>(tensor.data, n, 0x7F);
    case DType::kF8E5M2:
      return FirstWithExponent<uint8_t>(tensor.data, n, 0x7C);
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kU16:
    case DType::kI16:
    case DType::kU32:
    case DType::kI32:
    case DType::kU64:
    case DType::kI64:
      return std::nullopt;
  }
  return std::nullopt;
}

absl::Status CheckFinite(const TensorView& tensor) {
  const std::optional<size_t> index = FirstNonFinite(tensor);
  if (!index.has_value()) return absl::OkStatus();
  return TensorError(tensor.file, tensor.name,
                     absl::StrCat("has a value that is not finite (element ", *index, " of ",
                                  tensor.num_elements(), "): the checkpoint is damaged"));
}

}  // namespace coppice
