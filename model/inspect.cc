#include "model/inspect.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/ops.h"
#include "model/chat_template.h"
#include "model/checkpoint.h"
#include "model/tokenizer.h"
#include "model/weights.h"

namespace coppice {
namespace {

using Form = CheckpointMatrix::Form;

const char* FormName(Form form) {
  switch (form) {
    case Form::kInt4:
      return "INT4";
    case Form::kFp8:
      return "FP8";
    case Form::kF32:
      return "F32";
    case Form::kBf16:
      return "BF16";
  }
  return "BF16";
}

int64_t FileBytes(const CheckpointMatrix& matrix) {
  return static_cast<int64_t>(matrix.weight.bytes) +
         (matrix.scales.has_value() ? static_cast<int64_t>(matrix.scales->bytes) : 0);
}

// As it lies on a device.
int64_t LoadedBytes(const CheckpointMatrix& matrix) {
  return matrix.form() == Form::kFp8 ? matrix.rows * matrix.cols * 2 : FileBytes(matrix);
}

// Adds up the model's parts, and what ranks hold of them.
class Sizes {
 public:
  // `split`: each rank holds a part of it; else all of it.
  void Add(const char* part, const CheckpointMatrix& matrix, bool split) {
    PartSize& size = Part(part, FormName(matrix.form()));
    ++size.matrices;
    size.parameters += matrix.rows * matrix.cols;
    size.bytes += FileBytes(matrix);
    (split ? split_ : replicated_) += LoadedBytes(matrix);
  }
  void Add(const char* part, const MlpTensors& mlp) {
    for (const CheckpointMatrix* matrix : {&mlp.gate, &mlp.up, &mlp.down}) Add(part, *matrix, true);
  }
  void Add(const char* part, const TensorView& vector) {
    PartSize& size = Part(part, DTypeName(vector.dtype));
    ++size.matrices;
    size.parameters += vector.num_elements();
    size.bytes += static_cast<int64_t>(vector.bytes);
    replicated_ += vector.num_elements() * 4;  // vectors are held in fp32
  }

  std::vector<PartSize> Take() { return std::move(parts_); }
  int64_t OfRank(int tp) const { return replicated_ + split_ / tp; }

 private:
  PartSize& Part(const char* part, const std::string& form) {
    for (PartSize& size : parts_) {
      if (size.part == part && size.form == form) return size;
    }
    parts_.push_back({.part = part, .form = form});
    return parts_.back();
  }

