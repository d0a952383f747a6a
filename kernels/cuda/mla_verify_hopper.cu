// The verify attention for Hopper (sm_90a): warpgroup products straight from the paged tiles in shared memory.
//
// One thread block per multiprocessor works off its fragments in tiles of 64 positions.  Rows (8 per group: one node's heads)
// are the N side of both products, so that any number of groups up to 9 costs what it needs:
//
//   scores  S^T[64 x rows]  = K[64 x 576] · Q^T        A: the tile as stored                     B: the queries
//   output  O^T[512 x rows] += V^T[512 x 64] · P^T     A: the same tile, transposed by its descriptor
//
// Two warpgroups ("consumers") each score half of the groups and accumulate half of the 512 value columns; the next tile's
// scores are queued behind this tile's outputs.  A third warpgroup ("producers", two warps per stage) fetches.  Two
// barriers of the consumers per tile: one after the scores, which also asks whether any has left the reference's range,
// and one after the probabilities are stored.
//
// The exponent's reference is each row's exact running maximum: a probability of exactly 1 for the position that dominates is
// worth a fifth of the error that bf16 probabilities cause, as are sums over the rounded ones.  A tile in which no row's
// maximum grows searches none and rescales nothing; otherwise only groups that grow pay.
#include <array>
#include <utility>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

using hopper::Major;

constexpr int kStep = 64;                    // positions per tile
constexpr int kChunk = kStep * 128;          // bytes of 64 positions x 64 columns
constexpr int kLatentChunks = 8;             // 512 columns
constexpr int kTile = kLatentChunks * kChunk;
constexpr int kStages = 2;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;
constexpr int kMaxGroups = 9;
constexpr int64_t kRowBytes = COPPICE_MLA_ROW * 2;
constexpr float kUnseen = -1e30f;            // reference of a row that has seen nothing yet

// Shared memory of a block, in bytes from a base aligned to 1,024.
template <int kGroups>
struct Layout {
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kRopeStages = kGroups <= 8 ? 2 : 1;
  static constexpr int kQueryChunk = kRows * 128;
  static constexpr int kQuery = 0;  // 9 chunks of [rows][64 columns]; the finished output is staged over it
  static constexpr int kLatent = kQuery + 9 * kQueryChunk;
  static constexpr int kRope = kLatent + kStages * kTile;
  // [rows][64 positions]; after the last tile, sums of a consumer's four warps, fp32 [4][rows].
  static constexpr int kProbability = kRope + kRopeStages * kChunk;
  static constexpr int kReduction = kProbability;
  static constexpr int kFactors = kProbability + kRows * 128;  // fp32 [rows]: rescale factors, at the end 1 / sum
  static constexpr int kPeaks = kFactors + kRows * 4;          // int32 [rows]: running maxima, as Ordered()
  static constexpr int kRowIndex = kPeaks + kRows * 4;         // int32 [rows]: row of query and output, −1: none
  static constexpr int kBarriers = kRowIndex + kRows * 4;      // 8 mbarriers
  static constexpr int kBytes = kBarriers + 64;
};
static_assert(Layout<kMaxGroups>::kBytes <= 232448, "a block has 227 KiB");

struct Barriers {
  uint32_t base;
  __device__ uint32_t LatentFull(int stage) const { return base + 8 * stage; }
  __device__ uint32_t LatentEmpty(int stage) const { return base + 16 + 8 * stage; }
  __device__ uint32_t RopeFull(int stage) const { return base + 32 + 8 * stage; }
  __device__ uint32_t RopeEmpty(int stage) const { return base + 48 + 8 * stage; }
};

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Integers in the order of the floats; its own inverse.
__device__ __forceinline__ int Ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

