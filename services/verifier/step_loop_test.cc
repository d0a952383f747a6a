#include "services/verifier/step_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "services/verifier/fake_target.h"

namespace coppice::verifier {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kVocab = 16;

class Client : public StepClient {
 public:
  void OnResult(const StepResult& result) override {
    std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_FALSE(end_) << "a result after the end";
    results_.push_back(result);
    changed_.notify_all();
  }
  void OnEnd(const absl::Status& status) override {
    std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_FALSE(end_) << "ended twice";
    end_ = status;
    changed_.notify_all();
  }
  std::vector<StepResult> results() {
    std::lock_guard<std::mutex> lock(mutex_);
    return results_;
  }
  std::optional<absl::Status> end() {
    std::lock_guard<std::mutex> lock(mutex_);
    return end_;
  }
  StepResult WaitFor(size_t index) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, seconds(60), [&] { return results_.size() > index || end_; }));
    return results_.size() > index ? results_[index] : StepResult{};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<StepResult> results_;
  std::optional<absl::Status> end_;
};

Admit MakeAdmit(uint64_t sequence, int64_t max_tokens = 8) {
  Admit admit;
  admit.sequence = sequence;
  admit.tokens = {1, 2, static_cast<int32_t>(sequence % kVocab)};
  admit.max_tokens = max_tokens;
  return admit;
}

Work PrefillAll(uint64_t sequence) {
  Work work;
  work.sequence = sequence;
  work.prefill = 3;
  return work;
}

Work Root(uint64_t sequence, int64_t base_len, int32_t token) {
  Work work;
  work.sequence = sequence;
  work.base_len = base_len;
  work.tokens = {token};
  work.parents = {-1};
  return work;
}

uint64_t Open(StepLoop& loop, const std::string& router, uint64_t epoch,
              std::shared_ptr<StepClient> client) {
  const uint64_t session = loop.NewSession();
  loop.Open(session, router, epoch, std::move(client));
  return session;
}

struct Bench {
  Bench() {
    FakeTargetOptions options;
    auto fake = std::make_unique<FakeTarget>(options);
    target = fake.get();
    EngineOptions engine_options;
    engine_options.pages = options.pages;
    engine_options.page_size = options.page_size;
    engine_options.check_every_step = true;
    loop = std::make_unique<StepLoop>(
        std::make_unique<Engine>(std::move(fake), engine_options, nullptr, &clock),
        StepLoopOptions{}, &clock);
  }
  void Turn() { EXPECT_TRUE(loop->Turn(Duration::zero())); }

  FakeClock clock;
  FakeTarget* target;
  std::unique_ptr<StepLoop> loop;
};

TEST(StepLoop, TheHelloIsAnsweredThenStepsInOrder) {
  Bench bench;
  auto client = std::make_shared<Client>();
  const uint64_t session = Open(*bench.loop, "north", 7, client);
  Step step;
  step.step = 1;
  step.admits = {MakeAdmit(5)};
  step.work = {PrefillAll(5)};
  bench.loop->Submit(session, step);
  bench.clock.Advance(milliseconds(3));
  bench.Turn();
  const std::vector<StepResult> results = client->results();
  ASSERT_THAT(results, SizeIs(2));
  EXPECT_THAT(results[0].resumed, IsEmpty());
  EXPECT_EQ(results[1].step, 1u);
  EXPECT_THAT(results[1].results[0].tokens, SizeIs(1));
  EXPECT_FLOAT_EQ(results[1].timing.queue_us, 3000);
  EXPECT_EQ(bench.loop->snapshot().owner, "north");
  EXPECT_EQ(bench.loop->snapshot().pool.sequences, 1);
}

TEST(StepLoop, TheResultLeavesBeforeTheFeatures) {
  std::vector<std::string> left;
  struct Sink : FeatureSink {
    explicit Sink(std::vector<std::string>* l) : left(l) {}
    void Connect(const std::string&) override {}
    int64_t Window(const std::string&) override { return 16; }
    void Append(const std::string&, const FeatureRows& rows) override { waiting += rows.count; }
    void Release(const std::string&, uint64_t) override {}
    void Flush() override {
      if (std::exchange(waiting, 0) > 0) left->push_back("features");
    }
    std::vector<std::string>* const left;
    int64_t waiting = 0;
  } sink(&left);
  struct Router : StepClient {
    explicit Router(std::vector<std::string>* l) : left(l) {}
    void OnResult(const StepResult& result) override {
      if (!result.results.empty()) left->push_back("result");
    }
    void OnEnd(const absl::Status&) override {}
    std::vector<std::string>* const left;
  };
  FakeTargetOptions options;
  EngineOptions engine_options;
  engine_options.pages = options.pages;
  engine_options.page_size = options.page_size;
  StepLoop loop(
      std::make_unique<Engine>(std::make_unique<FakeTarget>(options), engine_options, &sink),
      StepLoopOptions{});
  const uint64_t session = Open(loop, "north", 7, std::make_shared<Router>(&left));
  Step step;
  step.step = 1;
  step.admits = {MakeAdmit(5)};
  step.admits[0].drafter = "there";
  step.work = {PrefillAll(5)};
  loop.Submit(session, step);
  EXPECT_TRUE(loop.Turn(Duration::zero()));
  EXPECT_THAT(left, ElementsAre("result", "features"));
}

