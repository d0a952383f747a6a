// What dies and what the user sees (docs/architecture.md, section 7), on a real cluster of
// processes.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/cluster.h"

namespace coppice::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using v1::GenerateDelta;
using v1::GenerateRequest;

GenerateRequest Request(const std::string& prompt, uint32_t tokens, v1::SpeculationMode mode,
                        float temperature = 0.8f, uint64_t seed = 5) {
  GenerateRequest request;
  request.set_text(prompt);
  request.set_max_tokens(tokens);
  request.set_ignore_eos(true);
  request.set_temperature(temperature);
  request.set_seed(seed);
  request.set_speculation(mode);
  return request;
}

GenerateRequest Request(const DemoPrompt& prompt, uint32_t tokens, v1::SpeculationMode mode,
                        float temperature, uint64_t seed) {
  GenerateRequest request = Request("", tokens, mode, temperature, seed);
  request.mutable_token_ids()->mutable_ids()->Add(prompt.ids.begin(), prompt.ids.end());
  return request;
}

constexpr char kPrompt[] = "The capital of France is";

// Everything a finished or abandoned request held is back.
::testing::AssertionResult AllReturned(const Cluster& cluster, uint32_t free_pages_at_start) {
  v1::PoolState pool;
  v1::DrafterInfo drafter;
  const bool returned = Eventually(
      [&] {
        pool = cluster.Pool();
        drafter = cluster.DrafterInfo();
        return pool.free_pages() == free_pages_at_start && pool.sequences() == 0 &&
               drafter.sequences() == 0;
      },
      seconds(20));
  if (returned && pool.leaked_pages() == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "started with " << free_pages_at_start << " free pages; now " << pool.ShortDebugString()
         << "; drafter slots in use " << drafter.sequences() << "\n"
         << cluster.Logs();
}

TEST(Faults, DrafterKilledMidStreamCostsNoTokenAndSpeculationResumes) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  const Generation reference = cluster.Generate(Request(kPrompt, 256, v1::SPECULATION_OFF));
  ASSERT_TRUE(reference.status.ok()) << reference.status.error_message();
  ASSERT_EQ(reference.ids.size(), 256u);

  size_t seen = 0;
  bool killed = false;
  const Generation got = cluster.Generate(Request(kPrompt, 256, v1::SPECULATION_TREE), 0,
                                          [&](const GenerateDelta& delta) {
                                            seen += delta.token_ids_size();
                                            if (seen >= 20 && !killed) {
                                              killed = true;
                                              cluster.KillDrafter();
                                            }
                                            return true;
                                          });
  ASSERT_TRUE(killed);
  EXPECT_TRUE(got.status.ok()) << got.status.error_message();
  EXPECT_EQ(got.contract_error, "");
  EXPECT_EQ(got.ids, reference.ids);
  EXPECT_EQ(got.text, reference.text);

  // Without it: plain decoding, the same tokens.
  const Generation plain = cluster.Generate(Request(kPrompt, 64, v1::SPECULATION_TREE));
  EXPECT_EQ(plain.ids, std::vector<uint32_t>(reference.ids.begin(), reference.ids.begin() + 64));
  EXPECT_EQ(plain.final.speculation().drafted(), 0u);

  cluster.StartDrafter();
  EXPECT_TRUE(Eventually(
      [&] {
        const Generation again = cluster.Generate(Request(kPrompt, 64, v1::SPECULATION_TREE));
        EXPECT_EQ(again.ids, plain.ids);
        return again.final.speculation().accepted() > 0;
      },
      seconds(20)))
      << cluster.Logs();
}

TEST(Faults, SpeculationResumesWithinOneStream) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  const Generation reference = cluster.Generate(Request(kPrompt, 3000, v1::SPECULATION_OFF));
  ASSERT_EQ(reference.ids.size(), 3000u) << reference.status.error_message();
  bool killed = false, restarted = false, resumed = false;
  size_t seen = 0;
  const Generation got = cluster.Generate(
      Request(kPrompt, 3000, v1::SPECULATION_TREE), 0, [&](const GenerateDelta& delta) {
        seen += delta.token_ids_size();
        if (!killed && seen >= 100) {
          killed = true;
          cluster.KillDrafter();
          cluster.StartDrafter();
          restarted = cluster.WaitServing(cluster.drafter_address(), seconds(20));
          seen = 0;
        }
        // Tokens come several at a time again.
        if (restarted && seen > 50 && delta.token_ids_size() > 1) resumed = true;
        return true;
      });
  EXPECT_TRUE(got.status.ok()) << got.status.error_message();
  EXPECT_EQ(got.ids, reference.ids);
  EXPECT_TRUE(resumed) << cluster.Logs();
}

