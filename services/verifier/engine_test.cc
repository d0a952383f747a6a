#include "services/verifier/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "services/verifier/fake_target.h"

namespace coppice::verifier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kVocab = 16;
constexpr int kHidden = 4;

// Keeps what it is given and objects to gaps.
class RecordingSink : public FeatureSink {
 public:
  struct Got {
    int64_t first = 0;  // position of the first row
    std::vector<uint16_t> features;
    std::optional<int32_t> pending;
    bool draft_ahead = false;
    int64_t end() const { return first + static_cast<int64_t>(features.size()) / kHidden; }
  };

  void Connect(const std::string& drafter) override { connected.insert(drafter); }
  int64_t Window(const std::string&) override { return window; }
  void Append(const std::string& drafter, const FeatureRows& rows) override {
    ASSERT_EQ(rows.features.size(), static_cast<size_t>(rows.count) * kHidden);
    EXPECT_FALSE(released.count(rows.sequence)) << "features of a released sequence";
    std::vector<Got>& all = got[{drafter, rows.sequence}];
    if (rows.request != 0) {
      answered = rows.answered ? rows.request : 0;
      all.push_back(
          {rows.first, {rows.features.begin(), rows.features.end()}, rows.pending, false});
      return;
    }
    if (!all.empty()) {
      EXPECT_EQ(rows.first, all.back().end()) << "a gap";
    }
    all.push_back(
        {rows.first, {rows.features.begin(), rows.features.end()}, rows.pending, rows.draft_ahead});
  }
  void Release(const std::string&, uint64_t sequence) override {
    EXPECT_TRUE(released.insert(sequence).second) << "released twice";
  }
  void Flush() override { ++flushes; }

  int64_t window = 4096;
  uint64_t answered = 0;
  int flushes = 0;
  std::set<std::string> connected;
  std::map<std::pair<std::string, uint64_t>, std::vector<Got>> got;
  std::set<uint64_t> released;
};

struct Bench {
  explicit Bench(FakeTargetOptions options = {}, EngineOptions engine_options = {}) {
    auto fake = std::make_unique<FakeTarget>(options);
    target = fake.get();
    engine_options.pages = options.pages;
    engine_options.page_size = options.page_size;
    engine_options.check_every_step = true;
    engine = std::make_unique<Engine>(std::move(fake), engine_options, &sink);
  }
  ~Bench() { EXPECT_THAT(target->violations(), IsEmpty()); }

  StepResult Do(Step step) { return engine->Execute(step); }
  WorkResult DoOne(Work work) {
    Step step;
    step.work.push_back(std::move(work));
    StepResult result = Do(std::move(step));
    EXPECT_THAT(result.results, SizeIs(1));
    return result.results[0];
  }
  std::vector<Refusal> AdmitAll(std::vector<Admit> admits) {
    Step step;
    step.admits = std::move(admits);
    return Do(std::move(step)).refused;
  }

  RecordingSink sink;
  FakeTarget* target;
  std::unique_ptr<Engine> engine;
};

Admit MakeAdmit(uint64_t sequence, std::vector<int32_t> tokens, int64_t max_tokens,
                float temperature = 0) {
  Admit admit;
  admit.sequence = sequence;
  admit.tokens = std::move(tokens);
  admit.max_tokens = max_tokens;
  admit.sampling.temperature = temperature;
  admit.sampling.seed = 40 + sequence;
  return admit;
}

Work Prefill(uint64_t sequence, int64_t base_len, int64_t n) {
  Work work;
  work.sequence = sequence;
  work.base_len = base_len;
  work.prefill = n;
  return work;
}

Work Tree(uint64_t sequence, int64_t base_len, std::vector<int32_t> tokens,
          std::vector<int32_t> parents) {
  Work work;
  work.sequence = sequence;
  work.base_len = base_len;
  work.tokens = std::move(tokens);
  work.parents = std::move(parents);
  return work;
}

// A random tree under `root`, often right: `truth` is what follows the root.
Work RandomTree(uint64_t sequence, int64_t base_len, int32_t root,
                const std::vector<int32_t>& truth, int nodes, std::mt19937* random) {
  std::vector<int32_t> tokens = {root};
  std::vector<int32_t> parents = {-1};
  std::vector<int> right = {0};  // how many true tokens lie on the path; -1: it is wrong
  for (int tries = 0; static_cast<int>(tokens.size()) < nodes && tries < 10 * nodes; ++tries) {
    const int parent = static_cast<int>((*random)() % tokens.size());
    const bool on = right[parent] >= 0 && right[parent] < static_cast<int>(truth.size());
    const int32_t token = on && (*random)() % 2 == 0 ? truth[right[parent]]
                                                     : static_cast<int32_t>((*random)() % kVocab);
    bool repeated = false;
    for (size_t i = 1; i < tokens.size(); ++i) {
      repeated |= parents[i] == parent && tokens[i] == token;
    }
    if (repeated) continue;
    right.push_back(on && token == truth[right[parent]] ? right[parent] + 1 : -1);
    tokens.push_back(token);
    parents.push_back(parent);
  }
  return Tree(sequence, base_len, std::move(tokens), std::move(parents));
}

