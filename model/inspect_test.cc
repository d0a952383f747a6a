#include "model/inspect.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/test_files.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string Golden(const std::string& name) { return "tests/goldens/models/" + name; }

const PartSize* Find(const Inspection& inspection, const std::string& part,
                     const std::string& form) {
  for (const PartSize& size : inspection.parts) {
    if (size.part == part && size.form == form) return &size;
  }
  return nullptr;
}

TEST(Inspect, TheDemo) {
  const Inspection demo = Inspect("models/demo", {.drafter_dir = "", .check_values = true});
  EXPECT_THAT(demo.refused, IsEmpty());
  EXPECT_EQ(demo.release, "the form of Kimi-K2.6, in other sizes");
  EXPECT_EQ(demo.chat_template, "k2.6");
  EXPECT_EQ(demo.base_tokens, 4032);
  EXPECT_GT(demo.named_special_tokens, 10);
  EXPECT_LT(demo.named_special_tokens, 64);
  EXPECT_THAT(demo.drafter, HasSubstr("DFlash"));
  ASSERT_EQ(demo.ranks.size(), 4u);
  for (const RankSize& rank : demo.ranks) EXPECT_EQ(rank.refused, "");
  EXPECT_GT(demo.ranks[0].bytes, demo.ranks[3].bytes * 3);
  ASSERT_NE(Find(demo, "routed experts", "INT4"), nullptr);
  EXPECT_EQ(Find(demo, "routed experts", "INT4")->matrices, 3 * 16 * 3);
  EXPECT_THAT(InspectionText(demo),
              AllOf(HasSubstr("Kimi-K2.6"), HasSubstr("refused        nothing"),
                    Not(HasSubstr("REFUSED"))));
  const auto json = InspectionJson(demo);
  EXPECT_EQ(json["cache_bytes_per_token"]["bf16"], (512 + 64) * 4 * 2);
  EXPECT_EQ(json["refused"].size(), 0u);
}

TEST(Inspect, NamesReleasesAndForms) {
  const struct {
    const char* name;
    const char* release;
    const char* form;  // of the routed experts
  } cases[] = {{"instruct", "Kimi-K2-Instruct,", "FP8"},
               {"thinking", "Kimi-K2-Thinking,", "INT4"},
               {"bf16", "Kimi-K2-Instruct,", "BF16"},
               {"int4", "Kimi-K2.5 or K2.6,", "INT4"}};
  for (const auto& c : cases) {
    const Inspection inspection =
        Inspect(Golden(c.name), {.drafter_dir = "", .check_values = true});
    EXPECT_THAT(inspection.release, HasSubstr(c.release)) << c.name;
    EXPECT_NE(Find(inspection, "routed experts", c.form), nullptr) << c.name;
    // These directories hold no tokenizer, which a cluster would refuse.
    EXPECT_THAT(inspection.refused,
                ElementsAre(HasSubstr("tiktoken.model"), HasSubstr("has no chat template")));
  }
  const Inspection mixed = Inspect(Golden("mixed"));
  for (const char* form : {"INT4", "BF16", "FP8"}) {
    ASSERT_NE(Find(mixed, "routed experts", form), nullptr) << form;
    EXPECT_EQ(Find(mixed, "routed experts", form)->matrices, 2 * 2 * 3) << form;
  }
  EXPECT_EQ(Inspect(Golden("int4")).unused, 2);      // vision
  EXPECT_EQ(Inspect(Golden("instruct")).unused, 2);  // rotary_emb.inv_freq
  EXPECT_EQ(Inspect(Golden("thinking")).unused, 0);
}

