// The equalities on which lossless speculation rests: a row's result depends on its own inputs,
// never on how the step is cut, what shares it, how many ranks compute it or where its context
// lies.  All comparisons are bitwise.
#include "model/target.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/golden_files.h"

namespace coppice {
namespace {

using ::testing::HasSubstr;

constexpr char kModel[] = "tests/goldens/models/int4";
constexpr int kPageSize = 8;

std::unique_ptr<Target> Load(int tp = 1, const std::string& dir = kModel) {
  TargetOptions options{.model_dir = dir,
                        .drafter_dir = dir + "/drafter",
                        .tp = tp,
                        .page_size = kPageSize,
                        .pages = 64,
                        .max_rows = 96,
                        .progress = nullptr};
  absl::StatusOr<std::unique_ptr<Target>> target = Target::Load(options);
  EXPECT_TRUE(target.ok()) << target.status();
  return *std::move(target);
}

std::vector<int32_t> Pages(int first, int count) {
  std::vector<int32_t> pages(count);
  std::iota(pages.begin(), pages.end(), first);
  return pages;
}

std::vector<int32_t> RandomTokens(int n, uint32_t seed, int vocab) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(n);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab);
  return tokens;
}

std::vector<int32_t> AllRows(size_t n) { return Pages(0, static_cast<int>(n)); }

// Logits of every row and features of every row of one sequence.
struct Rows {
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<uint16_t>> features;

  void Append(const Rows& more) {
    logits.insert(logits.end(), more.logits.begin(), more.logits.end());
    features.insert(features.end(), more.features.begin(), more.features.end());
  }
  bool operator==(const Rows&) const = default;
};

int32_t Slot(const std::vector<int32_t>& pages, int64_t token) {
  return pages[token / kPageSize] * kPageSize + static_cast<int32_t>(token % kPageSize);
}

// Forward over `sequences` (all of whose rows ask for logits), then features of all rows, kept at
// the slots of their row numbers' logical places.
std::vector<Rows> RunStep(Target& target, std::vector<SequenceRows> sequences) {
  std::vector<std::vector<int32_t>> all;
  for (SequenceRows& s : sequences) all.push_back(AllRows(s.tokens.size()));
  for (size_t i = 0; i < sequences.size(); ++i) sequences[i].logit_rows = all[i];
  ForwardResult result;
  const absl::Status status = target.Forward(sequences, &result);
  EXPECT_TRUE(status.ok()) << status;
  CommitPlan plan;
  int32_t row = 0;
  for (const SequenceRows& s : sequences) {
    const std::vector<int32_t> pages(s.page_table.begin(), s.page_table.end());
    for (size_t i = 0; i < s.tokens.size(); ++i) {
      plan.features.push_back({row++, Slot(pages, s.context_len + static_cast<int64_t>(i))});
    }
  }
  std::vector<uint16_t> features;
  target.Commit(plan, &features);
  const int64_t hidden = target.config().hidden_size;
  EXPECT_EQ(static_cast<int64_t>(features.size()), row * hidden);
  std::vector<Rows> rows(sequences.size());
  int64_t next = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    for (size_t j = 0; j < sequences[i].tokens.size(); ++j, ++next) {
      const auto logits = result.logits.begin() + next * result.vocab_size;
      rows[i].logits.emplace_back(logits, logits + result.vocab_size);
      const auto feature = features.begin() + next * hidden;
      rows[i].features.emplace_back(feature, feature + hidden);
    }
  }
  return rows;
}

SequenceRows Chunk(int64_t context_len, absl::Span<const int32_t> tokens,
                   absl::Span<const int32_t> pages) {
  return {.context_len = context_len,
          .tokens = tokens,
          .depths = {},
          .ancestors = {},
          .page_table = pages,
          .logit_rows = {}};
}

// A prompt in chunks of `chunk` rows.
Rows Prefill(Target& target, const std::vector<int32_t>& tokens, const std::vector<int32_t>& pages,
             int chunk, int64_t context_len = 0) {
  Rows rows;
  for (size_t begin = 0; begin < tokens.size(); begin += chunk) {
    rows.Append(
        RunStep(target, {Chunk(context_len + static_cast<int64_t>(begin),
                               absl::MakeConstSpan(tokens).subspan(begin, chunk), pages)})[0]);
  }
  return rows;
}

