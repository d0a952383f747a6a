#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "model/json_file.h"

namespace coppice {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 64 << 20;
constexpr int kMaxSize = 1 << 20;  // of a hidden dimension
constexpr int kMaxVocab = 1 << 24;
constexpr int kMaxLayers = 4096;
constexpr int kMaxExperts = 1 << 16;
constexpr int kMaxPositions = 1 << 30;
constexpr int kGroupSize = 32;   // inputs per scale of INT4 pack-quantized experts
constexpr int kBlockSize = 128;  // rows and columns per scale of FP8

// Reads the keys of one JSON object and keeps the first fault, so that a loader reads like a list
// of keys and asks for status() once.
class Keys {
 public:
  // `where` precedes key names in messages: "" or "text_config.".
  Keys(const json& object, std::string file, std::string where)
      : object_(object), file_(std::move(file)), where_(std::move(where)) {}

  const absl::Status& status() const { return status_; }
  const json& object() const { return object_; }

  // Null counts as absent.
  bool Has(const std::string& key) const {
    const auto it = object_.find(key);
    return it != object_.end() && !it->is_null();
  }

  int Int(const std::string& key, int64_t low, int64_t high) {
    const std::string expected = absl::StrCat("a whole number from ", low, " to ", high);
    if (!Has(key)) return Missing(key, expected), 0;
    const json& value = object_[key];
    const std::optional<int64_t> number = AsInteger(value);
    if (!number.has_value() || *number < low || *number > high) {
      return Bad(key, expected), 0;
    }
    return static_cast<int>(*number);
  }

  double Number(const std::string& key, double low, double high) {
    const std::string expected = absl::StrCat("a number from ", low, " to ", high);
    if (!Has(key)) return Missing(key, expected), 0;
    const json& value = object_[key];
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    if (!(number >= low && number <= high)) return Bad(key, expected), 0;
    return number;
  }

  double NumberOr(const std::string& key, double low, double high, double absent) {
    return Has(key) ? Number(key, low, high) : absent;
  }

  bool Bool(const std::string& key) {
    if (!Has(key)) return Missing(key, "true or false"), false;
    if (!object_[key].is_boolean()) return Bad(key, "true or false"), false;
    return object_[key].get<bool>();
  }

  std::string Text(const std::string& key, const std::string& expected) {
    if (!Has(key)) return Missing(key, expected), "";
    if (!object_[key].is_string()) return Bad(key, expected), "";
    return object_[key].get<std::string>();
  }

  // Where `key` is present it must have exactly this value: Coppice computes nothing else.
  void Only(const std::string& key, const json& supported) {
    if (!Has(key) || object_[key] == supported) return;
    if (object_[key].type() != supported.type() &&
        !(object_[key].is_number() && supported.is_number())) {
      return Bad(key, supported.dump());
    }
    Unsupported(key, absl::StrCat("Coppice supports only ", supported.dump()));
  }

  void Missing(const std::string& key, const std::string& expected) {
    Fail(absl::InvalidArgumentError(
        absl::StrCat(file_, ": key ", where_, key, " is missing; expected ", expected)));
  }
  void Bad(const std::string& key, const std::string& expected) {
    Fail(absl::InvalidArgumentError(absl::StrCat(file_, ": key ", where_, key, " is ",
                                                 Shown(object_[key]), "; expected ", expected)));
  }
  void Unsupported(const std::string& key, const std::string& why) {
    Fail(absl::UnimplementedError(absl::StrCat(file_, ": key ", where_, key, " is ",
                                               Has(key) ? Shown(object_[key]) : "absent", "; ",
                                               why)));
  }
  void Fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  static std::optional<int64_t> AsInteger(const json& value) {
    if (value.is_number_unsigned() && value.get<uint64_t>() > (1ull << 62)) return std::nullopt;
    if (!value.is_number_integer()) return std::nullopt;
    return value.get<int64_t>();
  }

  Keys Sub(const std::string& key) const {
    return Keys(object_[key], file_, absl::StrCat(where_, key, "."));
  }

 private:
  static std::string Shown(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > 80) text = absl::StrCat(text.substr(0, 77), "...");
    return text;
  }

