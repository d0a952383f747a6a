// The verify attention for Hopper (sm_90a): warpgroup products straight from the paged tiles in
// shared memory.
//
// One thread block per multiprocessor works off its fragments in tiles of 64 positions.  Rows (8
// per group: one node's heads) are the N side of both products, so that any number of groups up to
// 9 costs what it needs:
//
//   scores  S^T[64 x rows]  = K[64 x 576] · Q^T      A: the tile as stored; B: the queries
//
//   output  O^T[512 x rows] += V^T[512 x 64] · P^T   A: the same tile, transposed by its descriptor
//
// Two warpgroups ("consumers") each score half of the groups (where there are few the first scores
// all) and accumulate half of the 512 value columns; the next tile's scores are queued behind this
// tile's outputs.  A third warpgroup
// ("producers") fetches.  Two barriers of the consumers per tile: one after the scores' maxima, and
// one after the probabilities are stored, which also tells whether any maximum grew; only then is
// the output rescaled.
//
// The exponent's reference is each row's exact running maximum: that the position which dominates a
// row has a probability of exactly 1 is worth a fifth of the error that bf16 probabilities cause.
#include <array>
#include <utility>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

using gpu::Exp2;
using gpu::PackBf16;
using hopper::Major;

constexpr int kStep = 64;            // positions per tile
constexpr int kChunk = kStep * 128;  // bytes of 64 positions x 64 columns
constexpr int kLatentChunks = 8;     // 512 columns
constexpr int kTile = kLatentChunks * kChunk;
constexpr int kStages = 2;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;
constexpr int kMaxGroups = 9;
constexpr int kUnsplitGroups = 7;
constexpr int64_t kRowBytes = COPPICE_MLA_ROW * 2;
constexpr int kStagedRow = 1024 + 16;
constexpr float kUnseen = -1e30f;  // reference of a row that has seen nothing yet

