// The one interface between models and hardware: what a tensor-parallel rank of a DeepSeek-V3
// target or a DFlash drafter computes.  `cpu/` is the reference; every other backend is checked
// against it.
//
// One Ops object is one rank: it owns its memory, its queue of work, and its seat in the rank
// group.  Calls enqueue in order and are complete, as far as the host can see, after Synchronize()
// (the CPU backend computes at once).  Calls marked COLLECTIVE must be made by every rank of the
// group in the same order.
//
// Order of summation (what makes results independent of batch, tree shape and rank count):
//   * A row's result depends on that row's inputs only, never on which other rows share the call.
//   * Linear sums k = 0, 1, 2 … in order with fused multiply-adds.
//   * RowLinear cuts K into kSegments equal segments, sums each as Linear does, and adds the
//     segments in order; rank r of R holds segments [r * 8 / R, (r + 1) * 8 / R).
//   * Moe adds each chosen expert's 8 segments first, then the experts in slot order, then the
//     shared expert.
//   * Attention visits a row's visible tokens in position order, wherever they are stored; its
//     running softmax is rescaled at every 64th of them.
// A backend's fast mode may relax this; the CPU backend never does.
#ifndef COPPICE_KERNELS_OPS_H_
#define COPPICE_KERNELS_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace coppice::kernels {

// Row-parallel products are summed in this many fixed segments, so a rank count must divide it.
inline constexpr int kSegments = 8;

enum class DType { kF32, kBf16, kI32, kU64 };
int64_t SizeOf(DType dtype);

// A view of device memory: `rows` × `cols` elements, rows `stride` elements apart.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  float* f32() const { return static_cast<float*>(data); }
  int32_t* i32() const { return static_cast<int32_t*>(data); }
  uint64_t* u64() const { return static_cast<uint64_t*>(data); }
  uint16_t* bf16() const { return static_cast<uint16_t*>(data); }
  // Rows [begin, begin + count) and columns [begin, begin + count) as views.
  Tensor Rows(int64_t begin, int64_t count) const;
  Tensor Cols(int64_t begin, int64_t count) const;
};

// Device memory that frees itself.  Zeroed when allocated.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() const = 0;
  virtual size_t bytes() const = 0;
};

// A weight as a checkpoint holds it, or a rectangle of it: `rows` (outputs) × `cols` (inputs),
// row-major.
struct HostMatrix {
  enum class Encoding {
    kBf16,
    kF32,
    // compressed-tensors pack-quantized: int32 words of 8 nibbles, lowest nibble first, value =
    // nibble - 8, one bf16 scale per 32 inputs; a weight is value * scale rounded to bf16.
    kInt4Group32,
  };
  Encoding encoding = Encoding::kBf16;
  const void* data = nullptr;    // element (0, 0) of the rectangle; need not be aligned
  int64_t row_bytes = 0;         // distance between rows of `data`
  const void* scales = nullptr;  // kInt4Group32: scale of (0, 0); need not be aligned
  int64_t scale_row_bytes = 0;   // kInt4Group32: distance between rows of `scales`
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t first_col =
      0;  // kInt4Group32: column of the rectangle within its group and word (0..31);
          // `data` and `scales` then point at the group's first word and scale
  bool transposed = false;  // multiply by the transpose: outputs are `cols`, inputs are `rows`
};

// A weight in the backend's own layout, ready to multiply.
class Matrix {
 public:
  virtual ~Matrix() = default;
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }

 protected:
  Matrix(int64_t outputs, int64_t inputs) : outputs_(outputs), inputs_(inputs) {}

 private:
  int64_t outputs_;
  int64_t inputs_;
};

// cos and sin of every position and pair, [positions, pairs] each, already scaled by the attention
// factor.
struct RopeTable {
  Tensor cos;  // f32
  Tensor sin;  // f32
};

// The paged latent cache of one layer: token slot s of page p is row p * page_size + s; a row is
// kv_lora_rank latents (after their norm), then qk_rope_head_dim rotated key values.
struct LatentCache {
  Tensor rows;  // [pages * page_size, kv_lora_rank + qk_rope_head_dim]; f32 on the CPU
  int page_size = 0;
};

// The rows of one step, grouped by request.  All arrays are device memory.
// Row j of request r (rows row_begin[r] <= row < row_begin[r + 1], j = row - row_begin[r]) sees the
// request's first context_len[r] cached tokens, then: if causal[r], its request's rows 0 … j; else
// the rows whose bit is set in ancestors[row] (bit j itself included), which are its path from the
// root in ascending order of depth and of row.  Its own latent lies at logical token slot
// context_len[r] + j of the request's page table.
struct RowBatch {
  int rows = 0;
  int requests = 0;
  int max_pages = 0;   // row length of page_table
  Tensor token;        // i32 [rows]
  Tensor position;     // i32 [rows]: context_len + depth
  Tensor request;      // i32 [rows]
  Tensor row_begin;    // i32 [requests + 1]
  Tensor context_len;  // i32 [requests]
  Tensor causal;       // i32 [requests]: 1 for a prefill chunk
  Tensor ancestors;    // u64 [rows]; ignored where causal
  Tensor page_table;   // i32 [requests, max_pages]
};

