#include "model/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/test_files.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// softmax(logits / T) over the ids that top_k, then top_p leave, by sorting everything.
std::vector<double> ExactDistribution(const std::vector<float>& logits,
                                      const SamplingParams& params) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (params.top_k > 0 && params.top_k < static_cast<int>(order.size())) {
    order.resize(params.top_k);
  }
  std::vector<double> mass(logits.size(), 0);
  double total = 0;
  for (const int id : order) {
    mass[id] = std::exp((static_cast<double>(logits[id]) - logits[order[0]]) / params.temperature);
    total += mass[id];
  }
  double reached = 0;
  double kept = 0;
  for (const int id : order) {
    if (reached >= params.top_p * total) {
      mass[id] = 0;
    }
    reached += mass[id];
    kept += mass[id];
  }
  for (double& m : mass) m /= kept;
  return mass;
}

// Upper tail of the chi-square distribution by Wilson and Hilferty's cube root.
double ChiSquarePValue(double statistic, int degrees) {
  const double k = degrees;
  const double z = (std::cbrt(statistic / k) - (1 - 2 / (9 * k))) / std::sqrt(2 / (9 * k));
  return 0.5 * std::erfc(z / std::sqrt(2.0));
}

// p-value of `draws` tokens at successive positions against the exact distribution; 0 where an
// impossible one came.
double PValue(const std::vector<float>& logits, const SamplingParams& params, int draws) {
  const std::vector<double> exact = ExactDistribution(logits, params);
  std::vector<int> count(logits.size(), 0);
  for (int i = 0; i < draws; ++i) ++count[SampleToken(logits, params, i)];
  double statistic = 0;
  int cells = 0;
  double rare_expected = 0;
  double rare_count = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (exact[i] == 0) {
      if (count[i] > 0) return 0;
      continue;
    }
    const double expected = exact[i] * draws;
    if (expected < 5) {  // cells too small for the approximation are pooled
      rare_expected += expected;
      rare_count += count[i];
      continue;
    }
    statistic += (count[i] - expected) * (count[i] - expected) / expected;
    ++cells;
  }
  if (rare_expected >= 5) {
    statistic += (rare_count - rare_expected) * (rare_count - rare_expected) / rare_expected;
    ++cells;
  }
  return cells < 2 ? 1 : ChiSquarePValue(statistic, cells - 1);
}

std::vector<float> RandomLogits(int vocab, uint32_t seed, float spread) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(vocab);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

TEST(SampleToken, ZeroTemperatureTakesTheLowestOfTheLargest) {
  EXPECT_EQ(SampleToken({1, 3, 2, 3}, {}, 0), 1);
  EXPECT_EQ(SampleToken({-kInfinity, -5, -kInfinity}, {}, 7), 1);
  EXPECT_EQ(SampleToken({kNan, -5, kNan, -4}, {}, 7), 3);
  EXPECT_EQ(SampleToken({2}, {}, 0), 0);
}

TEST(SampleToken, ZeroTemperatureIsTheFirstMaximumOfAnyLength) {
  std::mt19937 random(3);
  for (int run = 0; run < 2000; ++run) {
    std::vector<float> logits(1 + random() % 700);
    // Few values, so that ties are many.
    for (float& logit : logits) {
      const int value = static_cast<int>(random() % 40);
      logit = value == 0 ? kNan : value == 1 ? -kInfinity : static_cast<float>(value) - 50;
    }
    size_t first = 0;
    for (size_t i = 1; i < logits.size(); ++i) {
      if (std::isnan(logits[first]) || logits[i] > logits[first]) first = i;
    }
    if (std::isnan(logits[first]) || logits[first] == -kInfinity) first = 0;
    EXPECT_EQ(SampleToken(logits, {.temperature = 0}, run), static_cast<int32_t>(first)) << run;
  }
}

TEST(SampleToken, FollowsTheExactDistribution) {
  for (const float temperature : {0.25f, 0.5f, 1.0f, 1.5f}) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      const std::vector<float> logits = RandomLogits(50, seed, 2);
      EXPECT_GT(PValue(logits, {.temperature = temperature, .seed = seed}, 100000), 1e-3)
          << temperature << " " << seed;
    }
  }
}

