// Verify attention with mma.sync: one source for sm_90 and sm_120.  docs/kernels.md explains it
// with a picture.
//
// The products are transposed, Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ, so that tokens and value columns lie on
// the 16 side of m16n8k16 and query rows on its 8 side: 8 heads of a node fill it and no row is
// padding.  A block is two groups of four warps, one warp of each group on every tensor core.  A
// group works through three phases a step: scores (each warp a quarter of the 576 dimensions,
// partial sums through shared memory), softmax, values (each warp a quarter of the 512 columns).
// Queries and outputs stay in registers; shared memory is a ring of cache rows.  The groups wait
// for nobody but themselves, so one's softmax falls behind the other's products.
//
// In tiles of 5 … 8 groups of rows both groups of warps attend to every step, each for its half of
// the rows ("split rows"); in tiles of 1 … 4 they take alternate steps, each for all rows, and add
// up at the end ("split tokens").
#include <cuda_bf16.h>

#include <cstddef>
#include <type_traits>

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupThreads = 128;
// Shared memory that a block may have: on sm_120, on sm_90.
constexpr int kSmallBytes = 101376, kLargeBytes = 232448;
constexpr int kWarps = 4;                                      // of a group
constexpr int kValueTiles = COPPICE_MLA_LATENT / 16 / kWarps;  // 16-column tiles of a warp
constexpr int kHalf = kValueTiles / 2;
constexpr int kLatent = COPPICE_MLA_LATENT;
constexpr int kScaleByte = 512, kRopeByte = 528;  // in a row of COPPICE_MLA_FP8
constexpr float kLn2 = 0.693147180559945f;
// Weights of an e4m3 row carry its scale and this, which keeps them clear of fp16's subnormal
// numbers.
constexpr float kLift = 64.f;
constexpr float kNoPeak = -1e30f;  // of a row that saw nothing: below any score

using namespace gpu;

// ---- instructions

__device__ __forceinline__ void StoreMatricesTransposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void MultiplyHalf(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two e4m3 in the lower or upper half of `packed`, exactly, as two fp16.
template <int Half>
__device__ __forceinline__ uint32_t Widen(uint32_t packed) {
  uint32_t wide;
  if constexpr (Half == 0) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(wide)
        : "r"(packed));
  } else {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(wide)
        : "r"(packed));
  }
  return wide;
}

// Finite whatever comes: weights times a token's scale, and queries, need not fit.
__device__ __forceinline__ uint32_t PackFiniteHalf(float low, float high) {
  constexpr float kMost = 65504.f;
  __half2 v =
      __floats2half2_rn(fminf(fmaxf(low, -kMost), kMost), fminf(fmaxf(high, -kMost), kMost));
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

// ---- layout

constexpr int Max(int a, int b) { return a > b ? a : b; }

// Blocks0 and Blocks1: 8-row blocks of group 0 and 1.  SubSteps: 16-token tiles a step.  Stages:
// steps in the ring.
template <int Blocks0, int Blocks1, bool SplitTokens_, int SubSteps_, int Stages, bool Fp8>
struct Config {
  static constexpr bool kFp8 = Fp8;
  static constexpr bool kSplitTokens = SplitTokens_;
  static constexpr int kBlocks0 = Blocks0, kBlocks1 = Blocks1;
  static constexpr int kBlocks = Max(Blocks0, Blocks1);
  static constexpr int kTileGroups = SplitTokens_ ? Blocks0 : Blocks0 + Blocks1;
  static constexpr int kSubSteps = SubSteps_;
  static constexpr int kTokens = 16 * SubSteps_;
  static constexpr int kStages = Stages;
  // Each group's own part of the ring, or the one that both share.
  static constexpr int kRing = SplitTokens_ ? Stages / 2 : Stages;
  // Loads run this many steps ahead.
  static constexpr int kAhead = SplitTokens_ ? kRing - 1 : kRing - 2;
  static constexpr int kRowBytes = Fp8 ? 656 : 1152;
  // An odd number of 16-byte units: ldmatrix meets no bank twice.
  static constexpr int kPitch = Fp8 ? 656 : 1152 + 16;
  static constexpr int kStageBytes = kTokens * kPitch;
  // Partial scores [warp][token][row]; the pitch lets 4 tokens · 8 rows of a store fall into
  // different banks.
  static constexpr int kScorePitch =
      kBlocks * 8 % 32 == 8 || kBlocks * 8 % 32 == 24 ? kBlocks * 8 : kBlocks * 8 + 8;
  // The scores' place also serves the queries at a fragment's start (a block of rows) and the
  // outputs at its end (a block of rows of each warp's columns).
  static constexpr int kQueryPitch = COPPICE_MLA_ROW * 2 + 16;
  static constexpr int kStagingPitch = kValueTiles * 32 + 16;
  static constexpr int kScoreBytes =
      Max(kWarps * kTokens * kScorePitch * 4, Max(8 * kQueryPitch, kWarps * 8 * kStagingPitch));
  static constexpr int kWeightBytes = kBlocks * 8 * kTokens * 2;
  static constexpr int kRowsBytes = 2 * 32 * 4 + 64;  // two floats a row, and the fragment
  static constexpr int kGroupBytes = kScoreBytes + kWeightBytes + kRowsBytes;
  // The ring, each group's own, the ring's barriers, the ring's page numbers.
  static constexpr int kBarriers = kStages * kStageBytes + 2 * kGroupBytes;
  static constexpr int kPages = kBarriers + 2 * kStages * 8;
  static constexpr int kSharedBytes = kPages + kStages * kTokens * 4;
  static_assert(SplitTokens_ || kAhead % 2 == 0,
                "a step's loader is the one that runs kAhead before it");
  static constexpr int kStepTokens = kTokens * (SplitTokens_ ? 2 : 1);
};

// Softmax of a group: each warp has one block of 8 rows, a thread of it kVector adjacent rows of
// two tokens.  Pair p of tokens is (8·(p / 4) + p % 4, that + 4): threads that read scores together
// meet different banks, and of the tokens' order in the weights only the places within 8 change.
template <int Tokens>
struct SoftmaxLayout {
  static constexpr int kVector = Tokens / 8;
  static constexpr int kVectors = 8 / kVector;  // of a token's 8 rows
  static_assert(32 / kVectors == Tokens / 2);
  __device__ static int Row(int thread) { return thread / 32 * 8 + thread % kVectors * kVector; }
  __device__ static int Pair(int thread) { return thread % 32 / kVectors; }
  __device__ static int Token(int thread) { return Pair(thread) / 4 * 8 + Pair(thread) % 4; }
};
// The token at place `place` of 8 in the weights.
__device__ __forceinline__ int TokenAt(int place) { return place / 2 + place % 2 * 4; }

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

__device__ __forceinline__ void StoreShared2(uint32_t address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(low), "f"(high) : "memory");
}

