#include "services/verifier/lease.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace coppice::verifier {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

const TimePoint kStart{seconds(100)};

TEST(Lease, ASecondRouterIsRefusedWithTheOwnersName) {
  Lease lease(seconds(10));
  Lease::Grant grant;
  EXPECT_TRUE(lease.Take(1, "north", 7, kStart, &grant).ok());
  EXPECT_FALSE(grant.resumed);
  EXPECT_EQ(lease.owner(), "north");
  EXPECT_TRUE(lease.HeldBy(1));
  const absl::Status refused = lease.Take(2, "south", 8, kStart, &grant);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("north"));
  EXPECT_TRUE(lease.HeldBy(1));
  EXPECT_FALSE(lease.GiveUp(2));
  EXPECT_TRUE(lease.GiveUp(1));
  EXPECT_EQ(lease.owner(), "");
  EXPECT_TRUE(lease.Take(3, "south", 8, kStart, &grant).ok());
}

TEST(Lease, ABreakIsHeldForTheSameEpochOnly) {
  Lease lease(seconds(10));
  Lease::Grant grant;
  ASSERT_TRUE(lease.Take(1, "north", 7, kStart, &grant).ok());
  lease.Break(2, kStart);  // somebody else's stream
  EXPECT_TRUE(lease.HeldBy(1));
  lease.Break(1, kStart);
  EXPECT_FALSE(lease.HeldBy(1));
  EXPECT_EQ(lease.owner(), "north");
  EXPECT_FALSE(lease.Expire(kStart + seconds(9)));
  // A restarted router of the same name has another epoch.
  const absl::Status refused = lease.Take(2, "north", 8, kStart + seconds(7), &grant);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("3 s more"));
  EXPECT_TRUE(lease.Take(3, "north", 7, kStart + seconds(9), &grant).ok());
  EXPECT_TRUE(grant.resumed);
  EXPECT_FALSE(grant.superseded);
  EXPECT_FALSE(lease.Expire(kStart + seconds(60))) << "it came back";
}

TEST(Lease, AfterTheHoldItIsAnybodys) {
  Lease lease(seconds(10));
  Lease::Grant grant;
  ASSERT_TRUE(lease.Take(1, "north", 7, kStart, &grant).ok());
  lease.Break(1, kStart);
  EXPECT_TRUE(lease.Expire(kStart + seconds(10)));
  EXPECT_FALSE(lease.Expire(kStart + seconds(11))) << "once";
  EXPECT_TRUE(lease.Take(2, "south", 8, kStart + seconds(10), &grant).ok());
  EXPECT_FALSE(grant.resumed);
}

TEST(Lease, TheSameRouterMayReplaceItsOwnStream) {
  Lease lease(seconds(10));
  Lease::Grant grant;
  ASSERT_TRUE(lease.Take(1, "north", 7, kStart, &grant).ok());
  ASSERT_TRUE(lease.Take(2, "north", 7, kStart, &grant).ok());
  EXPECT_EQ(grant.superseded, 1u);
  EXPECT_TRUE(grant.resumed);
  lease.Break(1, kStart);  // the old stream's end, noticed late
  EXPECT_FALSE(lease.GiveUp(1));
  EXPECT_TRUE(lease.HeldBy(2));
}

}  // namespace
}  // namespace coppice::verifier
