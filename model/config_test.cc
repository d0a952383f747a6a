#include "model/config.h"

#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/test_files.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Kimi K2.6's values.
json K26Text() {
  return json::parse(R"({
    "model_type": "kimi_k2", "hidden_act": "silu", "attention_bias": false, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "tie_word_embeddings": false, "ep_size": 1,
    "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05, "first_k_dense_replace": 1, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.827,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
                     "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839,
    "quantization_config": {
      "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": null,
      "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
        "actorder": null, "dynamic": false}}}}
  })");
}

json K26() {
  return {{"model_type", "kimi_k25"},
          {"architectures", {"KimiK25ForConditionalGeneration"}},
          {"eos_token_id", 163586},
          {"tie_word_embeddings", false},
          {"text_config", K26Text()}};
}

json Draft() {
  return json::parse(R"({
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 163840, "hidden_act": "silu", "attention_bias": false,
    "rms_norm_eps": 1e-05, "max_position_embeddings": 262144, "block_size": 8, "num_target_layers": 61,
    "rope_theta": 50000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
                     "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention",
                    "full_attention", "full_attention"],
    "use_sliding_window": false, "sliding_window": null,
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838}
  })");
}

absl::StatusOr<ModelConfig> Load(const json& config) {
  TempDir dir;
  dir.Write("config.json", config.dump());
  return LoadModelConfig(dir.path());
}

absl::StatusOr<DraftConfig> LoadDraft(const json& config) {
  TempDir dir;
  dir.Write("config.json", config.dump());
  return LoadDraftConfig(dir.path());
}

TEST(LoadModelConfig, ReadsTheWrappedForm) {
  const auto config = Load(K26());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model_type, "kimi_k25");
  EXPECT_EQ(config->tensor_prefix, "language_model.");
  EXPECT_EQ(config->vocab_size, 163840);
  EXPECT_EQ(config->hidden_size, 7168);
  EXPECT_EQ(config->num_hidden_layers, 61);
  EXPECT_EQ(config->max_position_embeddings, 262144);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_EQ(config->lora_norm_eps, 1e-5);
  EXPECT_EQ(config->first_k_dense_replace, 1);
  EXPECT_FALSE(config->is_moe_layer(0));
  EXPECT_TRUE(config->is_moe_layer(1));
  EXPECT_EQ(config->intermediate_size, 18432);
  EXPECT_EQ(config->moe_intermediate_size, 2048);
  EXPECT_EQ(config->n_routed_experts, 384);
  EXPECT_EQ(config->num_experts_per_tok, 8);
  EXPECT_EQ(config->n_shared_experts, 1);
  EXPECT_EQ(config->n_group, 1);
  EXPECT_EQ(config->topk_group, 1);
  EXPECT_TRUE(config->norm_topk_prob);
  EXPECT_EQ(config->routed_scaling_factor, 2.827);
  EXPECT_EQ(config->num_attention_heads, 64);
  EXPECT_EQ(config->q_lora_rank, 1536);
  EXPECT_EQ(config->kv_lora_rank, 512);
  EXPECT_EQ(config->qk_nope_head_dim, 128);
  EXPECT_EQ(config->qk_rope_head_dim, 64);
  EXPECT_EQ(config->qk_head_dim(), 192);
  EXPECT_EQ(config->latent_dim(), 576);
  EXPECT_EQ(config->v_head_dim, 128);
  EXPECT_EQ(config->rope.theta, 50000);
  EXPECT_EQ(config->rope.factor, 64);
  EXPECT_EQ(config->rope.beta_fast, 32);
  EXPECT_EQ(config->expert_bits, 4);
  EXPECT_EQ(config->expert_group_size, 32);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(163585, 163586));
  EXPECT_EQ(config->bos_token_id, 163584);
  EXPECT_EQ(config->pad_token_id, 163839);
}

TEST(LoadModelConfig, ReadsTheFlatForm) {
  json text = K26Text();
  text["model_type"] = "deepseek_v3";
  text.erase("quantization_config");
  text.erase("bos_token_id");
  const auto config = Load(text);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tensor_prefix, "");
  EXPECT_EQ(config->expert_bits, 0);
  EXPECT_EQ(config->expert_group_size, 0);
  EXPECT_EQ(config->bos_token_id, -1);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(163585));
}