// Shared memory of a block, in bytes from a base aligned to 1,024.
template <int kGroups>
struct Layout {
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kRopeStages = kGroups <= 8 ? 2 : 1;
  static constexpr int kQueryChunk = kRows * 128;
  // 9 chunks of [rows][64 columns].  After the last scores: sums of a consumer's four warps, fp32
  // [4][rows], and then the finished output.
  static constexpr int kQuery = 0;
  static constexpr int kLatent = kQuery + 9 * kQueryChunk;
  static constexpr int kRope = kLatent + kStages * kTile;
  static constexpr int kProbability = kRope + kRopeStages * kChunk;  // [rows][64 positions]
  static constexpr int kFactors =
      kProbability + kRows * 128;  // fp32 [rows]: rescale factors, at the end 1 / sum
  static constexpr int kPeaks = kFactors + kRows * 4;  // int32 [rows]: running maxima, as Ordered()
  static constexpr int kRowIndex =
      kPeaks + kRows * 4;  // int32 [rows]: row of query and output, −1: none
  static constexpr int kBarriers = kRowIndex + kRows * 4;  // 8 mbarriers
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

// Integers in the order of the floats; its own inverse.
__device__ __forceinline__ int Ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Raises peaks[0 … kColumns / 2 · 8) of shared memory to this warp's maxima.  A lane holds kColumns
// values: of group g's 8 rows the two at 2 · (lane % 4), for its own positions; lanes alike in lane
// % 4 hold the same rows.  They halve the rows among each other at every step, so that all of it
// takes about kColumns exchanges instead of three times as many.
template <int kColumns>
__device__ __forceinline__ void RaisePeaks(const float (&values)[kColumns], int lane, int* peaks) {
  constexpr int kHalf = (kColumns + 1) / 2, kQuarter = (kHalf + 1) / 2,
                kEighth = (kQuarter + 1) / 2;
  auto at = [](const auto& array, int i, int size) { return i < size ? array[i] : -INFINITY; };
  auto exchange = [&](float low, float high, bool upper, int lanes) {
    const float received = __shfl_xor_sync(~0u, upper ? low : high, lanes);
    return fmaxf(upper ? high : low, received);
  };
  const bool upper[3] = {(lane & 16) != 0, (lane & 8) != 0, (lane & 4) != 0};
  float half[kHalf], quarter[kQuarter], eighth[kEighth];
#pragma unroll
  for (int i = 0; i < kHalf; ++i)
    half[i] = exchange(values[i], at(values, i + kHalf, kColumns), upper[0], 16);
#pragma unroll
  for (int i = 0; i < kQuarter; ++i)
    quarter[i] = exchange(half[i], at(half, i + kQuarter, kHalf), upper[1], 8);
#pragma unroll
  for (int i = 0; i < kEighth; ++i)
    eighth[i] = exchange(quarter[i], at(quarter, i + kEighth, kQuarter), upper[2], 4);
  const int first = upper[0] * kHalf + upper[1] * kQuarter + upper[2] * kEighth;
#pragma unroll
  for (int i = 0; i < kEighth; ++i) {
    const int c = min(first + i, kColumns - 1);  // past the end: -inf, which raises nothing
    atomicMax(&peaks[c / 2 * 8 + lane % 4 * 2 + c % 2], Ordered(__float_as_int(eighth[i])));
  }
}

// This block's fragments.  Usually every block has one, and block i's is fragment i: it is read
// along with its bounds, since each read that waits for another costs a kernel on a short context a
// tenth of its time.
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

// ---- producers
// ---------------------------------------------------------------------------------------------------------
// Four warps fetch each tile together; lane l of a warp copies 16-byte piece l % 8 of rows l / 8, l
// / 8 + 4, … of the warp's 16.
template <int kGroups>
__device__ void Produce(const AttentionArguments& arguments, uint32_t shared, Barriers barriers) {
  using L = Layout<kGroups>;
  constexpr int kRowsPerLane = 4;
  const int lane = threadIdx.x % 32;
  const int first_row = (threadIdx.x - kConsumers) / 32 * 16 + lane / 8;
  const int piece = lane % 8;
  // Row r's piece p lies at p ^ (r & 7), and r & 7 of this lane's rows alternates between two
  // values.
  const uint32_t even = first_row * 128 + ((piece ^ (first_row & 7)) * 16);
  const uint32_t odd = (first_row + 4) * 128 + ((piece ^ ((first_row + 4) & 7)) * 16);
  const auto& tensors = arguments.tensors;
  const int page_shift = arguments.page_shift;
  const int page_mask = (1 << page_shift) - 1;
  const char* cache = static_cast<const char*>(tensors.cache) + piece * 16;

  int tile = 0;  // of the block, over all its fragments
  Work work(arguments.workspace);
  for (Fragment fragment; work.Take(arguments.workspace, fragment);) {
    const int32_t* table = tensors.page_table + fragment.request * tensors.table_stride;
    // Pages of this lane's rows, looked up one tile ahead, so that the copies never wait for the
    // table.
    int32_t next[kRowsPerLane];
    auto look_up = [&](int position) {
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        next[r] = position + r * 4 < fragment.end ? table[(position + r * 4) >> page_shift] : -1;
      }
    };
    look_up(fragment.begin + first_row);
    for (int begin = fragment.begin; begin < fragment.end; begin += kStep, ++tile) {
      const int position = begin + first_row;
      const char* row[kRowsPerLane];
      int bytes[kRowsPerLane];  // 0: past the end, filled with zeros
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        bytes[r] = next[r] < 0 ? 0 : 16;
        row[r] = cache + (next[r] < 0 ? 0
                                      : next[r] * tensors.page_stride +
                                            ((position + r * 4) & page_mask) * kRowBytes);
      }
      look_up(position + kStep);

      const int stage = tile & 1;
      const uint32_t latent = shared + L::kLatent + stage * kTile;
      hopper::BarrierWait(barriers.LatentEmpty(stage), ((tile >> 1) & 1) ^ 1);
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
#pragma unroll
        for (int c = 0; c < kLatentChunks; ++c) {
          hopper::CopyAsync16(latent + (r & 1 ? odd : even) + (r & 2) * 512 + c * kChunk,
                              row[r] + c * 128, bytes[r]);
        }
      }
      hopper::CopyAsyncArrive(barriers.LatentFull(stage));
      const int rope_stage = tile % L::kRopeStages;
      const uint32_t rope = shared + L::kRope + rope_stage * kChunk;
      hopper::BarrierWait(barriers.RopeEmpty(rope_stage), ((tile / L::kRopeStages) & 1) ^ 1);
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        hopper::CopyAsync16(rope + (r & 1 ? odd : even) + (r & 2) * 512,
                            row[r] + kLatentChunks * 128, bytes[r]);
      }
      hopper::CopyAsyncArrive(barriers.RopeFull(rope_stage));
    }
  }
}

