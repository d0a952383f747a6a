// Verify attention with mma.sync: one source for sm_90 and sm_120.  docs/kernels.md explains it
// with a picture.
//
// The products are transposed, Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ, so that tokens and value columns lie on
// the 16 side of m16n8k16 and query rows on its 8 side: 8 heads of a node fill it and no row is
// padding.  A block is two groups of four warps, one warp of each group on every tensor core.  A
// group works through three phases a step: scores (each warp a quarter of the 576 dimensions,
// partial sums through shared memory), softmax, values (each warp a quarter of the 512 columns).
// Queries and outputs stay in registers; shared memory is a ring of cache rows.  The groups wait
// for nobody but themselves, so one's softmax falls behind the other's products:
//   SplitRows    both groups attend to every step, each for its half of the tile's rows (tiles of 5
//   … 8 groups) SplitTokens  the groups take alternate steps, each for all rows, and add up at the
//   end    (tiles of 1 … 4)
#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/cuda/mla_verify_internal.cuh"

#ifndef LO_SUB
#define LO_SUB 1
#define LO_ST 10
#endif
#ifndef HI_SUB
#define HI_SUB 2
#define HI_ST 4
#endif
namespace coppice::mla {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupThreads = 128;
constexpr int kWarps = 4;                                      // of a group
constexpr int kValueTiles = COPPICE_MLA_LATENT / 16 / kWarps;  // 16-column tiles of a warp
constexpr int kLatent = COPPICE_MLA_LATENT;
constexpr float kLn2 = 0.693147180559945f;
// A row's reference is a whole number (log2 units) that scores may exceed by this much before all
// is rescaled: products stay far from overflow, rescaling is rare, and exact because it is by a
// power of two.
constexpr float kHeadroom = 8.f;
constexpr float kMostWeight = 256.f;    // 2^kHeadroom
constexpr float kNoReference = -1e30f;  // below any score: whatever is seen first exceeds it

// ---- instructions

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void StoreMatricesTransposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}

__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}

// Barrier of one group's four warps.
__device__ __forceinline__ void GroupBarrier(int group) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

