// The engine over the real target: what the contracts promise bit for bit on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "services/verifier/engine.h"

namespace coppice::verifier {
namespace {

constexpr char kModel[] = "models/demo";
constexpr char kDrafter[] = "models/demo/drafter";

// Keeps every feature row by position.
class Features : public FeatureSink {
 public:
  void Connect(const std::string&) override {}
  int64_t Window(const std::string&) override { return 4096; }
  void Append(const std::string&, const FeatureRows& rows) override {
    const int64_t width = static_cast<int64_t>(rows.features.size()) / rows.count;
    for (int64_t r = 0; r < rows.count; ++r) {
      const auto begin = rows.features.begin() + r * width;
      kept[{rows.sequence, rows.first + r}].assign(begin, begin + width);
    }
  }
  void Release(const std::string&, uint64_t) override {}
  void Flush() override {}

  std::map<std::pair<uint64_t, int64_t>, std::vector<uint16_t>> kept;
};

struct Bench {
  explicit Bench(int tp, int page_size = 16, int64_t pages = 200) {
    TargetOptions options;
    options.model_dir = kModel;
    options.drafter_dir = kDrafter;
    options.tp = tp;
    options.page_size = page_size;
    options.pages = pages;
    options.max_rows = 256;
    absl::StatusOr<std::unique_ptr<Target>> target = Target::Load(options);
    if (!target.ok()) {
      ADD_FAILURE() << target.status();
      return;
    }
    EngineOptions engine_options;
    engine_options.page_size = options.page_size;
    engine_options.pages = options.pages;
    engine_options.max_rows = options.max_rows;
    engine_options.check_every_step = true;
    engine = std::make_unique<Engine>(*std::move(target), engine_options, &features);
  }
  Features features;
  std::unique_ptr<Engine> engine;
};

Admit MakeAdmit(uint64_t id, float temperature) {
  Admit admit;
  admit.sequence = id;
  for (int i = 0; i < 20 + static_cast<int>(id) * 7; ++i) {
    admit.tokens.push_back(static_cast<int32_t>((i * 131 + id * 17) % 900 + 5));
  }
  admit.sampling.temperature = temperature;
  admit.sampling.top_p = 0.95f;
  admit.sampling.seed = 1000 + id;
  admit.max_tokens = 24;
  admit.drafter = "d";
  return admit;
}

// Generates all of `admits` together with random trees of up to `nodes` nodes (or, with `chain`,
// chains), drafted from `truth` where it has something, and prompts in chunks of `chunk`.
// Log-probabilities asked for go to `logprobs`.
std::map<uint64_t, std::vector<int32_t>> Generate(
    Bench* bench, const std::vector<Admit>& admits, int nodes, int64_t chunk,
    const std::map<uint64_t, std::vector<int32_t>>& truth, uint32_t seed, bool chain = false,
    std::map<uint64_t, std::vector<PositionLogProbs>>* logprobs = nullptr) {
  std::mt19937 random(seed);
  std::map<uint64_t, std::vector<int32_t>> got;
  std::map<uint64_t, int64_t> base;
  Step step;
  step.admits = admits;
  size_t running = admits.size();
  while (running > 0) {
    for (const Admit& admit : admits) {
      const uint64_t id = admit.sequence;
      std::vector<int32_t>& tokens = got[id];
      if (base[id] < 0) continue;
      Work work;
      work.sequence = id;
      work.base_len = base[id];
      const int64_t prompt_left = static_cast<int64_t>(admit.tokens.size()) - base[id];
      if (prompt_left > 0) {
        work.prefill = std::min(chunk, prompt_left);
      } else {
        work.tokens = {tokens.back()};
        work.parents = {-1};
        const auto known = truth.find(id);
        std::vector<int> right = {0};
        for (int tries = 0; tries < 4 * nodes && static_cast<int>(work.tokens.size()) < nodes;
             ++tries) {
          const int parent =
              static_cast<int>(chain ? work.tokens.size() - 1 : random() % work.tokens.size());
          const size_t next = tokens.size() + right[parent];
          const bool on = right[parent] >= 0 && known != truth.end() && next < known->second.size();
          const int32_t token =
              on && random() % 4 != 0 ? known->second[next] : static_cast<int32_t>(random() % 1000);
          bool repeated = false;
          for (size_t i = 1; i < work.tokens.size(); ++i) {
            repeated |= work.parents[i] == parent && work.tokens[i] == token;
          }
          if (repeated) continue;
          right.push_back(on && token == known->second[next] ? right[parent] + 1 : -1);
          work.tokens.push_back(token);
          work.parents.push_back(parent);
        }
      }
      step.work.push_back(std::move(work));
    }
    const StepResult result = bench->engine->Execute(step);
    EXPECT_TRUE(result.refused.empty());
    step = Step{};
    for (const WorkResult& r : result.results) {
      EXPECT_EQ(r.outcome, Outcome::kDone) << r.error;
      if (r.outcome != Outcome::kDone) return got;
      base[r.sequence] = r.base_len;
      got[r.sequence].insert(got[r.sequence].end(), r.tokens.begin(), r.tokens.end());
      if (logprobs != nullptr) {
        std::vector<PositionLogProbs>& all = (*logprobs)[r.sequence];
        all.insert(all.end(), r.logprobs.begin(), r.logprobs.end());
      }
      if (r.finish_reason != FinishReason::kNone) {
        base[r.sequence] = -1;
        --running;
      }
    }
  }
  bench->engine->ReleaseAll();
  return got;
}

TEST(EngineDemo, TreesBatchesChunksPagesAndRanksChangeNoToken) {
  for (const float temperature : {0.f, 0.8f}) {
    std::vector<Admit> admits;
    for (uint64_t id = 1; id <= 3; ++id) admits.push_back(MakeAdmit(id, temperature));
    Bench plain(1);
    ASSERT_TRUE(plain.engine);
    std::map<uint64_t, std::vector<int32_t>> expected;
    for (const Admit& admit : admits) {
      expected.merge(Generate(&plain, {admit}, 1, 256, {}, 0));
    }
    EXPECT_EQ(Generate(&plain, admits, 1, 256, {}, 0), expected) << "batch";
    EXPECT_EQ(Generate(&plain, admits, 17, 5, expected, 1), expected) << "trees, chunks";
    EXPECT_GT(plain.engine->counters().accepted, 10u);
    Bench pages(1, 1, 2000);
    EXPECT_EQ(Generate(&pages, admits, 33, 256, expected, 2), expected) << "pages of one token";
    Bench ranks(8, 64, 20);
    EXPECT_EQ(Generate(&ranks, admits, 9, 64, expected, 3), expected) << "8 ranks";
    EXPECT_EQ(ranks.engine->pool_state().free_pages, 19);
  }
}

bool Same(const TokenLogProb& a, const TokenLogProb& b) {
  return a.token == b.token && a.log_prob == b.log_prob;
}

// An option of a request, to be set on its admission.
struct Option {
  const char* name;
  void (*set)(Admit* admit);
};

const Option kOptions[] = {
    {"temperature 0", [](Admit* a) { a->sampling.temperature = 0; }},
    {"temperature", [](Admit* a) { a->sampling.temperature = 1.7f; }},
    {"top_k", [](Admit* a) { a->sampling.top_k = 12; }},
    {"top_p", [](Admit* a) { a->sampling.top_p = 0.8f; }},
    {"min_p", [](Admit* a) { a->sampling.min_p = 0.05f; }},
    {"repetition_penalty", [](Admit* a) { a->sampling.rules.repetition_penalty = 1.4f; }},
    {"frequency_penalty", [](Admit* a) { a->sampling.rules.frequency_penalty = 0.7f; }},
    {"presence_penalty", [](Admit* a) { a->sampling.rules.presence_penalty = -0.8f; }},
    {"logit_bias",
     [](Admit* a) {
       a->sampling.rules.logit_bias = {{40, 5.f}, {300, 4.f}, {11, -100.f}};
     }},
    {"min_tokens", [](Admit* a) { a->sampling.rules.min_tokens = 13; }},
    {"ignore_eos", [](Admit* a) { a->stop_token_ids.clear(); }},
    {"logprobs", [](Admit* a) { a->logprobs = 7; }},
    {"max_tokens", [](Admit* a) { a->max_tokens = 17; }},
    {"seed", [](Admit* a) { a->sampling.seed = 99; }},
};

// Off, chain and tree, alone and with every option at once or some, resumed in the middle as well:
// the same tokens and the same log-probabilities, bit for bit.
TEST(EngineDemo, OptionsGiveTheSameTokensHoweverDrafted) {
  Bench bench(1);
  ASSERT_TRUE(bench.engine);
  constexpr size_t kCount = std::size(kOptions);
  std::vector<std::vector<size_t>> chosen = {{}};
  for (size_t i = 0; i < kCount; ++i) chosen.push_back({i});
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    std::vector<size_t>& some = chosen.emplace_back();
    for (size_t j = 0; j < kCount; ++j) {
      if (random() % 2 == 0) some.push_back(j);
    }
  }
  std::vector<size_t>& all = chosen.emplace_back();
  for (size_t j = 0; j < kCount; ++j) all.push_back(j);

