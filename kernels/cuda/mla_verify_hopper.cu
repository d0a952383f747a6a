// The verify attention for Hopper (sm_90a): warpgroup products straight from the paged tiles in shared memory.
//
// One thread block per multiprocessor works off its fragments in pairs of tiles of 64 positions.  Rows (8 per group: one
// node's heads) are the N side of both products, so that any number of groups up to 8 costs what it needs:
//
//   scores  S^T[64 x rows]  = K[64 x 576] · Q^T        A: the tile as stored                     B: the queries
//   output  O^T[512 x rows] += V^T[512 x 64] · P^T     A: the same tile, transposed by its descriptor
//
// Two warpgroups ("consumers") each score one tile of the pair, for all rows, and accumulate half of the 512 value columns
// over both: no operand is read twice.  A third warpgroup ("producers", two warps per tile) fetches, and gets the room back
// by columns: while the last columns of a pair are being multiplied, the first of the next pair are on their way.  Two
// barriers of the consumers per pair: one after the scores, which also asks whether any has left the reference's range, and
// one after the probabilities are stored.
//
// The reference subtracted in the exponent is an old maximum, renewed only when some score exceeds it by more than
// 2^8: softmax does not depend on it, and fp32 sums do not lose precision by a factor of 256.  In the usual step no
// maximum is searched and nothing is rescaled.
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
constexpr int kQuarters = 4;                 // columns are fetched and given back by quarters: chunks q and q + 4
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;
constexpr int kMaxGroups = 8;
constexpr int64_t kRowBytes = COPPICE_MLA_ROW * 2;
constexpr float kUnseen = -1e30f;            // reference of a row that has seen nothing yet
constexpr float kReferenceSlack = 8.0f;      // log2

// Shared memory of a block, in bytes from a base aligned to 1,024.
template <int kGroups>
struct Layout {
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kQueryChunk = kRows * 128;
  static constexpr int kQuery = 0;  // 9 chunks of [rows][64 columns]; the finished output is staged over it
  static constexpr int kLatent = kQuery + 9 * kQueryChunk;  // two tiles
  // Per tile: the RoPE chunk, and once the scores are made the probabilities, [rows][64 positions].
  static constexpr int kRope = kLatent + 2 * kTile;
  static constexpr int kReduction = kRope + 2 * kChunk;     // fp32 [8 warps][rows]
  static constexpr int kFactors = kReduction + 8 * kRows * 4;  // fp32 [rows]: 1 / sum
  static constexpr int kRowIndex = kFactors + kRows * 4;    // int32 [rows]: row of query and output, −1: none
  static constexpr int kBarriers = kRowIndex + kRows * 4;   // 15 mbarriers
  static constexpr int kBytes = kBarriers + 128;
};
static_assert(Layout<kMaxGroups>::kBytes <= 232448, "a block has 227 KiB");
static_assert(Layout<kMaxGroups>::kRows * 128 <= kChunk, "probabilities fit the RoPE chunk");

