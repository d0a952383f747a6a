// Adds up a tile's partial results: out = Σ_p 2^(lse_p − max) · partial_p / Σ_p 2^(lse_p − max),
// row by row.
#include <cuda_bf16.h>

#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

constexpr int kChunk = 8;                            // columns of a 16-byte load
constexpr int kLanes = COPPICE_MLA_LATENT / kChunk;  // threads that cover a row
constexpr int kAhead = 4;                            // loads in flight before the weights are known
constexpr float kLn2 = 0.693147180559945f;

struct Sum {
  float v[kChunk] = {};
  __device__ void Add(const uint4& data, float weight) {
    const __half2* h = reinterpret_cast<const __half2*>(&data);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 x = __half22float2(h[i]);
      v[2 * i] += weight * x.x;
      v[2 * i + 1] += weight * x.y;
    }
  }
};

// A block per row of a tile; Threads / 64 groups of threads share its parts.
template <int Threads>
__global__ void __launch_bounds__(Threads) Combine(const __grid_constant__ AttentionArguments a) {
  constexpr int kShares = Threads / kLanes, kWarps = Threads / 32;
  __shared__ float peaks[kWarps], totals[kWarps];
  __shared__ float sums[kShares][COPPICE_MLA_LATENT];
  const int rows = a.instance.tile_groups * kGroupRows;
  const int thread = threadIdx.x, warp = thread / 32;
  const int row = blockIdx.x % rows;
  // The schedule was complete before the attention let this grid start (see
  // mla_verify_internal.cuh).
  const Tile tile = a.workspace.tiles[blockIdx.x / rows];
  const int group = tile.first_group + row / kGroupRows;
  const int per_node = GroupsPerNode(a.shape.heads);
  const int node = group / per_node;
  const int head = group % per_node * kGroupRows + row % kGroupRows;
  const bool mine = tile.parts > 0 && row < tile.groups * kGroupRows && head < a.shape.heads;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!mine) return;

  const int share = thread / kLanes, lane = thread % kLanes;
  const int64_t slot = tile.slot;
  const float* lse = a.workspace.partial_lse + slot * rows + row;
  const __half* partial =
      a.workspace.partial_output + (slot * rows + row) * COPPICE_MLA_LATENT + lane * kChunk;
  const int64_t stride = (int64_t)rows * COPPICE_MLA_LATENT;
  uint4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int p = share + i * kShares;
    if (p < tile.parts) ahead[i] = __ldcg(reinterpret_cast<const uint4*>(partial + p * stride));
  }

  float peak = -INFINITY;
  for (int p = thread; p < tile.parts; p += Threads)
    peak = fmaxf(peak, __ldcg(lse + (int64_t)p * rows));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  if (thread % 32 == 0) peaks[warp] = peak;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, peaks[w]);
  // A row that saw nothing anywhere: all weights are 2^(−inf) = 0.
  const float base = peak == -INFINITY ? 0.f : peak;

  Sum sum;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int p = share + i * kShares;
    if (p < tile.parts) {
      const float weight = exp2f(__ldcg(lse + (int64_t)p * rows) - base);
      total += weight;
      sum.Add(ahead[i], weight);
    }
  }
#pragma unroll 4
  for (int p = share + kAhead * kShares; p < tile.parts; p += kShares) {
    const float weight = exp2f(__ldcg(lse + (int64_t)p * rows) - base);
    total += weight;
    sum.Add(__ldcg(reinterpret_cast<const uint4*>(partial + p * stride)), weight);
  }
  if (lane == 0) totals[share] = total;
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    *reinterpret_cast<float4*>(&sums[share][lane * kChunk + i]) =
        make_float4(sum.v[i], sum.v[i + 1], sum.v[i + 2], sum.v[i + 3]);
  }
  __syncthreads();
  total = 0.f;
#pragma unroll
  for (int s = 0; s < kShares; ++s) total += totals[s];
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  const int64_t out_row = ((int64_t)tile.request * a.shape.nodes + node) * a.shape.heads + head;
  if (thread < COPPICE_MLA_LATENT / 2) {
    float2 v = {};
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
      const float2 x = *reinterpret_cast<const float2*>(&sums[s][2 * thread]);
      v.x += x.x;
      v.y += x.y;
    }
    reinterpret_cast<__nv_bfloat162*>(
        a.tensors.output)[out_row * (COPPICE_MLA_LATENT / 2) + thread] =
        __floats2bfloat162_rn(v.x * inverse, v.y * inverse);
  }
  if (thread == 0 && a.tensors.lse != nullptr) {
    a.tensors.lse[out_row] = total > 0.f ? (base + log2f(total)) * kLn2 : -INFINITY;
  }
}

}  // namespace

cudaError_t LaunchCombine(const AttentionArguments& a, cudaStream_t stream) {
  const int rows = a.shape.batch * a.max_tiles * a.instance.tile_groups * kGroupRows;
  // Few rows have many parts each: more threads a row.
  if (rows <= 2 * a.blocks) return LaunchDependent(Combine<1024>, rows, 1024, 0, stream, a);
  return LaunchDependent(Combine<256>, rows, 256, 0, stream, a);
}

}  // namespace coppice::mla
