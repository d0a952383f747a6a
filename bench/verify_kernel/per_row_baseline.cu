#include "bench/verify_kernel/per_row_baseline.h"

#include <cuda_bf16.h>

#include <cstdint>

namespace coppice::bench {
namespace {

constexpr int kWarps = 4;
constexpr int kRow = COPPICE_MLA_ROW;
constexpr int kLatent = COPPICE_MLA_LATENT;

struct Partial {
  float* output;  // [rows][splits][512], relative to the maximum
  float* maximum;
  float* sum;
};

// The values of a row that a lane holds: with wide loads lane + 32·j names a chunk of 8, else one
// value.
template <bool kWide>
struct LaneValues {
  static constexpr int kLoads = kWide ? 3 : 18;
  static constexpr int kPerLoad = kWide ? 8 : 1;
  static constexpr int kValueLoads = kWide ? 2 : 16;  // those of the value vector
  float v[kLoads][kPerLoad];

  __device__ void Load(const __nv_bfloat16* row, int lane) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = lane + 32 * j;
      if constexpr (kWide) {
        uint4 chunk = {0, 0, 0, 0};
        if (at < kRow / 8) chunk = reinterpret_cast<const uint4*>(row)[at];
        const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&chunk);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 pair = __bfloat1622float2(pairs[k]);
          v[j][2 * k] = pair.x;
          v[j][2 * k + 1] = pair.y;
        }
      } else {
        v[j][0] = __bfloat162float(row[at]);
      }
    }
  }
};

template <bool kWide>
__global__ void __launch_bounds__(kWarps * 32)
    PartialKernel(coppice_mla_shape shape, coppice_mla_tensors t, int splits, Partial partial) {
  const int64_t row = blockIdx.x;
  const int64_t node_row = row / shape.heads;
  const int request = node_row / shape.nodes;
  const int node = node_row % shape.nodes;
  if (node >= t.node_counts[request]) return;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t context = t.context_lengths[request];
  const int64_t length = context + t.node_counts[request];
  const uint64_t word = t.ancestor_words[node_row];
  const int64_t begin = length * blockIdx.y / splits;
  const int64_t end = length * (blockIdx.y + 1) / splits;
  const float scale_log2 = shape.softmax_scale * 1.44269504f;
  using Values = LaneValues<kWide>;
  Values query;
  query.Load(static_cast<const __nv_bfloat16*>(t.query) + row * kRow, lane);

  float maximum = -INFINITY;
  float sum = 0;
  float out[Values::kValueLoads][Values::kPerLoad] = {};
  for (int64_t position = begin + warp; position < end; position += kWarps) {
    if (position >= context && !(word >> (position - context) & 1)) continue;
    const int64_t page = t.page_table[request * t.table_stride + position / shape.page_size];
    const __nv_bfloat16* key = reinterpret_cast<const __nv_bfloat16*>(
        static_cast<const uint8_t*>(t.cache) + page * t.page_stride +
        position % shape.page_size * (kRow * 2));
    Values k;
    k.Load(key, lane);
    float score = 0;
#pragma unroll
    for (int j = 0; j < Values::kLoads; ++j) {
#pragma unroll
      for (int i = 0; i < Values::kPerLoad; ++i) score += query.v[j][i] * k.v[j][i];
    }
    for (int s = 16; s > 0; s /= 2) score += __shfl_xor_sync(~0u, score, s);
    score *= scale_log2;
    const float next = fmaxf(maximum, score);
    const float rescale = exp2f(maximum - next);
    const float p = exp2f(score - next);
    sum = sum * rescale + p;
    maximum = next;
#pragma unroll
    for (int j = 0; j < Values::kValueLoads; ++j) {
#pragma unroll
      for (int i = 0; i < Values::kPerLoad; ++i) out[j][i] = out[j][i] * rescale + p * k.v[j][i];
    }
  }

  __shared__ float maxima[kWarps], sums[kWarps], outs[kWarps][kLatent];
  if (lane == 0) {
    maxima[warp] = maximum;
    sums[warp] = sum;
  }
#pragma unroll
  for (int j = 0; j < Values::kValueLoads; ++j) {
#pragma unroll
    for (int i = 0; i < Values::kPerLoad; ++i) {
      outs[warp][(lane + 32 * j) * Values::kPerLoad + i] = out[j][i];
    }
  }
  __syncthreads();
  float block_maximum = maxima[0];
  for (int w = 1; w < kWarps; ++w) block_maximum = fmaxf(block_maximum, maxima[w]);
  float weights[kWarps];
  float block_sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = maxima[w] == -INFINITY ? 0 : exp2f(maxima[w] - block_maximum);
    block_sum += weights[w] * sums[w];
  }
  const int64_t slot = row * splits + blockIdx.y;
  for (int c = threadIdx.x; c < kLatent; c += kWarps * 32) {
    float value = 0;
    for (int w = 0; w < kWarps; ++w) value += weights[w] * outs[w][c];
    partial.output[slot * kLatent + c] = value;
  }
  if (threadIdx.x == 0) {
    partial.maximum[slot] = block_maximum;
    partial.sum[slot] = block_sum;
  }
}

