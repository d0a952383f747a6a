// What the schedule, the attention kernels (common, Hopper) and the combine agree on.
#ifndef KERNELS_CUDA_MLA_VERIFY_INTERNAL_CUH_
#define KERNELS_CUDA_MLA_VERIFY_INTERNAL_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/mla_verify.h"

namespace coppice::mla {

// Queries are handled in groups of 8 rows: 8 heads of one node.  With H heads, node i owns groups i·⌈H/8⌉ … ; the rows of
// a group past H are padding, computed from zeros and written nowhere.
constexpr int kGroupRows = 8;

__host__ __device__ constexpr int GroupsPerNode(int heads) { return (heads + kGroupRows - 1) / kGroupRows; }

// A piece of work of one thread block: positions [begin, end) of one request for one tile of its groups.
struct alignas(16) Fragment {
  int32_t request;
  int32_t first_group;
  int32_t groups;  // live ones, at most the instance's groups per tile
  int32_t begin;   // a multiple of the instance's step
  int32_t end;     // at most the request's context length + node count
  int32_t slot;    // partial result's slot, or −1: this fragment is the whole tile, write the output itself
  int32_t context;  // the request's context length
  int32_t nodes;    // the request's live nodes
};

// A tile whose partial results the combine adds up: slots [slot, slot + parts).
struct alignas(16) Tile {
  int32_t request;
  int32_t first_group;
  int32_t groups;
  int32_t slot;
  int32_t parts;  // 0: nothing to combine (written directly)
  int32_t unused[3];
};

// The workspace's parts, as device pointers.
struct Workspace {
  int32_t* fragment_begin;  // [blocks + 1]: block i of the attention kernel runs fragments [begin[i], begin[i + 1])
  Fragment* fragments;
  int32_t* tile_count;  // [1]
  Tile* tiles;
  __half* partial_output;  // [slots][tile_groups · 8][512], each row normalised by its own sum
  float* partial_lse;      // [slots][tile_groups · 8], log2 units: max + log2(sum); −inf: saw nothing
};

// What an instance tells the schedule.
struct Instance {
  int tile_groups;    // groups per tile
  int step_tokens;    // fragments begin at multiples of this
  int blocks_per_sm;
};

// Everything an attention kernel needs; passed by value.
struct AttentionArguments {
  coppice_mla_shape shape;
  coppice_mla_tensors tensors;
  Workspace workspace;
  int page_shift;     // log2(page_size)
  float scale_log2;   // softmax_scale · log2(e)
  int blocks;         // grid size: the schedule's
};

// The wgmma instance (mla_verify_hopper.cu), for devices of compute capability 9.0.
Instance HopperInstance(const coppice_mla_shape& shape);
cudaError_t LaunchHopper(const AttentionArguments& arguments, cudaStream_t stream);

}  // namespace coppice::mla

#endif  // KERNELS_CUDA_MLA_VERIFY_INTERNAL_CUH_
