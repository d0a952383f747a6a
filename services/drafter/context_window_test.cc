#include "services/drafter/context_window.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace coppice::drafter {
namespace {

constexpr SequenceKey kA = {1, 10}, kB = {1, 11}, kC = {2, 10};

TEST(ContextWindowsTest, RowsInOrder) {
  ContextWindows windows(2, 8);
  ContextWindows::Placement p = windows.Place(kA, 0, 5);
  EXPECT_EQ(p.slot, 0);
  EXPECT_EQ(p.skip, 0);
  EXPECT_EQ(p.count, 5);
  EXPECT_EQ(p.ack.have_len, 5);
  EXPECT_FALSE(p.ack.need_from);
  p = windows.Place(kA, 5, 2);
  EXPECT_EQ(p.count, 2);
  EXPECT_EQ(p.ack.have_len, 7);
  EXPECT_EQ(windows.ContextBegin(*windows.Find(kA)), 0);
  windows.Place(kA, 7, 3);
  EXPECT_EQ(windows.ContextBegin(*windows.Find(kA)), 2);
  EXPECT_EQ(windows.tokens(), 8);
}

TEST(ContextWindowsTest, RowsSentAgainAreTrimmed) {
  ContextWindows windows(1, 100);
  windows.Place(kA, 0, 10);
  ContextWindows::Placement p = windows.Place(kA, 4, 9);
  EXPECT_EQ(p.skip, 6);
  EXPECT_EQ(p.count, 3);
  EXPECT_EQ(p.ack.have_len, 13);
  p = windows.Place(kA, 2, 5);
  EXPECT_EQ(p.count, 0);
  EXPECT_EQ(p.ack.have_len, 13);
}

TEST(ContextWindowsTest, AGapIsAskedForAndHealed) {
  ContextWindows windows(1, 100);
  windows.Place(kA, 0, 10);
  ContextWindows::Placement p = windows.Place(kA, 12, 3);
  EXPECT_EQ(p.count, 0);
  EXPECT_EQ(p.ack.have_len, 10);
  EXPECT_EQ(p.ack.need_from, 10);
  EXPECT_TRUE(windows.Find(kA)->has_gap());
  p = windows.Place(kA, 10, 8);
  EXPECT_EQ(p.count, 8);
  EXPECT_EQ(p.ack.have_len, 18);
  EXPECT_FALSE(p.ack.need_from);
  EXPECT_FALSE(windows.Find(kA)->has_gap());
}

TEST(ContextWindowsTest, AGapWiderThanTheWindowAsksOnlyForTheWindow) {
  ContextWindows windows(1, 8);
  windows.Place(kA, 0, 4);
  ContextWindows::Placement p = windows.Place(kA, 50, 3);
  EXPECT_EQ(p.ack.need_from, 45);
  // The verifier has moved on and sends the last 8 it has, in parts.
  p = windows.Place(kA, 47, 4);
  EXPECT_EQ(p.count, 4);
  EXPECT_FALSE(p.ack.need_from);
  p = windows.Place(kA, 51, 4);
  EXPECT_EQ(p.ack.have_len, 55);
  EXPECT_EQ(windows.ContextBegin(*windows.Find(kA)), 47);
  EXPECT_FALSE(windows.Find(kA)->has_gap());
}

TEST(ContextWindowsTest, AWholeWindowStartsAnew) {
  ContextWindows windows(1, 8);
  windows.Place(kA, 0, 4);
  const ContextWindows::Placement p = windows.Place(kA, 20, 10);
  EXPECT_EQ(p.skip, 2);
  EXPECT_EQ(p.count, 8);
  EXPECT_EQ(p.ack.have_len, 30);
  EXPECT_EQ(windows.ContextBegin(*windows.Find(kA)), 22);
}

TEST(ContextWindowsTest, AContextBeginsWhereItsFirstRowsDo) {
  ContextWindows windows(1, 8);
  EXPECT_EQ(windows.Place(kA, 100, 3).count, 3);
  EXPECT_EQ(windows.ContextBegin(*windows.Find(kA)), 100);
}

TEST(ContextWindowsTest, WaitsForASlotInOrderOfArrival) {
  ContextWindows windows(1, 8);
  windows.Place(kA, 0, 4);
  EXPECT_TRUE(windows.Place(kB, 0, 12).ack.no_slot);
  EXPECT_TRUE(windows.Place(kC, 0, 3).ack.no_slot);
  EXPECT_TRUE(windows.Place(kB, 12, 1).ack.no_slot);
  EXPECT_TRUE(windows.IsWaiting(kB));
  EXPECT_TRUE(windows.AdmitWaiting().empty());

  windows.Release(kA);
  const auto acks = windows.AdmitWaiting();
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].first, kB.stream);
  EXPECT_EQ(acks[0].second.sequence, kB.sequence);
  EXPECT_EQ(acks[0].second.need_from, 5);
  EXPECT_TRUE(windows.Find(kB)->has_gap());
  EXPECT_EQ(windows.Place(kB, 5, 8).ack.have_len, 13);
  windows.CloseStream(1);
  EXPECT_EQ(windows.AdmitWaiting()[0].first, kC.stream);
  EXPECT_EQ(windows.Check(), "");
}

