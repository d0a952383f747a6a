#include "services/verifier/feature_sender.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "coppice/v1/drafter.grpc.pb.h"
#include "services/common/server.h"
#include "services/verifier/fake_target.h"
#include "services/verifier/step_loop.h"

namespace coppice::verifier {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr int kVocab = 16;

template <typename Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

// Keeps contexts as a drafter does, and misbehaves when told to.
class FakeDrafter : public v1::Drafter::Service {
 public:
  struct Context {
    int64_t first = 0;
    std::vector<uint16_t> features;
    std::optional<uint32_t> pending;
    bool draft_ahead = false;
  };

  explicit FakeDrafter(int hidden_size) : hidden_size_(hidden_size) {}

  grpc::Status GetInfo(grpc::ServerContext*, const v1::GetDrafterInfoRequest*,
                       v1::DrafterInfo* info) override {
    info->set_window(window);
    return grpc::Status::OK;
  }

  grpc::Status AppendContext(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::ContextAck, v1::ContextBatch>* stream) override {
    v1::ContextBatch batch;
    if (!stream->Read(&batch)) return grpc::Status::OK;
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++streams;
      hello = batch.hello();
      if (refuse) {
        return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "made for another target");
      }
    }
    while (stream->Read(&batch)) {
      v1::ContextAck ack;
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return !hung; });
      if (cut) break;
      for (const v1::ContextRows& rows : batch.rows()) Take(rows, &ack);
      if (ask_for != 0) {
        v1::ContextAck::Entry* entry = ack.add_entries();
        entry->set_sequence(std::exchange(ask_for, 0));
        entry->set_need_from(0);
      }
      for (const uint64_t id : batch.released()) {
        contexts.erase(id);
        released.push_back(id);
      }
      lock.unlock();
      stream->Write(ack);
    }
    std::lock_guard<std::mutex> lock(mutex);
    contexts.clear();
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  }

  std::mutex mutex;
  std::condition_variable changed;
  // What it does.
  uint32_t window = 4096;
  bool refuse = false;
  bool hung = false;
  bool cut = false;           // end the stream at the next message
  uint64_t lose = 0;          // pretend that the next rows of this sequence never came
  uint64_t without_slot = 0;  // this sequence has no slot
  uint64_t ask_for = 0;       // ask once for this sequence from its start
  // What it saw.
  int streams = 0;
  int gaps = 0;
  int messages = 0;
  v1::ContextBatch::Hello hello;
  std::map<uint64_t, Context> contexts;
  std::vector<uint64_t> released;

 private:
  void Take(const v1::ContextRows& rows, v1::ContextAck* ack) {
    ++messages;
    v1::ContextAck::Entry* entry = ack->add_entries();
    entry->set_sequence(rows.sequence());
    EXPECT_EQ(rows.features().size(), size_t{rows.count()} * hidden_size_ * 2);
    if (rows.sequence() == without_slot) {
      entry->set_no_slot(true);
      return;
    }
    if (rows.sequence() == lose) {
      lose = 0;
      return;
    }
    const auto [it, fresh] = contexts.try_emplace(rows.sequence());
    Context& context = it->second;
    const int64_t first = static_cast<int64_t>(rows.first());
    if (fresh) context.first = first;
    const int64_t have =
        context.first + static_cast<int64_t>(context.features.size()) / hidden_size_;
    if (first > have) {
      ++gaps;
      entry->set_need_from(have);
      return;
    }
    const int64_t keep = first - context.first;
    if (keep < 0) {
      context.first = first;
      context.features.clear();
    } else {
      context.features.resize(keep * hidden_size_);
    }
    const size_t at = context.features.size();
    context.features.resize(at + rows.features().size() / 2);
    std::memcpy(context.features.data() + at, rows.features().data(), rows.features().size());
    context.pending.reset();
    if (rows.has_pending_token()) context.pending = rows.pending_token();
    context.draft_ahead = rows.draft_ahead();
    entry->set_have_len(rows.first() + rows.count());
  }

  const int64_t hidden_size_;
};