// ---- consumers
// ---------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void ConsumersMeet() { hopper::NamedBarrier<1, kConsumers>(); }

// Consumer kWhich: it scores kOwn of the tile's groups from kFirst on, and accumulates value
// columns 256 · kWhich … of all.
template <int kGroups, int kWhich>
__device__ void Consume(const AttentionArguments& arguments, uint32_t shared, char* shared_pointer,
                        Barriers barriers) {
  using L = Layout<kGroups>;
  // Few groups are scored by the first consumer alone: the tile is then read once, not twice, for
  // it.
  constexpr int kSplit = kGroups <= kUnsplitGroups ? kGroups : (kGroups + 1) / 2;
  constexpr int kFirst = kWhich == 0 ? 0 : kSplit;
  constexpr int kOwn = kWhich == 0 ? kSplit : kGroups - kSplit;
  constexpr int kScores = kOwn > 0 ? kOwn : 1;
  const auto& tensors = arguments.tensors;
  const auto& shape = arguments.shape;
  const int thread = threadIdx.x;
  const int warp = (thread / 32) % 4;
  const int lane = thread % 32;
  const int column =
      (lane % 4) * 2;  // of each group's 8 rows, the two this thread's fragments hold
  const int groups_per_node = GroupsPerNode(shape.heads);
  float* factors = reinterpret_cast<float*>(shared_pointer + L::kFactors);
  float* reduction = reinterpret_cast<float*>(shared_pointer + L::kQuery);
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
#pragma unroll
    for (int pass = 0; pass < (L::kRows + 31) / 32; ++pass) {
      const int row = pass * 32 + thread / 8;
      if (row >= L::kRows) break;
      const int source = row_index[row];
      const int bytes = source < 0 ? 0 : 16;
      const char* from = static_cast<const char*>(tensors.query) +
                         (source < 0 ? 0 : source * kRowBytes + thread % 8 * 16);
      const uint32_t to = shared + L::kQuery + row * 128 + ((thread % 8) ^ (row & 7)) * 16;
#pragma unroll
      for (int c = 0; c < 9; ++c)
        hopper::CopyAsync16(to + c * L::kQueryChunk, from + c * 128, bytes);
    }
    hopper::CopyAsyncCommit();
    float output[4][kGroups * 4];  // written first by the first tile's products
    float reference[kScores * 2], sum[kScores * 2];
#pragma unroll
    for (int c = 0; c < kScores * 2; ++c) {
      reference[c] = kUnseen;
      sum[c] = 0.0f;
    }
    // Scores of a tile's 64 positions: fragment r of group g is position 16·warp + lane/4 +
    // 8·(r/2), row column + r%2.
    float score[kScores * 4];
    auto queue_scores = [&](int of_tile) {
      const int rope_stage = of_tile % L::kRopeStages;
      uint64_t keys = hopper::Descriptor(shared + L::kLatent + (of_tile & 1) * kTile);
      uint64_t queries = hopper::Descriptor(shared + L::kQuery + kFirst * kGroupRows * 128);
      int add = 0;
      auto chunk = [&] {
        if constexpr (kOwn > 0) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            hopper::Product<kScores * 8, Major::kK>(score, keys + (k * 32 >> 4),
                                                    queries + (k * 32 >> 4), add);
            add = 1;
          }
        }
      };
      hopper::BarrierWait(barriers.LatentFull(of_tile & 1), (of_tile >> 1) & 1);
      hopper::FenceAsyncProxy();
      hopper::ProductsFence();