TEST(StepLoop, ASecondRouterIsRefusedAndItsStepsAreNobodys) {
  Bench bench;
  auto north = std::make_shared<Client>();
  auto south = std::make_shared<Client>();
  Open(*bench.loop, "north", 7, north);
  const uint64_t session = Open(*bench.loop, "south", 8, south);
  Step step;
  step.admits = {MakeAdmit(5)};
  bench.loop->Submit(session, step);
  bench.Turn();
  ASSERT_TRUE(south->end());
  EXPECT_EQ(south->end()->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(south->end()->message()), HasSubstr("north"));
  EXPECT_THAT(south->results(), IsEmpty());
  EXPECT_EQ(bench.loop->snapshot().pool.sequences, 0);
  EXPECT_FALSE(north->end());
}

TEST(StepLoop, ABrokenStreamsResultsCanBeAskedForAgain) {
  Bench bench;
  auto client = std::make_shared<Client>();
  const uint64_t session = Open(*bench.loop, "north", 7, client);
  Step step;
  step.admits = {MakeAdmit(5), MakeAdmit(6)};
  step.work = {PrefillAll(5)};
  bench.loop->Submit(session, step);
  bench.loop->Close(session, false);  // before the step was even taken
  bench.Turn();
  bench.clock.Advance(seconds(9));
  bench.Turn();
  const int64_t forwards = bench.target->forwards();

  auto again = std::make_shared<Client>();
  const uint64_t resumed = Open(*bench.loop, "north", 7, again);
  Step repeat;
  repeat.work = {PrefillAll(5)};
  bench.loop->Submit(resumed, repeat);
  bench.Turn();
  ASSERT_THAT(again->results(), SizeIs(2));
  EXPECT_THAT(again->results()[0].resumed, ElementsAre(5, 6));
  EXPECT_THAT(again->results()[1].results[0].tokens, SizeIs(1));
  EXPECT_EQ(bench.target->forwards(), forwards) << "kept, not computed again";
  bench.clock.Advance(seconds(60));
  bench.Turn();
  EXPECT_EQ(bench.loop->snapshot().pool.sequences, 2);
}

TEST(StepLoop, AfterTheHoldEverythingIsFreed) {
  Bench bench;
  auto client = std::make_shared<Client>();
  const uint64_t session = Open(*bench.loop, "north", 7, client);
  Step step;
  step.admits = {MakeAdmit(5)};
  step.work = {PrefillAll(5)};
  bench.loop->Submit(session, step);
  bench.loop->Close(session, false);
  bench.Turn();
  EXPECT_EQ(bench.loop->snapshot().owner, "north");
  auto south = std::make_shared<Client>();
  Open(*bench.loop, "south", 8, south);
  bench.Turn();
  EXPECT_TRUE(south->end()) << "held";
  bench.clock.Advance(seconds(10));
  // Nobody had to notice in between.
  south = std::make_shared<Client>();
  Open(*bench.loop, "south", 8, south);
  bench.Turn();
  EXPECT_FALSE(south->end());
  EXPECT_THAT(south->results()[0].resumed, IsEmpty());
  EXPECT_EQ(bench.loop->snapshot().pool.free_pages, 64);
}

TEST(StepLoop, ACleanEndFreesAtOnce) {
  Bench bench;
  auto client = std::make_shared<Client>();
  const uint64_t session = Open(*bench.loop, "north", 7, client);
  Step step;
  step.admits = {MakeAdmit(5)};
  step.work = {PrefillAll(5)};
  bench.loop->Submit(session, step);
  bench.loop->Close(session, true);
  bench.Turn();
  EXPECT_EQ(bench.loop->snapshot().owner, "");
  EXPECT_EQ(bench.loop->snapshot().pool.free_pages, 64);
  auto south = std::make_shared<Client>();
  Open(*bench.loop, "south", 8, south);
  bench.Turn();
  EXPECT_THAT(south->results(), SizeIs(1));
}

