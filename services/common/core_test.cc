#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "services/common/build_info.h"
#include "services/common/clock.h"
#include "services/common/epoch.h"
#include "services/common/heartbeat.h"

namespace coppice {
namespace {

using namespace std::chrono_literals;

TEST(ClockTest, FakeClockMovesOnlyWhenTold) {
  FakeClock clock;
  const TimePoint start = clock.Now();
  EXPECT_EQ(clock.Now(), start);
  clock.Advance(1500us);
  EXPECT_FLOAT_EQ(MicrosBetween(start, clock.Now()), 1500.0f);
}

TEST(ClockTest, RealClockAdvances) {
  const TimePoint start = Clock::Real()->Now();
  while (Clock::Real()->Now() == start) {
  }
  EXPECT_GT(Clock::Real()->Now(), start);
}

TEST(HeartbeatTest, AgeCountsFromTheLastBeat) {
  FakeClock clock;
  Heartbeat heartbeat(&clock);
  clock.Advance(3s);
  EXPECT_EQ(heartbeat.Age(), 3s);
  heartbeat.Beat();
  clock.Advance(1s);
  EXPECT_EQ(heartbeat.Age(), 1s);
}

TEST(EpochTest, NeverZeroNeverTwice) {
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t epoch = RandomEpoch();
    EXPECT_NE(epoch, 0u);
    EXPECT_TRUE(seen.insert(epoch).second);
  }
}

TEST(BuildInfoTest, VersionLineNamesBinaryVersionAndRevision) {
  EXPECT_THAT(
      VersionLine("coppice-drafter"),
      ::testing::MatchesRegex(
          "coppice-drafter [0-9]+[.][0-9]+[.][0-9]+ [(]([0-9a-f]{12}(-dirty)?|unknown)[)]"));
}

}  // namespace
}  // namespace coppice
