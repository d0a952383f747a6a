// A target whose layers tests look into.
#ifndef COPPICE_MODEL_TRACED_TARGET_H_
#define COPPICE_MODEL_TRACED_TARGET_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/deepseek_v3.h"
#include "model/rank_group.h"
#include "model/step_rows.h"

namespace coppice {

// What rank 0 saw of a forward, and all ranks' logits.
struct Trace {
  std::vector<std::vector<float>> hidden;    // per layer
  std::vector<std::vector<int32_t>> chosen;  // per mixture-of-experts layer
  std::vector<std::vector<float>> weights;
  std::vector<float> logits;
};

// All ranks of a target without its pool and features.
class TracedTarget {
 public:
  TracedTarget(const std::string& dir, int tp, int max_rows,
               std::optional<double> lora_norm_eps = {})
      : max_rows_(max_rows) {
    config_ = LoadModelConfig(dir).value();
    if (lora_norm_eps.has_value()) config_.lora_norm_eps = *lora_norm_eps;
    checkpoint_ = Checkpoint::Open(dir).value();
    tensors_ = FindTargetTensors(*checkpoint_, config_).value();
    group_ = RankGroup::Create(tp).value();
    LoadProgress progress(1, nullptr);
    const HostRope rope(config_.InvFreq(), config_.max_position_embeddings,
                        config_.rope_amplitude());
    const uint16_t* embedding = EmbeddingTable(tensors_.shared, embedding_);
    models_.resize(tp);
    group_->Run([&](int rank) {
      kernels::Ops& ops = group_->ops(rank);
      models_[rank] =
          DeepSeekV3::Create(
              config_, {.max_rows = max_rows, .page_size = kPageSize, .pages = pages(), .taps = {}},
              LoadTargetWeights(tensors_, config_, ops, progress).value(), std::nullopt, rope,
              embedding, ops)
              .value();
    });
  }

  const ModelConfig& config() const { return config_; }

  Trace Run(const SequenceRows& sequence) {
    const StepRows step = StepRows::Pack({sequence}, {.vocab_size = config_.vocab_size,
                                                      .page_size = kPageSize,
                                                      .pages = pages(),
                                                      .positions = config_.max_position_embeddings,
                                                      .max_rows = max_rows_})
                              .value();
    Trace trace;
    const int64_t wanted = static_cast<int64_t>(step.logit_rows().size());
    trace.logits.resize(wanted * config_.vocab_size);
    group_->Run([&](int rank) {
      kernels::Ops& ops = group_->ops(rank);
      DeepSeekV3& model = *models_[rank];
      const auto block = ops.Allocate(step.block().size()).value();
      ops.Upload(step.block().data(), block->data(), step.block().size());
      DeepSeekV3::Observer observer;
      if (rank == 0) {
        observer = [&](int, kernels::Tensor hidden) {
          trace.hidden.push_back(Fetch<float>(ops, hidden));
        };
      }
      model.Forward(step.At(block->data()), observer);
      if (rank == 0) {
        for (int l = 0; l < model.moe_layers(); ++l) {
          trace.chosen.push_back(Fetch<int32_t>(ops, model.ChosenExperts(l)));
          trace.weights.push_back(Fetch<float>(ops, model.ExpertWeightsOf(l)));
        }
      }
      const DeviceTensor rows = AllocateTensor(ops, kernels::DType::kI32, wanted, 1).value();
      ops.Upload(step.logit_rows().data(), rows.view.data, wanted * sizeof(int32_t));
      const int64_t local = model.local_vocab();
      const DeviceTensor part = AllocateTensor(ops, kernels::DType::kF32, wanted, local).value();
      model.Logits(rows.view, part.view);
      const std::vector<float> values = Fetch<float>(ops, part.view);
      for (int64_t i = 0; i < wanted; ++i) {
        std::copy_n(values.begin() + i * local, local,
                    trace.logits.begin() + i * config_.vocab_size + rank * local);
      }
    });
    return trace;
  }

  // A page table that visits the pages out of order, so that physical order is not that of
  // positions.
  std::vector<int32_t> PageTable(int64_t tokens) const {
    std::vector<int32_t> table;
    for (int64_t p = (tokens + kPageSize - 1) / kPageSize; p >= 1; --p) {
      table.push_back(static_cast<int32_t>(p));
    }
    return table;
  }

 private:
  static constexpr int kPageSize = 16;

  int64_t pages() const { return max_rows_ / kPageSize + 2; }

  template <typename T>
  static std::vector<T> Fetch(kernels::Ops& ops, kernels::Tensor tensor) {
    EXPECT_EQ(tensor.stride, tensor.cols);
    std::vector<T> values(tensor.rows * tensor.cols);
    ops.Download(tensor.data, values.data(), values.size() * sizeof(T));
    return values;
  }

  const int max_rows_;
  ModelConfig config_;
  std::unique_ptr<Checkpoint> checkpoint_;
  TargetTensors tensors_;
  std::vector<uint16_t> embedding_;
  std::unique_ptr<RankGroup> group_;
  std::vector<std::unique_ptr<DeepSeekV3>> models_;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_TRACED_TARGET_H_
