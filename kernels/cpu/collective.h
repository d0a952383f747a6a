// Where the threads of one CPU rank group meet.
#ifndef COPPICE_KERNELS_CPU_COLLECTIVE_H_
#define COPPICE_KERNELS_CPU_COLLECTIVE_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "kernels/cpu/scratch.h"
#include "kernels/ops.h"

namespace coppice::kernels::cpu {

// Every rank calls Exchange the same number of times.  Call number e returns what all ranks gave to
// their call e; what those point to may be read until the reader's call e + 1.  So a writer may
// reuse its memory once its own call e + 1 has returned, and two pieces used in turn suffice.  The
// group owns them: a rank that has finished may be destroyed while others still read.
class HostCollective {
 public:
  struct Published {
    const void* data = nullptr;
    const void* more = nullptr;
  };
  using All = std::array<Published, kSegments>;  // [ranks]

  explicit HostCollective(int ranks);

  int ranks() const { return ranks_; }
  // Where the rank puts what it will publish with its next Exchange.
  Scratch<float>& Memory(int rank) { return seats_[rank].memory[seats_[rank].calls % 2]; }
  const All& Exchange(int rank, Published mine);

 private:
  struct alignas(64) Seat {
    uint64_t calls = 0;
    std::array<Scratch<float>, 2> memory;
  };

  void Meet();

  const int ranks_;
  const int spins_;  // polls before sleeping: only where every rank can have a core
  std::array<All, 2> slots_;
  std::array<Seat, kSegments> seats_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_COLLECTIVE_H_