class Client : public StepClient {
 public:
  void OnResult(const StepResult& result) override {
    std::lock_guard<std::mutex> lock(mutex_);
    result_ = std::move(result);
    changed_.notify_all();
  }
  void OnEnd(const absl::Status& status) override { ADD_FAILURE() << status; }
  StepResult Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, seconds(20), [&] { return result_.has_value(); }));
    StepResult result = result_.value_or(StepResult{});
    result_.reset();
    return result;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<StepResult> result_;
};

// Engine, loop and sender, with a router that is this thread.
struct Bench {
  explicit Bench(int hidden = 4, size_t max_queued_bytes = 32 << 20)
      : hidden_size(hidden), drafter(std::make_unique<FakeDrafter>(hidden)) {
    Serve("127.0.0.1:0");
    address = server->address();
    FeatureSenderOptions options;
    options.verifier = "v1";
    options.verifier_epoch = 77;
    options.drafter_fingerprint = 33;
    options.embedding_fingerprint = 22;
    options.hidden_size = hidden;
    options.max_queued_bytes = max_queued_bytes;
    options.message_bytes = std::min<size_t>(max_queued_bytes / 4, 4 << 20);
    options.first_retry = milliseconds(5);
    options.longest_retry = milliseconds(20);
    options.refused_retry = milliseconds(300);
    sender = std::make_unique<FeatureSender>(
        options, [this](const std::string& to, uint64_t id, int64_t from, uint64_t request) {
          loop->Resend(to, id, from, request);
        });
    FakeTargetOptions target;
    target.hidden_size = hidden;
    target.pages = 2000;
    target.max_position_embeddings = 4096;
    EngineOptions engine_options;
    engine_options.pages = target.pages;
    engine_options.page_size = target.page_size;
    loop = std::make_unique<StepLoop>(std::make_unique<Engine>(std::make_unique<FakeTarget>(target),
                                                               engine_options, sender.get()),
                                      StepLoopOptions{});
    loop->Start();
    session = loop->NewSession();
    loop->Open(session, "router", 1, client);
    client->Wait();
  }
  ~Bench() {
    loop->Stop();
    sender->Shutdown();
    EXPECT_EQ(sender->counters().streams, 0u);
    Kill();
  }

  void Serve(const std::string& listen) {
    ServerOptions options;
    options.listen = listen;
    options.max_message_bytes = kFeatureMessageBytes;
    auto started = RpcServer::Start(options, {drafter.get()});
    if (!started.ok()) ADD_FAILURE() << started.status();
    server = *std::move(started);
  }
  // The drafter dies, and everything it had with it.
  void Kill() {
    if (!server) return;
    {
      std::lock_guard<std::mutex> lock(drafter->mutex);
      drafter->hung = false;
      drafter->changed.notify_all();
    }
    server.reset();
  }
  void Restart() {
    drafter = std::make_unique<FakeDrafter>(hidden_size);
    Serve(address);
  }

  StepResult Do(Step step) {
    loop->Submit(session, std::move(step));
    return client->Wait();
  }
  // Prefills a prompt of n tokens.
  void Start(uint64_t id, int n, bool draft_ahead = false) {
    Step step;
    Admit admit;
    admit.sequence = id;
    for (int i = 0; i < n; ++i) admit.tokens.push_back((i * 7 + static_cast<int>(id)) % kVocab);
    admit.max_tokens = 1000;
    admit.drafter = address;
    step.admits = {admit};
    Work work;
    work.sequence = id;
    work.prefill = n;
    work.draft_ahead = draft_ahead;
    step.work = {work};
    const StepResult result = Do(std::move(step));
    ASSERT_EQ(result.results[0].outcome, Outcome::kDone) << result.results[0].error;
    text[id] = admit.tokens;
    pending[id] = result.results[0].tokens[0];
  }
  // One root-only round.
  void Round(uint64_t id) {
    Step step;
    Work work;
    work.sequence = id;
    work.base_len = static_cast<int64_t>(text[id].size());
    work.tokens = {pending[id]};
    work.parents = {-1};
    step.work = {work};
    const StepResult result = Do(std::move(step));
    ASSERT_EQ(result.results[0].outcome, Outcome::kDone) << result.results[0].error;
    text[id].push_back(pending[id]);
    pending[id] = result.results[0].tokens[0];
  }
  void Release(uint64_t id) {
    Step step;
    step.releases = {id};
    Do(std::move(step));
  }