// What a sequence must generate.
std::vector<int32_t> Expected(const Admit& admit) {
  std::vector<int32_t> all = FakeTarget::Continue(admit.tokens, admit.sampling,
                                                  static_cast<int>(admit.max_tokens), kVocab);
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::count(admit.stop_token_ids.begin(), admit.stop_token_ids.end(), all[i])) {
      all.resize(i + 1);
      break;
    }
  }
  return all;
}

// Every row that went out belongs to its position of `text`.
void CheckFeatures(const RecordingSink& sink, const std::string& drafter, uint64_t sequence,
                   const std::vector<int32_t>& text) {
  const auto it = sink.got.find({drafter, sequence});
  if (it == sink.got.end()) return;
  for (const RecordingSink::Got& rows : it->second) {
    ASSERT_LE(rows.end(), static_cast<int64_t>(text.size()));
    for (int64_t p = rows.first; p < rows.end(); ++p) {
      const auto begin = rows.features.begin() + (p - rows.first) * kHidden;
      ASSERT_EQ(std::vector<uint16_t>(begin, begin + kHidden),
                FakeTarget::Feature(absl::MakeConstSpan(text).subspan(0, p + 1), kHidden))
          << "sequence " << sequence << ", position " << p;
    }
    if (rows.pending && rows.end() < static_cast<int64_t>(text.size())) {
      ASSERT_EQ(*rows.pending, text[rows.end()]);
    }
  }
}

TEST(Engine, PrefillsInChunksAndDecodes) {
  Bench bench;
  const Admit admit = MakeAdmit(1, {3, 1, 4, 1, 5, 9}, 8);
  EXPECT_THAT(bench.AdmitAll({admit}), IsEmpty());
  const std::vector<int32_t> expected = Expected(admit);

  WorkResult r = bench.DoOne(Prefill(1, 0, 4));
  EXPECT_EQ(r.outcome, Outcome::kDone);
  EXPECT_EQ(r.base_len, 4);
  EXPECT_THAT(r.tokens, IsEmpty());
  r = bench.DoOne(Prefill(1, 4, 2));
  EXPECT_EQ(r.base_len, 6);
  std::vector<int32_t> got = r.tokens;
  ASSERT_THAT(got, SizeIs(1));
  while (r.finish_reason == FinishReason::kNone) {
    r = bench.DoOne(Tree(1, r.base_len, {got.back()}, {-1}));
    ASSERT_EQ(r.outcome, Outcome::kDone) << r.error;
    ASSERT_THAT(r.tokens, SizeIs(1));
    got.push_back(r.tokens[0]);
  }
  EXPECT_EQ(got, expected);
  EXPECT_EQ(r.finish_reason, FinishReason::kLength);
  EXPECT_EQ(bench.engine->pool_state().free_pages, 64) << "an ended sequence holds no pages";
  EXPECT_EQ(bench.engine->pool_state().sequences, 1);
  EXPECT_EQ(bench.engine->live_sequences(), 0);
  Step release;
  release.releases = {1, 99};
  EXPECT_EQ(bench.Do(release).pool.sequences, 0);
}

// Off ≡ chain ≡ tree at any temperature, alone and batched, with stop ids and limits inside paths.
TEST(Engine, TokensDoNotDependOnTrees) {
  std::mt19937 random(5);
  for (const float temperature : {0.f, 0.8f}) {
    for (const int nodes : {1, 4, 17, 64}) {
      Bench bench;
      std::vector<Admit> admits;
      for (uint64_t id = 1; id <= 3; ++id) {
        admits.push_back(MakeAdmit(id, {static_cast<int32_t>(id), 2, 7, 7}, 20 + id, temperature));
        admits.back().logprobs = 3;
      }
      admits[1].stop_token_ids = {Expected(admits[1])[9]};
      bench.AdmitAll(admits);
      std::map<uint64_t, std::vector<int32_t>> got;
      std::map<uint64_t, WorkResult> last;
      Step step;
      for (const Admit& a : admits) step.work.push_back(Prefill(a.sequence, 0, 4));
      while (!step.work.empty()) {
        const StepResult result = bench.Do(step);
        EXPECT_EQ(result.timing.rows, [&] {
          int64_t rows = 0;
          for (const Work& w : step.work) rows += w.prefill + w.tokens.size();
          return rows;
        }());
        step.work.clear();
        for (const WorkResult& r : result.results) {
          ASSERT_EQ(r.outcome, Outcome::kDone) << r.error;
          ASSERT_EQ(r.logprobs.size(), r.tokens.size());
          const Admit& admit = admits[r.sequence - 1];
          std::vector<int32_t>& tokens = got[r.sequence];
          for (size_t i = 0; i < r.tokens.size(); ++i) {
            std::vector<int32_t> text = admit.tokens;
            text.insert(text.end(), tokens.begin(), tokens.end());
            const std::vector<TokenLogProb> logprobs =
                LogProbs(FakeTarget::Logits(text, kVocab), r.tokens[i], 3);
            EXPECT_EQ(r.logprobs[i].chosen.token, r.tokens[i]);
            EXPECT_EQ(r.logprobs[i].chosen.log_prob, logprobs[0].log_prob);
            ASSERT_THAT(r.logprobs[i].top, SizeIs(3));
            EXPECT_EQ(r.logprobs[i].top[2].token, logprobs[3].token);
            tokens.push_back(r.tokens[i]);
          }
          last[r.sequence] = r;
          if (r.finish_reason != FinishReason::kNone) continue;
          const std::vector<int32_t> all =
              FakeTarget::Continue(admit.tokens, admit.sampling, 60, kVocab);
          step.work.push_back(RandomTree(r.sequence, r.base_len, tokens.back(),
                                         {all.begin() + tokens.size(), all.end()}, nodes, &random));
        }
      }
      for (const Admit& a : admits) EXPECT_EQ(got[a.sequence], Expected(a));
      EXPECT_EQ(last[1].finish_reason, FinishReason::kLength);
      EXPECT_EQ(last[2].finish_reason, FinishReason::kStop);
      if (nodes == 64) {
        EXPECT_GT(bench.engine->counters().accepted, 10u);
      }
      EXPECT_EQ(bench.engine->pool_state().free_pages, 64);
    }
  }
}

