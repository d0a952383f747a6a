// The engine over the real target: what the contracts promise bit for bit on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
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

// Generates all of `admits` together with random trees of up to `nodes` nodes, drafted from
// `truth` where it has something, and prompts in chunks of `chunk`.
std::map<uint64_t, std::vector<int32_t>> Generate(
    Bench* bench, const std::vector<Admit>& admits, int nodes, int64_t chunk,
    const std::map<uint64_t, std::vector<int32_t>>& truth, uint32_t seed) {
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
          const int parent = static_cast<int>(random() % work.tokens.size());
          const size_t next = tokens.size() + right[parent];
          const bool on = right[parent] >= 0 && known != truth.end() && next < known->second.size();
          const int32_t token =
              on && random() % 2 == 0 ? known->second[next] : static_cast<int32_t>(random() % 1000);
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
