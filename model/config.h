// What config.json says about a target (Kimi K2 / DeepSeek-V3 text model) or a DFlash drafter.
//
// Every value comes from the files.  A key that is missing, has the wrong type, is out of range or
// asks for something Coppice does not compute is refused with a sentence that names the key, the
// file and what was expected.
#ifndef COPPICE_MODEL_CONFIG_H_
#define COPPICE_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace coppice {

// Rotary position embedding with (static) YaRN scaling, arXiv 2309.00071.  factor == 1 is plain
// RoPE.
struct RopeConfig {
  double theta = 0;
  double factor = 1;
  int original_max_position_embeddings = 0;  // 0 where factor == 1
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
  std::optional<double> attention_factor;

  // The dim/2 angular frequencies: position p turns pair i by p * InvFreq(dim)[i] radians.
  // `dim` is even.  Pairing (interleaved or half-split) is the model's affair, not the table's.
  std::vector<float> InvFreq(int dim) const;

  // What cos and sin are multiplied by: `attention_factor` where the file has one, else
  // YarnMscale(factor, mscale) / YarnMscale(factor, mscale_all_dim).
  double amplitude() const;
};

// YaRN's temperature 0.1 * mscale * ln(factor) + 1; 1 where factor <= 1.
double YarnMscale(double factor, double mscale);

struct ModelConfig {
  std::string model_type;     // "deepseek_v3", "kimi_k2" or "kimi_k25"
  std::string tensor_prefix;  // "" or, inside a multimodal wrapper, "language_model."

  int vocab_size = 0;
  int hidden_size = 0;
  int num_hidden_layers = 0;
  int max_position_embeddings = 0;
  double rms_norm_eps = 0;
  // Epsilon of q_a_layernorm and kv_a_layernorm.  No release has a key for it and the reference
  // implementations disagree: vLLM and SGLang pass rms_norm_eps, transformers and the checkpoints'
  // own code leave it at 1e-6.  LoadModelConfig sets rms_norm_eps; TargetOptions can say otherwise.
  double lora_norm_eps = 0;

  // Feed-forward: layers [0, first_k_dense_replace) are dense, the others mixture of experts.
  int first_k_dense_replace = 0;
  int intermediate_size = 0;
  int moe_intermediate_size = 0;
  int n_routed_experts = 0;
  int num_experts_per_tok = 0;
  int n_shared_experts = 0;
  int n_group = 0;
  int topk_group = 0;
  bool norm_topk_prob = false;
  double routed_scaling_factor = 0;

  // Multi-head latent attention.
  int num_attention_heads = 0;
  int q_lora_rank = 0;
  int kv_lora_rank = 0;
  int qk_nope_head_dim = 0;
  int qk_rope_head_dim = 0;
  int v_head_dim = 0;
  RopeConfig rope;

  // What quantization_config announces: 4 (INT4 pack-quantized experts), 8 (FP8 E4M3 in blocks of
  // 128 x 128) or 0 (neither).  What is loaded is decided per tensor by what is there.  The group
  // size, inputs per scale, is 0 where nothing is packed.
  int expert_bits = 0;
  int expert_group_size = 0;

  // Ids that end a generation: of config.json, generation_config.json, and what
  // tokenizer_config.json names [EOS] and <|im_end|>.  Ascending, without repeats, never empty.
  std::vector<int32_t> eos_token_ids;
  int32_t bos_token_id = -1;  // -1: none
  int32_t pad_token_id = -1;  // -1: none

  int qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  // Values cached per token and layer: the normalised latent, then the rotated shared key.
  int latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  bool is_moe_layer(int layer) const { return layer >= first_k_dense_replace; }

  // qk_head_dim^-1/2 times YarnMscale(factor, mscale_all_dim)^2, at every position.
  double softmax_scale() const;
  double rope_amplitude() const { return rope.amplitude(); }
  // qk_rope_head_dim / 2 frequencies, for interleaved pairs (x[2i], x[2i+1]).
  std::vector<float> InvFreq() const;
};

// Reads DIR/config.json and, where they exist, DIR/generation_config.json and
// DIR/tokenizer_config.json.  Accepts the flat form and the one with `text_config`, `rope_scaling`
// beside `rope_theta` and transformers 5's `rope_parameters`.
// Errors: NOT_FOUND (no config.json), INVALID_ARGUMENT (bad JSON or value), UNIMPLEMENTED (a model
// or an option that Coppice does not compute).
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);

// A DFlash drafter (z-lab's format): Qwen3-style layers with per-head q/k norms, fed by projected
// hidden states of the target.
struct DraftConfig {
  int vocab_size = 0;
  int hidden_size = 0;
  int num_hidden_layers = 0;
  int intermediate_size = 0;
  int num_attention_heads = 0;
  int num_key_value_heads = 0;
  int head_dim = 0;
  int max_position_embeddings = 0;
  double rms_norm_eps = 0;
  RopeConfig rope;
  // rope.amplitude(), repeated here because published drafters disagree on it: whoever overrides it
  // does so here.
  double attention_factor = 1;
  std::vector<std::string> layer_types;  // num_hidden_layers times "full_attention"

  int block_size = 0;  // rows of one draft: the anchor and block_size - 1 masks
  int32_t mask_token_id = 0;
  int num_target_layers = 0;
  // 0-based target layers whose outputs are concatenated, in this order, as fc's input.
  std::vector<int> target_layer_ids;

  int draft_len() const { return block_size - 1; }
  int num_taps() const { return static_cast<int>(target_layer_ids.size()); }
  double softmax_scale() const;  // head_dim^-1/2
  std::vector<float> InvFreq()
      const;  // head_dim / 2 frequencies, for half-split pairs (x[i], x[i + dim/2])
};

// Reads DIR/config.json of a drafter.  `target_layer_ids`, `mask_token_id`, `block_size` and
// `num_target_layers` may stand at the top or in `dflash_config`.  Errors as LoadModelConfig.
absl::StatusOr<DraftConfig> LoadDraftConfig(const std::string& dir);

// Whether the drafter was made for the target: hidden size, vocabulary, layer count, mask id.
// INVALID_ARGUMENT names both values and `draft_dir`.
absl::Status CheckDraftMatchesModel(const DraftConfig& draft, const ModelConfig& model,
                                    const std::string& draft_dir);

}  // namespace coppice

#endif  // COPPICE_MODEL_CONFIG_H_
