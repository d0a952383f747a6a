// The step's schedule: which thread block attends to which positions for which tile, decided on the
// device from the lengths and node counts of this step.
//
// There are two ways to spread the work, and the cheaper by its own cost model wins.
//
// "Parts": every request's context is cut into parts of nearly equal length, one fragment a block.
// The length is the shortest with which all fragments still run in one wave.  Also used with a
// fixed part length and where the number of parts is bounded; fragments beyond one wave are then
// dealt to the blocks in turn.
//
// "Chain": all requests stand in a row, which is cut into one equal stretch per block, as
// FlashMLA's scheduler does: a block may end one request and begin the next.  Balanced however
// ragged the batch is, at the price of more fragments.  Where all requests have the same number K
// of tiles, K blocks walk the same stretch together, one tile each, so that they meet in L2;
// otherwise the tiles are in the row one after the other.
#include <algorithm>

#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = COPPICE_MLA_MAX_BATCH;
static_assert(kBatch == 64, "a lane of a warp takes two requests");

// What starting, ending and combining a fragment costs, in tokens; and the shortest piece worth a
// fragment.
constexpr int kOverheadTokens = 128;
constexpr int kShortestTokens = 32;

struct Request {
  int context, nodes, groups, tiles, steps;
};

// The row of the second way of spreading: how its stretches are cut.
struct Cut {
  int request, tile;  // the item in which the stretch begins
  int item;           // its number
  int steps;          // its steps that lie before the stretch
  int rank;           // cuts inside the item up to here
  int first;          // fragments before the stretch
};