__global__ void __launch_bounds__(kLatent / 4)
    CombineKernel(coppice_mla_shape shape, coppice_mla_tensors t, int splits, Partial partial) {
  const int64_t row = blockIdx.x;
  const int64_t node_row = row / shape.heads;
  if (node_row % shape.nodes >= t.node_counts[node_row / shape.nodes]) return;
  float maximum = -INFINITY;
  for (int s = 0; s < splits; ++s) maximum = fmaxf(maximum, partial.maximum[row * splits + s]);
  float sum = 0;
  float4 value = {0, 0, 0, 0};
  for (int s = 0; s < splits; ++s) {
    const int64_t slot = row * splits + s;
    if (partial.maximum[slot] == -INFINITY) continue;
    const float weight = exp2f(partial.maximum[slot] - maximum);
    sum += weight * partial.sum[slot];
    const float4 part =
        reinterpret_cast<const float4*>(partial.output + slot * kLatent)[threadIdx.x];
    value.x += weight * part.x;
    value.y += weight * part.y;
    value.z += weight * part.z;
    value.w += weight * part.w;
  }
  const float inverse = sum > 0 ? 1 / sum : 0;
  __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(t.output) +
                                                          row * kLatent + threadIdx.x * 4);
  out[0] = __floats2bfloat162_rn(value.x * inverse, value.y * inverse);
  out[1] = __floats2bfloat162_rn(value.z * inverse, value.w * inverse);
  if (threadIdx.x == 0 && t.lse != nullptr) {
    t.lse[row] = sum > 0 ? (maximum + log2f(sum)) * 0.69314718f : -INFINITY;
  }
}

int64_t Rows(const coppice_mla_shape& shape) {
  return static_cast<int64_t>(shape.batch) * shape.nodes * shape.heads;
}

}  // namespace

size_t PerRowWorkspaceBytes(const coppice_mla_shape& shape, int splits) {
  return Rows(shape) * splits * (kLatent + 2) * sizeof(float);
}

void PerRowAttention(const coppice_mla_shape& shape, const coppice_mla_tensors& tensors, int splits,
                     bool wide, void* workspace, cudaStream_t stream) {
  const int64_t rows = Rows(shape);
  Partial partial;
  partial.output = static_cast<float*>(workspace);
  partial.maximum = partial.output + rows * splits * kLatent;
  partial.sum = partial.maximum + rows * splits;
  const dim3 grid(rows, splits);
  if (wide) {
    PartialKernel<true><<<grid, kWarps * 32, 0, stream>>>(shape, tensors, splits, partial);
  } else {
    PartialKernel<false><<<grid, kWarps * 32, 0, stream>>>(shape, tensors, splits, partial);
  }
  CombineKernel<<<rows, kLatent / 4, 0, stream>>>(shape, tensors, splits, partial);
}

}  // namespace coppice::bench