template <int N>
__device__ __forceinline__ void StoreVector(uint32_t address, const float (&v)[N]) {
  if constexpr (N == 4) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3])
                 : "memory");
  } else {
    StoreShared2(address, v[0], v[1]);
  }
}

__device__ __forceinline__ float LoadFloat(uint32_t address) {
  float v[1];
  LoadShared(v, address);
  return v[0];
}

__device__ __forceinline__ void StoreFloat(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ int LoadInt(uint32_t address) {
  int v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint4 LoadQuad(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void StoreQuad(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Hides how `value` was computed, so that the compiler keeps it in a register instead of computing
// it again and again.
__device__ __forceinline__ void Keep(uint32_t& value) { asm("" : "+r"(value)); }

// The thread's index, read where it is used: what follows from it is not worth registers in the
// loop.
__device__ __forceinline__ int FreshThread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % kGroupThreads;
}

// `value` without what the compiler knows of it: products of small factors would become byte dot
// products, whose packed constants cost registers, and addresses for a fragment's end would be held
// ready throughout.
__device__ __forceinline__ int Plain(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What one group does for a block's fragments.
template <typename C, int Blocks>
struct Group {
  using Softmax = SoftmaxLayout<C::kTokens>;
  static constexpr int kVector = Softmax::kVector;
  static constexpr float kUnlift = C::kFp8 ? 1.f / kLift : 1.f;
  static constexpr int kKeySteps =
      COPPICE_MLA_ROW / 16 / kWarps;  // 16-dimension steps of a warp: 9

  const AttentionArguments& a;
  const int group;
  // Addresses in shared memory: the ring, the group's own part and what lies in it.
  const uint32_t ring, scores;
  __device__ uint32_t Weights() const { return scores + C::kScoreBytes; }
  // Rescaling; later sums, then their inverses.
  __device__ uint32_t RowFactor() const { return Weights() + C::kWeightBytes; }
  // Peaks.
  __device__ uint32_t RowBase() const { return RowFactor() + 32 * 4; }
  // The fragment in hand, and the list's place.
  static constexpr int kWork = C::kScoreBytes + C::kWeightBytes + 2 * 32 * 4;
  __device__ uint32_t Work() const { return scores + kWork; }
  const uint32_t full;  // the ring's barriers
  __device__ uint32_t Empty() const { return full + C::kStages * 8; }

  // This thread's places.  Keys and values relative to their stage.
  uint32_t keys, values, scores_out, scores_in, weights_out, weights_in;
  uint32_t rope_keys, scale_of;  // of an FP8 row
  uint32_t page_numbers;         // of the ring's rows

  uint32_t query[kKeySteps][Blocks][2];
  float output[kValueTiles][Blocks][4];
  float sum[kVector];  // of this thread's tokens
  // The ring's stage in use, and the parity of its round.
  uint32_t stage = 0, parity = 0;

  __device__ Group(const AttentionArguments& arguments, int group_index, uint32_t shared)
      : a(arguments),
        group(group_index),
        ring(shared + (C::kSplitTokens ? group * C::kRing * C::kStageBytes : 0)),
        scores(shared + C::kStages * C::kStageBytes + group * C::kGroupBytes),
        full(shared + C::kBarriers + (C::kSplitTokens ? group * C::kRing * 8 : 0)) {
    const int self = FreshThread(), warp = self / 32, lane = self % 32;
    keys = ring + lane % 16 * C::kPitch + lane / 16 * 16 +
           warp * (C::kFp8 ? kLatent / kWarps : kKeySteps * 32);
    if constexpr (C::kFp8) {
      rope_keys = ring + lane % 16 * C::kPitch + lane / 16 * 16 + kRopeByte + warp * 32;
      scale_of = ring + lane / 4 * C::kPitch + kScaleByte;
    }
    values = C::kFp8 ? ring + (lane / 8 % 2 * 8 + TokenAt(lane % 8)) * C::kPitch + lane / 16 * 16 +
                           warp * kValueTiles * 16
                     : ring + (lane / 16 * 8 + TokenAt(lane % 8)) * C::kPitch + lane / 8 % 2 * 16 +
                           warp * kValueTiles * 32;
    scores_out = scores + ((warp * C::kTokens + lane / 4) * C::kScorePitch + lane % 4 * 2) * 4;
    scores_in = scores + (Softmax::Token(self) * C::kScorePitch + Softmax::Row(self)) * 4;
    weights_out = Weights() +
                  WeightOffset<C::kTokens>(Softmax::Row(self), Softmax::Pair(self) / 4) +
                  Softmax::Pair(self) % 4 * 4;
    weights_in =
        Weights() + (C::kSubSteps == 2 ? WeightOffset<32>(lane % 8, lane / 8)
                                       : WeightOffset<16>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    page_numbers = shared + C::kPages + (C::kSplitTokens ? group * C::kRing * C::kTokens * 4 : 0);
    Keep(keys), Keep(values), Keep(scores_out), Keep(scores_in), Keep(weights_out),
        Keep(weights_in);
  }

// A number of the fragment in hand.
#define COPPICE_IN_HAND(member) LoadInt(Work() + offsetof(Fragment, member))

  __device__ Fragment InHand() const {
    Fragment f;
    f.request = COPPICE_IN_HAND(request);
    f.first_group = COPPICE_IN_HAND(first_group);
    f.groups = COPPICE_IN_HAND(groups);
    f.begin = COPPICE_IN_HAND(begin);
    f.end = COPPICE_IN_HAND(end);
    f.slot = COPPICE_IN_HAND(slot);
    f.context = COPPICE_IN_HAND(context);
    f.nodes = COPPICE_IN_HAND(nodes);
    return f;
  }
  __device__ int FirstBlock() const { return C::kSplitTokens ? 0 : group * C::kBlocks0; }

  // Queries as B operands: a thread holds dimensions 2·(lane % 4) + {0, 1} (and + 8) of row lane
  // / 4.  They come in whole rows, 16 bytes a thread, and are dealt out through shared memory, a
  // block at a time.
  __device__ void LoadQueries() {
    const int thread = FreshThread(), warp = thread / 32, lane = thread % 32;
    const Fragment f = InHand();
    const uint32_t own = Plain(scores);
    const int first_block = Plain(FirstBlock());
    constexpr int kChunks = COPPICE_MLA_ROW * 2 / 16,
                  kRounds = CeilDivide(8 * kChunks, kGroupThreads);
    const int per_node = GroupsPerNode(a.shape.heads);
    uint4 rows[Blocks][kRounds];
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      const int block = first_block + n;
      const int g = f.first_group + block;
      const int node = g / per_node, head = g % per_node * kGroupRows;
      const int live = block < f.groups ? min(a.shape.heads - head, kGroupRows) * kChunks : 0;
      const int64_t row =
          (static_cast<int64_t>(f.request) * a.shape.nodes + node) * a.shape.heads + head;
      const uint4* from = static_cast<const uint4*>(a.tensors.query) + row * kChunks;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int chunk = i * kGroupThreads + thread;
        rows[n][i] = chunk < live ? __ldg(from + chunk) : uint4{};
      }
    }
    const uint32_t mine = own + Plain(lane % 8) * C::kQueryPitch + warp * kKeySteps * 32;
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      if (n > 0) GroupBarrier(group);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int chunk = i * kGroupThreads + thread;
        if (chunk < 8 * kChunks) {
          StoreQuad(own + chunk / kChunks * C::kQueryPitch + chunk % kChunks * 16, rows[n][i]);
        }
      }
      GroupBarrier(group);
      if constexpr (C::kFp8) {
        // Key bytes come four adjacent ones a thread, so the dimensions of a step are dealt out
        // four by four.
        const uint32_t latent = own + Plain(lane / 4) * C::kQueryPitch + warp * 256 + lane % 4 * 8;
        const uint32_t rope =
            own + Plain(lane / 4) * C::kQueryPitch + (kLatent + warp * 16) * 2 + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < kKeySteps - 1; ++k) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t two = LoadInt(latent + k * 32 + h * 4);
            query[k][n][h] =
                PackFiniteHalf(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
          }
        }
        query[kKeySteps - 1][n][0] = LoadInt(rope);
        query[kKeySteps - 1][n][1] = LoadInt(rope + 16);
      } else {
#pragma unroll
        for (int k = 0; k < kKeySteps; k += 2) {
          uint32_t r[4];
          // The last step has no second: its lanes read the first again.
          LoadMatrices(r, mine + k * 32 + (k + 1 < kKeySteps ? lane / 8 : lane / 8 % 2) * 16);
          query[k][n][0] = r[0], query[k][n][1] = r[1];
          if (k + 1 < kKeySteps) query[k + 1][n][0] = r[2], query[k + 1][n][1] = r[3];
        }
      }
    }
    GroupBarrier(group);
  }

  // ---- the ring

  // Position of `row` of sub-step u in the fragment's step n; the last row where that is past the
  // end.
  __device__ int Position(int row, int n, int u) const {
    return min(COPPICE_IN_HAND(begin) + n * C::kTokens + u * 16 + row, COPPICE_IN_HAND(end) - 1);
  }

  __device__ const int32_t* TableEntry(int position) const {
    return a.tensors.page_table + COPPICE_IN_HAND(request) * a.tensors.table_stride +
           (position >> a.page_shift);
  }

  // Copies the fragment's step n into the stage that is `ahead` of the one in use, eight threads a
  // row, 128 bytes at a time; and, where there is such a step (`more`), the page numbers of step
  // `next` = n + kAhead, which whoever has waited for step n may then read.  The first loads of a
  // fragment read the page table themselves.
  __device__ void Load(int n, int next, bool more, int ahead, bool first) {
    const int self = FreshThread(), row = self / 8, column = self % 8 * 16;
    uint32_t at = stage + ahead, round = parity;
    if (at >= C::kRing) at -= C::kRing, round ^= 1;
    uint32_t later = at + C::kAhead;
    if (later >= C::kRing) later -= C::kRing;
    const uint32_t numbers = page_numbers + row * 4;
    // Of a stage never used, the round before counts as done.
    BarrierWait(Empty() + at * 8, round ^ 1);
    const uint32_t to = ring + at * C::kStageBytes + row * C::kPitch + column;
#pragma unroll
    for (int u = 0; u < C::kSubSteps; ++u) {
      const int position = Position(row, n, u);
      const int page =
          first ? __ldg(TableEntry(position)) : LoadInt(numbers + (at * C::kTokens + u * 16) * 4);
      const uint8_t* from = static_cast<const uint8_t*>(a.tensors.cache) +
                            static_cast<int64_t>(page) * a.tensors.page_stride +
                            (position & ((1 << a.page_shift) - 1)) * C::kRowBytes + column;
#pragma unroll
      for (int i = 0; i < C::kRowBytes / 128; ++i)
        CopyAsync16(to + u * 16 * C::kPitch + i * 128, from + i * 128);
      if (C::kRowBytes % 128 != 0 && column < C::kRowBytes % 128) {
        CopyAsync16(to + u * 16 * C::kPitch + C::kRowBytes / 128 * 128,
                    from + C::kRowBytes / 128 * 128);
      }
    }
    if (more && column == 0) {
#pragma unroll
      for (int u = 0; u < C::kSubSteps; ++u) {
        CopyAsync4(numbers + (later * C::kTokens + u * 16) * 4, TableEntry(Position(row, next, u)));
      }
    }
    CopyAsyncArrive(full + at * 8);
  }

  // ---- the phases of a step

  // Of an e4m3 row the latent's products are scaled by the token's scale before the RoPE part's are
  // added to them.
  __device__ void ScoresFp8() {
    const uint32_t from = keys + stage * C::kStageBytes;
    const uint32_t scales = scale_of + stage * C::kStageBytes;
#pragma unroll
    for (int u = 0; u < C::kSubSteps; ++u) {
      float s[Blocks][4];
#pragma unroll
      for (int n = 0; n < Blocks; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
      const float low = LoadFloat(scales + u * 16 * C::kPitch);
      const float high = LoadFloat(scales + (u * 16 + 8) * C::kPitch);
#pragma unroll
      for (int k = 0; k < kKeySteps - 1; k += 2) {
        uint32_t raw[4];
        LoadMatrices(raw, from + u * 16 * C::kPitch + k * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t key[4] = {Widen<0>(raw[2 * h]), Widen<0>(raw[2 * h + 1]),
                                   Widen<1>(raw[2 * h]), Widen<1>(raw[2 * h + 1])};
#pragma unroll
          for (int n = 0; n < Blocks; ++n)
            MultiplyHalf(s[n], key, query[k + h][n][0], query[k + h][n][1]);
        }
      }
      uint32_t key[4];
      LoadMatrices(key, rope_keys + stage * C::kStageBytes + u * 16 * C::kPitch);
#pragma unroll
      for (int n = 0; n < Blocks; ++n) {
        s[n][0] *= low, s[n][1] *= low, s[n][2] *= high, s[n][3] *= high;
        Multiply(s[n], key, query[kKeySteps - 1][n][0], query[kKeySteps - 1][n][1]);
        const uint32_t at = scores_out + (u * 16 * C::kScorePitch + n * 8) * 4;
        StoreShared2(at, s[n][0], s[n][1]);
        StoreShared2(at + 8 * C::kScorePitch * 4, s[n][2], s[n][3]);
      }
    }
  }

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
      // With four blocks the registers hold one key fragment; another group's warp fills the wait.
      constexpr int kKeys = Blocks <= 3 ? 2 : 1;
      uint32_t key[kKeys][4];
      LoadMatrices(key[0], address(0));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (kKeys == 2 && i + 1 < kLoads) LoadMatrices(key[(i + 1) % 2], address(i + 1));
        const int k = i / kTiles;
#pragma unroll
        for (int n = 0; n < Blocks; ++n) {
          Multiply(s[i % kTiles][n][k % kChains], key[i % kKeys], query[k][n][0], query[k][n][1]);
        }
        if (kKeys == 1 && i + 1 < kLoads) LoadMatrices(key[0], address(i + 1));
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

  // Scores of this thread's rows and two tokens, not yet scaled.
  __device__ void ReadScores(float (&x)[2][kVector]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float part[kWarps][kVector];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        LoadShared(part[w], scores_in + (t * 4 + w * C::kTokens) * C::kScorePitch * 4);
      }
#pragma unroll
      for (int r = 0; r < kVector; ++r)
        x[t][r] = (part[0][r] + part[1][r]) + (part[2][r] + part[3][r]);
    }
  }

  // −inf where not visible.
  __device__ void Mask(int step, float (&x)[2][kVector]) const {
    const int self = FreshThread();
    const int block = FirstBlock() + Softmax::Row(self) / 8;
    if (block >= COPPICE_IN_HAND(groups)) return;  // rows that nobody writes
    const int node = (COPPICE_IN_HAND(first_group) + block) / GroupsPerNode(a.shape.heads);
    const uint64_t word =
        a.tensors
            .ancestor_words[static_cast<int64_t>(COPPICE_IN_HAND(request)) * a.shape.nodes + node];
    const int first = COPPICE_IN_HAND(begin) + step * C::kTokens + Softmax::Token(self) -
                      COPPICE_IN_HAND(context);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int j = first + t * 4;
      const bool visible = j < 0 || (j < COPPICE_IN_HAND(nodes) && (word >> j & 1) != 0);
#pragma unroll
      for (int r = 0; r < kVector; ++r) x[t][r] = visible ? x[t][r] : -INFINITY;
    }
  }

  __device__ void WriteWeights(const float (&p)[2][kVector]) const {
    float scale[2] = {1.f, 1.f};
    if constexpr (C::kFp8) {
      const uint32_t row = ring + stage * C::kStageBytes +
                           Plain(Softmax::Token(FreshThread())) * C::kPitch + kScaleByte;
      scale[0] = LoadFloat(row) * kLift;
      scale[1] = LoadFloat(row + 4 * C::kPitch) * kLift;
    }
#pragma unroll
    for (int r = 0; r < kVector; ++r) {
      // WeightOffset of the thread's row r, told from that of its first, which is a multiple of
      // kVector.
      const uint32_t at = C::kTokens == 32
                              ? (weights_out ^ static_cast<uint32_t>(r / 2 << 4)) + r * 64
                              : weights_out + r * 32;
      StoreShared(at, C::kFp8 ? PackFiniteHalf(p[0][r] * scale[0], p[1][r] * scale[1])
                              : PackBf16(p[0][r], p[1][r]));
    }
  }

  // Weights 2^(score − peak) against each row's running peak, which is exact: whoever carries most
  // has weight 1, which bf16 does not round.
  __device__ void Weigh(int step) {
    const int self = FreshThread();
    bool risen = false;
    if (self < Blocks * 32) {
      const bool masked =
          COPPICE_IN_HAND(begin) + (step + 1) * C::kTokens > COPPICE_IN_HAND(context);
      const uint32_t row = Softmax::Row(self) * 4;
      float x[2][kVector], p[2][kVector], peak[kVector], factor[kVector];
      LoadShared(peak, RowBase() + row);
      ReadScores(x);
      if (masked) Mask(step, x);
      float most = 0.f;
#pragma unroll
      for (int r = 0; r < kVector; ++r) {
        p[0][r] = Exp2(fmaf(x[0][r], a.scale_log2, -peak[r]));
        p[1][r] = Exp2(fmaf(x[1][r], a.scale_log2, -peak[r]));
        most = fmaxf(most, fmaxf(p[0][r], p[1][r]));
        factor[r] = 1.f;
      }
      risen = __any_sync(~0u, most > 1.f);
      if (risen) {
#pragma unroll
        for (int r = 0; r < kVector; ++r) {
          float next = fmaxf(x[0][r], x[1][r]) * a.scale_log2;
#pragma unroll
          for (int d = Softmax::kVectors; d < 32; d *= 2)
            next = fmaxf(next, __shfl_xor_sync(~0u, next, d));
          next = fmaxf(next, peak[r]);
          factor[r] = Exp2(peak[r] - next);
          sum[r] *= factor[r];
          peak[r] = next;
          p[0][r] = Exp2(fmaf(x[0][r], a.scale_log2, -next));
          p[1][r] = Exp2(fmaf(x[1][r], a.scale_log2, -next));
        }
      }
      __syncwarp();
      if (self % 32 < Softmax::kVectors) {
        if (risen) StoreVector(RowBase() + row, peak);
        StoreVector(RowFactor() + row, factor);
      }
      WriteWeights(p);
#pragma unroll
      for (int r = 0; r < kVector; ++r) sum[r] += p[0][r] + p[1][r];
    }
    if (!GroupBarrierAny(group, risen)) return;
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      float factor[2];
      LoadShared(factor, RowFactor() + (n * 8 + self % 4 * 2) * 4);
      if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) continue;
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        output[i][n][0] *= factor[0];
        output[i][n][1] *= factor[1];
        output[i][n][2] *= factor[0];
        output[i][n][3] *= factor[1];
      }
    }
  }

  __device__ void Values() {
    const uint32_t from = values + stage * C::kStageBytes;
    uint32_t weight[C::kSubSteps][Blocks][2];
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
    if constexpr (C::kFp8) {
      // A matrix of 8 tokens · 8 pairs of bytes: of a tile's 16 columns the even ones become the
      // lower 8 rows of the A operand, the odd ones the upper.
#pragma unroll
      for (int u = 0; u < C::kSubSteps; ++u) {
#pragma unroll
        for (int i = 0; i < kValueTiles; i += 2) {
          uint32_t raw[4];
          LoadMatricesTransposed(raw, from + u * 16 * C::kPitch + i * 16);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t early = __byte_perm(raw[2 * h], 0, 0x3120),
                           late = __byte_perm(raw[2 * h + 1], 0, 0x3120);
            const uint32_t value[4] = {Widen<0>(early), Widen<1>(early), Widen<0>(late),
                                       Widen<1>(late)};
#pragma unroll
            for (int n = 0; n < Blocks; ++n) {
              MultiplyHalf(output[i + h][n], value, weight[u][n][0], weight[u][n][1]);
            }
          }
        }
      }
      return;
    }
    uint32_t value[2][4];
    LoadMatricesTransposed(value[0], from);
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

  // Leaves each row's sum in RowFactor.
  __device__ void ReduceSums() {
    const int self = FreshThread();
    GroupBarrier(group);  // the last factors have been read
    if (self >= Blocks * 32) return;
#pragma unroll
    for (int r = 0; r < kVector; ++r) {
#pragma unroll
      for (int d = Softmax::kVectors; d < 32; d *= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], d);
    }
    if (self % 32 < Softmax::kVectors) StoreVector(RowFactor() + Softmax::Row(self) * 4, sum);
  }

  // Scales value tiles [First, Last) by row_factor and writes them: each warp its own columns, a
  // block of 8 rows at a time, turned round in its quarter of the scores' place.
  template <int First, int Last>
  __device__ void Write(const Fragment& f) {
    const int thread = FreshThread(), warp = thread / 32, lane = thread % 32;
    constexpr int kChunks = (Last - First) * 2;  // 16-byte chunks of a row
    constexpr int kRowsAtOnce = 32 / kChunks;
    const int per_node = GroupsPerNode(a.shape.heads);
    const bool whole = f.slot < 0;
    const uint32_t staging = scores + warp * 8 * C::kStagingPitch;
    const uint32_t to = staging + Plain(lane % 8) * C::kStagingPitch + lane / 8 * 16;
    const uint32_t pairs = staging + Plain(lane % 4) * 2 * C::kStagingPitch + lane / 4 * 4;
    const uint32_t from = staging + Plain(lane / kChunks) * C::kStagingPitch + lane % kChunks * 16;
    const int column_byte = (warp * kValueTiles + First) * 32 + lane % kChunks * 16;
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      const int block = FirstBlock() + n;
      if (block >= f.groups) break;
      float factor[2];
      LoadShared(factor, RowFactor() + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int i = First; i < Last; i += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float low = output[i + q / 2][n][q % 2 * 2] * factor[0];
          const float high = output[i + q / 2][n][q % 2 * 2 + 1] * factor[1];
          packed[q] = whole ? PackBf16(low, high) : PackHalf(low, high);
        }
        if constexpr (C::kFp8) {
          // Values 0, 1 are of even columns, 2, 3 of odd ones, of rows 2·(lane % 4) + {0, 1}.
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const uint32_t at = pairs + (i - First + q) * 32;
            StoreShared(at, __byte_perm(packed[2 * q], packed[2 * q + 1], 0x5410));
            StoreShared(at + C::kStagingPitch,
                        __byte_perm(packed[2 * q], packed[2 * q + 1], 0x7632));
          }
        } else {
          StoreMatricesTransposed(to + (i - First) * 32, packed);
        }
      }
      __syncwarp();
      // The block's first row in the output, or in the partial results; and how many of its rows
      // are live.
      const int g = f.first_group + block, head = g % per_node * kGroupRows;
      const int64_t row =
          whole ? (static_cast<int64_t>(f.request) * a.shape.nodes + g / per_node) * a.shape.heads +
                      head
                : static_cast<int64_t>(f.slot) * (a.instance.tile_groups * kGroupRows) + block * 8;
      const int live = whole ? min(a.shape.heads - head, kGroupRows) : kGroupRows;
      uint8_t* out = (whole ? static_cast<uint8_t*>(a.tensors.output)
                            : reinterpret_cast<uint8_t*>(a.workspace.partial_output)) +
                     (row + lane / kChunks) * (kLatent * 2) + column_byte;