TEST(Engine, ASpinePathIsAcceptedWholeAndCutAtTheLimit) {
  Bench bench;
  const Admit admit = MakeAdmit(1, {8, 8}, 6);
  const std::vector<int32_t> t = Expected(admit);
  bench.AdmitAll({admit});
  bench.DoOne(Prefill(1, 0, 2));
  // A wrong branch first, so that rows and positions differ.
  const int32_t wrong = (t[1] + 1) % kVocab;
  WorkResult r = bench.DoOne(Tree(1, 2, {t[0], wrong, t[1], t[2]}, {-1, 0, 0, 2}));
  EXPECT_THAT(r.tokens, ElementsAre(t[1], t[2], t[3]));
  EXPECT_EQ(r.accepted, 2);
  EXPECT_EQ(r.base_len, 5);
  // Two are left; the path offers more.
  r = bench.DoOne(Tree(1, 5, {t[3], t[4], t[5], 0}, {-1, 0, 1, 2}));
  EXPECT_THAT(r.tokens, ElementsAre(t[4], t[5]));
  EXPECT_EQ(r.finish_reason, FinishReason::kLength);
  EXPECT_EQ(r.base_len, 7);
}

TEST(Engine, ARepeatedRoundGetsTheSameAnswer) {
  Bench bench;
  const Admit admit = MakeAdmit(1, {8, 8, 3}, 6, 0.7f);
  const std::vector<int32_t> t = Expected(admit);
  bench.AdmitAll({admit});
  const WorkResult p1 = bench.DoOne(Prefill(1, 0, 2));
  const WorkResult p1_again = bench.DoOne(Prefill(1, 0, 2));
  EXPECT_EQ(p1_again.base_len, 2);
  const WorkResult p2 = bench.DoOne(Prefill(1, 2, 1));
  EXPECT_EQ(bench.DoOne(Prefill(1, 2, 1)).tokens, p2.tokens);
  const WorkResult round = bench.DoOne(Tree(1, 3, {t[0], t[1]}, {-1, 0}));
  const int64_t forwards = bench.target->forwards();
  // The same tree, another, or something malformed: the answer is kept by (sequence, base_len).
  for (const Work& again :
       {Tree(1, 3, {t[0], t[1]}, {-1, 0}), Tree(1, 3, {t[0]}, {-1}), Tree(1, 3, {}, {})}) {
    const WorkResult r = bench.DoOne(again);
    EXPECT_EQ(r.outcome, Outcome::kDone);
    EXPECT_EQ(r.tokens, round.tokens);
    EXPECT_EQ(r.base_len, round.base_len);
    EXPECT_EQ(r.accepted, round.accepted);
  }
  EXPECT_EQ(bench.target->forwards(), forwards);
  // Older or unheard-of lengths.
  for (const int64_t base : {0, 2, 4, 77}) {
    const WorkResult r = bench.DoOne(Tree(1, base, {t[0]}, {-1}));
    EXPECT_EQ(r.outcome, Outcome::kWrongBase) << base;
    EXPECT_EQ(r.base_len, round.base_len);
  }
  EXPECT_EQ(bench.DoOne(Tree(2, 3, {t[0]}, {-1})).outcome, Outcome::kUnknown);
}