__device__ __forceinline__ bool GroupBarrierAny(int group, bool mine) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.pred q, %1, %2, p; selp.u32 %0, "
      "1, 0, q; }"
      : "=r"(any)
      : "r"(group + 1), "n"(kGroupThreads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void BarrierInit(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when this thread's copies so far have landed.
__device__ __forceinline__ void BarrierArriveOnCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- layout

constexpr int Max(int a, int b) { return a > b ? a : b; }

// Blocks0 and Blocks1: 8-row blocks of group 0 and 1.  SubSteps: 16-token tiles a step.  Stages:
// steps in the ring.
template <int Blocks0, int Blocks1, bool SplitTokens_, int SubSteps_, int Stages>
struct Config {
  static constexpr bool kSplitTokens = SplitTokens_;
  static constexpr int kBlocks0 = Blocks0, kBlocks1 = Blocks1;
  static constexpr int kBlocks = Max(Blocks0, Blocks1);
  static constexpr int kTileGroups = SplitTokens_ ? Blocks0 : Blocks0 + Blocks1;
  static constexpr int kSubSteps = SubSteps_;
  static constexpr int kTokens = 16 * SubSteps_;
  static constexpr int kStages = Stages;
  // Each group's own part of the ring, or the one that both share.
  static constexpr int kRing = SplitTokens_ ? Stages / 2 : Stages;
  static constexpr int kAhead =
      SplitTokens_ ? kRing - 1 : kRing - 2;  // loads run this many steps ahead
  static constexpr int kRowBytes = 1152;
  static constexpr int kPitch =
      kRowBytes + 16;  // an odd number of 16-byte units: ldmatrix meets no bank twice
  static constexpr int kStageBytes = kTokens * kPitch;
  // Partial scores [warp][token][row]; the pitch lets 4 tokens · 8 rows of a store fall into
  // different banks.
  static constexpr int kScorePitch =
      kBlocks * 8 % 32 == 8 || kBlocks * 8 % 32 == 24 ? kBlocks * 8 : kBlocks * 8 + 8;
  static constexpr int kStagingPitch = kLatent * 2 + 16;
  static constexpr int kScoreBytes = Max(kWarps * kTokens * kScorePitch * 4, 8 * kStagingPitch);
  static constexpr int kWeightBytes = kBlocks * 8 * kTokens * 2;
  static constexpr int kRowsBytes = 2 * 32 * 4 + 64;  // two floats a row, and the fragment
  static constexpr int kGroupBytes = kScoreBytes + kWeightBytes + kRowsBytes;
  static constexpr int kBarriers = 2 * kStages * 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kGroupBytes + kBarriers;
  static constexpr int kStepTokens = kTokens * (SplitTokens_ ? 2 : 1);
};

// Softmax of a group: a thread takes kVector adjacent rows of two adjacent tokens.
template <int Blocks, int Tokens>
struct SoftmaxLayout {
  static constexpr int kNeeded = CeilDivide(Blocks * Tokens, 32);
  static constexpr int kVector = kNeeded <= 1 ? 1 : kNeeded <= 2 ? 2 : 4;
  static constexpr int kVectors = Blocks * 8 / kVector;  // of a token's column
  static constexpr int kPairs = Tokens / 2;
  static constexpr int kActive = kVectors * kPairs;
  static_assert(kActive <= kGroupThreads);
};

// Byte offset of `row`'s 16-byte chunk (8 tokens) in the weights, bf16 [row][token].  The exclusive
// or keeps both the eight rows of an ldmatrix and the stores of the softmax in different banks.
template <int Tokens>
__device__ __forceinline__ int WeightOffset(int row, int chunk) {
  if constexpr (Tokens == 32) {
    return row * 64 + ((chunk ^ (row >> 1 & 3) ^ (row >> 3 & 3)) << 4);
  } else {
    return row * 32 + ((chunk ^ (row >> 2 & 1)) << 4);
  }
}

template <int N>
__device__ __forceinline__ void LoadShared(float (&v)[N], uint32_t address) {
  if constexpr (N == 4) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(v[0]), "=f"(v[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(address) : "memory");
  }
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreShared2(uint32_t address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(low), "f"(high) : "memory");
}

// Hides how `value` was computed, so that the compiler keeps it in a register instead of computing
// it again and again.
__device__ __forceinline__ void Keep(uint32_t& value) { asm("" : "+r"(value)); }

// What one group does for a block's fragments.
template <typename C, int Blocks>
struct Group {
  using Softmax = SoftmaxLayout<Blocks, C::kTokens>;
  static constexpr int kVector = Softmax::kVector;
  static constexpr int kKeySteps =
      COPPICE_MLA_ROW / 16 / kWarps;  // 16-dimension steps of a warp: 9

  const AttentionArguments& a;
  const int group, thread, warp, lane;
  uint8_t* const ring;
  float* const scores;
  uint8_t* const weights;
  float* const row_factor;     // [32]: rescaling, later the inverse sums
  float* const row_base;       // [32]
  const Fragment* const work;  // the fragment in hand, in shared memory
  const uint32_t full, empty;  // barriers of the ring's stages

  // This thread's places in shared memory.  Keys and values relative to their stage.
  uint32_t keys, values, scores_out, scores_in, weights_out, weights_in;

  uint32_t query[kKeySteps][Blocks][2];
  float output[kValueTiles][Blocks][4];
  float reference[kVector], sum[kVector];
  // The ring's stage in use, and the parity of its round.
  uint32_t stage = 0, parity = 0;

  __device__ Group(const AttentionArguments& arguments, int group_index, uint8_t* shared)
      : a(arguments),
        group(group_index),
        thread(threadIdx.x % kGroupThreads),
        warp(thread / 32),
        lane(thread % 32),
        ring(shared + (C::kSplitTokens ? group * C::kRing * C::kStageBytes : 0)),
        scores(reinterpret_cast<float*>(shared + C::kStages * C::kStageBytes +
                                        group * C::kGroupBytes)),
        weights(reinterpret_cast<uint8_t*>(scores) + C::kScoreBytes),
        row_factor(reinterpret_cast<float*>(weights + C::kWeightBytes)),
        row_base(row_factor + 32),
        work(reinterpret_cast<const Fragment*>(row_base + 32)),
        full(SharedAddress(shared + C::kStages * C::kStageBytes + 2 * C::kGroupBytes) +
             (C::kSplitTokens ? group * C::kRing * 8 : 0)),
        empty(full + C::kStages * 8) {
    keys = SharedAddress(ring) + lane % 16 * C::kPitch + lane / 16 * 16 + warp * kKeySteps * 32;
    values = SharedAddress(ring) + (lane / 16 * 8 + lane % 8) * C::kPitch + lane / 8 % 2 * 16 +
             warp * kValueTiles * 32;
    scores_out =
        SharedAddress(scores + (warp * C::kTokens + lane / 4) * C::kScorePitch + lane % 4 * 2);
    scores_in = SharedAddress(scores + PairToken() * C::kScorePitch + VectorRow());
    weights_out = SharedAddress(weights) + WeightOffset<C::kTokens>(VectorRow(), PairToken() / 8) +
                  PairToken() % 8 * 2;
    weights_in = SharedAddress(weights) +
                 (C::kSubSteps == 2 ? WeightOffset<32>(lane % 8, lane / 8)
                                    : WeightOffset<16>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    Keep(keys), Keep(values), Keep(scores_out), Keep(scores_in), Keep(weights_out),
        Keep(weights_in);
  }

  __device__ int FirstBlock() const { return C::kSplitTokens ? 0 : group * C::kBlocks0; }

  // Queries as B operands: thread holds dimensions 2·(lane % 4) + {0, 1} (and + 8) of row lane / 4.
  __device__ void LoadQueries(const Fragment& f) {
    const int per_node = GroupsPerNode(a.shape.heads);
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      const int block = FirstBlock() + n;
      const int g = f.first_group + block;
      const int node = g / per_node, head = g % per_node * kGroupRows + lane / 4;
      const bool live = block < f.groups && head < a.shape.heads;
      const int64_t row =
          (static_cast<int64_t>(f.request) * a.shape.nodes + node) * a.shape.heads + head;
      const uint32_t* q = static_cast<const uint32_t*>(a.tensors.query) +
                          row * (COPPICE_MLA_ROW / 2) + warp * kKeySteps * 8 + lane % 4;
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
        query[k][n][0] = live ? __ldg(q + k * 8) : 0u;
        query[k][n][1] = live ? __ldg(q + k * 8 + 4) : 0u;
      }
    }
  }

  // ---- the ring

  // Where this thread's copies come from: its row of the fragment's first step, and the last row
  // there is.
  struct Source {
    const int32_t* table;
    int first, last;
  };

  // This thread's row of sub-step u in the fragment's step n, or the last row where that is past
  // the end.
  __device__ int Position(const Source& s, int n, int u) const {
    return min(s.first + n * C::kTokens + u * 16, s.last);
  }

  __device__ void ReadTable(const Source& s, int n, int (&pages)[C::kSubSteps]) const {
#pragma unroll
    for (int u = 0; u < C::kSubSteps; ++u)
      pages[u] = __ldg(s.table + (Position(s, n, u) >> a.page_shift));
  }

  // Copies the fragment's step n into the stage that is `ahead` of the one in use: eight threads a
  // row, 128 bytes at a time.
  __device__ void Load(const Source& s, int n, int ahead, bool reused,
                       const int (&pages)[C::kSubSteps]) {
    uint32_t at = stage + ahead, round = parity;
    if (at >= C::kRing) at -= C::kRing, round ^= 1;
    if (reused) BarrierWait(empty + at * 8, round ^ 1);
    const uint32_t to = SharedAddress(ring) + at * C::kStageBytes +
                        (warp * 4 + lane / 8) * C::kPitch + lane % 8 * 16;
#pragma unroll
    for (int u = 0; u < C::kSubSteps; ++u) {
      const int slot = Position(s, n, u) & ((1 << a.page_shift) - 1);
      const uint8_t* from = static_cast<const uint8_t*>(a.tensors.cache) +
                            static_cast<int64_t>(pages[u]) * a.tensors.page_stride +
                            slot * C::kRowBytes + lane % 8 * 16;
#pragma unroll
      for (int i = 0; i < C::kRowBytes / 128; ++i)
        CopyAsync16(to + u * 16 * C::kPitch + i * 128, from + i * 128);
    }
    BarrierArriveOnCopies(full + at * 8);
  }

  // ---- the phases of a step

  // Products of a chain wait for each other: there are at least four chains, of several blocks, of
  // both tiles of a step (unless four blocks fill the registers), or of every second or fourth
  // dimension step.  Each key fragment is loaded while the one before is multiplied.
  __device__ void Scores() {
    constexpr int kTiles = Blocks <= 3 ? C::kSubSteps : 1;  // tiles at a time
    constexpr int kChains = Blocks * kTiles >= 4 ? 1 : Blocks * kTiles >= 2 ? 2 : 4;
    const uint32_t from = keys + stage * C::kStageBytes;
#pragma unroll
    for (int first = 0; first < C::kSubSteps; first += kTiles) {
      float s[kTiles][Blocks][kChains][4];
#pragma unroll
      for (int u = 0; u < kTiles; ++u)
#pragma unroll
        for (int n = 0; n < Blocks; ++n)
#pragma unroll
          for (int c = 0; c < kChains; ++c)
            s[u][n][c][0] = s[u][n][c][1] = s[u][n][c][2] = s[u][n][c][3] = 0.f;
      constexpr int kLoads = kKeySteps * kTiles;
      const auto address = [&](int i) {
        return from + (first + i % kTiles) * 16 * C::kPitch + i / kTiles * 32;
      };
      uint32_t key[2][4];
      LoadMatrices(key[0], address(0));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (i + 1 < kLoads) LoadMatrices(key[(i + 1) % 2], address(i + 1));
        const int k = i / kTiles;
#pragma unroll
        for (int n = 0; n < Blocks; ++n) {
          Multiply(s[i % kTiles][n][k % kChains], key[i % 2], query[k][n][0], query[k][n][1]);
        }
      }
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
#pragma unroll
        for (int n = 0; n < Blocks; ++n) {
          float(&v)[kChains][4] = s[u][n];
#pragma unroll
          for (int c = 1; c < kChains; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) v[0][j] += v[c][j];
          }
          const uint32_t at = scores_out + ((first + u) * 16 * C::kScorePitch + n * 8) * 4;
          StoreShared2(at, v[0][0], v[0][1]);
          StoreShared2(at + 8 * C::kScorePitch * 4, v[0][2], v[0][3]);
        }
      }
    }
  }

  __device__ int VectorRow() const { return thread % Softmax::kVectors * kVector; }
  __device__ int PairToken() const { return thread / Softmax::kVectors * 2; }
  __device__ bool InSoftmax() const {
    return Softmax::kActive == kGroupThreads || thread < Softmax::kActive;
  }

  // Scores of this thread's rows and two tokens, not yet scaled.
  __device__ void ReadScores(float (&x)[2][kVector]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float part[kWarps][kVector];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        LoadShared(part[w], scores_in + (t + w * C::kTokens) * C::kScorePitch * 4);
      }