// Sums before each of 64 values, and in all, by one warp.
__device__ void Prefix(const int* values, int* prefix, int lane) {
  const int a = values[2 * lane], b = values[2 * lane + 1];
  int sum = a + b;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
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

__device__ int Sum(int a, int b) { return __reduce_add_sync(~0u, a + b); }
__device__ int Least(int a, int b) { return __reduce_min_sync(~0u, min(a, b)); }
__device__ int Most(int a, int b) { return __reduce_max_sync(~0u, max(a, b)); }

__global__ void __launch_bounds__(kThreads) Schedule(const __grid_constant__ AttentionArguments a) {
  __shared__ Request requests[kBatch];
  __shared__ int units[kBatch], parts[kBatch], prefix[kBatch + 1], item_prefix[kBatch + 1];
  __shared__ int best, warp_sums[kWarps];
  __shared__ Cut cuts[kThreads];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int step = a.instance.step_tokens;
  const int overhead = max(1, kOverheadTokens / step);
  const int shortest = max(1, kShortestTokens / step);
  const bool fixed = a.shape.split_tokens > 0;
  const int bound = a.max_parts > 0 ? a.max_parts : 1 << 20;
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
  }
  for (int i = thread; i < a.shape.batch * a.max_tiles; i += kThreads)
    a.workspace.tiles[i] = Tile{};
  if (thread == 0) best = 1 << 30;
  __syncthreads();

  // Every warp adds up the batch for itself, a lane two requests.
  const Request one = requests[lane], two = requests[lane + 32];
  const int longest = Most(one.steps, two.steps);
  int one_tiles = one.tiles, two_tiles = two.tiles;
  if (a.instance.narrowest_groups > 0 && !fixed) {
    // Tiles become k times as many where even the shortest parts leave that many blocks idle.
    const int least = max(shortest, (longest + bound - 1) / bound);
    const int finest = Sum(one_tiles * ((one.steps + least - 1) / least),
                           two_tiles * ((two.steps + least - 1) / least));
    const auto limit = [&](const Request& r) {
      return r.tiles > 0 ? r.groups / (r.tiles * a.instance.narrowest_groups) : kMostNarrowing;
    };
    const int fit = min(Least(limit(one), limit(two)), a.blocks / max(finest, 1));
    const int k = max(1, min(kMostNarrowing, fit));
    one_tiles *= k;
    two_tiles *= k;
    __syncthreads();  // all have read their requests
    if (warp == 0) {
      requests[lane].tiles = one_tiles;
      requests[lane + 32].tiles = two_tiles;
    }
  }
  const int all_tiles = Sum(one_tiles, two_tiles), most_tiles = Most(one_tiles, two_tiles);
  const auto or_most = [&](int tiles) { return tiles > 0 ? tiles : most_tiles; };
  const bool uniform = Least(or_most(one_tiles), or_most(two_tiles)) == most_tiles;
  const int row_units = Sum(one_tiles * (one.steps + overhead), two_tiles * (two.steps + overhead));
  __syncthreads();

  const auto describe = [&](int b, int tile, int* first, int* groups) {
    const Request& r = requests[b];
    *first = r.groups * tile / r.tiles;
    *groups = r.groups * (tile + 1) / r.tiles - *first;
  };
  const auto write = [&](int index, int slot, int b, int tile, int begin_step, int end_step) {
    const Request& r = requests[b];
    Fragment f;
    f.request = b;
    describe(b, tile, &f.first_group, &f.groups);
    f.begin = begin_step * step;
    f.end = min(end_step * step, r.context + r.nodes);
    f.slot = slot;
    f.context = r.context;
    f.nodes = r.nodes;
    a.workspace.fragments[index] = f;
  };
  const auto write_tile = [&](int b, int tile, int slot, int tile_parts) {
    Tile t = {};
    t.request = b;
    describe(b, tile, &t.first_group, &t.groups);
    t.slot = slot;
    t.parts = tile_parts > 1 ? tile_parts : 0;
    t.request_tiles = requests[b].tiles;
    t.request_groups = requests[b].groups;
    a.workspace.tiles[b * a.max_tiles + tile] = t;
  };

  // Candidate 1: the shortest part length (steps) with which all fits one wave; each warp tries one
  // at a time.
  int part_steps = 0;
  if (!fixed && all_tiles > 0 && all_tiles <= a.blocks) {
    int low = max(min(shortest, longest), (longest + bound - 1) / bound), high = longest;
    while (low < high) {
      const int stride = (high - low + kWarps - 1) / kWarps;
      const int candidate = min(low + warp * stride, high);
      const float inverse = __frcp_rn(static_cast<float>(candidate));
      // steps / candidate rounded up; half a unit of slack keeps the reciprocal's error away from
      // whole quotients.
      const auto fragments = [&](int steps, int tiles) {
        return tiles * static_cast<int>((static_cast<float>(steps + candidate) - 0.5f) * inverse);
      };
      const int sum = Sum(fragments(one.steps, one_tiles), fragments(two.steps, two_tiles));
      if (lane == 0 && sum <= a.blocks) atomicMin(&best, candidate);
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
  bool chain = !fixed && all_tiles > 0 && teams > 0 && (part_steps == 0 || stretch < part_steps);
  // A request of s steps is cut into at most s / stretch + 2 pieces.
  if (chain && longest / max(stretch, 1) + 2 > bound) chain = false;

  if (!chain) {
    if (thread < kBatch) {
      const int s = requests[thread].steps;
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
      item_prefix[thread] = n * requests[thread].tiles;
    }
    __syncthreads();
    // The row of fragments: parts · tiles of each request.
    if (warp == 0) Prefix(item_prefix, prefix, lane);
    __syncthreads();
    const int total = prefix[kBatch];
    const int each = total / a.blocks, rest = total % a.blocks;
    for (int i = thread; i <= a.blocks; i += kThreads)
      a.workspace.fragment_begin[i] = i * each + min(i, rest);
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
        end = min(begin + units[b], requests[b].steps);
      } else {
        begin = static_cast<int>(static_cast<int64_t>(requests[b].steps) * part / n);
        end = static_cast<int>(static_cast<int64_t>(requests[b].steps) * (part + 1) / n);
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
  if (warp == 0) Prefix(units, prefix, lane);
  if (warp == 1) Prefix(parts, item_prefix, lane);
  __syncthreads();

  // Cuts inside an item are those that leave at least `shortest` steps on either side.
  const auto inside_first = [&](int start) {
    return (start + overhead + shortest + stretch - 1) / stretch;
  };
  const auto inside_last = [&](int start, int s) {
    return s < 2 * shortest ? -1 : (start + overhead + s - shortest) / stretch;
  };
  Cut cut = {};
  if (thread <= teams) {
    const int x = thread * stretch;
    if (x >= row) {
      cut.request = kBatch;
      cut.item = item_prefix[kBatch];
    } else {
      cut.request = Find(prefix, x);
      const int s = requests[cut.request].steps, length = s + overhead;
      cut.tile = (x - prefix[cut.request]) / length;
      cut.item = item_prefix[cut.request] + cut.tile;
      const int start = prefix[cut.request] + cut.tile * length;
      const int done = x - start - overhead;
      if (done >= shortest && s - done >= shortest) {
        cut.steps = done;
        cut.rank = thread - inside_first(start) + 1;
      } else if (s - done < shortest && done > 0) {
        ++cut.item;  // too near the end: the stretch begins with the next item
        ++cut.tile;
      }
    }
  }
  // Fragments before a cut: the items before, and one more for each cut inside an item up to here.
  int scan = cut.steps > 0;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) warp_sums[warp] = scan;
  __syncthreads();
  for (int w = 0; w < warp; ++w) scan += warp_sums[w];
  cut.first = cut.item + scan;
  if (thread <= teams) cuts[thread] = cut;
  __syncthreads();

  for (int block = thread; block <= a.blocks; block += kThreads) {
    const int team = block / together, t = block % together;
    if (team >= teams) {
      a.workspace.fragment_begin[block] = cuts[teams].first * together;
      continue;
    }
    const Cut from = cuts[team], to = cuts[team + 1];
    const int count = to.item - from.item + (to.steps > 0);
    const int index = from.first * together + t * count;
    a.workspace.fragment_begin[block] = index;
    int b = from.request, tile = from.tile;
    for (int k = 0; k < count; ++k) {
      while (b < kBatch && tile >= parts[b]) {
        ++b;
        tile = 0;
      }
      const int s = requests[b].steps;
      const int begin = k == 0 ? from.steps : 0;
      const int end = k == count - 1 && to.steps > 0 ? to.steps : s;
      const int start = prefix[b] + tile * (s + overhead);
      const int n = 1 + max(0, inside_last(start, s) - inside_first(start) + 1);
      const int rank = k == 0 ? from.rank : 0;
      const int slot = (from.first + k - rank) * together + t * n;
      const int of = together > 1 ? t : tile;
      write(index + k, n > 1 ? slot + rank : -1, b, of, begin, end);
      if (begin == 0) write_tile(b, of, slot, n);
      ++tile;
    }
  }
}

}  // namespace

cudaError_t LaunchSchedule(const AttentionArguments& arguments, cudaStream_t stream) {
  Schedule<<<1, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace coppice::mla