TEST(Engine, MalformedWorkIsRejectedAloneWithASentence) {
  Bench bench;
  const Admit a = MakeAdmit(1, {8, 8, 3}, 6);
  const Admit b = MakeAdmit(2, {8, 9, 3}, 6);
  const std::vector<int32_t> t = Expected(a);
  bench.AdmitAll({a, b});
  bench.DoOne(Prefill(1, 0, 3));
  struct Case {
    Work work;
    std::string error;
  };
  Work both = Tree(1, 3, {t[0]}, {-1});
  both.prefill = 1;
  const int32_t other = (t[0] + 1) % kVocab;
  std::vector<int32_t> too_many(65, 1);
  std::vector<int32_t> chain(65);
  for (int i = 0; i < 65; ++i) {
    chain[i] = i - 1;
  }
  too_many[0] = t[0];
  for (const Case& c :
       std::vector<Case>{{Tree(1, 3, {}, {}), "neither prefill nor a draft tree"},
                         {both, "not both"},
                         {Tree(1, 3, {other}, {-1}), "the pending token at position 3"},
                         {Tree(1, 3, {t[0], 16}, {-1, 0}), "draft token 1 is id 16"},
                         {Tree(1, 3, {t[0], -1}, {-1, 0}), "draft token 1 is id 4294967295"},
                         {Tree(1, 3, {t[0], 1}, {-1, 1}), "parents precede"},
                         {Tree(1, 3, {t[0], 1}, {-1, -1}), "parents precede"},
                         {Tree(1, 3, {t[0], 1}, {-1}), "as many parents"},
                         {Tree(1, 3, {t[0], 1}, {0, 0}), "node 0"},
                         {Tree(1, 3, {t[0], 1, 1}, {-1, 0, 0}), "siblings"},
                         {Tree(1, 3, too_many, chain), "1 to 64 nodes"},
                         {Prefill(1, 3, 1), "passes the end"},
                         {Tree(2, 0, {8}, {-1}), "before the prefill's end"},
                         {Prefill(2, 0, 4), "passes the end"},
                         {Prefill(2, 0, int64_t{1} << 32), "passes the end"}}) {
    const WorkResult r = bench.DoOne(c.work);
    EXPECT_EQ(r.outcome, Outcome::kRejected) << c.error;
    EXPECT_THAT(r.error, HasSubstr(c.error));
  }
  // The same sequence twice in a step, beside good work.
  Step step;
  step.work = {Tree(1, 3, {t[0]}, {-1}), Tree(1, 3, {t[0]}, {-1}), Prefill(2, 0, 3)};
  const StepResult result = bench.Do(step);
  EXPECT_EQ(result.results[0].outcome, Outcome::kDone);
  EXPECT_EQ(result.results[1].outcome, Outcome::kRejected);
  EXPECT_EQ(result.results[2].outcome, Outcome::kDone);
  EXPECT_THAT(result.results[2].tokens, ElementsAre(Expected(b)[0]));
}

TEST(Engine, RefusesAdmissionsThatCannotBe) {
  FakeTargetOptions options;
  options.pages = 9;  // 8 × 4 tokens
  EngineOptions engine_options;
  engine_options.max_sequences = 2;
  Bench bench(options, engine_options);
  const auto refusal = [&](Admit admit) {
    const std::vector<Refusal> refused = bench.AdmitAll({admit});
    EXPECT_THAT(refused, SizeIs(1));
    return refused.empty() ? absl::OkStatus() : refused[0].status;
  };
  const auto expect = [&](const Admit& admit, absl::StatusCode code, const std::string& sentence) {
    const absl::Status status = refusal(admit);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(sentence));
  };
  expect(MakeAdmit(1, {}, 1), absl::StatusCode::kInvalidArgument, "the prompt is empty");
  expect(MakeAdmit(1, {1, 16}, 1), absl::StatusCode::kInvalidArgument, "prompt token 1 is id 16");
  expect(MakeAdmit(1, {1}, 0), absl::StatusCode::kInvalidArgument, "max_tokens is 0");
  expect(MakeAdmit(1, {1}, 512), absl::StatusCode::kInvalidArgument, "the model's 512 positions");
  expect(MakeAdmit(1, {1}, 33), absl::StatusCode::kResourceExhausted, "9 pages");
  expect(MakeAdmit(1, {1}, 1, -1), absl::StatusCode::kInvalidArgument, "temperature");
  expect(MakeAdmit(1, {1}, 1, std::numeric_limits<float>::quiet_NaN()),
         absl::StatusCode::kInvalidArgument, "temperature");
  Admit admit = MakeAdmit(1, {1}, 1);
  admit.stop_token_ids = {3, 16};
  expect(admit, absl::StatusCode::kInvalidArgument, "stop token 1 is id 16");
  admit = MakeAdmit(1, {1}, 1);
  admit.logprobs = 65;
  expect(admit, absl::StatusCode::kInvalidArgument, "logprobs is 65");

  EXPECT_THAT(bench.AdmitAll({MakeAdmit(1, {1}, 32), MakeAdmit(2, {1}, 1)}), IsEmpty());
  expect(MakeAdmit(1, {1}, 1), absl::StatusCode::kAlreadyExists, "admitted already");
  expect(MakeAdmit(3, {1}, 1), absl::StatusCode::kResourceExhausted, "--max-sequences");
  // Releases of the same step make room first.
  Step step;
  step.releases = {2};
  step.admits = {MakeAdmit(3, {1}, 1)};
  EXPECT_THAT(bench.Do(step).refused, IsEmpty());
  bench.engine->RefuseAdmissions("going away");
  step.releases = {3};
  step.admits = {MakeAdmit(4, {1}, 1)};
  const StepResult result = bench.Do(step);
  ASSERT_THAT(result.refused, SizeIs(1));
  EXPECT_EQ(result.refused[0].status, absl::UnavailableError("going away"));
}