  const json& object_;
  std::string file_;
  std::string where_;
  absl::Status status_;
};

// Both tables: `rope_scaling` beside `rope_theta`, or transformers 5's `rope_parameters` with it
// inside.
RopeConfig ReadRope(Keys& keys, bool is_target) {
  RopeConfig rope;
  const bool new_form = keys.Has("rope_parameters");
  const std::string table = new_form ? "rope_parameters" : "rope_scaling";
  const bool has_table = keys.Has(table);
  if (has_table && !keys.object()[table].is_object()) {
    keys.Bad(table, "an object or null");
    return rope;
  }
  static const json kNoScaling = json::object();
  Keys scaling = has_table ? keys.Sub(table) : Keys(kNoScaling, "", "");

  constexpr double kMinTheta = 1.0000001;
  if (scaling.Has("rope_theta")) {
    rope.theta = scaling.Number("rope_theta", kMinTheta, 1e12);
    if (keys.Has("rope_theta") && keys.object()["rope_theta"] != scaling.object()["rope_theta"]) {
      keys.Bad("rope_theta", absl::StrCat("what ", table, ".rope_theta says, ", rope.theta));
    }
  } else {
    rope.theta = keys.Number("rope_theta", kMinTheta, 1e12);
  }

  std::string type = "default";
  if (has_table) {
    const std::string key = scaling.Has("rope_type") ? "rope_type" : "type";
    type = scaling.Text(key, "\"yarn\", \"deepseek_yarn\" or \"default\"");
    if (scaling.status().ok() && key == "rope_type" && scaling.Has("type") &&
        scaling.object()["type"] != scaling.object()["rope_type"]) {
      scaling.Bad("type", absl::StrCat("what rope_type says, \"", type, "\""));
    }
    if (scaling.status().ok() && type != "yarn" && type != "deepseek_yarn" && type != "default") {
      scaling.Unsupported(key, "Coppice supports yarn, deepseek_yarn and default");
    }
  }
  if (type != "default" && scaling.status().ok()) {
    rope.factor = scaling.Number("factor", 1, 1e5);
    rope.original_max_position_embeddings =
        scaling.Int("original_max_position_embeddings", 1, kMaxPositions);
    // A target's file always has all of these.  For drafters the defaults are those of
    // transformers' yarn.
    if (is_target || scaling.Has("beta_fast"))
      rope.beta_fast = scaling.Number("beta_fast", 1e-6, 1e6);
    if (is_target || scaling.Has("beta_slow"))
      rope.beta_slow = scaling.Number("beta_slow", 1e-6, 1e6);
    if (is_target || scaling.Has("mscale")) rope.mscale = scaling.Number("mscale", 0, 100);
    if (is_target || scaling.Has("mscale_all_dim")) {
      rope.mscale_all_dim = scaling.Number("mscale_all_dim", 0, 100);
    }
    if (scaling.Has("attention_factor")) {
      rope.attention_factor = scaling.Number("attention_factor", 1e-3, 1e3);
    }
    if (scaling.status().ok() && rope.beta_fast < rope.beta_slow) {
      scaling.Bad("beta_fast", absl::StrCat("at least beta_slow, ", rope.beta_slow));
    }
    scaling.Only("truncate", true);
  }
  scaling.Only("partial_rotary_factor", 1.0);
  keys.Fail(scaling.status());
  return rope;
}

// eos_token_id and its like: one id, a list of ids, or nothing.
void ReadIds(Keys& keys, const std::string& key, int vocab_size, std::set<int32_t>* ids) {
  if (!keys.Has(key)) return;
  const json& value = keys.object()[key];
  const std::string expected =
      absl::StrCat("a token id from 0 to ", vocab_size - 1, " (vocab_size - 1) or a list of such");
  for (const json& item : value.is_array() ? value : json::array({value})) {
    const std::optional<int64_t> id = Keys::AsInteger(item);
    if (!id.has_value() || *id < 0 || *id >= vocab_size) return keys.Bad(key, expected);
    ids->insert(static_cast<int32_t>(*id));
  }
}

