// Expanded prefill: three kernels per slab of the context.
//
//   Rebuild     keys and values of the slab's positions, a GEMM whose left rows are gathered from
//   the pages Attend      flash attention (FlashAttention-2, arXiv:2307.08691) of a block of
//   queries on a part of the slab Combine     once, after the last slab: adds the parts of every
//   row up
//
// Matrix products are mma.sync m16n8k16 bf16 into fp32.  Shared memory holds rows in 16-byte chunks
// whose index is XORed with the row within groups of eight, so that every ldmatrix meets each bank
// once.
#include "kernels/cuda/mla_prefill.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "kernels/cuda/instructions.cuh"

namespace coppice::mla {
namespace {

using namespace gpu;

constexpr int kHead = COPPICE_MLA_HEAD;
constexpr int kRope = COPPICE_MLA_ROPE;
constexpr int kLatent = COPPICE_MLA_LATENT;
constexpr int kQuery = COPPICE_MLA_QUERY;
constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.69314718f;

// Rebuild's tile: positions × columns of one head's keys or values, and the depth of a stage.
constexpr int kTilePositions = 128;
constexpr int kTileColumns = 128;
constexpr int kDepth = 64;
constexpr int kStages = 3;
constexpr int kRebuildThreads = 256;
constexpr int kRebuildShared = kStages * (kTilePositions + kTileColumns) * kDepth * 2;

constexpr int kAttendThreads = 128;  // 4 warps
constexpr int kKeys = 64;            // keys per step

constexpr size_t kMaxSlabBytes = size_t{512} << 20;
constexpr int kMaxParts = 32;  // of one slab

struct Arguments {
  coppice_mla_prefill_shape shape;
  coppice_mla_prefill_tensors tensors;
  int page_shift;
  int row_bytes;
  float scale_log2;
  // A slab's keys without RoPE [heads][slab][128], values likewise, RoPE parts [slab][64].
  __nv_bfloat16* keys;
  __nv_bfloat16* values;
  __nv_bfloat16* ropes;
  float* partial;      // [total_parts][tokens][heads][128], normalised
  float* partial_lse;  // [total_parts][tokens][heads], log2 units; −inf: saw nothing
  int slab;            // positions per slab, a multiple of 128
  int slab_begin;
  int parts;        // of this slab
  int first_part;   // of all, this slab's first
  int total_parts;  // 1: the output is written directly
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a swizzled tile whose rows have kChunks
// chunks.
template <int kChunks>
__device__ __forceinline__ uint32_t Swizzled(int row, int chunk) {
  static_assert(kChunks % 8 == 0);
  return (row * kChunks + (chunk ^ (row & 7))) * 16;
}

// threadIdx.x, read anew: what is computed from it is not kept in registers across a loop.
__device__ __forceinline__ int ThreadIndex() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ int Positions(const Arguments& a) {
  return *a.tensors.context_length + *a.tensors.token_count;
}

__device__ __forceinline__ const uint8_t* CacheRow(const Arguments& a, int position) {
  const int64_t page = a.tensors.page_table[position >> a.page_shift];
  const int slot = position & ((1 << a.page_shift) - 1);
  return static_cast<const uint8_t*>(a.tensors.cache) + page * a.tensors.page_stride +
         static_cast<int64_t>(slot) * a.row_bytes;
}

// Eight e4m3 values times their token's scale, as bf16.
__device__ __forceinline__ uint4 Dequantized(uint2 raw, float scale) {
  uint32_t out[4];
  const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_fp8x2_storage_t pair = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    const float2 value = __half22float2(__half2(half));
    out[i] = PackBf16(value.x * scale, value.y * scale);
  }
  return {out[0], out[1], out[2], out[3]};
}

// Block (x: 128 columns of head x / 2, keys or values; y: 128 positions of the slab).
template <bool kFp8>
__global__ void __launch_bounds__(kRebuildThreads, 2) RebuildKernel(Arguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int length = Positions(a);
  const int tile_begin = a.slab_begin + blockIdx.y * kTilePositions;
  if (tile_begin >= length || *a.tensors.token_count == 0) return;
  const int head = blockIdx.x / 2;
  const bool is_value = blockIdx.x % 2 == 1;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t left = SharedAddress(shared);                          // positions
  const uint32_t right = left + kStages * kTilePositions * kDepth * 2;  // rows of kv_b
  const __nv_bfloat16* weights = static_cast<const __nv_bfloat16*>(a.tensors.kv_b) +
                                 static_cast<int64_t>(blockIdx.x) * kTileColumns * kLatent;

  // Each thread copies the same chunk of four rows: 8 chunks a row and stage.
  const int chunk = threadIdx.x % 8;
  const int first_row = threadIdx.x / 8;
  const uint8_t* rows[4];
  bool valid[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int position = tile_begin + first_row + 32 * i;
    valid[i] = position < length;
    rows[i] = valid[i] ? CacheRow(a, position) : static_cast<const uint8_t*>(a.tensors.cache);
  }
  const auto load = [&](int step) {
    const uint32_t stage = step % kStages;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + 32 * i;
      const uint32_t to = left + stage * kTilePositions * kDepth * 2 + Swizzled<8>(row, chunk);
      if constexpr (kFp8) {
        uint4 value = {0, 0, 0, 0};
        if (valid[i]) {
          value = Dequantized(*reinterpret_cast<const uint2*>(rows[i] + step * kDepth + chunk * 8),
                              *reinterpret_cast<const float*>(rows[i] + kLatent));
        }
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(value.x), "r"(value.y),
                     "r"(value.z), "r"(value.w)
                     : "memory");
      } else {
        CopyAsync16(to, rows[i] + step * kDepth * 2 + chunk * 16, valid[i]);
      }
      CopyAsync16(right + stage * kTileColumns * kDepth * 2 + Swizzled<8>(row, chunk),
                  weights + row * kLatent + step * kDepth + chunk * 8);
    }
  };

