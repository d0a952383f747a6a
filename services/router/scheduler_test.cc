#include "services/router/scheduler.h"

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/router/fake_peers.h"

namespace coppice::router {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Message(const StreamLog& log) {
  return log.finish.has_value() ? std::string(log.finish->message()) : "(still running)";
}

TEST(SchedulerTest, EveryModeGivesTheTargetsOwnTokens) {
  for (Speculation mode :
       {Speculation::kOff, Speculation::kChain, Speculation::kTree, Speculation::kAuto}) {
    Cluster cluster;
    cluster.Start();
    std::vector<Request> requests;
    for (int i = 0; i < 8; ++i) {
      Request request = cluster.MakeRequest(3 + 5 * i, 40);
      request.speculation = mode;
      request.tree_nodes = 9 + i;
      requests.push_back(request);
      cluster.Submit(request);
    }
    cluster.Run();
    for (int i = 0; i < 8; ++i) cluster.ExpectComplete(requests[i], *cluster.logs[i + 1]);
    cluster.ExpectNothingLeft();
    EXPECT_EQ(mode == Speculation::kOff, cluster.drafter.queries == 0);
  }
}

TEST(SchedulerTest, SpeculationSavesRoundsAndTheFiguresSaySo) {
  Cluster cluster;
  cluster.drafter.right_percent = 100;
  cluster.Start();
  Request request = cluster.MakeRequest(10, 41);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kChain;
  const uint64_t chain = cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[chain]);
  const Final figures = *cluster.logs[chain]->final;
  // The prefill gives the first token; then rounds of 8.
  EXPECT_EQ(figures.rounds, 5);
  EXPECT_EQ(figures.drafted, 35);
  EXPECT_EQ(figures.accepted, 35);
  EXPECT_DOUBLE_EQ(figures.acceptance_length, 8);
  EXPECT_EQ(cluster.verifier.trees, 5);
  EXPECT_EQ(cluster.verifier.largest_tree, 8);

  request.id = "off";
  request.speculation = Speculation::kOff;
  const uint64_t off = cluster.Submit(request);
  cluster.Run();
  EXPECT_EQ(cluster.logs[off]->final->rounds, 40);
  EXPECT_EQ(cluster.logs[off]->final->drafted, 0);
  EXPECT_DOUBLE_EQ(cluster.logs[off]->final->acceptance_length, 1);
  EXPECT_EQ(cluster.scheduler->counters().rounds, 45u);
  EXPECT_EQ(cluster.scheduler->counters().tokens, 82u);
}

TEST(SchedulerTest, TreesHaveTheNodesAskedFor) {
  Cluster cluster;
  cluster.Start();
  Request request = cluster.MakeRequest(10, 60);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kTree;
  request.tree_nodes = 33;
  cluster.Submit(request);
  cluster.Run();
  EXPECT_EQ(cluster.verifier.largest_tree, 33);
  cluster.ExpectComplete(request, *cluster.logs[1]);
}

TEST(SchedulerTest, AutoFollowsTheCostTables) {
  auto largest = [](std::vector<speculation::CostSample> cost, unsigned right, float confidence) {
    Cluster cluster;
    cluster.verifier.info.cost = std::move(cost);
    cluster.drafter.right_percent = right;
    cluster.drafter.confidence = confidence;
    cluster.Start();
    Request request = cluster.MakeRequest(10, 200);
    request.stop_token_ids.clear();
    cluster.Submit(request);
    cluster.Run();
    cluster.ExpectComplete(request, *cluster.logs[1]);
    return std::make_pair(cluster.verifier.largest_tree, cluster.drafter.queries);
  };
  // Rows are free: the widest tree.
  EXPECT_EQ(largest({{1, 5000}, {64, 5001}}, 70, 0.6f).first, 33);
  // Rows are dear: no more than a chain, and as the truth shows, mostly not even a draft.
  const auto dear = largest({{1, 500}, {2, 1000}, {64, 32000}}, 30, 0.3f);
  EXPECT_LE(dear.first, 8);
  EXPECT_LT(dear.second, 60u);
  EXPECT_GE(dear.second, 3u) << "it looks again from time to time";
}

TEST(SchedulerTest, AutoFindsOutThatATableMisleads) {
  Cluster cluster;
  cluster.verifier.info.cost = {{1, 1000}, {2, 20000}, {64, 640000}};  // measured in a bad moment
  cluster.verifier.true_cost = {{1, 1000}, {64, 1500}};
  cluster.drafter.right_percent = 95;
  cluster.drafter.confidence = 0.95f;
  cluster.Start();
  Request request = cluster.MakeRequest(10, 400);
  request.stop_token_ids.clear();
  cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_GT(cluster.logs[1]->final->acceptance_length, 2.5);
}