TEST(LoadModelConfig, ReadsRopeParameters) {
  json config = K26();
  json& text = config["text_config"];
  text["rope_parameters"] = text["rope_scaling"];
  text["rope_parameters"].erase("type");
  text["rope_parameters"]["rope_type"] = "yarn";
  text["rope_parameters"]["rope_theta"] = 50000.0;
  text.erase("rope_scaling");
  text.erase("rope_theta");
  const auto loaded = Load(config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->rope.theta, 50000);
  EXPECT_EQ(loaded->rope.factor, 64);
}

TEST(LoadModelConfig, ReadsPlainRope) {
  for (const json& scaling : {json(nullptr), json{{"rope_type", "default"}}}) {
    json config = K26();
    config["text_config"]["rope_scaling"] = scaling;
    const auto loaded = Load(config);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->rope.factor, 1);
    EXPECT_NEAR(loaded->softmax_scale(), 0.07216878, 1e-8);
    EXPECT_EQ(loaded->rope_amplitude(), 1);
    EXPECT_FLOAT_EQ(loaded->InvFreq()[31], std::pow(50000.0, -62.0 / 64));
  }
}

TEST(LoadModelConfig, FindsQuantizationAtTheTopToo) {
  json config = K26();
  config["quantization_config"] = config["text_config"]["quantization_config"];
  config["text_config"].erase("quantization_config");
  const auto loaded = Load(config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->expert_bits, 4);
}

TEST(LoadModelConfig, ReadsFp8Blocks) {
  json text = K26Text();
  text["quantization_config"] = {{"quant_method", "fp8"},
                                 {"fmt", "e4m3"},
                                 {"activation_scheme", "dynamic"},
                                 {"weight_block_size", {128, 128}}};
  const auto loaded = Load(text);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->expert_bits, 8);
  EXPECT_EQ(loaded->expert_group_size, 0);
}

TEST(LoadModelConfig, CollectsEndOfSequenceIds) {
  TempDir dir;
  json config = K26();
  config.erase("eos_token_id");
  config["text_config"].erase("eos_token_id");
  dir.Write("config.json", config.dump());
  const absl::Status none = LoadModelConfig(dir.path()).status();
  EXPECT_THAT(std::string(none.message()),
              AllOf(HasSubstr("eos_token_id is missing"), HasSubstr("[EOS]")));

  dir.Write("generation_config.json", R"({"eos_token_id":[163593, 7],"max_length":262144})");
  EXPECT_THAT(LoadModelConfig(dir.path())->eos_token_ids, ElementsAre(7, 163593));
  dir.Write(
      "tokenizer_config.json",
      R"({"added_tokens_decoder":{"163585":{"content":"[EOS]"},"163586":{"content":"<|im_end|>"},)"
      R"("163587":{"content":"<|im_user|>"}}})");
  EXPECT_THAT(LoadModelConfig(dir.path())->eos_token_ids, ElementsAre(7, 163585, 163586, 163593));

  dir.Write("tokenizer_config.json", R"({"added_tokens_decoder":{"163840":{"content":"[EOS]"}}})");
  EXPECT_THAT(std::string(LoadModelConfig(dir.path()).status().message()),
              AllOf(HasSubstr("tokenizer_config.json"), HasSubstr("[EOS]"), HasSubstr("163840")));
  dir.Write("generation_config.json", R"({"eos_token_id":[163840]})");
  EXPECT_THAT(
      std::string(LoadModelConfig(dir.path()).status().message()),
      AllOf(HasSubstr("generation_config.json"), HasSubstr("eos_token_id"), HasSubstr("163839")));
  dir.Write("generation_config.json", "{");
  EXPECT_THAT(std::string(LoadModelConfig(dir.path()).status().message()),
              AllOf(HasSubstr("generation_config.json"), HasSubstr("not valid JSON")));
}

