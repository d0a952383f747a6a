#include "kernels/cpu/weight_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

namespace coppice::kernels::cpu {
namespace {

constexpr size_t kAlign = 64;

constexpr size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

#ifndef COPPICE_SANITIZED
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSlab = size_t{32} << 20;

class Slab {
 public:
  explicit Slab(size_t bytes) : mapped_(bytes + kHugePage) {
    memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory_);
    begin_ = static_cast<char*>(memory_) + (RoundUp(begin, kHugePage) - begin);
    size_ = bytes;
    madvise(begin_, size_, MADV_HUGEPAGE);  // where that fails the pages are small
  }
  ~Slab() {
    if (memory_ != MAP_FAILED) munmap(memory_, mapped_);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // Null where the rest is too small.
  void* Take(size_t bytes) {
    if (bytes > size_ - used_) return nullptr;
    void* const taken = begin_ + used_;
    used_ += RoundUp(bytes, kAlign);
    return taken;
  }

 private:
  const size_t mapped_;
  void* memory_;
  char* begin_ = nullptr;
  size_t size_ = 0;  // multiples of kAlign both
  size_t used_ = 0;
};
#endif

}  // namespace

std::shared_ptr<void> AllocateWeight(size_t bytes) {
#ifdef COPPICE_SANITIZED
  // One block each, so that reading past a weight's end is seen.
  void* const block = std::aligned_alloc(kAlign, RoundUp(bytes, kAlign));
  if (block != nullptr) std::memset(block, 0, bytes);
  return std::shared_ptr<void>(block, std::free);
#else
  static std::mutex mutex;
  static std::weak_ptr<Slab> current;  // with what is left of it
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Slab> slab = current.lock();
  void* taken = slab != nullptr ? slab->Take(bytes) : nullptr;
  if (taken == nullptr) {
    slab = std::make_shared<Slab>(bytes > kSlab / 4 ? RoundUp(bytes, kHugePage) : kSlab);
    taken = slab->Take(bytes);
    if (taken == nullptr) return nullptr;
    if (bytes <= kSlab / 4) current = slab;
  }
  return std::shared_ptr<void>(std::move(slab), taken);
#endif
}

}  // namespace coppice::kernels::cpu