TEST(SchedulerTest, LongPromptsGoInChunksAndDoNotStallTheOthers) {
  Cluster cluster;
  cluster.verifier.info.max_rows = 64;
  cluster.verifier.info.prefill_us_per_token = 50;
  cluster.Start();
  Request talker = cluster.MakeRequest(5, 300);
  talker.stop_token_ids.clear();
  cluster.Submit(talker);
  for (int i = 0; i < 10; ++i) cluster.Turn();
  const Request reader = cluster.MakeRequest(1000, 5);
  cluster.Submit(reader);
  size_t before = cluster.logs[1]->tokens.size();
  int turns = 0;
  int stalled = 0;
  while (cluster.logs[2]->tokens.empty() && ++turns < 1000) {
    cluster.Turn();
    stalled = cluster.logs[1]->tokens.size() == before ? stalled + 1 : 0;
    before = cluster.logs[1]->tokens.size();
    ASSERT_LT(stalled, 8);
  }
  cluster.Run();
  cluster.ExpectComplete(talker, *cluster.logs[1]);
  cluster.ExpectComplete(reader, *cluster.logs[2]);
  EXPECT_LE(cluster.verifier.max_rows_seen, 64);
}

TEST(SchedulerTest, PrefillFillsTheDraftingGap) {
  Cluster cluster;
  cluster.verifier.info.max_rows = 64;
  cluster.Start();
  Request talker = cluster.MakeRequest(5, 100);
  talker.stop_token_ids.clear();
  talker.speculation = Speculation::kChain;
  cluster.Submit(talker);
  ASSERT_TRUE(cluster.verifier.Process());
  cluster.Handle(*cluster.verifier.TakeResult());
  ASSERT_EQ(cluster.drafter.batches.size(), 1u);  // its draft is being made
  cluster.Submit(cluster.MakeRequest(500, 5));
  ASSERT_EQ(cluster.verifier.requests.size(), 1u);
  EXPECT_GT(cluster.verifier.requests[0].work[0].prefill, 0);
  // And the draft's answer does not wait for that step's end.
  cluster.Handle(*cluster.drafter.Answer());
  ASSERT_EQ(cluster.verifier.requests.size(), 2u);
  EXPECT_EQ(cluster.verifier.requests[1].work[0].tokens.size(), 8u);
  cluster.Run();
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, WithoutADrafterItDecodesPlainlyAndResumesByItself) {
  Cluster cluster;
  cluster.Start(false);
  Request request = cluster.MakeRequest(5, 120);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kTree;
  cluster.Submit(request);
  for (int i = 0; i < 20; ++i) cluster.Turn();
  EXPECT_EQ(cluster.verifier.largest_tree, 1);
  EXPECT_FALSE(cluster.scheduler->State().speculating);
  EXPECT_GT(cluster.scheduler->counters().plain_rounds, 10u);
  cluster.Handle(cluster.drafter.Connect());
  for (int i = 0; i < 6; ++i) cluster.Turn();
  EXPECT_EQ(cluster.verifier.largest_tree, 17);
  EXPECT_TRUE(cluster.scheduler->State().speculating);
  // Gone while it owes an answer.
  ASSERT_TRUE(cluster.verifier.Process());
  cluster.Handle(*cluster.verifier.TakeResult());
  ASSERT_EQ(cluster.drafter.batches.size(), 1u);
  cluster.Handle(cluster.drafter.Break());
  EXPECT_EQ(cluster.verifier.requests.size(), 1u);
  EXPECT_EQ(cluster.verifier.requests[0].work[0].tokens.size(), 1u);
  EXPECT_EQ(cluster.scheduler->State().drafter_error, "gone");
  cluster.Handle(cluster.drafter.Connect());
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_EQ(cluster.scheduler->counters().drafter_breaks, 1u);
}

TEST(SchedulerTest, ASlowDrafterIsNotWaitedForTwice) {
  Cluster cluster;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 60);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kChain;
  cluster.Submit(request);
  cluster.verifier.Process();
  cluster.Handle(*cluster.verifier.TakeResult());
  ASSERT_EQ(cluster.drafter.batches.size(), 1u);
  ASSERT_TRUE(cluster.verifier.requests.empty());
  const TimePoint wake = cluster.scheduler->NextWake();
  ASSERT_LE(wake, cluster.clock.Now() + milliseconds(250));
  cluster.clock.Advance(wake - cluster.clock.Now());
  cluster.Advance();
  ASSERT_EQ(cluster.verifier.requests.size(), 1u);  // plainly
  EXPECT_EQ(cluster.scheduler->State().drafter_error, "it does not answer in time");
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(cluster.verifier.Process());
    cluster.Handle(*cluster.verifier.TakeResult());
    EXPECT_EQ(cluster.drafter.batches.size(), 1u);  // not asked again
    ASSERT_EQ(cluster.verifier.requests.size(), 1u);
  }
  // It answers after all: speculation resumes.
  cluster.Handle(*cluster.drafter.Answer());
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_EQ(cluster.verifier.largest_tree, 8);
}

TEST(SchedulerTest, WhoGetsNoDraftsAsksLess) {
  Cluster cluster;
  cluster.drafter.unknown_percent = 100;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 200);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kChain;
  cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_LT(cluster.drafter.queries, 40u);
  // The last round has room for no draft and wants none.
  EXPECT_EQ(cluster.scheduler->counters().plain_rounds + 1, cluster.scheduler->counters().rounds);
}