TEST(Engine, AStepWithTooManyRowsIsRejectedWhole) {
  EngineOptions options;
  options.max_rows = 5;
  Bench bench({}, options);
  bench.AdmitAll({MakeAdmit(1, {1, 2, 3}, 5), MakeAdmit(2, {1, 2, 3}, 5)});
  Step step;
  step.work = {Prefill(1, 0, 3), Prefill(2, 0, 3)};
  const StepResult result = bench.Do(step);
  for (const WorkResult& r : result.results) {
    EXPECT_EQ(r.outcome, Outcome::kRejected);
    EXPECT_THAT(r.error, HasSubstr("6 rows and at most 5"));
    EXPECT_EQ(r.base_len, 0);
  }
  EXPECT_EQ(bench.target->forwards(), 0);
  step.work[1].prefill = 2;
  EXPECT_EQ(bench.Do(step).results[1].outcome, Outcome::kDone);
}

TEST(Engine, OneBadSequenceFailsAlone) {
  FakeTargetOptions options;
  options.poison = 13;
  Bench bench(options);
  const Admit good = MakeAdmit(1, {1, 2, 3}, 5);
  Admit bad = MakeAdmit(2, {1, 13, 3}, 5);
  bad.drafter = "d:1";
  bench.AdmitAll({good, bad});
  Step step;
  step.work = {Prefill(1, 0, 3), Prefill(2, 0, 3)};
  const StepResult result = bench.Do(step);
  EXPECT_EQ(result.results[0].outcome, Outcome::kDone);
  EXPECT_THAT(result.results[0].tokens, ElementsAre(Expected(good)[0]));
  EXPECT_EQ(result.results[1].outcome, Outcome::kFailed);
  EXPECT_THAT(result.results[1].error, HasSubstr("not finite"));
  EXPECT_EQ(result.pool.free_pages, 63);
  EXPECT_EQ(bench.DoOne(Prefill(2, 0, 3)).outcome, Outcome::kUnknown);
  EXPECT_THAT(bench.sink.released, ElementsAre(2));
  // Alone in its step it fails, too.
  bench.AdmitAll({MakeAdmit(3, {13}, 5)});
  EXPECT_EQ(bench.DoOne(Prefill(3, 0, 1)).outcome, Outcome::kFailed);
}

TEST(Engine, AFullPoolPreemptsTheLatestAndNeverTheOldest) {
  FakeTargetOptions options;
  options.pages = 5;  // 4 × 4 tokens
  Bench bench(options);
  const Admit a = MakeAdmit(1, {1, 2, 3, 4}, 13);
  const Admit b = MakeAdmit(2, {2, 2, 3, 4}, 12);
  const Admit c = MakeAdmit(3, {3, 2, 3, 4, 5, 6, 7}, 4);
  bench.AdmitAll({a, b, c});
  bench.DoOne(Prefill(1, 0, 4));
  bench.DoOne(Prefill(2, 0, 4));
  bench.DoOne(Prefill(3, 0, 4));
  // One page is free.  The oldest takes it for its root; the middle one's root needs the youngest's
  // page; the youngest goes.
  const std::vector<int32_t> ta = Expected(a);
  const std::vector<int32_t> tb = Expected(b);
  Step step;
  step.work = {Prefill(3, 4, 3), Tree(2, 4, {tb[0]}, {-1}),
               Tree(1, 4, {ta[0], ta[1], ta[2], ta[3], ta[4]}, {-1, 0, 1, 2, 3})};
  const StepResult result = bench.Do(step);
  EXPECT_EQ(result.results[0].outcome, Outcome::kPreempted);
  EXPECT_EQ(result.results[1].outcome, Outcome::kDone);
  EXPECT_EQ(result.results[2].outcome, Outcome::kDone);
  EXPECT_EQ(result.results[2].accepted, 3) << "four slots: the tree is cut, not refused";
  EXPECT_EQ(bench.engine->counters().truncated, 1u);
  EXPECT_EQ(bench.engine->counters().preempted, 1u);
  EXPECT_EQ(result.pool.free_pages, 0);
  EXPECT_EQ(bench.DoOne(Prefill(3, 4, 3)).outcome, Outcome::kUnknown);  // it has been told

  // A newcomer finds no page and stands as it was.
  bench.AdmitAll({MakeAdmit(4, {1}, 1)});
  const WorkResult refused = bench.DoOne(Prefill(4, 0, 1));
  EXPECT_EQ(refused.outcome, Outcome::kNoPages);
  EXPECT_THAT(refused.error, HasSubstr("the pool is full"));
  // The oldest goes on to its end, whoever else must yield.
  WorkResult r = result.results[2];
  std::vector<int32_t> got = {ta[0]};
  got.insert(got.end(), r.tokens.begin(), r.tokens.end());
  while (r.finish_reason == FinishReason::kNone) {
    r = bench.DoOne(Tree(1, r.base_len, {got.back()}, {-1}));
    ASSERT_EQ(r.outcome, Outcome::kDone) << r.error;
    got.insert(got.end(), r.tokens.begin(), r.tokens.end());
  }
  EXPECT_EQ(got, ta);
  EXPECT_EQ(bench.DoOne(Tree(2, 5, {tb[1]}, {-1})).outcome, Outcome::kPreempted);
  EXPECT_EQ(bench.DoOne(Prefill(4, 0, 1)).outcome, Outcome::kDone);
}

