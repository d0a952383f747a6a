// Where the threads of one CPU rank group meet.
#ifndef COPPICE_KERNELS_CPU_COLLECTIVE_H_
#define COPPICE_KERNELS_CPU_COLLECTIVE_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "kernels/ops.h"

namespace coppice::kernels::cpu {

// Every rank calls Exchange the same number of times.  Call number e returns what all ranks gave to
// their call e; the data that those point to may be read until the reader's call e + 1, so a writer
// may reuse its memory once its own call e + 1 has returned: two buffers used in turn suffice.
class HostCollective {
 public:
  struct Published {
    const void* data = nullptr;
    const void* more = nullptr;
  };
  using All = std::array<Published, kSegments>;  // [ranks]

  explicit HostCollective(int ranks);

  int ranks() const { return ranks_; }
  // `call` is the rank's count of calls so far.
  const All& Exchange(int rank, uint64_t call, Published mine);

 private:
  void Meet();

  const int ranks_;
  const int spins_;  // polls before sleeping: only where every rank can have a core
  std::array<All, 2> slots_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_COLLECTIVE_H_