  // The RoPE parts need no rebuilding: the first column block copies them.
  if (blockIdx.x == 0) {
    const int offset = a.row_bytes - kRope * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 value = {0, 0, 0, 0};
      if (valid[i]) value = *reinterpret_cast<const uint4*>(rows[i] + offset + chunk * 16);
      const int64_t row = tile_begin - a.slab_begin + first_row + 32 * i;
      *reinterpret_cast<uint4*>(a.ropes + row * kRope + chunk * 8) = value;
    }
  }

  // A warp's 64 positions × 32 columns.
  const int warp_row = warp / 4 * 64;
  const int warp_column = warp % 4 * 32;
  float c[4][4][4] = {};
  constexpr int kSteps = kLatent / kDepth;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    load(s);
    CopyAsyncCommit();
  }
  for (int step = 0; step < kSteps; ++step) {
    CopyAsyncWait<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < kSteps) load(step + kStages - 1);
    CopyAsyncCommit();
    const uint32_t stage = step % kStages;
    const uint32_t l = left + stage * kTilePositions * kDepth * 2;
    const uint32_t r = right + stage * kTileColumns * kDepth * 2;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t av[4][4], bv[2][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        LoadMatrices(av[m], l + Swizzled<8>(warp_row + m * 16 + lane % 16, k * 2 + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        LoadMatrices(bv[n], r + Swizzled<8>(warp_column + n * 16 + lane / 16 * 8 + lane % 8,
                                            k * 2 + lane / 8 % 2));
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          Multiply(c[m][n], av[m], bv[n / 2][n % 2 * 2], bv[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
  // Through shared memory, so that each row leaves as whole 16-byte chunks.
  CopyAsyncWait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + m * 16 + lane / 4 + half * 8;
        const int column = warp_column + n * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(shared + Swizzled<16>(row, column / 8) + column % 8 * 2) =
            PackBf16(c[m][n][half * 2], c[m][n][half * 2 + 1]);
      }
    }
  }
  __syncthreads();
  __nv_bfloat16* out = (is_value ? a.values : a.keys) +
                       (static_cast<int64_t>(head) * a.slab + tile_begin - a.slab_begin) * kHead;
#pragma unroll
  for (int i = 0; i < kTilePositions * 16 / kRebuildThreads; ++i) {
    const int at = threadIdx.x + i * kRebuildThreads;
    reinterpret_cast<uint4*>(out)[at] =
        *reinterpret_cast<const uint4*>(shared + Swizzled<16>(at / 16, at % 16));
  }
}

template <int kRowTiles>
constexpr int AttendShared() {
  return (4 * 16 * kRowTiles * kQuery + kKeys * kQuery + kKeys * kHead) * 2;
}

// sm_120's limit for a block.
static_assert(AttendShared<2>() <= 101376 && kRebuildShared <= 101376);

// Block (x: 64 · kRowTiles queries, the last first: they see most; y: head; z: part of the slab).
// A warp holds 16 · kRowTiles queries, their whole output row and statistics.  While a step's
// scores are computed its values are on their way, while its values are used the next step's keys
// are.
template <int kRowTiles>
__global__ void __launch_bounds__(kAttendThreads, 2) AttendKernel(Arguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kQueries = 4 * 16 * kRowTiles;
  const int context = *a.tensors.context_length;
  const int count = *a.tensors.token_count;
  const int head = blockIdx.y;
  const int part = blockIdx.z;
  const int first_query = (gridDim.x - 1 - blockIdx.x) * kQueries;
  if (first_query >= count) return;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  // This part's steps of those keys of the slab that the block's last query sees.
  const int visible = context + min(count, first_query + kQueries);
  const int slab_end = min(a.slab_begin + a.slab, visible);
  const int slab_steps =
      slab_end <= a.slab_begin ? 0 : (slab_end - a.slab_begin + kKeys - 1) / kKeys;
  const int begin = static_cast<int>(static_cast<int64_t>(slab_steps) * part / a.parts);
  const int end = static_cast<int>(static_cast<int64_t>(slab_steps) * (part + 1) / a.parts);

  const uint32_t queries = SharedAddress(shared);
  const uint32_t keys = queries + kQueries * kQuery * 2;
  const uint32_t values = keys + kKeys * kQuery * 2;
  const int64_t head_offset = static_cast<int64_t>(head) * a.slab * kHead;
  const auto load_keys = [&](int step) {
    const int thread = ThreadIndex();
#pragma unroll
    for (int i = 0; i < kKeys * 16 / kAttendThreads; ++i) {
      const int row = thread / 16 + i * (kAttendThreads / 16);
      const int chunk = thread % 16;
      CopyAsync16(keys + Swizzled<24>(row, chunk),
                  a.keys + head_offset + (step * kKeys + row) * kHead + chunk * 8);
    }
#pragma unroll
    for (int i = 0; i < kKeys * 8 / kAttendThreads; ++i) {
      const int row = thread / 8 + i * (kAttendThreads / 8);
      const int chunk = thread % 8;
      CopyAsync16(keys + Swizzled<24>(row, 16 + chunk),
                  a.ropes + (step * kKeys + row) * kRope + chunk * 8);
    }
  };
  const auto load_values = [&](int step) {
    const int thread = ThreadIndex();
#pragma unroll
    for (int i = 0; i < kKeys * 16 / kAttendThreads; ++i) {
      const int row = thread / 16 + i * (kAttendThreads / 16);
      const int chunk = thread % 16;
      CopyAsync16(values + Swizzled<16>(row, chunk),
                  a.values + head_offset + (step * kKeys + row) * kHead + chunk * 8);
    }
  };

  float out[kRowTiles][kHead / 8][4] = {};
  float maximum[kRowTiles][2], sum[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    for (int half = 0; half < 2; ++half) {
      maximum[m][half] = -INFINITY;
      sum[m][half] = 0;
    }
  }

  if (begin < end) {
    // Queries past the chunk's end are zeros.
    const __nv_bfloat16* source = static_cast<const __nv_bfloat16*>(a.tensors.query);
    for (int i = threadIdx.x; i < kQueries * 24; i += kAttendThreads) {
      const int row = i / 24;
      const int chunk = i % 24;
      const bool valid = first_query + row < count;
      const int64_t query = valid ? first_query + row : 0;
      CopyAsync16(queries + Swizzled<24>(row, chunk),
                  source + (query * a.shape.heads + head) * kQuery + chunk * 8, valid);
    }
    load_keys(begin);
    CopyAsyncCommit();
  }
  // A lane's ldmatrix addresses: the chunk index's low bits are XORed with lane % 8 (every row it
  // names is that modulo 8), so stepping two chunks along a row flips bits 5 and 6 of the address.
  const int warp_row = warp * 16 * kRowTiles;
  const uint32_t lane_queries = queries + Swizzled<24>(warp_row + lane % 16, lane / 16);
  const uint32_t lane_keys = keys + Swizzled<24>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t lane_values = values + Swizzled<16>(lane % 16, lane / 16);
  for (int step = begin; step < end; ++step) {
    CopyAsyncWait<0>();
    __syncthreads();  // this step's keys are here, the previous step's values have been used
    load_values(step);
    CopyAsyncCommit();
    float scores[kRowTiles][kKeys / 8][4] = {};
#pragma unroll 4
    for (int k = 0; k < kQuery / 16; ++k) {
      uint32_t q[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        LoadMatrices(q[m], (lane_queries ^ (k % 4 * 32)) + k / 4 * 128 + m * 16 * kQuery * 2);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        LoadMatrices(b, (lane_keys ^ (k % 4 * 32)) + k / 4 * 128 + n * 16 * kQuery * 2);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          Multiply(scores[m][n * 2], q[m], b[0], b[1]);
          Multiply(scores[m][n * 2 + 1], q[m], b[2], b[3]);
        }
      }
    }
    CopyAsyncWait<0>();
    __syncthreads();  // the values are here, the keys have been used
    if (step + 1 < end) load_keys(step + 1);
    CopyAsyncCommit();

    // Only steps that reach past the block's first query have keys that some row must not see.
    const int first_key = a.slab_begin + step * kKeys;
    if (first_key + kKeys - 1 > context + first_query + warp_row) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
            const int query = first_query + warp_row + m * 16 + lane / 4 + i / 2 * 8;
            if (key > context + query) scores[m][n][i] = -INFINITY;
          }
        }
      }
    }
    float base[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = maximum[m][half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          most = fmaxf(most, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        // A row that has seen nothing yet keeps −∞ out of the differences.
        base[m][half] = most == -INFINITY ? 0 : most * a.scale_log2;
        const float rescale = exp2f(maximum[m][half] * a.scale_log2 - base[m][half]);
        maximum[m][half] = most;
        sum[m][half] *= rescale;
#pragma unroll
        for (int n = 0; n < kHead / 8; ++n) {
          out[m][n][half * 2] *= rescale;
          out[m][n][half * 2 + 1] *= rescale;
        }
      }
    }
    // Sixteen keys at a time: their exponentials, then their products.
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t p[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2;
          const float x = exp2f(scores[m][k * 2 + i / 2][half * 2] * a.scale_log2 - base[m][half]);
          const float y =
              exp2f(scores[m][k * 2 + i / 2][half * 2 + 1] * a.scale_log2 - base[m][half]);
          sum[m][half] += x + y;
          p[m][i] = PackBf16(x, y);
        }
      }
