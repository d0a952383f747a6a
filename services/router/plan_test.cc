#include "services/router/plan.h"

#include <cmath>
#include <memory>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace coppice::router {
namespace {

using speculation::CostSample;
using speculation::kWidths;
using speculation::LiveCost;
using speculation::Width;
using ::testing::ElementsAre;

constexpr int kBlock = 8;

// Seven positions of candidates, of which the best has this probability and each other a third of
// the one before.
struct Draft {
  explicit Draft(double best, int k = 4) {
    view.positions = kBlock - 1;
    view.k = k;
    for (int position = 0; position < view.positions; ++position) {
      for (int rank = 0; rank < k; ++rank) {
        tokens.push_back(10 * position + rank);
        log_probs.push_back(static_cast<float>(std::log(best / std::pow(3, rank))));
      }
    }
    view.tokens = tokens;
    view.log_probs = log_probs;
  }
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;
  speculation::CandidateView view;
};

LiveCost Cost(std::vector<CostSample> samples) {
  return LiveCost(*speculation::CostTable::Create(samples));
}

struct Bench {
  LiveCost verify = Cost({{1, 1000}, {64, 1064}});
  LiveCost draft = Cost({{1, 300}});
  RoundInput input;
  speculation::TreeBuilder builder;
  int max_rows = 512;
  double prefill_us_per_token = 0;