__device__ __forceinline__ float Bf16Low(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float Bf16High(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  constexpr float kMax = 65504.0f;
  low = fminf(fmaxf(low, -kMax), kMax);
  high = fminf(fmaxf(high, -kMax), kMax);
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// This block's fragments.  Usually every block has one, and block i's is fragment i: it is read along with its bounds, since
// each read that waits for another costs a kernel on a short context a tenth of its time.
struct Work {
  int next, end;
  Fragment guess;
  __device__ explicit Work(const Workspace& workspace)
      : next(workspace.fragment_begin[blockIdx.x]),
        end(workspace.fragment_begin[blockIdx.x + 1]),
        guess(workspace.fragments[blockIdx.x]) {}
  __device__ bool Take(const Workspace& workspace, Fragment& fragment) {
    if (next >= end) return false;
    fragment = next == static_cast<int>(blockIdx.x) ? guess : workspace.fragments[next];
    ++next;
    return true;
  }
};

// ---- producers ---------------------------------------------------------------------------------------------------------
// Two warps per stage; lane l of a warp copies 16-byte piece l % 8 of rows l / 8, l / 8 + 4, … of the warp's 32.
template <int kGroups>
__device__ void Produce(const AttentionArguments& arguments, uint32_t shared, Barriers barriers) {
  using L = Layout<kGroups>;
  constexpr int kRowsPerLane = 8;
  const int warp = threadIdx.x / 32 - kConsumers / 32;
  const int stage = warp / 2;
  const int lane = threadIdx.x % 32;
  const int first_row = (warp % 2) * 32 + lane / 8;
  const int piece = lane % 8;
  const uint32_t latent = shared + L::kLatent + stage * kTile + first_row * 128;
  // Row r's piece p lies at p ^ (r & 7), and r & 7 of this lane's rows alternates between two values.
  const uint32_t swizzled[2] = {static_cast<uint32_t>((piece ^ (first_row & 7)) * 16),
                                static_cast<uint32_t>((piece ^ ((first_row + 4) & 7)) * 16)};
  const auto& tensors = arguments.tensors;
  const int page_shift = arguments.page_shift;
  const int page_mask = (1 << page_shift) - 1;
  const char* cache = static_cast<const char*>(tensors.cache) + piece * 16;

  int tile = 0;  // of the block, over all its fragments: stage = tile % 2
  Work work(arguments.workspace);
  for (Fragment fragment; work.Take(arguments.workspace, fragment);) {
    const int32_t* table = tensors.page_table + fragment.request * tensors.table_stride;
    const int tiles = (fragment.end - fragment.begin + kStep - 1) / kStep;
    // Pages of this lane's rows, looked up one tile of this half ahead, so that the copies never wait for the table.
    int32_t next[kRowsPerLane];
    auto look_up = [&](int of_tile) {
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        const int position = fragment.begin + of_tile * kStep + first_row + r * 4;
        next[r] = position < fragment.end ? table[position >> page_shift] : -1;
      }
    };
    int i = (stage ^ tile) & 1;  // this half's first tile of the fragment
    if (i < tiles) look_up(i);
    for (; i < tiles; i += 2) {
      const int use = tile + i;
      const int position = fragment.begin + i * kStep + first_row;
      int32_t page[kRowsPerLane];
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) page[r] = next[r];
      auto row = [&](int r) {
        return cache + (page[r] < 0 ? 0 : page[r] * tensors.page_stride + ((position + r * 4) & page_mask) * kRowBytes);
      };
      if (i + 2 < tiles) look_up(i + 2);

      hopper::BarrierWait(barriers.LatentEmpty(stage), ((use >> 1) & 1) ^ 1);
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        const char* from = row(r);
        const int bytes = page[r] < 0 ? 0 : 16;
#pragma unroll
        for (int c = 0; c < kLatentChunks; ++c) {
          hopper::CopyAsync16(latent + c * kChunk + r * 512 + swizzled[r & 1], from + c * 128, bytes);
        }
      }
      hopper::CopyAsyncCommit();
      const int rope_stage = use % L::kRopeStages;
      const uint32_t rope = shared + L::kRope + rope_stage * kChunk + first_row * 128;
      hopper::BarrierWait(barriers.RopeEmpty(rope_stage), ((use / L::kRopeStages) & 1) ^ 1);
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        hopper::CopyAsync16(rope + r * 512 + swizzled[r & 1], row(r) + kLatentChunks * 128, page[r] < 0 ? 0 : 16);
      }
      hopper::CopyAsyncCommit();
      hopper::CopyAsyncWait<1>();
      hopper::FenceAsyncProxy();
      hopper::BarrierArrive(barriers.LatentFull(stage));
      hopper::CopyAsyncWait<0>();
      hopper::FenceAsyncProxy();
      hopper::BarrierArrive(barriers.RopeFull(rope_stage));
    }
    tile += tiles;
  }
}

