// models/demo against what transformers and the drafter's PyTorch code computed from it
// (tests/goldens/demo), down to the text it writes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/drafter.h"
#include "model/golden_files.h"
#include "model/sampling.h"
#include "model/target.h"
#include "model/traced_target.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

constexpr char kTarget[] = "models/demo";
constexpr char kDrafter[] = "models/demo/drafter";
constexpr char kGolden[] = "tests/goldens/demo/golden.safetensors";
constexpr int kPageSize = 64;

class DemoGolden : public ::testing::TestWithParam<int> {};

TEST_P(DemoGolden, LayersRoutingAndLogits) {
  const GoldenFile golden(kGolden);
  const std::vector<int32_t> ids = golden.I32("input_ids");
  const int64_t n = static_cast<int64_t>(ids.size());
  TracedTarget model(kTarget, GetParam(), static_cast<int>(n));
  const std::vector<int32_t> pages = model.PageTable(n);
  const std::vector<int32_t> rows = golden.I32("logit_positions");
  const Trace trace = model.Run({.context_len = 0,
                                 .tokens = ids,
                                 .depths = {},
                                 .ancestors = {},
                                 .page_table = pages,
                                 .logit_rows = rows});
  for (int tap = 0; tap < 3; ++tap) {
    EXPECT_LE(RelativeError(trace.hidden[tap], golden.F32("taps." + std::to_string(tap))), 1e-4)
        << "layer " << tap;
  }
  const int top_k = model.config().num_experts_per_tok;
  for (size_t l = 0; l < trace.chosen.size(); ++l) {
    const std::string layer = "router." + std::to_string(l + model.config().first_k_dense_replace);
    // The goldens list a token's experts in ascending order.
    std::vector<int32_t> chosen;
    std::vector<float> weights;
    for (int64_t row = 0; row < n; ++row) {
      std::vector<int> order(top_k);
      std::iota(order.begin(), order.end(), static_cast<int>(row) * top_k);
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return trace.chosen[l][a] < trace.chosen[l][b]; });
      for (const int i : order) {
        chosen.push_back(trace.chosen[l][i]);
        weights.push_back(trace.weights[l][i]);
      }
    }
    EXPECT_EQ(chosen, golden.I32(layer + ".experts")) << layer;
    EXPECT_LE(RelativeError(weights, golden.F32(layer + ".weights")), 1e-3) << layer;
  }
  EXPECT_LE(RelativeError(trace.logits, golden.F32("logits")), 2e-4);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DemoGolden, ::testing::Values(1, 8));

// Target and drafter of one sequence, decoding as the services do, without them.
class DemoPair : public ::testing::Test {
 protected:
  void Load(int tp) {
    absl::StatusOr<std::unique_ptr<Target>> target = Target::Load({.model_dir = kTarget,
                                                                   .drafter_dir = kDrafter,
                                                                   .tp = tp,
                                                                   .page_size = kPageSize,
                                                                   .pages = 10,
                                                                   .max_rows = 512,
                                                                   .progress = nullptr});
    ASSERT_TRUE(target.ok()) << target.status();
    target_ = *std::move(target);
    absl::StatusOr<std::unique_ptr<Drafter>> drafter = Drafter::Load(
        {.drafter_dir = kDrafter, .target_dir = kTarget, .tp = tp, .slots = 1, .window = 512});
    ASSERT_TRUE(drafter.ok()) << drafter.status();
    drafter_ = *std::move(drafter);
    pages_.resize(9);
    std::iota(pages_.begin(), pages_.end(), 1);
  }

  // Runs `tokens` as a causal chunk at context_len; returns the greedy token after each row.
  std::vector<int32_t> Step(int64_t context_len, const std::vector<int32_t>& tokens) {
    std::vector<int32_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    ForwardResult result;
    const absl::Status status = target_->Forward({{{.context_len = context_len,
                                                    .tokens = tokens,
                                                    .depths = {},
                                                    .ancestors = {},
                                                    .page_table = pages_,
                                                    .logit_rows = rows}}},
                                                 &result);
    EXPECT_TRUE(status.ok()) << status;
    std::vector<int32_t> next;
    for (size_t i = 0; i < tokens.size(); ++i) {
      next.push_back(SampleToken(
          absl::MakeConstSpan(result.logits).subspan(i * result.vocab_size, result.vocab_size), {},
          context_len + static_cast<int64_t>(i) + 1));
    }
    return next;
  }

