#include "services/drafter/draft_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "services/drafter/fake_model.h"

namespace coppice::drafter {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kEpoch = 77, kStream = 1, kRouter = 9;

class DraftEngineTest : public ::testing::Test {
 protected:
  void Make(int slots, int window, int max_top_k = 4) {
    EngineOptions options;
    options.slots = slots;
    options.window = window;
    options.max_top_k = max_top_k;
    model_ = std::make_unique<FakeModel>(slots, window);
    engine_ = std::make_unique<DraftEngine>(model_.get(), options, &clock_);
    Open(kStream, kEpoch);
    Turn();
  }
  void TearDown() override {
    if (!engine_) return;
    EXPECT_EQ(model_->error(), "");
    EXPECT_EQ(engine_->windows().Check(), "");
  }

  void Open(uint64_t stream, uint64_t epoch) {
    events_.push_back(ContextOpened{stream, epoch, [this, stream](const std::vector<Ack>& acks) {
                                      for (const Ack& ack : acks) acks_[stream].push_back(ack);
                                    }});
  }
  struct Given {
    uint64_t sequence;
    int64_t first, count;
    std::optional<int32_t> pending;
    bool draft_ahead = false;
  };
  void Arrive(const std::vector<Given>& given, std::vector<uint64_t> released = {},
              uint64_t stream = kStream) {
    auto features = std::make_shared<std::vector<std::vector<uint16_t>>>();
    for (const Given& g : given) {
      features->push_back(
          FakeModel::Features(static_cast<int>(g.sequence + 100 * stream), g.first, g.count));
    }
    ContextArrived event{stream, {}, std::move(released), features};
    for (size_t i = 0; i < given.size(); ++i) {
      const Given& g = given[i];
      event.rows.push_back(
          {g.sequence, g.first, g.count, (*features)[i], g.pending, g.draft_ahead});
    }
    events_.push_back(std::move(event));
  }
  void Ask(uint64_t batch, std::vector<Query> queries, int top_k = 2, Duration wait = 0us,
           uint64_t router = kRouter, uint64_t epoch = kEpoch) {
    events_.push_back(DraftAsked{router, batch, epoch, std::move(queries), top_k, wait,
                                 [this](Reply reply) { replies_.push_back(std::move(reply)); }});
  }
  void Turn() {
    engine_->Turn(absl::MakeSpan(events_));
    engine_->SendAcks();
    events_.clear();
  }

  // The only reply since the last call.
  Reply TakeReply() {
    EXPECT_THAT(replies_, SizeIs(1));
    Reply reply = replies_.empty() ? Reply{} : std::move(replies_.front());
    replies_.clear();
    return reply;
  }
  std::vector<DraftOutcome> TakeOutcomes() {
    std::vector<DraftOutcome> out;
    for (const Answer& answer : TakeReply().answers) out.push_back(answer.outcome);
    return out;
  }
  std::vector<Ack> TakeAcks(uint64_t stream = kStream) { return std::exchange(acks_[stream], {}); }

  FakeClock clock_;
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<DraftEngine> engine_;
  std::vector<Event> events_;
  std::map<uint64_t, std::vector<Ack>> acks_;
  std::vector<Reply> replies_;
};

TEST_F(DraftEngineTest, AnAnswerHasTheDraftOfItsQuestion) {
  Make(2, 8);
  Arrive({{1, 0, 5, std::nullopt}});
  Ask(3, {{1, 42, 5}});
  Turn();
  const Reply reply = TakeReply();
  EXPECT_EQ(reply.batch, 3u);
  ASSERT_THAT(reply.answers, SizeIs(1));
  const Answer& answer = reply.answers[0];
  EXPECT_EQ(answer.outcome, DraftOutcome::kDrafted);
  EXPECT_EQ(answer.sequence, 1u);
  EXPECT_EQ(answer.base_len, 5);
  ASSERT_THAT(answer.tokens, SizeIs(6));
  for (int position = 0; position < 3; ++position) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(answer.tokens[position * 2 + rank], FakeModel::Token(42, 5, position, rank));
    }
  }
  EXPECT_THAT(answer.log_probs, SizeIs(6));
}

