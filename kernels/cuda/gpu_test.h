// For tests that need a GPU: they say loudly that they are skipped where there is none.
#ifndef COPPICE_KERNELS_CUDA_GPU_TEST_H_
#define COPPICE_KERNELS_CUDA_GPU_TEST_H_

#include <cuda_runtime.h>

#include <cstdio>

#include "gtest/gtest.h"

namespace coppice::mla {

inline bool HaveGpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

}  // namespace coppice::mla

#define SKIP_WITHOUT_GPU()                                                      \
  if (!::coppice::mla::HaveGpu()) {                                             \
    std::printf("*** NO GPU: %s is SKIPPED\n",                                  \
                testing::UnitTest::GetInstance()->current_test_info()->name()); \
    GTEST_SKIP() << "no GPU";                                                   \
  }

#endif  // COPPICE_KERNELS_CUDA_GPU_TEST_H_
