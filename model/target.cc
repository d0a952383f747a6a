#include "model/target.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "model/checkpoint.h"
#include "model/deepseek_v3.h"
#include "model/rank_group.h"
#include "model/step_rows.h"
#include "model/weights.h"

namespace coppice {
namespace {

using kernels::Tensor;

// lm_head runs on this many rows at a time, which bounds its output on the device.
constexpr int64_t kLogitRows = 64;

// What one rank holds besides the model.
struct Rank {
  std::unique_ptr<DeepSeekV3> model;
  DeviceTensor step;           // the packed rows of a step
  DeviceTensor logits;         // f32 [kLogitRows, vocab / ranks]
  DeviceTensor index;          // i32 [max_rows]
  DeviceTensor move_src;       // i32 [layers * max_rows]
  DeviceTensor move_dst;       // i32 [layers * max_rows]
  DeviceTensor feature;        // bf16 [max_rows, hidden]
  DeviceTensor feature_slice;  // bf16 [max_rows, hidden / ranks]
  DeviceTensor kept_features;  // bf16 [pages * page_size, hidden / ranks]
  std::vector<float> host_logits;
  std::vector<uint16_t> host_features;
};

// The first `count` rows of an index array, filled with `values`.
Tensor UploadIndex(kernels::Ops& ops, const DeviceTensor& array, absl::Span<const int32_t> values) {
  ops.Upload(values.data(), array.view.data, values.size() * sizeof(int32_t));
  return array.view.Rows(0, static_cast<int64_t>(values.size()));
}

class TargetImpl final : public Target {
 public:
  TargetImpl(const TargetOptions& options, ModelConfig config, std::optional<DraftConfig> draft)
      : options_(options), config_(std::move(config)), draft_(std::move(draft)) {}

  absl::Status Load();

  const ModelConfig& config() const override { return config_; }
  int tp() const override { return options_.tp; }
  bool has_features() const override { return draft_.has_value(); }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t embedding_fingerprint() const override { return embedding_fingerprint_; }
  uint64_t drafter_fingerprint() const override { return drafter_fingerprint_; }

  absl::Status Forward(absl::Span<const SequenceRows> sequences, ForwardResult* result) override;
  void Commit(const CommitPlan& plan, std::vector<uint16_t>* features) override;
  void ReadFeatures(absl::Span<const int32_t> slots, std::vector<uint16_t>* features) override;

 private:
  int64_t slots() const { return options_.pages * options_.page_size; }
  // A sequence fills a slot of its own per position, so neither limit can be passed.
  int64_t positions() const { return std::min<int64_t>(config_.max_position_embeddings, slots()); }
  absl::Status LoadRank(int rank, const TargetTensors& tensors,
                        const std::optional<FeatureTensors>& features, const HostRope& rope,
                        LoadProgress& progress);
  absl::Status ForwardRank(int rank, const StepRows& step, ForwardResult* result);
  void CountExperts(ForwardResult* result);