// Constants computed independently (arXiv 2309.00071's formulas in double precision).
TEST(Yarn, MatchesKnownFrequencies) {
  const struct {
    double factor, beta_fast, scale;
    std::vector<std::pair<int, double>> frequencies;
  } releases[] = {
      {32,
       1,
       0.13086080,
       {{0, 1},
        {1, 7.131110849e-1},
        {8, 6.687403050e-2},
        {9, 4.768861244e-2},
        {12, 1.729363340e-2},
        {14, 8.794286766e-3},
        {18, 2.274203757e-3},
        {19, 1.621759908e-3},
        {20, 3.614046774e-5},
        {31, 8.764412912e-7}}},
      {64,
       1,
       0.14467963,
       {{0, 1},
        {1, 7.131110849e-1},
        {8, 6.687403050e-2},
        {9, 4.768861244e-2},
        {12, 1.729363340e-2},
        {14, 8.794286766e-3},
        {18, 2.274203757e-3},
        {19, 1.621759908e-3},
        {20, 1.807023387e-5},
        {31, 4.382206456e-7}}},
      {64,
       32,
       0.14467963,
       {{0, 1},
        {1, 7.131110849e-1},
        {8, 6.687403050e-2},
        {9, 4.377665595e-2},
        {12, 1.161915994e-2},
        {14, 4.465848749e-3},
        {18, 4.086459875e-4},
        {19, 1.583749910e-4},
        {20, 1.807023387e-5},
        {31, 4.382206456e-7}}},
  };
  for (const auto& release : releases) {
    json text = K26Text();
    text["rope_scaling"]["factor"] = release.factor;
    text["rope_scaling"]["beta_fast"] = release.beta_fast;
    const auto config = Load(text);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_NEAR(config->softmax_scale(), release.scale, 1e-8);
    EXPECT_EQ(config->rope_amplitude(), 1);
    const std::vector<float> frequencies = config->InvFreq();
    ASSERT_EQ(frequencies.size(), 32u);
    for (const auto& [i, expected] : release.frequencies) {
      EXPECT_NEAR(frequencies[i] / expected, 1, 2e-7)
          << "factor " << release.factor << " pair " << i;
    }
  }
}

TEST(Yarn, AmplitudeFollowsTheFile) {
  RopeConfig rope;
  rope.factor = 64;
  EXPECT_NEAR(rope.amplitude(), 1.41588831, 1e-8);
  rope.mscale_all_dim = 1;
  EXPECT_EQ(rope.amplitude(), 1);
  rope.attention_factor = 1.25;
  EXPECT_EQ(rope.amplitude(), 1.25);
  EXPECT_EQ(YarnMscale(1, 1), 1);
  EXPECT_NEAR(YarnMscale(32, 1), 1.34657359, 1e-8);
}

struct BadKey {
  const char* pointer;  // JSON pointer into the configuration
  const char* value;    // JSON, or "" to erase it
  absl::StatusCode code;
  const char* message;
};

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

json Changed(json config, const BadKey& bad) {
  const json::json_pointer pointer(bad.pointer);
  if (*bad.value == '\0') {
    config[pointer.parent_pointer()].erase(pointer.back());
  } else {
    config[pointer] = json::parse(bad.value);
  }
  return config;
}

