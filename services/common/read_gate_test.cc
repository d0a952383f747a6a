#include "services/common/read_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace coppice {
namespace {

TEST(ReadGateTest, ReadsOnWhenTheLastTicketIsGone) {
  int reads = 0;
  const auto gate = std::make_shared<ReadGate>([&] { ++reads; });
  ReadTicket ticket = gate->Took();
  ReadTicket copy = ticket;
  ticket.reset();
  EXPECT_EQ(reads, 0);
  copy.reset();
  EXPECT_EQ(reads, 1);
  gate->Took().reset();
  EXPECT_EQ(reads, 2);
}

TEST(ReadGateTest, ATicketMayOutliveTheStream) {
  int reads = 0;
  auto gate = std::make_shared<ReadGate>([&] { ++reads; });
  ReadTicket ticket = gate->Took();
  gate->Close();
  gate.reset();
  ticket.reset();
  EXPECT_EQ(reads, 0);
}

TEST(ReadGateTest, FreedItReadsAtOnceAndHandsOutNoMoreTickets) {
  int reads = 0;
  const auto gate = std::make_shared<ReadGate>([&] { ++reads; });
  ReadTicket ticket = gate->Took();
  gate->Free();
  EXPECT_EQ(reads, 1);
  ticket.reset();
  EXPECT_EQ(reads, 1) << "the message that was waited for has been read already";
  EXPECT_EQ(gate->Took(), nullptr);
  EXPECT_EQ(reads, 1) << "whoever reads must read on itself";
}

// Tickets go on other threads than the one that reads, which may end the stream at any moment.
TEST(ReadGateTest, NoReadAfterCloseWhateverTheThread) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> closed = false;
    std::atomic<int> reads = 0;
    const auto gate = std::make_shared<ReadGate>([&] {
      EXPECT_FALSE(closed);
      ++reads;
    });
    ReadTicket ticket = gate->Took();
    std::thread dropper([t = std::move(ticket)]() mutable { t.reset(); });
    gate->Close();
    closed = true;
    dropper.join();
    EXPECT_LE(reads, 1);
  }
}

}  // namespace
}  // namespace coppice