TEST(Faults, RouterKilledMidStreamResumesOnTheStandby) {
  ClusterOptions options;
  options.routers = 2;
  options.verifier_flags = {"--lease-seconds", "2"};
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start());
  cluster.StartRouter(1);
  const Generation reference = cluster.Generate(Request(kPrompt, 200, v1::SPECULATION_OFF));
  ASSERT_EQ(reference.ids.size(), 200u) << reference.status.error_message();

  // The standby names the owner and is not ready.
  EXPECT_TRUE(Eventually(
      [&] {
        return cluster.State(1).router().not_ready_reason().find("router-0") != std::string::npos;
      },
      seconds(20)))
      << cluster.State(1).ShortDebugString();
  EXPECT_FALSE(cluster.WaitServing(cluster.router_address(1), milliseconds(100)));
  const Generation refused = cluster.Generate(Request(kPrompt, 4, v1::SPECULATION_OFF), 1);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE)
      << refused.status.error_message();

  GenerateRequest request = Request(kPrompt, 200, v1::SPECULATION_TREE);
  Generation first =
      cluster.Generate(request, 0, [&, seen = 0](const GenerateDelta& delta) mutable {
        seen += delta.token_ids_size();
        if (seen >= 30) cluster.KillRouter(0);
        return true;
      });
  EXPECT_EQ(first.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  ASSERT_LT(first.ids.size(), 200u);
  ASSERT_TRUE(cluster.WaitServing(cluster.router_address(1), seconds(20))) << cluster.Logs();

  request.mutable_resume()->set_seed(first.seed);
  request.mutable_resume()->mutable_token_ids()->Add(first.ids.begin(), first.ids.end());
  const Generation rest = cluster.Generate(request, 1);
  EXPECT_TRUE(rest.status.ok()) << rest.status.error_message();
  EXPECT_EQ(rest.contract_error, "");
  std::vector<uint32_t> ids = first.ids;
  ids.insert(ids.end(), rest.ids.begin(), rest.ids.end());
  EXPECT_EQ(ids, reference.ids);
  EXPECT_EQ(first.text + rest.text, reference.text);
  EXPECT_EQ(rest.final.usage().completion_tokens(), 200u);
}

TEST(Faults, VerifierKilledMidStreamIsReplayedWhenItIsBack) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  const Generation reference = cluster.Generate(Request(kPrompt, 1000, v1::SPECULATION_OFF));
  ASSERT_EQ(reference.ids.size(), 1000u) << reference.status.error_message();
  bool killed = false;
  size_t seen = 0;
  const Generation got = cluster.Generate(Request(kPrompt, 1000, v1::SPECULATION_TREE), 0,
                                          [&](const GenerateDelta& delta) {
                                            seen += delta.token_ids_size();
                                            if (seen >= 30 && !killed) {
                                              killed = true;
                                              cluster.KillVerifier();
                                              cluster.StartVerifier();
                                            }
                                            return true;
                                          });
  ASSERT_TRUE(killed);
  EXPECT_TRUE(got.status.ok()) << got.status.error_message() << cluster.Logs();
  EXPECT_EQ(got.contract_error, "");
  EXPECT_EQ(got.ids, reference.ids);
  EXPECT_EQ(got.text, reference.text);
}