// ---- consumers ---------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void ConsumersMeet() { hopper::NamedBarrier<1, kConsumers>(); }

// Consumer kWhich: it scores kOwn of the tile's groups from kFirst on, and accumulates value columns 256 · kWhich … of all.
template <int kGroups, int kWhich>
__device__ void Consume(const AttentionArguments& arguments, uint32_t shared, char* shared_pointer, Barriers barriers) {
  using L = Layout<kGroups>;
  constexpr int kFirst = kWhich == 0 ? 0 : (kGroups + 1) / 2;
  constexpr int kOwn = kWhich == 0 ? (kGroups + 1) / 2 : kGroups / 2;
  constexpr int kScores = kOwn > 0 ? kOwn : 1;  // a tile of one group leaves the second consumer none
  const auto& tensors = arguments.tensors;
  const auto& shape = arguments.shape;
  const int thread = threadIdx.x;
  const int warp = (thread / 32) % 4;
  const int lane = thread % 32;
  const int column = (lane % 4) * 2;  // of each group's 8 rows, the two this thread's fragments hold
  const int groups_per_node = GroupsPerNode(shape.heads);
  float* factors = reinterpret_cast<float*>(shared_pointer + L::kFactors);
  float* reduction = reinterpret_cast<float*>(shared_pointer + L::kReduction);
  int* peaks = reinterpret_cast<int*>(shared_pointer + L::kPeaks);
  int* row_index = reinterpret_cast<int*>(shared_pointer + L::kRowIndex);
  const uint32_t probability = shared + L::kProbability;

  int tile = 0;  // of the block, over all its fragments
  Work work(arguments.workspace);
  for (Fragment fragment; work.Take(arguments.workspace, fragment);) {
    if (thread < L::kRows) {
      const int own = thread / kGroupRows;
      const int group = fragment.first_group + own;
      const int node = group / groups_per_node;
      const int head = (group - node * groups_per_node) * kGroupRows + thread % kGroupRows;
      row_index[thread] = own < fragment.groups && head < shape.heads
                              ? (fragment.request * shape.nodes + node) * shape.heads + head
                              : -1;
      peaks[thread] = Ordered(__float_as_int(kUnseen));
    }
    ConsumersMeet();
    // Queries, swizzled by chunks of 64 columns; rows that are no head of a live node are zeros.
#pragma unroll 4
    for (int i = thread; i < L::kRows * 72; i += kConsumers) {
      const int row = i / 72, piece = i % 72;
      const int source = row_index[row];
      hopper::CopyAsync16(
          shared + L::kQuery + (piece / 8) * L::kQueryChunk + row * 128 + (((piece % 8) ^ (row & 7)) * 16),
          static_cast<const char*>(tensors.query) + (source < 0 ? 0 : source * kRowBytes + piece * 16), source < 0 ? 0 : 16);
    }
    hopper::CopyAsyncCommit();
    float output[4][kGroups * 4];  // written first by the first tile's products
    float reference[kScores * 2], sum[kScores * 2];
#pragma unroll
    for (int c = 0; c < kScores * 2; ++c) {
      reference[c] = kUnseen;
      sum[c] = 0.0f;
    }
    // Scores of a tile's 64 positions: fragment r of group g is position 16·warp + lane/4 + 8·(r/2), row column + r%2.
    float score[kScores * 4];
    auto queue_scores = [&](int of_tile) {
      const uint32_t latent = shared + L::kLatent + (of_tile & 1) * kTile;
      const uint32_t query = shared + L::kQuery + kFirst * kGroupRows * 128;
      const int rope_stage = of_tile % L::kRopeStages;
      hopper::BarrierWait(barriers.LatentFull(of_tile & 1), (of_tile >> 1) & 1);
      if constexpr (kOwn > 0) {
        hopper::ProductsFence();
#pragma unroll
        for (int c = 0; c < kLatentChunks; ++c) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            hopper::Product<kScores * 8, Major::kK>(score, hopper::Descriptor(latent + c * kChunk + k * 32),
                                                    hopper::Descriptor(query + c * L::kQueryChunk + k * 32), c + k > 0);
          }
        }
      }
      hopper::BarrierWait(barriers.RopeFull(rope_stage), (of_tile / L::kRopeStages) & 1);
      if constexpr (kOwn > 0) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          hopper::Product<kScores * 8, Major::kK>(score,
                                                  hopper::Descriptor(shared + L::kRope + rope_stage * kChunk + k * 32),
                                                  hopper::Descriptor(query + 8 * L::kQueryChunk + k * 32), 1);
        }
        hopper::ProductsCommit();
      }
    };
    auto finish_scores = [&](int of_tile) {
      hopper::ProductsWait<0>();
      if (lane == 0) hopper::BarrierArrive(barriers.RopeEmpty(of_tile % L::kRopeStages));
    };
    hopper::CopyAsyncWait<0>();
    hopper::FenceAsyncProxy();
    ConsumersMeet();

    queue_scores(tile);
    finish_scores(tile);
    const int first_tile = tile;
    for (int first = fragment.begin; first < fragment.end; first += kStep, ++tile) {
      // Visibility: only the last tiles hold tree positions or end early.
      if (first + kStep > fragment.context) {
#pragma unroll
        for (int g = 0; g < kOwn; ++g) {
          const int group = kFirst + g;
          const uint64_t word =
              group < fragment.groups
                  ? tensors.ancestor_words[fragment.request * shape.nodes + (fragment.first_group + group) / groups_per_node]
                  : 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int position = first + warp * 16 + lane / 4 + r * 8;
            const int node = position - fragment.context;
            if (node >= 0 && (position >= fragment.end || !((word >> node) & 1))) {
              score[g * 4 + r * 2] = score[g * 4 + r * 2 + 1] = -INFINITY;
            }
          }
        }
      }
      float most[kScores * 2];  // of this thread's two positions
      bool grows = false;