#pragma unroll 1
      for (int c = 0; c < kLatentChunks; ++c) {
        chunk();
        keys += kChunk >> 4;
        queries += L::kQueryChunk >> 4;
      }
      hopper::BarrierWait(barriers.RopeFull(rope_stage), (of_tile / L::kRopeStages) & 1);
      hopper::FenceAsyncProxy();
      keys = hopper::Descriptor(shared + L::kRope + rope_stage * kChunk);
      chunk();
      hopper::ProductsCommit();
    };
    auto finish_scores = [&](int of_tile) {
      hopper::ProductsWait<0>();
      hopper::ProductsRead(score);
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
                  ? tensors.ancestor_words[fragment.request * shape.nodes +
                                           (fragment.first_group + group) / groups_per_node]
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
#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          score[g * 4 + c] *= arguments.scale_log2;
          score[g * 4 + 2 + c] *= arguments.scale_log2;
          most[g * 2 + c] = fmaxf(score[g * 4 + c], score[g * 4 + 2 + c]);
        }
      }
      if constexpr (kOwn > 0) RaisePeaks<kOwn * 2>(most, lane, peaks + kFirst * 8);
      // Past this barrier all products with the previous tile are done: its probabilities' room may
      // be written.
      ConsumersMeet();
      bool grows = false;
#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
        const int row = (kFirst + g) * 8 + column;
        const int2 peak = *reinterpret_cast<const int2*>(&peaks[row]);
        const float2 renewed =
            make_float2(__int_as_float(Ordered(peak.x)), __int_as_float(Ordered(peak.y)));
        const float2 factor =
            make_float2(Exp2(reference[g * 2] - renewed.x), Exp2(reference[g * 2 + 1] - renewed.y));
        sum[g * 2] *= factor.x;
        sum[g * 2 + 1] *= factor.y;
        grows = grows || reference[g * 2] != renewed.x || reference[g * 2 + 1] != renewed.y;
        reference[g * 2] = renewed.x;
        reference[g * 2 + 1] = renewed.y;
        if (warp == 0 && lane < 4) *reinterpret_cast<float2*>(&factors[row]) = factor;
      }
      // Probabilities as [row][64 positions]: the 8 x 8 fragments are stored transposed.
      uint32_t packed[kScores * 2];
#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float low = Exp2(score[g * 4 + r * 2] - reference[g * 2]);
          const float high = Exp2(score[g * 4 + r * 2 + 1] - reference[g * 2 + 1]);
          sum[g * 2] += low;
          sum[g * 2 + 1] += high;
          packed[g * 2 + r] = PackBf16(low, high);
        }
      }