#pragma unroll
      for (int r = 0; r < 8; r += kRowsAtOnce) {
        if (r + lane / kChunks < live) {
          *reinterpret_cast<uint4*>(out + r * (kLatent * 2)) =
              LoadQuad(from + r * C::kStagingPitch);
        }
      }
      __syncwarp();
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
    const int thread = FreshThread();
    GroupBarrier(group);
    if (thread < Blocks * 8) {
      const float total = LoadFloat(RowFactor() + thread * 4);
      WriteLse(f, thread, total, LoadFloat(RowBase() + thread * 4));
      StoreFloat(RowFactor() + thread * 4, total > 0.f ? kUnlift / total : 0.f);
    }
    GroupBarrier(group);
    Write<0, kValueTiles>(f);
  }

  // Gives the other group what this one has of the value tiles outside [First, First + half),
  // scaled.  `exchange`, [sender][value][thread], lies over the ring, which is idle.
  template <int First>
  __device__ void Send(uint32_t exchange) {
    constexpr int kSent = kHalf * Blocks * 16 * kGroupThreads;
    static_assert(!C::kSplitTokens || 2 * kSent <= C::kStages * C::kStageBytes + C::kScoreBytes);
    const int thread = FreshThread();
    const uint32_t to = exchange + (First == 0 ? 0 : kSent) + thread * 16;
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      float scale[2];
      LoadShared(scale, RowFactor() + (n * 8 + thread % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        float(&v)[4] = output[kHalf - First + i][n];
        StoreQuad(to + (i * Blocks + n) * 16 * kGroupThreads,
                  make_uint4(__float_as_uint(v[0] * scale[0]), __float_as_uint(v[1] * scale[1]),
                             __float_as_uint(v[2] * scale[0]), __float_as_uint(v[3] * scale[1])));
      }
    }
  }

  // Adds what the other group has of the value tiles [First, First + half) to this one's, scaled.
  template <int First>
  __device__ void Receive(uint32_t exchange) {
    constexpr int kSent = kHalf * Blocks * 16 * kGroupThreads;
    const int thread = FreshThread();
    const uint32_t from = exchange + (First == 0 ? kSent : 0) + thread * 16;
#pragma unroll
    for (int n = 0; n < Blocks; ++n) {
      float scale[2];
      LoadShared(scale, RowFactor() + (n * 8 + thread % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        float(&v)[4] = output[First + i][n];
        const uint4 other = LoadQuad(from + (i * Blocks + n) * 16 * kGroupThreads);
        v[0] = fmaf(v[0], scale[0], __uint_as_float(other.x));
        v[1] = fmaf(v[1], scale[1], __uint_as_float(other.y));
        v[2] = fmaf(v[2], scale[0], __uint_as_float(other.z));
        v[3] = fmaf(v[3], scale[1], __uint_as_float(other.w));
      }
    }
  }

  // The groups add up: group 0 keeps each warp's lower value tiles, group 1 the upper ones.
  __device__ void FinishTogether(const Fragment& f, uint32_t exchange) {
    const int thread = FreshThread();
    const uint32_t other = group == 0 ? C::kGroupBytes : -C::kGroupBytes;
    __syncthreads();
    float mine = 0.f, inverse = 0.f;
    if (thread < Blocks * 8) {
      const float base = LoadFloat(RowBase() + thread * 4);
      const float other_base = LoadFloat(RowBase() + other + thread * 4);
      const float top = fmaxf(base, other_base);
      mine = Exp2(base - top);
      const float total = LoadFloat(RowFactor() + thread * 4) * mine +
                          LoadFloat(RowFactor() + other + thread * 4) * Exp2(other_base - top);
      if (group == 0) WriteLse(f, thread, total, top);
      inverse = total > 0.f ? kUnlift / total : 0.f;
    }
    __syncthreads();
    if (thread < Blocks * 8) StoreFloat(RowFactor() + thread * 4, mine * inverse);
    GroupBarrier(group);
    if (group == 0) {
      Send<0>(exchange);
    } else {
      Send<kHalf>(exchange);
    }
    __syncthreads();
    if (group == 0) {
      Receive<0>(exchange);
    } else {
      Receive<kHalf>(exchange);
    }
    __syncthreads();  // before the ring and RowFactor serve something else
    if (thread < 32) StoreFloat(RowFactor() + thread * 4, 1.f);
    GroupBarrier(group);
    if (group == 0) {
      Write<0, kHalf>(f);
    } else {
      Write<kHalf, kValueTiles>(f);
    }
  }

  __device__ void Run(uint32_t exchange) {
    // The fragment in hand is kept in shared memory, behind it this block's next one and the end of
    // its list.
    constexpr int kWords = sizeof(Fragment) / 4;
    const auto fetch = [&](int thread, int index) {
      return thread < kWords
                 ? reinterpret_cast<const int32_t*>(a.workspace.fragments + index)[thread]
                 : 0;
    };
    {
      // Where every block has one fragment, this is it: read without waiting for the list's
      // beginning.
      const int thread = FreshThread();
      int word = fetch(thread, blockIdx.x);
      const int first = a.workspace.fragment_begin[blockIdx.x];
      const int last = a.workspace.fragment_begin[blockIdx.x + 1];
      if (first >= last) return;
      if (first != static_cast<int>(blockIdx.x)) word = fetch(thread, first);
      if (thread < kWords) StoreShared(Work() + thread * 4, word);
      if (thread == 0)
        StoreShared(Work() + kWords * 4, first + 1), StoreShared(Work() + kWords * 4 + 4, last);
    }
    while (true) {
      GroupBarrier(group);
      const int all_steps =
          (COPPICE_IN_HAND(end) - COPPICE_IN_HAND(begin) + C::kTokens - 1) / C::kTokens;
      // Of these, this group takes `steps`; its step k is the fragment's step Step(k).
      const int steps = C::kSplitTokens ? (all_steps - group + 1) / 2 : all_steps;
      const auto step = [&](int k) { return C::kSplitTokens ? 2 * k + group : k; };
      // Where both groups share the ring they take turns loading it.
      const auto loads = [&](int k) { return C::kSplitTokens || k % 2 == group; };

#pragma unroll
      for (int k = 0; k < C::kAhead; ++k) {
        if (loads(k) && k < steps) {
          Load(step(k), step(k + C::kAhead), k + C::kAhead < steps, k, true);
        }
      }
      LoadQueries();
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i)
#pragma unroll
        for (int n = 0; n < Blocks; ++n)
          output[i][n][0] = output[i][n][1] = output[i][n][2] = output[i][n][3] = 0.f;
#pragma unroll
      for (int r = 0; r < kVector; ++r) sum[r] = 0.f;
      const int row = FreshThread();
      if (row < 32) StoreFloat(Plain(scores) + kWork - 128 + row * 4, kNoPeak);

#pragma unroll 1
      for (int k = 0; k < steps; ++k) {
        BarrierWait(full + stage * 8, parity);
        if constexpr (C::kFp8) {
          ScoresFp8();
        } else {
          Scores();
        }
        GroupBarrier(group);
        Weigh(step(k));
        if (loads(k + C::kAhead) && k + C::kAhead < steps) {
          Load(step(k + C::kAhead), step(k + 2 * C::kAhead), k + 2 * C::kAhead < steps, C::kAhead,
               false);
        }
        Values();
        __syncwarp();
        if (FreshThread() % 32 == 0) BarrierArrive(Empty() + stage * 8);
        if (++stage == C::kRing) stage = 0, parity ^= 1;
      }
      ReduceSums();
      if constexpr (C::kSplitTokens) {
        FinishTogether(InHand(), exchange);
      } else {
        Finish(InHand());
      }
      const int index = LoadInt(Work() + kWords * 4);
      if (index >= LoadInt(Work() + kWords * 4 + 4)) return;
      GroupBarrier(group);
      const int thread = FreshThread(), word = fetch(thread, index);
      if (thread < kWords) StoreShared(Plain(scores) + kWork + thread * 4, word);
      if (thread == 0) StoreShared(Work() + kWords * 4, index + 1);
    }
  }
};

