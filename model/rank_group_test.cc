#include "model/rank_group.h"

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace coppice {
namespace {

TEST(RankGroup, RunsEveryRankOnItsOwnThread) {
  for (const int ranks : {1, 2, 4, 8}) {
    const auto group = RankGroup::Create(ranks).value();
    ASSERT_EQ(group->ranks(), ranks);
    std::vector<std::thread::id> first(ranks);
    std::vector<std::thread::id> second(ranks);
    group->Run([&](int rank) {
      EXPECT_EQ(group->ops(rank).rank(), rank);
      EXPECT_EQ(group->ops(rank).ranks(), ranks);
      first[rank] = std::this_thread::get_id();
    });
    group->Run([&](int rank) { second[rank] = std::this_thread::get_id(); });
    EXPECT_EQ(first, second);
    EXPECT_EQ(first[0], std::this_thread::get_id());
    EXPECT_EQ(std::set<std::thread::id>(first.begin(), first.end()).size(),
              static_cast<size_t>(ranks));
  }
}

TEST(RankGroup, ReturnsWhenAllAreDone) {
  const auto group = RankGroup::Create(4).value();
  std::vector<int> rounds(4, 0);  // unsynchronised: a rank may only be in one round at a time
  for (int i = 0; i < 500; ++i) {
    group->Run([&](int rank) { ++rounds[rank]; });
    for (const int r : rounds) ASSERT_EQ(r, i + 1);
  }
}

TEST(RankGroup, ReportsTheLowestRankThatFailed) {
  const auto group = RankGroup::Create(4).value();
  EXPECT_TRUE(group->RunWithStatus([](int) { return absl::OkStatus(); }).ok());
  std::atomic<int> called = 0;
  const absl::Status status = group->RunWithStatus([&](int rank) {
    ++called;
    return rank < 2 ? absl::OkStatus() : absl::DataLossError(absl::StrCat("rank ", rank));
  });
  EXPECT_EQ(called, 4);
  EXPECT_EQ(status, absl::DataLossError("rank 2"));
}

TEST(RankGroup, RefusesOtherNumbers) {
  for (const int ranks : {-1, 0, 3, 5, 16}) EXPECT_FALSE(RankGroup::Create(ranks).ok()) << ranks;
}

}  // namespace
}  // namespace coppice