// Parts of a tile: quarters 0 … 3, then the RoPE chunk.
constexpr int kParts = kQuarters + 1;
struct Barriers {
  uint32_t base;
  __device__ uint32_t Full(int tile, int part) const { return base + 8 * (tile * kParts + part); }
  __device__ uint32_t Empty(int part) const { return base + 8 * (2 * kParts + part); }  // of both tiles
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
// Two warps per tile of the pair; lane l of a warp copies 16-byte piece l % 8 of rows l / 8, l / 8 + 4, … of the warp's 32.
template <int kGroups>
__device__ void Produce(const AttentionArguments& arguments, uint32_t shared, Barriers barriers) {
  using L = Layout<kGroups>;
  constexpr int kRowsPerLane = 8;
  const int warp = threadIdx.x / 32 - kConsumers / 32;
  const int which = warp / 2;  // tile of the pair
  const int lane = threadIdx.x % 32;
  const int first_row = (warp % 2) * 32 + lane / 8;
  const int piece = lane % 8;
  const uint32_t latent = shared + L::kLatent + which * kTile + first_row * 128;
  const uint32_t rope = shared + L::kRope + which * kChunk + first_row * 128;
  // Row r's piece p lies at p ^ (r & 7), and r & 7 of this lane's rows alternates between two values.
  const uint32_t swizzled[2] = {static_cast<uint32_t>((piece ^ (first_row & 7)) * 16),
                                static_cast<uint32_t>((piece ^ ((first_row + 4) & 7)) * 16)};
  const auto& tensors = arguments.tensors;
  const int page_shift = arguments.page_shift;
  const int page_mask = (1 << page_shift) - 1;
  const char* cache = static_cast<const char*>(tensors.cache) + piece * 16;

  uint32_t empty_parity = 1;  // the first pair finds all room empty
  Work work(arguments.workspace);
  for (Fragment fragment; work.Take(arguments.workspace, fragment);) {
    const int32_t* table = tensors.page_table + fragment.request * tensors.table_stride;
    const int first_position = fragment.begin + which * kStep + first_row;
    // Pages of this lane's rows, looked up one pair ahead, so that the copies never wait for the table.
    int32_t next[kRowsPerLane];
    auto look_up = [&](int position) {
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        next[r] = position + r * 4 < fragment.end ? table[(position + r * 4) >> page_shift] : -1;
      }
    };
    look_up(first_position);
    for (int begin = fragment.begin; begin < fragment.end; begin += 2 * kStep, empty_parity ^= 1) {
      const int position = first_position + begin - fragment.begin;
      const char* row[kRowsPerLane];
      uint32_t live = 0;
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        if (next[r] >= 0) live |= 1u << r;
        row[r] = cache + (next[r] < 0 ? 0 : next[r] * tensors.page_stride + ((position + r * 4) & page_mask) * kRowBytes);
      }
      look_up(position + 2 * kStep);
      const bool exists = begin + which * kStep < fragment.end;
#pragma unroll
      for (int q = 0; q < kQuarters; ++q) {
        hopper::BarrierWait(barriers.Empty(q), empty_parity);
        if (!exists) continue;
#pragma unroll
        for (int r = 0; r < kRowsPerLane; ++r) {
          const int bytes = (live >> r) & 1 ? 16 : 0;
          hopper::CopyAsync16(latent + q * kChunk + r * 512 + swizzled[r & 1], row[r] + q * 128, bytes);
          hopper::CopyAsync16(latent + (q + 4) * kChunk + r * 512 + swizzled[r & 1], row[r] + (q + 4) * 128, bytes);
        }
        hopper::CopyAsyncCommit();
      }
      hopper::BarrierWait(barriers.Empty(kQuarters), empty_parity);
      if (!exists) continue;
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        hopper::CopyAsync16(rope + r * 512 + swizzled[r & 1], row[r] + kLatentChunks * 128, (live >> r) & 1 ? 16 : 0);
      }
      hopper::CopyAsyncCommit();
      auto arrived = [&]<int kPart>() {
        hopper::CopyAsyncWait<kParts - 1 - kPart>();
        hopper::FenceAsyncProxy();
        hopper::BarrierArrive(barriers.Full(which, kPart));
      };
      arrived.template operator()<0>();
      arrived.template operator()<1>();
      arrived.template operator()<2>();
      arrived.template operator()<3>();
      arrived.template operator()<4>();
    }
  }
}

// ---- consumers ---------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void ConsumersMeet() { hopper::NamedBarrier<1, kConsumers>(); }

