#include "speculation/build.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace coppice::speculation {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Candidates {
  int positions;
  int k;
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;

  CandidateView view() const { return {positions, k, tokens, log_probs}; }
};

// Random candidates; `levels` > 0 rounds log-probabilities to that many values, so that ties
// abound.
Candidates RandomCandidates(std::mt19937& rng, int positions, int k, int levels) {
  Candidates out{positions, k, {}, {}};
  for (int p = 0; p < positions; ++p) {
    std::vector<float> row(k);
    for (float& value : row) {
      value = levels > 0 ? -0.5f * static_cast<float>(1 + rng() % levels)
                         : -std::uniform_real_distribution<float>(0.01f, 5.0f)(rng);
    }
    std::sort(row.rbegin(), row.rend());
    if (rng() % 5 == 0) row.back() = -kInf;
    std::vector<int32_t> ids(100);
    for (int i = 0; i < 100; ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), rng);
    for (int r = 0; r < k; ++r) {
      out.tokens.push_back(ids[r]);
      out.log_probs.push_back(row[r]);
    }
  }
  return out;
}

Calibration RandomCalibration(std::mt19937& rng) {
  Calibration calibration;
  for (int i = 0; i < kMaxPositions; ++i) {
    calibration.on_spine[i] = std::uniform_real_distribution<float>(-1.0f, 0.5f)(rng);
    calibration.off_spine[i] = std::uniform_real_distribution<float>(-2.0f, 0.2f)(rng);
  }
  return calibration;
}

double NodeScore(const BuildRequest& request, int depth, int rank, double base, bool on_spine) {
  double value = request.candidates.log_probs[(depth - 1) * request.candidates.k + rank];
  if (request.calibration != nullptr) {
    value += on_spine ? request.calibration->on_spine[depth - 1]
                      : request.calibration->off_spine[depth - 1];
  }
  return base + std::min(value, 0.0);
}

using Prefix = std::vector<int>;  // ranks

// Every prefix up to the depth cap with its score.
void Enumerate(const BuildRequest& request, Prefix& prefix, double score, bool on_spine,
               std::map<Prefix, double>* out) {
  const int depth = static_cast<int>(prefix.size()) + 1;
  if (depth > std::min(request.candidates.positions, request.max_depth)) return;
  for (int rank = 0; rank < request.candidates.k; ++rank) {
    if (request.candidates.log_probs[(depth - 1) * request.candidates.k + rank] == -kInf) continue;
    const double value = NodeScore(request, depth, rank, score, on_spine);
    prefix.push_back(rank);
    (*out)[prefix] = value;
    Enumerate(request, prefix, value, on_spine && rank == 0, out);
    prefix.pop_back();
  }
}

Prefix RanksOf(const BuildRequest& request, const DraftTree& tree, int node) {
  Prefix ranks;
  for (; node > 0; node = tree.parent[node]) {
    const int at = (tree.depth[node] - 1) * request.candidates.k;
    int rank = 0;
    while (request.candidates.tokens[at + rank] != tree.token[node]) ++rank;
    ranks.insert(ranks.begin(), rank);
  }
  return ranks;
}

TEST(BuildTest, EqualsTheLikeliestPrefixes) {
  std::mt19937 rng(1);
  TreeBuilder builder;
  BuiltTree built;
  for (int round = 0; round < 1500; ++round) {
    const int positions = 1 + static_cast<int>(rng() % 4);
    const int k = 1 + static_cast<int>(rng() % 4);
    const Candidates candidates = RandomCandidates(rng, positions, k, round % 3 == 0 ? 4 : 0);
    const Calibration calibration = RandomCalibration(rng);
    BuildRequest request;
    request.candidates = candidates.view();
    request.max_depth = static_cast<int>(rng() % 6);
    request.min_spine = 0;
    request.calibration = round % 2 == 0 ? &calibration : nullptr;
    const int budget = static_cast<int>(rng() % 64);
    builder.Build(request, budget, &built);
    ASSERT_TRUE(Validate(built.tree).ok()) << Validate(built.tree);

    std::map<Prefix, double> all;
    Prefix prefix;
    Enumerate(request, prefix, 0.0, true, &all);
    std::vector<double> expected;
    for (const auto& [ranks, score] : all) expected.push_back(score);
    std::sort(expected.rbegin(), expected.rend());
    expected.resize(std::min<size_t>({expected.size(), static_cast<size_t>(budget), 63}));
    std::vector<double> actual(built.score.begin() + 1, built.score.end());
    ASSERT_EQ(actual, expected);  // also that nodes come best first
    for (int node = 1; node < built.tree.nodes(); ++node) {
      const Prefix ranks = RanksOf(request, built.tree, node);
      ASSERT_EQ(all.at(ranks), built.score[node]);
      ASSERT_EQ(built.on_spine[node] != 0,
                std::all_of(ranks.begin(), ranks.end(), [](int rank) { return rank == 0; }));
      all.erase(ranks);  // each prefix once
    }
  }
}