TEST(SchedulerTest, MalformedDraftsAreNotUsed) {
  Cluster cluster;
  cluster.drafter.malformed = true;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 30);
  request.speculation = Speculation::kChain;
  cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_EQ(cluster.verifier.largest_tree, 1);
}

TEST(SchedulerTest, APairThatDoesNotFitDecodesPlainlyAndSaysWhy) {
  struct Case {
    std::function<void(Cluster*)> change;
    std::string says;
  };
  const Case cases[] = {
      {[](Cluster* c) { c->drafter.info.drafter_fingerprint = 99; }, "drafter fingerprints"},
      {[](Cluster* c) { c->drafter.info.embedding_fingerprint = 99; }, "embedding fingerprints"},
      {[](Cluster* c) { c->drafter.info.vocab_size = 99; }, "vocabularies of 99 and 260"},
      {[](Cluster* c) { c->drafter.info.hidden_size = 99; }, "hidden sizes 99 and 16"},
      {[](Cluster* c) { c->drafter.info.target_layer_ids = {4}; }, "tapped layers 4 and 1,2"},
      {[](Cluster* c) { c->drafter.info.block_size = 40; }, "blocks of 40"},
      {[](Cluster* c) { c->drafter.info.cost.clear(); }, "no usable cost table"},
      {[](Cluster* c) { c->verifier.info.drafter_fingerprint = 0; }, "started without --drafter"},
  };
  for (const Case& test : cases) {
    Cluster cluster;
    test.change(&cluster);
    cluster.Start();
    Request request = cluster.MakeRequest(5, 20);
    request.speculation = Speculation::kTree;
    cluster.Submit(request);
    cluster.Run();
    cluster.ExpectComplete(request, *cluster.logs[1]);
    EXPECT_EQ(cluster.drafter.queries, 0u);
    EXPECT_THAT(cluster.scheduler->State().drafter_error, HasSubstr(test.says));
    EXPECT_EQ(cluster.scheduler->NotReadyReason(), "");
  }
}

TEST(CheckVerifierTest, NamesBothSides) {
  Cluster cluster;
  EXPECT_TRUE(CheckVerifier(cluster.verifier.info, cluster.options).ok());
  VerifierInfo info = cluster.verifier.info;
  info.vocab_size = 5;
  EXPECT_THAT(std::string(CheckVerifier(info, cluster.options).message()),
              HasSubstr("vocabulary of 5; the router's --model has 260"));
  info = cluster.verifier.info;
  info.max_position_embeddings = 5;
  EXPECT_FALSE(CheckVerifier(info, cluster.options).ok());
  info = cluster.verifier.info;
  info.cost.clear();
  EXPECT_THAT(std::string(CheckVerifier(info, cluster.options).message()), HasSubstr("cost table"));
  info = cluster.verifier.info;
  info.pool.page_size = 0;
  EXPECT_FALSE(CheckVerifier(info, cluster.options).ok());
}

TEST(SchedulerTest, ABrokenStreamLosesAndDoublesNothing) {
  for (bool keep : {true, false}) {
    for (size_t arrived : {0u, 1u, 2u}) {
      for (int after = 0; after < 12; ++after) {
        Cluster cluster;
        cluster.Start();
        std::vector<Request> requests;
        for (int i = 0; i < 3; ++i) {
          requests.push_back(cluster.MakeRequest(20 + 90 * i, 30));
          requests.back().speculation = i == 0 ? Speculation::kOff : Speculation::kChain;
          cluster.Submit(requests.back());
        }
        for (int i = 0; i < after; ++i) cluster.Turn();
        cluster.Handle(cluster.verifier.Break(arrived, keep));
        while (auto reply = cluster.drafter.Answer()) cluster.Handle(*std::move(reply));
        cluster.clock.Advance(seconds(2));
        cluster.Advance();
        cluster.Handle(cluster.verifier.Connect());
        cluster.Run();
        for (int i = 0; i < 3; ++i) cluster.ExpectComplete(requests[i], *cluster.logs[i + 1]);
        cluster.ExpectNothingLeft();
        if (keep) {
          // What had arrived is told again, not computed again.
          EXPECT_EQ(cluster.scheduler->counters().replays.load() == 0 || arrived < 2, true);
        }
      }
    }
  }
}

TEST(SchedulerTest, AKeptRoundIsAskedForAgain) {
  Cluster cluster;
  cluster.Start(false);
  const Request request = cluster.MakeRequest(20, 30);
  cluster.Submit(request);
  cluster.Turn();
  ASSERT_EQ(cluster.verifier.requests.size(), 1u);
  cluster.Handle(cluster.verifier.Break(1, true));
  EXPECT_EQ(cluster.logs[1]->tokens.size(), 1u);
  cluster.Handle(cluster.verifier.Connect());
  cluster.Turn();
  EXPECT_EQ(cluster.verifier.repeats, 1u);
  EXPECT_EQ(cluster.logs[1]->tokens.size(), 2u);
  cluster.Run();
  EXPECT_EQ(cluster.scheduler->counters().replays, 0u);
  cluster.ExpectComplete(request, *cluster.logs[1]);
}