TEST_F(DraftEngineTest, ABatchIsOneForward) {
  Make(4, 8);
  Arrive({{1, 0, 5, {}}, {2, 0, 3, {}}, {3, 0, 4, {}}});
  Ask(1, {{1, 42, 5}, {2, 43, 3}, {3, 44, 4}});
  Turn();
  EXPECT_THAT(TakeReply().answers, SizeIs(3));
  ASSERT_THAT(model_->calls(), SizeIs(1));
  EXPECT_THAT(model_->calls()[0].owners, ElementsAre(101, 102, 103));
}

TEST_F(DraftEngineTest, DraftsAheadInOneForwardAndCollectsWithoutAnother) {
  Make(4, 8);
  Arrive({{1, 0, 5, 42, true}, {2, 0, 3, 43, true}, {3, 0, 4, 44, false}});
  Turn();
  ASSERT_THAT(model_->calls(), SizeIs(1));
  EXPECT_THAT(model_->calls()[0].blocks, SizeIs(2));
  Ask(1, {{1, 42, 5}, {2, 43, 3}});
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted, DraftOutcome::kDrafted));
  EXPECT_THAT(model_->calls(), SizeIs(1));
  EXPECT_EQ(engine_->counters().ahead_used, 2u);
}

TEST_F(DraftEngineTest, AnotherPendingTokenIsDraftedAnew) {
  Make(4, 8);
  Arrive({{1, 0, 5, 42, true}});
  Turn();
  Ask(1, {{1, 99, 5}});
  Turn();
  EXPECT_EQ(TakeReply().answers[0].tokens[0], FakeModel::Token(99, 5, 0, 0));
  EXPECT_THAT(model_->calls(), SizeIs(2));
}

TEST_F(DraftEngineTest, RowsAndQuestionInOneTurnCostOneBlock) {
  Make(4, 8);
  Arrive({{1, 0, 5, 42, true}});
  Ask(1, {{1, 42, 5}});
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
  ASSERT_THAT(model_->calls(), SizeIs(1));
  EXPECT_THAT(model_->calls()[0].blocks, SizeIs(1));
}

TEST_F(DraftEngineTest, FewerCandidatesThanDraftedAreThePrefix) {
  Make(4, 8);
  Arrive({{1, 0, 5, 42, true}});
  Turn();  // ahead, with max_top_k = 4
  Ask(1, {{1, 42, 5}}, 1);
  Turn();
  const Reply reply = TakeReply();
  EXPECT_THAT(reply.answers[0].tokens,
              ElementsAre(FakeModel::Token(42, 5, 0, 0), FakeModel::Token(42, 5, 1, 0),
                          FakeModel::Token(42, 5, 2, 0)));
  EXPECT_THAT(model_->calls(), SizeIs(1));
  Ask(2, {{1, 42, 5}}, 4);  // again, with more
  Turn();
  EXPECT_THAT(TakeReply().answers[0].tokens, SizeIs(12));
}

TEST_F(DraftEngineTest, WaitsForFeaturesOnTheirWay) {
  Make(4, 8);
  Arrive({{1, 0, 5, {}}});
  Ask(1, {{1, 42, 7}}, 2, 500us);
  Turn();
  EXPECT_THAT(replies_, IsEmpty());
  EXPECT_EQ(engine_->NextDeadline(), clock_.Now() + 500us);
  clock_.Advance(499us);
  Arrive({{1, 5, 2, {}}});
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
  EXPECT_EQ(engine_->NextDeadline(), std::nullopt);
}

TEST_F(DraftEngineTest, WaitsForASequenceWhoseFirstRowsAreOnTheirWay) {
  Make(4, 8);
  Ask(1, {{1, 42, 5}}, 2, 500us);
  Turn();
  EXPECT_THAT(replies_, IsEmpty());
  Arrive({{1, 0, 5, {}}});
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
}

TEST_F(DraftEngineTest, LateAndUnknownAtTheDeadline) {
  Make(4, 8);
  Arrive({{1, 0, 5, {}}, {3, 0, 2, {}}});
  Ask(1, {{1, 42, 7}, {2, 42, 5}, {3, 42, 2}}, 2, 500us);
  Turn();
  EXPECT_THAT(replies_, IsEmpty());
  clock_.Advance(500us);
  Turn();
  EXPECT_THAT(TakeOutcomes(),
              ElementsAre(DraftOutcome::kLate, DraftOutcome::kUnknown, DraftOutcome::kDrafted));
}

