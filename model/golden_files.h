// What the oracle computed (tests/oracle), for tests.
#ifndef COPPICE_MODEL_GOLDEN_FILES_H_
#define COPPICE_MODEL_GOLDEN_FILES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/safetensors.h"
#include "model/test_files.h"

namespace coppice {

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& path) : image_(ReadTestFile(path)) {
    absl::StatusOr<std::vector<TensorView>> tensors = ParseSafetensors(
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(image_.data()), image_.size()),
        path);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    if (!tensors.ok()) return;
    for (TensorView& tensor : *tensors) tensors_[tensor.name] = std::move(tensor);
  }

  bool Has(const std::string& name) const { return tensors_.count(name) > 0; }
  const std::vector<int64_t>& Shape(const std::string& name) const {
    return tensors_.at(name).shape;
  }
  // The values of an F32, I32 or BF16 tensor.
  std::vector<float> F32(const std::string& name) const { return Values<float>(name, DType::kF32); }
  std::vector<int32_t> I32(const std::string& name) const {
    return Values<int32_t>(name, DType::kI32);
  }
  std::vector<uint16_t> Bf16(const std::string& name) const {
    return Values<uint16_t>(name, DType::kBF16);
  }

 private:
  template <typename T>
  std::vector<T> Values(const std::string& name, DType dtype) const {
    const TensorView& tensor = tensors_.at(name);
    EXPECT_EQ(tensor.dtype, dtype) << name;
    std::vector<T> values(tensor.bytes / sizeof(T));
    std::memcpy(values.data(), tensor.data, tensor.bytes);
    return values;
  }

  std::string image_;
  std::map<std::string, TensorView> tensors_;
};

// max |a - b| / max |b|.
inline double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  double difference = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
    difference = std::max(difference, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return difference / largest;
}

}  // namespace coppice

#endif  // COPPICE_MODEL_GOLDEN_FILES_H_
