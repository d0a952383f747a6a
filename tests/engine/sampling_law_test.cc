// The law of what the engine emits, tested against the exact one: a random model with a vocabulary
// of four tokens, the real target and the real engine, plain decoding and random trees.  A sampler
// that accepts drafts with probability min(1, p/q), wrong for trees of likeliest candidates, must
// fail the same test.
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/target.h"
#include "model/test_files.h"
#include "nlohmann/json.hpp"
#include "services/verifier/engine.h"
#include "speculation/tree.h"

namespace coppice::verifier {
namespace {

constexpr int kVocab = 4;
constexpr int kDrawn = 3;           // tokens per sequence
constexpr int kOutcomes = 64;       // kVocab ^ kDrawn
constexpr int kSequences = 40'000;  // per law: 120,000 draws
constexpr int32_t kPrompt[] = {2, 0};

// Writes a bf16 DeepSeek-V3 checkpoint with random weights: one dense layer, one of experts.
void WriteModel(const TempDir& dir) {
  const int hidden = 16, heads = 8, q_lora = 8, kv_lora = 16, nope = 4, rope = 4, v = 4, dense = 16,
            expert = 8;
  const int experts = 4;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::string data;
  nlohmann::ordered_json header;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, float mean,
                       float deviation, const char* dtype) {
    int64_t count = 1;
    for (int64_t n : shape) count *= n;
    const size_t begin = data.size();
    for (int64_t i = 0; i < count; ++i) {
      const float value = mean + deviation * normal(random);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (dtype[0] == 'B') {
        const uint16_t half = static_cast<uint16_t>(bits >> 16);
        data.append(reinterpret_cast<const char*>(&half), 2);
      } else {
        data.append(reinterpret_cast<const char*>(&bits), 4);
      }
    }
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  };
  const auto weight = [&](const std::string& name, int64_t rows, int64_t cols) {
    add(name + ".weight", {rows, cols}, 0, 1.5f / std::sqrt(static_cast<float>(cols)), "BF16");
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    add(name + ".weight", {size}, 1, 0.2f, "BF16");
  };
  weight("model.embed_tokens", kVocab, hidden);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".";
    norm(p + "input_layernorm", hidden);
    norm(p + "post_attention_layernorm", hidden);
    weight(p + "self_attn.q_a_proj", q_lora, hidden);
    norm(p + "self_attn.q_a_layernorm", q_lora);
    weight(p + "self_attn.q_b_proj", heads * (nope + rope), q_lora);
    weight(p + "self_attn.kv_a_proj_with_mqa", kv_lora + rope, hidden);
    norm(p + "self_attn.kv_a_layernorm", kv_lora);
    weight(p + "self_attn.kv_b_proj", heads * (nope + v), kv_lora);
    weight(p + "self_attn.o_proj", hidden, heads * v);
    const auto mlp = [&](const std::string& name, int64_t width) {
      weight(name + "gate_proj", width, hidden);
      weight(name + "up_proj", width, hidden);
      weight(name + "down_proj", hidden, width);
    };
    if (layer == 0) {
      mlp(p + "mlp.", dense);
      continue;
    }
    weight(p + "mlp.gate", experts, hidden);
    add(p + "mlp.gate.e_score_correction_bias", {experts}, 0, 0.3f, "F32");
    for (int e = 0; e < experts; ++e) mlp(p + "mlp.experts." + std::to_string(e) + ".", expert);
    mlp(p + "mlp.shared_experts.", expert);
  }
  norm("model.norm", hidden);
  add("lm_head.weight", {kVocab, hidden}, 0, 0.4f, "BF16");
  const nlohmann::json config = TinyTargetConfig({.vocab = kVocab,
                                                  .hidden = hidden,
                                                  .heads = heads,
                                                  .q_lora = q_lora,
                                                  .kv_lora = kv_lora,
                                                  .nope = nope,
                                                  .rope = rope,
                                                  .v = v,
                                                  .dense = dense,
                                                  .experts = experts,
                                                  .expert = expert});
  dir.Write("config.json", config.dump());
  dir.Write("generation_config.json", "{\"eos_token_id\": [3]}");
  dir.Write("model.safetensors", SafetensorsImage(header.dump(), data));
}

std::unique_ptr<Target> LoadTarget(const TempDir& dir) {
  TargetOptions options;
  options.model_dir = dir.path();
  options.page_size = 4;
  options.pages = 2048;
  options.max_rows = 2048;
  auto target = Target::Load(options);
  EXPECT_TRUE(target.ok()) << target.status();
  return target.ok() ? *std::move(target) : nullptr;
}

