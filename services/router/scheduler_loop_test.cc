// The loop's thread among others; the one test that ThreadSanitizer is for.
#include "services/router/scheduler_loop.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "services/common/queue.h"
#include "services/router/fake_peers.h"

namespace coppice::router {
namespace {

// The fakes, each behind a thread of its own.
struct Threads : public VerifierLink, public DrafterLink {
  void Send(uint64_t, StepRequest request) override { steps.Push(std::move(request)); }
  void Send(uint64_t, DraftBatch batch) override { drafts.Push(std::move(batch)); }

  void Start(SchedulerLoop* loop) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      loop->Post(verifier.Connect());
      loop->Post(drafter.Connect());
    }
    threads.emplace_back([this, loop] {
      while (std::optional<StepRequest> request = steps.Pop()) {
        std::lock_guard<std::mutex> lock(mutex);
        loop->Post(VerifierStep{verifier.connection, verifier.Execute(*request)});
      }
    });
    threads.emplace_back([this, loop] {
      while (std::optional<DraftBatch> batch = drafts.Pop()) {
        std::lock_guard<std::mutex> lock(mutex);
        drafter.batches.push_back(*std::move(batch));
        loop->Post(*drafter.Answer());
      }
    });
  }
  void Stop() {
    steps.Close();
    drafts.Close();
    for (std::thread& thread : threads) thread.join();
  }

  std::mutex mutex;
  FakeVerifier verifier;
  FakeDrafter drafter{&verifier};
  Queue<StepRequest> steps;
  Queue<DraftBatch> drafts;
  std::vector<std::thread> threads;
};

TEST(EngineTest, ManyThreadsSubmitCancelAndAsk) {
  Threads peers;
  SchedulerOptions options;
  options.verifier_address = "v:1";
  options.drafter_address = "d:1";
  options.vocab_size = kFakeVocab;
  options.max_position_embeddings = kFakePositions;
  std::atomic<uint64_t> next_random{99};
  auto random = [&] { return next_random.fetch_add(0x9e3779b97f4a7c15u); };
  SchedulerLoop loop(options, FakeTokenizer(), Clock::Real(), &peers, &peers, random);
  loop.Start();
  peers.Start(&loop);
  // Ready comes last: who sees it sees what is known of the verifier.
  while (!loop.NotReadyReason().empty()) std::this_thread::yield();
  EXPECT_GT(loop.pool_tokens(), 0);
  EXPECT_EQ(loop.model_fingerprint(), 1u);

  constexpr int kThreads = 4;
  constexpr int kRequests = 25;
  std::vector<std::unique_ptr<StreamLog>> logs;
  std::vector<Request> requests(kThreads * kRequests);
  for (int i = 0; i < kThreads * kRequests; ++i) logs.push_back(std::make_unique<StreamLog>());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (int i = 0; i < kRequests; ++i) {
        const int index = t * kRequests + i;
        RequestFields fields;
        fields.request_id = std::to_string(index);
        for (size_t p = 0; p < 1 + rng() % 30; ++p) fields.prompt.push_back('a' + rng() % 6);
        fields.max_tokens = 1 + rng() % 50;
        fields.speculation = static_cast<int>(1 + rng() % 4);
        RequestLimits limits;
        limits.vocab_size = kFakeVocab;
        limits.max_position_embeddings = kFakePositions;
        limits.eos_token_ids = {kFakeEos};
        limits.pool_tokens = loop.pool_tokens();
        requests[index] = CheckRequest(std::move(fields), limits, random).value();
        Submit submit;
        submit.handle = index + 1;
        submit.request = requests[index];
        submit.stream = std::make_shared<FakeStream>(logs[index].get(), 0);
        EXPECT_TRUE(loop.Post(std::move(submit)));
        if (i % 5 == 0) loop.Post(ClientGone{static_cast<uint64_t>(index + 1)});
        if (i % 7 == 0) loop.Post(AskState{[](const SchedulerState&) {}});
        (void)loop.NotReadyReason();
        (void)loop.heartbeat().Age();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Queue<bool> idle;
  loop.Post(Drain{[&] { idle.Push(true); }});
  ASSERT_TRUE(idle.PopUntil(Clock::Real()->Now() + std::chrono::seconds(60)).has_value());
  loop.Stop();
  EXPECT_FALSE(loop.Post(ClientGone{1}));
  peers.Stop();

  int complete = 0;
  for (size_t i = 0; i < logs.size(); ++i) {
    const StreamLog& log = *logs[i];
    ASSERT_TRUE(log.finish.has_value()) << i;
    const Cluster::Truth truth = Cluster::TruthOf(requests[i]);
    ASSERT_LE(log.tokens.size(), truth.tokens.size());
    EXPECT_TRUE(std::equal(log.tokens.begin(), log.tokens.end(), truth.tokens.begin()));
    ASSERT_TRUE(log.final.has_value());
    if (log.final->finish_reason == FinishReason::kCancelled) continue;
    EXPECT_EQ(log.tokens, truth.tokens);
    ++complete;
  }
  EXPECT_GE(complete, kThreads * kRequests * 4 / 5);
  EXPECT_TRUE(peers.verifier.sequences.empty());
}

TEST(EngineTest, StoppingEndsEveryStream) {
  Threads peers;
  SchedulerOptions options;
  options.vocab_size = kFakeVocab;
  options.max_position_embeddings = kFakePositions;
  SchedulerLoop loop(options, FakeTokenizer(), Clock::Real(), &peers, &peers, [] { return 5; });
  loop.Start();
  {
    std::lock_guard<std::mutex> lock(peers.mutex);
    loop.Post(peers.verifier.Connect());  // nobody answers what it is sent
  }
  StreamLog log;
  Submit submit;
  submit.handle = 1;
  submit.request.id = "r";
  submit.request.prompt = {'a'};
  submit.request.max_tokens = 10;
  submit.stream = std::make_shared<FakeStream>(&log, 0);
  loop.Post(std::move(submit));
  loop.Stop();
  ASSERT_TRUE(log.finish.has_value());
  EXPECT_EQ(log.finish->code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace coppice::router