TEST(Faults, AThousandCancelsGiveEverythingBack) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  const uint32_t free_pages = cluster.Pool().free_pages();
  ASSERT_GT(free_pages, 0u);
  const std::vector<DemoPrompt> prompts = SpreadPrompts(50);
  std::atomic<int> next{0}, cancelled{0}, finished{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      auto stub = v1::Inference::NewStub(cluster.channel());
      for (int i = next++; i < 1000; i = next++) {
        GenerateRequest request =
            Request(prompts[i % prompts.size()], 400,
                    i % 3 == 0 ? v1::SPECULATION_OFF : v1::SPECULATION_TREE, 0.8f, i);
        request.set_request_id("cancel-" + std::to_string(i));
        grpc::ClientContext context;
        auto reader = stub->Generate(&context, request);
        // Some are cancelled by id, some by dropping the stream.
        std::thread canceller([&, wait = random() % 40, how = random() % 2] {
          std::this_thread::sleep_for(milliseconds(wait));
          if (how == 0) {
            context.TryCancel();
          } else {
            grpc::ClientContext cancel_context;
            v1::CancelRequest cancel;
            cancel.set_request_id(request.request_id());
            v1::CancelResponse response;
            stub->Cancel(&cancel_context, cancel, &response);
            if (!response.found()) context.TryCancel();
          }
        });
        GenerateDelta delta;
        int finals = 0;
        while (reader->Read(&delta)) finals += delta.has_final();
        canceller.join();
        const grpc::Status status = reader->Finish();
        if (status.error_code() == grpc::StatusCode::CANCELLED ||
            (status.ok() && delta.final().finish_reason() == v1::FINISH_CANCELLED)) {
          ++cancelled;
        } else if (status.ok() && finals == 1) {
          ++finished;
        } else {
          ++wrong;
          ADD_FAILURE() << status.error_code() << " " << status.error_message();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(cancelled, 500) << "finished before they were cancelled: " << finished;
  EXPECT_TRUE(AllReturned(cluster, free_pages));
  const Generation after = cluster.Generate(Request(kPrompt, 16, v1::SPECULATION_TREE));
  EXPECT_TRUE(after.status.ok()) << after.status.error_message();
}

TEST(Faults, SixtyFourStreamsAtOnceAreEachRight) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  const uint32_t free_pages = cluster.Pool().free_pages();
  const std::vector<DemoPrompt> prompts = SpreadPrompts(64);
  std::vector<Generation> alone, together(64);
  for (int i = 0; i < 64; ++i) {
    alone.push_back(
        cluster.Generate(Request(prompts[i % prompts.size()], 48, v1::SPECULATION_OFF, 0.8f, i)));
    ASSERT_EQ(alone.back().ids.size(), 48u) << alone.back().status.error_message();
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < 64; ++i) {
    threads.emplace_back([&, i] {
      const auto mode = i % 4 == 0   ? v1::SPECULATION_OFF
                        : i % 4 == 1 ? v1::SPECULATION_CHAIN
                        : i % 4 == 2 ? v1::SPECULATION_TREE
                                     : v1::SPECULATION_AUTO;
      together[i] = cluster.Generate(Request(prompts[i % prompts.size()], 48, mode, 0.8f, i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 64; ++i) {
    EXPECT_TRUE(together[i].status.ok()) << together[i].status.error_message();
    EXPECT_EQ(together[i].contract_error, "");
    EXPECT_EQ(together[i].ids, alone[i].ids) << i;
    EXPECT_EQ(together[i].text, alone[i].text) << i;
  }
  EXPECT_TRUE(AllReturned(cluster, free_pages));
}

TEST(Faults, SigtermDrainsAndExitsZero) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  bool told = false;
  const Generation got =
      cluster.Generate(Request(kPrompt, 300, v1::SPECULATION_TREE), 0, [&](const GenerateDelta&) {
        if (!told) cluster.router().Signal(SIGTERM);
        told = true;
        return true;
      });
  EXPECT_TRUE(got.status.ok()) << got.status.error_message();
  EXPECT_EQ(got.ids.size(), 300u);
  EXPECT_EQ(cluster.router().Wait(seconds(20)), 0) << cluster.router().Output();
  cluster.drafter().Signal(SIGTERM);
  cluster.verifier().Signal(SIGTERM);
  EXPECT_EQ(cluster.drafter().Wait(seconds(20)), 0) << cluster.drafter().Output();
  EXPECT_EQ(cluster.verifier().Wait(seconds(20)), 0) << cluster.verifier().Output();
}

}  // namespace
}  // namespace coppice::testing
