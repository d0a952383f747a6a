// The DFlash draft model: per-sequence context windows and one batched block forward.
//
// Not thread-safe: one thread (the drafter's draft loop) calls it.
#ifndef COPPICE_MODEL_DRAFTER_H_
#define COPPICE_MODEL_DRAFTER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/config.h"

namespace coppice {

struct DrafterOptions {
  std::string drafter_dir;
  std::string target_dir;  // its embedding and lm_head are the drafter's
  int tp = 1;
  int slots = 64;     // sequences at once
  int window = 4096;  // context positions kept per sequence
};

// `count` projected feature rows of one sequence, for positions first, first + 1, …
struct ContextRows {
  int slot = 0;
  int64_t first = 0;
  absl::Span<const uint16_t> features;  // bf16 [count, hidden_size]
};

struct DraftBlock {
  int slot = 0;
  int32_t anchor = 0;    // the pending token
  int64_t base_len = 0;  // its position; context covers [context_begin, base_len)
  int64_t context_begin = 0;
};

// For blocks × (block_size - 1) positions, the k likeliest tokens, best first.
struct DraftCandidates {
  int positions = 0;  // block_size - 1
  int k = 0;
  std::vector<int32_t> tokens;   // [blocks, positions, k]
  std::vector<float> log_probs;  // the same; log-softmax at T = 1
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  static absl::StatusOr<std::unique_ptr<Drafter>> Load(const DrafterOptions& options);

  virtual const DraftConfig& config() const = 0;
  virtual uint64_t drafter_fingerprint() const = 0;    // equals the Target's of the same pair
  virtual uint64_t embedding_fingerprint() const = 0;  // equals the Target's of the same pair
  // Rows at positions that the target does not have (max_position_embeddings and beyond) are
  // ignored.
  virtual void AppendContext(absl::Span<const ContextRows> rows) = 0;
  // k is cut to 64 and to the vocabulary.  A block whose anchor stands where the target has no
  // position gets candidates of log-probability minus infinity, of which no tree is built.
  virtual void Draft(absl::Span<const DraftBlock> blocks, int k, DraftCandidates* out) = 0;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_DRAFTER_H_