TEST(SchedulerTest, AnEndWhileApartIsReleasedOnReturn) {
  Cluster cluster;
  cluster.Start();
  const Request request = cluster.MakeRequest(20, 30);
  cluster.Submit(request);
  cluster.Turn();
  cluster.Handle(cluster.verifier.Break(0, true));
  cluster.Handle(CancelById{request.id, nullptr});
  EXPECT_EQ(cluster.logs[1]->final->finish_reason, FinishReason::kCancelled);
  cluster.Handle(cluster.verifier.Connect());
  cluster.Run();
  cluster.ExpectNothingLeft();
  EXPECT_EQ(cluster.verifier.released, 1u);
}

TEST(SchedulerTest, StreamsEndUnavailableWhenTheVerifierStaysAway) {
  Cluster cluster;
  cluster.Start();
  cluster.Submit(cluster.MakeRequest(20, 30));
  cluster.Turn();
  cluster.Handle(cluster.verifier.Break(0, true));
  cluster.clock.Advance(seconds(5));
  // For a while new requests are taken all the same.
  cluster.Submit(cluster.MakeRequest(20, 30));
  EXPECT_FALSE(cluster.logs[2]->finish.has_value());
  cluster.clock.Advance(seconds(6));
  cluster.Submit(cluster.MakeRequest(20, 30));
  EXPECT_EQ(cluster.logs[3]->finish->code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(*cluster.logs[3]), HasSubstr("verifier:1: broken"));
  EXPECT_LE(cluster.scheduler->NextWake(), cluster.clock.Now() + seconds(50));
  cluster.clock.Advance(seconds(50));
  cluster.Advance();
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(cluster.logs[2]->finish->code(), absl::StatusCode::kUnavailable);
}

TEST(SchedulerTest, ALeaseHeldByAnotherIsNamed) {
  Cluster cluster;
  cluster.Start();
  cluster.Submit(cluster.MakeRequest(20, 30));
  cluster.Turn();
  cluster.Handle(cluster.verifier.Break(0, true));
  cluster.Handle(VerifierDown{2, absl::FailedPreconditionError("owned by router-b")});
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(*cluster.logs[1]), HasSubstr("owned by router-b"));
  EXPECT_THAT(cluster.scheduler->NotReadyReason(), HasSubstr("owned by router-b"));
}

TEST(SchedulerTest, BeforeItOwnsAVerifierItRefuses) {
  Cluster cluster;
  cluster.scheduler = std::make_unique<Scheduler>(cluster.options, FakeTokenizer(), &cluster.clock,
                                                  &cluster.verifier, &cluster.drafter,
                                                  [&] { return cluster.rng(); });
  cluster.Handle(VerifierDown{1, absl::FailedPreconditionError("owned by router-b")});
  cluster.Submit(cluster.MakeRequest(20, 30));
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(*cluster.logs[1]), HasSubstr("not ready: the verifier at verifier:1: owned"));
  cluster.Handle(cluster.verifier.Connect());
  EXPECT_EQ(cluster.scheduler->NotReadyReason(), "");
}

TEST(SchedulerTest, CancellationInEveryState) {
  for (int turns = 0; turns < 14; ++turns) {
    for (bool by_id : {true, false}) {
      Cluster cluster;
      cluster.Start();
      Request request = cluster.MakeRequest(300, 200);
      request.stop_token_ids.clear();
      cluster.Submit(request);
      for (int i = 0; i < turns; ++i) cluster.Turn();
      ASSERT_FALSE(cluster.logs[1]->finish.has_value());
      bool found = false;
      if (by_id) {
        cluster.Handle(CancelById{request.id, [&](bool f) { found = f; }});
        EXPECT_TRUE(found);
        cluster.Handle(CancelById{request.id, [&](bool f) { found = f; }});
        EXPECT_FALSE(found);
      } else {
        cluster.Handle(ClientGone{1});
        cluster.Handle(ClientGone{1});
      }
      EXPECT_EQ(cluster.logs[1]->final->finish_reason, FinishReason::kCancelled);
      const Cluster::Truth truth = Cluster::TruthOf(request);
      EXPECT_TRUE(std::equal(cluster.logs[1]->tokens.begin(), cluster.logs[1]->tokens.end(),
                             truth.tokens.begin()));
      cluster.Run();
      cluster.ExpectNothingLeft();
      EXPECT_EQ(cluster.scheduler->counters().cancelled, 1u);
    }
  }
}

