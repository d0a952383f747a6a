// Drawing the target's next token: losslessly and repeatably.
//
// The token is argmax over the surviving ids of logit / T + Gumbel(hash(seed, absolute position,
// token id)), ties to the lowest id: an exact draw from softmax(logits / T) restricted to the
// survivors (Gumbel-max trick), which needs no state, so a request draws the same tokens whatever
// the tree, batch, replica or resumption.
#ifndef COPPICE_MODEL_SAMPLING_H_
#define COPPICE_MODEL_SAMPLING_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace coppice {

// Alternatives that log-probabilities may be asked for, per position.
inline constexpr int kMaxLogProbs = 20;
inline constexpr size_t kMaxLogitBias = 1024;  // ids
inline constexpr float kLargestLogitBias = 100;

// What changes logits before anything is drawn from them, by what was said so far.  The order, and
// each formula, are vLLM's: min_tokens, logit_bias, repetition_penalty, frequency_penalty,
// presence_penalty.
struct LogitRules {
  // > 0; 1: off.  Of every token of prompt and completion: a positive logit is divided by it, any
  // other multiplied.
  float repetition_penalty = 1;
  // -2 … 2; 0: off.  Taken off once per occurrence in the completion.
  float frequency_penalty = 0;
  // -2 … 2; 0: off.  Taken off once where the completion has the token.
  float presence_penalty = 0;
  // (id, what is added), -100 … 100 each; no id twice.
  std::vector<std::pair<int32_t, float>> logit_bias;
  // Until so many tokens are generated, no stop token is drawn.
  int64_t min_tokens = 0;

  // Whether the tokens so far have to be counted.
  bool penalises() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0;
  }
};

// Truncation follows the rules and the temperature, in vLLM's order: min_p, top_k, top_p.
struct SamplingParams {
  float temperature = 0;  // 0: argmax, ties to the lowest id
  int top_k = 0;          // 0: off
  float top_p =
      1;  // 1: off; the smallest set of likeliest ids whose mass (after min_p and top_k) reaches it
  uint64_t seed = 0;
  float min_p = 0;  // 0: off; ids at least min_p times as likely as the likeliest
  LogitRules rules = {};
};

// INVALID_ARGUMENT with a sentence that names the field: temperature negative or not finite, top_k
// < 0, top_p outside (0, 1], min_p outside [0, 1], and rules beyond what LogitRules says.  Ids are
// checked against `vocab_size`.
absl::Status Validate(const SamplingParams& params, int64_t vocab_size);

// How often a sequence has each token: what penalties look at.
class TokenCounts {
 public:
  TokenCounts() = default;
  // `completion`: tokens generated before, as where a stream was resumed.  Counts nothing but the
  // completion's length where the rules have no penalty.
  TokenCounts(const LogitRules& rules, absl::Span<const int32_t> prompt,
              absl::Span<const int32_t> completion);
  void Push(int32_t token);  // generated

  int64_t generated() const { return generated_; }

 private:
  friend absl::Span<const float> ApplyRules(absl::Span<const float>, const LogitRules&,
                                            absl::Span<const int32_t>, const TokenCounts&,
                                            std::vector<float>*);
  absl::flat_hash_map<int32_t, int64_t> counts_;  // id → occurrences in the completion
  int64_t generated_ = 0;
  bool counting_ = false;
};

// The logits [vocab] under the rules, for the token after those that `counts` has seen: `logits`
// itself where nothing changes, else `*scratch`.  O(vocab), for the copy.
absl::Span<const float> ApplyRules(absl::Span<const float> logits, const LogitRules& rules,
                                   absl::Span<const int32_t> stop_token_ids,
                                   const TokenCounts& counts, std::vector<float>* scratch);

// The token at `position` (absolute: prompt tokens count) given its logits [vocab], at least one.
// A NaN counts as minus infinity, which is never drawn; where nothing else is there, the token is
// 0. O(vocab); at T > 0 a bound rules out nearly all ids without computing their logarithms.
int32_t SampleToken(absl::Span<const float> logits, const SamplingParams& params, int64_t position);

struct TokenLogProb {
  int32_t token = 0;
  float log_prob = 0;  // of softmax(logits), before rules, temperature and truncation
};
// `token` first, then the k likeliest, best first, ties to the lower id.
std::vector<TokenLogProb> LogProbs(absl::Span<const float> logits, int32_t token, int k);

}  // namespace coppice

#endif  // COPPICE_MODEL_SAMPLING_H_