// The same result as taking, again and again, the best of a plain list by the documented order.
TEST(BuildTest, OrderIsTotal) {
  struct Item {
    double score;
    int depth, rank, inserted, parent;
    double base;
    bool parent_on_spine;
  };
  std::mt19937 rng(2);
  TreeBuilder builder;
  BuiltTree built;
  for (int round = 0; round < 1000; ++round) {
    const Candidates candidates = RandomCandidates(rng, 1 + rng() % 5, 1 + rng() % 5, 3);
    BuildRequest request;
    request.candidates = candidates.view();
    request.min_spine = 0;
    const int budget = static_cast<int>(rng() % 40);
    builder.Build(request, budget, &built);

    DraftTree tree = RootOnly(0);
    std::vector<Item> list;
    int inserted = 0;
    auto push = [&](int parent, int depth, int rank, double base, bool on_spine) {
      if (depth > candidates.positions || rank >= candidates.k) return;
      if (candidates.log_probs[(depth - 1) * candidates.k + rank] == -kInf) return;
      list.push_back({NodeScore(request, depth, rank, base, on_spine), depth, rank, inserted++,
                      parent, base, on_spine});
    };
    push(0, 1, 0, 0.0, true);
    while (!list.empty() && tree.nodes() <= budget) {
      auto best = std::min_element(list.begin(), list.end(), [](const Item& a, const Item& b) {
        return std::make_tuple(-a.score, a.depth, a.rank, a.inserted) <
               std::make_tuple(-b.score, b.depth, b.rank, b.inserted);
      });
      const Item item = *best;
      list.erase(best);
      const int node = tree.nodes();
      tree.token.push_back(candidates.tokens[(item.depth - 1) * candidates.k + item.rank]);
      tree.parent.push_back(item.parent);
      tree.depth.push_back(item.depth);
      push(item.parent, item.depth, item.rank + 1, item.base, item.parent_on_spine);
      push(node, item.depth + 1, 0, item.score, item.parent_on_spine && item.rank == 0);
    }
    ASSERT_EQ(built.tree.token, tree.token);
    ASSERT_EQ(built.tree.parent, tree.parent);
  }
}

TEST(BuildTest, TiesBreakByDepthThenRankThenInsertion) {
  // All candidates equally likely and certain: every prefix scores 0.
  Candidates candidates{2, 2, {10, 11, 20, 21}, {0, 0, 0, 0}};
  BuildRequest request;
  request.candidates = candidates.view();
  request.min_spine = 0;
  TreeBuilder builder;
  BuiltTree built;
  builder.Build(request, 6, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(0, 10, 11, 20, 20, 21, 21));
  EXPECT_THAT(built.tree.parent, ElementsAre(-1, 0, 0, 1, 2, 1, 2));
}

TEST(BuildTest, SpineComesFirstAndContainsTheChain) {
  std::mt19937 rng(3);
  TreeBuilder builder;
  BuiltTree built;
  for (int round = 0; round < 500; ++round) {
    const Candidates candidates = RandomCandidates(rng, 7, 8, round % 2 == 0 ? 3 : 0);
    BuildRequest request;
    request.candidates = candidates.view();
    request.max_depth = static_cast<int>(rng() % 9);
    const int budget = static_cast<int>(rng() % 40);
    builder.Build(request, budget, &built);
    BuiltTree chain;
    builder.Build(request, SpineLength(request.candidates, request.max_depth), &chain);
    ASSERT_TRUE(Validate(built.tree).ok());
    ASSERT_EQ(chain.tree.nodes(), 1 + SpineLength(request.candidates, request.max_depth));
    const int shared = std::min(chain.tree.nodes(), budget + 1);
    ASSERT_GE(built.tree.nodes(), shared);
    for (int node = 0; node < shared; ++node) {
      EXPECT_EQ(built.tree.token[node], chain.tree.token[node]);
      EXPECT_EQ(built.tree.parent[node], node - 1);
      EXPECT_TRUE(built.on_spine[node]);
    }
    for (int node = shared; node < built.tree.nodes(); ++node) EXPECT_FALSE(built.on_spine[node]);
    EXPECT_LE(*std::max_element(built.tree.depth.begin(), built.tree.depth.end()),
              request.max_depth);
    // tau: any target commits at least as much of the tree as of the chain it contains.
    if (built.tree.nodes() >= chain.tree.nodes()) {
      std::vector<int32_t> truth;
      for (int i = 0; i < 7; ++i) truth.push_back(candidates.tokens[i * 8 + rng() % 2]);
      auto committed = [&](const DraftTree& tree) {
        return Walk(
                   tree,
                   [&](int node) { return tree.depth[node] < 7 ? truth[tree.depth[node]] : -1; },
                   [](int32_t, int) { return false; })
            .tokens.size();
      };
      EXPECT_GE(committed(built.tree), committed(chain.tree));
      EXPECT_GE(ExpectedTokens(built), ExpectedTokens(chain));
    }
  }
}