TEST(StepLoop, TheSameRoutersNewStreamReplacesTheOld) {
  Bench bench;
  auto old = std::make_shared<Client>();
  auto fresh = std::make_shared<Client>();
  const uint64_t old_session = Open(*bench.loop, "north", 7, old);
  Step step;
  step.admits = {MakeAdmit(5)};
  bench.loop->Submit(old_session, step);
  const uint64_t session = Open(*bench.loop, "north", 7, fresh);
  bench.loop->Submit(old_session, step);
  bench.loop->Close(old_session, false);
  bench.Turn();
  ASSERT_TRUE(old->end());
  EXPECT_EQ(old->end()->code(), absl::StatusCode::kAborted);
  EXPECT_THAT(fresh->results()[0].resumed, ElementsAre(5));
  step.admits.clear();
  step.work = {PrefillAll(5)};
  bench.loop->Submit(session, step);
  bench.Turn();
  EXPECT_EQ(fresh->results()[1].results[0].outcome, Outcome::kDone);
}

TEST(StepLoop, DrainingLetsWhatRunsFinish) {
  Bench bench;
  auto client = std::make_shared<Client>();
  const uint64_t session = Open(*bench.loop, "north", 7, client);
  Step step;
  step.admits = {MakeAdmit(5, 2)};
  step.work = {PrefillAll(5)};
  bench.loop->Submit(session, step);
  bench.Turn();
  bench.loop->Drain("this verifier is shutting down");
  step = Step{};
  step.admits = {MakeAdmit(6)};
  bench.loop->Submit(session, step);
  bench.Turn();
  EXPECT_EQ(client->results()[2].refused[0].status.code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(client->end());
  step = Step{};
  step.work = {Root(5, 3, client->results()[1].results[0].tokens[0])};
  bench.loop->Submit(session, step);
  bench.Turn();
  EXPECT_EQ(client->results()[3].results[0].finish_reason, FinishReason::kLength);
  ASSERT_TRUE(client->end());
  EXPECT_EQ(client->end()->code(), absl::StatusCode::kUnavailable);
  auto late = std::make_shared<Client>();
  Open(*bench.loop, "south", 8, late);
  bench.Turn();
  EXPECT_EQ(late->end()->code(), absl::StatusCode::kUnavailable);
}

// Streams that open, step, break and come back while others ask for the lease and for the pool:
// the thread itself, for ThreadSanitizer.
TEST(StepLoop, ThreadsComeAndGo) {
  Bench bench;
  bench.loop->Start();
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    while (!stop) {
      EXPECT_EQ(bench.loop->snapshot().pool.leaked_pages, 0);
      bench.loop->Resend("nowhere", 1, 0, 1);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  std::thread rival([&] {
    while (!stop) {
      auto client = std::make_shared<Client>();
      bench.loop->Close(Open(*bench.loop, "rival", 99, client), false);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  std::mt19937 random(1);
  uint64_t id = 1;
  for (int connection = 0; connection < 20; ++connection) {
    auto client = std::make_shared<Client>();
    uint64_t session = 0;
    for (int tries = 0; tries < 1000; ++tries) {
      client = std::make_shared<Client>();
      session = Open(*bench.loop, "north", 7, client);
      client->WaitFor(0);
      if (!client->end()) break;
      // The rival has it; its broken lease runs out on the fake clock.
      bench.clock.Advance(seconds(10));
    }
    ASSERT_FALSE(client->end());
    size_t answers = 1;
    for (int round = 0; round < 5; ++round) {
      Step step;
      step.admits = {MakeAdmit(++id)};
      step.work = {PrefillAll(id)};
      bench.loop->Submit(session, step);
      const StepResult first = client->WaitFor(answers++);
      ASSERT_THAT(first.results, SizeIs(1));
      Step next;
      next.work = {Root(id, 3, first.results[0].tokens[0])};
      if (random() % 2 == 0) next.releases = {id};
      bench.loop->Submit(session, next);
      if (random() % 2 == 0) client->WaitFor(answers);
      ++answers;
    }
    bench.loop->Close(session, random() % 2 == 0);
  }
  stop = true;
  watcher.join();
  rival.join();
  bench.loop.reset();
}

}  // namespace
}  // namespace coppice::verifier
