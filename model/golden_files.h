// What the oracle computed (tests/oracle), for tests.
#ifndef COPPICE_MODEL_GOLDEN_FILES_H_
#define COPPICE_MODEL_GOLDEN_FILES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
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

// A model of tests/goldens/models.  A variant there holds configuration and goldens only; its
// weights are another model's, and are linked into a directory made for the test.
class GoldenModel {
 public:
  explicit GoldenModel(const std::string& name) : golden_(Source(name) + "/golden.safetensors") {
    static const std::map<std::string, std::string> kWeightsOf = {{"instruct_0905", "instruct"},
                                                                  {"experts384_eps", "experts384"}};
    const auto variant = kWeightsOf.find(name);
    if (variant == kWeightsOf.end()) {
      dir_ = Source(name);
      return;
    }
    dir_ = made_.path();
    if (name == "experts384_eps") lora_norm_eps_ = 1e-6;
    for (const std::string& from : {Source(variant->second), Source(name)}) {
      for (const auto& file : std::filesystem::directory_iterator(from)) {
        const std::string to = made_.File(file.path().filename().string());
        std::filesystem::remove(to);
        std::filesystem::create_symlink(std::filesystem::absolute(file.path()), to);
      }
    }
  }

  const std::string& dir() const { return dir_; }
  const GoldenFile& golden() const { return golden_; }
  std::optional<double> lora_norm_eps() const { return lora_norm_eps_; }

 private:
  static std::string Source(const std::string& name) { return "tests/goldens/models/" + name; }

  TempDir made_;
  std::string dir_;
  GoldenFile golden_;
  std::optional<double> lora_norm_eps_;
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
