// Sixteen float lanes in plain C++; included by kernels_generic.cc alone.
#ifndef COPPICE_KERNELS_CPU_SIMD_GENERIC_H_
#define COPPICE_KERNELS_CPU_SIMD_GENERIC_H_

#include <cstdint>
#include <cstring>

namespace coppice::kernels::cpu {
namespace {

struct V {
  float lane[16];
};

// Register blocking: rows of a product at once, panels for so many rows, queries and value vectors
// of attention.
constexpr int kMaxRows = 4;
constexpr int PanelsFor(int) { return 1; }
constexpr int kMaxQueries = 2;
constexpr int kValueVectors = 2;

inline V Zero() { return V{}; }
inline V Set1(float x) {
  V v;
  for (float& lane : v.lane) lane = x;
  return v;
}
inline V Load(const float* p) {
  V v;
  std::memcpy(v.lane, p, sizeof(v.lane));
  return v;
}
inline void Store(float* p, V v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
// The first n of 16 lanes; the others are 0 and are not touched in memory.
inline V LoadN(const float* p, int64_t n) {
  V v{};
  std::memcpy(v.lane, p, n * sizeof(float));
  return v;
}
inline void StoreN(float* p, V v, int64_t n) { std::memcpy(p, v.lane, n * sizeof(float)); }

// Even and odd inputs of a bf16 pair vector.
inline V LoadEven(const void* p) {
  V v;
  for (int i = 0; i < 16; ++i) {
    uint32_t pair;
    std::memcpy(&pair, static_cast<const char*>(p) + 4 * i, 4);
    pair <<= 16;
    std::memcpy(&v.lane[i], &pair, 4);
  }
  return v;
}
inline V LoadOdd(const void* p) {
  V v;
  for (int i = 0; i < 16; ++i) {
    uint32_t pair;
    std::memcpy(&pair, static_cast<const char*>(p) + 4 * i, 4);
    pair &= 0xffff0000u;
    std::memcpy(&v.lane[i], &pair, 4);
  }
  return v;
}

#define COPPICE_LANES(expression)                      \
  V v;                                                 \
  for (int i = 0; i < 16; ++i) v.lane[i] = expression; \
  return v
inline V Add(V a, V b) { COPPICE_LANES(a.lane[i] + b.lane[i]); }
inline V Sub(V a, V b) { COPPICE_LANES(a.lane[i] - b.lane[i]); }
inline V Mul(V a, V b) { COPPICE_LANES(a.lane[i] * b.lane[i]); }
inline V Div(V a, V b) { COPPICE_LANES(a.lane[i] / b.lane[i]); }
inline V Fma(V a, V b, V c) { COPPICE_LANES(__builtin_fmaf(a.lane[i], b.lane[i], c.lane[i])); }
// b where either is a NaN.
inline V Max(V a, V b) { COPPICE_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
inline V Min(V a, V b) { COPPICE_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
// a < b ? x : y.
inline V SelectLess(V a, V b, V x, V y) {
  COPPICE_LANES(a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]);
}
#undef COPPICE_LANES

// Bit i: a's lane i > b's.
inline uint32_t GreaterMask(V a, V b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.lane[i] > b.lane[i]) << i;
  return mask;
}

// 2^n from t = 1.5 * 2^23 + n, -126 <= n <= 127.
inline V PowerOfTwo(V t) {
  V v;
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &t.lane[i], 4);
    bits = (bits << 23) + 0x3f800000u;
    std::memcpy(&v.lane[i], &bits, 4);
  }
  return v;
}

// Halves are added until one lane is left: the order every instruction set follows.
inline float ReduceAdd(V v) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) v.lane[i] = v.lane[i] + v.lane[i + half];
  }
  return v.lane[0];
}
inline float ReduceMax(V v) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) {
      v.lane[i] = v.lane[i] > v.lane[i + half] ? v.lane[i] : v.lane[i + half];
    }
  }
  return v.lane[0];
}
// out[0 … 3] = scale * the ReduceAdd of a, b, c, d.
inline void ReduceAdd4(V a, V b, V c, V d, float scale, float* out) {
  out[0] = ReduceAdd(a) * scale;
  out[1] = ReduceAdd(b) * scale;
  out[2] = ReduceAdd(c) * scale;
  out[3] = ReduceAdd(d) * scale;
}

}  // namespace
}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_SIMD_GENERIC_H_