// `DynamicBytes` is C::kSharedBytes: a parameter so that it stands in the compiler's report beside
// the registers (scripts/kernel_resources).
template <typename C, int DynamicBytes>
__global__ void __launch_bounds__(kThreads, 1)
    VerifyAttention(const __grid_constant__ AttentionArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  if constexpr (DynamicBytes > kSmallBytes) return;  // sm_90's layouts are launched on sm_90 only
#endif
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t barriers = SharedAddress(shared + C::kBarriers);
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
    Group<C, C::kBlocks0>(a, group, SharedAddress(shared)).Run(SharedAddress(shared));
  } else if (group == 0) {
    Group<C, C::kBlocks0>(a, 0, SharedAddress(shared)).Run(SharedAddress(shared));
  } else {
    Group<C, C::kBlocks1>(a, 1, SharedAddress(shared)).Run(SharedAddress(shared));
  }
}

// ---- instances

// Of tiles of 1 … 4 groups, the two groups of warps take tokens in turn; of 5 … 8, half of the rows
// each.
template <int Groups, int SubSteps, int Stages, bool Fp8>
using Tiles =
    std::conditional_t<(Groups <= 4), Config<Groups, Groups, true, SubSteps, Stages, Fp8>,
                       Config<(Groups + 1) / 2, Groups / 2, false, SubSteps, Stages, Fp8>>;

