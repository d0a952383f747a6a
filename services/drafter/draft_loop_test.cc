#include "services/drafter/draft_loop.h"

#include <gtest/gtest.h>

#include <future>

#include "services/drafter/fake_model.h"

namespace coppice::drafter {
namespace {

using namespace std::chrono_literals;

DraftAsked Ask(uint64_t batch, int64_t base_len, Duration wait, std::promise<Reply>* reply) {
  return {9,
          batch,
          77,
          {{5, 42, base_len}},
          2,
          wait,
          [reply](Reply r) {
            reply->set_value(std::move(r)); }};
}

TEST(DraftLoopTest, AnswersWhenFeaturesComeAndAtTheDeadlineWhereTheyDoNot) {
  EngineOptions options;
  options.slots = 2;
  options.window = 8;
  options.max_top_k = 4;
  DraftLoop loop(std::make_unique<FakeModel>(2, 8), options);
  loop.Push(ContextOpened{1, 77, [](const std::vector<Ack>&) {}});
  const auto rows = [&](int64_t first, int64_t count) {
    auto features = std::make_shared<std::vector<uint16_t>>(FakeModel::Features(5, first, count));
    loop.Push(ContextArrived{1, {{5, first, count, *features, std::nullopt, false}}, {}, features});
  };
  rows(0, 3);
  std::promise<Reply> first, second;
  loop.Push(Ask(1, 5, 60s, &first));
  rows(3, 2);
  const Reply drafted = first.get_future().get();
  EXPECT_EQ(drafted.answers[0].outcome, DraftOutcome::kDrafted);
  EXPECT_EQ(drafted.answers[0].tokens.size(), 6u);

  const TimePoint start = std::chrono::steady_clock::now();
  loop.Push(Ask(2, 9, 20ms, &second));
  EXPECT_EQ(second.get_future().get().answers[0].outcome, DraftOutcome::kLate);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
  EXPECT_EQ(loop.sequences(), 1);
  EXPECT_LT(loop.heartbeat().Age(), 5s);
  loop.Stop();
  EXPECT_FALSE(loop.Push(ContextClosed{1}));
}

TEST(DraftLoopTest, WhatWasAskedDuringAForwardIsAnsweredBeforeTheRowsAreAcknowledged) {
  EngineOptions options;
  options.slots = 2;
  options.window = 8;
  options.max_top_k = 4;
  std::vector<std::string> said;  // by the loop's thread
  std::promise<void> acknowledged;
  DraftLoop* asked = nullptr;
  LoopObserver observer;
  observer.on_forward = [&](int, float) {
    asked->Push(DraftAsked{2, 1, 77, {{5, 9, 3}}, 2, 60s, [&](Reply reply) {
                             EXPECT_EQ(reply.answers[0].outcome, DraftOutcome::kDrafted);
                             said.push_back("answer");
                           }});
  };
  DraftLoop loop(std::make_unique<FakeModel>(2, 8), options, observer);
  asked = &loop;
  loop.Push(ContextOpened{1, 77, [&](const std::vector<Ack>&) {
                            said.push_back("acknowledgement");
                            acknowledged.set_value();
                          }});
  auto features = std::make_shared<std::vector<uint16_t>>(FakeModel::Features(5, 0, 3));
  loop.Push(ContextArrived{1, {{5, 0, 3, *features, 9, true}}, {}, features});
  acknowledged.get_future().wait();
  loop.Stop();
  EXPECT_EQ(said, (std::vector<std::string>{"answer", "acknowledgement"}));
}

TEST(DraftLoopTest, ManyThreads) {
  constexpr int kStreams = 4, kRounds = 200;
  EngineOptions options;
  options.slots = kStreams;
  options.window = 16;
  options.max_top_k = 4;
  auto model = std::make_unique<FakeModel>(kStreams, 16);
  FakeModel* fake = model.get();
  std::atomic<int> turns = 0;
  LoopObserver observer;
  observer.on_turn = [&](const EngineCounters&) { ++turns; };
  DraftLoop loop(std::move(model), options, observer);
  std::vector<std::thread> threads;
  std::atomic<int> drafted = 0;
  for (int s = 1; s <= kStreams; ++s) {
    threads.emplace_back([&, s] {
      const uint64_t stream = s, epoch = 100 + s;
      loop.Push(ContextOpened{stream, epoch, [](const std::vector<Ack>&) {}});
      for (int64_t position = 0; position < kRounds; ++position) {
        auto features =
            std::make_shared<std::vector<uint16_t>>(FakeModel::Features(s, position, 1));
        loop.Push(ContextArrived{
            stream, {{1, position, 1, *features, 7, position % 2 == 0}}, {}, features});
        std::promise<Reply> reply;
        loop.Push(DraftAsked{stream + 50, 1, epoch, {{1, 7, position + 1}}, 3, 60s, [&](Reply r) {
                               reply.set_value(std::move(r));
                             }});
        const Reply r = reply.get_future().get();
        if (r.answers[0].outcome == DraftOutcome::kDrafted) ++drafted;
      }
      loop.Push(ContextClosed{stream});
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(drafted, kStreams * kRounds);
  while (loop.sequences() != 0) std::this_thread::sleep_for(1ms);
  loop.Stop();
  EXPECT_EQ(fake->error(), "");
  EXPECT_GT(turns, 0);
}

}  // namespace
}  // namespace coppice::drafter