TEST_F(DraftEngineTest, AnUnknownVerifierIsAnsweredAtOnce) {
  Make(4, 8);
  Ask(1, {{1, 42, 5}}, 2, 500us, kRouter, kEpoch + 1);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kUnknown));
}

TEST_F(DraftEngineTest, AGapIsAnsweredAtOnceAndHeals) {
  Make(4, 8);
  Arrive({{1, 0, 3, {}}});
  Arrive({{1, 4, 1, 42, true}});
  Turn();
  const std::vector<Ack> acks = TakeAcks();
  ASSERT_THAT(acks, SizeIs(2));
  EXPECT_EQ(acks[1].need_from, 3);
  EXPECT_EQ(acks[1].have_len, 3);
  EXPECT_THAT(model_->calls(), IsEmpty()) << "nothing may be drafted over a gap";
  Ask(1, {{1, 42, 5}}, 2, 1s);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kGap));
  Arrive({{1, 3, 2, 42, true}});
  Ask(2, {{1, 42, 5}}, 2, 1s);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
}

TEST_F(DraftEngineTest, AStaleRoundIsDraftedFromWhatCameBeforeIt) {
  Make(4, 8);
  Arrive({{1, 0, 7, {}}});
  Ask(1, {{1, 42, 5}});
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
  EXPECT_EQ(model_->calls()[0].blocks[0].base_len, 5);
  // What the window no longer holds cannot be drafted for.
  Arrive({{1, 7, 8, {}}});
  Ask(2, {{1, 42, 5}}, 2, 1s);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kUnknown));
}

TEST_F(DraftEngineTest, AStreamsAnswersKeepTheOrderOfItsQuestions) {
  Make(4, 8);
  Arrive({{1, 0, 5, {}}});
  Ask(1, {{1, 42, 7}}, 2, 500us);
  Ask(2, {{1, 42, 5}}, 2, 500us);
  Ask(7, {{1, 42, 5}}, 2, 500us, kRouter + 1);
  Turn();
  EXPECT_EQ(TakeReply().batch, 7u);
  Arrive({{1, 5, 2, {}}});
  Turn();
  ASSERT_THAT(replies_, SizeIs(2));
  EXPECT_EQ(replies_[0].batch, 1u);
  EXPECT_EQ(replies_[1].batch, 2u);
}

TEST_F(DraftEngineTest, TwoQuestionsAboutOneSequenceInOneTurn) {
  Make(4, 8);
  Arrive({{1, 0, 5, {}}});
  Ask(1, {{1, 42, 5}, {1, 43, 5}});
  Turn();
  const Reply reply = TakeReply();
  EXPECT_EQ(reply.answers[0].tokens[0], FakeModel::Token(42, 5, 0, 0));
  EXPECT_EQ(reply.answers[1].tokens[0], FakeModel::Token(43, 5, 0, 0));
}

TEST_F(DraftEngineTest, NoSlotThenASlotThatFrees) {
  Make(1, 8);
  Arrive({{1, 0, 5, {}}, {2, 0, 3, 42, true}});
  Turn();
  std::vector<Ack> acks = TakeAcks();
  ASSERT_THAT(acks, SizeIs(2));
  EXPECT_TRUE(acks[1].no_slot);
  Ask(1, {{2, 42, 3}}, 2, 1s);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kUnknown));

  Arrive({}, {1});
  Turn();
  acks = TakeAcks();
  ASSERT_THAT(acks, SizeIs(1));
  EXPECT_EQ(acks[0].sequence, 2u);
  EXPECT_EQ(acks[0].need_from, 0);
  EXPECT_FALSE(acks[0].no_slot);
  Ask(2, {{2, 42, 3}}, 2, 1s);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kGap));
  Arrive({{2, 0, 3, 42, true}});
  Ask(3, {{2, 42, 3}}, 2, 1s);
  Turn();
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
}

