// A safetensors image of any bytes: refused with a status, or every view lies inside it and fits
// its shape.
#include "absl/types/span.h"
#include "model/safetensors.h"
#include "model/test_files.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {

std::vector<std::string> FuzzSeeds() {
  return {
      SafetensorsOf({{"a", {1, 2, 3}}, {"b", {}}, {"c", {4}}}),
      SafetensorsImage(
          R"({"__metadata__":{"format":"pt"},"q":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]},)"
          R"("s":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},)"
          R"("t":{"dtype":"F8_E4M3","shape":[],"data_offsets":[22,23]}})",
          std::string(23, '\x7F')),
      SafetensorsImage("{}", ""),
  };
}

}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const auto tensors = ParseSafetensors(absl::MakeConstSpan(bytes, size), "input");
  if (!tensors.ok()) {
    FUZZ_CHECK(!tensors.status().message().empty());
    return 0;
  }
  size_t total = 0;
  for (const TensorView& tensor : *tensors) {
    FUZZ_CHECK(tensor.data >= bytes && tensor.data + tensor.bytes <= bytes + size);
    size_t expected = DTypeSize(tensor.dtype);
    for (const int64_t dim : tensor.shape) {
      FUZZ_CHECK(dim >= 0);
      expected *= static_cast<size_t>(dim);
    }
    FUZZ_CHECK(expected == tensor.bytes);
    const auto bad = FirstNonFinite(tensor);
    FUZZ_CHECK(!bad.has_value() || static_cast<int64_t>(*bad) < tensor.num_elements());
    FUZZ_CHECK(CheckTensor(tensor, {tensor.dtype}, tensor.shape).ok());
    total += tensor.bytes;
  }
  FUZZ_CHECK(total <= size);
  return 0;
}