TEST(SchedulerTest, TheDeadlineEndsAStreamWithWhatThereIs) {
  Cluster cluster;
  cluster.Start(false);
  Request request = cluster.MakeRequest(5, 100);
  request.stop_token_ids.clear();
  cluster.Submit(request, cluster.clock.Now() + milliseconds(100));
  for (int i = 0; i < 10; ++i) cluster.Turn();
  EXPECT_EQ(cluster.scheduler->NextWake(), cluster.clock.Now() + milliseconds(100));
  cluster.clock.Advance(milliseconds(100));
  cluster.Advance();
  EXPECT_EQ(cluster.logs[1]->final->finish_reason, FinishReason::kDeadline);
  EXPECT_EQ(cluster.logs[1]->tokens.size(), 10u);
  cluster.Run();
  cluster.ExpectNothingLeft();
  // One that is over before it begins never reaches the verifier.
  cluster.Submit(cluster.MakeRequest(5, 100), cluster.clock.Now());
  EXPECT_EQ(cluster.logs[2]->final->finish_reason, FinishReason::kDeadline);
  EXPECT_EQ(cluster.verifier.ever.size(), 1u);
}

TEST(SchedulerTest, AFullQueueRefusesAtOnce) {
  SchedulerOptions options;
  options.max_queue = 2;
  Cluster cluster(options);
  cluster.verifier.info.max_sequences = 1;
  cluster.Start();
  for (int i = 0; i < 4; ++i) cluster.Submit(cluster.MakeRequest(5, 10));
  for (int i = 1; i <= 3; ++i) EXPECT_FALSE(cluster.logs[i]->finish.has_value());
  EXPECT_EQ(cluster.logs[4]->finish->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(*cluster.logs[4]), HasSubstr("2 requests waiting"));
  EXPECT_THAT(Message(*cluster.logs[4]), HasSubstr("retry later"));
  EXPECT_EQ(cluster.scheduler->counters().waiting, 2);
  EXPECT_EQ(cluster.scheduler->counters().running, 1);
  cluster.Run();
  EXPECT_EQ(cluster.scheduler->counters().finished, 3u);
}

TEST(SchedulerTest, PriorityThenArrival) {
  Cluster cluster;
  cluster.verifier.info.max_sequences = 1;
  cluster.Start();
  std::vector<Request> requests;
  for (int priority : {0, 0, 5, 0, 5}) {
    requests.push_back(cluster.MakeRequest(5, 10));
    requests.back().priority = priority;
    cluster.Submit(requests.back());
  }
  std::vector<int> order;
  while (!cluster.scheduler->idle()) {
    cluster.Turn();
    for (int i = 0; i < 5; ++i) {
      if (cluster.logs[i + 1]->finish.has_value() &&
          std::find(order.begin(), order.end(), i) == order.end()) {
        order.push_back(i);
      }
    }
  }
  EXPECT_THAT(order, ::testing::ElementsAre(0, 2, 4, 1, 3));
}

TEST(SchedulerTest, ARequestThatCanNeverFitIsRefusedAtOnce) {
  Cluster cluster;
  cluster.verifier.info.pool.pages = 20;
  cluster.Start();
  cluster.Submit(cluster.MakeRequest(200, 57));
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(*cluster.logs[1]), HasSubstr("can never fit"));
  const Request fits = cluster.MakeRequest(200, 56);
  cluster.Submit(fits);
  cluster.Run();
  cluster.ExpectComplete(fits, *cluster.logs[2]);
}

TEST(SchedulerTest, ManyGrowInASmallPoolAndAllFinish) {
  Cluster cluster;
  cluster.verifier.info.pool.pages = 60;
  cluster.Start();
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(cluster.MakeRequest(20, 700));
    requests.back().stop_token_ids.clear();
    cluster.Submit(requests.back());
  }
  cluster.Run();
  for (int i = 0; i < 12; ++i) cluster.ExpectComplete(requests[i], *cluster.logs[i + 1]);
  cluster.ExpectNothingLeft();
  EXPECT_GT(cluster.verifier.preemptions, 0u);
}

TEST(SchedulerTest, APoolThatNeverHasRoomEndsTheRequest) {
  Cluster cluster;
  cluster.Start();
  cluster.verifier.info.pool.pages = 1;  // it promised more
  cluster.Submit(cluster.MakeRequest(50, 20));
  for (int i = 0; i < 200 && !cluster.scheduler->idle(); ++i) {
    cluster.clock.Advance(milliseconds(20));
    cluster.Advance();
    cluster.Turn();
  }
  ASSERT_TRUE(cluster.logs[1]->finish.has_value());
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kResourceExhausted);
}

TEST(SchedulerTest, RefusedAdmissionsAreTriedAgain) {
  Cluster cluster;
  cluster.verifier.refuse_next = 3;
  cluster.Start();
  const Request request = cluster.MakeRequest(50, 20);
  cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, SequencesThatTheVerifierForgotAreAdmittedAnew) {
  Cluster cluster;
  cluster.Start();
  Request request = cluster.MakeRequest(50, 40);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kOff;
  cluster.Submit(request);
  for (int i = 0; i < 30; ++i) {
    if (i % 7 == 3) cluster.verifier.unknown_next = 1;
    cluster.Turn();
  }
  cluster.verifier.unknown_next = 0;
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_GT(cluster.scheduler->counters().replays, 0u);
  // But not for ever.
  cluster.verifier.unknown_next = 1000;
  cluster.Submit(cluster.MakeRequest(50, 40));
  cluster.Run();
  EXPECT_EQ(cluster.logs[2]->finish->code(), absl::StatusCode::kInternal);
}