TEST(Inspect, SaysWhatIsRefusedAndTellsTheRest) {
  EXPECT_THAT(Inspect("/no/such/place").refused, ElementsAre("/no/such/place is not a directory"));
  TempDir empty;
  EXPECT_THAT(Inspect(empty.path()).refused, ElementsAre(HasSubstr("config.json does not exist"),
                                                         HasSubstr("holds no checkpoint")));

  TempDir dir;
  for (const auto& file : std::filesystem::directory_iterator("models/demo")) {
    if (file.is_regular_file()) {
      std::filesystem::create_symlink(std::filesystem::absolute(file.path()),
                                      dir.File(file.path().filename().string()));
    }
  }
  EXPECT_THAT(Inspect(dir.path()).refused, IsEmpty());
  EXPECT_THAT(Inspect(dir.path(), {.drafter_dir = dir.path(), .check_values = false}).refused,
              ElementsAre(AllOf(HasSubstr(dir.path()), HasSubstr("/config.json: key "))));
  std::filesystem::remove(dir.File("chat_template.jinja"));
  EXPECT_THAT(Inspect(dir.path()).refused, ElementsAre(HasSubstr("has no chat template")));
  std::filesystem::remove(dir.File("model-00002-of-00002.safetensors"));
  const Inspection lost = Inspect(dir.path());
  EXPECT_THAT(lost.refused, Contains(HasSubstr("a shard is missing")));
  EXPECT_TRUE(lost.config.has_value());
  EXPECT_EQ(lost.CacheBytesPerToken(Inspection::Cache::kFp8), (512 + 16 + 128) * 4);
  EXPECT_THAT(InspectionText(lost), AllOf(HasSubstr("REFUSED"), HasSubstr("Kimi-K2.5 or K2.6")));
  nlohmann::json config = nlohmann::json::parse(ReadTestFile("models/demo/config.json"));
  config["text_config"]["scoring_func"] = "softmax";
  std::filesystem::remove(dir.File("config.json"));
  dir.Write("config.json", config.dump());
  EXPECT_THAT(Inspect(dir.path()).refused,
              ElementsAre(HasSubstr("text_config.scoring_func is \"softmax\""),
                          HasSubstr("a shard is missing")));
}

// A checkpoint of the released sizes, its values a hole in a sparse file.
class Sparse {
 public:
  void Add(const std::string& name, const char* dtype, std::vector<int64_t> shape, int64_t size) {
    for (const int64_t n : shape) size *= n;
    absl::StrAppend(&header_, header_.empty() ? "{" : ",", "\"", name, "\":{\"dtype\":\"", dtype,
                    "\",\"shape\":[", absl::StrJoin(shape, ","), "],\"data_offsets\":[", bytes_,
                    ",", bytes_ + size, "]}");
    bytes_ += size;
  }
  void Bf16(const std::string& name, std::vector<int64_t> shape) { Add(name, "BF16", shape, 2); }

  // The first bytes of the data.
  std::string front;

  void Write(const TempDir& dir, const nlohmann::json& config) const {
    dir.Write("config.json", config.dump());
    const std::string image = SafetensorsImage(header_ + "}", front);
    dir.Write("model.safetensors", image);
    const int64_t size = static_cast<int64_t>(image.size() - front.size()) + bytes_;
    ASSERT_EQ(truncate(dir.File("model.safetensors").c_str(), size), 0);
  }

 private:
  std::string header_;
  int64_t bytes_ = 0;
};

nlohmann::json K2Config(bool int4) {
  nlohmann::json text = nlohmann::json::parse(R"({
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61,
    "first_k_dense_replace": 1, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.827,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "max_position_embeddings": 131072, "eos_token_id": 163586,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                     "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}})");
  if (!int4) return text;
  return {{"model_type", "kimi_k25"}, {"text_config", text}};
}