TEST(Engine, FeaturesFollowThePathWithTheBonusBesideThem) {
  Bench bench;
  bench.sink.window = 5;
  Admit admit = MakeAdmit(1, {1, 2, 3, 4, 5, 6, 7}, 9);
  admit.drafter = "drafter:1";
  const std::vector<int32_t> t = Expected(admit);
  bench.AdmitAll({admit});
  EXPECT_THAT(bench.sink.connected, ElementsAre("drafter:1"));
  std::vector<int32_t> text = admit.tokens;
  const auto feature = [&](int64_t position) {
    return FakeTarget::Feature(absl::MakeConstSpan(text).subspan(0, position + 1), kHidden);
  };
  bench.DoOne(Prefill(1, 0, 2));
  EXPECT_THAT(bench.sink.got, IsEmpty()) << "out of the drafter's window at the prompt's end";
  bench.DoOne(Prefill(1, 2, 2));
  std::vector<RecordingSink::Got>& got = bench.sink.got[{"drafter:1", 1}];
  ASSERT_THAT(got, SizeIs(1));
  EXPECT_EQ(got[0].first, 2);
  EXPECT_EQ(got[0].pending, std::nullopt);
  Work last = Prefill(1, 4, 3);
  last.draft_ahead = true;
  bench.DoOne(last);
  ASSERT_THAT(got, SizeIs(2));
  EXPECT_EQ(got[1].pending, t[0]);
  EXPECT_TRUE(got[1].draft_ahead);

  const int32_t wrong = (t[1] + 1) % kVocab;
  Work round = Tree(1, 7, {t[0], wrong, t[1], t[2]}, {-1, 0, 0, 2});
  const WorkResult r = bench.DoOne(round);
  ASSERT_EQ(r.accepted, 2);
  ASSERT_THAT(got, SizeIs(3));
  EXPECT_EQ(got[2].first, 7);
  EXPECT_EQ(got[2].end(), 10);
  EXPECT_EQ(got[2].pending, t[3]);
  EXPECT_FALSE(got[2].draft_ahead);
  text.insert(text.end(), t.begin(), t.begin() + 3);
  const auto check = [&](const RecordingSink::Got& rows) {
    for (int64_t p = rows.first; p < rows.end(); ++p) {
      const auto begin = rows.features.begin() + (p - rows.first) * kHidden;
      EXPECT_EQ(std::vector<uint16_t>(begin, begin + kHidden), feature(p)) << p;
    }
  };
  for (const RecordingSink::Got& rows : got) check(rows);

  // Asked again, within the window.
  bench.engine->Resend("drafter:1", 1, 0, 5);
  ASSERT_THAT(got, SizeIs(4));
  EXPECT_EQ(got[3].first, 5);
  EXPECT_EQ(got[3].end(), 10);
  EXPECT_EQ(got[3].pending, t[3]);
  check(got[3]);
  EXPECT_EQ(bench.sink.answered, 5u);
  // Asked for what is not there yet: an empty answer with the pending token.
  bench.engine->Resend("drafter:1", 1, 100, 6);
  ASSERT_THAT(got, SizeIs(5));
  EXPECT_EQ(got[4].first, 10);
  EXPECT_EQ(got[4].end(), 10);
  // Nobody's business.
  bench.engine->Resend("drafter:2", 1, 0, 7);
  bench.engine->Resend("drafter:1", 2, 0, 8);
  EXPECT_THAT(got, SizeIs(5));

  Step step;
  step.releases = {1};
  bench.Do(step);
  EXPECT_THAT(bench.sink.released, ElementsAre(1));
}

TEST(Engine, ASequenceThatEndsSendsNoLastFeatures) {
  Bench bench;
  Admit admit = MakeAdmit(1, {1, 2}, 3);
  admit.drafter = "d";
  const std::vector<int32_t> t = Expected(admit);
  bench.AdmitAll({admit});
  bench.DoOne(Prefill(1, 0, 2));
  const WorkResult r = bench.DoOne(Tree(1, 2, {t[0], t[1], t[2]}, {-1, 0, 1}));
  EXPECT_EQ(r.finish_reason, FinishReason::kLength);
  EXPECT_THAT(r.tokens, ElementsAre(t[1], t[2]));
  const auto got = bench.sink.got[{"d", 1}];
  EXPECT_THAT(got, SizeIs(1));
  EXPECT_THAT(bench.sink.released, ElementsAre(1));
  // Its end can be asked for again; more work cannot be had.
  EXPECT_EQ(bench.DoOne(Tree(1, 2, {t[0]}, {-1})).finish_reason, FinishReason::kLength);
  EXPECT_THAT(bench.DoOne(Tree(1, r.base_len, {t[2]}, {-1})).error, HasSubstr("has ended"));
  Step step;
  step.releases = {1};
  bench.Do(step);  // RecordingSink objects to a second release
}