template <int Groups, bool Fp8>
using Small = Tiles<Groups, 1, Fp8 ? 6 : 4, Fp8>;

template <int Groups, bool Fp8>
using Large = Tiles<Groups, (Groups <= 4 ? 1 : 2), Groups <= 4 ? 10 : (Fp8 ? 6 : 4), Fp8>;

static_assert(Small<8, false>::kSharedBytes <= kSmallBytes &&
              Small<8, true>::kSharedBytes <= kSmallBytes);
static_assert(Small<4, false>::kSharedBytes <= kSmallBytes &&
              Small<4, true>::kSharedBytes <= kSmallBytes);
static_assert(Large<8, false>::kSharedBytes <= kLargeBytes &&
              Large<8, true>::kSharedBytes <= kLargeBytes);
static_assert(Large<4, false>::kSharedBytes <= kLargeBytes &&
              Large<4, true>::kSharedBytes <= kLargeBytes);

template <typename C>
cudaError_t PrepareOne() {
  return cudaFuncSetAttribute(VerifyAttention<C, C::kSharedBytes>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
}

template <typename C>
cudaError_t LaunchOne(const AttentionArguments& a, cudaStream_t stream) {
  return LaunchDependent(VerifyAttention<C, C::kSharedBytes>, a.blocks, kThreads, C::kSharedBytes,
                         stream, a);
}

template <typename C>
struct Tag {
  using Type = C;
};

// Calls f with the configuration of tiles of `groups`.
template <template <int, bool> typename Family, bool Fp8, typename F>
auto DispatchIn(int groups, F f) {
  switch (groups) {
    case 1:
      return f(Tag<Family<1, Fp8>>());
    case 2:
      return f(Tag<Family<2, Fp8>>());
    case 3:
      return f(Tag<Family<3, Fp8>>());
    case 4:
      return f(Tag<Family<4, Fp8>>());
    case 5:
      return f(Tag<Family<5, Fp8>>());
    case 6:
      return f(Tag<Family<6, Fp8>>());
    case 7:
      return f(Tag<Family<7, Fp8>>());
    default:
      return f(Tag<Family<8, Fp8>>());
  }
}

template <typename F>
auto Dispatch(int groups, bool large, bool fp8, F f) {
  if (fp8) return large ? DispatchIn<Large, true>(groups, f) : DispatchIn<Small, true>(groups, f);
  return large ? DispatchIn<Large, false>(groups, f) : DispatchIn<Small, false>(groups, f);
}

bool UsesLarge(const coppice_mla_shape& shape, int major) {
  return major == 9 && shape.instance != COPPICE_MLA_COMMON_SMALL;
}

}  // namespace

