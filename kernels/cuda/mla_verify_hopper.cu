// The verify attention for Hopper (sm_90a): warpgroup products straight from the paged tile in shared memory.
//
// One thread block per multiprocessor works off its fragments in steps of 64 positions.  Rows (8 per group: one node's
// heads) are the N side of both products, so that any number of groups up to 9 costs what it needs and no row is padding:
//
//   scores  S^T[64 x rows]  = K[64 x 576] · Q^T        A: the tile as stored        B: the queries
//   output  O^T[512 x rows] += V^T[512 x 64] · P^T     A: the same tile, transposed by the operand's descriptor
//
// Two warpgroups ("consumers") each own half of the groups from the queries to the output and never wait for each other,
// so that one's softmax runs under the other's products; within a warpgroup the next tile's scores are queued behind this
// tile's outputs.  A third ("producers", two warps per stage) fetches the tiles.
//
// The reference subtracted in the exponent is an old maximum, renewed only when some score exceeds it by more than
// 2^8: softmax does not depend on it, and fp32 sums do not lose precision by a factor of 256.  In the usual step no
// maximum is searched and nothing is rescaled.
#include <cuda_bf16.h>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mla_verify_internal.cuh"

namespace coppice::mla {
namespace {

using hopper::Major;

constexpr int kStep = 64;                    // positions per tile
constexpr int kChunk = kStep * 128;          // bytes of 64 positions x 64 columns
constexpr int kLatentChunks = 8;             // 512 columns
constexpr int kLatentStage = kLatentChunks * kChunk;
constexpr int kStages = 2;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;
constexpr int kMaxGroups = 9;
constexpr int64_t kRowBytes = COPPICE_MLA_ROW * 2;
constexpr float kUnseen = -1e30f;            // reference of a row that has seen nothing yet
constexpr float kReferenceSlack = 8.0f;      // log2

// Shared memory of a block, in bytes from a base aligned to 1,024.  Each consumer has its own queries (9 chunks of
// [its rows][64 columns], over which it stages its finished output) and probabilities ([its rows][64 positions]).
template <int kGroups>
struct Layout {
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kFirst = (kGroups + 1) / 2;  // groups of the first consumer; the second has the rest, if any
  static constexpr int kRopeStages = kGroups <= 8 ? 2 : 1;
  static constexpr int kQuery = 0;
  static constexpr int kLatent = kQuery + kRows * static_cast<int>(kRowBytes);
  static constexpr int kRope = kLatent + kStages * kLatentStage;
  static constexpr int kProbability = kRope + kRopeStages * kChunk;
  static constexpr int kBarriers = kProbability + kRows * 128;  // 8 mbarriers
  static constexpr int kFactors = kBarriers + 64;               // fp32 [rows]: rescale factors, at the end 1 / sum
  static constexpr int kRowIndex = kFactors + kRows * 4;        // int32 [rows]: row of query and output, −1: none
  static constexpr int kBytes = kRowIndex + kRows * 4;
};
static_assert(Layout<kMaxGroups>::kBytes <= 232448, "a block has 227 KiB");

template <int kGroups>
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
__device__ void Produce(const AttentionArguments& arguments, uint32_t shared, Barriers<kGroups> barriers) {
  using L = Layout<kGroups>;
  constexpr int kRowsPerLane = 8;
  const int warp = threadIdx.x / 32 - kConsumers / 32;
  const int stage = warp / 2;
  const int lane = threadIdx.x % 32;
  const int first_row = (warp % 2) * 32 + lane / 8;
  const int piece = lane % 8;
  const uint32_t latent = shared + L::kLatent + stage * kLatentStage + first_row * 128;
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
constexpr int kConsumerThreads = 128;

// A consumer: kOwn groups of the tile from `first_own` on.  `kId` numbers its named barrier.
template <int kGroups, int kOwn, int kId>
__device__ void Consume(const AttentionArguments& arguments, uint32_t shared, char* shared_pointer,
                        Barriers<kGroups> barriers, int first_own) {
  using L = Layout<kGroups>;
  constexpr int kRows = kOwn * kGroupRows;
  constexpr int kQueryChunk = kRows * 128;
  const auto& tensors = arguments.tensors;
  const auto& shape = arguments.shape;
  const int thread = threadIdx.x % kConsumerThreads;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int column = (lane % 4) * 2;  // of each group's 8 rows, the two this thread's fragments hold
  const int groups_per_node = GroupsPerNode(shape.heads);
  const int query_offset = L::kQuery + first_own * kGroupRows * static_cast<int>(kRowBytes);
  const int probability_offset = L::kProbability + first_own * kGroupRows * 128;
  const uint32_t query = shared + query_offset;
  const uint32_t probability = shared + probability_offset;
  float* factors = reinterpret_cast<float*>(shared_pointer + L::kFactors) + first_own * kGroupRows;
  int* row_index = reinterpret_cast<int*>(shared_pointer + L::kRowIndex) + first_own * kGroupRows;
  // Reductions over the four warps use the probabilities' room, which is free at those moments: fp32 [4][rows].
  float* reduction = reinterpret_cast<float*>(shared_pointer + probability_offset);

  int tile = 0;
  Work work(arguments.workspace);
  for (Fragment fragment; work.Take(arguments.workspace, fragment);) {
    if (thread < kRows) {
      const int own = first_own + thread / kGroupRows;
      const int group = fragment.first_group + own;
      const int node = group / groups_per_node;
      const int head = (group - node * groups_per_node) * kGroupRows + thread % kGroupRows;
      row_index[thread] = own < fragment.groups && head < shape.heads
                              ? (fragment.request * shape.nodes + node) * shape.heads + head
                              : -1;
    }
    hopper::NamedBarrier<kId, kConsumerThreads>();
    // Queries, swizzled by chunks of 64 columns; rows that are no head of a live node are zeros.
#pragma unroll 4
    for (int i = thread; i < kRows * 72; i += kConsumerThreads) {
      const int row = i / 72, piece = i % 72;
      const int source = row_index[row];
      hopper::CopyAsync16(query + (piece / 8) * kQueryChunk + row * 128 + (((piece % 8) ^ (row & 7)) * 16),
                          static_cast<const char*>(tensors.query) + (source < 0 ? 0 : source * kRowBytes + piece * 16),
                          source < 0 ? 0 : 16);
    }
    hopper::CopyAsyncCommit();
    float output[8][kOwn * 4];  // value columns 64 m … of the own rows; written first by the first tile's products
    float reference[kOwn * 2], sum[kOwn * 2];
#pragma unroll
    for (int c = 0; c < kOwn * 2; ++c) {
      reference[c] = kUnseen;
      sum[c] = 0.0f;
    }
    // Scores of a tile's 64 positions: fragment r of group g is position 16·warp + lane/4 + 8·(r/2), row column + r%2.
    float score[kOwn * 4];
    auto queue_scores = [&](int of_tile) {
      const uint32_t latent = shared + L::kLatent + (of_tile & 1) * kLatentStage;
      const int rope_stage = of_tile % L::kRopeStages;
      hopper::BarrierWait(barriers.LatentFull(of_tile & 1), (of_tile >> 1) & 1);
      hopper::ProductsFence();
#pragma unroll
      for (int c = 0; c < kLatentChunks; ++c) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          hopper::Product<kRows, Major::kK>(score, hopper::Descriptor(latent + c * kChunk + k * 32),
                                            hopper::Descriptor(query + c * kQueryChunk + k * 32), c + k > 0);
        }
      }
      hopper::BarrierWait(barriers.RopeFull(rope_stage), (of_tile / L::kRopeStages) & 1);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        hopper::Product<kRows, Major::kK>(score, hopper::Descriptor(shared + L::kRope + rope_stage * kChunk + k * 32),
                                          hopper::Descriptor(query + 8 * kQueryChunk + k * 32), 1);
      }
      hopper::ProductsCommit();
    };
    hopper::CopyAsyncWait<0>();
    hopper::FenceAsyncProxy();
    hopper::NamedBarrier<kId, kConsumerThreads>();