TEST(BuildTest, NoCandidatesLeaveTheRoot) {
  TreeBuilder builder;
  BuiltTree built;
  BuildRequest request;
  request.root_token = 42;
  builder.Build(request, 10, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42));
  const Candidates masked{2, 2, {1, 2, 3, 4}, {-kInf, -kInf, -0.1f, -kInf}};
  request.candidates = masked.view();
  builder.Build(request, 10, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42));
  request.min_spine = 0;
  builder.Build(request, 10, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42));
  const Candidates good{1, 2, {1, 2}, {-0.1f, -2}};
  request.candidates = good.view();
  builder.Build(request, 0, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42));
  builder.Build(request, -3, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42));
  request.max_depth = 0;
  builder.Build(request, 10, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42));
  request.max_depth = 1;
  request.max_nodes = 2;
  builder.Build(request, 10, &built);
  EXPECT_THAT(built.tree.token, ElementsAre(42, 1));
}

TEST(BuildTest, RepeatedTokensCountOnce) {
  const Candidates repeated{
      2, 4, {5, 5, 6, 5, 7, 7, 7, 8}, {-0.1f, -0.2f, -0.3f, -0.4f, -0.1f, -0.2f, -0.3f, -0.4f}};
  BuildRequest request;
  request.candidates = repeated.view();
  TreeBuilder builder;
  BuiltTree built;
  builder.Build(request, 63, &built);
  EXPECT_TRUE(Validate(built.tree).ok()) << Validate(built.tree);
  EXPECT_EQ(built.tree.nodes(), 1 + 2 + 4);
}

TEST(BuildBatchTest, OneSequenceEqualsBuild) {
  std::mt19937 rng(4);
  TreeBuilder builder;
  for (int round = 0; round < 300; ++round) {
    const Candidates candidates = RandomCandidates(rng, 7, 6, round % 2 == 0 ? 4 : 0);
    BuildRequest request;
    request.candidates = candidates.view();
    request.min_spine = static_cast<int>(rng() % 8);
    const int budget = static_cast<int>(rng() % 64);
    BuiltTree alone;
    builder.Build(request, budget, &alone);
    std::vector<BuiltTree> batch;
    builder.BuildBatch(absl::MakeConstSpan(&request, 1), budget, &batch);
    ASSERT_EQ(batch.size(), 1u);
    EXPECT_EQ(batch[0].tree.token, alone.tree.token);
    EXPECT_EQ(batch[0].tree.parent, alone.tree.parent);
    EXPECT_EQ(batch[0].score, alone.score);
  }
}

TEST(BuildBatchTest, SpendsTheBudgetOnTheLikeliestPrefixesOfAll) {
  std::mt19937 rng(5);
  TreeBuilder builder;
  for (int round = 0; round < 300; ++round) {
    const int count = 1 + static_cast<int>(rng() % 4);
    std::vector<Candidates> candidates;
    std::vector<Calibration> calibrations;
    for (int i = 0; i < count; ++i) {
      candidates.push_back(RandomCandidates(rng, 1 + rng() % 3, 1 + rng() % 4, 0));
      calibrations.push_back(RandomCalibration(rng));
    }
    std::vector<BuildRequest> requests(count);
    std::vector<double> expected;
    for (int i = 0; i < count; ++i) {
      requests[i].root_token = 1000 + i;
      requests[i].candidates = candidates[i].view();
      requests[i].min_spine = 0;
      requests[i].calibration = &calibrations[i];
      std::map<Prefix, double> all;
      Prefix prefix;
      Enumerate(requests[i], prefix, 0.0, true, &all);
      for (const auto& [ranks, score] : all) expected.push_back(score);
    }
    std::sort(expected.rbegin(), expected.rend());
    const int budget = static_cast<int>(rng() % 60);
    expected.resize(std::min<size_t>(expected.size(), budget));
    std::vector<BuiltTree> built;
    std::vector<int32_t> order;
    builder.BuildBatch(requests, budget, &built, &order);
    std::vector<double> actual;
    for (int i = 0; i < count; ++i) {
      ASSERT_TRUE(Validate(built[i].tree).ok());
      ASSERT_EQ(built[i].tree.token[0], 1000 + i);
      ASSERT_LT(built[i].tree.nodes(), kMaxNodes);
      actual.insert(actual.end(), built[i].score.begin() + 1, built[i].score.end());
    }
    std::sort(actual.rbegin(), actual.rend());
    ASSERT_EQ(actual, expected);

    // A smaller budget's trees are these, truncated.
    const int smaller = static_cast<int>(rng() % (order.size() + 1));
    std::vector<BuiltTree> small;
    builder.BuildBatch(requests, smaller, &small);
    std::vector<int> nodes(count, 1);
    for (int i = 0; i < smaller; ++i) ++nodes[order[i]];
    for (int i = 0; i < count; ++i) {
      built[i].Truncate(nodes[i]);
      EXPECT_EQ(built[i].tree.token, small[i].tree.token);
      EXPECT_EQ(built[i].score, small[i].score);
    }
  }
}