  std::vector<PartSize> parts_;
  int64_t replicated_ = 0;
  int64_t split_ = 0;
};

Sizes SizesOf(const TargetTensors& tensors) {
  Sizes sizes;
  for (const TargetLayerTensors& layer : tensors.layers) {
    sizes.Add("attention", layer.q_a, false);
    sizes.Add("attention", layer.kv_a, false);
    for (const CheckpointMatrix* matrix : {&layer.q_b, &layer.kv_b, &layer.o}) {
      sizes.Add("attention", *matrix, true);
    }
    if (layer.dense.has_value()) sizes.Add("dense layers", *layer.dense);
    for (const MlpTensors& expert : layer.experts) sizes.Add("routed experts", expert);
    if (layer.shared.has_value()) sizes.Add("shared experts", *layer.shared);
    if (layer.router.has_value()) sizes.Add("routers", *layer.router, false);
    if (layer.router_bias.has_value()) sizes.Add("router biases", *layer.router_bias);
    for (const TensorView* norm :
         {&layer.input_norm, &layer.q_a_norm, &layer.kv_a_norm, &layer.post_norm}) {
      sizes.Add("norms", *norm);
    }
  }
  sizes.Add("norms", tensors.final_norm);
  sizes.Add("lm_head", tensors.shared.lm_head, true);
  return sizes;
}

// The name of what has this configuration and chat template; `expert_form` is that of the routed
// experts, where tensors were found.
std::string ReleaseOf(const ModelConfig& config, const std::string& chat,
                      std::optional<Form> expert_form) {
  const bool k2_sizes = config.hidden_size == 7168 && config.num_hidden_layers == 61 &&
                        config.n_routed_experts == 384 && config.vocab_size == 163840;
  std::string name;
  if (config.model_type == "kimi_k25") {
    name = chat == "k2.6" ? "Kimi-K2.6" : chat == "k2.5" ? "Kimi-K2.5" : "Kimi-K2.5 or K2.6";
  } else {
    const bool int4 =
        expert_form.has_value() ? *expert_form == Form::kInt4 : config.expert_bits == 4;
    if (chat == "thinking" || (chat.empty() && int4)) {
      name = "Kimi-K2-Thinking";
    } else {
      name = config.max_position_embeddings > 131072 ? "Kimi-K2-Instruct-0905" : "Kimi-K2-Instruct";
    }
  }
  return k2_sizes ? name : absl::StrCat("the form of ", name, ", in other sizes");
}

std::string Size(int64_t bytes) {
  if (bytes >= 1'000'000'000) return absl::StrFormat("%.2f GB", bytes / 1e9);
  if (bytes >= 1'000'000) return absl::StrFormat("%.2f MB", bytes / 1e6);
  return absl::StrFormat("%.2f kB", bytes / 1e3);
}

}  // namespace

int64_t Inspection::CacheBytesPerToken(Cache cache) const {
  if (!config.has_value()) return 0;
  int64_t row = 0;
  switch (cache) {
    case Cache::kBf16:
      row = config->latent_dim() * 2;
      break;
    case Cache::kFp8:
      row = config->kv_lora_rank + 16 + config->qk_rope_head_dim * 2;
      break;
    case Cache::kF32:
      row = config->latent_dim() * 4;
      break;
  }
  return row * config->num_hidden_layers;
}

Inspection Inspect(const std::string& dir, const InspectOptions& options) {
  Inspection out;
  out.dir = dir;
  const auto refuse = [&](const absl::Status& status) {
    if (!status.ok()) out.refused.push_back(std::string(status.message()));
    return !status.ok();
  };
  std::error_code ignored;
  if (!std::filesystem::is_directory(dir, ignored)) {
    refuse(absl::NotFoundError(absl::StrCat(dir, " is not a directory")));
    return out;
  }

  absl::StatusOr<ModelConfig> config = LoadModelConfig(dir);
  const absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(dir);
  if (checkpoint.ok()) {
    out.files = static_cast<int64_t>((*checkpoint)->num_files());
    out.tensors = static_cast<int64_t>((*checkpoint)->tensors().size());
    out.bytes = static_cast<int64_t>((*checkpoint)->total_bytes());
  }
  const bool config_refused = refuse(config.status());
  refuse(checkpoint.status());
  if (config_refused) return out;
  out.config = *std::move(config);

  const absl::StatusOr<ChatTemplate> chat = ChooseChatTemplate(dir, out.config->model_type, "auto");
  if (chat.ok()) out.chat_template = std::string(ChatReleaseName(chat->release));
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      Tokenizer::Load(dir, out.config->vocab_size);
  if (!refuse(tokenizer.status())) {
    out.base_tokens = (*tokenizer)->num_base();
    for (int32_t id = (*tokenizer)->num_base(); id < (*tokenizer)->vocab_size(); ++id) {
      const bool reserved =
          (*tokenizer)->TokenBytes(id) == absl::StrCat("<|reserved_token_", id, "|>");
      out.named_special_tokens += !reserved;
    }
  }

  std::optional<Form> expert_form;
  if (checkpoint.ok()) {
    const absl::StatusOr<TargetTensors> tensors = FindTargetTensors(**checkpoint, *out.config);
    if (!refuse(tensors.status())) {
      for (const TargetLayerTensors& layer : tensors->layers) {
        if (!layer.experts.empty()) expert_form = layer.experts[0].gate.form();
      }
      Sizes sizes = SizesOf(*tensors);
      for (const int tp : {1, 2, 4, 8}) {
        out.ranks.push_back(
            {tp, sizes.OfRank(tp), std::string(CheckTargetRanks(*out.config, tp).message())});
      }
      out.embedding_bytes = FileBytes(tensors->shared.embedding);
      out.unused_bytes = out.bytes - LoadBytes(*tensors);
      out.unused = CountUnused(**checkpoint, *tensors);
      out.parts = sizes.Take();
      if (options.check_values) refuse(CheckValues(*tensors));
    }
  }
  for (const RankSize& rank : out.ranks) {
    // What one rank cannot do, none can.
    if (rank.tp == 1 && !rank.refused.empty()) out.refused.push_back(rank.refused);
  }
  out.release = ReleaseOf(*out.config, out.chat_template, expert_form);
  if (!chat.ok()) refuse(chat.status());

  std::string drafter_dir = options.drafter_dir;
  if (drafter_dir.empty() && std::filesystem::is_directory(dir + "/drafter", ignored)) {
    drafter_dir = dir + "/drafter";
  }
  if (!drafter_dir.empty()) {
    const absl::StatusOr<DraftConfig> draft = LoadDraftConfig(drafter_dir);
    const absl::StatusOr<std::unique_ptr<Checkpoint>> files = Checkpoint::Open(drafter_dir);
    if (!refuse(draft.status()) && !refuse(files.status()) &&
        !refuse(CheckDraftMatchesModel(*draft, *out.config, drafter_dir)) &&
        !refuse(FindDraftTensors(**files, *draft).status())) {
      out.drafter =
          absl::StrCat("DFlash, ", draft->num_hidden_layers, " layers, blocks of ",
                       draft->block_size, ", taps ", absl::StrJoin(draft->target_layer_ids, " "),
                       ", ", Size(static_cast<int64_t>((*files)->total_bytes())));
    }
  }
  return out;
}

std::string InspectionText(const Inspection& in) {
  std::string text = absl::StrCat(in.dir, "\n");
  const auto line = [&](const char* name, const std::string& value) {
    absl::StrAppendFormat(&text, "  %-14s %s\n", name, value);
  };
  if (in.config.has_value()) {
    const ModelConfig& c = *in.config;
    line("release", in.release);
    line("model_type", c.model_type);
    line("layers",
         absl::StrFormat("%d, of which %d dense; hidden size %d, %d heads", c.num_hidden_layers,
                         c.first_k_dense_replace, c.hidden_size, c.num_attention_heads));
    line("experts",
         absl::StrFormat("%d, %d chosen%s, %d shared", c.n_routed_experts, c.num_experts_per_tok,
                         c.n_group > 1 ? absl::StrCat(" from the best ", c.topk_group, " of ",
                                                      c.n_group, " groups")
                                       : std::string(),
                         c.n_shared_experts));
    line("positions",
         absl::StrFormat("%d; YaRN factor %g, betas %g and %g", c.max_position_embeddings,
                         c.rope.factor, c.rope.beta_fast, c.rope.beta_slow));
    line("rms_norm_eps", absl::StrCat(c.rms_norm_eps));
    line("eos ids", absl::StrJoin(c.eos_token_ids, " "));
    line("vocabulary",
         in.base_tokens > 0
             ? absl::StrFormat("%d: %d tokens, %d named special ones, the others reserved",
                               c.vocab_size, in.base_tokens, in.named_special_tokens)
             : absl::StrCat(c.vocab_size));
    line("chat template", in.chat_template.empty() ? "not known" : in.chat_template);
  }
  if (in.files > 0) {
    line("files", absl::StrFormat("%d, with %d tensors, %s", in.files, in.tensors, Size(in.bytes)));
    if (in.unused > 0) {
      line("skipped", absl::StrFormat("%d tensors the text model does not have, %s", in.unused,
                                      Size(in.unused_bytes)));
    }
  }
  for (const PartSize& part : in.parts) {
    line(part.part.c_str(),
         absl::StrFormat("%-4s  %d tensors, %.3g G parameters, %s", part.form, part.matrices,
                         static_cast<double>(part.parameters) / 1e9, Size(part.bytes)));
  }
  if (!in.ranks.empty()) {
    line("embedding", absl::StrCat(Size(in.embedding_bytes), ", mapped, once per machine"));
    for (const RankSize& rank : in.ranks) {
      line(absl::StrCat("tp ", rank.tp).c_str(),
           rank.refused.empty()
               ? absl::StrCat(Size(rank.bytes), " of weights per rank (FP8 decoded to bf16)")
               : absl::StrCat("refused: ", rank.refused));
    }
  }
  if (in.config.has_value()) {
    line("cache",
         absl::StrFormat("per token and rank %d bytes in bf16, %d in fp8, %d in fp32 (CPU)",
                         in.CacheBytesPerToken(Inspection::Cache::kBf16),
                         in.CacheBytesPerToken(Inspection::Cache::kFp8),
                         in.CacheBytesPerToken(Inspection::Cache::kF32)));
    line("drafter", in.drafter.empty() ? "none" : in.drafter);
  }
  for (const std::string& sentence : in.refused) line("REFUSED", sentence);
  if (in.refused.empty()) line("refused", "nothing");
  return text;
}

nlohmann::ordered_json InspectionJson(const Inspection& in) {
  nlohmann::ordered_json out;
  out["dir"] = in.dir;
  out["release"] = in.release;
  if (in.config.has_value()) {
    const ModelConfig& c = *in.config;
    out["config"] = {{"model_type", c.model_type},
                     {"num_hidden_layers", c.num_hidden_layers},
                     {"hidden_size", c.hidden_size},
                     {"n_routed_experts", c.n_routed_experts},
                     {"num_experts_per_tok", c.num_experts_per_tok},
                     {"max_position_embeddings", c.max_position_embeddings},
                     {"vocab_size", c.vocab_size},
                     {"rope_factor", c.rope.factor},
                     {"rms_norm_eps", c.rms_norm_eps},
                     {"eos_token_ids", c.eos_token_ids}};
    out["cache_bytes_per_token"] = {{"bf16", in.CacheBytesPerToken(Inspection::Cache::kBf16)},
                                    {"fp8", in.CacheBytesPerToken(Inspection::Cache::kFp8)},
                                    {"fp32", in.CacheBytesPerToken(Inspection::Cache::kF32)}};
  }
  out["chat_template"] = in.chat_template;
  out["files"] = in.files;
  out["tensors"] = in.tensors;
  out["bytes"] = in.bytes;
  out["skipped_tensors"] = in.unused;
  out["skipped_bytes"] = in.unused_bytes;
  out["parts"] = nlohmann::ordered_json::array();
  for (const PartSize& part : in.parts) {
    out["parts"].push_back({{"part", part.part},
                            {"form", part.form},
                            {"tensors", part.matrices},
                            {"parameters", part.parameters},
                            {"bytes", part.bytes}});
  }
  out["embedding_bytes"] = in.embedding_bytes;
  out["ranks"] = nlohmann::ordered_json::array();
  for (const RankSize& rank : in.ranks) {
    nlohmann::ordered_json& row = out["ranks"].emplace_back();
    row = {{"tp", rank.tp}, {"bytes", rank.bytes}};
    if (!rank.refused.empty()) row["refused"] = rank.refused;
  }
  out["drafter"] = in.drafter;
  out["refused"] = in.refused;
  return out;
}

}  // namespace coppice
