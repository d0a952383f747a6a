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
#include "nlohmann/json.hpp"

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

// The config.json of a target small enough to make by hand: one dense layer, one of experts, two of
// them chosen, one shared.
struct TinyTarget {
  int vocab, hidden, heads, q_lora, kv_lora, nope, rope, v;
  int dense;  // width of the dense layer
  int experts;
  int expert;  // width of one
};

inline nlohmann::json TinyTargetConfig(const TinyTarget& t) {
  return {{"architectures", {"DeepseekV3ForCausalLM"}},
          {"model_type", "kimi_k2"},
          {"vocab_size", t.vocab},
          {"hidden_size", t.hidden},
          {"num_hidden_layers", 2},
          {"first_k_dense_replace", 1},
          {"moe_layer_freq", 1},
          {"intermediate_size", t.dense},
          {"moe_intermediate_size", t.expert},
          {"n_routed_experts", t.experts},
          {"num_experts_per_tok", 2},
          {"n_shared_experts", 1},
          {"n_group", 1},
          {"topk_group", 1},
          {"norm_topk_prob", true},
          {"routed_scaling_factor", 2.5},
          {"scoring_func", "sigmoid"},
          {"topk_method", "noaux_tc"},
          {"num_attention_heads", t.heads},
          {"num_key_value_heads", t.heads},
          {"q_lora_rank", t.q_lora},
          {"kv_lora_rank", t.kv_lora},
          {"qk_nope_head_dim", t.nope},
          {"qk_rope_head_dim", t.rope},
          {"v_head_dim", t.v},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"tie_word_embeddings", false},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 50000.0},
          {"rope_scaling",
           {{"type", "yarn"},
            {"factor", 4.0},
            {"original_max_position_embeddings", 1024},
            {"beta_fast", 32.0},
            {"beta_slow", 1.0},
            {"mscale", 1.0},
            {"mscale_all_dim", 1.0}}},
          {"max_position_embeddings", 4096},
          {"eos_token_id", 3}};
}

}  // namespace coppice

#endif  // COPPICE_MODEL_TEST_FILES_H_