// Logits after the prompt and `generated`, by the target alone.
std::vector<float> LogitsAfter(Target* target, const std::vector<int32_t>& generated) {
  std::vector<int32_t> tokens(std::begin(kPrompt), std::end(kPrompt));
  tokens.insert(tokens.end(), generated.begin(), generated.end());
  const std::vector<int32_t> pages = {1, 2, 3};
  const std::vector<int32_t> rows = {static_cast<int32_t>(tokens.size()) - 1};
  SequenceRows sequence;
  sequence.tokens = tokens;
  sequence.page_table = pages;
  sequence.logit_rows = rows;
  ForwardResult result;
  const absl::Status status = target->Forward({sequence}, &result);
  EXPECT_TRUE(status.ok()) << status;
  return result.logits;
}

std::vector<double> Softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p(logits.size());
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(logits[i] / temperature);
  for (double& x : p) x /= sum;
  return p;
}

// p[first + 4 * second + 16 * third]
std::vector<double> ExactLaw(Target* target, double temperature) {
  std::vector<double> law(kOutcomes);
  const std::vector<double> first = Softmax(LogitsAfter(target, {}), temperature);
  for (int a = 0; a < kVocab; ++a) {
    const std::vector<double> second = Softmax(LogitsAfter(target, {a}), temperature);
    for (int b = 0; b < kVocab; ++b) {
      const std::vector<double> third = Softmax(LogitsAfter(target, {a, b}), temperature);
      for (int c = 0; c < kVocab; ++c) law[a + 4 * b + 16 * c] = first[a] * second[b] * third[c];
    }
  }
  return law;
}

// Regularised upper incomplete gamma function Q(a, x) (series and continued fraction; Abramowitz
// and Stegun 6.5).
double UpperGamma(double a, double x) {
  const double scale = std::exp(a * std::log(x) - x - std::lgamma(a));
  if (x < a + 1) {
    double term = 1 / a, sum = term;
    for (int n = 1; n < 1000; ++n) sum += term *= x / (a + n);
    return 1 - sum * scale;
  }
  double b = x + 1 - a, c = 1e300, d = 1 / b, h = d;
  for (int n = 1; n < 1000; ++n) {
    const double an = n * (a - n);
    b += 2;
    d = 1 / (an * d + b);
    c = b + an / c;
    h *= d * c;
  }
  return scale * h;
}

// The probability of counts at least as far from the law as these, by the chi-square test; outcomes
// expected fewer than five times share one cell.
double PValue(const std::vector<int64_t>& counts, const std::vector<double>& law) {
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  double statistic = 0, rare_expected = 0;
  int64_t rare = 0;
  int cells = 0;
  for (int i = 0; i < kOutcomes; ++i) {
    const double expected = law[i] * static_cast<double>(total);
    if (expected < 5) {
      rare_expected += expected;
      rare += counts[i];
    } else {
      statistic += (static_cast<double>(counts[i]) - expected) *
                   (static_cast<double>(counts[i]) - expected) / expected;
      ++cells;
    }
  }
  if (rare_expected > 0) {
    statistic += (static_cast<double>(rare) - rare_expected) *
                 (static_cast<double>(rare) - rare_expected) / rare_expected;
    ++cells;
  }
  return UpperGamma((cells - 1) / 2.0, statistic / 2);
}

// A random tree below `root`: up to three children at the first depth, each with up to two at the
// next.
Work RandomTree(uint64_t sequence, int64_t base_len, int32_t root, std::mt19937* random) {
  Work work;
  work.sequence = sequence;
  work.base_len = base_len;
  work.tokens = {root};
  work.parents = {-1};
  const auto children = [&](int parent, int most) {
    std::vector<int32_t> tokens = {0, 1, 2, 3};
    std::shuffle(tokens.begin(), tokens.end(), *random);
    const int count = static_cast<int>((*random)() % (most + 1));
    for (int i = 0; i < count; ++i) {
      work.tokens.push_back(tokens[i]);
      work.parents.push_back(parent);
    }
    return count;
  };
  const int first = children(0, 3);
  for (int i = 0; i < first; ++i) children(1 + i, 2);
  return work;
}

class SamplingLaw : public ::testing::TestWithParam<std::tuple<double, bool>> {};

