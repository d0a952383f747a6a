#include "model/drafter.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "model/checkpoint.h"
#include "model/dflash.h"
#include "model/rank_group.h"
#include "model/weights.h"

namespace coppice {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr int kMaxBlocks = 16;    // of one forward; more are run one after another
constexpr int kMaxContext = 512;  // feature rows written at once
constexpr int kMaxCandidates = 64;

// What one rank holds besides the model.
struct Rank {
  std::unique_ptr<DFlash> model;
  DeviceTensor features;  // bf16 [max_context, hidden]
  DeviceTensor index;     // i32: five arrays of at most max(max_context, rows) values, see Index
  DeviceTensor logits;    // f32 [rows, vocab]
  DeviceTensor ids;       // i32 [rows, kMaxCandidates]
  DeviceTensor log_probs;
};

class DrafterImpl final : public Drafter {
 public:
  DrafterImpl(const DrafterOptions& options, DraftConfig config, ModelConfig target)
      : options_(options), config_(std::move(config)), target_config_(std::move(target)) {}

  absl::Status Load();

  const DraftConfig& config() const override { return config_; }
  uint64_t drafter_fingerprint() const override { return drafter_fingerprint_; }
  uint64_t embedding_fingerprint() const override { return embedding_fingerprint_; }
  void AppendContext(absl::Span<const ContextRows> rows) override;
  void Draft(absl::Span<const DraftBlock> blocks, int k, DraftCandidates* out) override;

 private:
  int64_t index_len() const { return std::max(kMaxContext, kMaxBlocks * config_.block_size); }
  // Positions of the target, and the masks beyond its last.
  int64_t positions() const {
    return static_cast<int64_t>(target_config_.max_position_embeddings) + config_.block_size;
  }
  absl::Status LoadRank(int rank, const DraftTensors& tensors, const EmbeddingTensors& target,
                        const HostRope& rope);
  void Append(const std::vector<uint16_t>& features, const std::vector<int32_t>& slot,
              const std::vector<int32_t>& position);
  // Of at most kMaxBlocks blocks, [blocks, positions, k] each.
  struct Candidates {
    std::vector<int32_t> tokens;
    std::vector<float> log_probs;
  };
  Candidates DraftSome(absl::Span<const DraftBlock> blocks, int k);
  // The i-th index array of a rank, filled with `values`.
  Tensor Index(int rank, int i, absl::Span<const int32_t> values);