#pragma unroll
      for (int g = 0; g < kOwn; g += 2) {
        const int row = (kFirst + g + (lane / 16)) * 8 + lane % 8;
        const int piece = warp * 2 + (lane / 8) % 2;
        const uint32_t address = probability + row * 128 + ((piece ^ (row & 7)) * 16);
        if (g + 1 < kOwn) {
          hopper::StoreTransposed4(address, packed[g * 2], packed[g * 2 + 1], packed[g * 2 + 2],
                                   packed[g * 2 + 3]);
        } else {
          hopper::StoreTransposed2(address, packed[g * 2], packed[g * 2 + 1]);
        }
      }
      hopper::FenceAsyncProxy();
      const bool renew = hopper::NamedBarrierAny<1, kConsumers>(grows);

      if (renew && tile > first_tile) {
        float2 factor[kGroups];
        uint32_t grown = 0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          factor[g] = *reinterpret_cast<const float2*>(&factors[g * 8 + column]);
          if (factor[g].x != 1.0f || factor[g].y != 1.0f) grown |= 1u << g;
        }
        grown = __reduce_or_sync(~0u, grown);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (!((grown >> g) & 1)) continue;
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            output[m][g * 4] *= factor[g].x;
            output[m][g * 4 + 1] *= factor[g].y;
            output[m][g * 4 + 2] *= factor[g].x;
            output[m][g * 4 + 3] *= factor[g].y;
          }
        }
      }
      uint64_t values =
          hopper::Descriptor(shared + L::kLatent + (tile & 1) * kTile + kWhich * 4 * kChunk);
      uint64_t weights = hopper::Descriptor(probability);
      int add = tile > first_tile;
      hopper::ProductsFence();
#pragma unroll 1
      for (int k = 0; k < kStep / 16; ++k, add = 1) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          hopper::Product<L::kRows, Major::kMN>(output[m], values + (m * kChunk >> 4), weights,
                                                add);
        }
        values += 2048 >> 4;
        weights += 32 >> 4;
      }
      hopper::ProductsCommit();
      if (first + kStep < fragment.end) {
        queue_scores(tile + 1);
        hopper::ProductsWait<(kOwn > 0 ? 1 : 0)>();
#pragma unroll
        for (int m = 0; m < 4; ++m) hopper::ProductsRead(output[m]);
        if (lane == 0) hopper::BarrierArrive(barriers.LatentEmpty(tile & 1));
        finish_scores(tile + 1);
      } else {
        // While the last products run: sums over the positions that other lanes and warps hold.
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
#pragma unroll
          for (int c = 0; c < kOwn * 2; ++c) sum[c] += __shfl_xor_sync(~0u, sum[c], lanes);
        }
        if (lane < 4) {
#pragma unroll
          for (int g = 0; g < kOwn; ++g) {
            *reinterpret_cast<float2*>(&reduction[warp * L::kRows + (kFirst + g) * 8 + column]) =
                make_float2(sum[g * 2], sum[g * 2 + 1]);
          }
        }
        hopper::ProductsWait<0>();
#pragma unroll
        for (int m = 0; m < 4; ++m) hopper::ProductsRead(output[m]);
        if (lane == 0) hopper::BarrierArrive(barriers.LatentEmpty(tile & 1));
      }
    }

    // The rows' scale and log-sum-exp.
    ConsumersMeet();
    const bool partial = fragment.slot >= 0;
    const int64_t partial_row = static_cast<int64_t>(fragment.slot) * L::kRows;
    if (thread < L::kRows) {
      const float total = (reduction[thread] + reduction[L::kRows + thread]) +
                          (reduction[2 * L::kRows + thread] + reduction[3 * L::kRows + thread]);
      const float peak = __int_as_float(Ordered(peaks[thread]));
      const float lse = total > 0.0f ? peak + __log2f(total) : -INFINITY;
      factors[thread] = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
      if (partial) {
        arguments.workspace.partial_lse[partial_row + thread] = lse;
      } else if (tensors.lse != nullptr && row_index[thread] >= 0) {
        tensors.lse[row_index[thread]] = lse * 0.69314718055994531f;
      }
    }
    ConsumersMeet();

    // Output rows of 1,024 bytes, staged where the queries were, each 16 bytes further than 1,024
    // for the banks' sake.
    auto stage = [&](auto pack) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g >= fragment.groups) break;
        const float2 factor = *reinterpret_cast<const float2*>(&factors[g * 8 + column]);
        const uint32_t to = shared + L::kQuery + (g * 8 + lane % 8) * kStagedRow + kWhich * 512 +
                            lane / 16 * 128 + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
        for (int m = 0; m < 4; m += 2) {
          uint32_t packed[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float* pair = &output[m + r / 2][g * 4 + (r % 2) * 2];
            packed[r] = pack(pair[0] * factor.x, pair[1] * factor.y);
          }
          hopper::StoreTransposed4(to + m * 128, packed[0], packed[1], packed[2], packed[3]);
        }
      }
    };
    if (partial) {
      stage([](float low, float high) { return PackHalf(low, high); });
    } else {
      stage([](float low, float high) { return PackBf16(low, high); });
    }
    ConsumersMeet();
    char* const to =
        partial ? reinterpret_cast<char*>(arguments.workspace.partial_output) + partial_row * 1024
                : static_cast<char*>(tensors.output);
