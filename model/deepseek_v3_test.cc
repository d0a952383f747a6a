// Every layer against transformers' DeepseekV3ForCausalLM, which computes attention in the plain
// form: agreement is also that of the absorbed form with it.
#include "model/deepseek_v3.h"

#include <numeric>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "model/golden_files.h"
#include "model/traced_target.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

std::string Directory(const std::string& name) { return "tests/goldens/models/" + name; }

template <typename T>
std::vector<T> Slice(const std::vector<T>& all, size_t i, size_t n) {
  return std::vector<T>(all.begin() + i * n, all.begin() + (i + 1) * n);
}

class Golden : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

void ExpectGolden(const GoldenFile& golden, const std::string& name, const Trace& trace) {
  const std::vector<float> hidden = golden.F32(name + ".hidden");
  ASSERT_EQ(static_cast<int64_t>(trace.hidden.size()), golden.Shape(name + ".hidden")[0]);
  for (size_t l = 0; l < trace.hidden.size(); ++l) {
    EXPECT_LE(RelativeError(trace.hidden[l], Slice(hidden, l, trace.hidden[l].size())), 1e-5)
        << name << ", layer " << l;
  }
  const std::vector<int32_t> experts = golden.I32(name + ".experts");
  const std::vector<float> weights = golden.F32(name + ".expert_weights");
  ASSERT_EQ(static_cast<int64_t>(trace.chosen.size()), golden.Shape(name + ".experts")[0]);
  for (size_t l = 0; l < trace.chosen.size(); ++l) {
    EXPECT_EQ(trace.chosen[l], Slice(experts, l, trace.chosen[l].size()))
        << name << ", mixture-of-experts layer " << l;
    EXPECT_LE(RelativeError(trace.weights[l], Slice(weights, l, trace.weights[l].size())), 1e-5)
        << name << ", mixture-of-experts layer " << l;
  }
  EXPECT_LE(RelativeError(trace.logits, golden.F32(name + ".logits")), 2e-5) << name;
}

