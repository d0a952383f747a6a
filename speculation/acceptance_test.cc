#include "speculation/acceptance.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace coppice::speculation {
namespace {

// Depth 1: tokens 1 and 2; depth 2: token 3 on the spine, token 3 beside it.
BuiltTree Small(float first, float second, float below) {
  BuiltTree built;
  built.tree.token = {0, 1, 3, 2, 3};
  built.tree.parent = {-1, 0, 1, 0, 3};
  built.tree.depth = {0, 1, 2, 1, 2};
  built.log_prob = {0, std::log(first), std::log(below), std::log(second), std::log(below)};
  built.score.assign(5, 0.0);
  built.on_spine = {1, 1, 1, 0, 0};
  return built;
}

TEST(AcceptanceTrackerTest, BeginsAtThePrior) {
  AcceptancePrior prior;
  prior.on_spine = 0.9f;
  prior.off_spine = 0.25f;
  const AcceptanceTracker tracker(prior);
  for (int i = 0; i < kMaxPositions; ++i) {
    EXPECT_NEAR(tracker.calibration().on_spine[i], std::log(0.9), 1e-5);
    EXPECT_NEAR(tracker.calibration().off_spine[i], std::log(0.25), 1e-5);
  }
}

TEST(AcceptanceTrackerTest, LearnsTheRatioOfObservedToClaimed) {
  AcceptanceTracker tracker;
  std::mt19937 rng(1);
  std::uniform_real_distribution<double> uniform;
  const BuiltTree built = Small(0.6f, 0.3f, 0.8f);
  // Truth: the spine's first node is accepted with 0.5, the other with 0.2; below the spine 0.4,
  // beside it 0.1.
  for (int round = 0; round < 4000; ++round) {
    int end = 0;
    const double first = uniform(rng);
    if (first < 0.5) {
      end = uniform(rng) < 0.4 ? 2 : 1;
    } else if (first < 0.7) {
      end = uniform(rng) < 0.1 ? 4 : 3;
    }
    tracker.Observe(built, end, false);
  }
  EXPECT_NEAR(std::exp(tracker.calibration().on_spine[0]), 0.7 / 0.9, 0.12);
  EXPECT_NEAR(std::exp(tracker.calibration().on_spine[1]), 0.4 / 0.8, 0.15);
  EXPECT_NEAR(std::exp(tracker.calibration().off_spine[1]), 0.1 / 0.8, 0.12);
  EXPECT_FLOAT_EQ(tracker.calibration().on_spine[2], 0.0f);  // nothing was seen there
}

TEST(AcceptanceTrackerTest, ACutTeachesNothingAboutTheLastNode) {
  AcceptanceTracker cut;
  AcceptanceTracker untouched;
  const BuiltTree built = Small(0.6f, 0.3f, 0.8f);
  cut.Observe(built, 0, true);
  EXPECT_EQ(cut.calibration().on_spine, untouched.calibration().on_spine);
  cut.Observe(built, 1, true);
  EXPECT_GT(cut.calibration().on_spine[0], untouched.calibration().on_spine[0]);
  EXPECT_EQ(cut.calibration().on_spine[1], untouched.calibration().on_spine[1]);
}

TEST(AcceptanceTrackerTest, StaysBoundedAndForgets) {
  AcceptanceTracker tracker;
  const BuiltTree built = Small(0.6f, 0.3f, 0.8f);
  for (int i = 0; i < 5000; ++i) tracker.Observe(built, 0, false);
  EXPECT_LT(tracker.calibration().on_spine[0], -1.5f);
  EXPECT_GE(tracker.calibration().on_spine[0], -4.0f);
  for (int i = 0; i < 500; ++i) tracker.Observe(built, 2, false);
  EXPECT_NEAR(std::exp(tracker.calibration().on_spine[0]), 1.0 / 0.9, 0.05);
}

TEST(AcceptanceTrackerTest, CalibrationShiftsNodesTowardTheSpine) {
  AcceptanceTracker tracker;
  const int32_t tokens[] = {1, 2, 3, 4};
  const float log_probs[] = {std::log(0.5f), std::log(0.45f), std::log(0.9f), std::log(0.1f)};
  BuildRequest request;
  request.candidates = {2, 2, tokens, log_probs};
  request.min_spine = 0;
  request.calibration = &tracker.calibration();
  BuiltTree built;
  TreeBuilder().Build(request, 63, &built);
  // Claimed 0.45 * 0.9 beside the spine counts 0.3 of that.
  for (int node = 1; node < built.tree.nodes(); ++node) {
    if (built.tree.depth[node] == 2 && built.tree.token[built.tree.parent[node]] == 2 &&
        built.tree.token[node] == 3) {
      EXPECT_NEAR(std::exp(built.score[node]), 0.45 * 0.9 * 0.3, 1e-5);
    }
  }
}

}  // namespace
}  // namespace coppice::speculation
