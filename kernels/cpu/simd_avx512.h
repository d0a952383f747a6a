// Sixteen float lanes as one AVX-512 register; included by kernels_avx512.cc alone.  simd_generic.h
// states what each function does.
#ifndef COPPICE_KERNELS_CPU_SIMD_AVX512_H_
#define COPPICE_KERNELS_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstdint>

namespace coppice::kernels::cpu {
namespace {

using V = __m512;

// 32 registers hold up to 24 accumulators, the weights of two panels and a broadcast.
constexpr int kMaxRows = 12;
constexpr int PanelsFor(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }
constexpr int kMaxQueries = 4;
constexpr int kValueVectors = 4;

inline V Zero() { return _mm512_setzero_ps(); }
inline V Set1(float x) { return _mm512_set1_ps(x); }
inline V Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline __mmask16 FirstLanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V LoadN(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(FirstLanes(n), p); }
inline void StoreN(float* p, V v, int64_t n) { _mm512_mask_storeu_ps(p, FirstLanes(n), v); }

inline V LoadEven(const void* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(p), 16));
}
inline V LoadOdd(const void* p) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_load_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline V Add(V a, V b) { return _mm512_add_ps(a, b); }
inline V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V Div(V a, V b) { return _mm512_div_ps(a, b); }
inline V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V Max(V a, V b) { return _mm512_max_ps(a, b); }
inline V Min(V a, V b) { return _mm512_min_ps(a, b); }
inline V SelectLess(V a, V b, V x, V y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline uint32_t GreaterMask(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline V PowerOfTwo(V t) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23),
                                              _mm512_set1_epi32(0x3f800000)));
}

inline __m256 LowHalf(V v) { return _mm512_castps512_ps256(v); }
inline __m256 HighHalf(V v) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
inline __m128 FoldAdd(V v) {
  const __m256 eight = _mm256_add_ps(LowHalf(v), HighHalf(v));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
inline float ReduceAdd(V v) {
  const __m128 four = FoldAdd(v);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float ReduceMax(V v) {
  const __m256 eight = _mm256_max_ps(LowHalf(v), HighHalf(v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline void ReduceAdd4(V a, V b, V c, V d, float scale, float* out) {
  const __m128 fa = FoldAdd(a), fb = FoldAdd(b), fc = FoldAdd(c), fd = FoldAdd(d);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(fa, fb), _mm_unpackhi_ps(fa, fb));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(fc, fd), _mm_unpackhi_ps(fc, fd));
  const __m128 sums = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
  _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
}

}  // namespace
}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_SIMD_AVX512_H_