TEST(LoadModelConfig, NamesEveryBadKey) {
  const BadKey cases[] = {
      {"/model_type", "", kInvalid, "key model_type is missing"},
      {"/model_type", "3", kInvalid, "key model_type is 3; expected \"deepseek_v3\""},
      {"/model_type", "\"llama\"", kUnimplemented, "key model_type is \"llama\""},
      {"/text_config", "", kInvalid, "key text_config is missing"},
      {"/text_config", "[]", kInvalid, "key text_config is missing"},
      {"/text_config/model_type", "\"kimi_k3\"", kUnimplemented,
       "text_config.model_type is \"kimi_k3\""},
      {"/text_config/hidden_act", "\"gelu\"", kUnimplemented, "text_config.hidden_act is \"gelu\""},
      {"/text_config/attention_bias", "true", kUnimplemented, "text_config.attention_bias is true"},
      {"/text_config/attention_bias", "\"no\"", kInvalid,
       "text_config.attention_bias is \"no\"; expected false"},
      {"/text_config/scoring_func", "\"softmax\"", kUnimplemented,
       "text_config.scoring_func is \"softmax\""},
      {"/text_config/topk_method", "\"greedy\"", kUnimplemented, "text_config.topk_method"},
      {"/text_config/moe_layer_freq", "2", kUnimplemented, "text_config.moe_layer_freq is 2"},
      {"/text_config/rope_interleave", "false", kUnimplemented, "text_config.rope_interleave"},
      {"/text_config/tie_word_embeddings", "true", kUnimplemented,
       "text_config.tie_word_embeddings"},
      {"/tie_word_embeddings", "true", kUnimplemented, "key tie_word_embeddings"},
      {"/text_config/vocab_size", "0", kInvalid,
       "text_config.vocab_size is 0; expected a whole number from 1"},
      {"/text_config/hidden_size", "1e30", kInvalid, "text_config.hidden_size is 1e+30"},
      {"/text_config/hidden_size", "7168.5", kInvalid, "text_config.hidden_size is 7168.5"},
      {"/text_config/hidden_size", "18446744073709551615", kInvalid, "text_config.hidden_size"},
      {"/text_config/hidden_size", "null", kInvalid, "text_config.hidden_size is missing"},
      {"/text_config/hidden_size", "7170", kInvalid,
       "text_config.hidden_size is 7170; expected a multiple"},
      {"/text_config/num_hidden_layers", "-1", kInvalid, "text_config.num_hidden_layers is -1"},
      {"/text_config/max_position_embeddings", "0", kInvalid,
       "text_config.max_position_embeddings"},
      {"/text_config/rms_norm_eps", "0", kInvalid, "text_config.rms_norm_eps is 0"},
      {"/text_config/rms_norm_eps", "\"1e-5\"", kInvalid, "text_config.rms_norm_eps is \"1e-5\""},
      {"/text_config/first_k_dense_replace", "62", kInvalid,
       "text_config.first_k_dense_replace is 62"},
      {"/text_config/intermediate_size", "0", kInvalid, "text_config.intermediate_size"},
      {"/text_config/moe_intermediate_size", "33", kInvalid,
       "text_config.moe_intermediate_size is 33; expected a multiple"},
      {"/text_config/n_routed_experts", "0", kInvalid, "text_config.n_routed_experts"},
      {"/text_config/num_experts_per_tok", "385", kInvalid,
       "text_config.num_experts_per_tok is 385; expected at most 384"},
      {"/text_config/n_shared_experts", "0", kInvalid, "text_config.n_shared_experts"},
      {"/text_config/n_group", "5", kInvalid,
       "text_config.n_group is 5; expected a divisor of n_routed_experts"},
      {"/text_config/n_group", "384", kInvalid,
       "text_config.n_group is 384; expected groups of at least two"},
      {"/text_config/topk_group", "2", kInvalid,
       "text_config.topk_group is 2; expected at most n_group"},
      {"/text_config/norm_topk_prob", "1", kInvalid,
       "text_config.norm_topk_prob is 1; expected true or false"},
      {"/text_config/norm_topk_prob", "", kInvalid, "text_config.norm_topk_prob is missing"},
      {"/text_config/routed_scaling_factor", "-1", kInvalid, "text_config.routed_scaling_factor"},
      {"/text_config/num_attention_heads", "0", kInvalid, "text_config.num_attention_heads is 0"},
      {"/text_config/num_key_value_heads", "8", kInvalid,
       "text_config.num_key_value_heads is 8; expected a whole number from 64 to 64"},
      {"/text_config/q_lora_rank", "null", kInvalid, "text_config.q_lora_rank is missing"},
      {"/text_config/kv_lora_rank", "0", kInvalid, "text_config.kv_lora_rank"},
      {"/text_config/qk_nope_head_dim", "0", kInvalid, "text_config.qk_nope_head_dim"},
      {"/text_config/qk_rope_head_dim", "63", kInvalid,
       "text_config.qk_rope_head_dim is 63; expected an even number"},
      {"/text_config/v_head_dim", "[]", kInvalid, "text_config.v_head_dim is []"},
      {"/text_config/rope_theta", "", kInvalid, "text_config.rope_theta is missing"},
      {"/text_config/rope_theta", "1", kInvalid, "text_config.rope_theta is 1"},
      {"/text_config/rope_scaling", "7", kInvalid,
       "text_config.rope_scaling is 7; expected an object or null"},
      {"/text_config/rope_scaling/type", "", kInvalid, "text_config.rope_scaling.type is missing"},
      {"/text_config/rope_scaling/type", "\"linear\"", kUnimplemented,
       "text_config.rope_scaling.type is \"linear\""},
      {"/text_config/rope_scaling/rope_type", "\"default\"", kInvalid,
       "text_config.rope_scaling.type is \"yarn\"; expected what rope_type says"},
      {"/text_config/rope_scaling/rope_theta", "10000", kInvalid,
       "text_config.rope_theta is 50000.0; expected what rope_scaling.rope_theta says"},
      {"/text_config/rope_scaling/factor", "0.5", kInvalid,
       "text_config.rope_scaling.factor is 0.5"},
      {"/text_config/rope_scaling/factor", "", kInvalid,
       "text_config.rope_scaling.factor is missing"},
      {"/text_config/rope_scaling/original_max_position_embeddings", "", kInvalid,
       "original_max_position_embeddings is missing"},
      {"/text_config/rope_scaling/beta_fast", "0.5", kInvalid,
       "beta_fast is 0.5; expected at least beta_slow"},
      {"/text_config/rope_scaling/beta_slow", "", kInvalid, "beta_slow is missing"},
      {"/text_config/rope_scaling/mscale", "", kInvalid, "rope_scaling.mscale is missing"},
      {"/text_config/rope_scaling/mscale_all_dim", "-1", kInvalid, "mscale_all_dim is -1"},
      {"/text_config/rope_scaling/attention_factor", "0", kInvalid, "attention_factor is 0"},
      {"/text_config/rope_scaling/truncate", "false", kUnimplemented, "truncate is false"},
      {"/text_config/eos_token_id", "163840", kInvalid,
       "text_config.eos_token_id is 163840; expected a token id from 0 to 163839"},
      {"/eos_token_id", "[1, -1]", kInvalid, "key eos_token_id is [1,-1]"},
      {"/text_config/bos_token_id", "163840", kInvalid, "text_config.bos_token_id"},
      {"/text_config/pad_token_id", "\"x\"", kInvalid, "text_config.pad_token_id"},
      {"/text_config/quantization_config", "\"fp8\"", kInvalid, "quantization_config is \"fp8\""},
      {"/text_config/quantization_config/quant_method", "\"gptq\"", kUnimplemented,
       "quantization_config.quant_method is \"gptq\""},
      {"/text_config/quantization_config", R"({"quant_method": "fp8"})", kInvalid,
       "quantization_config.weight_block_size is missing; expected [128,128]"},
      {"/text_config/quantization_config",
       R"({"quant_method": "fp8", "weight_block_size": [64, 128]})", kUnimplemented,
       "quantization_config.weight_block_size is [64,128]"},
      {"/text_config/quantization_config",
       R"({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]})", kUnimplemented,
       "quantization_config.fmt is \"e5m2\""},
      {"/text_config/quantization_config/format", "\"nvfp4\"", kUnimplemented,
       "quantization_config.format is \"nvfp4\""},
      {"/text_config/quantization_config/kv_cache_scheme", "{}", kUnimplemented,
       "kv_cache_scheme is {}"},
      {"/text_config/quantization_config/config_groups", "{}", kInvalid, "config_groups is {}"},
      {"/text_config/quantization_config/config_groups", "", kInvalid, "config_groups is missing"},
      {"/text_config/quantization_config/config_groups/group_0", "{\"weights\":1}", kInvalid,
       "config_groups is"},
      {"/text_config/quantization_config/config_groups/group_0/weights/num_bits", "8",
       kUnimplemented,
       "text_config.quantization_config.config_groups.group_0.weights.num_bits is 8; Coppice "
       "supports only 4"},
      {"/text_config/quantization_config/config_groups/group_0/weights/group_size", "128",
       kUnimplemented, "group_size is 128"},
      {"/text_config/quantization_config/config_groups/group_0/weights/group_size", "0", kInvalid,
       "group_size is 0"},
      {"/text_config/quantization_config/config_groups/group_0/weights/symmetric", "false",
       kUnimplemented, "symmetric is false"},
      {"/text_config/quantization_config/config_groups/group_0/weights/actorder", "\"group\"",
       kUnimplemented, "actorder is \"group\""},
      {"/text_config/quantization_config/config_groups/group_0/weights/type", "\"float\"",
       kUnimplemented, "type is \"float\""},
      {"/text_config/quantization_config/config_groups/group_0/weights/strategy", "\"channel\"",
       kUnimplemented, "strategy is \"channel\""},
      {"/text_config/quantization_config/config_groups/group_0/weights/dynamic", "true",
       kUnimplemented, "dynamic is true"},
  };
  for (const BadKey& bad : cases) {
    const absl::Status status = Load(Changed(K26(), bad)).status();
    EXPECT_EQ(status.code(), bad.code) << bad.pointer << " = " << bad.value << ": " << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("/config.json: key "), HasSubstr(bad.message)))
        << bad.pointer << " = " << bad.value;
  }
}

