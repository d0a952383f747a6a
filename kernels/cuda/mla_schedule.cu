// The step's schedule: which thread block attends to which positions for which tile, decided on the
// device from the lengths and node counts of this step.
//
// Two ways to spread the work, the cheaper by its own cost model wins:
//   parts    Every request's context is cut into parts of nearly equal length, one fragment a
//   block.  The length is the
//            shortest with which all fragments still run in one wave.  Also used with a fixed part
//            length and where the number of parts is bounded; fragments beyond one wave are dealt
//            to the blocks in turn.
//   chain    All requests in a row, cut into one equal stretch per block, as FlashMLA's scheduler
//   does: a block may end
//            one request and begin the next.  Balanced however ragged the batch is, at the price of
//            more fragments. Where all requests have the same number K of tiles, K blocks walk the
//            same stretch together, one tile each, so that they meet in L2; otherwise the tiles are
//            in the row one after the other.
#include <algorithm>

#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

constexpr int kThreads = 512;
constexpr int kBatch = COPPICE_MLA_MAX_BATCH;

// What starting, ending and combining a fragment costs, in tokens; and the shortest piece worth a
// fragment.
constexpr int kOverheadTokens = 128;
constexpr int kShortestTokens = 64;

struct Request {
  int context, nodes, groups, tiles;
  int steps;
};

// Sum of `value` over the lower `n` ≤ 64 entries before `index`, by one warp.
__device__ void ExclusivePrefix64(const int* values, int* prefix, int lane) {
  int a = values[2 * lane], b = values[2 * lane + 1];
  int sum = a + b;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  prefix[2 * lane] = sum - a - b;
  prefix[2 * lane + 1] = sum - b;
  if (lane == 31) prefix[kBatch] = sum;
}

// The largest b with prefix[b] <= x: the entry that holds unit x of the prefix sums' row.
__device__ int Find(const int* prefix, int x) {
  int b = 0;
#pragma unroll
  for (int d = kBatch / 2; d > 0; d /= 2) {
    if (prefix[b + d] <= x) b += d;
  }
  return b;
}