TEST(SchedulerTest, AFailedForwardEndsThatStreamAlone) {
  Cluster cluster;
  cluster.Start();
  cluster.verifier.fail_next = 1;
  const Request good = cluster.MakeRequest(5, 20);
  cluster.Submit(cluster.MakeRequest(5, 20));
  cluster.Submit(good);
  cluster.Run();
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kInternal);
  EXPECT_THAT(Message(*cluster.logs[1]), HasSubstr("not a number"));
  cluster.ExpectComplete(good, *cluster.logs[2]);
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, AnAnswerThatDoesNotFollowIsNotPassedOn) {
  struct Case {
    std::function<void(WorkResult*)> change;
  };
  const Case cases[] = {
      {[](WorkResult* r) { r->tokens.push_back('a'); }},
      {[](WorkResult* r) { r->tokens.clear(); }},
      {[](WorkResult* r) { r->base_len += 1; }},
      {[](WorkResult* r) { r->tokens[0] = kFakeVocab; }},
      {[](WorkResult* r) { r->tokens[0] = -1; }},
      {[](WorkResult* r) { r->outcome = Outcome::kRejected; }},
      {[](WorkResult* r) { r->outcome = Outcome::kUnspecified; }},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    Cluster cluster;
    cluster.Start(false);
    Request request = cluster.MakeRequest(5, 20);
    request.stop_token_ids.clear();
    cluster.Submit(request);
    cluster.Turn();
    ASSERT_TRUE(cluster.verifier.Process());
    VerifierStep step = *cluster.verifier.TakeResult();
    cases[i].change(&step.result.results[0]);
    cluster.Handle(std::move(step));
    ASSERT_TRUE(cluster.logs[1]->finish.has_value()) << i;
    EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kInternal) << i;
    EXPECT_EQ(cluster.logs[1]->tokens.size(), 1u);
    cluster.Run();
    cluster.ExpectNothingLeft();
  }
  // A result that lacks a work: that sequence starts again.
  Cluster cluster;
  cluster.Start(false);
  const Request request = cluster.MakeRequest(5, 20);
  cluster.Submit(request);
  cluster.Turn();
  cluster.verifier.Process();
  VerifierStep step = *cluster.verifier.TakeResult();
  step.result.results.clear();
  cluster.Handle(std::move(step));
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, StaleMessagesAreIgnored) {
  Cluster cluster;
  cluster.Start();
  const Request request = cluster.MakeRequest(5, 30);
  cluster.Submit(request);
  cluster.verifier.Process();
  VerifierStep old = *cluster.verifier.TakeResult();
  cluster.Handle(cluster.verifier.Break(0, true));
  cluster.Handle(old);
  EXPECT_TRUE(cluster.logs[1]->tokens.empty());
  cluster.Handle(cluster.verifier.Connect());
  cluster.Handle(old);
  EXPECT_TRUE(cluster.logs[1]->tokens.empty());
  cluster.Handle(VerifierDown{1, absl::UnavailableError("the old one")});
  EXPECT_TRUE(cluster.scheduler->State().verifier_connected);
  cluster.Handle(DrafterReplied{77, {}});
  cluster.Handle(DrafterDown{77, absl::UnavailableError("another")});
  EXPECT_TRUE(cluster.scheduler->State().drafter_connected);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
}

TEST(SchedulerTest, StopStringsEndTheSequenceAtTheVerifier) {
  Cluster cluster;
  cluster.drafter.right_percent = 100;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 200);
  request.stop_token_ids.clear();
  const Cluster::Truth all = Cluster::TruthOf(request);
  request.stop = {all.text.substr(40, 4)};
  const Cluster::Truth truth = Cluster::TruthOf(request);
  ASSERT_LT(truth.tokens.size(), 60u);
  cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  EXPECT_EQ(cluster.logs[1]->final->stop_matched, request.stop[0]);
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, AStreamResumesWhereItsClientStands) {
  for (size_t received : {0u, 1u, 7u, 19u, 20u}) {
    Cluster cluster;
    cluster.Start();
    Request request = cluster.MakeRequest(5, 20);
    request.stop_token_ids.clear();
    const Cluster::Truth truth = Cluster::TruthOf(request);
    request.resumed = true;
    request.received.assign(truth.tokens.begin(), truth.tokens.begin() + received);
    cluster.Submit(request);
    cluster.Run();
    cluster.ExpectComplete(request, *cluster.logs[1]);
    EXPECT_EQ(cluster.logs[1]->text, truth.text.substr(received));
    cluster.ExpectNothingLeft();
  }
}

