#include "kernels/cpu/collective.h"

#include <thread>

namespace coppice::kernels::cpu {
namespace {

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

HostCollective::HostCollective(int ranks)
    : ranks_(ranks),
      spins_(static_cast<int>(std::thread::hardware_concurrency()) >= ranks ? 2000 : 0) {}

const HostCollective::All& HostCollective::Exchange(int rank, Published mine) {
  All& slots = slots_[seats_[rank].calls++ % 2];
  slots[rank] = mine;
  Meet();
  return slots;
}

void HostCollective::Meet() {
  if (ranks_ == 1) return;
  // Nobody can finish this generation before this rank arrives, so the value read here is the
  // current one.
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    generation_.notify_all();
    return;
  }
  for (int i = 0; i < spins_; ++i) {
    if (generation_.load(std::memory_order_acquire) != generation) return;
    Pause();
  }
  while (generation_.load(std::memory_order_acquire) == generation) {
    generation_.wait(generation, std::memory_order_acquire);
  }
}

}  // namespace coppice::kernels::cpu