TEST(Engine, CostTableIsMeasuredAndLeavesThePoolAsItWas) {
  Bench bench;
  absl::StatusOr<Engine::Cost> cost = bench.engine->MeasureCost(std::chrono::milliseconds(50));
  ASSERT_TRUE(cost.ok()) << cost.status();
  std::vector<int64_t> rows;
  for (const Engine::Cost::Point& p : cost->decode) {
    rows.push_back(p.rows);
    EXPECT_GT(p.microseconds, 0);
  }
  EXPECT_THAT(rows, ElementsAre(1, 2, 4, 8, 9, 16, 17, 32, 33, 64));
  EXPECT_GT(cost->prefill_us_per_token, 0);
  EXPECT_EQ(bench.engine->pool_state().free_pages, 64);

  FakeTargetOptions tiny;
  tiny.pages = 3;  // 8 tokens
  Bench small(tiny);
  cost = small.engine->MeasureCost(std::chrono::milliseconds(1));
  ASSERT_TRUE(cost.ok());
  EXPECT_EQ(cost->decode.back().rows, 8);
}

// Random admissions, trees, duplicates, wrong lengths, releases at any point and pools of every
// fullness; the engine checks its invariants after every step, the fake target its own.
TEST(Engine, SurvivesAnythingAndGivesEverythingBack) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    FakeTargetOptions options;
    options.page_size = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 4 : 64;
    options.pages = 1 + (seed % 2 == 0 ? 30 : 200) * 4 / options.page_size + 2;
    options.features = seed % 5 != 0;
    if (seed % 4 == 3) options.poison = 15;
    EngineOptions engine_options;
    engine_options.max_rows = 150;
    engine_options.max_sequences = 12;
    Bench bench(options, engine_options);
    struct Client {
      Admit admit;
      std::vector<int32_t> got;
      int64_t base = 0;
    };
    std::map<uint64_t, Client> clients;
    uint64_t next_id = 1;
    int finished = 0;
    for (int s = 0; s < 400; ++s) {
      Step step;
      step.step = s;
      if (s < 360 && random() % 3 == 0) {
        std::vector<int32_t> prompt(1 + random() % 20);
        for (int32_t& t : prompt) t = static_cast<int32_t>(random() % (kVocab - 1));
        Client client;
        client.admit = MakeAdmit(next_id, prompt, 1 + random() % 24, random() % 2 ? 0.9f : 0.f);
        if (random() % 3 == 0) client.admit.stop_token_ids = {static_cast<int32_t>(random() % 15)};
        if (random() % 2 == 0) client.admit.drafter = random() % 2 ? "a" : "b";
        step.admits.push_back(client.admit);
        clients[next_id++] = std::move(client);
      }
      std::vector<uint64_t> gone;
      for (auto& [id, client] : clients) {
        const int64_t prompt = static_cast<int64_t>(client.admit.tokens.size());
        switch (random() % 12) {
          case 0:
            continue;  // idle
          case 1:
            if (random() % 4 == 0) {
              step.releases.push_back(id);
              if (random() % 2 == 0) step.releases.push_back(id);
              gone.push_back(id);
              if (random() % 2 == 0) continue;
            }
            break;
          case 2:
            step.work.push_back(Tree(id, random() % 64, {3}, {-1}));  // nonsense, most likely
            if (step.work.back().base_len == client.base) step.work.pop_back();
            continue;
          default:
            break;
        }
        if (client.base < prompt) {
          step.work.push_back(Prefill(id, client.base, 1 + random() % (prompt - client.base)));
        } else {
          const std::vector<int32_t> all = FakeTarget::Continue(
              client.admit.tokens, client.admit.sampling, client.got.size() + 8, kVocab);
          step.work.push_back(RandomTree(id, client.base, client.got.back(),
                                         {all.begin() + client.got.size(), all.end()},
                                         1 + random() % 33, &random));
        }
        if (random() % 10 == 0) step.work.push_back(step.work.back());
      }
      const StepResult result = bench.Do(step);
      ASSERT_EQ(result.results.size(), step.work.size());
      ASSERT_EQ(result.pool.leaked_pages, 0);
      for (const uint64_t id : gone) clients.erase(id);
      std::set<uint64_t> seen;
      for (const WorkResult& r : result.results) {
        const auto it = clients.find(r.sequence);
        if (it == clients.end() || !seen.insert(r.sequence).second) continue;
        Client& client = it->second;
        switch (r.outcome) {
          case Outcome::kDone: {
            if (r.base_len <= client.base) break;  // an old answer again
            client.base = r.base_len;
            client.got.insert(client.got.end(), r.tokens.begin(), r.tokens.end());
            // The next round's answer may be lost and asked for again at once.
            if (r.finish_reason != FinishReason::kNone) {
              const std::vector<int32_t> expected = Expected(client.admit);
              ASSERT_EQ(client.got, expected);
              std::vector<int32_t> text = client.admit.tokens;
              text.insert(text.end(), expected.begin(), expected.end());
              CheckFeatures(bench.sink, client.admit.drafter, r.sequence, text);
              ++finished;
              Step release;
              release.releases = {r.sequence};
              bench.Do(release);
              clients.erase(it);
            }
            break;
          }
          case Outcome::kRejected:
          case Outcome::kWrongBase:
          case Outcome::kNoPages:
            break;
          case Outcome::kUnknown:
          case Outcome::kPreempted:
          case Outcome::kFailed:
            clients.erase(it);
            break;
        }
      }
    }
    EXPECT_GT(finished, options.poison ? 0 : 10);
    bench.engine->ReleaseAll();
    EXPECT_EQ(bench.engine->pool_state().free_pages, bench.engine->pool_state().pages);
    EXPECT_EQ(bench.engine->pool_state().sequences, 0);
    EXPECT_EQ(bench.engine->CheckInvariants(), absl::OkStatus());
    // Everything a drafter was told of is released there.
    for (const auto& [key, rows] : bench.sink.got)
      EXPECT_TRUE(bench.sink.released.count(key.second));
  }
}

