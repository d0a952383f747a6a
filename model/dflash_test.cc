// The drafter against its PyTorch reference (tests/oracle/dflash_reference.py), and the equalities
// it keeps.
#include "model/dflash.h"

#include <numeric>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/drafter.h"
#include "model/golden_files.h"
#include "model/rank_group.h"
#include "model/target.h"

namespace coppice {
namespace {

using kernels::DType;
using kernels::Tensor;
using ::testing::HasSubstr;

constexpr char kTarget[] = "tests/goldens/models/int4";
constexpr char kDrafter[] = "tests/goldens/models/int4/drafter";

// An i32 array of one rank.
class Index {
 public:
  Index(kernels::Ops& ops, const std::vector<int32_t>& values)
      : tensor_(AllocateTensor(ops, DType::kI32, static_cast<int64_t>(values.size()), 1).value()) {
    ops.Upload(values.data(), tensor_.view.data, values.size() * sizeof(int32_t));
  }
  operator Tensor() const { return tensor_.view; }

 private:
  DeviceTensor tensor_;
};

class Reference : public ::testing::TestWithParam<int> {};

TEST_P(Reference, LogitsOfEveryBlock) {
  const int tp = GetParam();
  const GoldenFile golden(std::string(kDrafter) + "/golden.safetensors");
  const DraftConfig config = LoadDraftConfig(kDrafter).value();
  const ModelConfig target_config = LoadModelConfig(kTarget).value();
  const auto draft_files = Checkpoint::Open(kDrafter).value();
  const auto target_files = Checkpoint::Open(kTarget).value();
  const DraftTensors tensors = FindDraftTensors(*draft_files, config).value();
  const EmbeddingTensors shared = FindEmbeddingTensors(*target_files, target_config).value();
  std::vector<uint16_t> copy;
  const uint16_t* embedding = EmbeddingTable(shared, copy);
  const HostRope rope(config.InvFreq(), 64, config.attention_factor);
  const auto group = RankGroup::Create(tp).value();

  const std::vector<uint16_t> features = golden.Bf16("features_bf16");
  const int64_t tokens = golden.Shape("features_bf16")[0];
  const std::vector<int32_t> blocks = golden.I32("blocks");  // (anchor, position, first visible)
  const int count = static_cast<int>(golden.Shape("blocks")[0]);
  std::vector<int32_t> token, position, slot, begin, end, rows;
  for (int b = 0; b < count; ++b) {
    slot.push_back(b);
    begin.push_back(blocks[3 * b + 2]);
    end.push_back(blocks[3 * b + 1]);
    for (int k = 0; k < config.block_size; ++k) {
      if (k > 0) rows.push_back(static_cast<int32_t>(token.size()));
      token.push_back(k == 0 ? blocks[3 * b] : config.mask_token_id);
      position.push_back(blocks[3 * b + 1] + k);
    }
  }
  std::vector<int32_t> context_position(tokens);
  std::iota(context_position.begin(), context_position.end(), 0);

  std::vector<float> logits(rows.size() * config.vocab_size);
  group->Run([&](int rank) {
    kernels::Ops& ops = group->ops(rank);
    const auto model =
        DFlash::Create(config,
                       {.slots = count,
                        .window = 64,
                        .max_blocks = count,
                        .max_context = static_cast<int>(tokens)},
                       LoadDraftWeights(tensors, shared, config, ops).value(), rope, embedding, ops)
            .value();
    const DeviceTensor context =
        AllocateTensor(ops, DType::kBf16, tokens, config.hidden_size).value();
    ops.Upload(features.data(), context.view.data, features.size() * sizeof(uint16_t));
    for (int b = 0; b < count; ++b) {
      model->AppendContext(context.view, Index(ops, std::vector<int32_t>(tokens, b)),
                           Index(ops, context_position));
    }
    const Index token_index(ops, token), position_index(ops, position), slot_index(ops, slot),
        begin_index(ops, begin), end_index(ops, end), row_index(ops, rows);
    model->Forward({.blocks = count,
                    .block_size = config.block_size,
                    .token = token_index,
                    .position = position_index,
                    .slot = slot_index,
                    .context_begin = begin_index,
                    .context_end = end_index});
    const DeviceTensor out =
        AllocateTensor(ops, DType::kF32, static_cast<int64_t>(rows.size()), config.vocab_size)
            .value();
    model->Logits(row_index, out.view);
    if (rank == 0) ops.Download(out.view.data, logits.data(), logits.size() * sizeof(float));
  });
  const std::vector<float> expected = golden.F32("logits");
  const size_t per_block = expected.size() / count;
  for (int b = 0; b < count; ++b) {
    EXPECT_LE(
        RelativeError({logits.begin() + b * per_block, logits.begin() + (b + 1) * per_block},
                      {expected.begin() + b * per_block, expected.begin() + (b + 1) * per_block}),
        1e-5)
        << "block " << b;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Reference, ::testing::Values(1, 2, 4, 8));

std::unique_ptr<Drafter> Load(int tp = 1, int window = 64) {
  absl::StatusOr<std::unique_ptr<Drafter>> drafter = Drafter::Load(
      {.drafter_dir = kDrafter, .target_dir = kTarget, .tp = tp, .slots = 40, .window = window});
  EXPECT_TRUE(drafter.ok()) << drafter.status();
  return *std::move(drafter);
}

std::vector<uint16_t> RandomFeatures(int64_t rows, uint32_t seed, int hidden) {
  std::mt19937 random(seed);
  std::vector<uint16_t> features(rows * hidden);
  // bf16 of magnitudes around 1, both signs.
  for (uint16_t& f : features) {
    f = static_cast<uint16_t>(0x3F00 + random() % 0x100) | (random() % 2 ? 0x8000 : 0);
  }
  return features;
}

bool operator==(const DraftCandidates& a, const DraftCandidates& b) {
  return a.positions == b.positions && a.k == b.k && a.tokens == b.tokens &&
         a.log_probs == b.log_probs;
}

class DrafterTest : public ::testing::Test {
 protected:
  DraftCandidates Draft(const std::vector<DraftBlock>& blocks, int k = 5) {
    DraftCandidates out;
    drafter_->Draft(blocks, k, &out);
    return out;
  }

  std::unique_ptr<Drafter> drafter_ = Load();
  const int hidden_ = drafter_->config().hidden_size;
};

TEST_F(DrafterTest, CandidatesAreTheReferencesLikeliest) {
  const GoldenFile golden(std::string(kDrafter) + "/golden.safetensors");
  const std::vector<uint16_t> features = golden.Bf16("features_bf16");
  const std::vector<int32_t> blocks = golden.I32("blocks");
  const std::vector<float> logits = golden.F32("logits");
  const int vocab = drafter_->config().vocab_size;
  drafter_->AppendContext({{{.slot = 7, .first = 0, .features = features}}});
  const int k = 6;
  const DraftCandidates out = Draft(
      {{.slot = 7, .anchor = blocks[0], .base_len = blocks[1], .context_begin = blocks[2]}}, k);
  ASSERT_EQ(out.positions, 7);
  ASSERT_EQ(out.k, k);
  for (int p = 0; p < out.positions; ++p) {
    const float* row = logits.data() + p * vocab;
    std::vector<int32_t> order(vocab);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    double total = 0;
    for (int i = 0; i < vocab; ++i) total += std::exp(static_cast<double>(row[i]));
    for (int i = 0; i < k; ++i) {
      EXPECT_EQ(out.tokens[p * k + i], order[i]) << p << " " << i;
      EXPECT_NEAR(out.log_probs[p * k + i], row[order[i]] - std::log(total), 1e-4) << p << " " << i;
    }
  }
}

TEST_F(DrafterTest, WhatSharesABatchDoesNotMatter) {
  std::vector<DraftBlock> blocks;
  std::vector<std::vector<uint16_t>> features;
  std::vector<ContextRows> context;
  for (int i = 0; i < 40; ++i) features.push_back(RandomFeatures(i, i, hidden_));
  for (int i = 0; i < 40; ++i) {
    context.push_back({.slot = i, .first = 0, .features = features[i]});
    blocks.push_back({.slot = i, .anchor = i, .base_len = i, .context_begin = i / 3});
  }
  drafter_->AppendContext(context);
  const DraftCandidates together = Draft(blocks);  // more than one forward holds
  const int per_block = together.positions * together.k;
  for (int i = 0; i < 40; ++i) {
    const DraftCandidates alone = Draft({blocks[i]});
    EXPECT_TRUE(std::equal(alone.tokens.begin(), alone.tokens.end(),
                           together.tokens.begin() + i * per_block))
        << i;
    EXPECT_TRUE(std::equal(alone.log_probs.begin(), alone.log_probs.end(),
                           together.log_probs.begin() + i * per_block))
        << i;
  }
}

TEST_F(DrafterTest, ContextMayComeInPieces) {
  const std::vector<uint16_t> features = RandomFeatures(50, 1, hidden_);
  const auto rows = absl::MakeConstSpan(features);
  drafter_->AppendContext({{{.slot = 0, .first = 0, .features = rows}}});
  for (int i = 0; i < 50; i += 10) {
    drafter_->AppendContext(
        {{{.slot = 1, .first = i, .features = rows.subspan(i * hidden_, 3 * hidden_)},
          {.slot = 1, .first = i + 3, .features = rows.subspan((i + 3) * hidden_, 7 * hidden_)}}});
  }
  EXPECT_TRUE(Draft({{.slot = 0, .anchor = 9, .base_len = 50, .context_begin = 0}}) ==
              Draft({{.slot = 1, .anchor = 9, .base_len = 50, .context_begin = 0}}));
}

// A block's own keys and values never become context: drafting twice gives the same, and what was
// drafted past a position is replaced when its features come.
TEST_F(DrafterTest, DraftingLeavesNoTrace) {
  const std::vector<uint16_t> features = RandomFeatures(30, 2, hidden_);
  const auto rows = absl::MakeConstSpan(features);
  drafter_->AppendContext({{{.slot = 0, .first = 0, .features = rows.subspan(0, 20 * hidden_)}}});
  const DraftBlock block{.slot = 0, .anchor = 9, .base_len = 20, .context_begin = 0};
  const DraftCandidates first = Draft({block});
  EXPECT_TRUE(Draft({block}) == first);
  drafter_->AppendContext(
      {{{.slot = 0, .first = 20, .features = rows.subspan(20 * hidden_, 10 * hidden_)}}});
  drafter_->AppendContext({{{.slot = 1, .first = 0, .features = rows}}});
  EXPECT_TRUE(Draft({{.slot = 0, .anchor = 4, .base_len = 30, .context_begin = 0}}) ==
              Draft({{.slot = 1, .anchor = 4, .base_len = 30, .context_begin = 0}}));
  EXPECT_TRUE(Draft({block}) == first);
}

TEST_F(DrafterTest, TheWindowSlides) {
  const std::unique_ptr<Drafter> small = Load(1, 16);
  const std::vector<uint16_t> features = RandomFeatures(100, 3, hidden_);
  const auto rows = absl::MakeConstSpan(features);
  small->AppendContext({{{.slot = 0, .first = 0, .features = rows}}});
  for (int i = 0; i < 100; ++i) {
    small->AppendContext(
        {{{.slot = 1, .first = i, .features = rows.subspan(i * hidden_, hidden_)}}});
  }
  // A sequence whose features were first sent from position 60 on.
  small->AppendContext({{{.slot = 2, .first = 60, .features = rows.subspan(60 * hidden_)}}});
  drafter_->AppendContext({{{.slot = 0, .first = 40, .features = rows.subspan(40 * hidden_)}}});
  const DraftCandidates expected =
      Draft({{.slot = 0, .anchor = 4, .base_len = 100, .context_begin = 84}});
  for (int slot = 0; slot < 3; ++slot) {
    DraftCandidates out;
    // More context than the window holds is cut to it.
    small->Draft({{{.slot = slot, .anchor = 4, .base_len = 100, .context_begin = 0}}}, 5, &out);
    EXPECT_TRUE(out == expected) << slot;
  }
}

TEST_F(DrafterTest, AnyNumberOfRanksComputesTheSameBits) {
  const std::vector<uint16_t> features = RandomFeatures(33, 4, hidden_);
  const std::vector<DraftBlock> blocks = {
      {.slot = 3, .anchor = 1, .base_len = 33, .context_begin = 0},
      {.slot = 3, .anchor = 2, .base_len = 20, .context_begin = 10},
      {.slot = 4, .anchor = 3, .base_len = 0, .context_begin = 0}};
  drafter_->AppendContext({{{.slot = 3, .first = 0, .features = features}}});
  const DraftCandidates expected = Draft(blocks, 16);
  for (const int tp : {2, 4, 8}) {
    const std::unique_ptr<Drafter> drafter = Load(tp);
    drafter->AppendContext({{{.slot = 3, .first = 0, .features = features}}});
    DraftCandidates out;
    drafter->Draft(blocks, 16, &out);
    EXPECT_TRUE(out == expected) << "tp " << tp;
  }
}

TEST_F(DrafterTest, CandidatesAreBounded) {
  const std::vector<DraftBlock> block = {
      {.slot = 0, .anchor = 1, .base_len = 0, .context_begin = 0}};
  EXPECT_EQ(Draft(block, 0).tokens.size(), 0u);
  EXPECT_EQ(Draft(block, 1).tokens.size(), 7u);
  EXPECT_EQ(Draft(block, 1000).k, 64);
  EXPECT_EQ(Draft({}, 5).tokens.size(), 0u);
}

TEST_F(DrafterTest, PositionsTheTargetDoesNotHave) {
  const int64_t last = 262144;
  const std::vector<uint16_t> features = RandomFeatures(8, 5, hidden_);
  drafter_->AppendContext({{{.slot = 0, .first = last - 4, .features = features},
                            {.slot = 1, .first = last + 100, .features = features}}});
  const DraftCandidates out =
      Draft({{.slot = 0, .anchor = 1, .base_len = last, .context_begin = last - 4},
             {.slot = 0, .anchor = 1, .base_len = last - 1, .context_begin = last - 4}},
            2);
  ASSERT_EQ(out.log_probs.size(), 28u);
  for (int i = 0; i < 14; ++i) EXPECT_EQ(out.log_probs[i], -INFINITY);
  for (int i = 14; i < 28; ++i) EXPECT_GT(out.log_probs[i], -20);
}

TEST_F(DrafterTest, FingerprintsMatchTheTargetsOfThePair) {
  const auto target = Target::Load({.model_dir = kTarget,
                                    .drafter_dir = kDrafter,
                                    .tp = 1,
                                    .page_size = 64,
                                    .pages = 2,
                                    .max_rows = 1,
                                    .progress = nullptr});
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_EQ(drafter_->drafter_fingerprint(), (*target)->drafter_fingerprint());
  EXPECT_EQ(drafter_->embedding_fingerprint(), (*target)->embedding_fingerprint());
  EXPECT_NE(drafter_->drafter_fingerprint(), 0u);
}

TEST(DrafterLoad, RefusesWhatCannotBe) {
  const auto message = [](const DrafterOptions& options) {
    const absl::Status status = Drafter::Load(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  const DrafterOptions good{
      .drafter_dir = kDrafter, .target_dir = kTarget, .tp = 1, .slots = 1, .window = 1};
  DrafterOptions bad = good;
  bad.tp = 5;
  EXPECT_THAT(message(bad), HasSubstr("tp is 5"));
  bad = good;
  bad.slots = 0;
  EXPECT_THAT(message(bad), HasSubstr("slots is 0"));
  bad = good;
  bad.window = 0;
  EXPECT_THAT(message(bad), HasSubstr("window is 0"));
  bad = good;
  bad.target_dir = "tests/goldens/models/bf16";
  EXPECT_THAT(message(bad), HasSubstr("was made for another target"));
}

}  // namespace
}  // namespace coppice