TEST_P(Golden, PromptInOneChunk) {
  const auto& [name, tp] = GetParam();
  const GoldenModel made(name);
  const GoldenFile& golden = made.golden();
  TracedTarget model(made.dir(), tp, 64, made.lora_norm_eps());
  const std::vector<int32_t> ids = golden.I32("prompt.ids");
  std::vector<int32_t> all(ids.size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int32_t> pages = model.PageTable(static_cast<int64_t>(ids.size()));
  ExpectGolden(golden, "prompt",
               model.Run({.context_len = 0,
                          .tokens = ids,
                          .depths = {},
                          .ancestors = {},
                          .page_table = pages,
                          .logit_rows = all}));
}

// A chain of nodes whose depths jump to positions where only YaRN's scaled frequencies are right.
TEST_P(Golden, PositionsToTheLast) {
  const auto& [name, tp] = GetParam();
  const GoldenModel made(name);
  const GoldenFile& golden = made.golden();
  TracedTarget model(made.dir(), tp, 64, made.lora_norm_eps());
  const std::vector<int32_t> ids = golden.I32("far.ids");
  const std::vector<int32_t> positions = golden.I32("far.positions");
  ASSERT_EQ(positions.back(), model.config().max_position_embeddings - 1);
  // To the bit, since one rounding of a frequency shows in the logits out there.
  ASSERT_EQ(model.config().InvFreq(), golden.F32("inv_freq"));
  std::vector<int32_t> all(ids.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<uint64_t> chain;
  for (size_t i = 0; i < ids.size(); ++i) chain.push_back((uint64_t{2} << i) - 1);
  const std::vector<int32_t> pages = model.PageTable(static_cast<int64_t>(ids.size()));
  ExpectGolden(golden, "far",
               model.Run({.context_len = 0,
                          .tokens = ids,
                          .depths = positions,
                          .ancestors = chain,
                          .page_table = pages,
                          .logit_rows = all}));
}

INSTANTIATE_TEST_SUITE_P(
    Models, Golden,
    ::testing::Combine(::testing::Values("int4", "bf16", "experts384", "instruct", "instruct_0905",
                                         "thinking", "mixed", "experts384_eps"),
                       ::testing::Values(1, 8)),
    [](const auto& info) {
      return std::get<0>(info.param) + "_tp" + std::to_string(std::get<1>(info.param));
    });

std::vector<float> PromptLogits(const std::string& dir, const GoldenFile& golden) {
  TracedTarget model(dir, 1, 64);
  const std::vector<int32_t> ids = golden.I32("prompt.ids");
  std::vector<int32_t> all(ids.size());
  std::iota(all.begin(), all.end(), 0);
  return model
      .Run({.context_len = 0,
            .tokens = ids,
            .depths = {},
            .ancestors = {},
            .page_table = model.PageTable(static_cast<int64_t>(ids.size())),
            .logit_rows = all})
      .logits;
}

// A test of the two readings of the norms' epsilon that could not tell them apart would be none.
TEST(LoraNormEps, TheTwoReadingsDiffer) {
  const GoldenModel transformers("experts384_eps");
  const GoldenModel engines("experts384");
  EXPECT_GT(RelativeError(transformers.golden().F32("prompt.logits"),
                          engines.golden().F32("prompt.logits")),
            1e-3);
}

// What transformers 5 writes of the same K2.6 checkpoint: rope_parameters with rope_theta inside,
// quantization_config at the top too or only there, deepseek_v3 as the text's model_type.
TEST(SameModelInOtherForms, RedumpedConfiguration) {
  const GoldenFile golden(Directory("int4") + "/golden.safetensors");
  const std::vector<float> expected = PromptLogits(Directory("int4"), golden);
  nlohmann::json config = nlohmann::json::parse(ReadTestFile(Directory("int4") + "/config.json"));
  nlohmann::json& text = config["text_config"];
  text["model_type"] = "deepseek_v3";
  text["rope_parameters"] = text["rope_scaling"];
  text["rope_parameters"]["rope_type"] = text["rope_parameters"]["type"];
  text["rope_parameters"].erase("type");
  text["rope_parameters"]["rope_theta"] = text["rope_theta"];
  text.erase("rope_scaling");
  text.erase("rope_theta");
  config["quantization_config"] = text["quantization_config"];
  text.erase("quantization_config");
  TempDir dir;
  for (const auto& file : std::filesystem::directory_iterator(Directory("int4"))) {
    if (!file.is_regular_file() || file.path().filename() == "config.json") continue;
    std::filesystem::create_symlink(std::filesystem::absolute(file.path()),
                                    dir.File(file.path().filename().string()));
  }
  dir.Write("config.json", config.dump());
  EXPECT_EQ(PromptLogits(dir.path(), golden), expected);
}

// A bf16 export of a wrapped release: the flat golden under another prefix.
TEST(SameModelInOtherForms, WrappedBf16) {
  const GoldenFile golden(Directory("bf16") + "/golden.safetensors");
  const std::vector<float> expected = PromptLogits(Directory("bf16"), golden);
  const auto checkpoint = Checkpoint::Open(Directory("bf16")).value();
  nlohmann::json header;
  std::string data;
  for (const TensorView& tensor : checkpoint->tensors()) {
    header["language_model." + tensor.name] = {
        {"dtype", DTypeName(tensor.dtype)},
        {"shape", tensor.shape},
        {"data_offsets", {data.size(), data.size() + tensor.bytes}}};
    data.append(reinterpret_cast<const char*>(tensor.data), tensor.bytes);
  }
  const nlohmann::json text =
      nlohmann::json::parse(ReadTestFile(Directory("bf16") + "/config.json"));
  const nlohmann::json config = {{"architectures", {"KimiK25ForConditionalGeneration"}},
                                 {"model_type", "kimi_k25"},
                                 {"text_config", text}};
  TempDir dir;
  dir.Write("config.json", config.dump());
  dir.Write("model.safetensors", SafetensorsImage(header.dump(), data));
  EXPECT_EQ(PromptLogits(dir.path(), golden), expected);
}

TEST(LongContext, BeyondTheOriginalRange) {
  const GoldenFile golden(Directory("int4") + "/golden.safetensors");
  const std::vector<int32_t> ids = golden.I32("long.ids");
  const int n = static_cast<int>(ids.size());
  ASSERT_GT(n, 4096);
  TracedTarget model(Directory("int4"), 1, n);
  const std::vector<int32_t> pages = model.PageTable(n);
  const std::vector<int32_t> last = {n - 4, n - 3, n - 2, n - 1};
  const Trace trace = model.Run({.context_len = 0,
                                 .tokens = ids,
                                 .depths = {},
                                 .ancestors = {},
                                 .page_table = pages,
                                 .logit_rows = last});
  EXPECT_LE(RelativeError(trace.logits, golden.F32("long.logits")), 1e-4);
}

}  // namespace
}  // namespace coppice