#pragma unroll
      for (int n = 0; n < kHead / 16; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(b, (lane_values ^ (n % 4 * 32)) + n / 4 * 128 + k * 16 * kHead * 2);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          Multiply(out[m][n * 2], p[m], b[0], b[1]);
          Multiply(out[m][n * 2 + 1], p[m], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[m][half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int query = first_query + warp_row + m * 16 + lane / 4 + half * 8;
      if (query >= count) continue;
      const int64_t row = static_cast<int64_t>(query) * a.shape.heads + head;
      const float inverse = total > 0 ? 1 / total : 0;
      const float lse = total > 0 ? maximum[m][half] * a.scale_log2 + log2f(total) : -INFINITY;
      if (a.total_parts == 1) {
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(a.tensors.output) + row * kHead;
#pragma unroll
        for (int n = 0; n < kHead / 8; ++n) {
          *reinterpret_cast<uint32_t*>(to + n * 8 + lane % 4 * 2) =
              PackBf16(out[m][n][half * 2] * inverse, out[m][n][half * 2 + 1] * inverse);
        }
        if (a.tensors.lse != nullptr && lane % 4 == 0) a.tensors.lse[row] = lse * kLn2;
      } else {
        const int64_t slot =
            static_cast<int64_t>(a.first_part + part) * a.shape.tokens * a.shape.heads + row;
        if (lane % 4 == 0) a.partial_lse[slot] = lse;
        if (total == 0) continue;  // the combine reads no row of a part that saw nothing
#pragma unroll
        for (int n = 0; n < kHead / 8; ++n) {
          *reinterpret_cast<float2*>(a.partial + slot * kHead + n * 8 + lane % 4 * 2) = {
              out[m][n][half * 2] * inverse, out[m][n][half * 2 + 1] * inverse};
        }
      }
    }
  }
}