struct Tree {
  std::vector<int32_t> token;
  std::vector<int32_t> parent;
  std::vector<int32_t> depth;
  std::vector<uint64_t> words;

  int Add(int32_t id, int up) {
    const int node = static_cast<int>(token.size());
    token.push_back(id);
    parent.push_back(up);
    depth.push_back(up < 0 ? 0 : depth[up] + 1);
    words.push_back((up < 0 ? 0 : words[up]) | uint64_t{1} << node);
    return node;
  }
  std::vector<int> Path(int node) const {
    std::vector<int> path;
    for (; node >= 0; node = parent[node]) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return path;
  }
  SequenceRows At(int64_t context_len, absl::Span<const int32_t> pages) const {
    return {.context_len = context_len,
            .tokens = token,
            .depths = depth,
            .ancestors = words,
            .page_table = pages,
            .logit_rows = {}};
  }
};

Tree RandomTree(int nodes, uint32_t seed, int vocab) {
  std::mt19937 random(seed);
  Tree tree;
  for (int i = 0; i < nodes; ++i) {
    tree.Add(static_cast<int32_t>(random() % vocab), i == 0 ? -1 : static_cast<int>(random() % i));
  }
  return tree;
}

class TargetTest : public ::testing::Test {
 protected:
  std::unique_ptr<Target> target_ = Load();
  const int vocab_ = target_->config().vocab_size;
};

TEST_F(TargetTest, ChunksAndSingleStepsEqualTheWholePrompt) {
  const std::vector<int32_t> tokens = RandomTokens(75, 1, vocab_);
  const Rows whole = Prefill(*target_, tokens, Pages(1, 10), 96);
  EXPECT_EQ(Prefill(*target_, tokens, Pages(20, 10), 13), whole);
  EXPECT_EQ(Prefill(*target_, tokens, Pages(40, 10), 1), whole);
}

TEST_F(TargetTest, PhysicalOrderOfPagesDoesNotMatter) {
  const std::vector<int32_t> tokens = RandomTokens(75, 1, vocab_);
  std::vector<int32_t> shuffled = Pages(1, 50);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(3));
  shuffled.resize(10);
  EXPECT_EQ(Prefill(*target_, tokens, shuffled, 20), Prefill(*target_, tokens, Pages(1, 10), 96));
}

TEST_F(TargetTest, ATreesRowsEqualTheChainOfTheirPath) {
  const std::vector<int32_t> prompt = RandomTokens(29, 2, vocab_);
  const std::vector<int32_t> pages = Pages(1, 12);
  for (const int nodes : {1, 9, 64}) {
    const Tree tree = RandomTree(nodes, 5, vocab_);
    Prefill(*target_, prompt, pages, 96);
    const Rows rows = RunStep(*target_, {tree.At(29, pages)})[0];
    for (int node = 0; node < nodes; ++node) {
      std::vector<int32_t> chain;
      for (const int n : tree.Path(node)) chain.push_back(tree.token[n]);
      const Rows plain = Prefill(*target_, chain, pages, 96, 29);
      EXPECT_EQ(plain.logits.back(), rows.logits[node]) << "node " << node << " of " << nodes;
      EXPECT_EQ(plain.features.back(), rows.features[node]) << "node " << node << " of " << nodes;
    }
  }
}