  std::set<std::vector<int32_t>> different;
  uint64_t id = 1;
  for (const std::vector<size_t>& options : chosen) {
    Admit admit = MakeAdmit(1, 1.2f);
    admit.sampling.top_p = 1;
    // Stops that plain decoding does meet, and one that it does not.
    admit.stop_token_ids = {1, 49, 77, 200, 533, 4034};
    std::string name;
    for (const size_t i : options) {
      kOptions[i].set(&admit);
      name += std::string(kOptions[i].name) + " ";
    }
    SCOPED_TRACE(name);
    const auto run = [&](Admit one, int nodes, bool chain, const std::vector<int32_t>& truth,
                         std::vector<PositionLogProbs>* logprobs) {
      one.sequence = ++id;
      std::map<uint64_t, std::vector<PositionLogProbs>> told;
      std::vector<int32_t> tokens =
          Generate(&bench, {one}, nodes, 9, {{id, truth}}, id, chain, &told)[id];
      *logprobs = told[id];
      return tokens;
    };
    std::vector<PositionLogProbs> expected_logprobs;
    const std::vector<int32_t> expected = run(admit, 1, false, {}, &expected_logprobs);
    EXPECT_EQ(expected_logprobs.size(), admit.logprobs ? expected.size() : 0u);
    different.insert(expected);
    const auto same = [&](const std::vector<PositionLogProbs>& got, size_t from) {
      ASSERT_EQ(got.size() + (admit.logprobs ? from : 0), expected_logprobs.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(Same(got[i].chosen, expected_logprobs[from + i].chosen));
        ASSERT_EQ(got[i].top.size(), 7u);
        for (size_t k = 0; k < got[i].top.size(); ++k) {
          EXPECT_TRUE(Same(got[i].top[k], expected_logprobs[from + i].top[k]));
        }
      }
    };
    for (const bool chain : {true, false}) {
      std::vector<PositionLogProbs> logprobs;
      EXPECT_EQ(run(admit, chain ? 8 : 17, chain, expected, &logprobs), expected) << chain;
      same(logprobs, 0);
    }
    // Preempted, replayed or resumed after some tokens: they count as generated.
    const size_t emitted = expected.size() / 2;
    if (emitted == 0) continue;
    Admit resumed = admit;
    resumed.tokens.insert(resumed.tokens.end(), expected.begin(), expected.begin() + emitted);
    resumed.generated = static_cast<int64_t>(emitted);
    resumed.max_tokens -= resumed.generated;
    std::vector<PositionLogProbs> logprobs;
    const std::vector<int32_t> rest(expected.begin() + emitted, expected.end());
    EXPECT_EQ(run(resumed, 9, false, rest, &logprobs), rest) << "resumed";
    same(logprobs, emitted);
  }
  EXPECT_GT(bench.engine->counters().accepted, 300u);
  // The options do change what is said.
  EXPECT_GE(different.size(), 25u);
}

TEST(EngineDemo, MinTokensHoldsBackWhatWouldStop) {
  Bench bench(1);
  ASSERT_TRUE(bench.engine);
  Admit admit = MakeAdmit(1, 0);
  const std::vector<int32_t> free = Generate(&bench, {admit}, 1, 256, {}, 0)[1];
  admit.stop_token_ids = {free[0], free[4]};
  EXPECT_EQ(Generate(&bench, {admit}, 1, 256, {}, 0)[1].size(), 1u);
  admit.sampling.rules.min_tokens = 10;
  const std::vector<int32_t> held = Generate(&bench, {admit}, 1, 256, {}, 0)[1];
  ASSERT_GE(held.size(), 10u);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(held[i] != free[0] && held[i] != free[4]) << i;
  }
}

