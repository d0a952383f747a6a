// A checkpoint index of any bytes over two sound shards: refused with a status, or all it names can
// be read.
#include "model/checkpoint.h"
#include "model/test_files.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {
namespace {

const TempDir& Directory() {
  static const TempDir dir;
  static const bool written = [] {
    dir.Write("one.safetensors", SafetensorsOf({{"a", {1, 2, 3}}}));
    dir.Write("two.safetensors", SafetensorsOf({{"b", {4}}, {"c", {5, 6}}}));
    return true;
  }();
  (void)written;
  return dir;
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {
      R"({"metadata":{"total_size":24},"weight_map":{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}})",
      R"({"weight_map":{"c":"two.safetensors"}})",
      R"({"weight_map":{"a":"two.safetensors","b":"../x","c":3}})",
  };
}

}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  Directory().Write("model.safetensors.index.json", {reinterpret_cast<const char*>(data), size});
  const auto checkpoint = Checkpoint::Open(Directory().path());
  if (!checkpoint.ok()) {
    FUZZ_CHECK(!checkpoint.status().message().empty());
    return 0;
  }
  for (const std::string& name : (*checkpoint)->names()) {
    FUZZ_CHECK((*checkpoint)->Find(name).ok());
    FUZZ_CHECK(name == "a" || name == "b" || name == "c");
  }
  return 0;
}