// One warp per row: lane i adds up columns 4i … 4i + 3.
__global__ void __launch_bounds__(256) CombineKernel(Arguments a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= static_cast<int64_t>(*a.tensors.token_count) * a.shape.heads) return;
  const int lane = threadIdx.x % 32;
  const int64_t part_rows = static_cast<int64_t>(a.shape.tokens) * a.shape.heads;
  float maximum = -INFINITY;
  for (int p = 0; p < a.total_parts; ++p) {
    maximum = fmaxf(maximum, a.partial_lse[p * part_rows + row]);
  }
  float sum = 0;
  float4 out = {0, 0, 0, 0};
  for (int p = 0; p < a.total_parts; ++p) {
    const float lse = a.partial_lse[p * part_rows + row];
    if (lse == -INFINITY) continue;
    const float weight = exp2f(lse - maximum);
    const float4 part =
        reinterpret_cast<const float4*>(a.partial + (p * part_rows + row) * kHead)[lane];
    sum += weight;
    out.x += weight * part.x;
    out.y += weight * part.y;
    out.z += weight * part.z;
    out.w += weight * part.w;
  }
  const float inverse = sum > 0 ? 1 / sum : 0;
  uint2 packed = {PackBf16(out.x * inverse, out.y * inverse),
                  PackBf16(out.z * inverse, out.w * inverse)};
  reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.tensors.output) + row * kHead)[lane] =
      packed;
  if (lane == 0 && a.tensors.lse != nullptr) {
    a.tensors.lse[row] = sum > 0 ? (maximum + log2f(sum)) * kLn2 : -INFINITY;
  }
}