  // Keeps the first `count` rows of the last step and hands their features to the drafter.
  void Commit(int64_t context_len, int count) {
    CommitPlan plan;
    for (int i = 0; i < count; ++i) {
      const int64_t at = context_len + i;
      plan.features.push_back(
          {i, static_cast<int32_t>(pages_[at / kPageSize] * kPageSize + at % kPageSize)});
    }
    std::vector<uint16_t> features;
    target_->Commit(plan, &features);
    drafter_->AppendContext({{{.slot = 0, .first = context_len, .features = features}}});
  }

  std::unique_ptr<Target> target_;
  std::unique_ptr<Drafter> drafter_;
  std::vector<int32_t> pages_;
};

TEST_F(DemoPair, DraftedBlock) {
  Load(1);
  const GoldenFile golden(kGolden);
  const std::vector<int32_t> ids = golden.I32("input_ids");
  const int64_t last = static_cast<int64_t>(ids.size()) - 1;
  Step(0, {ids.begin(), ids.end() - 1});
  Commit(0, static_cast<int>(last));
  const std::vector<int32_t> expected = golden.I32("draft_ids");
  const std::vector<float> log_probs = golden.F32("draft_log_probs");
  const int k = static_cast<int>(golden.Shape("draft_ids")[1]);
  DraftCandidates out;
  drafter_->Draft({{{.slot = 0, .anchor = ids.back(), .base_len = last, .context_begin = 0}}}, k,
                  &out);
  ASSERT_EQ(out.tokens.size(), expected.size());
  // Features travel in bf16, the reference's do not: near-ties may trade places.
  for (size_t i = 0; i < expected.size(); ++i) {
    if (log_probs[i] > -4) {
      EXPECT_EQ(out.tokens[i], expected[i]) << "candidate " << i;
    }
    EXPECT_NEAR(out.log_probs[i], log_probs[i], 0.05 + 0.02 * std::abs(log_probs[i]))
        << "candidate " << i;
  }
}

nlohmann::json Prompts() {
  return nlohmann::json::parse(ReadTestFile("tests/goldens/demo/golden.json"));
}

TEST_F(DemoPair, GreedyTextOneTokenAtATime) {
  Load(1);
  for (const auto& prompt : Prompts()) {
    const auto expected = prompt["greedy_ids"].get<std::vector<int32_t>>();
    const auto ids = prompt["prompt_ids"].get<std::vector<int32_t>>();
    int64_t len = static_cast<int64_t>(ids.size());
    std::vector<int32_t> text = {Step(0, ids).back()};
    while (text.size() < expected.size()) {
      text.push_back(Step(len++, {text.back()}).back());
    }
    EXPECT_EQ(text, expected) << prompt["prompt"];
  }
}

TEST_F(DemoPair, GreedyTextByChainSpeculationOnTwoRanks) {
  Load(2);
  int64_t accepted = 0;
  int64_t accepted_in_golden = 0;
  for (const auto& prompt : Prompts()) {
    const auto expected = prompt["greedy_ids"].get<std::vector<int32_t>>();
    const auto ids = prompt["prompt_ids"].get<std::vector<int32_t>>();
    int64_t len = static_cast<int64_t>(ids.size());
    std::vector<int32_t> text = {Step(0, ids).back()};
    Commit(0, static_cast<int>(len));
    while (text.size() < expected.size()) {
      DraftCandidates drafts;
      drafter_->Draft({{{.slot = 0, .anchor = text.back(), .base_len = len, .context_begin = 0}}},
                      1, &drafts);
      std::vector<int32_t> chain = {text.back()};
      chain.insert(chain.end(), drafts.tokens.begin(), drafts.tokens.end());
      const std::vector<int32_t> next = Step(len, chain);
      size_t agreed = 0;
      while (agreed < drafts.tokens.size() && drafts.tokens[agreed] == next[agreed] &&
             text.size() + agreed + 1 < expected.size()) {
        ++agreed;
      }
      text.insert(text.end(), next.begin(), next.begin() + agreed + 1);
      Commit(len, static_cast<int>(agreed) + 1);
      len += static_cast<int64_t>(agreed) + 1;
      accepted += static_cast<int64_t>(agreed);
    }
    EXPECT_EQ(text, expected) << prompt["prompt"];
    for (const int64_t round : prompt["chain_accepted"]) accepted_in_golden += round;
  }
  // The same drafts up to near-ties of the drafter.
  EXPECT_NEAR(static_cast<double>(accepted), static_cast<double>(accepted_in_golden),
              0.02 * static_cast<double>(accepted_in_golden));
}

}  // namespace
}  // namespace coppice
