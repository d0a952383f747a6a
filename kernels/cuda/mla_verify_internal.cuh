// What the schedule, the attention kernels (common, Hopper) and the combine agree on.
#ifndef COPPICE_KERNELS_CUDA_MLA_VERIFY_INTERNAL_CUH_
#define COPPICE_KERNELS_CUDA_MLA_VERIFY_INTERNAL_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/mla_verify.h"

namespace coppice::mla {

// Queries are handled in groups of 8 rows: 8 heads of one node.  With H heads, node i owns groups
// i·⌈H/8⌉ … ; the rows of a group past H are padding, computed from zeros and written nowhere.
constexpr int kGroupRows = 8;

__host__ __device__ constexpr int GroupsPerNode(int heads) {
  return (heads + kGroupRows - 1) / kGroupRows;
}

// A piece of work of one thread block: positions [begin, end) of one request for one tile of its
// groups.
struct alignas(16) Fragment {
  int32_t request;
  int32_t first_group;
  int32_t groups;   // live ones, at most the instance's groups per tile
  int32_t begin;    // a multiple of the instance's step
  int32_t end;      // at most the request's context length + node count
  int32_t slot;     // of the partial result; −1: this is the whole tile, write the output itself
  int32_t context;  // the request's context length
  int32_t nodes;    // the request's live nodes
};

// A tile whose partial results the combine adds up: slots [slot, slot + parts).
struct alignas(16) Tile {
  int32_t request;
  int32_t first_group;
  int32_t groups;
  int32_t slot;
  int32_t parts;          // 0: nothing to combine (no such tile, or written directly)
  int32_t request_tiles;  // of the request in all: tile t has groups ⌊groups · t / tiles⌋ … of its
  int32_t request_groups;  //   request's live ones
  int32_t unused;
};

// The workspace's parts, as device pointers.
struct Workspace {
  int32_t* fragment_begin;  // [blocks + 1]: block i of the attention kernel runs fragments
                            // [begin[i], begin[i + 1])
  Fragment* fragments;
  Tile* tiles;             // [batch · max_tiles]
  __half* partial_output;  // [slots][tile_groups · 8][512], each row normalised by its own sum
  float* partial_lse;  // [slots][tile_groups · 8], log2 units: max + log2(sum); −inf: saw nothing
};

// What an instance tells the schedule.
struct Instance {
  int tile_groups;    // groups per tile
  int step_tokens;    // fragments begin at multiples of this
  int blocks_per_sm;  // the grid is the device's multiprocessors times this
  // Where blocks would idle, tiles may be cut down to this many groups (a kernel whose fixed cost
  // grows with the live groups of a fragment); 0: never.
  int narrowest_groups = 0;
};

constexpr int kMostBlocks = 511;  // that the schedule provides for, whatever the device
// Tiles of a request are at most this many times what its groups need.
constexpr int kMostNarrowing = 4;

// Everything a kernel needs; passed by value.
struct AttentionArguments {
  coppice_mla_shape shape;
  coppice_mla_tensors tensors;
  Workspace workspace;
  Instance instance;
  int page_shift;    // log2(page_size)
  float scale_log2;  // softmax_scale · log2(e)
  int blocks;        // the attention kernel's grid: the schedule's
  int max_tiles;     // that a request may have: tile t of request b is tiles[b · max_tiles + t]
  int max_parts;     // bound on the parts of a request; 0: none
};

constexpr int RowBytes(coppice_mla_cache_type type) { return type == COPPICE_MLA_FP8 ? 656 : 1152; }

__host__ __device__ constexpr int CeilDivide(int a, int b) { return (a + b - 1) / b; }

// The tile size that spreads `groups` evenly over as few tiles of at most `most` groups as hold
// them.
constexpr int EvenTile(int groups, int most) {
  return CeilDivide(groups, CeilDivide(groups, most));
}

// The mma.sync kernel of this shape on a device of compute capability `major`.
Instance CommonInstance(const coppice_mla_shape& shape, int major);
// The wgmma kernel's; called on compute capability 9.0 alone.
Instance HopperInstance(const coppice_mla_shape& shape);
// Whether it serves this shape, and faster than the common one.
bool HopperRuns(const coppice_mla_shape& shape);

// Dynamic shared memory is allowed for here, once per device and outside of captures.
cudaError_t PrepareCommon(int major);
cudaError_t PrepareHopper();

// Each launches one kernel.  The attention kernels run fragments [fragment_begin[i],
// fragment_begin[i + 1]) on block i of `blocks`.  They are launched as programmatic dependents:
// they call griddepcontrol.wait before they read or write anything in device memory, and only then
// griddepcontrol.launch_dependents, so that whoever follows may rely on all that came before the
// attention.
cudaError_t LaunchSchedule(const AttentionArguments& arguments, cudaStream_t stream);
cudaError_t LaunchCommon(const AttentionArguments& arguments, int major, cudaStream_t stream);
cudaError_t LaunchHopper(const AttentionArguments& arguments, cudaStream_t stream);
cudaError_t LaunchCombine(const AttentionArguments& arguments, cudaStream_t stream);

// A launch whose start may overlap the end of the kernel before it in the stream.
template <typename... Parameters, typename... Values>
cudaError_t LaunchDependent(void (*kernel)(Parameters...), int blocks, int threads,
                            size_t shared_bytes, cudaStream_t stream, Values... values) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, values...);
}

}  // namespace coppice::mla

#endif  // COPPICE_KERNELS_CUDA_MLA_VERIFY_INTERNAL_CUH_