#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          score[g * 4 + c] *= arguments.scale_log2;
          score[g * 4 + 2 + c] *= arguments.scale_log2;
          most[g * 2 + c] = fmaxf(score[g * 4 + c], score[g * 4 + 2 + c]);
          grows = grows || most[g * 2 + c] > reference[g * 2 + c];
        }
      }
      // Past this barrier all products with the previous tile are done: its probabilities' room may be written.
      const bool renew = hopper::NamedBarrierAny<1, kConsumers>(grows);
      if (renew) {
#pragma unroll
        for (int g = 0; g < kOwn; ++g) {
          if (!__any_sync(~0u, most[g * 2] > reference[g * 2] || most[g * 2 + 1] > reference[g * 2 + 1])) continue;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float peak = most[g * 2 + c];
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 4));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 8));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 16));
            if (lane < 4) atomicMax(&peaks[(kFirst + g) * 8 + column + c], Ordered(__float_as_int(peak)));
          }
        }
        ConsumersMeet();
#pragma unroll
        for (int c = 0; c < kOwn * 2; ++c) {
          const int row = (kFirst + c / 2) * 8 + column + c % 2;
          const float renewed = __int_as_float(Ordered(peaks[row]));
          const float factor = Exp2(reference[c] - renewed);
          sum[c] *= factor;
          reference[c] = renewed;
          if (warp == 0 && lane < 4) factors[row] = factor;
        }
      }
      // Probabilities as [row][64 positions]: the 8 x 8 fragments are stored transposed.
      uint32_t packed[kScores * 2];