__global__ void __launch_bounds__(kThreads) Schedule(const __grid_constant__ AttentionArguments a) {
  __shared__ Request requests[kBatch];
  __shared__ int steps[kBatch], units[kBatch], parts[kBatch], prefix[kBatch + 1];
  __shared__ int best, cut_scan[kThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32;
  const int step = a.instance.step_tokens;
  const int overhead = max(1, kOverheadTokens / step);
  const int shortest = max(1, kShortestTokens / step);
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (thread < kBatch) {
    Request r = {};
    if (thread < a.shape.batch) {
      r.nodes = min(max(a.tensors.node_counts[thread], 0), a.shape.nodes);
      r.context = min(max(a.tensors.context_lengths[thread], 0), COPPICE_MLA_MAX_CONTEXT);
      r.groups = r.nodes * GroupsPerNode(a.shape.heads);
      r.tiles = (r.groups + a.instance.tile_groups - 1) / a.instance.tile_groups;
      r.steps = r.nodes > 0 ? (r.context + r.nodes + step - 1) / step : 0;
    }
    requests[thread] = r;
    steps[thread] = r.steps;
  }
  for (int i = thread; i < a.shape.batch * a.max_tiles; i += kThreads) {
    a.workspace.tiles[i] = Tile{};
  }
  if (thread == 0) best = 1 << 30;
  __syncthreads();

  // Short contexts leave blocks idle: requests of one tile are then cut in two, where all pieces still run in one wave.
  if (a.instance.halves && a.max_tiles == 2 && a.shape.split_tokens == 0) {
    int pieces = 0;
    for (int b = 0; b < a.shape.batch; ++b) pieces += 2 * ((steps[b] + shortest - 1) / shortest);
    __syncthreads();
    if (pieces <= a.blocks && thread < kBatch && requests[thread].groups > 1) requests[thread].tiles = 2;
    __syncthreads();
  }

  // Every thread sums over the batch by itself: 64 reads from shared memory.
  int longest = 0, all_tiles = 0, most_tiles = 0, live = 0, row_units = 0;
  bool uniform = true;
  for (int b = 0; b < a.shape.batch; ++b) {
    const int t = requests[b].tiles;
    longest = max(longest, steps[b]);
    all_tiles += t;
    if (t > 0) {
      uniform = uniform && (most_tiles == 0 || t == most_tiles);
      most_tiles = max(most_tiles, t);
      row_units += t * (steps[b] + overhead);
      ++live;
    }
  }

  // Writes fragment `index` (which is also its slot, where it is a part of several).
  auto write = [&](int index, int slot, int b, int tile, int begin_step, int end_step) {
    const Request& r = requests[b];
    const int first = r.groups * tile / r.tiles;
    Fragment f;
    f.request = b;
    f.first_group = first;
    f.groups = r.groups * (tile + 1) / r.tiles - first;
    f.begin = begin_step * step;
    f.end = min(end_step * step, r.context + r.nodes);
    f.slot = slot;
    f.context = r.context;
    f.nodes = r.nodes;
    a.workspace.fragments[index] = f;
  };
  auto write_tile = [&](int b, int tile, int slot, int tile_parts) {
    const Request& r = requests[b];
    const int first = r.groups * tile / r.tiles;
    Tile t = {};
    t.request = b;
    t.first_group = first;
    t.groups = r.groups * (tile + 1) / r.tiles - first;
    t.slot = slot;
    t.parts = tile_parts > 1 ? tile_parts : 0;
    a.workspace.tiles[b * a.max_tiles + tile] = t;
  };

  // Candidate 1: the shortest part length L (steps) that fits one wave.
  const bool fixed = a.shape.split_tokens > 0;
  const int bound = a.max_parts > 0 ? a.max_parts : 1 << 20;
  int part_steps = 0;
  if (!fixed && all_tiles > 0 && all_tiles <= a.blocks) {
    int low = max(min(shortest, longest), (longest + bound - 1) / bound), high = longest;
    while (low < high) {
      const int stride = (high - low + kThreads - 1) / kThreads;
      const int candidate = min(low + thread * stride, high);
      const float inverse = __frcp_rn((float)candidate);
      int sum = 0;
      for (int b = 0; b < a.shape.batch; ++b) {
        // steps / candidate rounded up; half a unit of slack keeps the reciprocal's error away from
        // whole quotients.
        sum += requests[b].tiles * (int)(((float)(steps[b] + candidate) - 0.5f) * inverse);
      }
      if (sum <= a.blocks) atomicMin(&best, candidate);
      __syncthreads();
      const int fits = min(best, high);
      high = fits;
      low = stride == 1 ? fits : max(low, fits - stride + 1);
      __syncthreads();
    }
    part_steps = high;
  }

  // Candidate 2: the row.
  const int together = uniform ? max(most_tiles, 1) : 1;
  const int teams = a.blocks / together;
  const int row = uniform && most_tiles > 0 ? row_units / most_tiles : row_units;
  const int stretch = teams > 0 ? (row + teams - 1) / teams : 0;
  bool chain = !fixed && live > 0 && teams > 0 &&
               (part_steps == 0 || stretch + overhead < part_steps + overhead);
  // A request of s steps is cut into at most s / stretch + 2 pieces.
  if (chain && longest / max(stretch, 1) + 2 > bound) chain = false;

  if (!chain) {
    if (thread < kBatch) {
      const int s = steps[thread];
      int n = 0;
      if (s > 0) {
        if (fixed) {
          // Doubled until the bound holds, so that the length depends on nothing but the request's
          // own.
          int length = a.shape.split_tokens / step;
          while ((s + length - 1) / length > bound) length *= 2;
          n = (s + length - 1) / length;
          units[thread] = length;
        } else {
          n = part_steps > 0 ? (s + part_steps - 1) / part_steps
                             : min(bound, max(1, (s + stretch - 1) / max(stretch, 1)));
        }
      }
      parts[thread] = n;
    }
    __syncthreads();
    if (thread < 32) {
      // The row of fragments: parts · tiles of each request.
      __shared__ int counts[kBatch];
      for (int b = lane; b < kBatch; b += 32) counts[b] = parts[b] * requests[b].tiles;
      __syncwarp();
      ExclusivePrefix64(counts, prefix, lane);
    }
    __syncthreads();
    const int total = prefix[kBatch];
    const int each = total / a.blocks, rest = total % a.blocks;
    for (int i = thread; i <= a.blocks; i += kThreads) {
      a.workspace.fragment_begin[i] = i * each + min(i, rest);
    }
    for (int f = thread; f < total; f += kThreads) {
      const int b = Find(prefix, f);
      const int tiles = requests[b].tiles, n = parts[b];
      const int part = (f - prefix[b]) / tiles, tile = (f - prefix[b]) % tiles;
      const int block = f % a.blocks;
      const int index = block * each + min(block, rest) + f / a.blocks;
      const int slot = prefix[b] + tile * n;
      int begin, end;
      if (fixed) {
        begin = part * units[b];
        end = min(begin + units[b], steps[b]);
      } else {
        begin = (int)((int64_t)steps[b] * part / n);
        end = (int)((int64_t)steps[b] * (part + 1) / n);
      }
      write(index, n > 1 ? slot + part : -1, b, tile, begin, end);
      if (part == 0) write_tile(b, tile, slot, n);
    }
    return;
  }

  // Items of the row: a request (all its tiles together) or a request's tile; an item of s steps is
  // s + overhead units long, and a cut inside the overhead falls back to the item's start.
  if (thread < kBatch) {
    const Request& r = requests[thread];
    const int items = together > 1 ? (r.tiles > 0) : r.tiles;
    units[thread] = items * (r.steps + overhead);
    parts[thread] = items;
  }
  __syncthreads();
  __shared__ int item_prefix[kBatch + 1];
  if (thread < 32) ExclusivePrefix64(units, prefix, lane);
  if (thread >= 32 && thread < 64) ExclusivePrefix64(parts, item_prefix, lane);
  __syncthreads();

  // Cut i of teams + 1: the item in which stretch i begins, and how many of its steps lie before.
  struct Cut {
    int request, tile, item, steps, rank;
  };
  // Cuts inside an item are those that leave at least `shortest` steps on either side.
  auto inside_first = [&](int start) {
    return (start + overhead + shortest + stretch - 1) / stretch;
  };
  auto inside_last = [&](int start, int s) {
    return s < 2 * shortest ? -1 : (start + overhead + s - shortest) / stretch;
  };
  auto make_cut = [&](int i) {
    Cut c = {};
    const int x = i * stretch;
    if (x >= row) {
      c.request = kBatch;
      c.item = item_prefix[kBatch];
      return c;
    }
    c.request = Find(prefix, x);
    const int length = steps[c.request] + overhead;
    c.tile = (x - prefix[c.request]) / length;
    c.item = item_prefix[c.request] + c.tile;
    const int start = prefix[c.request] + c.tile * length;
    const int done = x - start - overhead;
    if (done >= shortest && steps[c.request] - done >= shortest) {
      c.steps = done;
      c.rank = i - inside_first(start) + 1;
    } else if (steps[c.request] - done < shortest && done > 0) {
      ++c.item;  // too near the end: the stretch begins with the next item
      ++c.tile;
    }
    return c;
  };
  const bool mine = thread <= teams;
  Cut cut = mine ? make_cut(thread) : Cut{};
  // Fragments before cut i: the items before, and one more for each cut inside an item up to here.
  int inside = mine && cut.steps > 0;
  int scan = inside;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) cut_scan[thread / 32] = scan;
  __syncthreads();
  for (int w = 0; w < thread / 32; ++w) scan += cut_scan[w];
  const int first = cut.item + scan;
  if (mine && thread == teams) {
    for (int i = teams * together; i <= a.blocks; ++i) {
      a.workspace.fragment_begin[i] = first * together;
    }
  }
  if (thread >= teams) return;
  const Cut next = make_cut(thread + 1);
  const int count = next.item - cut.item + (next.steps > 0);
  for (int t = 0; t < together; ++t) {
    a.workspace.fragment_begin[thread * together + t] = first * together + t * count;
  }
  int b = cut.request, tile = cut.tile;
  for (int k = 0; k < count; ++k) {
    while (b < kBatch && tile >= parts[b]) {
      ++b;
      tile = 0;
    }
    const int s = steps[b];
    const int begin = k == 0 ? cut.steps : 0;
    const int end = k == count - 1 && next.steps > 0 ? next.steps : s;
    const int start = prefix[b] + tile * (s + overhead);
    const int n = 1 + max(0, inside_last(start, s) - inside_first(start) + 1);
    const int rank = k == 0 ? cut.rank : 0;
    const int slot = (first + k - rank) * together;
    for (int t = 0; t < together; ++t) {
      const int of = together > 1 ? t : tile;
      write(first * together + t * count + k, n > 1 ? slot + t * n + rank : -1, b, of, begin, end);
      if (begin == 0) write_tile(b, of, slot + t * n, n);
    }
    ++tile;
  }
}

}  // namespace

cudaError_t LaunchSchedule(const AttentionArguments& arguments, cudaStream_t stream) {
  Schedule<<<1, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace coppice::mla