// ---------------------------------------------------------------------------------------------
// Host.

thread_local char last_error[256] = "";

[[gnu::format(printf, 2, 3)]] coppice_mla_status Fail(coppice_mla_status status, const char* format,
                                                      ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

coppice_mla_status CheckShape(const coppice_mla_prefill_shape* s) {
  if (s == nullptr) return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape is null");
  const auto in_range = [](const char* name, int value, int low, int high) {
    if (value >= low && value <= high) return COPPICE_MLA_OK;
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape.%s is %d; it must be %d … %d", name, value,
                low, high);
  };
  if (in_range("tokens", s->tokens, 1, COPPICE_MLA_MAX_CHUNK) != COPPICE_MLA_OK ||
      in_range("heads", s->heads, 1, COPPICE_MLA_MAX_HEADS) != COPPICE_MLA_OK ||
      in_range("page_size", s->page_size, 1, COPPICE_MLA_MAX_PAGE) != COPPICE_MLA_OK ||
      in_range("max_context", s->max_context, 0, COPPICE_MLA_MAX_CONTEXT - s->tokens) !=
          COPPICE_MLA_OK) {
    return COPPICE_MLA_INVALID_ARGUMENT;
  }
  if ((s->page_size & (s->page_size - 1)) != 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape.page_size is %d; it must be a power of two",
                s->page_size);
  }
  if (s->cache_type != COPPICE_MLA_BF16 && s->cache_type != COPPICE_MLA_FP8) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT, "shape.cache_type is %d; it must be 0 or 1",
                static_cast<int>(s->cache_type));
  }
  if (!std::isfinite(s->softmax_scale) || s->softmax_scale <= 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "shape.softmax_scale is %g; it must be finite and above 0",
                static_cast<double>(s->softmax_scale));
  }
  return COPPICE_MLA_OK;
}