Instance CommonInstance(const coppice_mla_shape& shape, int major) {
  const int tile = EvenTile(shape.nodes * GroupsPerNode(shape.heads), 8);
  return Dispatch(tile, UsesLarge(shape, major), shape.cache_type == COPPICE_MLA_FP8, [](auto tag) {
    using C = typename decltype(tag)::Type;
    return Instance{C::kTileGroups, C::kStepTokens, 1, false};
  });
}

cudaError_t PrepareCommon(int major) {
  cudaError_t error = cudaSuccess;
  for (int groups = 1; groups <= 8; ++groups) {
    for (const int kind : {0, 1, 2, 3}) {
      const bool large = kind % 2 == 1, fp8 = kind / 2 == 1;
      if ((large && major != 9) || error != cudaSuccess) continue;
      error = Dispatch(groups, large, fp8,
                       [](auto tag) { return PrepareOne<typename decltype(tag)::Type>(); });
    }
  }
  return error;
}

cudaError_t LaunchCommon(const AttentionArguments& a, int major, cudaStream_t stream) {
  return Dispatch(a.instance.tile_groups, UsesLarge(a.shape, major),
                  a.shape.cache_type == COPPICE_MLA_FP8,
                  [&](auto tag) { return LaunchOne<typename decltype(tag)::Type>(a, stream); });
}

}  // namespace coppice::mla