  const DrafterOptions options_;
  const DraftConfig config_;
  const ModelConfig target_config_;
  std::unique_ptr<Checkpoint> target_checkpoint_;  // the embedding stays mapped
  std::vector<uint16_t> embedding_copy_;
  const uint16_t* embedding_ = nullptr;
  uint64_t drafter_fingerprint_ = 0;
  uint64_t embedding_fingerprint_ = 0;
  // Before ranks_: what ranks hold is freed first.
  std::unique_ptr<RankGroup> group_;
  std::vector<Rank> ranks_;
};

absl::Status DrafterImpl::Load() {
  absl::Status status = CheckDraftRanks(config_, options_.tp);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Checkpoint>> target = Checkpoint::Open(options_.target_dir);
  if (!target.ok()) return target.status();
  target_checkpoint_ = *std::move(target);
  absl::StatusOr<std::unique_ptr<Checkpoint>> draft = Checkpoint::Open(options_.drafter_dir);
  if (!draft.ok()) return draft.status();
  const absl::StatusOr<EmbeddingTensors> shared =
      FindEmbeddingTensors(*target_checkpoint_, target_config_);
  if (!shared.ok()) return shared.status();
  const absl::StatusOr<DraftTensors> tensors = FindDraftTensors(**draft, config_);
  if (!tensors.ok()) return tensors.status();
  embedding_ = EmbeddingTable(*shared, embedding_copy_);
  embedding_fingerprint_ = EmbeddingFingerprint(*shared);
  drafter_fingerprint_ = DraftFingerprint(tensors->features, config_);

  absl::StatusOr<std::unique_ptr<RankGroup>> group = RankGroup::Create(options_.tp);
  if (!group.ok()) return group.status();
  group_ = *std::move(group);
  ranks_.resize(options_.tp);
  const HostRope rope(config_.InvFreq(), positions(), config_.attention_factor);
  return group_->RunWithStatus([&](int rank) { return LoadRank(rank, *tensors, *shared, rope); });
}

absl::Status DrafterImpl::LoadRank(int rank, const DraftTensors& tensors,
                                   const EmbeddingTensors& target, const HostRope& rope) {
  kernels::Ops& ops = group_->ops(rank);
  Rank& r = ranks_[rank];
  absl::StatusOr<DraftWeights> weights = LoadDraftWeights(tensors, target, config_, ops);
  if (!weights.ok()) return weights.status();
  absl::StatusOr<std::unique_ptr<DFlash>> model =
      DFlash::Create(config_,
                     {.slots = options_.slots,
                      .window = options_.window,
                      .max_blocks = kMaxBlocks,
                      .max_context = kMaxContext},
                     *std::move(weights), rope, embedding_, ops);
  if (!model.ok()) return model.status();
  r.model = *std::move(model);
  const int64_t rows = static_cast<int64_t>(kMaxBlocks) * config_.block_size;
  struct Request {
    DeviceTensor* tensor;
    DType dtype;
    int64_t rows;
    int64_t cols;
  };
  const Request requests[] = {
      {&r.features, DType::kBf16, kMaxContext, config_.hidden_size},
      {&r.index, DType::kI32, 5 * index_len(), 1},
      {&r.logits, DType::kF32, rows, config_.vocab_size},
      {&r.ids, DType::kI32, rows, kMaxCandidates},
      {&r.log_probs, DType::kF32, rows, kMaxCandidates},
  };
  for (const Request& request : requests) {
    absl::StatusOr<DeviceTensor> tensor =
        AllocateTensor(ops, request.dtype, request.rows, request.cols);
    if (!tensor.ok()) return tensor.status();
    *request.tensor = *std::move(tensor);
  }
  return absl::OkStatus();
}

Tensor DrafterImpl::Index(int rank, int i, absl::Span<const int32_t> values) {
  const Tensor array =
      ranks_[rank].index.view.Rows(i * index_len(), static_cast<int64_t>(values.size()));
  group_->ops(rank).Upload(values.data(), array.data, values.size() * sizeof(int32_t));
  return array;
}

void DrafterImpl::AppendContext(absl::Span<const ContextRows> rows) {
  const int64_t hidden = config_.hidden_size;
  std::vector<uint16_t> features;
  std::vector<int32_t> slot;
  std::vector<int32_t> position;
  const auto flush = [&] {
    if (!slot.empty()) Append(features, slot, position);
    features.clear();
    slot.clear();
    position.clear();
  };
  for (const ContextRows& r : rows) {
    CHECK(r.slot >= 0 && r.slot < options_.slots) << "slot " << r.slot;
    const int64_t last = target_config_.max_position_embeddings;
    CHECK_GE(r.first, 0);
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(r.features.size()) / hidden,
                                            std::max<int64_t>(0, last - r.first));
    // Two entries of one slot may meet in a ring entry: write them one after the other.
    if (std::find(slot.begin(), slot.end(), r.slot) != slot.end()) flush();
    // Rows that the same call pushes out of the window again are never written.
    for (int64_t i = std::max<int64_t>(0, count - options_.window); i < count; ++i) {
      if (static_cast<int>(slot.size()) == kMaxContext) flush();
      const auto row = r.features.subspan(i * hidden, hidden);
      features.insert(features.end(), row.begin(), row.end());
      slot.push_back(r.slot);
      position.push_back(static_cast<int32_t>(r.first + i));
    }
  }
  flush();
}

void DrafterImpl::Append(const std::vector<uint16_t>& features, const std::vector<int32_t>& slot,
                         const std::vector<int32_t>& position) {
  group_->Run([&](int rank) {
    kernels::Ops& ops = group_->ops(rank);
    Rank& r = ranks_[rank];
    ops.Upload(features.data(), r.features.view.data, features.size() * sizeof(uint16_t));
    r.model->AppendContext(r.features.view.Rows(0, static_cast<int64_t>(slot.size())),
                           Index(rank, 0, slot), Index(rank, 1, position));
    ops.Synchronize();
  });
}

