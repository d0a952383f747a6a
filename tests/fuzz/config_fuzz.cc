// A config.json of any bytes: refused with a status, or its values can be computed with.
#include <cmath>

#include "model/config.h"
#include "model/test_files.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {

std::vector<std::string> FuzzSeeds() {
  const std::string text =
      R"("hidden_act":"silu","attention_bias":false,"scoring_func":"sigmoid","vocab_size":4096,)"
      R"("hidden_size":256,"num_hidden_layers":4,"max_position_embeddings":4096,"rms_norm_eps":1e-05,)"
      R"("first_k_dense_replace":1,"intermediate_size":512,"moe_intermediate_size":64,)"
      R"("n_routed_experts":16,"num_experts_per_tok":4,"n_shared_experts":1,"n_group":1,"topk_group":1,)"
      R"("norm_topk_prob":true,"routed_scaling_factor":2.5,"num_attention_heads":8,"q_lora_rank":128,)"
      R"("kv_lora_rank":512,"qk_nope_head_dim":32,"qk_rope_head_dim":64,"v_head_dim":32,)"
      R"("rope_theta":50000.0,"rope_scaling":{"type":"yarn","factor":4.0,)"
      R"("original_max_position_embeddings":1024,"beta_fast":32,"beta_slow":1,"mscale":1,)"
      R"("mscale_all_dim":1},"eos_token_id":[1,2],"quantization_config":{)"
      R"("quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"group_0":)"
      R"({"weights":{"num_bits":4,"type":"int","symmetric":true,"group_size":32}}}})";
  return {
      R"({"model_type":"kimi_k25","text_config":{)" + text + "}}",
      R"({"model_type":"kimi_k2",)" + text + "}",
      R"({"architectures":["DFlashDraftModel"],"model_type":"qwen3","hidden_size":256,"intermediate_size":768,)"
      R"("num_hidden_layers":3,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":32,"vocab_size":4096,)"
      R"("rms_norm_eps":1e-6,"max_position_embeddings":4096,"rope_parameters":{"rope_type":"deepseek_yarn",)"
      R"("rope_theta":50000.0,"factor":4.0,"original_max_position_embeddings":1024},"layer_types":["full_attention",)"
      R"("full_attention","full_attention"],"block_size":8,"num_target_layers":4,)"
      R"("dflash_config":{"target_layer_ids":[0,1,2],"mask_token_id":4094}})",
  };
}

namespace {

void CheckFrequencies(const std::vector<float>& frequencies, int dim) {
  FUZZ_CHECK(frequencies.size() == static_cast<size_t>(dim / 2));
  for (const float frequency : frequencies) FUZZ_CHECK(std::isfinite(frequency) && frequency >= 0);
}

}  // namespace
}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  static const TempDir dir;
  dir.Write("config.json", {reinterpret_cast<const char*>(data), size});
  const auto model = LoadModelConfig(dir.path());
  if (model.ok()) {
    FUZZ_CHECK(std::isfinite(model->softmax_scale()) && model->softmax_scale() > 0);
    FUZZ_CHECK(std::isfinite(model->rope_amplitude()) && model->rope_amplitude() > 0);
    FUZZ_CHECK(!model->eos_token_ids.empty());
    FUZZ_CHECK(model->num_experts_per_tok <= model->n_routed_experts);
    CheckFrequencies(model->InvFreq(), model->qk_rope_head_dim);
  }
  const auto draft = LoadDraftConfig(dir.path());
  if (draft.ok()) {
    FUZZ_CHECK(std::isfinite(draft->attention_factor) && draft->attention_factor > 0);
    FUZZ_CHECK(draft->draft_len() >= 1 && draft->num_taps() >= 1);
    CheckFrequencies(draft->InvFreq(), draft->head_dim);
  }
  return 0;
}
