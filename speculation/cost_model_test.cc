#include "speculation/cost_model.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace coppice::speculation {
namespace {

CostTable Table(std::vector<CostSample> samples) { return CostTable::Create(samples).value(); }

TEST(CostTableTest, InterpolatesExtendsAndNeverDescends) {
  const CostTable table = Table({{8, 170}, {1, 100}, {16, 160}, {4, 130}, {32, 490}});
  EXPECT_DOUBLE_EQ(table.Microseconds(0), 100);
  EXPECT_DOUBLE_EQ(table.Microseconds(1), 100);
  EXPECT_DOUBLE_EQ(table.Microseconds(2), 110);
  EXPECT_DOUBLE_EQ(table.Microseconds(4), 130);
  EXPECT_DOUBLE_EQ(table.Microseconds(6), 150);
  EXPECT_DOUBLE_EQ(table.Microseconds(12), 170);  // 160 at 16 rows was noise
  EXPECT_DOUBLE_EQ(table.Microseconds(24), 330);
  EXPECT_DOUBLE_EQ(table.Microseconds(48), 810);
  double last = 0;
  for (int rows = 0; rows < 100; ++rows) {
    EXPECT_GE(table.Microseconds(rows), last);
    last = table.Microseconds(rows);
  }
}

TEST(CostTableTest, AStaircaseIsTwoSamplesPerStep) {
  const CostTable table = Table({{1, 100}, {8, 100}, {9, 150}, {16, 150}});
  EXPECT_DOUBLE_EQ(table.Microseconds(5), 100);
  EXPECT_DOUBLE_EQ(table.Microseconds(8), 100);
  EXPECT_DOUBLE_EQ(table.Microseconds(9), 150);
  EXPECT_DOUBLE_EQ(table.Microseconds(16), 150);
}

TEST(CostTableTest, RefusesNonsense) {
  EXPECT_FALSE(CostTable::Create({}).ok());
  for (double time : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(CostTable::Create({{1, time}}).ok());
  }
  EXPECT_FALSE(CostTable::Create({{0, 1.0}}).ok());
  EXPECT_DOUBLE_EQ(Table({{5, 10}}).Microseconds(1000), 10);
}

TEST(LiveCostTest, BeginsAsTheTableAndFollowsWhatIsSeen) {
  LiveCost live(Table({{1, 100}, {8, 800}, {64, 6400}}));
  for (int rows : {1, 3, 8, 20, 64, 200}) {
    EXPECT_DOUBLE_EQ(live.Microseconds(rows), live.table().Microseconds(rows));
  }
  // The table was measured on a machine three times as busy.
  for (int i = 0; i < 30; ++i) live.Observe(1, 100.0 / 3);
  EXPECT_NEAR(live.Microseconds(1), 33.3, 0.1);
  EXPECT_NEAR(live.Microseconds(64), 2133, 10);  // never seen: as the rest
  // But 9 to 16 rows are told to be much dearer than they are.
  for (int i = 0; i < 3; ++i) live.Observe(9, 50);
  EXPECT_LT(live.Microseconds(9), 100);
  EXPECT_GT(live.Microseconds(64), 1500);
  // And back again.
  for (int i = 0; i < 100; ++i) live.Observe(9, 900);
  EXPECT_NEAR(live.Microseconds(9), 900, 50);
}

TEST(LiveCostTest, IgnoresNonsense) {
  LiveCost live(Table({{1, 100}}));
  live.Observe(0, 5);
  live.Observe(-1, 5);
  live.Observe(1, 0);
  live.Observe(1, -3);
  live.Observe(1, std::nan(""));
  live.Observe(1, std::numeric_limits<double>::infinity());
  EXPECT_DOUBLE_EQ(live.Microseconds(1), 100);
  live.Observe(1 << 30, 1e30);  // an outlier is bounded
  EXPECT_LT(live.Microseconds(1 << 30), 100 * std::exp(5.1));
}

std::vector<WidthOption> Options(const std::vector<double>& tokens, int sequences) {
  const int rows[] = {1, 8, 9, 17, 33};
  std::vector<WidthOption> options;
  for (int i = 0; i < kWidths; ++i) {
    options.push_back({tokens[i] * sequences, rows[i] * sequences, i > 0});
  }
  return options;
}

TEST(ChooseWidthTest, TakesTheBestRate) {
  const LiveCost flat(Table({{1, 1000}, {64, 1001}}));
  const LiveCost steep(Table({{1, 1000}, {2, 2000}, {64, 64000}}));
  RoundCost cost;
  cost.draft_us = 200;
  cost.overhead_us = 300;
  const auto good = Options({1, 4.0, 4.2, 4.8, 5.3}, 1);
  cost.verify = &flat;
  EXPECT_EQ(ChooseWidth(good, cost), 4);  // rows are free: the widest
  cost.verify = &steep;
  EXPECT_EQ(ChooseWidth(good, cost), 0);  // rows cost what they bring: none
  const auto useless = Options({1, 1.05, 1.06, 1.08, 1.1}, 1);
  cost.verify = &flat;
  EXPECT_EQ(ChooseWidth(useless, cost), 0);  // the draft costs more than it brings
  // Under load the same rows cost more, and trees shrink.
  const LiveCost loaded(Table({{1, 1000}, {64, 1100}, {512, 6000}}));
  cost.verify = &loaded;
  EXPECT_EQ(ChooseWidth(good, cost), 4);
  EXPECT_LT(ChooseWidth(Options({1, 4.0, 4.2, 4.8, 5.3}, 16), cost), 4);
}

TEST(ChooseWidthTest, EqualsBruteForceAndBreaksTiesByRows) {
  const LiveCost table(Table({{1, 500}, {100, 500}}));
  RoundCost cost;
  cost.verify = &table;
  EXPECT_EQ(ChooseWidth({{2, 10, true}, {2, 5, true}, {2, 5, true}, {1, 1, false}}, cost), 1);
  cost.other_tokens = 7;
  cost.other_rows = 3;
  cost.draft_us = 10;
  for (int seed = 0; seed < 200; ++seed) {
    std::vector<WidthOption> options;
    for (int i = 0; i < 5; ++i) {
      options.push_back({1 + (seed * 7919 + i * 104729) % 97 / 10.0, 1 + i * 8, i > 0});
    }
    const int chosen = ChooseWidth(options, cost);
    for (const WidthOption& option : options) {
      EXPECT_LE(Rate(option, cost), Rate(options[chosen], cost));
    }
  }
}

TEST(WidthForecastTest, BeginsOptimisticAndFollows) {
  WidthForecast forecast;
  EXPECT_GT(forecast.tokens(Width::kChain), 2.0);
  for (int i = 1; i < kWidths; ++i) {
    EXPECT_GT(forecast.tokens(static_cast<Width>(i)), forecast.tokens(static_cast<Width>(i - 1)));
  }
  forecast.Observe({1, 1.5, 1.6, 1.7, 1.8});
  EXPECT_DOUBLE_EQ(forecast.tokens(Width::kChain),
                   1.5);  // the first observation replaces the guess
  for (int i = 0; i < 100; ++i) forecast.Observe({1, 4, 5, 6, 7});
  EXPECT_NEAR(forecast.tokens(Width::kTree33), 7, 0.01);
}

}  // namespace
}  // namespace coppice::speculation