// The first of the objects that has `key`; the last one where none has it.
Keys& Having(const std::string& key, Keys& first, Keys& second) {
  return first.Has(key) ? first : second;
}

int32_t ReadOptionalId(Keys& keys, const std::string& key, int vocab_size) {
  return keys.Has(key) ? keys.Int(key, 0, vocab_size - 1) : -1;
}

// FP8 weights in blocks, as DeepSeek writes them.  How activations are quantised is a choice of
// the engine's; Coppice multiplies dequantised weights.
void ReadFp8(Keys& quantization, ModelConfig* config) {
  quantization.Only("fmt", "e4m3");
  const json expected = json::array({kBlockSize, kBlockSize});
  if (!quantization.Has("weight_block_size")) {
    quantization.Missing("weight_block_size", expected.dump());
  } else {
    quantization.Only("weight_block_size", expected);
  }
  config->expert_bits = 8;
}

// INT4 pack-quantized routed experts (compressed-tensors), FP8 blocks, or nothing.
void ReadQuantization(Keys& outer, ModelConfig* config) {
  if (!outer.Has("quantization_config")) return;
  if (!outer.object()["quantization_config"].is_object()) {
    return outer.Bad("quantization_config", "an object or null");
  }
  Keys quantization = outer.Sub("quantization_config");
  const std::string method = quantization.Text("quant_method", "\"compressed-tensors\" or \"fp8\"");
  if (quantization.status().ok() && method == "fp8") {
    ReadFp8(quantization, config);
    return outer.Fail(quantization.status());
  }
  if (quantization.status().ok() && method != "compressed-tensors") {
    quantization.Unsupported("quant_method",
                             "Coppice reads bf16, FP8 in blocks (\"fp8\") and "
                             "compressed-tensors' INT4 pack-quantized experts");
  }
  quantization.Only("format", "pack-quantized");
  if (quantization.Has("kv_cache_scheme")) {
    quantization.Unsupported("kv_cache_scheme", "Coppice supports only null");
  }
  const std::string expected = "an object with one group that describes its weights";
  if (!quantization.Has("config_groups")) {
    quantization.Missing("config_groups", expected);
  } else {
    const json& groups = quantization.object()["config_groups"];
    if (!groups.is_object() || groups.size() != 1 || !groups.begin()->is_object() ||
        !groups.begin()->contains("weights") || !groups.begin()->at("weights").is_object()) {
      quantization.Bad("config_groups", expected);
    } else {
      Keys weights = quantization.Sub("config_groups").Sub(groups.begin().key()).Sub("weights");
      config->expert_bits = weights.Int("num_bits", 1, 64);
      config->expert_group_size = weights.Int("group_size", 1, kMaxSize);
      weights.Only("num_bits", 4);
      weights.Only("group_size", kGroupSize);
      weights.Only("type", "int");
      weights.Only("symmetric", true);
      weights.Only("strategy", "group");
      weights.Only("dynamic", false);
      if (weights.Has("actorder")) weights.Unsupported("actorder", "Coppice supports only null");
      quantization.Fail(weights.status());
    }
  }
  outer.Fail(quantization.status());
}

absl::StatusOr<json> ReadConfig(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxConfigBytes);
  if (!text.ok()) return text.status();
  return ParseJsonObject(*text, path);
}

// End-of-sequence ids that stand outside config.json.
absl::Status AddNeighbouringEos(const std::string& dir, int vocab_size, std::set<int32_t>* eos) {
  const std::string generation_path = absl::StrCat(dir, "/generation_config.json");
  absl::StatusOr<json> generation = ReadConfig(generation_path);
  if (generation.ok()) {
    Keys keys(*generation, generation_path, "");
    ReadIds(keys, "eos_token_id", vocab_size, eos);
    if (!keys.status().ok()) return keys.status();
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }

  const std::string tokenizer_path = absl::StrCat(dir, "/tokenizer_config.json");
  absl::StatusOr<json> tokenizer = ReadConfig(tokenizer_path);
  if (absl::IsNotFound(tokenizer.status())) return absl::OkStatus();
  if (!tokenizer.ok()) return tokenizer.status();
  const auto added = tokenizer->find("added_tokens_decoder");
  if (added == tokenizer->end() || !added->is_object()) return absl::OkStatus();
  for (const auto& [id, token] : added->items()) {
    if (!token.is_object() || !token.contains("content")) continue;
    const json& content = token["content"];
    if (content != "[EOS]" && content != "<|im_end|>") continue;
    int32_t value = 0;
    if (!absl::SimpleAtoi(id, &value) || value < 0 || value >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          tokenizer_path, ": added_tokens_decoder gives ", content.get<std::string>(), " the id ",
          id, "; expected a token id from 0 to ", vocab_size - 1, " (vocab_size - 1)"));
    }
    eos->insert(value);
  }
  return absl::OkStatus();
}

