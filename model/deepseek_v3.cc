#include "model/deepseek_v3.h"

#include <utility>

namespace coppice {

using kernels::Tensor;

absl::StatusOr<std::unique_ptr<DeepSeekV3>> DeepSeekV3::Create(
    const ModelConfig& config, const DeepSeekV3Options& options, TargetWeights weights,
    std::optional<FeatureWeights> features, const HostRope& rope, const uint16_t* embedding,
    kernels::Ops& ops) {
  std::unique_ptr<DeepSeekV3> model(
      new DeepSeekV3(config, options, std::move(weights), std::move(features), embedding, ops));
  const absl::Status status = model->Allocate(rope);
  if (!status.ok()) return status;
  return model;
}

DeepSeekV3::DeepSeekV3(const ModelConfig& config, const DeepSeekV3Options& options,
                       TargetWeights weights, std::optional<FeatureWeights> features,
                       const uint16_t* embedding, kernels::Ops& ops)
    : config_(config),
      options_(options),
      weights_(std::move(weights)),
      features_(std::move(features)),
      embedding_(embedding),
      ops_(ops),
      mla_{.heads = config.num_attention_heads / ops.ranks(),
           .kv_lora_rank = config.kv_lora_rank,
           .qk_nope_head_dim = config.qk_nope_head_dim,
           .qk_rope_head_dim = config.qk_rope_head_dim,
           .v_head_dim = config.v_head_dim,
           .softmax_scale = static_cast<float>(config.softmax_scale())},
      router_{.experts = config.n_routed_experts,
              .top_k = config.num_experts_per_tok,
              .n_group = config.n_group,
              .topk_group = config.topk_group,
              .norm_topk_prob = config.norm_topk_prob,
              .routed_scaling_factor = static_cast<float>(config.routed_scaling_factor)} {}

absl::Status DeepSeekV3::Allocate(const HostRope& rope) {
  absl::StatusOr<DeviceRope> device_rope = UploadRope(ops_, rope);
  if (!device_rope.ok()) return device_rope.status();
  rope_ = *std::move(device_rope);

  const kernels::DType act = ops_.activation_dtype();
  const int64_t rows = options_.max_rows;
  const int64_t hidden = config_.hidden_size;
  const int64_t heads = mla_.heads;
  const int64_t taps = static_cast<int64_t>(options_.taps.size());
  const int64_t slice = config_.intermediate_size / ops_.ranks();
  struct Request {
    DeviceTensor* tensor;
    kernels::DType dtype;
    int64_t rows;
    int64_t cols;
  };
  std::vector<Request> requests = {
      {&latents_, act, config_.num_hidden_layers * options_.pages * options_.page_size,
       config_.latent_dim()},
      {&hidden_, act, rows, hidden},
      {&normed_, act, rows, hidden},
      {&qkv_a_, act, rows, config_.q_lora_rank + config_.latent_dim()},
      {&q_a_, act, rows, config_.q_lora_rank},
      {&q_, act, rows, heads * config_.qk_head_dim()},
      {&q_latent_, act, rows, heads * config_.latent_dim()},
      {&o_latent_, act, rows, heads * config_.kv_lora_rank},
      {&o_, act, rows, heads * config_.v_head_dim},
  };
  if (config_.first_k_dense_replace > 0) {
    requests.push_back({&gate_up_, act, rows, 2 * slice});
    requests.push_back({&mlp_, act, rows, slice});
  }
  if (moe_layers() > 0) {
    requests.push_back({&chosen_, kernels::DType::kI32, moe_layers() * rows, router_.top_k});
    requests.push_back({&routing_, kernels::DType::kF32, moe_layers() * rows, router_.top_k});
  }
  if (features_.has_value()) {
    requests.push_back({&taps_, act, rows, taps * hidden});
    requests.push_back({&gathered_taps_, act, rows, taps * hidden});
    requests.push_back({&feature_part_, act, rows, hidden / ops_.ranks()});
    requests.push_back({&feature_, act, rows, hidden});
  }
  for (const Request& request : requests) {
    absl::StatusOr<DeviceTensor> tensor =
        AllocateTensor(ops_, request.dtype, request.rows, request.cols);
    if (!tensor.ok()) return tensor.status();
    *request.tensor = *std::move(tensor);
  }
  return absl::OkStatus();
}

void DeepSeekV3::Forward(const kernels::RowBatch& batch, const Observer& observer) {
  rows_ = batch.rows;
  const Tensor hidden = hidden_.view.Rows(0, rows_);
  ops_.Embed(batch.token, embedding_, hidden);
  for (int l = 0; l < config_.num_hidden_layers; ++l) {
    const TargetLayerWeights& w = weights_.layers[l];
    Attention(w, l, batch, hidden);
    if (config_.is_moe_layer(l)) {
      MoeMlp(w, l, hidden);
    } else {
      DenseMlp(w, hidden);
    }
    for (size_t i = 0; features_.has_value() && i < options_.taps.size(); ++i) {
      if (options_.taps[i] != l) continue;
      ops_.Copy(hidden, taps_.view.Rows(0, rows_).Cols(
                            static_cast<int64_t>(i) * config_.hidden_size, config_.hidden_size));
    }
    if (observer) observer(l, hidden);
  }
}

void DeepSeekV3::Attention(const TargetLayerWeights& w, int layer, const kernels::RowBatch& batch,
                           Tensor hidden) {
  const Tensor normed = normed_.view.Rows(0, rows_);
  const Tensor qkv_a = qkv_a_.view.Rows(0, rows_);
  const Tensor q_a = q_a_.view.Rows(0, rows_);
  const Tensor q = q_.view.Rows(0, rows_);
  const Tensor q_latent = q_latent_.view.Rows(0, rows_);
  const Tensor o_latent = o_latent_.view.Rows(0, rows_);
  const Tensor o = o_.view.Rows(0, rows_);
  const int64_t slots = options_.pages * options_.page_size;
  const kernels::LatentCache cache{.rows = latents_.view.Rows(layer * slots, slots),
                                   .page_size = options_.page_size};
  const float lora_eps = static_cast<float>(config_.lora_norm_eps);

  ops_.RmsNorm(hidden, w.input_norm.view, static_cast<float>(config_.rms_norm_eps), normed);
  ops_.Linear(normed, *w.qkv_a, qkv_a);
  ops_.RmsNorm(qkv_a.Cols(0, config_.q_lora_rank), w.q_a_norm.view, lora_eps, q_a);
  ops_.Linear(q_a, *w.q_b, q);
  ops_.MlaWriteCache(qkv_a.Cols(config_.q_lora_rank, config_.latent_dim()), w.kv_a_norm.view,
                     lora_eps, rope_.table(), batch, mla_, cache);
  ops_.MlaAbsorbQuery(q, w.w_uk, rope_.table(), batch, mla_, q_latent);
  ops_.MlaAttention(q_latent, batch, mla_, cache, o_latent);
  ops_.HeadLinear(o_latent, w.w_uv, o);
  ops_.RowLinear(o, w.o, hidden);
}

void DeepSeekV3::DenseMlp(const TargetLayerWeights& w, Tensor hidden) {
  const Tensor normed = normed_.view.Rows(0, rows_);
  const Tensor gate_up = gate_up_.view.Rows(0, rows_);
  const Tensor mlp = mlp_.view.Rows(0, rows_);
  ops_.RmsNorm(hidden, w.post_norm.view, static_cast<float>(config_.rms_norm_eps), normed);
  ops_.Linear(normed, *w.dense->gate_up, gate_up);
  ops_.SwiGlu(gate_up, mlp);
  ops_.RowLinear(mlp, w.dense->down, hidden);
}

void DeepSeekV3::MoeMlp(const TargetLayerWeights& w, int layer, Tensor hidden) {
  const Tensor normed = normed_.view.Rows(0, rows_);
  const Tensor chosen = ChosenExperts(layer - config_.first_k_dense_replace);
  const Tensor weights = ExpertWeightsOf(layer - config_.first_k_dense_replace);
  ops_.RmsNorm(hidden, w.post_norm.view, static_cast<float>(config_.rms_norm_eps), normed);
  ops_.Route(normed, *w.router, w.router_bias.view, router_, chosen, weights);
  ops_.Moe(normed, chosen, weights, w.experts, hidden);
}

void DeepSeekV3::Logits(Tensor rows, Tensor out) {
  const Tensor gathered = normed_.view.Rows(0, rows.rows);
  ops_.GatherRows(hidden_.view.Rows(0, rows_), rows, gathered);
  ops_.RmsNorm(gathered, weights_.final_norm.view, static_cast<float>(config_.rms_norm_eps),
               gathered);
  ops_.Linear(gathered, *weights_.lm_head, out);
}

void DeepSeekV3::ProjectFeatures(Tensor rows, Tensor out) {
  const int64_t count = rows.rows;
  const Tensor gathered = gathered_taps_.view.Rows(0, count);
  const Tensor part = feature_part_.view.Rows(0, count);
  const Tensor feature = feature_.view.Rows(0, count);
  ops_.GatherRows(taps_.view.Rows(0, rows_), rows, gathered);
  ops_.Linear(gathered, *features_->fc, part);
  ops_.AllGatherColumns(part, feature);
  ops_.RmsNorm(feature, features_->hidden_norm.view, static_cast<float>(features_->rms_norm_eps),
               feature);
  ops_.ToBf16(feature, out);
}

Tensor DeepSeekV3::ChosenExperts(int moe_layer) const {
  return chosen_.view.Rows(static_cast<int64_t>(moe_layer) * options_.max_rows, rows_);
}

Tensor DeepSeekV3::ExpertWeightsOf(int moe_layer) const {
  return routing_.view.Rows(static_cast<int64_t>(moe_layer) * options_.max_rows, rows_);
}

}  // namespace coppice
