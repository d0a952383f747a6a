#include "bench/verify_kernel/roofs.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace coppice::bench {
namespace {

constexpr int kThreads = 256;

// Operands that differ from thread to thread: matrix units run faster on zeros than on data.
__device__ uint32_t Operand(uint32_t i) {
  return 0x3F003F00u + (threadIdx.x * 77u + i * 131u) % 0x80u * 0x10001u;
}

__global__ void __launch_bounds__(kThreads) MmaKernel(float* sink, int iterations) {
  float c[8][4] = {};
  const uint32_t a[4] = {Operand(0), Operand(1), Operand(2), Operand(3)};
  uint32_t b[8][2];
  for (int j = 0; j < 8; ++j) {
    b[j][0] = Operand(4 + 2 * j);
    b[j][1] = Operand(5 + 2 * j);
  }
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[j][0]), "r"(b[j][1]));
    }
  }
  float sum = 0;
  for (int j = 0; j < 8; ++j) sum += c[j][0] + c[j][1] + c[j][2] + c[j][3];
  sink[blockIdx.x * kThreads + threadIdx.x] = sum;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// One m64n128k16 product of a warpgroup.
__device__ void Wgmma(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15, "
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31, "
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47, "
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

__global__ void __launch_bounds__(kThreads)
    WgmmaKernel([[maybe_unused]] float* sink, [[maybe_unused]] int iterations) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ alignas(128) uint32_t b[128 * 16 / 2];
  for (int i = threadIdx.x; i < 128 * 16 / 2; i += kThreads) b[i] = Operand(i);
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  // Core matrices of 8 × 16 bytes without swizzle, 128 bytes apart along k, 256 along n.
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(b));
  const uint64_t descriptor =
      (address & 0x3FFFF) >> 4 | uint64_t{128 >> 4} << 16 | uint64_t{256 >> 4} << 32;
  const uint32_t a[4] = {Operand(0), Operand(1), Operand(2), Operand(3)};
  float c[64] = {};
  for (int i = 0; i < iterations; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
    for (int j = 0; j < 8; ++j) Wgmma(c, a, descriptor);
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
  }
  float sum = 0;
  for (int j = 0; j < 64; ++j) sum += c[j];
  sink[blockIdx.x * kThreads + threadIdx.x] = sum;
#endif
}

__global__ void __launch_bounds__(512) ReadKernel(const uint4* from, size_t n, uint4* sink) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  uint4 sum = {0, 0, 0, 0};
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i + 3 * stride < n;
       i += 4 * stride) {
    const uint4 x = from[i], y = from[i + stride], z = from[i + 2 * stride],
                w = from[i + 3 * stride];
    sum.x ^= x.x ^ y.x ^ z.x ^ w.x;
    sum.y ^= x.y ^ y.y ^ z.y ^ w.y;
    sum.z ^= x.z ^ y.z ^ z.z ^ w.z;
    sum.w ^= x.w ^ y.w ^ z.w ^ w.w;
  }
  if (sum.x == 0x12345678 && sum.y == 0x9ABCDEF0) *sink = sum;
}

// Shortest of a few runs, in seconds; infinite where a launch failed.
template <typename Launch>
double Shortest(Launch launch) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  double shortest = 1e30;
  for (int i = 0; i < 5; ++i) {
    cudaEventRecord(begin);
    launch();
    cudaEventRecord(end);
    if (cudaGetLastError() != cudaSuccess || cudaEventSynchronize(end) != cudaSuccess) break;
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 0) shortest = std::min(shortest, ms / 1e3);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return shortest;
}

}  // namespace

Roofs MeasureRoofs() {
  Roofs roofs;
  int sms = 0, major = 0;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0) != cudaSuccess) return roofs;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  const size_t bytes = size_t{2} << 30;
  uint8_t *from = nullptr, *to = nullptr;
  if (cudaMalloc(&from, bytes) == cudaSuccess && cudaMalloc(&to, bytes) == cudaSuccess) {
    cudaMemset(from, 0x5A, bytes);
    roofs.copy_gbps = 2 * bytes / 1e9 / Shortest([&] {
                        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr);
                      });
    roofs.read_gbps = bytes / 1e9 / Shortest([&] {
                        ReadKernel<<<sms * 4, 512>>>(reinterpret_cast<const uint4*>(from),
                                                     bytes / 16, reinterpret_cast<uint4*>(to));
                      });
    const int iterations = 8000;
    float* sink = reinterpret_cast<float*>(to);
    for (int blocks_per_sm : {1, 2, 4}) {
      const double blocks = sms * blocks_per_sm;
      const double mma = blocks * (kThreads / 32) * iterations * 8.0 * (16 * 8 * 16 * 2);
      roofs.mma_tflops = std::max(roofs.mma_tflops, mma / 1e12 / Shortest([&] {
                                                      MmaKernel<<<sms * blocks_per_sm, kThreads>>>(
                                                          sink, iterations);
                                                    }));
      if (major != 9) continue;
      const double wgmma =
          blocks * (kThreads / 128) * (iterations / 8) * 8.0 * (64.0 * 128 * 16 * 2);
      roofs.wgmma_tflops =
          std::max(roofs.wgmma_tflops, wgmma / 1e12 / Shortest([&] {
                                         WgmmaKernel<<<sms * blocks_per_sm, kThreads>>>(
                                             sink, iterations / 8);
                                       }));
    }
  }
  cudaFree(from);
  cudaFree(to);
  return roofs;
}

}  // namespace coppice::bench
