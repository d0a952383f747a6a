// Memory that is kept between steps.
#ifndef COPPICE_KERNELS_CPU_SCRATCH_H_
#define COPPICE_KERNELS_CPU_SCRATCH_H_

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace coppice::kernels::cpu {

// Aligned memory that grows and is never given back, so that steady steps do not allocate.
template <typename T>
class Scratch {
 public:
  // At least n elements; what was there before is lost if it grows.
  T* Get(size_t n) {
    if (n > size_) {
      memory_.reset();
      memory_.reset(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64));
      if (memory_ == nullptr) std::abort();  // nothing can be computed without it
      size_ = n;
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_SCRATCH_H_