std::string ConfigPath(const std::string& dir) { return absl::StrCat(dir, "/config.json"); }

}  // namespace

double YarnMscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double RopeConfig::amplitude() const {
  if (attention_factor.has_value()) return *attention_factor;
  return YarnMscale(factor, mscale) / YarnMscale(factor, mscale_all_dim);
}

std::vector<float> RopeConfig::InvFreq(int dim) const {
  const int pairs = dim / 2;
  std::vector<float> frequencies(pairs);
  // The pair whose wave turns `rotations` times within the original context.
  const auto pair_of = [&](double rotations) {
    return dim * std::log(original_max_position_embeddings / (2 * std::numbers::pi * rotations)) /
           (2 * std::log(theta));
  };
  double low = 0;
  double high = 0;
  if (factor > 1) {
    low = std::max(std::floor(pair_of(beta_fast)), 0.0);
    high = std::min(std::ceil(pair_of(beta_slow)), dim - 1.0);
    if (low == high) high += 0.001;
  }
  // In fp32 and in the reference implementations' order of operations: at position 200,000 one
  // rounding of a frequency is an angle of 0.01.
  for (int i = 0; i < pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    const float wavelength = static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
    const float extrapolated = 1.0f / wavelength;
    frequencies[i] = extrapolated;
    if (factor > 1) {
      const float interpolated = 1.0f / (static_cast<float>(factor) * wavelength);
      const float ramp =
          (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
      const float keep = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
      frequencies[i] = interpolated * (1.0f - keep) + extrapolated * keep;
    }
  }
  return frequencies;
}

double ModelConfig::softmax_scale() const {
  const double mscale = YarnMscale(rope.factor, rope.mscale_all_dim);
  return mscale * mscale / std::sqrt(static_cast<double>(qk_head_dim()));
}

std::vector<float> ModelConfig::InvFreq() const { return rope.InvFreq(qk_rope_head_dim); }

double DraftConfig::softmax_scale() const { return 1 / std::sqrt(static_cast<double>(head_dim)); }

std::vector<float> DraftConfig::InvFreq() const { return rope.InvFreq(head_dim); }

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir) {
  const std::string path = ConfigPath(dir);
  absl::StatusOr<json> document = ReadConfig(path);
  if (!document.ok()) return document.status();

  ModelConfig config;
  Keys top(*document, path, "");
  config.model_type = top.Text("model_type", "\"deepseek_v3\", \"kimi_k2\" or \"kimi_k25\"");
  if (!top.status().ok()) return top.status();
  const bool wrapped = config.model_type == "kimi_k25";
  if (!wrapped && config.model_type != "kimi_k2" && config.model_type != "deepseek_v3") {
    top.Unsupported("model_type", "Coppice runs deepseek_v3, kimi_k2 and kimi_k25");
    return top.status();
  }
  if (wrapped && (!top.Has("text_config") || !top.object()["text_config"].is_object())) {
    top.Missing("text_config", "an object with the text model's keys, as model_type is kimi_k25");
    return top.status();
  }
  Keys keys = wrapped ? top.Sub("text_config") : Keys(*document, path, "");
  if (wrapped) {
    config.tensor_prefix = "language_model.";
    const std::string type =
        keys.Has("model_type") ? keys.Text("model_type", "\"kimi_k2\"") : "kimi_k2";
    if (keys.status().ok() && type != "kimi_k2" && type != "deepseek_v3") {
      keys.Unsupported("model_type", "Coppice runs deepseek_v3 and kimi_k2");
    }
  }

  // What selects another computation than ours.
  keys.Only("hidden_act", "silu");
  keys.Only("attention_bias", false);
  keys.Only("scoring_func", "sigmoid");
  keys.Only("topk_method", "noaux_tc");
  keys.Only("moe_layer_freq", 1);
  keys.Only("rope_interleave", true);
  keys.Only("tie_word_embeddings", false);
  if (wrapped) top.Only("tie_word_embeddings", false);

  config.vocab_size = keys.Int("vocab_size", 1, kMaxVocab);
  config.hidden_size = keys.Int("hidden_size", 1, kMaxSize);
  config.num_hidden_layers = keys.Int("num_hidden_layers", 1, kMaxLayers);
  config.max_position_embeddings = keys.Int("max_position_embeddings", 1, kMaxPositions);
  config.rms_norm_eps = keys.Number("rms_norm_eps", 1e-12, 1);
  config.lora_norm_eps = config.rms_norm_eps;
  config.first_k_dense_replace =
      keys.Int("first_k_dense_replace", 0, std::max(config.num_hidden_layers, 0));
  config.intermediate_size = keys.Int("intermediate_size", 1, kMaxSize);
  config.moe_intermediate_size = keys.Int("moe_intermediate_size", 1, kMaxSize);
  config.n_routed_experts = keys.Int("n_routed_experts", 1, kMaxExperts);
  config.num_experts_per_tok = keys.Int("num_experts_per_tok", 1, kMaxExperts);
  config.n_shared_experts = keys.Int("n_shared_experts", 1, 64);
  config.n_group = keys.Int("n_group", 1, kMaxExperts);
  config.topk_group = keys.Int("topk_group", 1, kMaxExperts);
  config.norm_topk_prob = keys.Bool("norm_topk_prob");
  config.routed_scaling_factor = keys.Number("routed_scaling_factor", 1e-6, 1e6);
  config.num_attention_heads = keys.Int("num_attention_heads", 1, 1 << 16);
  config.q_lora_rank = keys.Int("q_lora_rank", 1, kMaxSize);
  config.kv_lora_rank = keys.Int("kv_lora_rank", 1, kMaxSize);
  config.qk_nope_head_dim = keys.Int("qk_nope_head_dim", 1, kMaxSize);
  config.qk_rope_head_dim = keys.Int("qk_rope_head_dim", 2, kMaxSize);
  config.v_head_dim = keys.Int("v_head_dim", 1, kMaxSize);
  config.rope = ReadRope(keys, /*is_target=*/true);
  if (!keys.status().ok()) return keys.status();

  if (config.qk_rope_head_dim % 2 != 0) keys.Bad("qk_rope_head_dim", "an even number");
  if (keys.Has("num_key_value_heads")) {
    keys.Int("num_key_value_heads", config.num_attention_heads, config.num_attention_heads);
  }
  if (config.n_routed_experts % config.n_group != 0) {
    keys.Bad("n_group", absl::StrCat("a divisor of n_routed_experts, ", config.n_routed_experts));
  } else if (config.n_group > 1 && config.n_routed_experts / config.n_group < 2) {
    keys.Bad("n_group", "groups of at least two experts, since a group is scored by its best two");
  } else if (config.topk_group > config.n_group) {
    keys.Bad("topk_group", absl::StrCat("at most n_group, ", config.n_group));
  } else {
    const int reachable = config.topk_group * (config.n_routed_experts / config.n_group);
    if (config.num_experts_per_tok > reachable) {
      keys.Bad("num_experts_per_tok",
               absl::StrCat("at most ", reachable,
                            ", the experts of topk_group groups (n_routed_experts is ",
                            config.n_routed_experts, ")"));
    }
  }

  ReadQuantization(Having("quantization_config", keys, top), &config);
  if (config.expert_group_size != 0 && keys.status().ok() && top.status().ok()) {
    for (const char* key : {"hidden_size", "moe_intermediate_size"}) {
      const int size = keys.Int(key, 1, kMaxSize);
      if (size % config.expert_group_size != 0) {
        keys.Bad(key, absl::StrCat("a multiple of quantization_config's group_size, ",
                                   config.expert_group_size));
      }
    }
  }

  std::set<int32_t> eos;
  ReadIds(keys, "eos_token_id", config.vocab_size, &eos);
  if (wrapped) ReadIds(top, "eos_token_id", config.vocab_size, &eos);
  Keys& with_bos = Having("bos_token_id", keys, top);
  config.bos_token_id = ReadOptionalId(with_bos, "bos_token_id", config.vocab_size);
  Keys& with_pad = Having("pad_token_id", keys, top);
  config.pad_token_id = ReadOptionalId(with_pad, "pad_token_id", config.vocab_size);
  if (!keys.status().ok()) return keys.status();
  if (!top.status().ok()) return top.status();
  absl::Status neighbours = AddNeighbouringEos(dir, config.vocab_size, &eos);
  if (!neighbours.ok()) return neighbours;
  if (eos.empty()) {
    keys.Missing("eos_token_id",
                 "a token id here or in generation_config.json, or an added token named "
                 "[EOS] or <|im_end|> in tokenizer_config.json");
    return keys.status();
  }
  config.eos_token_ids.assign(eos.begin(), eos.end());
  return config;
}