TEST_F(DraftEngineTest, AClosedStreamFreesItsSequencesAndOnlyThem) {
  Make(4, 8);
  Open(2, kEpoch + 1);
  Arrive({{1, 0, 5, {}}});
  Arrive({{1, 0, 4, {}}}, {}, 2);
  Turn();
  EXPECT_EQ(engine_->windows().used(), 2);
  events_.push_back(ContextClosed{kStream});
  Ask(1, {{1, 42, 4}}, 2, 0us, kRouter, kEpoch + 1);
  Turn();
  EXPECT_EQ(engine_->windows().used(), 1);
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
  EXPECT_EQ(model_->calls().back().owners[0], 201);
}

TEST_F(DraftEngineTest, AVerifierThatComesAgainReplacesItsOldStream) {
  Make(4, 8);
  Arrive({{1, 0, 5, 42, true}});
  Open(2, kEpoch);
  Arrive({{1, 5, 1, {}}});  // a leftover of the old stream
  Turn();
  EXPECT_EQ(engine_->windows().used(), 0);
  Arrive({{1, 0, 6, {}}}, {}, 2);
  events_.push_back(ContextClosed{kStream});  // the old one's end is noticed late
  Ask(1, {{1, 43, 6}});
  Turn();
  EXPECT_EQ(engine_->windows().used(), 1);
  EXPECT_THAT(TakeOutcomes(), ElementsAre(DraftOutcome::kDrafted));
  EXPECT_EQ(model_->calls().back().owners[0], 201);
}

TEST_F(DraftEngineTest, AClosedRouterIsAnsweredNoMore) {
  Make(4, 8);
  Arrive({{1, 0, 5, {}}});
  Ask(1, {{1, 42, 7}}, 2, 500us);
  Turn();
  events_.push_back(DraftClosed{kRouter});
  Turn();
  EXPECT_EQ(engine_->NextDeadline(), std::nullopt);
  clock_.Advance(1s);
  Turn();
  EXPECT_THAT(replies_, IsEmpty());
}

TEST_F(DraftEngineTest, ALongHistoryOfOneSequenceInOneBatch) {
  Make(1, 8);
  Arrive({{1, 0, 5, {}}, {1, 5, 6, {}}, {1, 11, 20, 42, true}});
  Turn();
  ASSERT_THAT(model_->calls(), SizeIs(1));
  EXPECT_EQ(model_->calls()[0].blocks[0].context_begin, 23);
  EXPECT_EQ(model_->calls()[0].blocks[0].base_len, 31);
}