#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t pair = PackBf16(Exp2(score[g * 4 + r * 2] - reference[g * 2]),
                                         Exp2(score[g * 4 + r * 2 + 1] - reference[g * 2 + 1]));
          sum[g * 2] += Bf16Low(pair);
          sum[g * 2 + 1] += Bf16High(pair);
          packed[g * 2 + r] = pair;
        }
      }
#pragma unroll
      for (int g = 0; g < kOwn; g += 2) {
        const int row = (kFirst + g + (lane / 16)) * 8 + lane % 8;
        const int piece = warp * 2 + (lane / 8) % 2;
        const uint32_t address = probability + row * 128 + ((piece ^ (row & 7)) * 16);
        if (g + 1 < kOwn) {
          hopper::StoreTransposed4(address, packed[g * 2], packed[g * 2 + 1], packed[g * 2 + 2], packed[g * 2 + 3]);
        } else {
          hopper::StoreTransposed2(address, packed[g * 2], packed[g * 2 + 1]);
        }
      }
      hopper::FenceAsyncProxy();
      ConsumersMeet();

      if (renew && tile > first_tile) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const float even = factors[g * 8 + column], odd = factors[g * 8 + column + 1];
          if (!__any_sync(~0u, even != 1.0f || odd != 1.0f)) continue;
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            output[m][g * 4] *= even;
            output[m][g * 4 + 1] *= odd;
            output[m][g * 4 + 2] *= even;
            output[m][g * 4 + 3] *= odd;
          }
        }
      }
      const uint32_t values = shared + L::kLatent + (tile & 1) * kTile + kWhich * 4 * kChunk;
      hopper::ProductsFence();
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) {
          hopper::Product<L::kRows, Major::kMN>(output[m], hopper::Descriptor(values + m * kChunk + k * 2048),
                                                hopper::Descriptor(probability + k * 32), k > 0 || tile > first_tile);
        }
      }
      hopper::ProductsCommit();
      if (first + kStep < fragment.end) {
        queue_scores(tile + 1);
        hopper::ProductsWait<(kOwn > 0 ? 1 : 0)>();
        if (lane == 0) hopper::BarrierArrive(barriers.LatentEmpty(tile & 1));
        finish_scores(tile + 1);
      } else {
        hopper::ProductsWait<0>();
        if (lane == 0) hopper::BarrierArrive(barriers.LatentEmpty(tile & 1));
      }
    }

    // Sums over the positions that other lanes and warps hold, then the rows' scale and log-sum-exp.
    ConsumersMeet();
#pragma unroll
    for (int c = 0; c < kOwn * 2; ++c) {
      float total = sum[c];
      total += __shfl_xor_sync(~0u, total, 4);
      total += __shfl_xor_sync(~0u, total, 8);
      total += __shfl_xor_sync(~0u, total, 16);
      if (lane < 4) {
        const int row = (kFirst + c / 2) * 8 + column + c % 2;
        reduction[warp * L::kRows + row] = total;
        if (warp == 0) factors[row] = reference[c];
      }
    }
    ConsumersMeet();
    const bool partial = fragment.slot >= 0;
    const int64_t partial_row = static_cast<int64_t>(fragment.slot) * L::kRows;
    if (thread < L::kRows) {
      const float total = (reduction[thread] + reduction[L::kRows + thread]) +
                          (reduction[2 * L::kRows + thread] + reduction[3 * L::kRows + thread]);
      const float lse = total > 0.0f ? factors[thread] + log2f(total) : -INFINITY;
      factors[thread] = total > 0.0f ? 1.0f / total : 0.0f;
      if (partial) {
        arguments.workspace.partial_lse[partial_row + thread] = lse;
      } else if (tensors.lse != nullptr && row_index[thread] >= 0) {
        tensors.lse[row_index[thread]] = lse * 0.69314718055994531f;
      }
    }
    ConsumersMeet();

    // Output rows of 1,024 bytes, staged where the queries were.
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float even = factors[g * 8 + column], odd = factors[g * 8 + column + 1];
      const int row = g * 8 + lane % 8;
