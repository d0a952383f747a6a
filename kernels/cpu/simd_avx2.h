// Sixteen float lanes as two AVX registers; included by kernels_avx2.cc alone.  simd_generic.h
// states what each function does.
#ifndef COPPICE_KERNELS_CPU_SIMD_AVX2_H_
#define COPPICE_KERNELS_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstdint>

namespace coppice::kernels::cpu {
namespace {

struct V {
  __m256 lo, hi;
};

// 16 registers hold 12 accumulators of half a vector, a weight and a broadcast.
constexpr int kMaxRows = 6;
constexpr int PanelsFor(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int kMaxQueries = 2;
constexpr int kValueVectors = 2;

inline V Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void Store(float* p, V v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline __m256i FirstLanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V LoadN(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, FirstLanes(n)),
          n > 8 ? _mm256_maskload_ps(p + 8, FirstLanes(n - 8)) : _mm256_setzero_ps()};
}
inline void StoreN(float* p, V v, int64_t n) {
  _mm256_maskstore_ps(p, FirstLanes(n), v.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, FirstLanes(n - 8), v.hi);
}

inline V LoadEven(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(q + 1), 16))};
}
inline V LoadOdd(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(q), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(q + 1), mask))};
}

inline V Add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V Sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V Mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V Div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V Fma(V a, V b, V c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline V Max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V Min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline V SelectLess(V a, V b, V x, V y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline uint32_t GreaterMask(V a, V b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
  return static_cast<uint32_t>(lo) | static_cast<uint32_t>(hi) << 8;
}
inline __m256 PowerOfTwo(__m256 t) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23),
                                              _mm256_set1_epi32(0x3f800000)));
}
inline V PowerOfTwo(V t) { return {PowerOfTwo(t.lo), PowerOfTwo(t.hi)}; }

inline __m128 FoldAdd(V v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
inline float ReduceAdd(V v) {
  const __m128 four = FoldAdd(v);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float ReduceMax(V v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
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

#endif  // COPPICE_KERNELS_CPU_SIMD_AVX2_H_