#pragma unroll
      for (int r = 0; r < kVector; ++r)
        x[t][r] = (part[0][r] + part[1][r]) + (part[2][r] + part[3][r]);
    }
  }

  // −inf where not visible.
  __device__ __noinline__ static uint32_t Visible(const AttentionArguments& a, const Fragment& f,
                                                  int block, int token) {
    if (block >= f.groups) return 3;  // rows that nobody writes
    const int node = (f.first_group + block) / GroupsPerNode(a.shape.heads);
    const uint64_t word =
        a.tensors.ancestor_words[static_cast<int64_t>(f.request) * a.shape.nodes + node];
    uint32_t visible = 0;
    for (int t = 0; t < 2; ++t) {
      const int j = token + t - f.context;
      if (j < 0 || (j < f.nodes && (word >> j & 1) != 0)) visible |= 1u << t;
    }
    return visible;
  }

  __device__ void Mask(int step, float (&x)[2][kVector]) const {
    const Fragment& f = *work;
    const uint32_t visible =
        Visible(a, f, FirstBlock() + VectorRow() / 8, f.begin + step * C::kTokens + PairToken());
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int r = 0; r < kVector; ++r) x[t][r] = (visible >> t & 1) != 0 ? x[t][r] : -INFINITY;
    }
  }

  __device__ void WriteWeights(const float (&p)[2][kVector]) const {
#pragma unroll
    for (int r = 0; r < kVector; ++r) {
      // WeightOffset of row VectorRow() + r, told from that of VectorRow(), which is a multiple of
      // kVector.
      StoreShared(WeightRow(r), PackBf16(p[0][r], p[1][r]));
    }
  }
  __device__ uint32_t WeightRow(int r) const {
    return C::kTokens == 32 ? (weights_out ^ static_cast<uint32_t>(r / 2 << 4)) + r * 64
                            : weights_out + r * 32;
  }

  // Some row outgrew its reference: every such row takes its peak, rounded up, as the new one.
  __device__ void Rescale(int step, bool masked, float (&p)[2][kVector]) {
    float x[2][kVector];
    float* peaks =
        reinterpret_cast<float*>(weights);  // [pair][row], until the weights are written again
    constexpr int kRows = Blocks * 8;
    if (InSoftmax()) {
      ReadScores(x);
      if (masked) Mask(step, x);
#pragma unroll
      for (int r = 0; r < kVector; ++r) {
        peaks[PairToken() / 2 * kRows + VectorRow() + r] = fmaxf(x[0][r], x[1][r]) * a.scale_log2;
      }
    }
    GroupBarrier(group);
    if (InSoftmax()) {
#pragma unroll
      for (int r = 0; r < kVector; ++r) {
        float peak = -INFINITY;
#pragma unroll
        for (int i = 0; i < Softmax::kPairs; ++i)
          peak = fmaxf(peak, peaks[i * kRows + VectorRow() + r]);
        const float next = peak > reference[r] + kHeadroom ? ceilf(peak) : reference[r];
        const float factor = Exp2(reference[r] - next);
        if (PairToken() == 0) row_factor[VectorRow() + r] = factor;
        sum[r] *= factor;
        reference[r] = next;
        p[0][r] = Exp2(fmaf(x[0][r], a.scale_log2, -next));
        p[1][r] = Exp2(fmaf(x[1][r], a.scale_log2, -next));
      }
    }
    GroupBarrier(group);
    if (InSoftmax()) WriteWeights(p);
    GroupBarrier(group);
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(row_factor + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        output[i][n][0] *= factor.x;
        output[i][n][1] *= factor.y;
        output[i][n][2] *= factor.x;
        output[i][n][3] *= factor.y;
      }
    }
  }

  __device__ void Weigh(int step, bool masked) {
    float p[2][kVector];
    bool outgrown = false;
    if (InSoftmax()) {
      ReadScores(p);
      if (masked) Mask(step, p);
      float most = 0.f;
#pragma unroll
      for (int r = 0; r < kVector; ++r) {
        p[0][r] = Exp2(fmaf(p[0][r], a.scale_log2, -reference[r]));
        p[1][r] = Exp2(fmaf(p[1][r], a.scale_log2, -reference[r]));
        most = fmaxf(most, p[0][r] + p[1][r]);
      }
      outgrown =
          most > kMostWeight;  // certain where a score exceeds its reference by more than kHeadroom
      WriteWeights(p);
    }
    if (GroupBarrierAny(group, outgrown)) Rescale(step, masked, p);
    if (InSoftmax()) {
#pragma unroll
      for (int r = 0; r < kVector; ++r) sum[r] += p[0][r] + p[1][r];
    }
  }

  __device__ void Values() {
    const uint32_t from = values + stage * C::kStageBytes;
    uint32_t weight[C::kSubSteps][Blocks][2];
    uint32_t value[2][4];
    LoadMatricesTransposed(value[0], from);
    if constexpr (C::kSubSteps == 2) {
#pragma unroll
      for (int n = 0; n < Blocks; ++n) {
        uint32_t r[4];
        LoadMatrices(r, (weights_in ^ static_cast<uint32_t>(n << 4)) + n * 512);
        weight[0][n][0] = r[0], weight[0][n][1] = r[1];
        weight[1][n][0] = r[2], weight[1][n][1] = r[3];
      }
    } else {
#pragma unroll
      for (int n = 0; n < Blocks; n += 2) {
        uint32_t r[4];
        LoadMatrices(r, weights_in + n * 256);  // of an odd last block the upper half is not used
        weight[0][n][0] = r[0], weight[0][n][1] = r[1];
        if (n + 1 < Blocks) weight[0][n + 1][0] = r[2], weight[0][n + 1][1] = r[3];
      }
    }
#pragma unroll
    for (int u = 0; u < C::kSubSteps; ++u) {
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        const int next = u * kValueTiles + i + 1;
        if (next < C::kSubSteps * kValueTiles) {
          LoadMatricesTransposed(value[next % 2], from + next / kValueTiles * 16 * C::kPitch +
                                                      next % kValueTiles * 32);
        }
#pragma unroll
        for (int n = 0; n < Blocks; ++n) {
          Multiply(output[i][n], value[(next - 1) % 2], weight[u][n][0], weight[u][n][1]);
        }
      }
    }
  }

  // ---- a fragment's end

  // Leaves each row's sum in row_factor and its reference in row_base.
  __device__ void ReduceSums() {
    constexpr int kRows = Blocks * 8;
    GroupBarrier(group);  // the last step's weights have been read
    float* sums = reinterpret_cast<float*>(weights);
    if (InSoftmax()) {
#pragma unroll
      for (int r = 0; r < kVector; ++r) {
        sums[PairToken() / 2 * kRows + VectorRow() + r] = sum[r];
        if (PairToken() == 0) row_base[VectorRow() + r] = reference[r];
      }
    }
    GroupBarrier(group);
    if (thread < kRows) {
      float total = 0.f;
      for (int i = 0; i < Softmax::kPairs; ++i) total += sums[i * kRows + thread];
      row_factor[thread] = total;
    }
  }

  // Scales value tiles [First, Last) by row_factor and writes them, a block of 8 rows at a time.
  template <int First, int Last>
  __device__ void Write(const Fragment& f) {
    constexpr int kChunks = (Last - First) * 2;  // 16-byte chunks of a warp's columns
    const int per_node = GroupsPerNode(a.shape.heads);
    uint8_t* staging = reinterpret_cast<uint8_t*>(scores);
    const uint32_t to = SharedAddress(staging) + lane % 8 * C::kStagingPitch +
                        warp * kValueTiles * 32 + lane / 8 * 16;
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      const int block = FirstBlock() + n;
      if (block >= f.groups) break;
      const float2 factor = *reinterpret_cast<const float2*>(row_factor + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = First; i < Last; i += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float low = output[i + q / 2][n][q % 2 * 2] * factor.x;
          const float high = output[i + q / 2][n][q % 2 * 2 + 1] * factor.y;
          packed[q] = f.slot >= 0 ? PackHalf(low, high) : PackBf16(low, high);
        }
        StoreMatricesTransposed(to + i * 32, packed);
      }
      GroupBarrier(group);
      const int g = f.first_group + block;