TEST(SchedulerTest, RequestIdsAreUniqueExceptForResumption) {
  Cluster cluster;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 50);
  request.stop_token_ids.clear();
  cluster.Submit(request);
  for (int i = 0; i < 6; ++i) cluster.Turn();
  cluster.Submit(request);
  EXPECT_EQ(cluster.logs[2]->finish->code(), absl::StatusCode::kAlreadyExists);
  request.resumed = true;
  request.received = cluster.logs[1]->tokens;
  cluster.Submit(request);
  EXPECT_EQ(cluster.logs[1]->final->finish_reason, FinishReason::kCancelled);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[3]);
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, AReaderTooSlowIsCutOff) {
  Cluster cluster;
  cluster.Start();
  const Request good = cluster.MakeRequest(5, 50);
  cluster.Submit(cluster.MakeRequest(5, 50));
  cluster.Submit(good);
  cluster.logs[1]->full = true;
  cluster.Run();
  EXPECT_EQ(cluster.logs[1]->finish->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(*cluster.logs[1]), HasSubstr("too slowly"));
  cluster.ExpectComplete(good, *cluster.logs[2]);
  cluster.ExpectNothingLeft();
}

TEST(SchedulerTest, LogprobsPassThrough) {
  Cluster cluster;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 50);
  request.logprobs = 2;
  cluster.Submit(request);
  cluster.Run();
  cluster.ExpectComplete(request, *cluster.logs[1]);
  ASSERT_EQ(cluster.logs[1]->logprobs.size(), cluster.logs[1]->tokens.size());
  for (size_t i = 0; i < cluster.logs[1]->tokens.size(); ++i) {
    EXPECT_EQ(cluster.logs[1]->logprobs[i].chosen.token, cluster.logs[1]->tokens[i]);
  }
}

TEST(SchedulerTest, DrainingFinishesWhatRunsAndTakesNothingNew) {
  Cluster cluster;
  cluster.Start();
  const Request request = cluster.MakeRequest(5, 30);
  cluster.Submit(request);
  cluster.Turn();
  bool idle = false;
  cluster.Handle(Drain{[&] { idle = true; }});
  EXPECT_FALSE(idle);
  EXPECT_EQ(cluster.scheduler->NotReadyReason(), "it is shutting down");
  cluster.Submit(cluster.MakeRequest(5, 30));
  EXPECT_EQ(cluster.logs[2]->finish->code(), absl::StatusCode::kUnavailable);
  cluster.Run();
  EXPECT_TRUE(idle);
  cluster.ExpectComplete(request, *cluster.logs[1]);

  Cluster cut;
  cut.Start();
  cut.Submit(cut.MakeRequest(5, 30));
  cut.Turn();
  cut.Handle(Drain{[&] { idle = true; }});
  cut.Handle(Abandon{"shutting down; resume elsewhere"});
  EXPECT_EQ(cut.logs[1]->finish->code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Message(*cut.logs[1]), "shutting down; resume elsewhere");
  cut.Run();
  cut.ExpectNothingLeft();
}

TEST(SchedulerTest, StateTellsWhatIsGoingOn) {
  Cluster cluster;
  cluster.Start();
  Request request = cluster.MakeRequest(5, 30);
  request.stop_token_ids.clear();
  request.speculation = Speculation::kChain;
  cluster.Submit(request);
  while (!cluster.scheduler->idle()) {
    cluster.clock.Advance(milliseconds(2));
    cluster.Turn();
  }
  SchedulerState state;
  cluster.Handle(AskState{[&](SchedulerState s) { state = std::move(s); }});
  EXPECT_EQ(state.not_ready_reason, "");
  EXPECT_TRUE(state.verifier_connected);
  EXPECT_TRUE(state.speculating);
  EXPECT_EQ(state.verifier.owner, cluster.options.name);
  // A round took 2 ms, of which the draft took 200 us and the forward over 8 rows 1033 us.
  EXPECT_NEAR(state.round_overhead_us_p50, 767, 10);
}

// ---- Everything at once

// Random requests, drafters that come and go, verifiers that break, forget, refuse and preempt,
// cancellations at any moment: every stream is the target's own continuation, ends once, and
// nothing is left at the verifier.
class SchedulerPropertyTest : public ::testing::TestWithParam<int> {};