    const int tiles = (fragment.end - fragment.begin + kStep - 1) / kStep;
    auto finish_scores = [&](int of_tile) {
      hopper::ProductsWait<0>();
      if (lane == 0) hopper::BarrierArrive(barriers.RopeEmpty(of_tile % L::kRopeStages));
    };
    queue_scores(tile);
    finish_scores(tile);
    for (int i = 0; i < tiles; ++i, ++tile) {
      // Visibility: only the last tiles hold tree positions or end early.
      const int first = fragment.begin + i * kStep;
      if (first + kStep > fragment.context) {
#pragma unroll
        for (int g = 0; g < kOwn; ++g) {
          const int group = first_own + g;
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

      float excess = -INFINITY;
#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          score[g * 4 + r] *= arguments.scale_log2;
          excess = fmaxf(excess, score[g * 4 + r] - reference[g * 2 + r % 2]);
        }
      }
      // Past this barrier all warps' products with the previous probabilities are done: their room may be written.
      if (hopper::NamedBarrierAny<kId, kConsumerThreads>(excess > kReferenceSlack)) {
#pragma unroll
        for (int c = 0; c < kOwn * 2; ++c) {
          float most = fmaxf(score[(c / 2) * 4 + c % 2], score[(c / 2) * 4 + 2 + c % 2]);
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
          if (lane < 4) reduction[warp * kRows + (c / 2) * 8 + column + c % 2] = most;
        }
        hopper::NamedBarrier<kId, kConsumerThreads>();
#pragma unroll
        for (int c = 0; c < kOwn * 2; ++c) {
          const int row = (c / 2) * 8 + column + c % 2;
          const float most = fmaxf(fmaxf(reduction[row], reduction[kRows + row]),
                                   fmaxf(reduction[2 * kRows + row], reduction[3 * kRows + row]));
          const float renewed = fmaxf(reference[c], most);
          const float factor = Exp2(reference[c] - renewed);
          sum[c] *= factor;
          reference[c] = renewed;
          if (i > 0) {
#pragma unroll
            for (int m = 0; m < 8; ++m) {
              output[m][(c / 2) * 4 + c % 2] *= factor;
              output[m][(c / 2) * 4 + 2 + c % 2] *= factor;
            }
          }
        }
        hopper::NamedBarrier<kId, kConsumerThreads>();  // the reduction's room becomes the probabilities' again
      }

#pragma unroll
      for (int g = 0; g < kOwn; ++g) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          score[g * 4 + r] = Exp2(score[g * 4 + r] - reference[g * 2 + r % 2]);
          sum[g * 2 + r % 2] += score[g * 4 + r];
        }
      }
      // Probabilities as [row][64 positions]: the 8 x 8 fragments are stored transposed.
#pragma unroll
      for (int g = 0; g < kOwn; g += 2) {
        const int row = (g + (lane / 16)) * 8 + lane % 8;
        const int piece = warp * 2 + (lane / 8) % 2;
        const uint32_t address = probability + row * 128 + ((piece ^ (row & 7)) * 16);
        const uint32_t a = PackBf16(score[g * 4], score[g * 4 + 1]);
        const uint32_t b = PackBf16(score[g * 4 + 2], score[g * 4 + 3]);
        if (g + 1 < kOwn) {
          hopper::StoreTransposed4(address, a, b, PackBf16(score[g * 4 + 4], score[g * 4 + 5]),
                                   PackBf16(score[g * 4 + 6], score[g * 4 + 7]));
        } else {
          hopper::StoreTransposed2(address, a, b);
        }
      }
      hopper::FenceAsyncProxy();
      hopper::NamedBarrier<kId, kConsumerThreads>();