// Progress under pressure: every sequence ends although the pool holds hardly one.
TEST(Engine, SomeoneAlwaysAdvances) {
  std::mt19937 random(3);
  FakeTargetOptions options;
  options.pages = 9;  // 32 tokens
  Bench bench(options);
  struct Client {
    Admit admit;
    std::vector<int32_t> got;
    int64_t base = 0;
  };
  std::map<uint64_t, Client> clients;
  Step step;
  for (uint64_t id = 1; id <= 6; ++id) {
    Client client;
    client.admit = MakeAdmit(id, {static_cast<int32_t>(id), 5, 5, 5, 5, 5}, 20 + id);
    step.admits.push_back(client.admit);
    clients[id] = std::move(client);
  }
  uint64_t next_id = 7;
  int finished = 0;
  for (int s = 0; s < 2000 && !clients.empty(); ++s) {
    for (auto& [id, client] : clients) {
      const int64_t prompt = static_cast<int64_t>(client.admit.tokens.size());
      if (client.base < prompt) {
        step.work.push_back(Prefill(id, client.base, prompt - client.base));
      } else {
        step.work.push_back(
            RandomTree(id, client.base, client.got.back(), {}, 1 + random() % 9, &random));
      }
    }
    const StepResult result = bench.Do(step);
    step = Step{};
    for (const WorkResult& r : result.results) {
      const auto it = clients.find(r.sequence);
      Client& client = it->second;
      if (r.outcome == Outcome::kDone) {
        client.base = r.base_len;
        client.got.insert(client.got.end(), r.tokens.begin(), r.tokens.end());
        if (r.finish_reason == FinishReason::kNone) continue;
        EXPECT_EQ(client.got.size(), static_cast<size_t>(client.admit.max_tokens));
        ++finished;
        step.releases.push_back(r.sequence);
        clients.erase(it);
      } else if (r.outcome == Outcome::kPreempted) {
        // Again from the start, under a new name.
        Client again;
        again.admit = client.admit;
        again.admit.sequence = next_id++;
        step.admits.push_back(again.admit);
        clients.erase(it);
        clients[again.admit.sequence] = std::move(again);
      } else {
        ASSERT_EQ(r.outcome, Outcome::kNoPages) << r.error;
      }
    }
  }
  EXPECT_EQ(finished, 6);
  EXPECT_GT(bench.engine->counters().preempted, 0u);
}

TEST(Engine, ThePreemptedAreToldSoEvenLater) {
  FakeTargetOptions options;
  options.pages = 3;  // 2 × 4 tokens
  Bench bench(options);
  const Admit a = MakeAdmit(1, {1, 2, 3, 4}, 4);
  bench.AdmitAll({a, MakeAdmit(2, {2, 2, 3}, 4)});
  bench.DoOne(Prefill(1, 0, 4));
  const WorkResult kept = bench.DoOne(Prefill(2, 0, 3));
  // The first needs the second's page in a step in which the second has no work.
  EXPECT_EQ(bench.DoOne(Tree(1, 4, {Expected(a)[0]}, {-1})).outcome, Outcome::kDone);
  EXPECT_EQ(bench.engine->counters().preempted, 1u);
  // A lost answer is still given again; the next work learns what happened, once.
  EXPECT_EQ(bench.DoOne(Prefill(2, 0, 3)).tokens, kept.tokens);
  const WorkResult told = bench.DoOne(Tree(2, 3, {kept.tokens[0]}, {-1}));
  EXPECT_EQ(told.outcome, Outcome::kPreempted);
  EXPECT_THAT(told.error, HasSubstr("ranks above"));
  const WorkResult gone = bench.DoOne(Tree(2, 3, {kept.tokens[0]}, {-1}));
  EXPECT_EQ(gone.outcome, Outcome::kUnknown);
  EXPECT_THAT(gone.error, HasSubstr("admit it again"));
}

TEST(Engine, PriorityGoesBeforeAgeWhenPagesRunOut) {
  FakeTargetOptions options;
  options.pages = 3;
  Bench bench(options);
  Admit late = MakeAdmit(2, {2, 2, 3, 4}, 4);
  late.priority = 1;
  bench.AdmitAll({MakeAdmit(1, {1, 2, 3, 4}, 4), late});
  const WorkResult first = bench.DoOne(Prefill(1, 0, 4));
  const WorkResult second = bench.DoOne(Prefill(2, 0, 4));
  EXPECT_EQ(bench.DoOne(Tree(1, 4, {first.tokens[0]}, {-1})).outcome, Outcome::kNoPages);
  EXPECT_EQ(bench.DoOne(Tree(2, 4, {second.tokens[0]}, {-1})).outcome, Outcome::kDone);
  EXPECT_EQ(bench.DoOne(Tree(1, 4, {first.tokens[0]}, {-1})).outcome, Outcome::kPreempted);
}

}  // namespace
}  // namespace coppice::verifier
