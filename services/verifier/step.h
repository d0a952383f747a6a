// What a step asks of the verifier and what it answers, as plain values: the engine's side of
// proto/coppice/v1/verifier.proto, whose comments are the contract.
#ifndef COPPICE_SERVICES_VERIFIER_STEP_H_
#define COPPICE_SERVICES_VERIFIER_STEP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "model/sampling.h"
#include "services/common/clock.h"

namespace coppice::verifier {

struct Admit {
  uint64_t sequence = 0;
  std::vector<int32_t> tokens;
  int64_t generated = 0;  // of these, the last so many belong to the completion
  SamplingParams sampling;
  int64_t max_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  std::optional<int64_t> logprobs;
  std::string drafter;  // host:port; empty: its features go nowhere
  int32_t priority = 0;
};

// Either `prefill` tokens of the admitted ones, or a draft tree.
struct Work {
  uint64_t sequence = 0;
  int64_t base_len = 0;
  int64_t prefill = 0;
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
  bool draft_ahead = false;
};

struct Step {
  uint64_t step = 0;
  std::vector<Admit> admits;
  std::vector<Work> work;
  std::vector<uint64_t> releases;
  TimePoint arrival{};
};

enum class Outcome { kDone, kRejected, kWrongBase, kUnknown, kNoPages, kPreempted, kFailed };
enum class FinishReason { kNone, kStop, kLength };

struct PositionLogProbs {
  TokenLogProb chosen;
  std::vector<TokenLogProb> top;
};

struct WorkResult {
  uint64_t sequence = 0;
  Outcome outcome = Outcome::kDone;
  int64_t base_len = 0;
  std::vector<int32_t> tokens;
  std::vector<PositionLogProbs> logprobs;
  int64_t accepted = 0;
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;
  int64_t cached_tokens = 0;
};

struct Refusal {
  uint64_t sequence = 0;
  absl::Status status;
};

struct PoolState {
  int64_t pages = 0;
  int64_t free_pages = 0;
  int64_t page_size = 0;
  int64_t sequences = 0;  // known, those that ended but were not released included
  int64_t leaked_pages = 0;
};

struct StepTiming {
  float queue_us = 0;
  float forward_us = 0;
  float sample_us = 0;
  float commit_us = 0;
  float total_us = 0;
  int64_t rows = 0;
};

struct StepResult {
  uint64_t step = 0;
  std::vector<WorkResult> results;
  PoolState pool;
  StepTiming timing;
  std::vector<uint32_t> expert_counts;
  std::vector<uint64_t> resumed;
  std::vector<Refusal> refused;
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_STEP_H_