void DrafterImpl::Draft(absl::Span<const DraftBlock> blocks, int k, DraftCandidates* out) {
  out->positions = config_.draft_len();
  out->k = std::clamp(k, 0, std::min(kMaxCandidates, config_.vocab_size));
  const size_t per_block = static_cast<size_t>(out->positions) * out->k;
  out->tokens.assign(blocks.size() * per_block, 0);
  out->log_probs.assign(blocks.size() * per_block, -std::numeric_limits<float>::infinity());
  if (out->k == 0) return;
  std::vector<size_t> possible;
  for (size_t i = 0; i < blocks.size(); ++i) {
    CHECK_GE(blocks[i].base_len, 0);
    if (blocks[i].base_len < target_config_.max_position_embeddings) possible.push_back(i);
  }
  for (size_t begin = 0; begin < possible.size(); begin += kMaxBlocks) {
    const auto batch = absl::MakeConstSpan(possible).subspan(begin, kMaxBlocks);
    std::vector<DraftBlock> some;
    for (const size_t i : batch) some.push_back(blocks[i]);
    const Candidates found = DraftSome(some, out->k);
    for (size_t i = 0; i < batch.size(); ++i) {
      std::copy_n(found.tokens.data() + i * per_block, per_block,
                  out->tokens.data() + batch[i] * per_block);
      std::copy_n(found.log_probs.data() + i * per_block, per_block,
                  out->log_probs.data() + batch[i] * per_block);
    }
  }
}

DrafterImpl::Candidates DrafterImpl::DraftSome(absl::Span<const DraftBlock> blocks, int k) {
  std::vector<int32_t> token, position, slot, context_begin, context_end, rows;
  for (const DraftBlock& block : blocks) {
    CHECK(block.slot >= 0 && block.slot < options_.slots) << "slot " << block.slot;
    CHECK(block.anchor >= 0 && block.anchor < config_.vocab_size) << "anchor " << block.anchor;
    const int64_t kept = std::max<int64_t>(0, block.base_len - options_.window);
    slot.push_back(block.slot);
    context_begin.push_back(
        static_cast<int32_t>(std::clamp<int64_t>(block.context_begin, kept, block.base_len)));
    context_end.push_back(static_cast<int32_t>(block.base_len));
    for (int i = 0; i < config_.block_size; ++i) {
      if (i > 0) rows.push_back(static_cast<int32_t>(token.size()));
      token.push_back(i == 0 ? block.anchor : config_.mask_token_id);
      position.push_back(static_cast<int32_t>(block.base_len + i));
    }
  }
  const int64_t count = static_cast<int64_t>(rows.size());
  Candidates found{.tokens = std::vector<int32_t>(count * k),
                   .log_probs = std::vector<float>(count * k)};
  group_->Run([&](int rank) {
    kernels::Ops& ops = group_->ops(rank);
    Rank& r = ranks_[rank];
    r.model->Forward({.blocks = static_cast<int>(blocks.size()),
                      .block_size = config_.block_size,
                      .token = Index(rank, 0, token),
                      .position = Index(rank, 1, position),
                      .slot = Index(rank, 2, slot),
                      .context_begin = Index(rank, 3, context_begin),
                      .context_end = Index(rank, 4, context_end)});
    const Tensor logits = r.logits.view.Rows(0, count);
    r.model->Logits(Index(rank, 0, rows), logits);
    if (rank == 0) {
      // Rows side by side, so that one download fetches them.
      const auto packed = [&](const DeviceTensor& array) {
        return Tensor{.data = array.view.data,
                      .dtype = array.view.dtype,
                      .rows = count,
                      .cols = k,
                      .stride = k};
      };
      ops.TopKLogProbs(logits, k, packed(r.ids), packed(r.log_probs));
      ops.Download(r.ids.view.data, found.tokens.data(), count * k * sizeof(int32_t));
      ops.Download(r.log_probs.view.data, found.log_probs.data(), count * k * sizeof(float));
    }
    ops.Synchronize();
  });
  return found;
}

absl::Status CheckOptions(const DrafterOptions& options) {
  if (options.slots < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots is ", options.slots, "; it must be at least 1"));
  }
  if (options.window < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("window is ", options.window, "; it must be at least 1 position"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Drafter>> Drafter::Load(const DrafterOptions& options) {
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return status;
  absl::StatusOr<DraftConfig> config = LoadDraftConfig(options.drafter_dir);
  if (!config.ok()) return config.status();
  absl::StatusOr<ModelConfig> target = LoadModelConfig(options.target_dir);
  if (!target.ok()) return target.status();
  status = CheckDraftMatchesModel(*config, *target, options.drafter_dir);
  if (!status.ok()) return status;
  auto drafter = std::make_unique<DrafterImpl>(options, *std::move(config), *std::move(target));
  status = drafter->Load();
  if (!status.ok()) return status;
  return drafter;
}

}  // namespace coppice