      const uint32_t latent = shared + L::kLatent + (tile & 1) * kLatentStage;
      hopper::ProductsFence();
#pragma unroll
      for (int m = 0; m < 8; ++m) {
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) {
          hopper::Product<kRows, Major::kMN>(output[m], hopper::Descriptor(latent + m * kChunk + k * 2048),
                                             hopper::Descriptor(probability + k * 32), i + k > 0);
        }
      }
      hopper::ProductsCommit();
      if (i + 1 < tiles) {
        queue_scores(tile + 1);
        hopper::ProductsWait<1>();
        if (lane == 0) hopper::BarrierArrive(barriers.LatentEmpty(tile & 1));
        finish_scores(tile + 1);
      } else {
        hopper::ProductsWait<0>();
        if (lane == 0) hopper::BarrierArrive(barriers.LatentEmpty(tile & 1));
      }
    }

    // Sums over the positions that other lanes and warps hold, then the rows' scale and log-sum-exp.
    hopper::NamedBarrier<kId, kConsumerThreads>();
#pragma unroll
    for (int c = 0; c < kOwn * 2; ++c) {
      float total = sum[c];
      total += __shfl_xor_sync(~0u, total, 4);
      total += __shfl_xor_sync(~0u, total, 8);
      total += __shfl_xor_sync(~0u, total, 16);
      if (lane < 4) {
        reduction[warp * kRows + (c / 2) * 8 + column + c % 2] = total;
        if (warp == 0) factors[(c / 2) * 8 + column + c % 2] = reference[c];
      }
    }
    hopper::NamedBarrier<kId, kConsumerThreads>();
    const bool partial = fragment.slot >= 0;
    const int64_t partial_row = static_cast<int64_t>(fragment.slot) * L::kRows + first_own * kGroupRows;
    if (thread < kRows) {
      const float total = (reduction[thread] + reduction[kRows + thread]) +
                          (reduction[2 * kRows + thread] + reduction[3 * kRows + thread]);
      const float lse = total > 0.0f ? factors[thread] + log2f(total) : -INFINITY;
      factors[thread] = total > 0.0f ? 1.0f / total : 0.0f;
      if (partial) {
        arguments.workspace.partial_lse[partial_row + thread] = lse;
      } else if (tensors.lse != nullptr && row_index[thread] >= 0) {
        tensors.lse[row_index[thread]] = lse * 0.69314718055994531f;
      }
    }
    hopper::NamedBarrier<kId, kConsumerThreads>();

    // Output rows of 1,024 bytes, staged where the queries were.