void AddK2(Sparse* file, bool int4) {
  const std::string prefix = int4 ? "language_model." : "";
  const auto linear = [&](const std::string& name, int64_t rows, int64_t cols) {
    if (int4) return file->Bf16(prefix + name + ".weight", {rows, cols});
    file->Add(name + ".weight", "F8_E4M3", {rows, cols}, 1);
    file->Add(name + ".weight_scale_inv", "F32", {(rows + 127) / 128, (cols + 127) / 128}, 4);
  };
  const auto expert = [&](const std::string& name, int64_t rows, int64_t cols) {
    if (!int4) return linear(name, rows, cols);
    file->Add(prefix + name + ".weight_packed", "I32", {rows, cols / 8}, 4);
    file->Bf16(prefix + name + ".weight_scale", {rows, cols / 32});
  };
  const auto mlp = [&](const auto& add, const std::string& name, int64_t width) {
    add(name + "gate_proj", width, 7168);
    add(name + "up_proj", width, 7168);
    add(name + "down_proj", 7168, width);
  };
  // Shapes first, so that what is not zero in the file is at its beginning.
  for (int layer = 1; int4 && layer < 61; ++layer) {
    for (int e = 0; e < 384; ++e) {
      for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
        const bool down = name[0] == 'd';
        file->Add(absl::StrCat(prefix, "model.layers.", layer, ".mlp.experts.", e, ".", name,
                               ".weight_shape"),
                  "I32", {2}, 4);
        const int32_t shape[2] = {down ? 7168 : 2048, down ? 2048 : 7168};
        file->front.append(reinterpret_cast<const char*>(shape), sizeof(shape));
      }
    }
  }
  file->Bf16(prefix + "model.embed_tokens.weight", {163840, 7168});
  file->Bf16(prefix + "lm_head.weight", {163840, 7168});
  file->Bf16(prefix + "model.norm.weight", {7168});
  for (int layer = 0; layer < 61; ++layer) {
    const std::string p = absl::StrCat("model.layers.", layer, ".");
    file->Bf16(prefix + p + "input_layernorm.weight", {7168});
    file->Bf16(prefix + p + "post_attention_layernorm.weight", {7168});
    file->Bf16(prefix + p + "self_attn.q_a_layernorm.weight", {1536});
    file->Bf16(prefix + p + "self_attn.kv_a_layernorm.weight", {512});
    linear(p + "self_attn.q_a_proj", 1536, 7168);
    linear(p + "self_attn.q_b_proj", 12288, 1536);
    linear(p + "self_attn.kv_a_proj_with_mqa", 576, 7168);
    linear(p + "self_attn.kv_b_proj", 16384, 512);
    linear(p + "self_attn.o_proj", 7168, 8192);
    if (!int4) file->Bf16(p + "self_attn.rotary_emb.inv_freq", {56});
    if (layer == 0) {
      mlp(linear, p + "mlp.", 18432);
      continue;
    }
    file->Bf16(prefix + p + "mlp.gate.weight", {384, 7168});
    file->Add(prefix + p + "mlp.gate.e_score_correction_bias", "F32", {384}, 4);
    mlp(linear, p + "mlp.shared_experts.", 2048);
    for (int e = 0; e < 384; ++e) mlp(expert, absl::StrCat(p, "mlp.experts.", e, "."), 2048);
  }
  for (int i = 0; int4 && i < 335; ++i) file->Bf16(absl::StrCat("vision_tower.", i), {1});
}

// Tensor counts, bytes per rank and cache sizes of the released models.
TEST(Inspect, SizesOfTheReleasedModels) {
  for (const bool int4 : {true, false}) {
    Sparse file;
    AddK2(&file, int4);
    TempDir dir;
    file.Write(dir, K2Config(int4));
    const Inspection k2 = Inspect(dir.path());
    EXPECT_THAT(k2.refused, ElementsAre(HasSubstr("tiktoken.model"), HasSubstr("chat template")));
    EXPECT_EQ(k2.release, int4 ? "Kimi-K2.5 or K2.6" : "Kimi-K2-Instruct");
    EXPECT_EQ(k2.tensors, int4 ? 208550 : 139644);
    EXPECT_EQ(k2.unused, int4 ? 335 : 61);
    EXPECT_EQ(k2.CacheBytesPerToken(Inspection::Cache::kBf16), 70272);
    EXPECT_EQ(k2.CacheBytesPerToken(Inspection::Cache::kFp8), 61 * 656);
    int64_t parameters = 163840ll * 7168;  // the embedding's
    for (const PartSize& part : k2.parts) parameters += part.parameters;
    EXPECT_NEAR(static_cast<double>(parameters), 1026.4e9, 0.1e9);
    ASSERT_EQ(k2.ranks.size(), 4u);
    EXPECT_EQ(k2.ranks[3].refused, "");
    if (int4) {
      EXPECT_EQ(Find(k2, "routed experts", "INT4")->bytes, 60ll * 384 * 24'772'608);
      // 76.18 GB with an eighth of the embedding, which stays on the host.
      EXPECT_NEAR(static_cast<double>(k2.ranks[3].bytes + k2.embedding_bytes / 8), 76.18e9, 0.01e9);
    } else {
      EXPECT_NEAR(static_cast<double>(k2.bytes), 958.5 * (1 << 30), 0.1 * (1 << 30));
      // Decoded to bf16.
      EXPECT_GT(k2.ranks[0].bytes, 2 * k2.bytes - 10'000'000'000);
    }
  }
}

}  // namespace
}  // namespace coppice