TEST(BuildBatchTest, SpinesShareASmallBudgetAndTreesKeepTheirCaps) {
  std::mt19937 rng(6);
  const Candidates candidates = RandomCandidates(rng, 7, 16, 0);
  std::vector<BuildRequest> requests(3);
  for (BuildRequest& request : requests) request.candidates = candidates.view();
  requests[1].max_nodes = 2;
  std::vector<BuiltTree> built;
  TreeBuilder().BuildBatch(requests, 5, &built);
  EXPECT_EQ(built[0].tree.nodes(), 1 + 2);
  EXPECT_EQ(built[1].tree.nodes(), 2);
  EXPECT_EQ(built[2].tree.nodes(), 1 + 2);
  TreeBuilder().BuildBatch(requests, 1000, &built);
  EXPECT_EQ(built[0].tree.nodes(), kMaxNodes);
  EXPECT_EQ(built[1].tree.nodes(), 2);
  EXPECT_EQ(built[2].tree.nodes(), kMaxNodes);
}

TEST(CandidateViewTest, ValidationNamesTheCulprit) {
  auto message = [](const Candidates& candidates) {
    return std::string(Validate(candidates.view(), 100).message());
  };
  EXPECT_TRUE(Validate(Candidates{0, 0, {}, {}}.view(), 100).ok());
  EXPECT_TRUE(Validate(Candidates{1, 2, {3, 4}, {-0.5f, -kInf}}.view(), 100).ok());
  EXPECT_THAT(message({1, 2, {3, 100}, {-1, -2}}), HasSubstr("position 0, rank 1: token 100"));
  EXPECT_THAT(message({1, 2, {3, -1}, {-1, -2}}), HasSubstr("token -1"));
  EXPECT_THAT(message({2, 1, {3, 4}, {-1, std::nanf("")}}), HasSubstr("position 1, rank 0"));
  EXPECT_THAT(message({1, 1, {3}, {0.5f}}), HasSubstr("0.5 is not a log-probability"));
  EXPECT_THAT(message({1, 2, {3, 4}, {-2, -1}}), HasSubstr("best first"));
  EXPECT_THAT(message({1, 2, {3}, {-2, -1}}), HasSubstr("needs 2"));
  EXPECT_THAT(message({17, 1, std::vector<int32_t>(17), std::vector<float>(17, -1.0f)}),
              HasSubstr("17 of 1"));
}

// Whatever a drafter sends, either validation refuses it or the tree that comes of it is one.
TEST(CandidateViewTest, AnyAcceptedInputBuildsATree) {
  std::mt19937 rng(7);
  TreeBuilder builder;
  BuiltTree built;
  int accepted = 0;
  const float values[] = {0, -0.0f, -1, -2, -1e30f, -kInf, kInf, std::nanf(""), 1e-4f};
  for (int round = 0; round < 20000; ++round) {
    Candidates candidates{static_cast<int>(rng() % 4), static_cast<int>(rng() % 4), {}, {}};
    for (int i = 0; i < candidates.positions * candidates.k; ++i) {
      candidates.tokens.push_back(static_cast<int32_t>(rng() % 5));
      candidates.log_probs.push_back(values[rng() % (rng() % 4 == 0 ? 9 : 6)]);
    }
    for (int p = 0; p < candidates.positions && rng() % 4 != 0; ++p) {
      std::sort(candidates.log_probs.begin() + p * candidates.k,
                candidates.log_probs.begin() + (p + 1) * candidates.k, std::greater<float>());
    }
    if (!Validate(candidates.view(), 5).ok()) continue;
    ++accepted;
    BuildRequest request;
    request.candidates = candidates.view();
    request.min_spine = static_cast<int>(rng() % 4);
    builder.Build(request, static_cast<int>(rng() % 70), &built);
    ASSERT_TRUE(Validate(built.tree).ok()) << Validate(built.tree);
    ASSERT_EQ(built.score.size(), built.tree.token.size());
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace coppice::speculation