TEST(EngineDemo, AResumedSequenceGoesOnAsItWould) {
  Bench bench(1);
  ASSERT_TRUE(bench.engine);
  const Admit admit = MakeAdmit(1, 0.8f);
  const std::vector<int32_t> expected = Generate(&bench, {admit}, 1, 256, {}, 0)[1];
  for (const int emitted : {1, 10, 23}) {
    Admit resumed = admit;
    resumed.sequence = 100 + emitted;
    resumed.tokens.insert(resumed.tokens.end(), expected.begin(), expected.begin() + emitted);
    resumed.max_tokens -= emitted;
    const std::vector<int32_t> rest = Generate(&bench, {resumed}, 9, 7, {}, 0)[resumed.sequence];
    EXPECT_EQ(rest, std::vector<int32_t>(expected.begin() + emitted, expected.end()));
  }
}

// Whatever trees the tokens came by, a position's feature is the one a prefill of the text gives.
TEST(EngineDemo, FeaturesAreThoseOfTheCommittedText) {
  Bench bench(1);
  ASSERT_TRUE(bench.engine);
  const Admit admit = MakeAdmit(1, 0);
  const std::vector<int32_t> tokens = Generate(&bench, {admit}, 1, 256, {}, 0)[1];
  bench.features.kept.clear();
  ASSERT_EQ(Generate(&bench, {admit}, 33, 256, {{1, tokens}}, 9)[1], tokens);
  const auto drafted = bench.features.kept;
  ASSERT_GT(bench.engine->counters().accepted, 3u);

  bench.features.kept.clear();
  Step step;
  step.admits = {admit};
  step.admits[0].tokens.insert(step.admits[0].tokens.end(), tokens.begin(), tokens.end());
  Work work;
  work.sequence = 1;
  work.prefill = static_cast<int64_t>(step.admits[0].tokens.size());
  step.work = {work};
  ASSERT_EQ(bench.engine->Execute(step).results[0].outcome, Outcome::kDone);
  const auto prefilled = bench.features.kept;
  // What is sent again comes from the pages.
  bench.features.kept.clear();
  bench.engine->Resend("d", 1, 0, 1);
  EXPECT_EQ(bench.features.kept, prefilled);
  size_t beyond_prompt = 0;
  for (const auto& [position, feature] : drafted) {
    EXPECT_EQ(feature, prefilled.at(position)) << position.second;
    beyond_prompt += position.second >= static_cast<int64_t>(admit.tokens.size());
  }
  EXPECT_GT(beyond_prompt, 10u);
}

TEST(EngineDemo, TheCostTableRises) {
  Bench bench(1);
  ASSERT_TRUE(bench.engine);
  const absl::StatusOr<Engine::Cost> cost =
      bench.engine->MeasureCost(std::chrono::milliseconds(100));
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_EQ(cost->decode.size(), 10u);
  EXPECT_GT(cost->decode.back().microseconds, cost->decode.front().microseconds);
  EXPECT_EQ(bench.engine->pool_state().free_pages, 199);
}

}  // namespace
}  // namespace coppice::verifier