TEST_P(SchedulerPropertyTest, StreamsAreTrueWhateverHappens) {
  std::mt19937 rng(GetParam());
  auto percent = [&](unsigned chance) { return rng() % 100 < chance; };
  SchedulerOptions options;
  options.max_queue = 1 + static_cast<int>(rng() % 40);
  Cluster cluster(options);
  cluster.rng.seed(GetParam());
  cluster.drafter.rng.seed(GetParam());
  cluster.drafter.right_percent = rng() % 101;
  cluster.drafter.unknown_percent = percent(30) ? rng() % 50 : 0;
  cluster.verifier.info.max_rows = 1 + static_cast<int>(rng() % 150);
  cluster.verifier.info.max_tree_nodes = percent(20) ? 1 + static_cast<int>(rng() % 64) : 64;
  cluster.verifier.info.max_sequences = 1 + static_cast<int>(rng() % 10);
  cluster.verifier.info.pool.page_size = 1 << rng() % 6;
  cluster.verifier.info.pool.pages =
      (400 + static_cast<int>(rng() % 2000)) / cluster.verifier.info.pool.page_size;
  cluster.Start(percent(70));

  struct Sent {
    Request request;
    bool disturbed = false;  // may end early
  };
  std::map<uint64_t, Sent> sent;
  const int turns = 400;
  for (int turn = 0; turn < turns; ++turn) {
    if (percent(15) && sent.size() < 40) {
      Request request = cluster.MakeRequest(1 + rng() % (percent(20) ? 200 : 20),
                                            1 + static_cast<int>(rng() % 60));
      request.speculation = static_cast<Speculation>(1 + rng() % 4);
      request.tree_nodes = 1 + static_cast<int>(rng() % 64);
      request.priority = static_cast<int>(rng() % 3);
      if (percent(20)) request.stop_token_ids.clear();
      if (percent(20)) request.stop_token_ids = {'b', kFakeEos};
      if (percent(30)) request.stop = {"ab", "cde"};
      if (percent(20)) request.logprobs = 1;
      if (percent(20)) {
        const Cluster::Truth truth = Cluster::TruthOf(request);
        request.resumed = true;
        request.received.assign(truth.tokens.begin(),
                                truth.tokens.begin() + rng() % truth.tokens.size());
      }
      std::optional<TimePoint> deadline;
      if (percent(10)) deadline = cluster.clock.Now() + milliseconds(rng() % 300);
      const uint64_t handle = cluster.Submit(request, deadline);
      sent[handle] = {request, deadline.has_value()};
    }
    switch (rng() % 12) {
      case 0:
      case 1:
      case 2:
      case 3:
        cluster.verifier.Process();
        break;
      case 4:
      case 5:
      case 6:
        if (auto result = cluster.verifier.TakeResult()) cluster.Handle(*std::move(result));
        break;
      case 7:
      case 8:
        if (auto reply = cluster.drafter.Answer()) cluster.Handle(*std::move(reply));
        break;
      case 9:
        cluster.clock.Advance(milliseconds(rng() % (percent(5) ? 2000 : 20)));
        cluster.Advance();
        break;
      case 10:
        if (!sent.empty() && percent(30)) {
          auto it = sent.begin();
          std::advance(it, rng() % sent.size());
          it->second.disturbed = true;
          if (percent(50)) {
            cluster.Handle(ClientGone{it->first});
          } else {
            cluster.Handle(CancelById{it->second.request.id, nullptr});
          }
        }
        break;
      case 11:
        if (percent(30) && cluster.verifier.connected) {
          const bool keep = percent(70);
          cluster.Handle(cluster.verifier.Break(rng() % 3, keep));
          if (!keep && percent(50)) ++cluster.verifier.info.epoch;
        } else if (percent(20)) {
          if (cluster.drafter.connected) {
            cluster.Handle(cluster.drafter.Break());
          } else {
            cluster.Handle(cluster.drafter.Connect());
          }
        } else if (percent(10)) {
          cluster.verifier.unknown_next = 1;
        } else if (percent(10)) {
          cluster.verifier.refuse_next = 1;
        }
        if (!cluster.verifier.connected && percent(80)) {
          cluster.Handle(cluster.verifier.Connect());
        }
        break;
    }
    if (HasFatalFailure()) return;
  }
  cluster.verifier.unknown_next = 0;
  cluster.verifier.refuse_next = 0;
  if (!cluster.verifier.connected) cluster.Handle(cluster.verifier.Connect());
  cluster.Run();
  size_t complete = 0;
  for (const auto& [handle, one] : sent) {
    const StreamLog& log = *cluster.logs[handle];
    ASSERT_TRUE(log.finish.has_value()) << "a stream without an end";
    const bool early =
        log.final.has_value() && (log.final->finish_reason == FinishReason::kCancelled ||
                                  log.final->finish_reason == FinishReason::kDeadline);
    if (log.finish->ok() && !early) {
      ++complete;
      cluster.ExpectComplete(one.request, log);
      if (one.request.logprobs.has_value()) {
        EXPECT_EQ(log.logprobs.size(), log.tokens.size());
      }
      continue;
    }
    if (early) {
      EXPECT_TRUE(one.disturbed);
    } else {
      // Refused for a full queue, or while the verifier was long away; never for what was
      // disturbed.
      EXPECT_THAT(log.tokens, IsEmpty()) << *log.finish;
      EXPECT_TRUE(log.finish->code() == absl::StatusCode::kResourceExhausted ||
                  log.finish->code() == absl::StatusCode::kUnavailable ||
                  log.finish->code() == absl::StatusCode::kInvalidArgument)
          << *log.finish;
    }
    std::vector<int32_t> tokens = one.request.received;
    tokens.insert(tokens.end(), log.tokens.begin(), log.tokens.end());
    const Cluster::Truth truth = Cluster::TruthOf(one.request);
    ASSERT_LE(tokens.size(), truth.tokens.size());
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), truth.tokens.begin()));
  }
  cluster.ExpectNothingLeft();
  EXPECT_LE(cluster.verifier.max_rows_seen, cluster.verifier.info.max_rows);
  RecordProperty("complete", static_cast<int>(complete));
}

INSTANTIATE_TEST_SUITE_P(Seeds, SchedulerPropertyTest, ::testing::Range(0, 150));

}  // namespace
}  // namespace coppice::router
