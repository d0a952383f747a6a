// What the scheduler says to, and hears from, its verifier and its drafter: the wire's messages as
// plain values, so that the scheduler knows nothing of gRPC.  The contracts are those of
// verifier.proto and drafter.proto.
#ifndef COPPICE_SERVICES_ROUTER_PEERS_H_
#define COPPICE_SERVICES_ROUTER_PEERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "model/sampling.h"
#include "speculation/cost_model.h"

namespace coppice::router {

struct BuildLabel {
  std::string version;
  std::string git;
  std::string device;
};

// As in the wire's FinishReason.
enum class FinishReason { kNone = 0, kStop = 1, kLength = 2, kCancelled = 3, kDeadline = 4 };

struct TokenScore {
  int32_t token = 0;
  float log_prob = 0;
};

struct PositionScores {
  TokenScore chosen;
  std::vector<TokenScore> top;
};

// ---- Verifier

struct PoolState {
  int64_t pages = 0;
  int64_t free_pages = 0;
  int page_size = 1;
  int sequences = 0;
  int64_t leaked_pages = 0;
};

struct VerifierInfo {
  std::string name;
  uint64_t epoch = 0;
  uint64_t fingerprint = 0;
  uint64_t embedding_fingerprint = 0;
  uint64_t drafter_fingerprint = 0;
  std::vector<int> target_layer_ids;
  int vocab_size = 0;
  int hidden_size = 0;
  int max_position_embeddings = 0;
  int tp = 0;
  int max_rows = 0;
  int max_tree_nodes = 0;
  int max_sequences = 0;
  PoolState pool;
  std::vector<speculation::CostSample> cost;
  double prefill_us_per_token = 0;
  std::string owner;
  BuildLabel build;
};

struct Admit {
  uint64_t sequence = 0;
  std::vector<int32_t> tokens;
  float temperature = 0;
  float top_p = 1;
  int top_k = 0;
  float min_p = 0;
  LogitRules rules = {};
  uint64_t seed = 0;
  int generated = 0;  // of `tokens`, the last so many belong to the completion
  int max_tokens = 0;
  std::vector<int32_t> stop_token_ids;
  std::optional<int> logprobs;
  std::string drafter;
  int priority = 0;
};

struct Work {
  uint64_t sequence = 0;
  int64_t base_len = 0;
  int prefill = 0;              // tokens of a chunk; or
  std::vector<int32_t> tokens;  // a tree
  std::vector<int32_t> parents;
  bool draft_ahead = false;

  int rows() const { return prefill > 0 ? prefill : static_cast<int>(tokens.size()); }
};

struct StepRequest {
  uint64_t step = 0;
  std::vector<Admit> admits;
  std::vector<Work> work;
  std::vector<uint64_t> releases;
};

// As in the wire's WorkResult.Outcome.
enum class Outcome {
  kUnspecified = 0,
  kDone = 1,
  kRejected = 2,
  kWrongBase = 3,
  kUnknown = 4,
  kNoPages = 5,
  kPreempted = 6,
  kFailed = 7
};

struct WorkResult {
  uint64_t sequence = 0;
  Outcome outcome = Outcome::kUnspecified;
  int64_t base_len = 0;
  std::vector<int32_t> tokens;
  std::vector<PositionScores> logprobs;
  int accepted = 0;
  FinishReason finish_reason = FinishReason::kNone;
  std::string error;
  int cached_tokens = 0;
};

struct AdmitResult {
  uint64_t sequence = 0;
  absl::Status status;
};

struct StepTiming {
  float queue_us = 0;
  float forward_us = 0;
  float sample_us = 0;
  float commit_us = 0;
  float total_us = 0;
  int rows = 0;
};

struct StepResult {
  uint64_t step = 0;
  std::vector<WorkResult> results;
  PoolState pool;
  StepTiming timing;
  std::vector<AdmitResult> refused;
};

// One connection at a time, numbered by `connection`; everything about an older one is stale.
struct VerifierUp {
  uint64_t connection = 0;
  VerifierInfo info;
  std::vector<uint64_t> resumed;  // sequences kept from before a break
};
struct VerifierStep {
  uint64_t connection = 0;
  StepResult result;
};
struct VerifierDown {
  uint64_t connection = 0;
  // FAILED_PRECONDITION: another router owns it.  INVALID_ARGUMENT: it does not fit
  // (CheckVerifier). It is tried again in any case.
  absl::Status status;
};

// The transport connects, and connects again after a loss, by itself, and tells of it by the events
// above.
class VerifierLink {
 public:
  virtual ~VerifierLink() = default;
  // Never blocks.  Dropped where `connection` is no longer the current one.
  virtual void Send(uint64_t connection, StepRequest request) = 0;
};

// ---- Drafter

struct DrafterInfo {
  std::string name;
  uint64_t epoch = 0;
  uint64_t drafter_fingerprint = 0;
  uint64_t embedding_fingerprint = 0;
  int vocab_size = 0;
  int hidden_size = 0;
  int block_size = 0;
  std::vector<int> target_layer_ids;
  int window = 0;
  int max_sequences = 0;
  int max_top_k = 0;
  std::vector<speculation::CostSample> cost;  // rows = blocks
  BuildLabel build;
  int sequences = 0;
};

struct DraftQuery {
  uint64_t sequence = 0;
  int32_t pending_token = 0;
  int64_t base_len = 0;
};

struct DraftBatch {
  uint64_t batch = 0;
  uint64_t verifier_epoch = 0;
  std::vector<DraftQuery> queries;
  int top_k = 0;
  uint32_t wait_us = 0;
};

// As in the wire's DraftReply.Outcome.
enum class DraftOutcome { kUnspecified = 0, kDrafted = 1, kGap = 2, kUnknown = 3, kLate = 4 };

struct DraftAnswer {
  uint64_t sequence = 0;
  int64_t base_len = 0;
  DraftOutcome outcome = DraftOutcome::kUnspecified;
  std::vector<int32_t> tokens;  // [block_size - 1, top_k]
  std::vector<float> log_probs;
};

struct DraftReply {
  uint64_t batch = 0;
  std::vector<DraftAnswer> answers;
  float draft_us = 0;
};

struct DrafterUp {
  uint64_t connection = 0;
  DrafterInfo info;
};
struct DrafterReplied {
  uint64_t connection = 0;
  DraftReply reply;
};
struct DrafterDown {
  uint64_t connection = 0;
  absl::Status status;
};

class DrafterLink {
 public:
  virtual ~DrafterLink() = default;
  virtual void Send(uint64_t connection, DraftBatch batch) = 0;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_PEERS_H_