TEST(ContextWindowsTest, ReleasedWhileWaiting) {
  ContextWindows windows(1, 8);
  windows.Place(kA, 0, 4);
  windows.Place(kB, 0, 4);
  windows.Release(kB);
  windows.Release(kA);
  EXPECT_TRUE(windows.AdmitWaiting().empty());
  EXPECT_EQ(windows.used(), 0);
  EXPECT_EQ(windows.waiting(), 0);
}

// A verifier's side of many sequences, with losses, against the drafter's: whatever happens, once
// rows stop being lost every context is complete, and releases bring every slot back.
TEST(ContextWindowsTest, RandomHistories) {
  for (int seed = 0; seed < 300; ++seed) {
    std::mt19937 rng(seed);
    const auto random = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(rng);
    };
    const int slots = random(1, 4), window = random(1, 12);
    ContextWindows windows(slots, window);
    struct Sequence {
      int64_t committed = 0;
      std::optional<int64_t> resend;
      bool muted = false;  // told that there is no slot
    };
    std::map<uint64_t, Sequence> live;
    uint64_t next_id = 1;
    const auto hear = [&](const Ack& ack) {
      const auto it = live.find(ack.sequence);
      if (it == live.end()) return;
      it->second.muted = ack.no_slot;
      if (ack.need_from) it->second.resend = ack.need_from;
    };
    const auto send = [&](uint64_t id, int64_t first, int64_t count, bool lossy) {
      if (lossy && random(0, 4) == 0) return;
      const ContextWindows::Placement p = windows.Place({1, id}, first, count);
      EXPECT_TRUE(p.count == 0 || (p.slot >= 0 && p.slot < slots));
      EXPECT_LE(p.count, window);
      hear(p.ack);
    };
    const auto resend = [&](uint64_t id, bool lossy) {
      Sequence& s = live.at(id);
      const int64_t from = std::max(*s.resend, s.committed - window);
      s.resend.reset();
      const int64_t middle = from + (s.committed - from) / 2;
      if (middle > from) send(id, from, middle - from, lossy);
      if (s.committed > middle) send(id, middle, s.committed - middle, lossy);
    };
    const auto round = [&](uint64_t id, bool lossy) {
      Sequence& s = live.at(id);
      const int64_t count = random(1, 6);
      if (!s.muted) send(id, s.committed, count, lossy);
      s.committed += count;
    };
    const auto release = [&](uint64_t id) {
      live.erase(id);
      windows.Release({1, id});
    };
    for (int step = 0; step < 200; ++step) {
      const int dice = random(0, 9);
      if (dice == 0 && live.size() < 6) {
        live[next_id++].committed = random(0, 3);
      } else if (!live.empty()) {
        const uint64_t id = std::next(live.begin(), random(0, live.size() - 1))->first;
        if (dice == 1) {
          release(id);
        } else if (live.at(id).resend && dice < 6) {
          resend(id, true);
        } else {
          round(id, true);
        }
      }
      for (const auto& [stream, ack] : windows.AdmitWaiting()) hear(ack);
      ASSERT_EQ(windows.Check(), "") << "seed " << seed;
    }
    // No more losses: two rounds later every sequence that has a slot is whole.
    for (int i = 0; i < 2; ++i) {
      for (auto& [id, s] : live) {
        round(id, false);
        if (s.resend) resend(id, false);
      }
    }
    int with_slot = 0;
    for (auto& [id, s] : live) {
      const Context* context = windows.Find({1, id});
      if (context == nullptr) continue;
      ++with_slot;
      EXPECT_EQ(context->have_len, s.committed) << "seed " << seed;
      EXPECT_FALSE(context->has_gap()) << "seed " << seed;
    }
    EXPECT_EQ(with_slot, std::min<int>(slots, live.size())) << "seed " << seed;
    while (!live.empty()) release(live.begin()->first);
    EXPECT_TRUE(windows.AdmitWaiting().empty());
    EXPECT_EQ(windows.used(), 0);
    EXPECT_EQ(windows.waiting(), 0);
    EXPECT_EQ(windows.Check(), "");
  }
}

}  // namespace
}  // namespace coppice::drafter