TEST_F(TargetTest, WhatSharesAStepDoesNotMatter) {
  const std::vector<int32_t> pages[] = {Pages(1, 8), Pages(9, 8), Pages(17, 13), Pages(30, 8)};
  const std::vector<int32_t> prompts[] = {RandomTokens(11, 3, vocab_), RandomTokens(40, 4, vocab_),
                                          RandomTokens(64, 5, vocab_)};
  const std::vector<int32_t> chunk = RandomTokens(23, 6, vocab_);
  const Tree trees[] = {RandomTree(17, 7, vocab_), RandomTree(1, 8, vocab_),
                        RandomTree(33, 9, vocab_)};
  std::vector<SequenceRows> all;
  std::vector<Rows> alone;
  for (int i = 0; i < 3; ++i) {
    Prefill(*target_, prompts[i], pages[i], 96);
    all.push_back(trees[i].At(static_cast<int64_t>(prompts[i].size()), pages[i]));
  }
  all.push_back(Chunk(0, chunk, pages[3]));
  for (const SequenceRows& s : all) alone.push_back(RunStep(*target_, {s})[0]);
  EXPECT_EQ(RunStep(*target_, all), alone);
  std::reverse(all.begin(), all.end());
  std::reverse(alone.begin(), alone.end());
  EXPECT_EQ(RunStep(*target_, all), alone);
}

TEST_F(TargetTest, CommittedPathEqualsAFreshPrefill) {
  const std::vector<int32_t> prompt = RandomTokens(21, 10, vocab_);
  const Tree tree = RandomTree(40, 11, vocab_);
  // The longest path, so that rows move across pages.
  const int leaf =
      static_cast<int>(std::max_element(tree.depth.begin(), tree.depth.end()) - tree.depth.begin());
  const std::vector<int> path = tree.Path(leaf);
  ASSERT_GE(path.size(), 5u);

  const std::vector<int32_t> pages = Pages(1, 12);
  Prefill(*target_, prompt, pages, 96);
  SequenceRows rows = tree.At(21, pages);
  ForwardResult result;
  ASSERT_TRUE(target_->Forward({rows}, &result).ok());
  EXPECT_TRUE(result.logits.empty());
  CommitPlan plan;
  for (size_t r = 0; r < path.size(); ++r) {
    const int32_t dst = Slot(pages, 21 + static_cast<int64_t>(r));
    const int32_t src = Slot(pages, 21 + path[r]);
    if (src != dst) plan.moves.push_back({src, dst});
    plan.features.push_back({path[r], dst});
  }
  std::vector<uint16_t> features;
  target_->Commit(plan, &features);
  const int64_t committed = 21 + static_cast<int64_t>(path.size());
  const std::vector<int32_t> next = RandomTokens(9, 12, vocab_);
  const Rows after = RunStep(*target_, {Chunk(committed, next, pages)})[0];

  std::vector<int32_t> same = prompt;
  for (const int n : path) same.push_back(tree.token[n]);
  same.insert(same.end(), next.begin(), next.end());
  const std::vector<int32_t> other = Pages(30, 12);
  const Rows fresh = Prefill(*target_, same, other, 96);
  for (size_t i = 0; i < next.size(); ++i) {
    EXPECT_EQ(after.logits[i], fresh.logits[committed + i]) << i;
    EXPECT_EQ(after.features[i], fresh.features[committed + i]) << i;
  }
  // What Commit returned, and what it kept beside the tokens, are the features of a fresh prefill.
  const int64_t hidden = target_->config().hidden_size;
  std::vector<int32_t> slots;
  std::vector<uint16_t> expected;
  for (size_t r = 0; r < path.size(); ++r) {
    slots.push_back(Slot(pages, 21 + static_cast<int64_t>(r)));
    expected.insert(expected.end(), fresh.features[21 + r].begin(), fresh.features[21 + r].end());
  }
  EXPECT_EQ(features, expected);
  std::vector<uint16_t> kept;
  target_->ReadFeatures(slots, &kept);
  EXPECT_EQ(kept, expected);
  EXPECT_EQ(static_cast<int64_t>(kept.size()), static_cast<int64_t>(slots.size()) * hidden);
}