coppice_mla_status CheckTensors(const coppice_mla_prefill_shape& s,
                                const coppice_mla_prefill_tensors* t) {
  if (t == nullptr) return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors is null");
  const struct {
    const char* name;
    const void* pointer;
    unsigned alignment;
    bool optional;
  } pointers[] = {{"query", t->query, 16, false},
                  {"kv_b", t->kv_b, 16, false},
                  {"cache", t->cache, 16, false},
                  {"page_table", t->page_table, 4, false},
                  {"context_length", t->context_length, 4, false},
                  {"token_count", t->token_count, 4, false},
                  {"output", t->output, 16, false},
                  {"lse", t->lse, 4, true},
                  {"workspace", t->workspace, 16, false}};
  for (const auto& p : pointers) {
    if (p.pointer == nullptr && !p.optional) {
      return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors.%s is null", p.name);
    }
    if (reinterpret_cast<uintptr_t>(p.pointer) % p.alignment != 0) {
      return Fail(COPPICE_MLA_INVALID_ARGUMENT, "tensors.%s is %p; it must be aligned to %u bytes",
                  p.name, p.pointer, p.alignment);
    }
  }
  const int64_t page_bytes = s.page_size * int64_t{s.cache_type == COPPICE_MLA_BF16 ? 1152 : 656};
  if (t->page_stride < page_bytes || t->page_stride % 16 != 0) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "tensors.page_stride is %lld; it must be a multiple of 16 of at least %lld",
                static_cast<long long>(t->page_stride), static_cast<long long>(page_bytes));
  }
  return COPPICE_MLA_OK;
}

// How a shape is cut on a device.
struct Plan {
  int row_tiles;  // 1 or 2
  int row_blocks;
  int slab;  // positions
  int slabs;
  int parts;  // per slab
  size_t keys_bytes, ropes_bytes, partial_bytes, lse_bytes;
  size_t bytes;
};

coppice_mla_status MakePlan(const coppice_mla_prefill_shape& s, Plan* plan) {
  int device = 0, major = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    return Fail(COPPICE_MLA_CUDA_ERROR, "reading the current CUDA device: %s",
                cudaGetErrorString(error));
  }
  if (major != 9 && major != 12) {
    return Fail(COPPICE_MLA_UNSUPPORTED_DEVICE,
                "device %d has compute capability %d.x; this library is built for 9.0 and 12.x",
                device, major);
  }
  plan->row_tiles = s.tokens <= 64 ? 1 : 2;
  const int queries = 64 * plan->row_tiles;
  plan->row_blocks = (s.tokens + queries - 1) / queries;
  const int positions = (s.max_context + s.tokens + 127) / 128 * 128;
  const size_t position_bytes = static_cast<size_t>(s.heads) * kHead * 2 * 2 + kRope * 2;
  plan->slab =
      static_cast<int>(std::min<size_t>(positions, kMaxSlabBytes / position_bytes / 128 * 128));
  plan->slabs = (positions + plan->slab - 1) / plan->slab;
  // The parts that leave the least of the last wave idle; each costs its prologue and its partial
  // results.
  const int blocks_per_sm = major == 9 || plan->row_tiles == 1 ? 2 : 1;
  const int blocks = plan->row_blocks * s.heads;
  double best = 1e30;
  plan->parts = 1;
  for (int parts = 1; parts <= std::min(kMaxParts, plan->slab / 128); ++parts) {
    const int capacity = sms * blocks_per_sm;
    const int waves = (blocks * parts + capacity - 1) / capacity;
    const double steps = std::ceil(double{static_cast<double>(plan->slab)} / kKeys / parts);
    const double cost = waves * (steps + 4);
    if (cost < best * 0.99) {
      best = cost;
      plan->parts = parts;
    }
  }
  const size_t total = static_cast<size_t>(plan->parts) * plan->slabs;
  const size_t rows = static_cast<size_t>(s.tokens) * s.heads;
  const auto rounded = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  plan->keys_bytes = rounded(static_cast<size_t>(s.heads) * plan->slab * kHead * 2);
  plan->ropes_bytes = rounded(static_cast<size_t>(plan->slab) * kRope * 2);
  plan->partial_bytes = total == 1 ? 0 : rounded(total * rows * kHead * sizeof(float));
  plan->lse_bytes = total == 1 ? 0 : rounded(total * rows * sizeof(float));
  plan->bytes = 2 * plan->keys_bytes + plan->ropes_bytes + plan->partial_bytes + plan->lse_bytes;
  return COPPICE_MLA_OK;
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace
}  // namespace coppice::mla

