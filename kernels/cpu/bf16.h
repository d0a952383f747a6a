// bfloat16 as its 16 bits.
#ifndef COPPICE_KERNELS_CPU_BF16_H_
#define COPPICE_KERNELS_CPU_BF16_H_

#include <bit>
#include <cstdint>

namespace coppice::kernels::cpu {

inline float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_BF16_H_