// Moves whose destinations are also sources.
TEST_F(TargetTest, MovesReadBeforeTheyWrite) {
  const std::vector<int32_t> tokens = RandomTokens(16, 13, vocab_);
  const std::vector<int32_t> pages = Pages(1, 4);
  const Rows before = Prefill(*target_, tokens, pages, 96);
  // Swap the two pages' latents, and the pages: nothing has changed.
  CommitPlan plan;
  for (int i = 0; i < kPageSize; ++i) {
    plan.moves.push_back({1 * kPageSize + i, 2 * kPageSize + i});
    plan.moves.push_back({2 * kPageSize + i, 1 * kPageSize + i});
  }
  std::vector<uint16_t> features;
  target_->Commit(plan, &features);
  EXPECT_TRUE(features.empty());
  const std::vector<int32_t> next = RandomTokens(5, 14, vocab_);
  const Rows swapped = RunStep(*target_, {Chunk(16, next, std::vector<int32_t>{2, 1, 3, 4})})[0];
  Prefill(*target_, tokens, Pages(10, 4), 96);
  EXPECT_EQ(swapped, RunStep(*target_, {Chunk(16, next, Pages(10, 4))})[0]);
}

// Sums that no rank count may change: prompt, tree, commit and features.
struct Session {
  std::vector<Rows> rows;
  std::vector<uint16_t> kept;
  std::vector<uint32_t> expert_counts;
  bool operator==(const Session&) const = default;
};

Session RunSession(int tp, const std::string& dir) {
  const std::unique_ptr<Target> target = Load(tp, dir);
  EXPECT_EQ(target->tp(), tp);
  const int vocab = target->config().vocab_size;
  Session session;
  const std::vector<int32_t> pages = Pages(3, 12);
  const std::vector<int32_t> other = Pages(20, 12);
  session.rows.push_back(Prefill(*target, RandomTokens(50, 1, vocab), pages, 30));
  session.rows.push_back(Prefill(*target, RandomTokens(20, 2, vocab), other, 30));
  const Tree tree = RandomTree(30, 3, vocab);
  const Tree root = RandomTree(1, 4, vocab);
  for (Rows& rows : RunStep(*target, {tree.At(50, pages), root.At(20, other)})) {
    session.rows.push_back(std::move(rows));
  }
  std::vector<int32_t> slots;
  for (int i = 0; i < 80; ++i) slots.push_back(Slot(pages, i));
  target->ReadFeatures(slots, &session.kept);
  ForwardResult result;
  const std::vector<int32_t> chunk = RandomTokens(40, 5, vocab);
  EXPECT_TRUE(target->Forward({Chunk(0, chunk, pages)}, &result).ok());
  session.expert_counts = result.expert_counts;
  return session;
}

TEST(TargetRanks, AnyNumberOfRanksComputesTheSameBits) {
  const Session one = RunSession(1, kModel);
  for (const int tp : {2, 4, 8}) EXPECT_TRUE(RunSession(tp, kModel) == one) << "tp " << tp;
}

TEST_F(TargetTest, CountsExpertsPerLayer) {
  const std::vector<int32_t> tokens = RandomTokens(40, 5, vocab_);
  ForwardResult result;
  ASSERT_TRUE(target_->Forward({Chunk(0, tokens, Pages(1, 8))}, &result).ok());
  const ModelConfig& config = target_->config();
  const int layers = config.num_hidden_layers - config.first_k_dense_replace;
  ASSERT_EQ(static_cast<int>(result.expert_counts.size()), layers * config.n_routed_experts);
  for (int l = 0; l < layers; ++l) {
    const auto begin = result.expert_counts.begin() + l * config.n_routed_experts;
    EXPECT_EQ(std::accumulate(begin, begin + config.n_routed_experts, 0u),
              40u * static_cast<uint32_t>(config.num_experts_per_tok));
  }
}

TEST_F(TargetTest, FeaturesAreThoseOfTheReference) {
  const GoldenFile prompt(std::string(kModel) + "/golden.safetensors");
  const GoldenFile drafter(std::string(kModel) + "/drafter/golden.safetensors");
  const Rows rows = Prefill(*target_, prompt.I32("prompt.ids"), Pages(1, 8), 96);
  const std::vector<uint16_t> expected = drafter.Bf16("features_bf16");
  size_t i = 0;
  int off = 0;
  for (const std::vector<uint16_t>& row : rows.features) {
    for (const uint16_t value : row) {
      // Bit patterns of one sign are ordered, so this is a distance in units of the last place.
      const int distance = std::abs(static_cast<int>(value) - static_cast<int>(expected[i++]));
      EXPECT_LE(distance, 1);
      off += distance != 0;
    }
  }
  ASSERT_EQ(i, expected.size());
  EXPECT_LE(off, static_cast<int>(i) / 200);  // only where fp32 noise crosses a rounding border
}