#pragma unroll
    for (int g = 0; g < kOwn; ++g) {
      const float even = factors[g * 8 + column], odd = factors[g * 8 + column + 1];
      const int row = g * 8 + lane % 8;
#pragma unroll
      for (int m = 0; m < 8; m += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float low = output[m + r / 2][g * 4 + (r % 2) * 2] * even;
          const float high = output[m + r / 2][g * 4 + (r % 2) * 2 + 1] * odd;
          packed[r] = partial ? PackHalf(low, high) : PackBf16(low, high);
        }
        const int piece = (m + lane / 16) * 8 + warp * 2 + (lane / 8) % 2;
        hopper::StoreTransposed4(query + row * 1024 + ((piece ^ (row & 7)) * 16), packed[0], packed[1], packed[2], packed[3]);
      }
    }
    hopper::NamedBarrier<kId, kConsumerThreads>();
    const int piece = thread % 64;
#pragma unroll 4
    for (int row = thread / 64; row < kRows; row += 2) {
      if (row_index[row] < 0) continue;
      const uint4 value = *reinterpret_cast<const uint4*>(shared_pointer + query_offset + row * 1024 + ((piece ^ (row & 7)) * 16));
      char* to = partial ? reinterpret_cast<char*>(arguments.workspace.partial_output) + (partial_row + row) * 1024
                         : static_cast<char*>(tensors.output) + row_index[row] * int64_t{1024};
      *reinterpret_cast<uint4*>(to + piece * 16) = value;
    }
    hopper::NamedBarrier<kId, kConsumerThreads>();  // the room is the next fragment's queries'
  }
}

template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1) VerifyHopper(const __grid_constant__ AttentionArguments arguments) {
  using L = Layout<kGroups>;
  constexpr int kConsumerWarps = L::kFirst < kGroups ? 8 : 4;
  extern __shared__ __align__(1024) char shared_pointer[];
  const uint32_t shared = hopper::SharedAddress(shared_pointer);
  const Barriers<kGroups> barriers{shared + L::kBarriers};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      hopper::BarrierInit(barriers.LatentFull(s), 64);
      hopper::BarrierInit(barriers.LatentEmpty(s), kConsumerWarps);
      hopper::BarrierInit(barriers.RopeFull(s), 64);
      hopper::BarrierInit(barriers.RopeEmpty(s), kConsumerWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 2) {
    hopper::RegistersLower<56>();
    Produce<kGroups>(arguments, shared, barriers);
  } else if (warpgroup == 0) {
    hopper::RegistersRaise<L::kFirst == 5 ? 240 : 224>();
    Consume<kGroups, L::kFirst, 1>(arguments, shared, shared_pointer, barriers, 0);
  } else {
    hopper::RegistersRaise<L::kFirst == 5 ? 208 : 224>();
    if constexpr (L::kFirst < kGroups) {
      Consume<kGroups, kGroups - L::kFirst, 2>(arguments, shared, shared_pointer, barriers, L::kFirst);
    }
  }
}

template <int kGroups>
cudaError_t Launch(const AttentionArguments& arguments, cudaStream_t stream) {
  constexpr int kBytes = Layout<kGroups>::kBytes;
  static const cudaError_t prepared =
      cudaFuncSetAttribute(VerifyHopper<kGroups>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (prepared != cudaSuccess) return prepared;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(arguments.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, VerifyHopper<kGroups>, arguments);
}

}  // namespace

Instance HopperInstance(const coppice_mla_shape& shape) {
  const int groups = shape.nodes * GroupsPerNode(shape.heads);
  const int tiles = (groups + kMaxGroups - 1) / kMaxGroups;
  return {.tile_groups = (groups + tiles - 1) / tiles, .step_tokens = kStep, .blocks_per_sm = 1};
}

cudaError_t LaunchHopper(const AttentionArguments& arguments, cudaStream_t stream) {
  switch (HopperInstance(arguments.shape).tile_groups) {
    case 1: return Launch<1>(arguments, stream);
    case 2: return Launch<2>(arguments, stream);
    case 3: return Launch<3>(arguments, stream);
    case 4: return Launch<4>(arguments, stream);
    case 5: return Launch<5>(arguments, stream);
    case 6: return Launch<6>(arguments, stream);
    case 7: return Launch<7>(arguments, stream);
    case 8: return Launch<8>(arguments, stream);
    default: return Launch<9>(arguments, stream);
  }
}

}  // namespace coppice::mla