using namespace coppice::mla;

coppice_mla_status coppice_mla_prefill_workspace(const coppice_mla_prefill_shape* shape,
                                                 size_t* bytes) {
  if (const coppice_mla_status status = CheckShape(shape); status != COPPICE_MLA_OK) return status;
  if (bytes == nullptr) return Fail(COPPICE_MLA_INVALID_ARGUMENT, "bytes is null");
  Plan plan;
  if (const coppice_mla_status status = MakePlan(*shape, &plan); status != COPPICE_MLA_OK) {
    return status;
  }
  *bytes = plan.bytes;
  return COPPICE_MLA_OK;
}

coppice_mla_status coppice_mla_prefill_run(const coppice_mla_prefill_shape* shape,
                                           const coppice_mla_prefill_tensors* tensors,
                                           coppice_stream_t stream) {
  if (const coppice_mla_status status = CheckShape(shape); status != COPPICE_MLA_OK) return status;
  if (const coppice_mla_status status = CheckTensors(*shape, tensors); status != COPPICE_MLA_OK) {
    return status;
  }
  Plan plan;
  if (const coppice_mla_status status = MakePlan(*shape, &plan); status != COPPICE_MLA_OK) {
    return status;
  }
  if (tensors->workspace_bytes < plan.bytes) {
    return Fail(COPPICE_MLA_INVALID_ARGUMENT,
                "tensors.workspace_bytes is %zu; this shape needs %zu "
                "(coppice_mla_prefill_workspace)",
                tensors->workspace_bytes, plan.bytes);
  }
  Arguments a = {};
  a.shape = *shape;
  a.tensors = *tensors;
  while ((1 << a.page_shift) < shape->page_size) ++a.page_shift;
  const bool fp8 = shape->cache_type == COPPICE_MLA_FP8;
  a.row_bytes = fp8 ? 656 : 1152;
  a.scale_log2 = shape->softmax_scale * kLog2e;
  uint8_t* at = static_cast<uint8_t*>(tensors->workspace);
  a.keys = reinterpret_cast<__nv_bfloat16*>(at);
  a.values = reinterpret_cast<__nv_bfloat16*>(at += plan.keys_bytes);
  a.ropes = reinterpret_cast<__nv_bfloat16*>(at += plan.keys_bytes);
  a.partial = reinterpret_cast<float*>(at += plan.ropes_bytes);
  a.partial_lse = reinterpret_cast<float*>(at += plan.partial_bytes);
  a.slab = plan.slab;
  a.parts = plan.parts;
  a.total_parts = plan.parts * plan.slabs;

  const auto rebuild = fp8 ? RebuildKernel<true> : RebuildKernel<false>;
  const auto attend = plan.row_tiles == 1 ? AttendKernel<1> : AttendKernel<2>;
  const int attend_shared = plan.row_tiles == 1 ? AttendShared<1>() : AttendShared<2>();
  cudaError_t error = AllowShared(rebuild, kRebuildShared);
  if (error == cudaSuccess) error = AllowShared(attend, attend_shared);
  if (error != cudaSuccess) {
    return Fail(COPPICE_MLA_CUDA_ERROR, "%d bytes of shared memory: %s",
                std::max(kRebuildShared, attend_shared), cudaGetErrorString(error));
  }
  for (int slab = 0; slab < plan.slabs; ++slab) {
    a.slab_begin = slab * plan.slab;
    a.first_part = slab * plan.parts;
    rebuild<<<dim3(shape->heads * 2, plan.slab / kTilePositions), kRebuildThreads, kRebuildShared,
              stream>>>(a);
    attend<<<dim3(plan.row_blocks, shape->heads, plan.parts), kAttendThreads, attend_shared,
             stream>>>(a);
  }
  if (a.total_parts > 1) {
    CombineKernel<<<(shape->tokens * shape->heads + 7) / 8, 256, 0, stream>>>(a);
  }
  if (error = cudaGetLastError(); error != cudaSuccess) {
    return Fail(COPPICE_MLA_CUDA_ERROR, "launching the prefill kernels: %s",
                cudaGetErrorString(error));
  }
  return COPPICE_MLA_OK;
}

const char* coppice_mla_prefill_error(void) { return last_error; }