TEST_F(TargetTest, ProjectsOnlyTheRowsAskedFor) {
  const std::vector<int32_t> tokens = RandomTokens(30, 15, vocab_);
  const std::vector<int32_t> pages = Pages(1, 8);
  const Rows all = Prefill(*target_, tokens, pages, 96);
  ForwardResult result;
  const std::vector<int32_t> wanted = {29, 3, 3};
  SequenceRows rows = Chunk(0, tokens, pages);
  rows.logit_rows = wanted;
  ASSERT_TRUE(target_->Forward({rows}, &result).ok());
  ASSERT_EQ(result.logits.size(), 3u * vocab_);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto begin = result.logits.begin() + static_cast<int64_t>(i * vocab_);
    EXPECT_EQ(std::vector<float>(begin, begin + vocab_), all.logits[wanted[i]]);
  }
  std::vector<uint16_t> features;
  target_->Commit({.moves = {}, .features = {{17, 500}, {2, 501}}}, &features);
  std::vector<uint16_t> expected = all.features[17];
  expected.insert(expected.end(), all.features[2].begin(), all.features[2].end());
  EXPECT_EQ(features, expected);
  target_->ReadFeatures(std::vector<int32_t>{500, 501}, &features);
  EXPECT_EQ(features, expected);
}

TEST(TargetLoad, WithoutADrafterThereAreNoFeatures) {
  const auto target = Target::Load({.model_dir = kModel,
                                    .drafter_dir = "",
                                    .tp = 1,
                                    .page_size = 64,
                                    .pages = 4,
                                    .max_rows = 32,
                                    .progress = nullptr});
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_FALSE((*target)->has_features());
  EXPECT_EQ((*target)->drafter_fingerprint(), 0u);
  ForwardResult result;
  const std::vector<int32_t> tokens = {1, 2, 3};
  ASSERT_TRUE((*target)->Forward({Chunk(0, tokens, Pages(1, 1))}, &result).ok());
  std::vector<uint16_t> features = {1};
  (*target)->Commit({.moves = {}, .features = {{0, 70}}}, &features);
  EXPECT_TRUE(features.empty());
}

TEST(TargetLoad, ProgressEndsWithAllBytes) {
  int64_t last = 0;
  int64_t total = 0;
  bool rising = true;
  const auto target = Target::Load({.model_dir = kModel,
                                    .drafter_dir = "",
                                    .tp = 4,
                                    .page_size = 64,
                                    .pages = 4,
                                    .max_rows = 32,
                                    .progress = [&](int64_t done, int64_t all) {
                                      rising = rising && done >= last && done <= all;
                                      last = done;
                                      total = all;
                                    }});
  ASSERT_TRUE(target.ok()) << target.status();
  EXPECT_TRUE(rising);
  EXPECT_GT(total, 500000);
  EXPECT_EQ(last, total);
}

TEST(TargetLoad, FingerprintsTellModelsApart) {
  std::map<std::string, uint64_t> model;
  std::set<uint64_t> different;
  for (const char* name : {"int4", "bf16", "experts384"}) {
    const auto target = Target::Load({.model_dir = std::string("tests/goldens/models/") + name,
                                      .drafter_dir = "",
                                      .tp = 1,
                                      .page_size = 64,
                                      .pages = 2,
                                      .max_rows = 1,
                                      .progress = nullptr});
    ASSERT_TRUE(target.ok()) << target.status();
    different.insert((*target)->fingerprint());
    different.insert((*target)->embedding_fingerprint());
  }
  EXPECT_EQ(different.size(), 6u);
  EXPECT_EQ(Load(1)->fingerprint(), Load(2)->fingerprint());
}