#pragma unroll 1
    for (int row = thread / 64; row < fragment.groups * kGroupRows; row += kConsumers / 64) {
      const int64_t at = partial ? row : row_index[row];
      if (at >= 0) {
        *reinterpret_cast<uint4*>(to + at * 1024 + thread % 64 * 16) =
            *reinterpret_cast<const uint4*>(shared_pointer + L::kQuery + row * kStagedRow +
                                            thread % 64 * 16);
      }
    }
    ConsumersMeet();  // the room is the next fragment's queries'
  }
}

template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1)
    VerifyHopper(const __grid_constant__ AttentionArguments arguments) {
  using L = Layout<kGroups>;
  extern __shared__ __align__(1024) char shared_pointer[];
  const uint32_t shared = hopper::SharedAddress(shared_pointer);
  const Barriers barriers{shared + L::kBarriers};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::BarrierInit(barriers.LatentFull(stage), kThreads - kConsumers);
      hopper::BarrierInit(barriers.LatentEmpty(stage), kConsumers / 32);
      hopper::BarrierInit(barriers.RopeFull(stage), kThreads - kConsumers);
      hopper::BarrierInit(barriers.RopeEmpty(stage), kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // The registers are those of the launch, 3 x 168 per thread of each warpgroup, dealt out anew.
  constexpr int kFirstConsumer = kGroups == kMaxGroups ? 232 : 224;
  if (threadIdx.x >= kConsumers) {
    hopper::RegistersLower<56>();
    Produce<kGroups>(arguments, shared, barriers);
  } else if (threadIdx.x < kConsumers / 2) {
    hopper::RegistersRaise<kFirstConsumer>();
    Consume<kGroups, 0>(arguments, shared, shared_pointer, barriers);
  } else {
    hopper::RegistersRaise<448 - kFirstConsumer>();
    Consume<kGroups, 1>(arguments, shared, shared_pointer, barriers);
  }
}

using Kernel = void (*)(AttentionArguments);

template <int... kGroups>
constexpr auto Kernels(std::integer_sequence<int, kGroups...>) {
  struct Entry {
    Kernel kernel;
    int bytes;
  };
  return std::array<Entry, sizeof...(kGroups)>{
      Entry{VerifyHopper<kGroups + 1>, Layout<kGroups + 1>::kBytes}...};
}
constexpr auto kKernels =
    Kernels(std::make_integer_sequence<int, kMaxGroups>{});  // [groups per tile − 1]

}  // namespace

Instance HopperInstance(const coppice_mla_shape& shape) {
  return {.tile_groups = EvenTile(shape.nodes * GroupsPerNode(shape.heads), kMaxGroups),
          .step_tokens = kStep,
          .blocks_per_sm = 1,
          .narrowest_groups = 4};
}

bool HopperRuns(const coppice_mla_shape& shape) { return shape.cache_type == COPPICE_MLA_BF16; }

cudaError_t PrepareHopper() {
  for (const auto& entry : kKernels) {
    const cudaError_t error = cudaFuncSetAttribute(
        entry.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, entry.bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchHopper(const AttentionArguments& arguments, cudaStream_t stream) {
  const auto& entry = kKernels[arguments.instance.tile_groups - 1];
  return LaunchDependent(entry.kernel, arguments.blocks, kThreads, entry.bytes, stream, arguments);
}

}  // namespace coppice::mla