  // Whether the drafter has the whole text, or its last `window` tokens, with the right features
  // and the pending token.
  bool InStep(uint64_t id) {
    std::lock_guard<std::mutex> lock(drafter->mutex);
    const auto it = drafter->contexts.find(id);
    if (it == drafter->contexts.end()) return false;
    const FakeDrafter::Context& context = it->second;
    const std::vector<int32_t>& all = text[id];
    const int64_t end = context.first + static_cast<int64_t>(context.features.size()) / hidden_size;
    if (end != static_cast<int64_t>(all.size()) ||
        context.first > std::max<int64_t>(0, end - drafter->window)) {
      return false;
    }
    if (context.pending != static_cast<uint32_t>(pending[id])) return false;
    for (int64_t p = context.first; p < end; ++p) {
      const std::vector<uint16_t> expected =
          FakeTarget::Feature(absl::MakeConstSpan(all).subspan(0, p + 1), hidden_size);
      if (std::memcmp(expected.data(), context.features.data() + (p - context.first) * hidden_size,
                      hidden_size * 2) != 0) {
        return false;
      }
    }
    return true;
  }

  const int hidden_size;
  std::unique_ptr<FakeDrafter> drafter;
  std::unique_ptr<RpcServer> server;
  std::string address;
  std::unique_ptr<FeatureSender> sender;
  std::unique_ptr<StepLoop> loop;
  std::shared_ptr<Client> client = std::make_shared<Client>();
  uint64_t session = 0;
  std::map<uint64_t, std::vector<int32_t>> text;
  std::map<uint64_t, int32_t> pending;
};

TEST(FeatureSender, RowsFollowTheStepsAndReleasesFollowTheRows) {
  Bench bench;
  bench.Start(1, 10, true);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
  EXPECT_EQ(bench.drafter->hello.verifier_epoch(), 77u);
  EXPECT_EQ(bench.drafter->hello.verifier(), "v1");
  EXPECT_EQ(bench.drafter->hello.drafter_fingerprint(), 33u);
  EXPECT_EQ(bench.drafter->hello.embedding_fingerprint(), 22u);
  EXPECT_EQ(bench.drafter->hello.hidden_size(), 4u);
  for (int i = 0; i < 5; ++i) {
    bench.Round(1);
    ASSERT_TRUE(Eventually([&] { return bench.InStep(1); })) << i;
  }
  bench.Start(2, 3);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(2); }));
  bench.Release(1);
  bench.Release(2);
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    return bench.drafter->released.size() == 2;
  }));
  EXPECT_THAT(bench.drafter->released, ElementsAre(1, 2));
  EXPECT_THAT(bench.drafter->contexts, SizeIs(0));
  EXPECT_EQ(bench.drafter->streams, 1);
  EXPECT_EQ(bench.drafter->gaps, 0);
}

TEST(FeatureSender, ADrafterThatComesBackGetsEveryLiveSequence) {
  Bench bench;
  bench.Start(1, 300);
  bench.Start(2, 5);
  bench.Start(3, 5);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1) && bench.InStep(2) && bench.InStep(3); }));
  bench.Kill();
  for (int i = 0; i < 4; ++i) bench.Round(1);
  bench.Start(4, 7);
  bench.Release(3);
  bench.Restart();
  // Without another step: speculation resumes by itself.
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1) && bench.InStep(2) && bench.InStep(4); }));
  EXPECT_EQ(bench.drafter->contexts.count(3), 0u);
  bench.Round(1);
  bench.Round(2);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1) && bench.InStep(2); }));
  EXPECT_EQ(bench.drafter->gaps, 0);
  EXPECT_GT(bench.sender->counters().dropped, 0u);
}

