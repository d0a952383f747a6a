#include "model/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

namespace coppice {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014, constants by Stafford): every bit of the
// result depends on every bit of x.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// Start of the random stream of (seed, position); token t's number is the stream's t-th.
uint64_t Stream(uint64_t seed, int64_t position) {
  return Mix(Mix(seed + kGolden) + (static_cast<uint64_t>(position) + 1) * kGolden);
}

uint64_t Hash(uint64_t stream, int32_t token) {
  return Mix(stream + (static_cast<uint64_t>(token) + 1) * kGolden);
}

// 52 bits, so that neither 0 nor 1 is reached: u = (bits + 1/2) / 2^52 and 1 - u are both doubles.
constexpr int kBits = 52;

double Gumbel(uint64_t hash) {
  const double u = (static_cast<double>(hash >> (64 - kBits)) + 0.5) * 0x1p-52;
  return -std::log(-std::log(u));
}

// At least Gumbel(hash), without logarithms: -log(-log u) <= -log(1 - u), and 1 - u > 2^-(n + 1)
// where its first n binary digits are 0, which are the hash's first n ones.
double GumbelBound(uint64_t hash) {
  constexpr double kLog2 = 0.6931471805599454;  // rounded up
  const int ones = std::min(std::countl_one(hash), kBits);
  return kLog2 * (ones + 1);
}

// Above every Gumbel(hash).
constexpr double kMaxGumbel = 0.6931471805599454 * (kBits + 1);

// NaN counts as minus infinity: it is never drawn while any other logit is there.
float Logit(absl::Span<const float> logits, int64_t token) {
  const float logit = logits[token];
  return std::isnan(logit) ? kNegativeInfinity : logit;
}

// The first of the largest, 0 where there is none above minus infinity.
int32_t ArgMax(absl::Span<const float> logits) {
  // A block's maximum, which takes one vector instruction for some lanes, is compared with the best
  // so far; few blocks beat it and are searched.  NaN is never above anything.
  constexpr size_t kLanes = 16;
  constexpr size_t kBlock = 8 * kLanes;
  int32_t best = 0;
  float best_logit = kNegativeInfinity;
  const auto search = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (logits[i] > best_logit) {
        best_logit = logits[i];
        best = static_cast<int32_t>(i);
      }
    }
  };
  size_t begin = 0;
  for (; begin + kBlock <= logits.size(); begin += kBlock) {
    const float* const block = logits.data() + begin;
    float lane[kLanes];
    std::fill(lane, lane + kLanes, best_logit);
    for (size_t i = 0; i < kBlock; i += kLanes) {
      for (size_t l = 0; l < kLanes; ++l) lane[l] = block[i + l] > lane[l] ? block[i + l] : lane[l];
    }
    bool above = false;
    for (size_t l = 0; l < kLanes; ++l) above |= lane[l] > best_logit;
    if (above) search(begin, begin + kBlock);
  }
  search(begin, logits.size());
  return best;
}