TEST(SampleToken, FollowsTheExactDistributionOfSurvivors) {
  const std::vector<float> logits = RandomLogits(300, 9, 2);
  for (const SamplingParams& params :
       {SamplingParams{.temperature = 1, .top_k = 5, .seed = 1},
        SamplingParams{.temperature = 1, .top_p = 0.6f, .seed = 2},
        SamplingParams{.temperature = 2, .top_k = 40, .top_p = 0.9f, .seed = 3},
        // More survivors than the first candidates that are looked at.
        SamplingParams{.temperature = 3, .top_p = 0.99f, .seed = 4},
        SamplingParams{.temperature = 1, .top_k = 1000, .seed = 5}}) {
    EXPECT_GT(PValue(logits, params, 50000), 1e-3) << params.top_k << " " << params.top_p;
  }
}

// The test above can fail: a sampler of another temperature does.
TEST(SampleToken, TheChiSquareTestSeesAWrongTemperature) {
  const std::vector<float> logits = RandomLogits(50, 1, 2);
  const SamplingParams drawn{.temperature = 1.05f, .seed = 1};
  const std::vector<double> exact = ExactDistribution(logits, {.temperature = 1});
  const int draws = 100000;
  std::vector<int> count(logits.size(), 0);
  for (int i = 0; i < draws; ++i) ++count[SampleToken(logits, drawn, i)];
  double statistic = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    statistic += std::pow(count[i] - exact[i] * draws, 2) / (exact[i] * draws);
  }
  EXPECT_LT(ChiSquarePValue(statistic, 49), 1e-3);
}

// Draws over seeds at one position, and of two positions jointly, are as good as over positions at
// one seed.
TEST(SampleToken, SeedsAndPositionsAreIndependent) {
  const std::vector<float> logits = {0, 0, 0, 0};
  std::vector<int> over_seeds(4, 0);
  std::vector<int> pairs(16, 0);
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) {
    const SamplingParams params{.temperature = 1, .seed = static_cast<uint64_t>(i)};
    const int here = SampleToken(logits, params, 100);
    ++over_seeds[here];
    ++pairs[4 * here + SampleToken(logits, params, 101)];
  }
  const auto p_value = [](const std::vector<int>& count) {
    const double expected = static_cast<double>(kDraws) / static_cast<double>(count.size());
    double statistic = 0;
    for (const int c : count) statistic += (c - expected) * (c - expected) / expected;
    return ChiSquarePValue(statistic, static_cast<int>(count.size()) - 1);
  };
  EXPECT_GT(p_value(over_seeds), 1e-3);
  EXPECT_GT(p_value(pairs), 1e-3);
}

TEST(SampleToken, DependsOnNothingButItsArguments) {
  const std::vector<float> logits = RandomLogits(1000, 3, 1);
  const SamplingParams params{.temperature = 0.8f, .seed = 11};
  std::vector<int32_t> forward;
  std::vector<int32_t> backward;
  for (int i = 0; i < 200; ++i) forward.push_back(SampleToken(logits, params, i));
  for (int i = 199; i >= 0; --i) backward.push_back(SampleToken(logits, params, i));
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(forward, backward);
  EXPECT_GT(std::set<int32_t>(forward.begin(), forward.end()).size(), 100u);
}

// These tokens are part of the contract that a stream resumed elsewhere, or later, draws the same.
TEST(SampleToken, DrawsOfRecord) {
  const std::vector<float> logits = {0.5f, 1, 0, 2, -1, 1.5f, 0.25f, 0.75f};
  std::vector<int32_t> drawn;
  for (int i = 0; i < 16; ++i) {
    drawn.push_back(SampleToken(logits, {.temperature = 1, .seed = 42}, i));
  }
  EXPECT_THAT(drawn, ::testing::ElementsAre(1, 1, 7, 3, 5, 5, 1, 5, 0, 3, 7, 3, 5, 5, 1, 0));
}