TEST_P(SamplingLaw, IsTheTargetsOwn) {
  const auto [temperature, trees] = GetParam();
  TempDir dir;
  WriteModel(dir);
  std::unique_ptr<Target> target = LoadTarget(dir);
  ASSERT_NE(target, nullptr);
  const std::vector<double> law = ExactLaw(target.get(), temperature);
  EngineOptions options;
  options.page_size = 4;
  options.pages = 2048;
  options.max_rows = 2048;
  options.max_sequences = 256;
  Engine engine(std::move(target), options, nullptr);

  std::mt19937 random(3);
  std::vector<int64_t> counts(kOutcomes);
  int64_t accepted = 0;
  constexpr int kBatch = 100;
  for (int begin = 0; begin < kSequences; begin += kBatch) {
    std::vector<std::vector<int32_t>> drawn(kBatch);
    Step step;
    for (int i = 0; i < kBatch; ++i) {
      Admit admit;
      admit.sequence = begin + i + 1;
      admit.tokens.assign(std::begin(kPrompt), std::end(kPrompt));
      admit.sampling.temperature = static_cast<float>(temperature);
      admit.sampling.seed = 1000 + begin + i;
      admit.max_tokens = kDrawn;
      step.admits.push_back(admit);
      Work work;
      work.sequence = admit.sequence;
      work.prefill = std::size(kPrompt);
      step.work.push_back(work);
    }
    for (bool more = true; more;) {
      const StepResult result = engine.Execute(step);
      ASSERT_TRUE(result.refused.empty()) << result.refused[0].status;
      step = Step();
      more = false;
      for (const WorkResult& r : result.results) {
        ASSERT_EQ(r.outcome, Outcome::kDone) << r.error;
        std::vector<int32_t>& tokens = drawn[r.sequence - begin - 1];
        tokens.insert(tokens.end(), r.tokens.begin(), r.tokens.end());
        accepted += r.accepted;
        if (r.finish_reason != FinishReason::kNone) {
          step.releases.push_back(r.sequence);
          continue;
        }
        more = true;
        if (trees) {
          step.work.push_back(RandomTree(r.sequence, r.base_len, tokens.back(), &random));
        } else {
          Work work;
          work.sequence = r.sequence;
          work.base_len = r.base_len;
          work.tokens = {tokens.back()};
          work.parents = {-1};
          step.work.push_back(work);
        }
      }
    }
    engine.Execute(step);
    for (const std::vector<int32_t>& tokens : drawn) {
      ASSERT_EQ(tokens.size(), static_cast<size_t>(kDrawn));
      ++counts[tokens[0] + 4 * tokens[1] + 16 * tokens[2]];
    }
  }
  EXPECT_EQ(accepted > 0, trees);
  EXPECT_GE(PValue(counts, law), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(All, SamplingLaw,
                         ::testing::Combine(::testing::Values(0.5, 1.0, 1.5), ::testing::Bool()));

// The textbook rule for drafts sampled from q, applied to candidates that are merely q's likeliest.
TEST(SamplingLaw, TheRejectionRuleForSampledDraftsFails) {
  TempDir dir;
  WriteModel(dir);
  std::unique_ptr<Target> target = LoadTarget(dir);
  ASSERT_NE(target, nullptr);
  for (double temperature : {0.5, 1.0, 1.5}) {
    const std::vector<double> law = ExactLaw(target.get(), temperature);
    std::map<std::vector<int32_t>, std::vector<double>> memo;
    const auto p_after = [&](const std::vector<int32_t>& prefix) -> const std::vector<double>& {
      auto& p = memo[prefix];
      if (p.empty()) p = Softmax(LogitsAfter(target.get(), prefix), temperature);
      return p;
    };
    const std::vector<double> q = {0.45, 0.3, 0.15,
                                   0.1};  // the drafter's marginal; candidates: tokens 0 and 1
    std::mt19937 random(5);
    std::uniform_real_distribution<double> uniform;
    std::vector<int64_t> counts(kOutcomes);
    for (int i = 0; i < kSequences; ++i) {
      std::vector<int32_t> tokens;
      while (tokens.size() < kDrawn) {
        std::vector<double> p = p_after(tokens);
        int32_t chosen = -1;
        for (int32_t candidate : {0, 1}) {
          if (uniform(random) < std::min(1.0, p[candidate] / q[candidate])) {
            chosen = candidate;
            break;
          }
          double sum = 0;
          for (int t = 0; t < kVocab; ++t) sum += p[t] = std::max(0.0, p[t] - q[t]);
          for (double& x : p) x /= sum;
        }
        for (double u = uniform(random); chosen < 0;) {
          int32_t t = 0;
          while (t < kVocab - 1 && u >= p[t]) u -= p[t++];
          chosen = t;
        }
        tokens.push_back(chosen);
      }
      ++counts[tokens[0] + 4 * tokens[1] + 16 * tokens[2]];
    }
    EXPECT_LT(PValue(counts, law), 1e-3) << temperature;
  }
}

// The test itself: draws from the law pass, and a law off by two per cent in its likeliest outcome
// does not.
TEST(SamplingLaw, TheTestTellsSmallBiases) {
  std::vector<double> law(kOutcomes);
  double sum = 0;
  for (int i = 0; i < kOutcomes; ++i) sum += law[i] = std::exp(-0.08 * i);
  for (double& x : law) x /= sum;
  std::mt19937 random(7);
  std::discrete_distribution<int> draw(law.begin(), law.end());
  std::vector<int64_t> counts(kOutcomes);
  for (int i = 0; i < kSequences; ++i) ++counts[draw(random)];
  EXPECT_GE(PValue(counts, law), 1e-3);
  std::vector<double> biased = law;
  biased[0] += 0.01;
  biased[1] -= 0.01;
  EXPECT_LT(PValue(counts, biased), 1e-3);
}

}  // namespace
}  // namespace coppice::verifier