// Ids of the k largest logits above minus infinity, best first, ties to the lower id.
std::vector<int32_t> TopK(absl::Span<const float> logits, int64_t k) {
  const auto better = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  // A heap with the worst survivor on top.  Ids come in ascending order, so an equal one loses.
  std::vector<int32_t> heap;
  if (k <= 0) return heap;
  heap.reserve(std::min<int64_t>(k, static_cast<int64_t>(logits.size())));
  for (size_t i = 0; i < logits.size(); ++i) {
    const float logit = Logit(logits, i);
    if (logit == kNegativeInfinity) continue;
    if (static_cast<int64_t>(heap.size()) < k) {
      heap.push_back(static_cast<int32_t>(i));
      std::push_heap(heap.begin(), heap.end(), better);
    } else if (logit > logits[heap.front()]) {
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.back() = static_cast<int32_t>(i);
      std::push_heap(heap.begin(), heap.end(), better);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  return heap;
}

// How far below the largest a logit may lie under min_p; minus infinity where that is off.
double MinPCut(const SamplingParams& params) {
  return params.min_p > 0 ? params.temperature * std::log(static_cast<double>(params.min_p))
                          : -std::numeric_limits<double>::infinity();
}

// The ids that min_p, top_k and then top_p leave, in no order of interest; `max` is the largest
// logit.  min_p and top_k each leave the best ones, so their order does not matter.
std::vector<int32_t> Survivors(absl::Span<const float> logits, const SamplingParams& params,
                               float max) {
  const double temperature = params.temperature;
  const double cut = MinPCut(params);
  const auto mass = [&](float logit) {
    return std::exp((static_cast<double>(logit) - max) / temperature);
  };
  const auto passes = [&](float logit) {
    return logit != kNegativeInfinity && static_cast<double>(logit) - max >= cut;
  };
  std::vector<int32_t> ids;
  double total = 0;
  if (params.top_k > 0) {
    ids = TopK(logits, params.top_k);
    while (!ids.empty() && !passes(logits[ids.back()])) ids.pop_back();
    if (params.top_p >= 1) return ids;
    for (const int32_t id : ids) total += mass(logits[id]);
  } else {
    for (size_t i = 0; i < logits.size(); ++i) {
      const float logit = Logit(logits, i);
      if (!passes(logit)) continue;
      total += mass(logit);
      if (params.top_p >= 1) ids.push_back(static_cast<int32_t>(i));
    }
    if (params.top_p >= 1) return ids;
  }
  // Few ids hold most of the mass, as a rule: look at the best 64, then four times as many.
  const double wanted = static_cast<double>(params.top_p) * total;
  for (int64_t count = 64;; count *= 4) {
    if (params.top_k == 0) ids = TopK(logits, count);
    double reached = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      // Beyond min_p's cut only rounding kept the sum below `wanted`.
      if (!passes(logits[ids[i]])) {
        ids.resize(i);
        return ids;
      }
      reached += mass(logits[ids[i]]);
      if (reached >= wanted) {
        ids.resize(i + 1);
        return ids;
      }
    }
    // All are in, and only rounding kept their sum below `wanted`.
    if (params.top_k > 0 || static_cast<int64_t>(ids.size()) < count) return ids;
  }
}

}  // namespace

absl::Status Validate(const SamplingParams& params, int64_t vocab_size) {
  if (!std::isfinite(params.temperature) || params.temperature < 0) {
    return absl::InvalidArgumentError(absl::StrCat("temperature is ", params.temperature,
                                                   "; it must be a finite number, 0 or more"));
  }
  if (params.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", params.top_k, "; it must be 0 (off) or more"));
  }
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_p is ", params.top_p, "; it must be above 0 and at most 1 (off)"));
  }
  if (!(params.min_p >= 0 && params.min_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_p is ", params.min_p, "; it must be from 0 (off) to 1"));
  }
  const LogitRules& rules = params.rules;
  if (!(rules.repetition_penalty > 0 && std::isfinite(rules.repetition_penalty))) {
    return absl::InvalidArgumentError(
        absl::StrCat("repetition_penalty is ", rules.repetition_penalty,
                     "; it must be a finite number above 0 (1 turns it off)"));
  }
  for (const auto& [name, value] : {std::pair("frequency_penalty", rules.frequency_penalty),
                                    std::pair("presence_penalty", rules.presence_penalty)}) {
    if (!(value >= -2 && value <= 2)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is ", value, "; it must be from -2 to 2 (0 turns it off)"));
    }
  }
  if (rules.min_tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_tokens is ", rules.min_tokens, "; it must be 0 (off) or more"));
  }
  if (rules.logit_bias.size() > kMaxLogitBias) {
    return absl::InvalidArgumentError(absl::StrCat("logit_bias has ", rules.logit_bias.size(),
                                                   " ids; at most ", kMaxLogitBias, " are taken"));
  }
  absl::flat_hash_set<int32_t> seen;
  for (const auto& [id, bias] : rules.logit_bias) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("logit_bias names the id ", static_cast<uint32_t>(id),
                       "; the model's ids go from 0 to ", vocab_size - 1));
    }
    if (!(bias >= -kLargestLogitBias && bias <= kLargestLogitBias)) {
      return absl::InvalidArgumentError(absl::StrCat("logit_bias of id ", id, " is ", bias,
                                                     "; it must be from ", -kLargestLogitBias,
                                                     " to ", kLargestLogitBias));
    }
    if (!seen.insert(id).second) {
      return absl::InvalidArgumentError(absl::StrCat("logit_bias names the id ", id, " twice"));
    }
  }
  return absl::OkStatus();
}