absl::StatusOr<DraftConfig> LoadDraftConfig(const std::string& dir) {
  const std::string path = ConfigPath(dir);
  absl::StatusOr<json> document = ReadConfig(path);
  if (!document.ok()) return document.status();

  Keys keys(*document, path, "");
  const std::string model_type = keys.Text("model_type", "\"qwen3\"");
  if (!keys.status().ok()) return keys.status();
  if (model_type != "qwen3") {
    keys.Unsupported("model_type", "Coppice runs DFlash drafters, whose model_type is qwen3");
    return keys.status();
  }
  const json& architectures =
      keys.Has("architectures") ? keys.object()["architectures"] : json::array();
  if (!architectures.is_array() || std::find(architectures.begin(), architectures.end(),
                                             "DFlashDraftModel") == architectures.end()) {
    keys.Unsupported("architectures",
                     "Coppice runs DFlash drafters, which name DFlashDraftModel there");
    return keys.status();
  }
  static const json kNothing = json::object();
  if (keys.Has("dflash_config") && !keys.object()["dflash_config"].is_object()) {
    keys.Bad("dflash_config", "an object");
    return keys.status();
  }
  Keys flash = keys.Has("dflash_config") ? keys.Sub("dflash_config")
                                         : Keys(kNothing, path, "dflash_config.");

  // Variants of the family that compute something else.
  keys.Only("hidden_act", "silu");
  keys.Only("attention_bias", false);
  keys.Only("use_sliding_window", false);
  keys.Only("partial_rotary_factor", 1.0);
  if (keys.Has("aux_hidden_state_layer_ids")) {
    keys.Unsupported("aux_hidden_state_layer_ids", "Coppice reads z-lab's DFlash format");
  }
  if (keys.Has("draft_vocab_size")) {
    keys.Unsupported("draft_vocab_size", "Coppice's drafters share the target's vocabulary");
  }
  for (Keys* level : {&keys, &flash}) {
    for (const char* key : {"causal", "is_causal", "causal_head", "use_swa", "attention_sink_bias",
                            "shift_label", "sample_from_anchor"}) {
      level->Only(key, false);
    }
    for (const char* key :
         {"attention_value_scale", "output_multiplier", "input_embedding_scale"}) {
      level->Only(key, 1.0);
    }
    for (const char* key : {"final_logit_softcapping", "projector_type", "conv_kernel_size",
                            "selector_rank", "markov_rank"}) {
      if (level->Has(key))
        level->Unsupported(key, "Coppice supports only plain DFlash drafters, without it");
    }
    level->Only("is_neox_style", true);
  }
  flash.Only("attention_mode", "gqa");

  DraftConfig config;
  config.vocab_size = keys.Int("vocab_size", 1, kMaxVocab);
  config.hidden_size = keys.Int("hidden_size", 1, kMaxSize);
  config.num_hidden_layers = keys.Int("num_hidden_layers", 1, kMaxLayers);
  config.intermediate_size = keys.Int("intermediate_size", 1, kMaxSize);
  config.num_attention_heads = keys.Int("num_attention_heads", 1, 1 << 16);
  config.num_key_value_heads = keys.Int("num_key_value_heads", 1, 1 << 16);
  config.head_dim = keys.Int("head_dim", 2, kMaxSize);
  config.max_position_embeddings = keys.Int("max_position_embeddings", 1, kMaxPositions);
  config.rms_norm_eps = keys.Number("rms_norm_eps", 1e-12, 1);
  config.rope = ReadRope(keys, /*is_target=*/false);
  config.attention_factor = config.rope.amplitude();

  // These stand at the top, in dflash_config, or in both with one value.
  const auto either = [&](const char* key) -> Keys& {
    if (keys.Has(key) && flash.Has(key) && keys.object()[key] != flash.object()[key]) {
      flash.Bad(key, absl::StrCat("what the top-level key says"));
    }
    return Having(key, flash, keys);
  };
  config.block_size = either("block_size").Int("block_size", 2, 65);
  config.num_target_layers = either("num_target_layers").Int("num_target_layers", 1, kMaxLayers);
  config.mask_token_id =
      either("mask_token_id").Int("mask_token_id", 0, std::max(config.vocab_size - 1, 0));
  Keys& taps = either("target_layer_ids");
  const std::string expected_taps =
      absl::StrCat("a list of different target layers from 0 to ", config.num_target_layers - 1,
                   " (num_target_layers - 1)");
  if (!taps.Has("target_layer_ids")) {
    taps.Missing("target_layer_ids", expected_taps);
  } else {
    const json& ids = taps.object()["target_layer_ids"];
    std::set<int64_t> seen;
    bool good = ids.is_array() && !ids.empty();
    for (size_t i = 0; good && i < ids.size(); ++i) {
      const std::optional<int64_t> id = Keys::AsInteger(ids[i]);
      good =
          id.has_value() && *id >= 0 && *id < config.num_target_layers && seen.insert(*id).second;
      if (good) config.target_layer_ids.push_back(static_cast<int>(*id));
    }
    if (!good) taps.Bad("target_layer_ids", expected_taps);
  }
  if (keys.status().ok() && config.head_dim % 2 != 0) keys.Bad("head_dim", "an even number");
  if (keys.status().ok() && config.num_attention_heads % config.num_key_value_heads != 0) {
    keys.Bad("num_key_value_heads",
             absl::StrCat("a divisor of num_attention_heads, ", config.num_attention_heads));
  }

  config.layer_types.assign(config.num_hidden_layers, "full_attention");
  if (keys.Has("layer_types")) {
    const json& types = keys.object()["layer_types"];
    if (!types.is_array() || types.size() != config.layer_types.size()) {
      keys.Bad("layer_types",
               absl::StrCat("a list of num_hidden_layers, ", config.num_hidden_layers, ", types"));
    } else if (std::any_of(types.begin(), types.end(),
                           [](const json& t) { return t != "full_attention"; })) {
      keys.Unsupported("layer_types", "Coppice supports only full_attention");
    }
  }
  if (!keys.status().ok()) return keys.status();
  if (!flash.status().ok()) return flash.status();
  return config;
}

absl::Status CheckDraftMatchesModel(const DraftConfig& draft, const ModelConfig& model,
                                    const std::string& draft_dir) {
  const struct {
    const char* key;
    int draft;
    const char* target_key;
    int target;
  } pairs[] = {
      {"hidden_size", draft.hidden_size, "hidden_size", model.hidden_size},
      {"vocab_size", draft.vocab_size, "vocab_size", model.vocab_size},
      {"num_target_layers", draft.num_target_layers, "num_hidden_layers", model.num_hidden_layers},
  };
  for (const auto& pair : pairs) {
    if (pair.draft != pair.target) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the drafter in ", draft_dir, " was made for another target: its ", pair.key, " is ",
          pair.draft, ", the target's ", pair.target_key, " is ", pair.target));
    }
  }
  return absl::OkStatus();
}

}  // namespace coppice