#pragma unroll
      for (int m = 0; m < 4; m += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float low = output[m + r / 2][g * 4 + (r % 2) * 2] * even;
          const float high = output[m + r / 2][g * 4 + (r % 2) * 2 + 1] * odd;
          packed[r] = partial ? PackHalf(low, high) : PackBf16(low, high);
        }
        const int piece = (kWhich * 4 + m + lane / 16) * 8 + warp * 2 + (lane / 8) % 2;
        hopper::StoreTransposed4(shared + L::kQuery + row * 1024 + ((piece ^ (row & 7)) * 16), packed[0], packed[1],
                                 packed[2], packed[3]);
      }
    }
    ConsumersMeet();
    const int piece = thread % 64;
#pragma unroll 4
    for (int row = thread / 64; row < L::kRows; row += kConsumers / 64) {
      if (row_index[row] < 0) continue;
      const uint4 value =
          *reinterpret_cast<const uint4*>(shared_pointer + L::kQuery + row * 1024 + ((piece ^ (row & 7)) * 16));
      char* to = partial ? reinterpret_cast<char*>(arguments.workspace.partial_output) + (partial_row + row) * 1024
                         : static_cast<char*>(tensors.output) + row_index[row] * int64_t{1024};
      *reinterpret_cast<uint4*>(to + piece * 16) = value;
    }
    ConsumersMeet();  // the room is the next fragment's queries'
  }
}

template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1) VerifyHopper(const __grid_constant__ AttentionArguments arguments) {
  using L = Layout<kGroups>;
  extern __shared__ __align__(1024) char shared_pointer[];
  const uint32_t shared = hopper::SharedAddress(shared_pointer);
  const Barriers barriers{shared + L::kBarriers};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::BarrierInit(barriers.LatentFull(stage), 64);
      hopper::BarrierInit(barriers.LatentEmpty(stage), kConsumers / 32);
      hopper::BarrierInit(barriers.RopeFull(stage), 64);
      hopper::BarrierInit(barriers.RopeEmpty(stage), kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (threadIdx.x >= kConsumers) {
    hopper::RegistersLower<56>();
    Produce<kGroups>(arguments, shared, barriers);
  } else if (threadIdx.x >= kConsumers / 2) {
    hopper::RegistersRaise<224>();
    Consume<kGroups, 1>(arguments, shared, shared_pointer, barriers);
  } else {
    hopper::RegistersRaise<224>();
    Consume<kGroups, 0>(arguments, shared, shared_pointer, barriers);
  }
}

using Kernel = void (*)(AttentionArguments);

template <int... kGroups>
constexpr auto Kernels(std::integer_sequence<int, kGroups...>) {
  struct Entry {
    Kernel kernel;
    int bytes;
  };
  return std::array<Entry, sizeof...(kGroups)>{Entry{VerifyHopper<kGroups + 1>, Layout<kGroups + 1>::kBytes}...};
}
constexpr auto kKernels = Kernels(std::make_integer_sequence<int, kMaxGroups>{});  // [groups per tile − 1]

}  // namespace

Instance HopperInstance(const coppice_mla_shape& shape) {
  return {.tile_groups = EvenTile(shape.nodes * GroupsPerNode(shape.heads), kMaxGroups),
          .step_tokens = kStep,
          .blocks_per_sm = 1};
}

bool HopperRuns(const coppice_mla_shape& shape) { return shape.cache_type == COPPICE_MLA_BF16; }

cudaError_t PrepareHopper() {
  for (const auto& entry : kKernels) {
    const cudaError_t error =
        cudaFuncSetAttribute(entry.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, entry.bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchHopper(const AttentionArguments& arguments, cudaStream_t stream) {
  const auto& entry = kKernels[arguments.instance.tile_groups - 1];
  return LaunchDependent(entry.kernel, arguments.blocks, kThreads, entry.bytes, stream, arguments);
}

}  // namespace coppice::mla