#pragma unroll
      for (int i = 0; i < kChunks * kWarps * 8 / kGroupThreads; ++i) {
        const int index = i * kGroupThreads + thread;
        const int row = index / (kChunks * kWarps), chunk = index % (kChunks * kWarps);
        const int column_byte =
            chunk / kChunks * (kValueTiles * 32) + First * 32 + chunk % kChunks * 16;
        const uint4 data =
            *reinterpret_cast<const uint4*>(staging + row * C::kStagingPitch + column_byte);
        const int head = g % per_node * kGroupRows + row;
        if (f.slot >= 0) {
          const int64_t at = static_cast<int64_t>(f.slot) * (a.instance.tile_groups * kGroupRows) +
                             block * 8 + row;
          *reinterpret_cast<uint4*>(reinterpret_cast<uint8_t*>(a.workspace.partial_output) +
                                    at * (kLatent * 2) + column_byte) = data;
        } else if (head < a.shape.heads) {
          const int64_t at =
              (static_cast<int64_t>(f.request) * a.shape.nodes + g / per_node) * a.shape.heads +
              head;
          *reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.tensors.output) + at * (kLatent * 2) +
                                    column_byte) = data;
        }
      }
      GroupBarrier(group);
    }
  }

  // Log-sum-exp of row `row` from its sum and reference.
  __device__ void WriteLse(const Fragment& f, int row, float total, float base) const {
    const int block = FirstBlock() + row / 8;
    if (block >= f.groups) return;
    const float lse = total > 0.f ? base + __log2f(total) : -INFINITY;
    if (f.slot >= 0) {
      a.workspace.partial_lse[static_cast<int64_t>(f.slot) * (a.instance.tile_groups * kGroupRows) +
                              block * 8 + row % 8] = lse;
      return;
    }
    const int per_node = GroupsPerNode(a.shape.heads);
    const int g = f.first_group + block, head = g % per_node * kGroupRows + row % 8;
    if (a.tensors.lse != nullptr && head < a.shape.heads) {
      a.tensors
          .lse[(static_cast<int64_t>(f.request) * a.shape.nodes + g / per_node) * a.shape.heads +
               head] = lse * kLn2;
    }
  }

  __device__ void Finish(const Fragment& f) {
    GroupBarrier(group);
    if (thread < Blocks * 8) {
      const float total = row_factor[thread];
      WriteLse(f, thread, total, row_base[thread]);
      row_factor[thread] = total > 0.f ? 1.f / total : 0.f;
    }
    GroupBarrier(group);
    Write<0, kValueTiles>(f);
  }

  // The groups add up: group 0 keeps each warp's lower value tiles, group 1 the upper ones.
  __device__ void FinishTogether(const Fragment& f, uint8_t* shared) {
    constexpr int kHalf = kValueTiles / 2;
    const float* other_factor = row_factor + (group == 0 ? 1 : -1) * (C::kGroupBytes / 4);
    __syncthreads();
    float mine = 0.f, inverse = 0.f;
    if (thread < Blocks * 8) {
      const float base = row_base[thread], other_base = other_factor[32 + thread];
      const float top = fmaxf(base, other_base);
      mine = Exp2(base - top);
      const float total = row_factor[thread] * mine + other_factor[thread] * Exp2(other_base - top);
      if (group == 0) WriteLse(f, thread, total, top);
      inverse = total > 0.f ? 1.f / total : 0.f;
    }
    __syncthreads();
    if (thread < Blocks * 8) row_factor[thread] = mine * inverse;
    GroupBarrier(group);
    float* exchange = reinterpret_cast<float*>(shared);  // [sender][value][thread]
    constexpr int kSent = kHalf * Blocks * 4;
    static_assert(2 * kSent * kGroupThreads * 4 <= C::kStages * C::kStageBytes);
    float* send = exchange + group * kSent * kGroupThreads + thread;
    const float* receive = exchange + (1 - group) * kSent * kGroupThreads + thread;
    const auto scale = [&](int n, int v) { return row_factor[n * 8 + lane % 4 * 2 + v % 2]; };
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
#pragma unroll
      for (int n = 0; n < Blocks; ++n) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float value = group == 0 ? output[kHalf + i][n][v] : output[i][n][v];
          send[((i * Blocks + n) * 4 + v) * kGroupThreads] = value * scale(n, v);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
#pragma unroll
      for (int n = 0; n < Blocks; ++n) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float value =
              (group == 0 ? output[i][n][v] : output[kHalf + i][n][v]) * scale(n, v) +
              receive[((i * Blocks + n) * 4 + v) * kGroupThreads];
          if (group == 0) {
            output[i][n][v] = value;
          } else {
            output[kHalf + i][n][v] = value;
          }
        }
      }
    }
    __syncthreads();  // the exchange is the ring
    if (thread < 32) row_factor[thread] = 1.f;
    GroupBarrier(group);
    if (group == 0) {
      Write<0, kHalf>(f);
    } else {
      Write<kHalf, kValueTiles>(f);
    }
  }

  __device__ void Run(uint8_t* shared) {
    const int last = a.workspace.fragment_begin[blockIdx.x + 1];
    int begun = 0;  // steps loaded before this fragment, as far as the ring is deep
    for (int index = a.workspace.fragment_begin[blockIdx.x]; index < last; ++index) {
      GroupBarrier(group);
      if (thread < static_cast<int>(sizeof(Fragment) / 4)) {
        reinterpret_cast<int32_t*>(const_cast<Fragment*>(work))[thread] =
            reinterpret_cast<const int32_t*>(a.workspace.fragments + index)[thread];
      }
      GroupBarrier(group);
      const int all_steps = (work->end - work->begin + C::kTokens - 1) / C::kTokens;
      // Of these, this group takes `steps`; its step k is the fragment's step Step(k).
      const int steps = C::kSplitTokens ? (all_steps - group + 1) / 2 : all_steps;
      // The first of the fragment's steps with a position that not everybody sees.
      const int first_masked = max(work->context - work->begin, 0) / C::kTokens;
      const auto step = [&](int k) { return C::kSplitTokens ? 2 * k + group : k; };
      // Where both groups share the ring they take turns loading it.
      const auto loads = [&](int k) { return C::kSplitTokens || k % 2 == group; };
      constexpr int kTurn = C::kSplitTokens ? 1 : 2;

      const Source source = {a.tensors.page_table + work->request * a.tensors.table_stride,
                             work->begin + warp * 4 + lane / 8, work->end - 1};
      int pages[C::kSubSteps];
      ReadTable(source, step(C::kSplitTokens ? 0 : group), pages);
#pragma unroll 1
      for (int k = 0; k < C::kAhead; ++k) {
        if (loads(k) && k < steps) {
          Load(source, step(k), k, begun + k >= C::kRing, pages);
          ReadTable(source, step(k + kTurn), pages);
        }
      }
      LoadQueries(*work);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i)
#pragma unroll
        for (int n = 0; n < Blocks; ++n)
          output[i][n][0] = output[i][n][1] = output[i][n][2] = output[i][n][3] = 0.f;
#pragma unroll
      for (int r = 0; r < kVector; ++r) reference[r] = kNoReference, sum[r] = 0.f;

#pragma unroll 1
      for (int k = 0; k < steps; ++k) {
        BarrierWait(full + stage * 8, parity);
        Scores();
        GroupBarrier(group);
        Weigh(step(k), step(k) >= first_masked);
        if (loads(k + C::kAhead) && k + C::kAhead < steps) {
          Load(source, step(k + C::kAhead), C::kAhead, begun + k + C::kAhead >= C::kRing, pages);
          ReadTable(source, step(k + C::kAhead + kTurn), pages);
        }
        Values();
        __syncwarp();
        if (lane == 0) BarrierArrive(empty + stage * 8);
        if (++stage == C::kRing) stage = 0, parity ^= 1;
      }
      begun = min(begun + steps, C::kRing);
      ReduceSums();
      if constexpr (C::kSplitTokens) {
        FinishTogether(*work, shared);
      } else {
        Finish(*work);
      }
    }
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    VerifyAttention(const __grid_constant__ AttentionArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  if constexpr (C::kSharedBytes > 101376) return;  // sm_90's layouts are launched on sm_90 only
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t barriers =
      SharedAddress(shared + C::kStages * C::kStageBytes + 2 * C::kGroupBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      BarrierInit(barriers + i * 8, kGroupThreads);
      BarrierInit(barriers + (C::kStages + i) * 8, C::kSplitTokens ? kWarps : 2 * kWarps);
    }
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int group = threadIdx.x / kGroupThreads;
  if constexpr (C::kBlocks0 == C::kBlocks1) {
    Group<C, C::kBlocks0>(a, group, shared).Run(shared);
  } else if (group == 0) {
    Group<C, C::kBlocks0>(a, 0, shared).Run(shared);
  } else {
    Group<C, C::kBlocks1>(a, 1, shared).Run(shared);
  }
}

