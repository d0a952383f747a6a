#include "services/common/queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace coppice {
namespace {

using namespace std::chrono_literals;

TEST(QueueTest, KeepsOrderPerProducer) {
  Queue<std::pair<int, int>> queue;
  constexpr int kProducers = 4, kEach = 2000;
  std::vector<std::thread> producers;
  for (int p = 0; p < kProducers; ++p) {
    producers.emplace_back([&, p] {
      for (int i = 0; i < kEach; ++i) ASSERT_TRUE(queue.Push({p, i}));
    });
  }
  std::vector<std::pair<int, int>> got;
  while (got.size() < kProducers * kEach) queue.PopAll(&got);
  for (std::thread& t : producers) t.join();
  std::vector<int> next(kProducers, 0);
  for (const auto& [p, i] : got) EXPECT_EQ(i, next[p]++);
  EXPECT_EQ(queue.size(), 0u);
}

TEST(QueueTest, TimedPopGivesUpAtItsDeadline) {
  Queue<int> queue;
  const TimePoint start = std::chrono::steady_clock::now();
  EXPECT_FALSE(queue.PopUntil(start + 20ms).has_value());
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
  std::vector<int> none;
  EXPECT_EQ(queue.PopAllUntil(std::chrono::steady_clock::now() + 1ms, &none), 0u);
}

TEST(QueueTest, PushWakesATimedPop) {
  Queue<int> queue;
  std::thread producer([&] {
    std::this_thread::sleep_for(5ms);
    queue.Push(7);
  });
  EXPECT_EQ(queue.PopUntil(std::chrono::steady_clock::now() + 60s), 7);
  producer.join();
}

TEST(QueueTest, CloseWakesPopsAndRefusesPushesButKeepsWhatIsThere) {
  Queue<std::unique_ptr<int>> queue;
  queue.Push(std::make_unique<int>(1));
  queue.Close();
  EXPECT_TRUE(queue.closed());
  EXPECT_FALSE(queue.Push(std::make_unique<int>(2)));
  EXPECT_EQ(**queue.Pop(), 1);
  EXPECT_FALSE(queue.Pop().has_value());

  Queue<int> waiting;
  std::thread closer([&] { waiting.Close(); });
  EXPECT_FALSE(waiting.Pop().has_value());
  closer.join();
}

TEST(QueueTest, PopAllAppends) {
  Queue<int> queue;
  std::vector<int> out = {1};
  queue.Push(2);
  queue.Push(3);
  EXPECT_EQ(queue.TryPopAll(&out), 2u);
  EXPECT_EQ(out, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(queue.TryPopAll(&out), 0u);
}

}  // namespace
}  // namespace coppice
