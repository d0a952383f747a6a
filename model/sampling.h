// Drawing the target's next token: losslessly and repeatably.
//
// The token is argmax over the surviving ids of logit / T + Gumbel(hash(seed, absolute position,
// token id)), ties to the lowest id: an exact draw from softmax(logits / T) restricted to the
// survivors (Gumbel-max trick), which needs no state, so a request draws the same tokens whatever
// the tree, batch, replica or resumption.
#ifndef COPPICE_MODEL_SAMPLING_H_
#define COPPICE_MODEL_SAMPLING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace coppice {

struct SamplingParams {
  float temperature = 0;  // 0: argmax, ties to the lowest id
  int top_k = 0;          // 0: off
  float top_p =
      1;  // 1: off; the smallest set of likeliest ids whose mass (after top_k) reaches top_p
  uint64_t seed = 0;
};

// INVALID_ARGUMENT with a sentence: temperature negative or not finite, top_k < 0, top_p outside
// (0, 1].
absl::Status Validate(const SamplingParams& params);

// The token at `position` (absolute: prompt tokens count) given its logits [vocab], at least one.
// A NaN counts as minus infinity, which is never drawn; where nothing else is there, the token is
// 0. O(vocab); at T > 0 a bound rules out nearly all ids without computing their logarithms.
int32_t SampleToken(absl::Span<const float> logits, const SamplingParams& params, int64_t position);

struct TokenLogProb {
  int32_t token = 0;
  float log_prob = 0;  // of softmax(logits), before temperature and truncation
};
// `token` first, then the k likeliest, best first, ties to the lower id.
std::vector<TokenLogProb> LogProbs(absl::Span<const float> logits, int32_t token, int k);

}  // namespace coppice

#endif  // COPPICE_MODEL_SAMPLING_H_