// Consumer `which`: its tile of the pair, its half of the value columns.
template <int kGroups, int which>
__device__ void Consume(const AttentionArguments& arguments, uint32_t shared, char* shared_pointer, Barriers barriers) {
  using L = Layout<kGroups>;
  const auto& tensors = arguments.tensors;
  const auto& shape = arguments.shape;
  const int thread = threadIdx.x;
  const int warp = thread / 32;  // 0 … 7
  const int lane = thread % 32;
  const int column = (lane % 4) * 2;  // of each group's 8 rows, the two this thread's fragments hold
  const int groups_per_node = GroupsPerNode(shape.heads);
  float* factors = reinterpret_cast<float*>(shared_pointer + L::kFactors);
  float* reduction = reinterpret_cast<float*>(shared_pointer + L::kReduction);
  int* row_index = reinterpret_cast<int*>(shared_pointer + L::kRowIndex);
  const uint32_t latent = shared + L::kLatent + which * kTile;
  const uint32_t rope = shared + L::kRope + which * kChunk;
  // This half's columns of both tiles, and both tiles' probabilities.
  const uint32_t values = shared + L::kLatent + which * 4 * kChunk;
  const uint32_t probabilities = shared + L::kRope;

  uint32_t full_parity = 0;
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
    float output[4][kGroups * 4];  // value columns 256·which + 64 m …, of all rows
    float reference[kGroups * 2], sum[kGroups * 2];
#pragma unroll
    for (int c = 0; c < kGroups * 2; ++c) {
      reference[c] = kUnseen;
      sum[c] = 0.0f;
    }
    hopper::CopyAsyncWait<0>();
    hopper::FenceAsyncProxy();
    ConsumersMeet();

    for (int begin = fragment.begin; begin < fragment.end; begin += 2 * kStep) {
      const int first = begin + which * kStep;
      const bool exists = first < fragment.end;
      const bool both = begin + kStep < fragment.end;

      // Scores of the tile's 64 positions: fragment r of group g is position 16·(warp % 4) + lane/4 + 8·(r/2), row
      // column + r%2.
      float score[kGroups * 4];
      float excess = -INFINITY;
      if (exists) {
        hopper::ProductsFence();
#pragma unroll
        for (int q = 0; q < kQuarters; ++q) {
          hopper::BarrierWait(barriers.Full(which, q), full_parity);
#pragma unroll
          for (int c = q; c < kLatentChunks; c += kQuarters) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              hopper::Product<L::kRows, Major::kK>(
                  score, hopper::Descriptor(latent + c * kChunk + k * 32),
                  hopper::Descriptor(shared + L::kQuery + c * L::kQueryChunk + k * 32), c + k > 0);
            }
          }
        }
        hopper::BarrierWait(barriers.Full(which, kQuarters), full_parity);
        full_parity ^= 1;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          hopper::Product<L::kRows, Major::kK>(score, hopper::Descriptor(rope + k * 32),
                                               hopper::Descriptor(shared + L::kQuery + 8 * L::kQueryChunk + k * 32), 1);
        }
        hopper::ProductsCommit();
        hopper::ProductsWait<0>();

        // Visibility: only the last tiles hold tree positions or end early.
        if (first + kStep > fragment.context) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const uint64_t word =
                g < fragment.groups
                    ? tensors.ancestor_words[fragment.request * shape.nodes + (fragment.first_group + g) / groups_per_node]
                    : 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int position = first + (warp % 4) * 16 + lane / 4 + r * 8;
              const int node = position - fragment.context;
              if (node >= 0 && (position >= fragment.end || !((word >> node) & 1))) {
                score[g * 4 + r * 2] = score[g * 4 + r * 2 + 1] = -INFINITY;
              }
            }
          }
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            score[g * 4 + r] *= arguments.scale_log2;
            excess = fmaxf(excess, score[g * 4 + r] - reference[g * 2 + r % 2]);
          }
        }
      } else {
#pragma unroll
        for (int r = 0; r < kGroups * 4; ++r) score[r] = -INFINITY;
      }

      // Past this barrier all products with the previous pair are done: its probabilities' room may be written.
      const bool renew = hopper::NamedBarrierAny<1, kConsumers>(excess > kReferenceSlack);
      if (renew) {
#pragma unroll
        for (int c = 0; c < kGroups * 2; ++c) {
          float most = fmaxf(score[(c / 2) * 4 + c % 2], score[(c / 2) * 4 + 2 + c % 2]);
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
          if (lane < 4) reduction[warp * L::kRows + (c / 2) * 8 + column + c % 2] = most;
        }
        ConsumersMeet();
#pragma unroll
        for (int c = 0; c < kGroups * 2; ++c) {
          const int row = (c / 2) * 8 + column + c % 2;
          float renewed = reference[c];
#pragma unroll
          for (int w = 0; w < 8; ++w) renewed = fmaxf(renewed, reduction[w * L::kRows + row]);
          const float factor = Exp2(reference[c] - renewed);
          sum[c] *= factor;
          reference[c] = renewed;
          if (begin > fragment.begin) {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              output[m][(c / 2) * 4 + c % 2] *= factor;
              output[m][(c / 2) * 4 + 2 + c % 2] *= factor;
            }
          }
        }
      }

      if (exists) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            score[g * 4 + r] = Exp2(score[g * 4 + r] - reference[g * 2 + r % 2]);
            sum[g * 2 + r % 2] += score[g * 4 + r];
          }
        }
        // Probabilities as [row][64 positions]: the 8 x 8 fragments are stored transposed.