TEST(LoadModelConfig, NamesEveryMissingKey) {
  for (const char* key : {"vocab_size",
                          "hidden_size",
                          "num_hidden_layers",
                          "max_position_embeddings",
                          "rms_norm_eps",
                          "first_k_dense_replace",
                          "intermediate_size",
                          "moe_intermediate_size",
                          "n_routed_experts",
                          "num_experts_per_tok",
                          "n_shared_experts",
                          "n_group",
                          "topk_group",
                          "norm_topk_prob",
                          "routed_scaling_factor",
                          "num_attention_heads",
                          "q_lora_rank",
                          "kv_lora_rank",
                          "qk_nope_head_dim",
                          "qk_rope_head_dim",
                          "v_head_dim",
                          "rope_theta"}) {
    json config = K26();
    config["text_config"].erase(key);
    const absl::Status status = Load(config).status();
    EXPECT_EQ(status.code(), kInvalid) << key;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(std::string("key text_config.") + key + " is missing; expected "),
                      HasSubstr("/config.json")))
        << key;
  }
}

TEST(LoadModelConfig, RefusesWhatIsNotAConfiguration) {
  TempDir dir;
  EXPECT_EQ(LoadModelConfig(dir.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(LoadModelConfig(dir.path()).status().ToString(),
              HasSubstr("config.json does not exist"));
  for (const char* text : {"", "{", "[]", "nul", "{\"a\":1,\"a\":2}", "\xff\xfe"}) {
    dir.Write("config.json", text);
    EXPECT_EQ(LoadModelConfig(dir.path()).status().code(), kInvalid) << text;
    EXPECT_EQ(LoadDraftConfig(dir.path()).status().code(), kInvalid) << text;
  }
}

TEST(LoadDraftConfig, ReadsDFlash) {
  const auto config = LoadDraft(Draft());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vocab_size, 163840);
  EXPECT_EQ(config->hidden_size, 7168);
  EXPECT_EQ(config->num_hidden_layers, 6);
  EXPECT_EQ(config->intermediate_size, 18432);
  EXPECT_EQ(config->num_attention_heads, 64);
  EXPECT_EQ(config->num_key_value_heads, 8);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->max_position_embeddings, 262144);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_EQ(config->attention_factor, 1);
  EXPECT_EQ(config->block_size, 8);
  EXPECT_EQ(config->draft_len(), 7);
  EXPECT_EQ(config->mask_token_id, 163838);
  EXPECT_EQ(config->num_target_layers, 61);
  EXPECT_THAT(config->target_layer_ids, ElementsAre(1, 12, 24, 35, 47, 58));
  EXPECT_EQ(config->num_taps(), 6);
  EXPECT_EQ(config->layer_types.size(), 6u);
  EXPECT_NEAR(config->softmax_scale(), 0.0883883476, 1e-9);
  // Ramp from pair 17 to pair 39 (dimension 128, theta 50000, original context 4096).
  const std::vector<float> frequencies = config->InvFreq();
  ASSERT_EQ(frequencies.size(), 64u);
  const auto extrapolated = [](int i) { return std::pow(50000.0, -2.0 * i / 128); };
  EXPECT_FLOAT_EQ(frequencies[17], extrapolated(17));
  EXPECT_LT(frequencies[18], extrapolated(18) * 0.999);
  EXPECT_GT(frequencies[38], extrapolated(38) / 64 * 1.001);
  EXPECT_FLOAT_EQ(frequencies[39], extrapolated(39) / 64);
}