// The bound that spares logarithms never changes a draw: with all logits equal nothing else
// decides.
TEST(SampleToken, PruningChangesNothing) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    const int vocab = 1 + static_cast<int>(random() % 2000);
    const std::vector<float> logits = RandomLogits(vocab, random(), trial % 3 == 0 ? 0.f : 3.f);
    const float temperature = std::pow(10.f, static_cast<float>(trial % 7) - 3.f);
    const SamplingParams params{.temperature = temperature, .seed = random()};
    // top_k = vocab keeps all ids but offers them in another order.
    SamplingParams reordered = params;
    reordered.top_k = vocab;
    const int64_t position = static_cast<int64_t>(random());
    EXPECT_EQ(SampleToken(logits, params, position), SampleToken(logits, reordered, position));
  }
}

TEST(SampleToken, TopKKeepsTheLowerIdsOfATie) {
  const std::vector<float> logits = {1, 2, 2, 2, 2};
  std::set<int32_t> seen;
  for (int i = 0; i < 500; ++i) {
    seen.insert(SampleToken(logits, {.temperature = 1, .top_k = 2, .seed = 1}, i));
  }
  EXPECT_THAT(seen, ::testing::ElementsAre(1, 2));
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(SampleToken(logits, {.temperature = 5, .top_k = 1, .seed = 1}, i), 1);
  }
}

TEST(SampleToken, TopPKeepsTheSmallestSetThatReachesTheMass) {
  // Masses 0.5, 0.25, 0.125, 0.125.
  const std::vector<float> logits = {std::log(0.125f), std::log(0.5f), std::log(0.25f),
                                     std::log(0.125f)};
  const auto support = [&](float top_p, int top_k) {
    std::set<int32_t> seen;
    for (int i = 0; i < 2000; ++i) {
      seen.insert(
          SampleToken(logits, {.temperature = 1, .top_k = top_k, .top_p = top_p, .seed = 1}, i));
    }
    return std::vector<int32_t>(seen.begin(), seen.end());
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(support(1e-6f, 0), ElementsAre(1));
  EXPECT_THAT(support(0.49f, 0), ElementsAre(1));
  EXPECT_THAT(support(0.51f, 0), ElementsAre(1, 2));
  EXPECT_THAT(support(0.76f, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(support(0.99f, 0), ElementsAre(0, 1, 2, 3));
  // After top_k = 2 the masses are 2/3 and 1/3.
  EXPECT_THAT(support(0.66f, 2), ElementsAre(1));
  EXPECT_THAT(support(0.68f, 2), ElementsAre(1, 2));
}

TEST(SampleToken, NeverDrawsWhatIsRuledOut) {
  const std::vector<float> logits = {-kInfinity, 0, kNan, 0, -kInfinity};
  for (const SamplingParams& params :
       {SamplingParams{.temperature = 100, .seed = 3},
        SamplingParams{.temperature = 100, .top_k = 4, .seed = 3},
        SamplingParams{.temperature = 100, .top_p = 0.99f, .seed = 3}}) {
    for (int i = 0; i < 500; ++i) {
      const int32_t token = SampleToken(logits, params, i);
      EXPECT_TRUE(token == 1 || token == 3) << token;
    }
  }
  EXPECT_EQ(SampleToken({-kInfinity, -kInfinity}, {.temperature = 1}, 0), 0);
  EXPECT_EQ(SampleToken({kNan, kNan}, {.temperature = 1}, 0), 0);
  EXPECT_EQ(SampleToken({0, kInfinity, 5}, {.temperature = 1}, 0), 1);
}

TEST(SampleToken, ExtremeTemperatures) {
  const std::vector<float> logits = {1, 3, 2};
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(SampleToken(logits, {.temperature = 1e-30f, .seed = 1}, i), 1);
  }
  EXPECT_GT(PValue(logits, {.temperature = 1e6f, .seed = 1}, 30000), 1e-3);
}

TEST(Validate, NamesWhatIsWrong) {
  EXPECT_TRUE(Validate({}, 10).ok());
  EXPECT_TRUE(Validate({.temperature = 0.7f, .top_k = 50, .top_p = 0.95f}, 10).ok());
  for (const float bad : {-0.1f, kNan, kInfinity}) {
    const absl::Status status = Validate({.temperature = bad}, 10);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("temperature"));
  }
  EXPECT_THAT(std::string(Validate({.top_k = -1}, 10).message()), HasSubstr("top_k is -1"));
  for (const float bad : {0.f, -0.5f, 1.01f, kNan}) {
    EXPECT_THAT(std::string(Validate({.top_p = bad}, 10).message()), HasSubstr("top_p"));
  }
}

TEST(LogProbs, OfTheTokenThenOfTheLikeliest) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), -kInfinity, std::log(0.4f),
                                     std::log(0.1f)};
  const std::vector<TokenLogProb> result = LogProbs(logits, 4, 3);
  ASSERT_EQ(result.size(), 4u);
  EXPECT_EQ(result[0].token, 4);
  EXPECT_EQ(result[1].token, 1);
  EXPECT_EQ(result[2].token, 3);
  EXPECT_EQ(result[3].token, 0);
  EXPECT_NEAR(result[0].log_prob, std::log(0.1), 1e-6);
  EXPECT_NEAR(result[1].log_prob, std::log(0.4), 1e-6);
  // Impossible ids are never among the likeliest.
  EXPECT_EQ(LogProbs(logits, 1, 10).size(), 5u);
  EXPECT_EQ(LogProbs(logits, 2, 0)[0].log_prob, -kInfinity);
}