struct MlaShape {
  int heads = 0;  // of this rank
  int kv_lora_rank = 0;
  int qk_nope_head_dim = 0;
  int qk_rope_head_dim = 0;
  int v_head_dim = 0;
  float softmax_scale = 0;
};

struct RouterShape {
  int experts = 0;
  int top_k = 0;
  int n_group = 1;
  int topk_group = 1;
  bool norm_topk_prob = true;
  float routed_scaling_factor = 1;
};

// The experts of one layer as this rank holds them.  Tensor parallel: every expert, its
// intermediate dimension sliced to this rank's segments.  Expert parallel: some experts whole (null
// where another rank has it).
struct ExpertWeights {
  struct Expert {
    std::unique_ptr<Matrix> gate_up;  // [2 * slice, hidden]: gate rows, then up rows
    std::vector<std::unique_ptr<Matrix>>
        down_segments;  // this rank's segments, each [hidden, segment]
  };
  std::vector<Expert> experts;
  Expert shared;  // always sliced over the ranks, as RowLinear's weights are
};

// A row-parallel weight: this rank's segments, in order, each [outputs, K / kSegments].
using SegmentedMatrix = std::vector<std::unique_ptr<Matrix>>;

// K/V of the drafter's context: per sequence slot and layer a ring of `window` positions; position
// p of a sequence is ring entry p % window.  Keys are cached rotated, so the window slides without
// renumbering.
struct DraftCache {
  Tensor keys;    // f32 [slots * layers * window, kv_heads * head_dim]
  Tensor values;  // f32, the same shape
  int slots = 0;
  int layers = 0;
  int window = 0;
};

struct GqaShape {
  int heads = 0;     // query heads of this rank
  int kv_heads = 0;  // key/value heads of this rank
  int head_dim = 0;
  float rms_norm_eps = 0;
};

// One block per sequence: row b * block + k is offset k of block b.
struct DraftBatch {
  int blocks = 0;
  int block_size = 0;
  Tensor token;          // i32 [blocks * block_size]: the anchor, then mask tokens
  Tensor position;       // i32 [blocks * block_size]
  Tensor slot;           // i32 [blocks]: sequence slot in the DraftCache
  Tensor context_begin;  // i32 [blocks]: first visible context position
  Tensor context_end;    // i32 [blocks]: one past the last (= the anchor's position)
};

class Ops {
 public:
  virtual ~Ops() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual DType activation_dtype() const = 0;  // of x, h, q … below; f32 on the CPU

  // --- memory ---
  // RESOURCE_EXHAUSTED with the sizes asked for and left.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) = 0;
  virtual void Upload(const void* host, void* device, size_t bytes) = 0;
  virtual void Download(const void* device, void* host, size_t bytes) = 0;  // synchronizes
  virtual void Synchronize() = 0;
  // Copies the weight into the backend's layout.  INVALID_ARGUMENT for a shape that cannot be.
  virtual absl::StatusOr<std::unique_ptr<Matrix>> Prepare(const HostMatrix& weight) = 0;

  // --- rows ---
  // out[i] = table[ids[i]]; `table` is host memory, bf16 [vocab, cols] (embeddings stay where the
  // file is mapped).
  virtual void Embed(Tensor ids, const uint16_t* table, Tensor out) = 0;
  // out = x * rsqrt(mean(x²) + eps) * weight; statistics in fp32.  x and out may be the same.
  virtual void RmsNorm(Tensor x, Tensor weight, float eps, Tensor out) = 0;
  virtual void Copy(Tensor x, Tensor out) = 0;
  virtual void GatherRows(Tensor x, Tensor indices, Tensor out) = 0;  // out[i] = x[indices[i]]
  virtual void ToBf16(Tensor x, Tensor out) = 0;                      // round to nearest even
  virtual void FromBf16(Tensor x, Tensor out) = 0;
  // out = silu(gate_up[:, :n]) * gate_up[:, n:].
  virtual void SwiGlu(Tensor gate_up, Tensor out) = 0;

