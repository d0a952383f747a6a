// Adds up a tile's partial results: out = Σ_p 2^(lse_p − max) · partial_p / Σ_p 2^(lse_p − max),
// row by row.
#include <cuda_bf16.h>

#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

constexpr int kChunk = 8;  // columns of a 16-byte load
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStored =
    1024;  // weights kept in shared memory; those of further parts are computed again
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

// A block per `Columns` of a row of the output.  Columns / 8 threads cover them; as many such
// shares as the block has divide the parts, and each has `Ahead` loads under way before it knows
// their weights.
template <int Columns, int Ahead>
__global__ void __launch_bounds__(kThreads, Columns == COPPICE_MLA_LATENT ? 4 : 3)
    Combine(const __grid_constant__ AttentionArguments a) {
  constexpr int kLanes = Columns / kChunk, kShares = kThreads / kLanes;
  constexpr int kSlices = COPPICE_MLA_LATENT / Columns;
  __shared__ float peaks[kWarps], totals[kWarps], weights[kStored];
  __shared__ float sums[kShares][Columns];
  const int rows = a.instance.tile_groups * kGroupRows;
  const int thread = threadIdx.x, warp = thread / 32;
  const int slice = blockIdx.x % kSlices, row_of_batch = blockIdx.x / kSlices;
  const int per_node = GroupsPerNode(a.shape.heads), all_groups = a.shape.nodes * per_node;
  const int group = row_of_batch / kGroupRows % all_groups;
  const int node = group / per_node;
  const int head = group % per_node * kGroupRows + row_of_batch % kGroupRows;
  // The schedule was complete before the attention let this grid start (see
  // mla_verify_internal.cuh).
  const Tile* tiles = a.workspace.tiles +
                      static_cast<int64_t>(row_of_batch / kGroupRows / all_groups) * a.max_tiles;
  const int request_tiles = tiles->request_tiles, request_groups = tiles->request_groups;
  const bool live = group < request_groups && head < a.shape.heads;
  // The tile whose groups ⌊request_groups · t / request_tiles⌋ … hold this one.
  const Tile tile = live ? tiles[((group + 1) * request_tiles - 1) / request_groups] : Tile{};
  const int row = (group - tile.first_group) * kGroupRows + row_of_batch % kGroupRows;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (tile.parts == 0) return;

  const int share = thread / kLanes, lane = thread % kLanes;
  const int64_t slot = tile.slot;
  const float* lse = a.workspace.partial_lse + slot * rows + row;
  const __half* partial = a.workspace.partial_output + (slot * rows + row) * COPPICE_MLA_LATENT +
                          slice * Columns + lane * kChunk;
  const int64_t stride = static_cast<int64_t>(rows) * COPPICE_MLA_LATENT;
  const auto load = [&](int p) {
    return __ldcg(reinterpret_cast<const uint4*>(partial + p * stride));
  };
  const auto load_lse = [&](int p) { return __ldcg(lse + static_cast<int64_t>(p) * rows); };

  const float first = thread < tile.parts ? load_lse(thread) : -INFINITY;
  uint4 ahead[Ahead];
#pragma unroll
  for (int i = 0; i < Ahead; ++i) {
    const int p = share + i * kShares;
    if (p < tile.parts) ahead[i] = load(p);
  }
  float peak = first;
  for (int p = thread + kThreads; p < tile.parts; p += kThreads) peak = fmaxf(peak, load_lse(p));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
  if (thread % 32 == 0) peaks[warp] = peak;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, peaks[w]);
  // A row that saw nothing anywhere: all weights are 2^(−inf) = 0.
  const float base = peak == -INFINITY ? 0.f : peak;
  float total = 0.f;
  for (int p = thread; p < tile.parts; p += kThreads) {
    const float weight = exp2f((p == thread ? first : load_lse(p)) - base);
    if (p < kStored) weights[p] = weight;
    total += weight;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  if (thread % 32 == 0) totals[warp] = total;
  __syncthreads();

  Sum sum;
#pragma unroll
  for (int i = 0; i < Ahead; ++i) {
    const int p = share + i * kShares;
    if (p < tile.parts) sum.Add(ahead[i], weights[p]);
  }
#pragma unroll 4
  for (int p = share + Ahead * kShares; p < tile.parts; p += kShares) {
    sum.Add(load(p), p < kStored ? weights[p] : exp2f(load_lse(p) - base));
  }
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    *reinterpret_cast<float4*>(&sums[share][lane * kChunk + i]) =
        make_float4(sum.v[i], sum.v[i + 1], sum.v[i + 2], sum.v[i + 3]);
  }
  total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += totals[w];
  __syncthreads();
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  const int64_t out_row =
      (static_cast<int64_t>(tile.request) * a.shape.nodes + node) * a.shape.heads + head;
  if (thread < Columns / 2) {
    float2 v = {};
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
      const float2 x = *reinterpret_cast<const float2*>(&sums[s][2 * thread]);
      v.x += x.x;
      v.y += x.y;
    }
    reinterpret_cast<__nv_bfloat162*>(
        a.tensors.output)[(out_row * COPPICE_MLA_LATENT + slice * Columns) / 2 + thread] =
        __floats2bfloat162_rn(v.x * inverse, v.y * inverse);
  }
  if (thread == 0 && slice == 0 && a.tensors.lse != nullptr) {
    a.tensors.lse[out_row] = total > 0.f ? (base + log2f(total)) * kLn2 : -INFINITY;
  }
}

}  // namespace

cudaError_t LaunchCombine(const AttentionArguments& a, cudaStream_t stream) {
  const int rows = a.shape.batch * a.shape.nodes * GroupsPerNode(a.shape.heads) * kGroupRows;
  // Few rows have many parts each: more blocks a row, more threads a part.
  if (rows <= 2 * a.blocks)
    return LaunchDependent(Combine<128, 8>, rows * 4, kThreads, 0, stream, a);
  return LaunchDependent(Combine<512, 4>, rows, kThreads, 0, stream, a);
}

}  // namespace coppice::mla