// Random rows, losses, repeats, releases, closed streams and questions.  The model checks that
// every draft saw exactly its own sequence's rows; every question gets one answer, in order and in
// time; at the end every slot is free.
TEST_F(DraftEngineTest, RandomHistories) {
  for (int seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    const auto random = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(rng);
    };
    events_.clear();
    acks_.clear();
    const int window = random(4, 12);
    Make(random(1, 4), window);
    std::map<uint64_t, int64_t> committed;
    uint64_t stream = kStream, next_sequence = 1, next_batch = 1;
    std::map<uint64_t, std::vector<Query>> open;  // questions not yet answered
    uint64_t last_answered = 0;
    int drafted = 0;
    const auto read_replies = [&] {
      for (const Reply& reply : std::exchange(replies_, {})) {
        EXPECT_EQ(reply.batch, ++last_answered);
        const std::vector<Query> asked = open.at(reply.batch);
        open.erase(reply.batch);
        ASSERT_EQ(reply.answers.size(), asked.size());
        for (size_t i = 0; i < asked.size(); ++i) {
          const Answer& answer = reply.answers[i];
          EXPECT_EQ(answer.sequence, asked[i].sequence);
          EXPECT_EQ(answer.base_len, asked[i].base_len);
          if (answer.outcome != DraftOutcome::kDrafted) {
            EXPECT_THAT(answer.tokens, IsEmpty());
            continue;
          }
          ++drafted;
          EXPECT_EQ(answer.tokens[0],
                    FakeModel::Token(asked[i].pending_token, asked[i].base_len, 0, 0));
        }
      }
    };
    for (int step = 0; step < 300; ++step) {
      for (int events = random(1, 3); events > 0; --events) {
        const int dice = random(0, 19);
        if (dice == 0) {
          committed[next_sequence++] = 0;
        } else if (dice == 1 && !committed.empty()) {
          const uint64_t id = std::next(committed.begin(), random(0, committed.size() - 1))->first;
          Arrive({}, {id}, stream);
          committed.erase(id);
        } else if (dice == 2 && step % 10 == 0) {
          if (random(0, 1)) events_.push_back(ContextClosed{stream});
          ++stream;
          Open(stream, kEpoch);
          committed.clear();
        } else if (dice < 12) {
          std::vector<Given> given;
          for (auto& [id, length] : committed) {
            if (random(0, 1)) continue;
            const int64_t count = random(1, 5);
            const int what = random(0, 9);
            // Most rows arrive, some are lost, some come again.
            if (what == 1) {
              const int64_t from = std::max<int64_t>(0, length - random(1, window));
              given.push_back({id, from, length - from, {}});
            }
            if (what != 0) {
              given.push_back({id, length, count, random(0, 999), random(0, 1) == 1});
            }
            length += count;
          }
          Arrive(given, {}, stream);
        } else {
          std::vector<Query> queries;
          for (const auto& [id, length] : committed) {
            if (length > 0 && random(0, 1)) {
              queries.push_back({id, random(0, 999), length - random(0, 2)});
            }
          }
          std::erase_if(queries, [](const Query& q) { return q.base_len < 1; });
          open[next_batch] = queries;
          Ask(next_batch++, queries, random(1, 4), random(0, 3) * 100us);
        }
      }
      if (random(0, 1)) clock_.Advance(100us);
      Turn();
      read_replies();
      // What was asked for again comes.
      for (const Ack& ack : TakeAcks(stream)) {
        const auto it = committed.find(ack.sequence);
        if (!ack.need_from || it == committed.end() || random(0, 3) == 0) continue;
        const int64_t from = std::max(*ack.need_from, it->second - window);
        if (it->second > from) Arrive({{ack.sequence, from, it->second - from, {}}}, {}, stream);
      }
      ASSERT_EQ(model_->error(), "");
      ASSERT_EQ(engine_->windows().Check(), "");
      if (engine_->NextDeadline()) {
        EXPECT_GT(*engine_->NextDeadline(), clock_.Now());
      }
    }
    clock_.Advance(1s);
    Turn();
    read_replies();
    EXPECT_THAT(open, IsEmpty());
    EXPECT_GT(drafted, 0);
    std::vector<uint64_t> all;
    for (const auto& [id, length] : committed) all.push_back(id);
    Arrive({}, all, stream);
    Turn();
    EXPECT_EQ(engine_->windows().used(), 0);
    EXPECT_EQ(engine_->windows().waiting(), 0);
  }
}

TEST(MeasureDraftCostTest, OneSamplePerBlockCount) {
  FakeClock clock;
  EngineOptions options;
  options.slots = 5;
  options.window = 300;
  class Plain : public Drafter {
   public:
    explicit Plain(FakeClock* clock) : clock_(clock) { config_.hidden_size = 4; }
    const DraftConfig& config() const override { return config_; }
    uint64_t drafter_fingerprint() const override { return 1; }
    uint64_t embedding_fingerprint() const override { return 1; }
    void AppendContext(absl::Span<const ContextRows> rows) override {
      for (const ContextRows& r : rows) EXPECT_EQ(r.features.size(), 256u * 4);
    }
    void Draft(absl::Span<const DraftBlock> blocks, int, DraftCandidates*) override {
      clock_->Advance(blocks.size() * 10us);
    }

   private:
    FakeClock* clock_;
    DraftConfig config_;
  } plain(&clock);
  const std::vector<CostSample> samples = MeasureDraftCost(&plain, options, &clock);
  ASSERT_EQ(samples.size(), 3u);
  EXPECT_EQ(samples[0].blocks, 1);
  EXPECT_EQ(samples[2].blocks, 4);
  EXPECT_FLOAT_EQ(samples[2].micros, 40);
}

}  // namespace
}  // namespace coppice::drafter