  const TargetOptions options_;
  const ModelConfig config_;
  const std::optional<DraftConfig> draft_;
  std::unique_ptr<Checkpoint> checkpoint_;  // the embedding stays mapped
  std::vector<uint16_t> embedding_copy_;
  const uint16_t* embedding_ = nullptr;
  uint64_t fingerprint_ = 0;
  uint64_t embedding_fingerprint_ = 0;
  uint64_t drafter_fingerprint_ = 0;
  // Before ranks_: what ranks hold is freed first.
  std::unique_ptr<RankGroup> group_;
  std::vector<Rank> ranks_;
  int rows_ = 0;  // of the last Forward
};

absl::Status TargetImpl::Load() {
  absl::Status status = CheckTargetRanks(config_, options_.tp);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(options_.model_dir);
  if (!checkpoint.ok()) return checkpoint.status();
  checkpoint_ = *std::move(checkpoint);
  absl::StatusOr<TargetTensors> tensors = FindTargetTensors(*checkpoint_, config_);
  if (!tensors.ok()) return tensors.status();
  embedding_ = EmbeddingTable(tensors->shared, embedding_copy_);
  fingerprint_ = TargetFingerprint(*checkpoint_, config_);
  embedding_fingerprint_ = EmbeddingFingerprint(tensors->shared);

  std::unique_ptr<Checkpoint> draft_checkpoint;
  std::optional<FeatureTensors> features;
  if (draft_.has_value()) {
    checkpoint = Checkpoint::Open(options_.drafter_dir);
    if (!checkpoint.ok()) return checkpoint.status();
    draft_checkpoint = *std::move(checkpoint);
    absl::StatusOr<FeatureTensors> found = FindFeatureTensors(*draft_checkpoint, *draft_);
    if (!found.ok()) return found.status();
    features = *std::move(found);
    drafter_fingerprint_ = DraftFingerprint(*features, *draft_);
  }

  absl::StatusOr<std::unique_ptr<RankGroup>> group = RankGroup::Create(options_.tp);
  if (!group.ok()) return group.status();
  group_ = *std::move(group);
  ranks_.resize(options_.tp);
  const HostRope rope(config_.InvFreq(), positions(), config_.rope_amplitude());
  LoadProgress progress(LoadBytes(*tensors), options_.progress);
  return group_->RunWithStatus(
      [&](int rank) { return LoadRank(rank, *tensors, features, rope, progress); });
}

absl::Status TargetImpl::LoadRank(int rank, const TargetTensors& tensors,
                                  const std::optional<FeatureTensors>& feature_tensors,
                                  const HostRope& rope, LoadProgress& progress) {
  kernels::Ops& ops = group_->ops(rank);
  Rank& r = ranks_[rank];
  std::optional<FeatureWeights> features;
  if (draft_.has_value()) {
    absl::StatusOr<FeatureWeights> loaded = LoadFeatureWeights(*feature_tensors, *draft_, ops);
    if (!loaded.ok()) return loaded.status();
    features = *std::move(loaded);
  }
  absl::StatusOr<TargetWeights> weights = LoadTargetWeights(tensors, config_, ops, progress);
  if (!weights.ok()) return weights.status();
  DeepSeekV3Options model_options{.max_rows = options_.max_rows,
                                  .page_size = options_.page_size,
                                  .pages = options_.pages,
                                  .taps = {}};
  if (draft_.has_value()) model_options.taps = draft_->target_layer_ids;
  absl::StatusOr<std::unique_ptr<DeepSeekV3>> model = DeepSeekV3::Create(
      config_, model_options, *std::move(weights), std::move(features), rope, embedding_, ops);
  if (!model.ok()) return model.status();
  r.model = *std::move(model);

  using kernels::DType;
  struct Request {
    DeviceTensor* tensor;
    DType dtype;
    int64_t rows;
    int64_t cols;
  };
  const int64_t rows = options_.max_rows;
  const int64_t hidden = config_.hidden_size;
  std::vector<Request> requests = {
      {&r.logits, DType::kF32, std::min(kLogitRows, rows), r.model->local_vocab()},
      {&r.index, DType::kI32, rows, 1},
      {&r.move_src, DType::kI32, config_.num_hidden_layers * rows, 1},
      {&r.move_dst, DType::kI32, config_.num_hidden_layers * rows, 1},
  };
  if (draft_.has_value()) {
    requests.push_back({&r.feature, DType::kBf16, rows, hidden});
    requests.push_back({&r.feature_slice, DType::kBf16, rows, hidden / options_.tp});
    requests.push_back({&r.kept_features, DType::kBf16, slots(), hidden / options_.tp});
  }
  for (const Request& request : requests) {
    absl::StatusOr<DeviceTensor> tensor =
        AllocateTensor(ops, request.dtype, request.rows, request.cols);
    if (!tensor.ok()) return tensor.status();
    *request.tensor = *std::move(tensor);
  }
  return absl::OkStatus();
}

absl::Status TargetImpl::Forward(absl::Span<const SequenceRows> sequences, ForwardResult* result) {
  const absl::StatusOr<StepRows> step = StepRows::Pack(sequences, {.vocab_size = config_.vocab_size,
                                                                   .page_size = options_.page_size,
                                                                   .pages = options_.pages,
                                                                   .positions = positions(),
                                                                   .max_rows = options_.max_rows});
  if (!step.ok()) return step.status();
  rows_ = step->rows();
  result->vocab_size = config_.vocab_size;
  result->logits.resize(step->logit_rows().size() * config_.vocab_size);
  result->expert_counts.assign(
      static_cast<size_t>(ranks_[0].model->moe_layers()) * config_.n_routed_experts, 0);
  if (rows_ == 0) return absl::OkStatus();
  const absl::Status status =
      group_->RunWithStatus([&](int rank) { return ForwardRank(rank, *step, result); });
  if (!status.ok()) return status;
  for (size_t i = 0; i < step->logit_rows().size(); ++i) {
    const auto row = result->logits.begin() + static_cast<int64_t>(i * config_.vocab_size);
    if (std::all_of(row, row + config_.vocab_size, [](float x) { return std::isfinite(x); })) {
      continue;
    }
    return absl::InternalError(absl::StrCat("sequence ", step->logit_sequences()[i],
                                            " of the step: the model's logits for row ",
                                            step->logit_rows()[i], " of the step are not finite"));
  }
  return absl::OkStatus();
}

absl::Status TargetImpl::ForwardRank(int rank, const StepRows& step, ForwardResult* result) {
  kernels::Ops& ops = group_->ops(rank);
  Rank& r = ranks_[rank];
  // Steps grow with contexts; every rank sees the same sizes, so all grow together.
  const int64_t bytes = static_cast<int64_t>(step.block().size());
  if (r.step.view.rows * kernels::SizeOf(kernels::DType::kI32) < bytes) {
    absl::StatusOr<DeviceTensor> grown = AllocateTensor(ops, kernels::DType::kI32, bytes / 2, 1);
    if (!grown.ok()) return grown.status();
    r.step = *std::move(grown);
  }
  ops.Upload(step.block().data(), r.step.view.data, step.block().size());
  r.model->Forward(step.At(r.step.view.data));

  const int64_t local = r.model->local_vocab();
  const int64_t total = static_cast<int64_t>(step.logit_rows().size());
  for (int64_t begin = 0; begin < total; begin += r.logits.view.rows) {
    const int64_t count = std::min(r.logits.view.rows, total - begin);
    const Tensor index =
        UploadIndex(ops, r.index, absl::MakeConstSpan(step.logit_rows()).subspan(begin, count));
    r.model->Logits(index, r.logits.view.Rows(0, count));
    float* out = result->logits.data() + begin * config_.vocab_size;
    if (ops.ranks() == 1) {
      ops.Download(r.logits.view.data, out, count * local * sizeof(float));
      continue;
    }
    r.host_logits.resize(count * local);
    ops.Download(r.logits.view.data, r.host_logits.data(), count * local * sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(r.host_logits.data() + i * local, local,
                  out + i * config_.vocab_size + rank * local);
    }
  }
  if (rank == 0) CountExperts(result);
  ops.Synchronize();
  return absl::OkStatus();
}

void TargetImpl::CountExperts(ForwardResult* result) {
  const DeepSeekV3& model = *ranks_[0].model;
  std::vector<int32_t> chosen(static_cast<size_t>(rows_) * config_.num_experts_per_tok);
  for (int l = 0; l < model.moe_layers(); ++l) {
    group_->ops(0).Download(model.ChosenExperts(l).data, chosen.data(),
                            chosen.size() * sizeof(int32_t));
    uint32_t* counts =
        result->expert_counts.data() + static_cast<int64_t>(l) * config_.n_routed_experts;
    for (const int32_t expert : chosen) {
      if (expert >= 0) ++counts[expert];
    }
  }
}

void TargetImpl::Commit(const CommitPlan& plan, std::vector<uint16_t>* features) {
  features->clear();
  // A move of every layer's row, in one list over all layers.
  std::vector<int32_t> src, dst, rows, kept;
  for (int l = 0; l < config_.num_hidden_layers; ++l) {
    for (const CommitPlan::Move& move : plan.moves) {
      CHECK(move.src >= 0 && move.src < slots() && move.dst >= 0 && move.dst < slots());
      src.push_back(static_cast<int32_t>(l * slots() + move.src));
      dst.push_back(static_cast<int32_t>(l * slots() + move.dst));
    }
  }
  CHECK_LE(plan.moves.size(), static_cast<size_t>(options_.max_rows));
  if (draft_.has_value()) {
    for (const CommitPlan::Feature& feature : plan.features) {
      CHECK(feature.row >= 0 && feature.row < rows_ && feature.slot >= 0 && feature.slot < slots());
      rows.push_back(feature.row);
      kept.push_back(feature.slot);
    }
  }
  CHECK_LE(rows.size(), static_cast<size_t>(options_.max_rows));
  const int64_t count = static_cast<int64_t>(rows.size());
  const int64_t hidden = config_.hidden_size;
  features->resize(count * hidden);
  if (src.empty() && count == 0) return;
  group_->Run([&](int rank) {
    kernels::Ops& ops = group_->ops(rank);
    Rank& r = ranks_[rank];
    if (!src.empty()) {
      ops.MoveRows(r.model->all_latents(), UploadIndex(ops, r.move_src, src),
                   UploadIndex(ops, r.move_dst, dst));
    }
    if (count > 0) {
      const Tensor out = r.feature.view.Rows(0, count);
      r.model->ProjectFeatures(UploadIndex(ops, r.index, rows), out);
      if (rank == 0) {
        ops.Download(out.data, features->data(), features->size() * sizeof(uint16_t));
      }
      const int64_t slice = hidden / ops.ranks();
      ops.ScatterRows(out.Cols(rank * slice, slice), UploadIndex(ops, r.index, kept),
                      r.kept_features.view);
    }
    ops.Synchronize();
  });
}

void TargetImpl::ReadFeatures(absl::Span<const int32_t> slots_wanted,
                              std::vector<uint16_t>* features) {
  const int64_t hidden = config_.hidden_size;
  features->assign(slots_wanted.size() * hidden, 0);
  if (!draft_.has_value()) return;
  for (const int32_t slot : slots_wanted) CHECK(slot >= 0 && slot < slots());
  group_->Run([&](int rank) {
    kernels::Ops& ops = group_->ops(rank);
    Rank& r = ranks_[rank];
    const int64_t slice = hidden / ops.ranks();
    const int64_t total = static_cast<int64_t>(slots_wanted.size());
    for (int64_t begin = 0; begin < total; begin += options_.max_rows) {
      const int64_t count = std::min<int64_t>(options_.max_rows, total - begin);
      const Tensor index = UploadIndex(ops, r.index, slots_wanted.subspan(begin, count));
      const Tensor gathered = r.feature_slice.view.Rows(0, count);
      ops.GatherRows(r.kept_features.view, index, gathered);
      r.host_features.resize(count * slice);
      ops.Download(gathered.data, r.host_features.data(),
                   r.host_features.size() * sizeof(uint16_t));
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(r.host_features.data() + i * slice, slice,
                    features->data() + (begin + i) * hidden + rank * slice);
      }
    }
  });
}

absl::Status CheckOptions(const TargetOptions& options) {
  if (options.page_size < 1 || options.page_size > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size is ", options.page_size, "; it must be 1 to 64 tokens"));
  }
  if (options.pages < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pages is ", options.pages, "; at least 2 are needed (page 0 is never handed out)"));
  }
  if (options.lora_norm_eps.has_value() &&
      !(*options.lora_norm_eps > 0 && *options.lora_norm_eps <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("lora_norm_eps is ", *options.lora_norm_eps,
                     "; it must be above 0 and at most 1 (transformers uses 1e-6)"));
  }
  if (options.max_rows < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_rows is ", options.max_rows, "; it must be at least 1"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Target>> Target::Load(const TargetOptions& options) {
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return status;
  absl::StatusOr<ModelConfig> config = LoadModelConfig(options.model_dir);
  if (!config.ok()) return config.status();
  if (options.lora_norm_eps.has_value()) config->lora_norm_eps = *options.lora_norm_eps;
  std::optional<DraftConfig> draft;
  if (!options.drafter_dir.empty()) {
    absl::StatusOr<DraftConfig> loaded = LoadDraftConfig(options.drafter_dir);
    if (!loaded.ok()) return loaded.status();
    status = CheckDraftMatchesModel(*loaded, *config, options.drafter_dir);
    if (!status.ok()) return status;
    draft = *std::move(loaded);
  }
  auto target = std::make_unique<TargetImpl>(options, *std::move(config), std::move(draft));
  status = target->Load();
  if (!status.ok()) return status;
  return target;
}

}  // namespace coppice