// ---- instances

// Of tiles of 1 … 4 groups, the two groups of warps take tokens in turn; of 5 … 8, half of the rows
// each.
template <int Groups, int SubSteps, int Stages>
using Tiles = std::conditional_t<(Groups <= 4), Config<Groups, Groups, true, SubSteps, Stages>,
                                 Config<(Groups + 1) / 2, Groups / 2, false, SubSteps, Stages>>;

// Within the 101,376 bytes of shared memory that a block of sm_120 may have.
template <int Groups>
using Small = Tiles<Groups, 1, 4>;

// Within sm_90's 232,448.
template <int Groups>
using Large = Tiles<Groups, (Groups <= 4 ? LO_SUB : HI_SUB), (Groups <= 4 ? LO_ST : HI_ST)>;

template <typename C>
cudaError_t PrepareOne() {
  return cudaFuncSetAttribute(VerifyAttention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              C::kSharedBytes);
}

template <typename C>
cudaError_t LaunchOne(const AttentionArguments& a, cudaStream_t stream) {
  return LaunchDependent(VerifyAttention<C>, a.blocks, kThreads, C::kSharedBytes, stream, a);
}

template <typename C>
struct Tag {
  using Type = C;
};

// Calls f with the configuration of tiles of `groups`.
template <template <int> typename Family, typename F>
auto DispatchIn(int groups, F f) {
  switch (groups) {
    case 1:
      return f(Tag<Family<1>>());
    case 2:
      return f(Tag<Family<2>>());
    case 3:
      return f(Tag<Family<3>>());
    case 4:
      return f(Tag<Family<4>>());
    case 5:
      return f(Tag<Family<5>>());
    case 6:
      return f(Tag<Family<6>>());
    case 7:
      return f(Tag<Family<7>>());
    default:
      return f(Tag<Family<8>>());
  }
}

