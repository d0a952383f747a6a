// Files that tests make.
#ifndef COPPICE_MODEL_TEST_FILES_H_
#define COPPICE_MODEL_TEST_FILES_H_

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"

namespace coppice {

// A directory of its own for one test; removed with all that is in it.
class TempDir {
 public:
  TempDir() {
    // In memory where the system has such a place: fuzzers write thousands of files.
    const bool in_memory = access("/dev/shm", W_OK) == 0;
    std::string name = (in_memory ? "/dev/shm" : ::testing::TempDir()) + "/coppice-test-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }
  void Write(std::string_view name, std::string_view content) const {
    std::ofstream file(File(name), std::ios::binary);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    ASSERT_TRUE(file.good()) << File(name);
  }

 private:
  std::string path_;
};

inline std::string ReadTestFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// A safetensors image with this header, verbatim, and `data` behind it.
inline std::string SafetensorsImage(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string image(sizeof(length), '\0');
  std::memcpy(image.data(), &length, sizeof(length));
  return image.append(header).append(data);
}

// One F32 tensor for an image's header and data.
struct TestTensor {
  std::string name;
  std::vector<float> values;
};

inline std::string SafetensorsOf(const std::vector<TestTensor>& tensors) {
  std::string header = "{";
  std::string data;
  for (const TestTensor& tensor : tensors) {
    const size_t bytes = tensor.values.size() * sizeof(float);
    if (header.size() > 1) header += ",";
    header += "\"" + tensor.name + "\":{\"dtype\":\"F32\",\"shape\":[" +
              std::to_string(tensor.values.size()) + "],\"data_offsets\":[" +
              std::to_string(data.size()) + "," + std::to_string(data.size() + bytes) + "]}";
    data.append(reinterpret_cast<const char*>(tensor.values.data()), bytes);
  }
  return SafetensorsImage(header + "}", data);
}

}  // namespace coppice

#endif  // COPPICE_MODEL_TEST_FILES_H_