SamplingParams ParamsOf(const nlohmann::json& item) {
  SamplingParams params;
  params.temperature = item.value("temperature", 0.0f);
  params.top_k = item.value("top_k", 0);
  params.top_p = item.value("top_p", 1.0f);
  params.min_p = item.value("min_p", 0.0f);
  params.rules.repetition_penalty = item.value("repetition_penalty", 1.0f);
  params.rules.frequency_penalty = item.value("frequency_penalty", 0.0f);
  params.rules.presence_penalty = item.value("presence_penalty", 0.0f);
  params.rules.min_tokens = item.value("min_tokens", 0);
  if (item.contains("logit_bias")) {
    for (const auto& entry : item["logit_bias"]) {
      params.rules.logit_bias.push_back({entry[0].get<int32_t>(), entry[1].get<float>()});
    }
  }
  return params;
}

// Every option alone and in random combinations, as transformers' processors (and vLLM's formulas
// for the penalties that those lack) have it: tests/oracle/sampling_oracle.py.
TEST(SamplingOracle, RulesAndLawAreTheOracles) {
  const auto golden = nlohmann::json::parse(ReadTestFile("tests/goldens/sampling.json"));
  const auto stops = golden["stops"].get<std::vector<int32_t>>();
  uint64_t seed = 0;
  int sampled = 0;
  for (const auto& item : golden["cases"]) {
    SamplingParams params = ParamsOf(item);
    params.seed = ++seed;
    const auto logits = item["logits"].get<std::vector<float>>();
    ASSERT_TRUE(Validate(params, static_cast<int64_t>(logits.size())).ok());
    const auto prompt = item["prompt"].get<std::vector<int32_t>>();
    const auto completion = item["completion"].get<std::vector<int32_t>>();
    TokenCounts counts(params.rules, prompt, completion);
    std::vector<float> scratch;
    const absl::Span<const float> changed =
        ApplyRules(logits, params.rules, stops, counts, &scratch);
    for (size_t i = 0; i < logits.size(); ++i) {
      if (item["changed"][i].is_null()) {
        EXPECT_EQ(changed[i], -kInfinity) << "case " << seed << ", id " << i;
      } else {
        EXPECT_NEAR(changed[i], item["changed"][i].get<float>(), 2e-5)
            << "case " << seed << ", id " << i;
      }
    }
    // The same counts, token by token.
    TokenCounts pushed(params.rules, prompt, {});
    for (const int32_t token : completion) pushed.Push(token);
    std::vector<float> again;
    EXPECT_EQ(ApplyRules(logits, params.rules, stops, pushed, &again), changed);

    const auto law = item["law"].get<std::vector<double>>();
    constexpr int kDraws = 20000;
    std::vector<int> count(law.size());
    for (int i = 0; i < kDraws; ++i) ++count[SampleToken(changed, params, i)];
    double statistic = 0, rare_expected = 0;
    int cells = 0, rare = 0;
    for (size_t i = 0; i < law.size(); ++i) {
      if (law[i] == 0) {
        EXPECT_EQ(count[i], 0) << "case " << seed << " drew id " << i;
        continue;
      }
      const double expected = law[i] * kDraws;
      if (expected < 5) {
        rare_expected += expected;
        rare += count[i];
        continue;
      }
      statistic += (count[i] - expected) * (count[i] - expected) / expected;
      ++cells;
    }
    if (rare_expected >= 5) {
      statistic += (rare - rare_expected) * (rare - rare_expected) / rare_expected;
      ++cells;
    }
    if (cells < 2) continue;
    ++sampled;
    EXPECT_GT(ChiSquarePValue(statistic, cells - 1), 1e-4) << "case " << seed;
  }
  EXPECT_GE(seed, 80u);
  EXPECT_GE(sampled, 40);
}