  // --- products ---
  virtual void Linear(Tensor x, const Matrix& w, Tensor y) = 0;  // y = x · wᵀ
  // y[:, h] = x[:, h] · w[h]ᵀ for every head h; x is [n, heads * inputs], y [n, heads * outputs].
  virtual void HeadLinear(Tensor x, absl::Span<const std::unique_ptr<Matrix>> w, Tensor y) = 0;
  // COLLECTIVE.  residual += Σ over the 8 segments in order; x holds this rank's segments side by
  // side.
  virtual void RowLinear(Tensor x, const SegmentedMatrix& w, Tensor residual) = 0;
  // COLLECTIVE.  out[:, r * cols …] = rank r's x.
  virtual void AllGatherColumns(Tensor x, Tensor out) = 0;

  // --- multi-head latent attention ---
  // Writes each row's latent (RMSNorm of the first kv_lora_rank columns) and rotated key (the rest,
  // interleaved pairs) into the cache slot of the row.  kv_a: [rows, kv_lora_rank +
  // qk_rope_head_dim].
  virtual void MlaWriteCache(Tensor kv_a, Tensor norm_weight, float eps, const RopeTable& rope,
                             const RowBatch& batch, const MlaShape& shape, LatentCache cache) = 0;
  // q: [rows, heads * (nope + rope)] → q_latent: [rows, heads * (kv_lora_rank + rope)]: the
  // absorbed query q_nope · W_UK per head, then the rotated q_pe.  w_uk[h] maps nope →
  // kv_lora_rank.
  virtual void MlaAbsorbQuery(Tensor q, absl::Span<const std::unique_ptr<Matrix>> w_uk,
                              const RopeTable& rope, const RowBatch& batch, const MlaShape& shape,
                              Tensor q_latent) = 0;
  // o_latent: [rows, heads * kv_lora_rank].
  virtual void MlaAttention(Tensor q_latent, const RowBatch& batch, const MlaShape& shape,
                            LatentCache cache, Tensor o_latent) = 0;

  // --- mixture of experts ---
  // logits = x · gateᵀ in fp32; choice = sigmoid(logits) + bias; the top_k best choices over the
  // best groups, ties to the lower index, in descending order of choice; weights from the unbiased
  // sigmoid.  A row with a non-finite logit selects nothing: ids -1, weights 0.   ids: i32 [rows,
  // top_k]; weights: f32 [rows, top_k].
  virtual void Route(Tensor x, const Matrix& gate, Tensor bias, const RouterShape& shape,
                     Tensor ids, Tensor weights) = 0;
  // COLLECTIVE.  residual += Σ_slot weight · expert(x) + shared(x).
  virtual void Moe(Tensor x, Tensor ids, Tensor weights, const ExpertWeights& experts,
                   Tensor residual) = 0;

  // --- cache maintenance ---
  // cache[dst[i]] = cache[src[i]] for all i, reading everything before writing anything.  src, dst:
  // i32 [n], rows of `cache`.
  virtual void MoveRows(Tensor cache, Tensor src, Tensor dst) = 0;
  virtual void ScatterRows(Tensor x, Tensor dst, Tensor out) = 0;  // out[dst[i]] = x[i]; any dtype

  // --- drafter ---
  // kv: [rows, layers * 2 * kv_heads * head_dim], per layer K then V.  K is normed per head by
  // k_norm[layer] and rotated (half-split) at position[i]; both are written at slot[i]'s ring.
  virtual void DraftWriteContext(Tensor kv, absl::Span<const Tensor> k_norm, const RopeTable& rope,
                                 Tensor slot, Tensor position, const GqaShape& shape,
                                 DraftCache cache) = 0;
  // qkv: [rows, (heads + 2 * kv_heads) * head_dim].  Norms and rotates q and k, attends over the
  // slot's context positions [context_begin, context_end) in order, then the block's own rows (all
  // of them, or 0 … k if `causal`); scale head_dim^-0.5.  out: [rows, heads * head_dim].
  virtual void DraftAttention(Tensor qkv, Tensor q_norm, Tensor k_norm, const RopeTable& rope,
                              const DraftBatch& batch, int layer, bool causal,
                              const GqaShape& shape, DraftCache cache, Tensor out) = 0;
  // Per row of logits the k largest in descending order (ties to the lower id) and their
  // log-softmax; id -1 and -infinity where a row has no k-th number.
  // ids: i32 [rows, k]; log_probs: f32 [rows, k].
  virtual void TopKLogProbs(Tensor logits, int k, Tensor ids, Tensor log_probs) = 0;
};

// The ranks of one CPU group meet here.  `ranks` must divide kSegments.
class CpuGroup {
 public:
  virtual ~CpuGroup() = default;
  virtual int ranks() const = 0;
  // The Ops of one rank; used by one thread at a time.  The group outlives it.
  virtual std::unique_ptr<Ops> CreateOps(int rank) = 0;
};
absl::StatusOr<std::unique_ptr<CpuGroup>> CreateCpuGroup(int ranks);

}  // namespace coppice::kernels

#endif  // COPPICE_KERNELS_OPS_H_