template <typename F>
auto Dispatch(int groups, bool large, F f) {
  return large ? DispatchIn<Large>(groups, f) : DispatchIn<Small>(groups, f);
}

bool UsesLarge(const coppice_mla_shape& shape, int major) {
  return major == 9 && shape.instance != COPPICE_MLA_COMMON_SMALL;
}

}  // namespace

Instance CommonInstance(const coppice_mla_shape& shape, int major) {
  const int tile = EvenTile(shape.nodes * GroupsPerNode(shape.heads), 8);
  return Dispatch(tile, UsesLarge(shape, major), [](auto tag) {
    using C = typename decltype(tag)::Type;
    return Instance{C::kTileGroups, C::kStepTokens, 1};
  });
}

cudaError_t PrepareCommon(int major) {
  cudaError_t error = cudaSuccess;
  for (int groups = 1; groups <= 8; ++groups) {
    for (const bool large : {false, true}) {
      if ((large && major != 9) || error != cudaSuccess) continue;
      error = Dispatch(groups, large,
                       [](auto tag) { return PrepareOne<typename decltype(tag)::Type>(); });
    }
  }
  return error;
}

cudaError_t LaunchCommon(const AttentionArguments& a, int major, cudaStream_t stream) {
  return Dispatch(a.instance.tile_groups, UsesLarge(a.shape, major),
                  [&](auto tag) { return LaunchOne<typename decltype(tag)::Type>(a, stream); });
}

}  // namespace coppice::mla
