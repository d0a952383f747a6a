// The reference Ops: one rank of a group of threads, computing at once in the caller's thread.
#ifndef COPPICE_KERNELS_CPU_CPU_OPS_H_
#define COPPICE_KERNELS_CPU_CPU_OPS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/collective.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/scratch.h"
#include "kernels/ops.h"

namespace coppice::kernels::cpu {

class CpuOps : public Ops {
 public:
  CpuOps(const KernelTable* kernels, HostCollective* collective, int rank)
      : kernels_(*kernels), collective_(*collective), rank_(rank) {}

  int rank() const override { return rank_; }
  int ranks() const override { return collective_.ranks(); }
  DType activation_dtype() const override { return DType::kF32; }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) override;
  void Upload(const void* host, void* device, size_t bytes) override;
  void Download(const void* device, void* host, size_t bytes) override;
  void Synchronize() override {}
  absl::StatusOr<std::unique_ptr<Matrix>> Prepare(const HostMatrix& weight) override;

  void Embed(Tensor ids, const uint16_t* table, Tensor out) override;
  void RmsNorm(Tensor x, Tensor weight, float eps, Tensor out) override;
  void Copy(Tensor x, Tensor out) override;
  void GatherRows(Tensor x, Tensor indices, Tensor out) override;
  void ToBf16(Tensor x, Tensor out) override;
  void FromBf16(Tensor x, Tensor out) override;
  void SwiGlu(Tensor gate_up, Tensor out) override;

  void Linear(Tensor x, const Matrix& w, Tensor y) override;
  void HeadLinear(Tensor x, absl::Span<const std::unique_ptr<Matrix>> w, Tensor y) override;
  void RowLinear(Tensor x, const SegmentedMatrix& w, Tensor residual) override;
  void AllGatherColumns(Tensor x, Tensor out) override;

  void MlaWriteCache(Tensor kv_a, Tensor norm_weight, float eps, const RopeTable& rope,
                     const RowBatch& batch, const MlaShape& shape, LatentCache cache) override;
  void MlaAbsorbQuery(Tensor q, absl::Span<const std::unique_ptr<Matrix>> w_uk,
                      const RopeTable& rope, const RowBatch& batch, const MlaShape& shape,
                      Tensor q_latent) override;
  void MlaAttention(Tensor q_latent, const RowBatch& batch, const MlaShape& shape,
                    LatentCache cache, Tensor o_latent) override;

  void Route(Tensor x, const Matrix& gate, Tensor bias, const RouterShape& shape, Tensor ids,
             Tensor weights) override;
  void Moe(Tensor x, Tensor ids, Tensor weights, const ExpertWeights& experts,
           Tensor residual) override;

  void MoveRows(Tensor cache, Tensor src, Tensor dst) override;
  void ScatterRows(Tensor x, Tensor dst, Tensor out) override;

  void DraftWriteContext(Tensor kv, absl::Span<const Tensor> k_norm, const RopeTable& rope,
                         Tensor slot, Tensor position, const GqaShape& shape,
                         DraftCache cache) override;
  void DraftAttention(Tensor qkv, Tensor q_norm, Tensor k_norm, const RopeTable& rope,
                      const DraftBatch& batch, int layer, bool causal, const GqaShape& shape,
                      DraftCache cache, Tensor out) override;
  void TopKLogProbs(Tensor logits, int k, Tensor ids, Tensor log_probs) override;

 private:
  // y = Σ over `segments` matrices side by side of x · wᵀ; rows of x taken through row_index where
  // it is given. `next`, if known, is multiplied after this: its weights are fetched meanwhile.
  void Product(const float* x, int64_t x_stride, const int32_t* row_index, int64_t rows,
               absl::Span<const std::unique_ptr<Matrix>> segments, float* y, int64_t y_stride,
               const Matrix* next = nullptr);
  void Product(const float* x, int64_t x_stride, const int32_t* row_index, int64_t rows,
               const Matrix& w, float* y, int64_t y_stride, const Matrix* next = nullptr);
  void RunProduct(const float* x, int64_t x_stride, const int32_t* row_index, int64_t rows,
                  const Matrix& first, absl::Span<const void* const> panels, float* y,
                  int64_t y_stride, const Matrix* next);
  const HostCollective::All& Exchange(HostCollective::Published mine) {
    return collective_.Exchange(rank_, mine);
  }
  // Memory that may be published with the next Exchange.
  Scratch<float>& shared_scratch() { return collective_.Memory(rank_); }

  // residual[r] += what `terms_of(r, &args)` describes, for every row.  The terms lie in memory
  // that all ranks read, so many rows are divided among the ranks, which then read each other's
  // sums.
  template <typename TermsOf>
  void AddOverRanks(Tensor residual, TermsOf terms_of);

  // The segments of one sum: already added up by the one rank that has the whole, or spread over
  // the ranks.
  struct Segments {
    std::array<const float*, kSegments> of;
    int count = 0;
  };

  struct MoeChunk;
  // This rank's part of one chunk's expert and shared products, into memory that every rank then
  // reads.
  void ComputeExperts(const MoeChunk& chunk, const ExpertWeights& experts);

  // Lists of queries and of visible tokens, kept so that attention does not allocate.
  struct AttentionLists {
    std::vector<const float*> q;
    std::vector<float*> out;
    std::vector<float> max, sum;
    std::vector<const float*> k, v;
  };

  const KernelTable& kernels_;
  HostCollective& collective_;
  const int rank_;

  Scratch<float> stage_;
  Scratch<float> segment_;
  Scratch<float> gate_up_;
  Scratch<float> activation_;
  Scratch<float> rows_;
  Scratch<char> bytes_;
  Scratch<int32_t> indices_;
  AttentionLists lists_;
  std::vector<Segments> term_segments_;
  std::vector<CombineArgs::Sum> term_sums_;
  std::vector<float> term_weights_;
};

template <typename TermsOf>
void CpuOps::AddOverRanks(Tensor residual, TermsOf terms_of) {
  // Fewer floats are summed by every rank for itself: meeting once more would take longer.
  constexpr int64_t kDivide = int64_t{1} << 15;
  const int64_t rows = residual.rows, cols = residual.cols;
  CombineArgs args;
  args.n = cols;
  if (ranks() == 1 || rows * cols < kDivide) {
    for (int64_t r = 0; r < rows; ++r) {
      terms_of(r, &args);
      args.out = residual.f32() + r * residual.stride;
      kernels_.combine(args);
    }
    return;
  }
  auto first_of = [&](int rank) { return rows * rank / ranks(); };
  const int64_t begin = first_of(rank_), end = first_of(rank_ + 1);
  float* sums = shared_scratch().Get((end - begin) * cols);
  args.add = false;
  for (int64_t r = begin; r < end; ++r) {
    terms_of(r, &args);
    args.out = sums + (r - begin) * cols;
    kernels_.combine(args);
  }
  const HostCollective::All& all = Exchange({sums, nullptr});
  const float* sum = nullptr;
  args = {};
  args.n = cols;
  args.last = {&sum, 1};
  for (int rank = 0; rank < ranks(); ++rank) {
    sum = static_cast<const float*>(all[rank].data);
    for (int64_t r = first_of(rank); r < first_of(rank + 1); ++r, sum += cols) {
      args.out = residual.f32() + r * residual.stride;
      kernels_.combine(args);
    }
  }
}

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_CPU_OPS_H_
