#include "services/router/plan.h"

#include <random>

#include "gtest/gtest.h"

namespace coppice::router {
namespace {

TEST(PlanStepTest, DecodingGoesFirstAndEveryRootBeforeAnyTree) {
  const std::vector<PlanGrant> grants =
      PlanStep({{1, 17, 0}, {2, 0, 100}, {3, 9, 0}, {4, 1, 0}}, {20, 20});
  ASSERT_EQ(grants.size(), 3u);
  EXPECT_EQ(grants[0].handle, 1u);
  EXPECT_EQ(grants[0].rows, 17);
  EXPECT_EQ(grants[1].handle, 3u);
  EXPECT_EQ(grants[1].rows, 2);
  EXPECT_EQ(grants[2].handle, 4u);
  EXPECT_EQ(grants[2].rows, 1);
}

TEST(PlanStepTest, PrefillTakesWhatIsLeftWithinItsOwnLimit) {
  std::vector<PlanGrant> grants =
      PlanStep({{1, 0, 100}, {2, 9, 0}, {3, 0, 5}, {4, 0, 50}}, {64, 40});
  ASSERT_EQ(grants.size(), 2u);
  EXPECT_EQ(grants[0].handle, 1u);
  EXPECT_TRUE(grants[0].prefill);
  EXPECT_EQ(grants[0].rows, 40);
  EXPECT_EQ(grants[1].handle, 2u);
  grants = PlanStep({{1, 0, 30}, {3, 0, 5}, {4, 0, 50}}, {64, 64});
  ASSERT_EQ(grants.size(), 3u);
  EXPECT_EQ(grants[2].rows, 29);
  EXPECT_TRUE(PlanStep({}, {64, 64}).empty());
  EXPECT_TRUE(PlanStep({{1, 0, 30}}, {64, 0}).empty());
}

TEST(PlanStepTest, NeverExceedsTheLimitsNorStarvesTheFirst) {
  std::mt19937 rng(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<PlanItem> items;
    for (uint64_t handle = 1; handle <= rng() % 12; ++handle) {
      if (rng() % 2 == 0) {
        items.push_back({handle, static_cast<int>(1 + rng() % 64), 0});
      } else {
        items.push_back({handle, 0, static_cast<int>(1 + rng() % 500)});
      }
    }
    const PlanLimits limits{static_cast<int>(1 + rng() % 200), static_cast<int>(rng() % 200)};
    int rows = 0;
    int prefill = 0;
    uint64_t last = 0;
    bool all_have_full_trees = true;
    for (const PlanGrant& grant : PlanStep(items, limits)) {
      const PlanItem& item = items[grant.handle - 1];
      EXPECT_GT(grant.handle, last);
      last = grant.handle;
      EXPECT_GE(grant.rows, 1);
      EXPECT_EQ(grant.prefill, item.tree_rows == 0);
      EXPECT_LE(grant.rows, grant.prefill ? item.prefill_rows : item.tree_rows);
      if (!grant.prefill) all_have_full_trees &= grant.rows == item.tree_rows;
      rows += grant.rows;
      if (grant.prefill) prefill += grant.rows;
    }
    EXPECT_LE(rows, limits.max_rows);
    EXPECT_LE(prefill, limits.prefill_rows);
    if (prefill > 0) {
      EXPECT_TRUE(all_have_full_trees);
    }
    if (!items.empty() && items[0].tree_rows > 0) {
      EXPECT_GE(PlanStep(items, limits).size(), 1u);
      EXPECT_EQ(PlanStep(items, limits)[0].handle, 1u);
    }
  }
}

}  // namespace
}  // namespace coppice::router