TokenCounts::TokenCounts(const LogitRules& rules, absl::Span<const int32_t> prompt,
                         absl::Span<const int32_t> completion)
    : counting_(rules.penalises()) {
  if (counting_) {
    for (const int32_t token : prompt) counts_.try_emplace(token, 0);
  }
  for (const int32_t token : completion) Push(token);
}

void TokenCounts::Push(int32_t token) {
  ++generated_;
  if (counting_) ++counts_[token];
}

absl::Span<const float> ApplyRules(absl::Span<const float> logits, const LogitRules& rules,
                                   absl::Span<const int32_t> stop_token_ids,
                                   const TokenCounts& counts, std::vector<float>* scratch) {
  const bool masks = counts.generated() < rules.min_tokens && !stop_token_ids.empty();
  if (!masks && rules.logit_bias.empty() && !rules.penalises()) return logits;
  scratch->assign(logits.begin(), logits.end());
  std::vector<float>& changed = *scratch;
  if (masks) {
    for (const int32_t id : stop_token_ids) changed[id] = kNegativeInfinity;
  }
  for (const auto& [id, bias] : rules.logit_bias) changed[id] += bias;
  for (const auto& [id, occurrences] : counts.counts_) {
    float& logit = changed[id];
    if (logit > 0) {
      logit /= rules.repetition_penalty;
    } else {
      logit *= rules.repetition_penalty;
    }
    if (occurrences == 0) continue;
    logit -= rules.frequency_penalty * static_cast<float>(occurrences);
    logit -= rules.presence_penalty;
  }
  return changed;
}

int32_t SampleToken(absl::Span<const float> logits, const SamplingParams& params,
                    int64_t position) {
  const int32_t likeliest = ArgMax(logits);
  const float max = Logit(logits, likeliest);
  // An infinite logit leaves nothing to draw.
  if (params.temperature == 0 || std::isinf(max)) return likeliest;

  const uint64_t stream = Stream(params.seed, position);
  const double temperature = params.temperature;
  // The likeliest goes first: most others are then ruled out by a bound, without logarithms.
  int32_t best = likeliest;
  double best_score = max / temperature + Gumbel(Hash(stream, likeliest));
  const auto offer = [&](int32_t token) {
    // More than what rounding can add to a score.
    constexpr double kSlack = 1e-9;
    const float logit = Logit(logits, token);
    const double score = static_cast<double>(logit) / temperature;
    const double floor = best_score - kSlack * (1 + std::abs(best_score));
    if (token == likeliest || !(score + kMaxGumbel >= floor)) return;
    const uint64_t hash = Hash(stream, token);
    if (!(score + GumbelBound(hash) >= floor)) return;
    const double perturbed = score + Gumbel(hash);
    if (perturbed > best_score || (perturbed == best_score && token < best)) {
      best_score = perturbed;
      best = token;
    }
  };
  if (params.top_k > 0 || params.top_p < 1 || params.min_p > 0) {
    for (const int32_t token : Survivors(logits, params, max)) offer(token);
  } else {
    for (size_t i = 0; i < logits.size(); ++i) offer(static_cast<int32_t>(i));
  }
  return best;
}

std::vector<TokenLogProb> LogProbs(absl::Span<const float> logits, int32_t token, int k) {
  const float max = Logit(logits, ArgMax(logits));
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float logit = Logit(logits, i);
    if (logit != kNegativeInfinity) total += std::exp(static_cast<double>(logit) - max);
  }
  const double log_total = std::log(total);
  const auto log_prob = [&](int32_t id) {
    const float logit = Logit(logits, id);
    if (logit == kNegativeInfinity) return kNegativeInfinity;
    return static_cast<float>(static_cast<double>(logit) - max - log_total);
  };
  std::vector<TokenLogProb> result;
  result.push_back({token, log_prob(token)});
  for (const int32_t id : TopK(logits, k)) result.push_back({id, log_prob(id)});
  return result;
}

}  // namespace coppice
