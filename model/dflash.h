// The forward pass of one rank of a DFlash drafter, written once over kernels::Ops.
//
// Every layer attends to two kinds of keys and values: those of the context, made once per token
// from the target's projected features, and those of the block itself (the anchor and its masks),
// which live for one forward only.
#ifndef COPPICE_MODEL_DFLASH_H_
#define COPPICE_MODEL_DFLASH_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/ops.h"
#include "model/config.h"
#include "model/weights.h"

namespace coppice {

struct DFlashOptions {
  int slots = 0;
  int window = 0;       // context positions kept per slot
  int max_blocks = 0;   // of one Forward
  int max_context = 0;  // rows of one AppendContext
};

// Not thread-safe; every call is made by the thread of the rank.
class DFlash {
 public:
  // `rope` (of all positions that will come) is copied.  `embedding` is host memory, bf16 [vocab,
  // hidden], and outlives the object, as do `ops`.
  static absl::StatusOr<std::unique_ptr<DFlash>> Create(const DraftConfig& config,
                                                        const DFlashOptions& options,
                                                        DraftWeights weights, const HostRope& rope,
                                                        const uint16_t* embedding,
                                                        kernels::Ops& ops);

  // Makes context keys and values of `features` (bf16 [n, hidden], n <= max_context) for slot[i] at
  // position[i] (i32 [n]).  No two rows may share a ring entry.
  void AppendContext(kernels::Tensor features, kernels::Tensor slot, kernels::Tensor position);

  // COLLECTIVE.  Runs the blocks and keeps their final hidden states until the next call.
  void Forward(const kernels::DraftBatch& batch);
  // COLLECTIVE.  Of the last Forward.  rows: i32 [n], n <= max_blocks * block_size; out: f32 [n,
  // vocab].
  void Logits(kernels::Tensor rows, kernels::Tensor out);

 private:
  DFlash(const DraftConfig& config, const DFlashOptions& options, DraftWeights weights,
         const uint16_t* embedding, kernels::Ops& ops);
  absl::Status Allocate(const HostRope& rope);

  const DraftConfig config_;
  const DFlashOptions options_;
  const DraftWeights weights_;
  const uint16_t* const embedding_;
  kernels::Ops& ops_;
  kernels::GqaShape shape_;

  DeviceRope rope_;
  DeviceTensor keys_;
  DeviceTensor values_;
  kernels::DraftCache cache_;
  DeviceTensor context_;     // [max_context, hidden]
  DeviceTensor context_kv_;  // [max_context, layers * 2 * kv_heads * head_dim]
  // Workspace, [max_blocks * block_size, …].
  DeviceTensor hidden_;
  DeviceTensor normed_;
  DeviceTensor qkv_;
  DeviceTensor attended_;
  DeviceTensor gate_up_;
  DeviceTensor mlp_;
  DeviceTensor logits_;  // f32 [max_blocks * block_size, vocab / ranks]
  int rows_ = 0;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_DFLASH_H_
