#include "model/dflash.h"

#include <utility>
#include <vector>

namespace coppice {

using kernels::Tensor;

absl::StatusOr<std::unique_ptr<DFlash>> DFlash::Create(const DraftConfig& config,
                                                       const DFlashOptions& options,
                                                       DraftWeights weights, const HostRope& rope,
                                                       const uint16_t* embedding,
                                                       kernels::Ops& ops) {
  std::unique_ptr<DFlash> model(new DFlash(config, options, std::move(weights), embedding, ops));
  const absl::Status status = model->Allocate(rope);
  if (!status.ok()) return status;
  return model;
}

DFlash::DFlash(const DraftConfig& config, const DFlashOptions& options, DraftWeights weights,
               const uint16_t* embedding, kernels::Ops& ops)
    : config_(config),
      options_(options),
      weights_(std::move(weights)),
      embedding_(embedding),
      ops_(ops),
      shape_{.heads = config.num_attention_heads / ops.ranks(),
             .kv_heads = DraftKvHeads(config, ops.rank(), ops.ranks()).count,
             .head_dim = config.head_dim,
             .rms_norm_eps = static_cast<float>(config.rms_norm_eps)} {}

absl::Status DFlash::Allocate(const HostRope& rope) {
  absl::StatusOr<DeviceRope> device_rope = UploadRope(ops_, rope);
  if (!device_rope.ok()) return device_rope.status();
  rope_ = *std::move(device_rope);

  using kernels::DType;
  const DType act = ops_.activation_dtype();
  const int64_t hidden = config_.hidden_size;
  const int64_t layers = config_.num_hidden_layers;
  const int64_t kv_dim = static_cast<int64_t>(shape_.kv_heads) * config_.head_dim;
  const int64_t q_dim = static_cast<int64_t>(shape_.heads) * config_.head_dim;
  const int64_t rows = static_cast<int64_t>(options_.max_blocks) * config_.block_size;
  const int64_t slice = config_.intermediate_size / ops_.ranks();
  const int64_t entries = options_.slots * layers * options_.window;
  struct Request {
    DeviceTensor* tensor;
    DType dtype;
    int64_t rows;
    int64_t cols;
  };
  const Request requests[] = {
      {&keys_, DType::kF32, entries, kv_dim},
      {&values_, DType::kF32, entries, kv_dim},
      {&context_, act, options_.max_context, hidden},
      {&context_kv_, act, options_.max_context, layers * 2 * kv_dim},
      {&hidden_, act, rows, hidden},
      {&normed_, act, rows, hidden},
      {&qkv_, act, rows, q_dim + 2 * kv_dim},
      {&attended_, act, rows, q_dim},
      {&gate_up_, act, rows, 2 * slice},
      {&mlp_, act, rows, slice},
      {&logits_, DType::kF32, rows, weights_.lm_head->outputs()},
  };
  for (const Request& request : requests) {
    absl::StatusOr<DeviceTensor> tensor =
        AllocateTensor(ops_, request.dtype, request.rows, request.cols);
    if (!tensor.ok()) return tensor.status();
    *request.tensor = *std::move(tensor);
  }
  cache_ = {.keys = keys_.view,
            .values = values_.view,
            .slots = options_.slots,
            .layers = config_.num_hidden_layers,
            .window = options_.window};
  return absl::OkStatus();
}

void DFlash::AppendContext(Tensor features, Tensor slot, Tensor position) {
  const Tensor context = context_.view.Rows(0, features.rows);
  const Tensor kv = context_kv_.view.Rows(0, features.rows);
  std::vector<Tensor> k_norm;
  for (const DraftLayerWeights& w : weights_.layers) k_norm.push_back(w.k_norm.view);
  ops_.FromBf16(features, context);
  ops_.Linear(context, *weights_.context_kv, kv);
  ops_.DraftWriteContext(kv, k_norm, rope_.table(), slot, position, shape_, cache_);
}

void DFlash::Forward(const kernels::DraftBatch& batch) {
  rows_ = batch.blocks * batch.block_size;
  const Tensor hidden = hidden_.view.Rows(0, rows_);
  const Tensor normed = normed_.view.Rows(0, rows_);
  const Tensor qkv = qkv_.view.Rows(0, rows_);
  const Tensor attended = attended_.view.Rows(0, rows_);
  const Tensor gate_up = gate_up_.view.Rows(0, rows_);
  const Tensor mlp = mlp_.view.Rows(0, rows_);
  ops_.Embed(batch.token, embedding_, hidden);
  for (int l = 0; l < config_.num_hidden_layers; ++l) {
    const DraftLayerWeights& w = weights_.layers[l];
    ops_.RmsNorm(hidden, w.input_norm.view, shape_.rms_norm_eps, normed);
    ops_.Linear(normed, *w.qkv, qkv);
    // Every mask sees its whole block: LoadDraftConfig admits no causal layers.
    ops_.DraftAttention(qkv, w.q_norm.view, w.k_norm.view, rope_.table(), batch, l,
                        /*causal=*/false, shape_, cache_, attended);
    ops_.RowLinear(attended, w.o, hidden);
    ops_.RmsNorm(hidden, w.post_norm.view, shape_.rms_norm_eps, normed);
    ops_.Linear(normed, *w.mlp.gate_up, gate_up);
    ops_.SwiGlu(gate_up, mlp);
    ops_.RowLinear(mlp, w.mlp.down, hidden);
  }
}

void DFlash::Logits(Tensor rows, Tensor out) {
  const Tensor gathered = normed_.view.Rows(0, rows.rows);
  const Tensor part = logits_.view.Rows(0, rows.rows);
  ops_.GatherRows(hidden_.view.Rows(0, rows_), rows, gathered);
  ops_.RmsNorm(gathered, weights_.final_norm.view, shape_.rms_norm_eps, gathered);
  ops_.Linear(gathered, *weights_.lm_head, part);
  ops_.AllGatherColumns(part, out);
}

}  // namespace coppice
