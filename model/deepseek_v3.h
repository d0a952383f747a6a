// The forward pass of one rank of a DeepSeek-V3 model (Kimi K2 included), written once over
// kernels::Ops.
//
// Attention is computed in its absorbed form over the paged latent cache for chunks and trees
// alike, so that a row's result does not depend on how its context came about.
#ifndef COPPICE_MODEL_DEEPSEEK_V3_H_
#define COPPICE_MODEL_DEEPSEEK_V3_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops.h"
#include "model/config.h"
#include "model/weights.h"

namespace coppice {

struct DeepSeekV3Options {
  int max_rows = 0;  // of one Forward
  int page_size = 0;
  int64_t pages = 0;
  std::vector<int> taps;  // layers whose outputs are kept for FeatureWeights::fc, in its order
};

// Not thread-safe; every call is made by the thread of the rank.  Weights, cache and workspace are
// the rank's own.
class DeepSeekV3 {
 public:
  // `rope` (of all positions that will come) is copied.  `embedding` is host memory, bf16 [vocab,
  // hidden], and outlives the object, as do `ops`. `features` goes with options.taps.
  static absl::StatusOr<std::unique_ptr<DeepSeekV3>> Create(
      const ModelConfig& config, const DeepSeekV3Options& options, TargetWeights weights,
      std::optional<FeatureWeights> features, const HostRope& rope, const uint16_t* embedding,
      kernels::Ops& ops);

  // Called after each layer with the residual stream [rows, hidden]; may Download it.
  using Observer = std::function<void(int layer, kernels::Tensor hidden)>;

  // COLLECTIVE.  Runs all layers: writes the rows' latents, keeps the rows' final hidden states,
  // taps and routing until the next call.
  void Forward(const kernels::RowBatch& batch, const Observer& observer = nullptr);

  // Of the last Forward.  rows: i32 [n], n <= max_rows; out: f32 [n, vocab / ranks], this rank's
  // part of the logits.
  void Logits(kernels::Tensor rows, kernels::Tensor out);
  // COLLECTIVE.  The drafter's features hidden_norm(fc · taps) of rows of the last Forward.
  // rows: i32 [n], n <= max_rows; out: bf16 [n, hidden].
  void ProjectFeatures(kernels::Tensor rows, kernels::Tensor out);
  // The experts of the last Forward in mixture-of-experts layer `moe_layer` (0-based among those):
  // i32 and f32 [rows, num_experts_per_tok].
  kernels::Tensor ChosenExperts(int moe_layer) const;
  kernels::Tensor ExpertWeightsOf(int moe_layer) const;

  int moe_layers() const { return config_.num_hidden_layers - config_.first_k_dense_replace; }
  int64_t local_vocab() const { return weights_.lm_head->outputs(); }
  // All layers' latents, [layers * pages * page_size, latent_dim]; layer l begins at row l * pages
  // * page_size.
  kernels::Tensor all_latents() const { return latents_.view; }

 private:
  DeepSeekV3(const ModelConfig& config, const DeepSeekV3Options& options, TargetWeights weights,
             std::optional<FeatureWeights> features, const uint16_t* embedding, kernels::Ops& ops);
  absl::Status Allocate(const HostRope& rope);

  void Attention(const TargetLayerWeights& w, int layer, const kernels::RowBatch& batch,
                 kernels::Tensor hidden);
  void DenseMlp(const TargetLayerWeights& w, kernels::Tensor hidden);
  void MoeMlp(const TargetLayerWeights& w, int layer, kernels::Tensor hidden);

  const ModelConfig config_;
  const DeepSeekV3Options options_;
  const TargetWeights weights_;
  const std::optional<FeatureWeights> features_;
  const uint16_t* const embedding_;
  kernels::Ops& ops_;
  kernels::MlaShape mla_;
  kernels::RouterShape router_;

  DeviceRope rope_;
  DeviceTensor latents_;
  // Workspace, [max_rows, …].
  DeviceTensor hidden_;    // the residual stream
  DeviceTensor normed_;    // [hidden]
  DeviceTensor qkv_a_;     // [q_lora + kv_lora + rope]
  DeviceTensor q_a_;       // [q_lora]
  DeviceTensor q_;         // [heads * (nope + rope)]
  DeviceTensor q_latent_;  // [heads * (kv_lora + rope)]
  DeviceTensor o_latent_;  // [heads * kv_lora]
  DeviceTensor o_;         // [heads * v]
  DeviceTensor gate_up_;   // [2 * slice of the dense intermediate]
  DeviceTensor mlp_;       // [slice of the dense intermediate]
  DeviceTensor chosen_;    // i32 [moe layers * max_rows, top_k]
  DeviceTensor routing_;   // f32, likewise
  DeviceTensor taps_;      // [taps * hidden]
  DeviceTensor gathered_taps_;
  DeviceTensor feature_part_;  // [hidden / ranks]
  DeviceTensor feature_;       // [hidden]
  int rows_ = 0;               // of the last Forward
};

}  // namespace coppice

#endif  // COPPICE_MODEL_DEEPSEEK_V3_H_