  RoundCosts Costs() const {
    RoundCosts costs;
    costs.verify = &verify;
    costs.draft = &draft;
    costs.overhead_us = 100;
    costs.prefill_us_per_token = prefill_us_per_token;
    costs.max_rows = max_rows;
    costs.block_size = kBlock;
    return costs;
  }
  RoundItem& Decode(uint64_t handle, Speculation mode, const Draft* drafted, int tree_nodes = 17) {
    RoundItem& item = input.items.emplace_back();
    item.handle = handle;
    item.mode = mode;
    item.tree_nodes = tree_nodes;
    item.drafted = drafted != nullptr;
    item.build.root_token = 5;
    if (drafted != nullptr) item.build.candidates = drafted->view;
    ++input.decoding;
    return item;
  }
  void Prefill(uint64_t handle, int rows) {
    RoundItem& item = input.items.emplace_back();
    item.handle = handle;
    item.prefill_rows = rows;
  }
  std::vector<RoundGrant> Plan() { return PlanRound(input, Costs(), &builder); }
  std::vector<int> Nodes() {
    std::vector<int> nodes;
    for (const RoundGrant& grant : Plan()) nodes.push_back(grant.tree.tree.nodes());
    return nodes;
  }
};

TEST(PlanTest, TheWidths) {
  EXPECT_THAT(WidthNodes(8), ElementsAre(1, 8, 9, 17, 33));
  EXPECT_THAT(WidthNodes(16), ElementsAre(1, 16, 9, 17, 33));
}

TEST(PlanRoundTest, EachModeHasItsSize) {
  const Draft draft(0.6);
  Bench bench;
  bench.Decode(1, Speculation::kOff, nullptr);
  bench.Decode(2, Speculation::kChain, &draft);
  bench.Decode(3, Speculation::kTree, &draft, 13);
  bench.Decode(4, Speculation::kTree, nullptr);
  bench.Decode(5, Speculation::kTree, &draft, 64).build.max_nodes = 20;
  EXPECT_THAT(bench.Nodes(), ElementsAre(1, kBlock, 13, 1, 20));
}

TEST(PlanRoundTest, ATreeIsTheOneItsOwnBudgetBuilds) {
  const Draft draft(0.5);
  speculation::TreeBuilder builder;
  for (const int nodes : {2, 5, 9, 12, 17, 30, 40}) {
    Bench bench;
    bench.Decode(1, Speculation::kTree, &draft, nodes);
    speculation::BuiltTree alone;
    builder.Build(bench.input.items[0].build, nodes - 1, &alone);
    const std::vector<RoundGrant> grants = bench.Plan();
    EXPECT_EQ(grants[0].tree.tree.token, alone.tree.token);
    EXPECT_EQ(grants[0].tree.tree.parent, alone.tree.parent);
  }
}

TEST(PlanRoundTest, AutoTakesTheWidthWithTheBestRate) {
  const Draft sure(0.65);
  const auto nodes = [&](std::vector<CostSample> cost, bool looks) {
    Bench bench;
    bench.verify = Cost(std::move(cost));
    bench.Decode(1, Speculation::kAuto, &sure).looks = looks;
    return bench.Nodes()[0];
  };
  EXPECT_EQ(nodes({{1, 5000}, {64, 5001}}, false), 33) << "rows are free";
  EXPECT_EQ(nodes({{1, 100}, {2, 20000}, {64, 640000}}, false), 1) << "rows are dear";
  EXPECT_EQ(nodes({{1, 100}, {2, 20000}, {64, 640000}}, true), kBlock) << "it wants to see";
  EXPECT_EQ(nodes({{1, 1000}, {8, 1010}, {9, 9000}, {64, 9000}}, false), kBlock) << "a staircase";
}

TEST(PlanRoundTest, SequencesOnAutoShareOneBudget) {
  const Draft sure(0.72), unsure(0.3);
  Bench bench;
  bench.verify = Cost({{1, 5000}, {64, 5001}});
  bench.Decode(1, Speculation::kAuto, &unsure);
  bench.Decode(2, Speculation::kAuto, &sure);
  const std::vector<int> nodes = bench.Nodes();
  EXPECT_EQ(nodes[0] + nodes[1], 66);
  EXPECT_GT(nodes[1], nodes[0]);
}

TEST(PlanRoundTest, AutoLeavesRoomForTheOthers) {
  const Draft draft(0.65);
  Bench bench;
  bench.verify = Cost({{1, 5000}, {64, 5001}});
  bench.max_rows = 40;
  bench.Decode(1, Speculation::kAuto, &draft);
  bench.Decode(2, Speculation::kTree, &draft, 20);
  EXPECT_THAT(bench.Nodes(), ElementsAre(17, 20));
}

// What a draft would have brought at each width is the same knowledge whatever the mode.
TEST(PlanRoundTest, EveryDraftTeachesTheForecast) {
  const Draft draft(0.6);
  std::array<double, kWidths> of_auto{};
  for (const Speculation mode : {Speculation::kAuto, Speculation::kChain, Speculation::kTree}) {
    Bench bench;
    bench.Decode(1, mode, &draft, 3);
    const std::vector<RoundGrant> grants = bench.Plan();
    ASSERT_TRUE(grants[0].expected.has_value());
    const std::array<double, kWidths>& expected = *grants[0].expected;
    EXPECT_EQ(expected[static_cast<int>(Width::kOff)], 1);
    for (int width = 1; width < kWidths; ++width) EXPECT_GT(expected[width], expected[width - 1]);
    if (mode == Speculation::kAuto) of_auto = expected;
    for (int width = 0; width < kWidths; ++width) {
      EXPECT_NEAR(expected[width], of_auto[width], 1e-9) << width;
    }
  }
  Bench plain;
  plain.Decode(1, Speculation::kTree, nullptr);
  EXPECT_FALSE(plain.Plan()[0].expected.has_value());
}

TEST(PlanRoundTest, DecodingGoesFirstAndEveryRootBeforeAnyTree) {
  const Draft draft(0.6);
  Bench bench;
  bench.max_rows = 20;
  bench.Decode(1, Speculation::kTree, &draft, 17);
  bench.Prefill(2, 100);
  bench.Decode(3, Speculation::kTree, &draft, 9);
  bench.Decode(4, Speculation::kOff, nullptr);
  const std::vector<RoundGrant> grants = bench.Plan();
  ASSERT_EQ(grants.size(), 3u);
  EXPECT_EQ(grants[0].handle, 1u);
  EXPECT_EQ(grants[0].tree.tree.nodes(), 17);
  EXPECT_EQ(grants[1].handle, 3u);
  EXPECT_EQ(grants[1].tree.tree.nodes(), 2);
  EXPECT_EQ(grants[2].handle, 4u);
  EXPECT_EQ(grants[2].tree.tree.nodes(), 1);
}

TEST(PlanRoundTest, PrefillAloneTakesTheWholeStep) {
  Bench bench;
  bench.max_rows = 64;
  bench.prefill_us_per_token = 1e6;
  bench.Prefill(1, 30);
  bench.Prefill(3, 5);
  bench.Prefill(4, 50);
  const std::vector<RoundGrant> grants = bench.Plan();
  ASSERT_EQ(grants.size(), 3u);
  EXPECT_EQ(grants[0].prefill, 30);
  EXPECT_EQ(grants[1].prefill, 5);
  EXPECT_EQ(grants[2].prefill, 29);
  EXPECT_TRUE(Bench().Plan().empty());
}

TEST(PlanRoundTest, PrefillBesideDecodingTakesNoLongerThanTheStepOrTheDrafts) {
  const Draft draft(0.6);
  const auto prefill = [&](double us_per_token, int asked) {
    Bench bench;
    bench.verify = Cost({{1, 1000}});
    bench.draft = Cost({{1, 3000}});
    bench.prefill_us_per_token = us_per_token;
    bench.Decode(1, Speculation::kTree, &draft, 9);
    bench.input.asked = asked;
    bench.Prefill(2, 400);
    const std::vector<RoundGrant> grants = bench.Plan();
    EXPECT_EQ(grants.size(), 2u);
    return grants[1].prefill;
  };
  EXPECT_EQ(prefill(10, 0), 100) << "the step's time";
  EXPECT_EQ(prefill(10, 1), 300) << "the drafts' time";
  EXPECT_EQ(prefill(1000, 0), 32) << "but some";
  EXPECT_EQ(prefill(0, 0), 400) << "nothing is known";
}

TEST(PlanRoundTest, NeverExceedsTheLimitsNorStarvesTheFirst) {
  std::mt19937 rng(1);
  const Draft draft(0.6);
  const Speculation modes[] = {Speculation::kAuto, Speculation::kOff, Speculation::kChain,
                               Speculation::kTree};
  for (int round = 0; round < 2000; ++round) {
    Bench bench;
    bench.max_rows = static_cast<int>(1 + rng() % 200);
    bench.prefill_us_per_token = rng() % 3 == 0 ? 0 : 1 + rng() % 50;
    const uint64_t count = rng() % 12;
    for (uint64_t handle = 1; handle <= count; ++handle) {
      if (rng() % 2 == 0) {
        const Speculation mode = modes[rng() % 4];
        const bool drafted = mode != Speculation::kOff && rng() % 3 != 0;
        bench.Decode(handle, mode, drafted ? &draft : nullptr, static_cast<int>(2 + rng() % 63));
      } else {
        bench.Prefill(handle, static_cast<int>(1 + rng() % 500));
      }
    }
    int rows = 0;
    uint64_t last = 0;
    const std::vector<RoundGrant> grants = bench.Plan();
    for (const RoundGrant& grant : grants) {
      const RoundItem& item = bench.input.items[grant.handle - 1];
      EXPECT_GT(grant.handle, last);
      last = grant.handle;
      if (item.prefill_rows > 0) {
        EXPECT_GE(grant.prefill, 1);
        EXPECT_LE(grant.prefill, item.prefill_rows);
        rows += grant.prefill;
      } else {
        EXPECT_EQ(grant.prefill, 0);
        EXPECT_GE(grant.tree.tree.nodes(), 1);
        rows += grant.tree.tree.nodes();
      }
    }
    EXPECT_LE(rows, bench.max_rows);
    if (!bench.input.items.empty()) {
      ASSERT_GE(grants.size(), 1u);
      const bool any_decodes = bench.input.decoding > 0;
      if (!any_decodes) {
        EXPECT_EQ(grants[0].handle, 1u);
      }
    }
  }
}

// ---- Before the drafts

struct Forecasts {
  Forecasts() {
    good.Observe({1, 5, 5.2, 5.6, 6});
    bad.Observe({1, 1.1, 1.1, 1.1, 1.1});
  }
  speculation::WidthForecast good;
  speculation::WidthForecast bad;
};

TEST(DraftingPaysTest, AsTheForecastsAndTheCostsSay) {
  const Forecasts f;
  const auto pays = [](const std::vector<Decoding>& decoding, const std::vector<Decoding>& deciding,
                       std::vector<CostSample> verify, double draft_us) {
    Bench bench;
    bench.verify = Cost(std::move(verify));
    bench.draft = Cost({{1, draft_us}});
    return DraftingPays(decoding, deciding, 0, bench.Costs());
  };
  const std::vector<CostSample> flat = {{1, 1000}, {64, 1001}};
  const std::vector<CostSample> dear = {{1, 1000}, {64, 64000}};
  const std::vector<Decoding> good = {{Speculation::kAuto, 0, &f.good}};
  const std::vector<Decoding> bad = {{Speculation::kAuto, 0, &f.bad}};
  EXPECT_TRUE(pays(good, good, flat, 300));
  EXPECT_FALSE(pays(bad, bad, flat, 300)) << "a draft costs more than a tenth of a token";
  EXPECT_TRUE(pays(bad, bad, flat, 10));
  EXPECT_FALSE(pays(good, good, dear, 300));
  EXPECT_FALSE(pays(good, good, flat, 100000));
  // Where others make the step long anyway, a little more of it costs nothing beside.
  std::vector<Decoding> busy = good;
  EXPECT_FALSE(pays(busy, good, {{1, 1000}, {2, 9500}, {64, 9500}}, 300));
  busy.push_back({Speculation::kTree, 17, &f.good});
  EXPECT_TRUE(pays(busy, good, {{1, 1000}, {2, 9500}, {64, 9500}}, 300));
}

TEST(DraftingPaysTest, WhatDoesNotFitIntoAStepIsNotCounted) {
  const Forecasts f;
  Bench bench;
  bench.max_rows = kBlock - 1;
  const std::vector<Decoding> good = {{Speculation::kAuto, 0, &f.good}};
  EXPECT_FALSE(DraftingPays(good, good, 0, bench.Costs()));
  bench.max_rows = kBlock;
  EXPECT_TRUE(DraftingPays(good, good, 0, bench.Costs()));
}

}  // namespace
}  // namespace coppice::router