TEST(LoadDraftConfig, ReadsDeepseekYarnInRopeParameters) {
  json config = Draft();
  config["rope_parameters"] = config["rope_scaling"];
  config["rope_parameters"]["rope_type"] = "deepseek_yarn";
  config["rope_parameters"]["rope_theta"] = 50000.0;
  config.erase("rope_scaling");
  config.erase("rope_theta");
  const auto loaded = LoadDraft(config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->InvFreq(), LoadDraft(Draft())->InvFreq());
  EXPECT_EQ(loaded->attention_factor, 1);
}

TEST(LoadDraftConfig, AttentionFactorFollowsTheFile) {
  json config = Draft();
  config["rope_scaling"]["attention_factor"] = 1.4159;
  EXPECT_EQ(LoadDraft(config)->attention_factor, 1.4159);
  config["rope_scaling"].erase("attention_factor");
  for (const char* key : {"mscale", "mscale_all_dim", "beta_fast", "beta_slow"}) {
    config["rope_scaling"].erase(key);
  }
  const auto loaded = LoadDraft(config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_NEAR(loaded->attention_factor, 1.41588831, 1e-8);
  EXPECT_EQ(loaded->InvFreq(), LoadDraft(Draft())->InvFreq());
}

TEST(LoadDraftConfig, ReadsKeysAtEitherLevel) {
  json config = Draft();
  for (const char* key : {"target_layer_ids", "mask_token_id"}) {
    config[key] = config["dflash_config"][key];
  }
  ASSERT_TRUE(LoadDraft(config).ok()) << LoadDraft(config).status();
  config["dflash_config"] = {{"block_size", 8}, {"num_target_layers", 61}, {"causal", false}};
  config.erase("block_size");
  config.erase("num_target_layers");
  const auto loaded = LoadDraft(config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->block_size, 8);
  EXPECT_EQ(loaded->num_target_layers, 61);
  EXPECT_EQ(loaded->num_taps(), 6);
  config.erase("dflash_config");
  EXPECT_THAT(std::string(LoadDraft(config).status().message()),
              HasSubstr("key block_size is missing"));
}

TEST(LoadDraftConfig, NamesEveryBadKey) {
  const BadKey cases[] = {
      {"/model_type", "", kInvalid, "key model_type is missing"},
      {"/model_type", "\"llama\"", kUnimplemented, "key model_type is \"llama\""},
      {"/architectures", "[\"Qwen3ForCausalLM\"]", kUnimplemented,
       "key architectures is [\"Qwen3ForCausalLM\"]"},
      {"/architectures", "", kUnimplemented, "key architectures is absent"},
      {"/dflash_config", "[]", kInvalid, "key dflash_config is []"},
      {"/hidden_act", "\"gelu\"", kUnimplemented, "key hidden_act"},
      {"/attention_bias", "true", kUnimplemented, "key attention_bias is true"},
      {"/use_sliding_window", "true", kUnimplemented, "key use_sliding_window is true"},
      {"/partial_rotary_factor", "0.5", kUnimplemented, "key partial_rotary_factor is 0.5"},
      {"/aux_hidden_state_layer_ids", "[1]", kUnimplemented, "key aux_hidden_state_layer_ids"},
      {"/draft_vocab_size", "32000", kUnimplemented, "key draft_vocab_size"},
      {"/is_causal", "true", kUnimplemented, "key is_causal is true"},
      {"/dflash_config/causal", "true", kUnimplemented, "key dflash_config.causal is true"},
      {"/dflash_config/use_swa", "true", kUnimplemented, "key dflash_config.use_swa"},
      {"/dflash_config/attention_sink_bias", "true", kUnimplemented,
       "key dflash_config.attention_sink_bias"},
      {"/dflash_config/shift_label", "true", kUnimplemented, "key dflash_config.shift_label"},
      {"/dflash_config/output_multiplier", "2.0", kUnimplemented,
       "key dflash_config.output_multiplier"},
      {"/dflash_config/projector_type", "\"domino\"", kUnimplemented,
       "key dflash_config.projector_type"},
      {"/dflash_config/conv_kernel_size", "4", kUnimplemented,
       "key dflash_config.conv_kernel_size"},
      {"/dflash_config/attention_mode", "\"mla\"", kUnimplemented,
       "key dflash_config.attention_mode"},
      {"/dflash_config/is_neox_style", "false", kUnimplemented, "key dflash_config.is_neox_style"},
      {"/vocab_size", "", kInvalid, "key vocab_size is missing"},
      {"/hidden_size", "0", kInvalid, "key hidden_size is 0"},
      {"/num_hidden_layers", "0", kInvalid, "key num_hidden_layers is 0"},
      {"/intermediate_size", "\"x\"", kInvalid, "key intermediate_size is \"x\""},
      {"/num_attention_heads", "0", kInvalid, "key num_attention_heads is 0"},
      {"/num_key_value_heads", "0", kInvalid, "key num_key_value_heads is 0"},
      {"/num_key_value_heads", "7", kInvalid,
       "key num_key_value_heads is 7; expected a divisor of num_attention_heads"},
      {"/head_dim", "", kInvalid, "key head_dim is missing"},
      {"/head_dim", "127", kInvalid, "key head_dim is 127; expected an even number"},
      {"/max_position_embeddings", "", kInvalid, "key max_position_embeddings is missing"},
      {"/rms_norm_eps", "2", kInvalid, "key rms_norm_eps is 2"},
      {"/rope_scaling/rope_type", "\"longrope\"", kUnimplemented,
       "key rope_scaling.rope_type is \"longrope\""},
      {"/block_size", "1", kInvalid, "key block_size is 1"},
      {"/block_size", "", kInvalid, "key block_size is missing"},
      {"/dflash_config/block_size", "16", kInvalid,
       "key dflash_config.block_size is 16; expected what the top-level key says"},
      {"/num_target_layers", "", kInvalid, "key num_target_layers is missing"},
      {"/dflash_config/mask_token_id", "163840", kInvalid,
       "key dflash_config.mask_token_id is 163840"},
      {"/dflash_config/mask_token_id", "", kInvalid, "key mask_token_id is missing"},
      {"/dflash_config/target_layer_ids", "", kInvalid, "key target_layer_ids is missing"},
      {"/dflash_config/target_layer_ids", "[]", kInvalid,
       "key dflash_config.target_layer_ids is []"},
      {"/dflash_config/target_layer_ids", "[61]", kInvalid,
       "target_layer_ids is [61]; expected a list of different target layers from 0 to 60"},
      {"/dflash_config/target_layer_ids", "[1,1]", kInvalid, "target_layer_ids is [1,1]"},
      {"/dflash_config/target_layer_ids", "[1.5]", kInvalid, "target_layer_ids is [1.5]"},
      {"/layer_types", "[\"full_attention\"]", kInvalid, "key layer_types is"},
      {"/layer_types/3", "\"sliding_attention\"", kUnimplemented, "key layer_types is"},
  };
  for (const BadKey& bad : cases) {
    const absl::Status status = LoadDraft(Changed(Draft(), bad)).status();
    EXPECT_EQ(status.code(), bad.code) << bad.pointer << " = " << bad.value << ": " << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("/config.json: key "), HasSubstr(bad.message)))
        << bad.pointer << " = " << bad.value;
  }
}

TEST(CheckDraftMatchesModel, NamesBothSides) {
  const ModelConfig model = *Load(K26());
  const DraftConfig draft = *LoadDraft(Draft());
  EXPECT_TRUE(CheckDraftMatchesModel(draft, model, "d").ok());
  DraftConfig other = draft;
  other.num_target_layers = 48;
  EXPECT_EQ(CheckDraftMatchesModel(other, model, "models/d").message(),
            "the drafter in models/d was made for another target: its num_target_layers is 48, the "
            "target's "
            "num_hidden_layers is 61");
  other = draft;
  other.hidden_size = 4096;
  EXPECT_THAT(std::string(CheckDraftMatchesModel(other, model, "d").message()),
              HasSubstr("hidden_size is 4096"));
  other = draft;
  other.vocab_size = 8;
  EXPECT_THAT(std::string(CheckDraftMatchesModel(other, model, "d").message()),
              HasSubstr("vocab_size is 8"));
}

}  // namespace
}  // namespace coppice