TEST(ApplyRules, NothingToDoCopiesNothing) {
  const std::vector<float> logits = {1, 2, 3};
  std::vector<float> scratch;
  LogitRules rules;
  EXPECT_EQ(ApplyRules(logits, rules, {}, {}, &scratch).data(), logits.data());
  rules.min_tokens = 2;  // reached
  const std::vector<int32_t> said = {0, 1};
  EXPECT_EQ(ApplyRules(logits, rules, {2}, TokenCounts(rules, {}, said), &scratch).data(),
            logits.data());
  EXPECT_EQ(ApplyRules(logits, rules, {2}, TokenCounts(rules, {}, {}), &scratch)[2], -kInfinity);
}

TEST(Validate, NamesEveryRule) {
  const auto message = [](const SamplingParams& params) {
    const absl::Status status = Validate(params, 10);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  SamplingParams params;
  EXPECT_TRUE(Validate(params, 10).ok());
  for (const float bad : {-0.1f, 1.1f, kNan}) {
    params = {};
    params.min_p = bad;
    EXPECT_THAT(message(params), HasSubstr("min_p is "));
  }
  for (const float bad : {0.0f, -1.0f, kInfinity, kNan}) {
    params = {};
    params.rules.repetition_penalty = bad;
    EXPECT_THAT(message(params), HasSubstr("repetition_penalty is "));
  }
  for (const float bad : {-2.1f, 2.1f, kNan}) {
    params = {};
    params.rules.frequency_penalty = bad;
    EXPECT_THAT(message(params), HasSubstr("frequency_penalty is "));
    params = {};
    params.rules.presence_penalty = bad;
    EXPECT_THAT(message(params), HasSubstr("presence_penalty is "));
  }
  params = {};
  params.rules.min_tokens = -1;
  EXPECT_THAT(message(params), HasSubstr("min_tokens is -1"));
  params = {};
  params.rules.logit_bias = {{10, 1.0f}};
  EXPECT_EQ(message(params), "logit_bias names the id 10; the model's ids go from 0 to 9");
  params.rules.logit_bias = {{-1, 1.0f}};
  EXPECT_THAT(message(params), HasSubstr("the id 4294967295"));
  params.rules.logit_bias = {{3, 100.5f}};
  EXPECT_EQ(message(params), "logit_bias of id 3 is 100.5; it must be from -100 to 100");
  params.rules.logit_bias = {{3, kNan}};
  EXPECT_THAT(message(params), HasSubstr("logit_bias of id 3 is nan"));
  params.rules.logit_bias = {{3, 1.0f}, {4, 1.0f}, {3, 2.0f}};
  EXPECT_EQ(message(params), "logit_bias names the id 3 twice");
  params.rules.logit_bias.assign(kMaxLogitBias + 1, {3, 1.0f});
  EXPECT_THAT(message(params), HasSubstr("logit_bias has 1025 ids; at most 1024"));
}

}  // namespace
}  // namespace coppice