TEST(TargetLoad, RefusesWhatCannotBe) {
  const TargetOptions good{.model_dir = kModel,
                           .drafter_dir = "",
                           .tp = 1,
                           .page_size = 8,
                           .pages = 8,
                           .max_rows = 8,
                           .progress = nullptr};
  const auto message = [](const TargetOptions& options) {
    const absl::Status status = Target::Load(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  TargetOptions bad = good;
  bad.tp = 3;
  EXPECT_THAT(message(bad), HasSubstr("tp is 3; the number of ranks must be 1, 2, 4 or 8"));
  bad = good;
  bad.page_size = 65;
  EXPECT_THAT(message(bad), HasSubstr("page_size is 65"));
  bad = good;
  bad.pages = 1;
  EXPECT_THAT(message(bad), HasSubstr("pages is 1"));
  bad = good;
  bad.max_rows = 0;
  EXPECT_THAT(message(bad), HasSubstr("max_rows is 0"));
  bad = good;
  bad.model_dir = "tests/goldens/models/bf16";
  bad.drafter_dir = "tests/goldens/models/int4/drafter";
  EXPECT_THAT(message(bad), HasSubstr("was made for another target"));
}

TEST_F(TargetTest, RefusesMalformedSteps) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::vector<int32_t> pages = {1};
  const auto message = [&](SequenceRows rows) {
    const std::vector<int32_t> fine_tokens = {5};
    const std::vector<int32_t> fine_pages = {2};
    ForwardResult result;
    const absl::Status status =
        target_->Forward({Chunk(0, fine_tokens, fine_pages), rows}, &result);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("sequence 1 of the step"));
    return std::string(status.message());
  };
  const std::vector<int32_t> large = {1, vocab_, 3};
  const std::vector<int32_t> negative = {1, -1, 3};
  EXPECT_THAT(message(Chunk(0, large, pages)), HasSubstr("token id 256 of row 1"));
  EXPECT_THAT(message(Chunk(0, negative, pages)), HasSubstr("token id -1 of row 1"));
  EXPECT_THAT(message(Chunk(6, tokens, pages)), HasSubstr("holds 8 tokens; 9 are needed"));
  EXPECT_THAT(message(Chunk(-1, tokens, pages)), HasSubstr("context_len"));
  EXPECT_THAT(message(Chunk(0, {}, pages)), HasSubstr("no rows"));
  const std::vector<int32_t> outside = {64};
  EXPECT_THAT(message(Chunk(0, tokens, outside)), HasSubstr("page 64 is not in the pool of 64"));
  SequenceRows rows = Chunk(0, tokens, pages);
  const std::vector<int32_t> bad_rows = {3};
  rows.logit_rows = bad_rows;
  EXPECT_THAT(message(rows), HasSubstr("logit row 3"));
  Tree tree;
  tree.Add(1, -1);
  tree.Add(2, 0);
  Tree wrong = tree;
  wrong.words[0] |= 2;  // sees a later row
  EXPECT_THAT(message(wrong.At(0, pages)), HasSubstr("ancestor word of row 0"));
  wrong = tree;
  wrong.words[1] = 1;  // does not see itself
  EXPECT_THAT(message(wrong.At(0, pages)), HasSubstr("ancestor word of row 1"));
  wrong = tree;
  wrong.words.pop_back();
  EXPECT_THAT(message(wrong.At(0, pages)), HasSubstr("1 words"));
  wrong = tree;
  wrong.depth[1] = 64 * kPageSize;
  EXPECT_THAT(message(wrong.At(0, pages)), HasSubstr("position 512"));

  const std::vector<int32_t> many = RandomTokens(97, 1, vocab_);
  ForwardResult result;
  EXPECT_THAT(std::string(target_->Forward({Chunk(0, many, Pages(1, 20))}, &result).message()),
              HasSubstr("more than 96 rows"));
  // It still works.
  EXPECT_TRUE(target_->Forward({Chunk(0, tokens, pages)}, &result).ok());
  EXPECT_TRUE(target_->Forward({}, &result).ok());
}

}  // namespace
}  // namespace coppice
