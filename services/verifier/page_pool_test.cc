#include "services/verifier/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace coppice::verifier {
namespace {

// The same contract by looking at every page.
class Model {
 public:
  explicit Model(int64_t pages) : used_(pages) {}

  bool Allocate(int64_t n, std::vector<int32_t>* out) {
    std::vector<int32_t> free;
    for (size_t p = 1; p < used_.size(); ++p) {
      if (used_[p] == 0) free.push_back(static_cast<int32_t>(p));
    }
    if (n > static_cast<int64_t>(free.size())) return false;
    size_t first = 0;
    for (size_t i = 0; i + n <= free.size(); ++i) {
      if (n > 0 && free[i + n - 1] - free[i] == n - 1) {
        first = i;
        break;
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      out->push_back(free[first + i]);
      used_[free[first + i]] = 1;
    }
    return true;
  }
  void Release(int32_t page) { used_[page] = 0; }

  PagePool::Runs FreeRuns() const {
    PagePool::Runs runs;
    int64_t run = 0;
    int64_t free = 0;
    for (size_t p = 1; p <= used_.size(); ++p) {
      if (p < used_.size() && used_[p] == 0) {
        ++run;
        ++free;
      } else {
        if (run > 0) ++runs.runs;
        runs.longest = std::max(runs.longest, run);
        run = 0;
      }
    }
    if (free > 0) {
      runs.fragmentation = 1 - static_cast<double>(runs.longest) / static_cast<double>(free);
    }
    return runs;
  }
  bool used(int32_t page) const { return used_[page] != 0; }
  int64_t free_pages() const { return std::count(used_.begin() + 1, used_.end(), 0); }

 private:
  std::vector<int32_t> used_;
};

TEST(PagePool, NeverHandsOutPageZero) {
  PagePool pool(4);
  std::vector<int32_t> pages;
  EXPECT_TRUE(pool.Allocate(3, &pages));
  EXPECT_EQ(pages, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_FALSE(pool.Allocate(1, &pages));
  EXPECT_EQ(pages.size(), 3u);
  EXPECT_TRUE(pool.Allocate(0, &pages));
}

TEST(PagePool, WithoutPagesToHandOut) {
  PagePool pool(1);
  std::vector<int32_t> pages;
  EXPECT_FALSE(pool.Allocate(1, &pages));
  EXPECT_TRUE(pool.Check().ok());
}

TEST(PagePool, PrefersTheFirstRunThenTheLowestPages) {
  PagePool pool(200);
  std::vector<int32_t> all;
  ASSERT_TRUE(pool.Allocate(199, &all));
  // Free: 3, 5, 60 … 69 (over a word's border), 100.
  std::vector<int32_t> freed = {3, 5, 100};
  for (int32_t p = 60; p < 70; ++p) freed.push_back(p);
  pool.Release(freed);
  EXPECT_EQ(pool.FreeRuns().runs, 4);
  EXPECT_EQ(pool.FreeRuns().longest, 10);

  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.Allocate(10, &pages));
  EXPECT_EQ(pages, (std::vector<int32_t>{60, 61, 62, 63, 64, 65, 66, 67, 68, 69}));
  pages.clear();
  ASSERT_TRUE(pool.Allocate(2, &pages));
  EXPECT_EQ(pages, (std::vector<int32_t>{3, 5}));
}

TEST(PagePool, WhatIsFreeCannotBeReleased) {
  PagePool pool(3);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.Allocate(1, &pages));
  EXPECT_TRUE(pool.used(pages[0]));
  pool.Release(pages);
  EXPECT_EQ(pool.free_pages(), 2);
  EXPECT_FALSE(pool.used(pages[0]));
  EXPECT_DEATH(pool.Release(pages), "free already");
}

TEST(PagePool, AgreesWithTheModelUnderRandomOperations) {
  std::mt19937 random(7);
  for (const int64_t pages : {2, 63, 64, 65, 129, 500}) {
    PagePool pool(pages);
    Model model(pages);
    std::vector<std::vector<int32_t>> held;
    for (int op = 0; op < 2000; ++op) {
      const int kind = static_cast<int>(random() % 7);
      if (kind < 4) {
        // Long runs at times, single pages mostly.
        const int64_t n = random() % 4 == 0 ? 1 + random() % (pages + 2) : 1 + random() % 3;
        std::vector<int32_t> got;
        std::vector<int32_t> expected;
        ASSERT_EQ(pool.Allocate(n, &got), model.Allocate(n, &expected));
        ASSERT_EQ(got, expected) << n << " of " << pages;
        if (!got.empty()) held.push_back(got);
      } else if (!held.empty()) {
        const size_t i = random() % held.size();
        // All of it, or its tail.
        const size_t keep = random() % 2 == 0 ? 0 : random() % held[i].size();
        const std::vector<int32_t> tail(held[i].begin() + keep, held[i].end());
        pool.Release(tail);
        for (const int32_t page : tail) model.Release(page);
        held[i].resize(keep);
        if (keep == 0) held.erase(held.begin() + i);
      }
      ASSERT_EQ(pool.Check(), absl::OkStatus());
      ASSERT_EQ(pool.free_pages(), model.free_pages());
      const PagePool::Runs got = pool.FreeRuns();
      const PagePool::Runs expected = model.FreeRuns();
      ASSERT_EQ(got.runs, expected.runs);
      ASSERT_EQ(got.longest, expected.longest);
      ASSERT_DOUBLE_EQ(got.fragmentation, expected.fragmentation);
      for (int32_t page = 0; page < pages; ++page) {
        ASSERT_EQ(pool.used(page), model.used(page));
      }
    }
    for (const std::vector<int32_t>& h : held) pool.Release(h);
    EXPECT_EQ(pool.free_pages(), pool.capacity());
    EXPECT_EQ(pool.Check(), absl::OkStatus());
  }
}

}  // namespace
}  // namespace coppice::verifier
