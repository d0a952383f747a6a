// Every layer against transformers' DeepseekV3ForCausalLM, which computes attention in the plain
// form: agreement is also that of the absorbed form with it.
#include "model/deepseek_v3.h"

#include <numeric>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "model/golden_files.h"
#include "model/traced_target.h"

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
  const GoldenFile golden(Directory(name) + "/golden.safetensors");
  TracedTarget model(Directory(name), tp, 64);
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
  const GoldenFile golden(Directory(name) + "/golden.safetensors");
  TracedTarget model(Directory(name), tp, 64);
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

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         ::testing::Combine(::testing::Values("int4", "bf16", "experts384"),
                                            ::testing::Values(1, 8)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_tp" +
                                  std::to_string(std::get<1>(info.param));
                         });

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
