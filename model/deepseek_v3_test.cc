// Every layer against transformers' DeepseekV3ForCausalLM, which computes attention in the plain
// form: agreement is also that of the absorbed form with it.
#include "model/deepseek_v3.h"

#include <numeric>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/golden_files.h"
#include "model/rank_group.h"
#include "model/step_rows.h"

namespace coppice {
namespace {

using kernels::DType;
using kernels::Tensor;

// What rank 0 saw of a forward, and all ranks' logits.
struct Trace {
  std::vector<std::vector<float>> hidden;    // per layer
  std::vector<std::vector<int32_t>> chosen;  // per mixture-of-experts layer
  std::vector<std::vector<float>> weights;
  std::vector<float> logits;
};

class Model {
 public:
  Model(const std::string& dir, int tp, int max_rows) : max_rows_(max_rows) {
    config_ = LoadModelConfig(dir).value();
    checkpoint_ = Checkpoint::Open(dir).value();
    tensors_ = FindTargetTensors(*checkpoint_, config_).value();
    group_ = RankGroup::Create(tp).value();
    LoadProgress progress(1, nullptr);
    const HostRope rope(config_.InvFreq(), config_.max_position_embeddings,
                        config_.rope_amplitude());
    models_.resize(tp);
    group_->Run([&](int rank) {
      kernels::Ops& ops = group_->ops(rank);
      models_[rank] =
          DeepSeekV3::Create(
              config_, {.max_rows = max_rows, .page_size = kPageSize, .pages = pages(), .taps = {}},
              LoadTargetWeights(tensors_, config_, ops, progress).value(), std::nullopt, rope,
              EmbeddingTable(tensors_.shared, embedding_), ops)
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
        observer = [&](int, Tensor hidden) { trace.hidden.push_back(Fetch<float>(ops, hidden)); };
      }
      model.Forward(step.At(block->data()), observer);
      if (rank == 0) {
        for (int l = 0; l < model.moe_layers(); ++l) {
          trace.chosen.push_back(Fetch<int32_t>(ops, model.ChosenExperts(l)));
          trace.weights.push_back(Fetch<float>(ops, model.ExpertWeightsOf(l)));
        }
      }
      const DeviceTensor rows = AllocateTensor(ops, DType::kI32, wanted, 1).value();
      ops.Upload(step.logit_rows().data(), rows.view.data, wanted * sizeof(int32_t));
      const int64_t local = model.local_vocab();
      const DeviceTensor part = AllocateTensor(ops, DType::kF32, wanted, local).value();
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
  static std::vector<T> Fetch(kernels::Ops& ops, Tensor tensor) {
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

std::string Directory(const std::string& name) { return "tests/goldens/models/" + name; }

template <typename T>
std::vector<T> Slice(const std::vector<T>& all, size_t i, size_t n) {
  return std::vector<T>(all.begin() + i * n, all.begin() + (i + 1) * n);
}

class Golden : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

void ExpectGolden(const GoldenFile& golden, const std::string& name, const Trace& trace) {
  const std::vector<float> hidden = golden.F32(name + ".hidden");
  ASSERT_EQ(static_cast<int64_t>(trace.hidden.size()), golden.Shape(name + ".hidden")[0]);
  for (size_t l = 0; l < trace.hidden.size(); ++l) {
    EXPECT_LE(RelativeError(trace.hidden[l], Slice(hidden, l, trace.hidden[l].size())), 1e-5)
        << name << ", layer " << l;
  }
  const std::vector<int32_t> experts = golden.I32(name + ".experts");
  const std::vector<float> weights = golden.F32(name + ".expert_weights");
  ASSERT_EQ(static_cast<int64_t>(trace.chosen.size()), golden.Shape(name + ".experts")[0]);
  for (size_t l = 0; l < trace.chosen.size(); ++l) {
    EXPECT_EQ(trace.chosen[l], Slice(experts, l, trace.chosen[l].size()))
        << name << ", mixture-of-experts layer " << l;
    EXPECT_LE(RelativeError(trace.weights[l], Slice(weights, l, trace.weights[l].size())), 1e-5)
        << name << ", mixture-of-experts layer " << l;
  }
  EXPECT_LE(RelativeError(trace.logits, golden.F32(name + ".logits")), 2e-5) << name;
}

TEST_P(Golden, PromptInOneChunk) {
  const auto& [name, tp] = GetParam();
  const GoldenFile golden(Directory(name) + "/golden.safetensors");
  Model model(Directory(name), tp, 64);
  const std::vector<int32_t> ids = golden.I32("prompt.ids");
  std::vector<int32_t> all(ids.size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int32_t> pages = model.PageTable(static_cast<int64_t>(ids.size()));
  ExpectGolden(golden, "prompt",
               model.Run({.context_len = 0,
                          .tokens = ids,
                          .depths = {},
                          .ancestors = {},
                          .page_table = pages,
                          .logit_rows = all}));
}

// A chain of nodes whose depths jump to positions where only YaRN's scaled frequencies are right.
TEST_P(Golden, PositionsToTheLast) {
  const auto& [name, tp] = GetParam();
  const GoldenFile golden(Directory(name) + "/golden.safetensors");
  Model model(Directory(name), tp, 64);
  const std::vector<int32_t> ids = golden.I32("far.ids");
  const std::vector<int32_t> positions = golden.I32("far.positions");
  ASSERT_EQ(positions.back(), model.config().max_position_embeddings - 1);
  // To the bit, since one rounding of a frequency shows in the logits out there.
  ASSERT_EQ(model.config().InvFreq(), golden.F32("inv_freq"));
  std::vector<int32_t> all(ids.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<uint64_t> chain;
  for (size_t i = 0; i < ids.size(); ++i) chain.push_back((uint64_t{2} << i) - 1);
  const std::vector<int32_t> pages = model.PageTable(static_cast<int64_t>(ids.size()));
  ExpectGolden(golden, "far",
               model.Run({.context_len = 0,
                          .tokens = ids,
                          .depths = positions,
                          .ancestors = chain,
                          .page_table = pages,
                          .logit_rows = all}));
}

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         ::testing::Combine(::testing::Values("int4", "bf16", "experts384"),
                                            ::testing::Values(1, 8)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_tp" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(LongContext, BeyondTheOriginalRange) {
  const GoldenFile golden(Directory("int4") + "/golden.safetensors");
  const std::vector<int32_t> ids = golden.I32("long.ids");
  const int n = static_cast<int>(ids.size());
  ASSERT_GT(n, 4096);
  Model model(Directory("int4"), 1, n);
  const std::vector<int32_t> pages = model.PageTable(n);
  const std::vector<int32_t> last = {n - 4, n - 3, n - 2, n - 1};
  const Trace trace = model.Run({.context_len = 0,
                                 .tokens = ids,
                                 .depths = {},
                                 .ancestors = {},
                                 .page_table = pages,
                                 .logit_rows = last});
  EXPECT_LE(RelativeError(trace.logits, golden.F32("long.logits")), 1e-4);
}

}  // namespace
}  // namespace coppice