TEST(FeatureSender, ADrafterThatIsNotThereYetIsWaitedFor) {
  Bench bench;
  bench.Kill();
  bench.Start(1, 20);
  bench.Round(1);
  bench.Restart();
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
}

TEST(FeatureSender, OnlyTheDraftersWindowIsSentAgain) {
  Bench bench;
  bench.drafter->window = 8;
  bench.Start(1, 5);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
  for (int i = 0; i < 30; ++i) bench.Round(1);
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->cut = true;
  }
  bench.Round(1);
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    if (bench.drafter->streams < 2) return false;
    bench.drafter->cut = false;
    return true;
  }));
  bench.Round(1);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
  std::lock_guard<std::mutex> lock(bench.drafter->mutex);
  EXPECT_GE(bench.drafter->contexts[1].first, static_cast<int64_t>(bench.text[1].size()) - 9);
}

TEST(FeatureSender, AGapIsFilledFromWhereItBegins) {
  Bench bench;
  bench.Start(1, 10);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->lose = 1;
  }
  bench.Round(1);
  bench.Round(1);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
  std::lock_guard<std::mutex> lock(bench.drafter->mutex);
  EXPECT_GE(bench.drafter->gaps, 1);
  EXPECT_EQ(bench.drafter->streams, 1);
}

TEST(FeatureSender, ASequenceWithoutASlotWaitsToBeAskedFor) {
  Bench bench;
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->without_slot = 1;
  }
  bench.Start(1, 10);
  bench.Start(2, 10);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(2); }));
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    return bench.drafter->messages >= 2;
  }));
  // The refusal is on its way; then rows are held back.
  ASSERT_TRUE(Eventually([&] {
    bench.Round(1);
    return bench.sender->counters().dropped >= 3;
  }));
  // A slot is free: the drafter asks for the sequence, with the next rows' acknowledgement.
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->without_slot = 0;
    bench.drafter->ask_for = 1;
  }
  bench.Round(2);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1) && bench.InStep(2); }));
  EXPECT_EQ(bench.drafter->streams, 1);
}

TEST(FeatureSender, ADrafterThatHangsCostsNothingButItself) {
  Bench bench(512, 64 << 10);  // a row is 1 KiB, 64 may wait
  bench.Start(1, 10);
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->hung = true;
  }
  // Far more than queue and sockets hold.
  bench.Start(2, 2000);
  for (uint64_t id = 3; bench.sender->counters().dropped < 5000; ++id) {
    ASSERT_LT(id, 500u) << "nothing is dropped";
    bench.Start(id, 400);
    bench.Round(1);
    bench.Release(id);
  }
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->hung = false;
    bench.drafter->changed.notify_all();
  }
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1) && bench.InStep(2); }));
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    return bench.drafter->contexts.size() == 2;
  })) << "what ended meanwhile is released";
}

TEST(FeatureSender, ADrafterThatRefusesIsNotAskedAllTheTime) {
  Bench bench;
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    bench.drafter->refuse = true;
  }
  bench.Start(1, 5);
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    return bench.drafter->streams >= 1;
  }));
  for (int i = 0; i < 10; ++i) {
    bench.Round(1);
    std::this_thread::sleep_for(milliseconds(5));
  }
  {
    std::lock_guard<std::mutex> lock(bench.drafter->mutex);
    EXPECT_LE(bench.drafter->streams, 2);
    bench.drafter->refuse = false;
  }
  ASSERT_TRUE(Eventually([&] { return bench.InStep(1); }));
}

TEST(FeatureSender, StopsInWhateverStateItIs) {
  for (int i = 0; i < 8; ++i) {
    Bench bench(512, 64 << 10);
    if (i % 4 == 0) bench.Kill();
    if (i % 4 == 1) {
      std::lock_guard<std::mutex> lock(bench.drafter->mutex);
      bench.drafter->refuse = true;
    }
    if (i % 4 == 2) {
      std::lock_guard<std::mutex> lock(bench.drafter->mutex);
      bench.drafter->hung = true;
    }
    bench.Start(1, 500);
    if (i > 3) std::this_thread::sleep_for(milliseconds(10));
  }
}

}  // namespace
}  // namespace coppice::verifier