#pragma unroll
        for (int g = 0; g < kGroups; g += 2) {
          const int row = (g + (lane / 16)) * 8 + lane % 8;
          const int piece = (warp % 4) * 2 + (lane / 8) % 2;
          const uint32_t address = rope + row * 128 + ((piece ^ (row & 7)) * 16);
          const uint32_t a = PackBf16(score[g * 4], score[g * 4 + 1]);
          const uint32_t b = PackBf16(score[g * 4 + 2], score[g * 4 + 3]);
          if (g + 1 < kGroups) {
            hopper::StoreTransposed4(address, a, b, PackBf16(score[g * 4 + 4], score[g * 4 + 5]),
                                     PackBf16(score[g * 4 + 6], score[g * 4 + 7]));
          } else {
            hopper::StoreTransposed2(address, a, b);
          }
        }
        hopper::FenceAsyncProxy();
      }
      ConsumersMeet();

      hopper::ProductsFence();
      auto multiply = [&](int tile, int m) {
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) {
          hopper::Product<L::kRows, Major::kMN>(output[m],
                                                hopper::Descriptor(values + tile * kTile + m * kChunk + k * 2048),
                                                hopper::Descriptor(probabilities + tile * kChunk + k * 32),
                                                tile + k > 0 || begin > fragment.begin);
        }
      };
      auto give_back = [&](int part) {
        if (lane == 0) hopper::BarrierArrive(barriers.Empty(part));
      };
      if (both) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          multiply(0, m);
          multiply(1, m);
          hopper::ProductsCommit();
        }
        hopper::ProductsWait<3>();
        give_back(0);
        hopper::ProductsWait<2>();
        give_back(1);
        hopper::ProductsWait<1>();
        give_back(2);
        hopper::ProductsWait<0>();
      } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) multiply(0, m);
        hopper::ProductsCommit();
        hopper::ProductsWait<0>();
        give_back(0);
        give_back(1);
        give_back(2);
      }
      give_back(3);
      give_back(kQuarters);
    }

    // Sums over the positions that other lanes and warps hold, then the rows' scale and log-sum-exp.
#pragma unroll
    for (int c = 0; c < kGroups * 2; ++c) {
      float total = sum[c];
      total += __shfl_xor_sync(~0u, total, 4);
      total += __shfl_xor_sync(~0u, total, 8);
      total += __shfl_xor_sync(~0u, total, 16);
      if (lane < 4) {
        reduction[warp * L::kRows + (c / 2) * 8 + column + c % 2] = total;
        if (warp == 0) factors[(c / 2) * 8 + column + c % 2] = reference[c];
      }
    }
    ConsumersMeet();
    const bool partial = fragment.slot >= 0;
    const int64_t partial_row = static_cast<int64_t>(fragment.slot) * L::kRows;
    if (thread < L::kRows) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) total += reduction[w * L::kRows + thread];
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
        const int piece = (which * 4 + m + lane / 16) * 8 + (warp % 4) * 2 + (lane / 8) % 2;
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
    for (int part = 0; part < kParts; ++part) {
      hopper::BarrierInit(barriers.Full(0, part), 64);
      hopper::BarrierInit(barriers.Full(1, part), 64);
      hopper::BarrierInit(barriers.Empty(part), kConsumers / 32);
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
