// The target: all tensor-parallel ranks of a DeepSeek-V3 model, its paged latent cache and the
// projected features that lie beside it.  Knows pages only as numbers: who owns which is the
// verifier's business.
//
// Not thread-safe: one thread (the verifier's step loop) calls it; ranks run on threads of its own.
#ifndef COPPICE_MODEL_TARGET_H_
#define COPPICE_MODEL_TARGET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/config.h"

namespace coppice {

struct TargetOptions {
  std::string model_dir;
  std::string drafter_dir;  // empty: no features are projected
  int tp = 1;               // divides kernels::kSegments and the model's heads
  int page_size = 64;       // tokens per page, 1 … 64
  int64_t pages = 0;        // page 0 included, which is a sink for padding and is never handed out
  int max_rows = 2048;      // of one Forward
  // Overrides ModelConfig::lora_norm_eps, which explains it.
  std::optional<double> lora_norm_eps = {};
  // Called while loading with (bytes done, bytes in all).
  std::function<void(int64_t, int64_t)> progress;
};

// One sequence's rows of a step.
struct SequenceRows {
  int64_t context_len = 0;           // committed tokens, all visible
  absl::Span<const int32_t> tokens;  // [n], n >= 1
  absl::Span<const int32_t>
      depths;  // [n] for a tree; empty: a causal chunk at context_len, +1, +2 …
  absl::Span<const uint64_t> ancestors;  // [n] for a tree (n <= 64); empty for a chunk
  absl::Span<const int32_t> page_table;  // covers context_len + n token slots
  absl::Span<const int32_t> logit_rows;  // indices into this sequence's rows
};

struct ForwardResult {
  int64_t vocab_size = 0;
  std::vector<float> logits;  // [all logit_rows in order, vocab_size]
  // Tokens routed to each expert in this step: [moe layers, experts].
  std::vector<uint32_t> expert_counts;
};

// After a walk: what to keep.
struct CommitPlan {
  // Cache rows to move within the sequence's pages (physical token slots: page * page_size +
  // offset).
  struct Move {
    int32_t src = 0;
    int32_t dst = 0;
  };
  std::vector<Move> moves;
  // Rows of the last Forward (indices over all its rows) whose features are projected, and the
  // physical token slot they are kept at.
  struct Feature {
    int32_t row = 0;
    int32_t slot = 0;
  };
  std::vector<Feature> features;
};

class Target {
 public:
  virtual ~Target() = default;

  // Reads and checks every tensor before anything runs; errors name file and tensor.
  static absl::StatusOr<std::unique_ptr<Target>> Load(const TargetOptions& options);

  virtual const ModelConfig& config() const = 0;
  virtual int tp() const = 0;
  virtual bool has_features() const = 0;
  // Hash over the config and the tensors that fix what the model computes.
  virtual uint64_t fingerprint() const = 0;
  // Hash over the embedding and lm_head, which the drafter must share.
  virtual uint64_t embedding_fingerprint() const = 0;
  // Hash over the drafter's fc, hidden_norm and taps; 0 without a drafter directory.
  virtual uint64_t drafter_fingerprint() const = 0;

  // One forward over all rows: writes their latents at logical slots context_len + i and returns
  // the logits asked for.  INTERNAL, naming the sequence's index, if a logit is not finite.
  virtual absl::Status Forward(absl::Span<const SequenceRows> sequences, ForwardResult* result) = 0;
  // Applies the plan to the rows of the last Forward; features (bf16, [plan.features, hidden_size])
  // are also returned for streaming.
  virtual void Commit(const CommitPlan& plan, std::vector<uint16_t>* features) = 0;
  // Features kept at physical token slots, bf16 [slots, hidden_size].
  virtual void ReadFeatures(absl::Span<const int32_t> slots, std::vector<uint16_t>* features) = 0;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_TARGET_H_
