// Hopper instructions (sm_90a) as functions: warpgroup products from shared memory (PTX ISA,
// 9.7.15 wgmma) and what goes with them.
#ifndef COPPICE_KERNELS_CUDA_HOPPER_CUH_
#define COPPICE_KERNELS_CUDA_HOPPER_CUH_

#include <cstdint>

#include "kernels/cuda/instructions.cuh"

namespace coppice::hopper {

using namespace gpu;  // but for the copies of 16 bytes

// ---- named barriers of some of the block's threads

template <int kId, int kThreads>
__device__ __forceinline__ void NamedBarrier() {
  asm volatile("barrier.cta.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// The same, and whether any of the threads said true.
template <int kId, int kThreads>
__device__ __forceinline__ bool NamedBarrierAny(bool mine) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %1, 0;\n"
      "barrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(mine)), "n"(kId), "n"(kThreads)
      : "memory");
  return any != 0;
}

// Shared memory written by ordinary stores becomes visible to warpgroup products.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void RegistersRaise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersLower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- asynchronous copies of 16 bytes, which bring the rest of their 128 into L2

__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
// Zeros where `bytes` is 0 (nothing is read then), the 16 bytes where it is 16.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// ---- stores of 8 x 8 fragments, transposed: lane l gives the address of row l % 8 of matrix l / 8

__device__ __forceinline__ void StoreTransposed4(uint32_t address, uint32_t a, uint32_t b,
                                                 uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
__device__ __forceinline__ void StoreTransposed2(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(a), "r"(b)
               : "memory");
}

// ---- warpgroup products

// Descriptor of an operand stored in rows of 128 bytes, 16-byte chunk c of row r at c ^ (r & 7)
// (the 128-byte swizzle), its base aligned to 1,024 bytes.  Where the rows run along M or N
// ("K-major") and where they run along K ("MN-major", an extent of 64) the repeat over 8 rows is
// 1,024 bytes, which is all that such an operand needs.
__device__ __forceinline__ uint64_t Descriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kRowGroups = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kRowGroups | (uint64_t{1} << 16) | ((shared_address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void ProductsFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void ProductsCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void ProductsWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators to before a wait that stands in front of
// this.
template <int kCount>
__device__ __forceinline__ void ProductsRead(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

enum class Major { kK = 0, kMN = 1 };

// d[64 x N] (+)= A[64 x 16] · B[16 x N], bf16 in, fp32 out; accumulates where `add` is not 0.
template <int kColumns, Major kA>
__device__ __forceinline__ void Product(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int add);

#define COPPICE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define COPPICE_PRODUCT(N, REGISTERS, A, B, ADD, ...)                                              \
  template <>                                                                                      \
  __device__ __forceinline__ void Product<N, Major::kK>(float(&d)[N / 2], uint64_t a, uint64_t b,  \
                                                        int add) {                                 \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                     \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, %" #A  \
                 ", %" #B ", add, 1, 1, 0, 0;\n}\n"                                                \
                 : __VA_ARGS__                                                                     \
                 : "l"(a), "l"(b), "r"(add));                                                      \
  }                                                                                                \
  template <>                                                                                      \
  __device__ __forceinline__ void Product<N, Major::kMN>(float(&d)[N / 2], uint64_t a, uint64_t b, \
                                                         int add) {                                \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                     \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, %" #A  \
                 ", %" #B ", add, 1, 1, 1, 0;\n}\n"                                                \
                 : __VA_ARGS__                                                                     \
                 : "l"(a), "l"(b), "r"(add));                                                      \
  }

#define COPPICE_R8 "%0,%1,%2,%3"
#define COPPICE_R16 COPPICE_R8 ",%4,%5,%6,%7"
#define COPPICE_R24 COPPICE_R16 ",%8,%9,%10,%11"
#define COPPICE_R32 COPPICE_R24 ",%12,%13,%14,%15"
#define COPPICE_R40 COPPICE_R32 ",%16,%17,%18,%19"
#define COPPICE_R48 COPPICE_R40 ",%20,%21,%22,%23"
#define COPPICE_R56 COPPICE_R48 ",%24,%25,%26,%27"
#define COPPICE_R64 COPPICE_R56 ",%28,%29,%30,%31"
#define COPPICE_R72 COPPICE_R64 ",%32,%33,%34,%35"
#define COPPICE_D8 COPPICE_D4(0)
#define COPPICE_D16 COPPICE_D8, COPPICE_D4(4)
#define COPPICE_D24 COPPICE_D16, COPPICE_D4(8)
#define COPPICE_D32 COPPICE_D24, COPPICE_D4(12)
#define COPPICE_D40 COPPICE_D32, COPPICE_D4(16)
#define COPPICE_D48 COPPICE_D40, COPPICE_D4(20)
#define COPPICE_D56 COPPICE_D48, COPPICE_D4(24)
#define COPPICE_D64 COPPICE_D56, COPPICE_D4(28)
#define COPPICE_D72 COPPICE_D64, COPPICE_D4(32)

COPPICE_PRODUCT(8, COPPICE_R8, 4, 5, 6, COPPICE_D8)
COPPICE_PRODUCT(16, COPPICE_R16, 8, 9, 10, COPPICE_D16)
COPPICE_PRODUCT(24, COPPICE_R24, 12, 13, 14, COPPICE_D24)
COPPICE_PRODUCT(32, COPPICE_R32, 16, 17, 18, COPPICE_D32)
COPPICE_PRODUCT(40, COPPICE_R40, 20, 21, 22, COPPICE_D40)
COPPICE_PRODUCT(48, COPPICE_R48, 24, 25, 26, COPPICE_D48)
COPPICE_PRODUCT(56, COPPICE_R56, 28, 29, 30, COPPICE_D56)
COPPICE_PRODUCT(64, COPPICE_R64, 32, 33, 34, COPPICE_D64)
COPPICE_PRODUCT(72, COPPICE_R72, 36, 37, 38, COPPICE_D72)

}  // namespace coppice::hopper

#endif  // COPPICE_KERNELS_CUDA_HOPPER_CUH_
