// The bodies of a KernelTable over the vectors of one simd_*.h, which is included before.  No
// include guard's worth of sharing: each kernels_*.cc compiles its own copy in an unnamed
// namespace.  Only built-ins and intrinsics are called, so that no function of the standard library
// is emitted for an instruction set the machine may lack.
#ifndef COPPICE_KERNELS_CPU_KERNELS_INL_H_
#define COPPICE_KERNELS_CPU_KERNELS_INL_H_

#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernel_table.h"

#ifdef __clang__
#define COPPICE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define COPPICE_UNROLL _Pragma("GCC unroll 64")
#endif

namespace coppice::kernels::cpu {
namespace {

// --- products ---

// What happens to y: kStore y = sum; kContinue y = the same sum, carried on from y; kAdd y = y +
// sum.
enum class Into { kStore, kContinue, kAdd };

// R staged rows times P panels.  Each output's sum runs over the inputs in order.  Meanwhile as
// much memory from `ahead` on as the panels take is fetched into the second-level cache.
template <int R, int P, bool kBf16>
void Block(const float* x, int64_t inputs, const char* w, int64_t panel_bytes, const char* ahead,
           float* y, int64_t y_stride, int64_t last_outputs, Into into) {
  V sum[R][P];
  COPPICE_UNROLL
  for (int r = 0; r < R; ++r) {
    COPPICE_UNROLL
    for (int p = 0; p < P; ++p) {
      if (into != Into::kContinue) {
        sum[r][p] = Zero();
      } else if (p + 1 < P || last_outputs == kLanes) {
        sum[r][p] = Load(y + r * y_stride + p * kLanes);
      } else {
        sum[r][p] = LoadN(y + r * y_stride + p * kLanes, last_outputs);
      }
    }
  }
  V weight[P];
  auto step = [&](const float* xk) __attribute__((always_inline)) {
    COPPICE_UNROLL
    for (int r = 0; r < R; ++r) {
      const V value = Set1(xk[r * kPitch]);
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) sum[r][p] = Fma(weight[p], value, sum[r][p]);
    }
  };
  if constexpr (kBf16) {
    int64_t k = 0;
    for (; k + 2 <= inputs; k += 2) {
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * panel_bytes, 0, 2);
      ahead += 2 * kLanes * 2;
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) weight[p] = LoadEven(w + p * panel_bytes);
      step(x + k);
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) weight[p] = LoadOdd(w + p * panel_bytes);
      step(x + k + 1);
      w += 2 * kLanes * 2;
    }
    if (k < inputs) {
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) weight[p] = LoadEven(w + p * panel_bytes);
      step(x + k);
    }
  } else {
    for (int64_t k = 0; k < inputs; ++k) {
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * panel_bytes, 0, 2);
      ahead += kLanes * 4;
      COPPICE_UNROLL
      for (int p = 0; p < P; ++p) {
        weight[p] = Load(reinterpret_cast<const float*>(w + p * panel_bytes));
      }
      step(x + k);
      w += kLanes * 4;
    }
  }
  COPPICE_UNROLL
  for (int r = 0; r < R; ++r) {
    COPPICE_UNROLL
    for (int p = 0; p < P; ++p) {
      float* out = y + r * y_stride + p * kLanes;
      if (p + 1 < P || last_outputs == kLanes) {
        Store(out, into == Into::kAdd ? Add(Load(out), sum[r][p]) : sum[r][p]);
      } else {
        StoreN(out, into == Into::kAdd ? Add(LoadN(out, last_outputs), sum[r][p]) : sum[r][p],
               last_outputs);
      }
    }
  }
}

using BlockFn = void (*)(const float*, int64_t, const char*, int64_t, const char*, float*, int64_t,
                         int64_t, Into);

template <bool kBf16, int R, int P>
constexpr BlockFn BlockFor() {
  if constexpr (P <= PanelsFor(R)) {
    return &Block<R, P, kBf16>;
  } else {
    return nullptr;
  }
}

// blocks[rows - 1][log2(panels)]
template <bool kBf16>
struct Blocks {
  BlockFn of[kMaxRows][4];
  template <int R>
  constexpr void Fill() {
    of[R - 1][0] = BlockFor<kBf16, R, 1>();
    of[R - 1][1] = BlockFor<kBf16, R, 2>();
    of[R - 1][2] = BlockFor<kBf16, R, 4>();
    of[R - 1][3] = BlockFor<kBf16, R, 8>();
    if constexpr (R > 1) Fill<R - 1>();
  }
  constexpr Blocks() : of{} { Fill<kMaxRows>(); }
};
constexpr Blocks<true> kBf16Blocks;
constexpr Blocks<false> kF32Blocks;

// rows × all outputs over `inputs` staged inputs that begin at input `first` of the packed matrix;
// what is multiplied after it begins at `next`.
void StagedProduct(const ProductArgs& a, const float* x, int64_t rows, const void* packed,
                   int64_t first, int64_t inputs, const void* next, float* y, int64_t y_stride,
                   Into into) {
  const int64_t panel_bytes = PanelBytes(a.inputs, a.bf16);
  const int64_t panels = (a.outputs + kLanes - 1) / kLanes;
  const int64_t last_outputs = a.outputs - (panels - 1) * kLanes;
  const char* w = static_cast<const char*>(packed) + first * kLanes * (a.bf16 ? 2 : 4);
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t small = rows / blocks, larger = rows % blocks;  // `larger` blocks have one row more
  const int widest = PanelsFor(static_cast<int>(larger > 0 ? small + 1 : small));
  for (int64_t p = 0; p < panels;) {
    int log = 3;
    while ((1 << log) > widest || p + (1 << log) > panels) --log;
    const int64_t count = int64_t{1} << log;
    const bool last = p + count == panels;
    const char* here = w + p * panel_bytes;
    const char* ahead = last ? static_cast<const char*>(next) : here + count * panel_bytes;
    int64_t row = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t n = small + (b < larger ? 1 : 0);
      const BlockFn fn = (a.bf16 ? kBf16Blocks.of : kF32Blocks.of)[n - 1][log];
      fn(x + row * kPitch, inputs, here, panel_bytes, b == 0 ? ahead : here,
         y + row * y_stride + p * kLanes, y_stride, last ? last_outputs : kLanes, into);
      row += n;
    }
    p += count;
  }
}

void Product(const ProductArgs& a) {
  for (int64_t begin = 0; begin < a.rows; begin += kStageRows) {
    const int64_t rows = a.rows - begin < kStageRows ? a.rows - begin : kStageRows;
    float* y = a.y + begin * a.y_stride;
    auto source = [&](int64_t r) {
      return a.x + (a.row_index != nullptr ? a.row_index[begin + r] : begin + r) * a.x_stride;
    };
    for (int s = 0; s < a.num_segments; ++s) {
      const int64_t offset = s * a.inputs;
      const void* next = s + 1 < a.num_segments ? a.segments[s + 1]
                         : a.next != nullptr    ? a.next
                                                : a.segments[s];
      if (rows == 1) {
        // One row needs no staging, and then no cut into chunks either.
        StagedProduct(a, source(0) + offset, 1, a.segments[s], 0, a.inputs, next, y, a.y_stride,
                      s == 0 ? Into::kStore : Into::kAdd);
        continue;
      }
      // A later segment that takes several chunks is summed apart before it is added.
      const bool apart = s > 0 && a.inputs > kChunk;
      float* target = apart ? a.segment : y;
      const int64_t stride = apart ? a.outputs : a.y_stride;
      for (int64_t first = 0; first < a.inputs; first += kChunk) {
        const int64_t inputs = a.inputs - first < kChunk ? a.inputs - first : kChunk;
        for (int64_t r = 0; r < rows; ++r) {
          std::memcpy(a.stage + r * kPitch, source(r) + offset + first, inputs * sizeof(float));
        }
        const Into into = first > 0 ? Into::kContinue : s == 0 || apart ? Into::kStore : Into::kAdd;
        StagedProduct(a, a.stage, rows, a.segments[s], first, inputs, next, target, stride, into);
      }
      if (!apart) continue;
      for (int64_t r = 0; r < rows; ++r) {
        const float* sum = a.segment + r * a.outputs;
        float* out = y + r * a.y_stride;
        int64_t i = 0;
        for (; i + kLanes <= a.outputs; i += kLanes)
          Store(out + i, Add(Load(out + i), Load(sum + i)));
        if (i < a.outputs) {
          const int64_t n = a.outputs - i;
          StoreN(out + i, Add(LoadN(out + i, n), LoadN(sum + i, n)), n);
        }
      }
    }
  }
}

// --- rows ---

// Calls body(offset, lanes) over n elements.
template <typename Body>
inline __attribute__((always_inline)) void ForLanes(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t{kLanes});
  if (i < n) body(i, n - i);
}
inline V LoadUpTo(const float* p, int64_t n) { return n == kLanes ? Load(p) : LoadN(p, n); }
inline void StoreUpTo(float* p, V v, int64_t n) {
  if (n == kLanes) {
    Store(p, v);
  } else {
    StoreN(p, v, n);
  }
}

void RmsNorm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  V squares = Zero();
  ForLanes(n, [&](int64_t i, int64_t lanes) {
    const V v = LoadUpTo(x + i, lanes);
    squares = Fma(v, v, squares);
  });
  const float mean = ReduceAdd(squares) / static_cast<float>(n);
  const V factor = Set1(1.0f / __builtin_sqrtf(mean + eps));
  ForLanes(n, [&](int64_t i, int64_t lanes) {
    StoreUpTo(out + i, Mul(Mul(LoadUpTo(x + i, lanes), factor), LoadUpTo(weight + i, lanes)),
              lanes);
  });
}

// e^x to about one unit in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its Taylor
// series to r^7.  0 below -87 (where e^x nears the subnormals), infinite above 88.37, NaN of a NaN;
// e^0 is exactly 1.
inline V Exp(V x) {
  const V low = Set1(-87.0f), high = Set1(88.37f), magic = Set1(12582912.0f);  // 1.5 * 2^23
  const V clamped = Max(low, Min(high, x));
  const V t = Fma(clamped, Set1(0x1.715476p+0f), magic);
  const V n = Sub(t, magic);
  V r = Fma(n, Set1(-0x1.62e4p-1f), clamped);
  r = Fma(n, Set1(-0x1.7f7d1cp-20f), r);
  V p = Set1(1.0f / 5040);
  p = Fma(p, r, Set1(1.0f / 720));
  p = Fma(p, r, Set1(1.0f / 120));
  p = Fma(p, r, Set1(1.0f / 24));
  p = Fma(p, r, Set1(1.0f / 6));
  p = Fma(p, r, Set1(0.5f));
  p = Fma(p, r, Set1(1.0f));
  p = Fma(p, r, Set1(1.0f));
  const V value = Mul(p, PowerOfTwo(t));
  return SelectLess(x, low, Zero(), SelectLess(high, x, Set1(__builtin_inff()), value));
}

inline V Sigmoid(V x) {
  const V one = Set1(1.0f);
  return Div(one, Add(one, Exp(Sub(Zero(), x))));
}

void SwiGlu(const float* gate, const float* up, int64_t n, float* out) {
  ForLanes(n, [&](int64_t i, int64_t lanes) {
    const V g = LoadUpTo(gate + i, lanes);
    const V silu = Div(g, Add(Set1(1.0f), Exp(Sub(Zero(), g))));
    StoreUpTo(out + i, Mul(silu, LoadUpTo(up + i, lanes)), lanes);
  });
}

void SigmoidRow(const float* x, int64_t n, float* out) {
  ForLanes(n, [&](int64_t i, int64_t lanes) {
    StoreUpTo(out + i, Sigmoid(LoadUpTo(x + i, lanes)), lanes);
  });
}

void Scale(float* x, int64_t n, float factor) {
  const V f = Set1(factor);
  ForLanes(n, [&](int64_t i, int64_t lanes) {
    StoreUpTo(x + i, Mul(LoadUpTo(x + i, lanes), f), lanes);
  });
}

void Combine(const CombineArgs& a) {
  ForLanes(a.n, [&](int64_t i, int64_t lanes) {
    auto sum = [&](const CombineArgs::Sum& s) {
      V v = LoadUpTo(s.segments[0] + i, lanes);
      for (int j = 1; j < s.count; ++j) v = Add(v, LoadUpTo(s.segments[j] + i, lanes));
      return v;
    };
    V total = Zero();
    for (int t = 0; t < a.num_terms; ++t) total = Fma(Set1(a.weights[t]), sum(a.terms[t]), total);
    if (a.last.count > 0) total = Add(total, sum(a.last));
    StoreUpTo(a.out + i, a.add ? Add(LoadUpTo(a.out + i, lanes), total) : total, lanes);
  });
}

void SoftmaxStats(const float* x, int64_t n, float* max, float* sum) {
  V largest = Set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) largest = Max(largest, Load(x + i));
  float m = ReduceMax(largest);
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  const V shift = Set1(m);
  V total = Zero();
  for (i = 0; i + kLanes <= n; i += kLanes) total = Add(total, Exp(Sub(Load(x + i), shift)));
  if (i < n) {
    float tail[kLanes];
    for (int j = 0; j < kLanes; ++j) tail[j] = i + j < n ? x[i + j] : -__builtin_inff();
    total = Add(total, Exp(Sub(Load(tail), shift)));
  }
  *max = m;
  *sum = ReduceAdd(total);
}

int64_t FindGreater(const float* x, int64_t begin, int64_t n, float threshold) {
  const V t = Set1(threshold);
  int64_t i = begin;
  for (; i + kLanes <= n; i += kLanes) {
    const uint32_t mask = GreaterMask(Load(x + i), t);
    if (mask != 0) return i + __builtin_ctz(mask);
  }
  for (; i < n; ++i) {
    if (x[i] > threshold) return i;
  }
  return n;
}

// --- attention ---

// scores[r * kTile + t] = scale * q[r] · k[t] for Q queries and T tokens; lane j of a sum takes
// dimensions j, j + 16 … Meanwhile the tokens `ahead` are fetched.
template <int Q, int T, bool kFetch>
inline void Dots(const float* const* q, const float* const* k, const float* const* ahead,
                 int64_t dim, float scale, float* scores) {
  static_assert(T % 4 == 0);
  V sum[Q][T];
  COPPICE_UNROLL
  for (int r = 0; r < Q; ++r) {
    COPPICE_UNROLL
    for (int t = 0; t < T; ++t) sum[r][t] = Zero();
  }
  V query[Q];
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    COPPICE_UNROLL
    for (int r = 0; r < Q; ++r) query[r] = Load(q[r] + i);
    COPPICE_UNROLL
    for (int t = 0; t < T; ++t) {
      const V key = Load(k[t] + i);
      if constexpr (kFetch) __builtin_prefetch(ahead[t] + i, 0, 2);
      COPPICE_UNROLL
      for (int r = 0; r < Q; ++r) sum[r][t] = Fma(query[r], key, sum[r][t]);
    }
  }
  if (i < dim) {
    COPPICE_UNROLL
    for (int r = 0; r < Q; ++r) query[r] = LoadN(q[r] + i, dim - i);
    COPPICE_UNROLL
    for (int t = 0; t < T; ++t) {
      const V key = LoadN(k[t] + i, dim - i);
      COPPICE_UNROLL
      for (int r = 0; r < Q; ++r) sum[r][t] = Fma(query[r], key, sum[r][t]);
    }
  }
  COPPICE_UNROLL
  for (int r = 0; r < Q; ++r) {
    COPPICE_UNROLL
    for (int t = 0; t < T; t += 4) {
      ReduceAdd4(sum[r][t], sum[r][t + 1], sum[r][t + 2], sum[r][t + 3], scale,
                 scores + r * kTile + t);
    }
  }
}

// out[r][i …] = factor[r] * out[r][i …] (or 0 if first) + Σ_t p[r * kTile + t] * v[t][i …], tokens
// in order.
template <int Q, int N>
inline void WeightedSum(const float* p, const float* factor, bool first, const float* const* v,
                        int tokens, int64_t i, float* const* out) {
  V sum[Q][N];
  COPPICE_UNROLL
  for (int r = 0; r < Q; ++r) {
    COPPICE_UNROLL
    for (int d = 0; d < N; ++d) {
      sum[r][d] = first ? Zero() : Mul(Load(out[r] + i + d * kLanes), Set1(factor[r]));
    }
  }
  for (int t = 0; t < tokens; ++t) {
    V value[N];
    COPPICE_UNROLL
    for (int d = 0; d < N; ++d) value[d] = Load(v[t] + i + d * kLanes);
    COPPICE_UNROLL
    for (int r = 0; r < Q; ++r) {
      const V weight = Set1(p[r * kTile + t]);
      COPPICE_UNROLL
      for (int d = 0; d < N; ++d) sum[r][d] = Fma(weight, value[d], sum[r][d]);
    }
  }
  COPPICE_UNROLL
  for (int r = 0; r < Q; ++r) {
    COPPICE_UNROLL
    for (int d = 0; d < N; ++d) Store(out[r] + i + d * kLanes, sum[r][d]);
  }
}

// The last value_dim % 16 columns.
inline void WeightedSumTail(const float* p, float factor, bool first, const float* const* v,
                            int tokens, int64_t i, int64_t n, float* out) {
  V sum = first ? Zero() : Mul(LoadN(out + i, n), Set1(factor));
  for (int t = 0; t < tokens; ++t) sum = Fma(Set1(p[t]), LoadN(v[t] + i, n), sum);
  StoreN(out + i, sum, n);
}

template <int Q>
void AttendQueries(const AttendArgs& a, int begin) {
  alignas(64) float scores[Q * kTile] = {};
  const float* const* q = a.q + begin;
  float* const* out = a.out + begin;
  // Few queries take more tokens at once, so that enough independent sums hide the latency of one.
  constexpr int kTokens = Q <= 2 ? 8 : 4;
  for (int t = 0; t < a.tokens; t += kTokens) {
    if (begin == 0) {
      const float* const* ahead = a.k + (t + kTokens < a.tokens ? t + kTokens : t);
      Dots<Q, kTokens, true>(q, a.k + t, ahead, a.key_dim, a.scale, scores + t);
    } else {
      Dots<Q, kTokens, false>(q, a.k + t, nullptr, a.key_dim, a.scale, scores + t);
    }
  }
  float factor[Q];
  for (int r = 0; r < Q; ++r) {
    float* p = scores + r * kTile;
    const int padded = (a.tokens + kLanes - 1) / kLanes * kLanes;
    for (int t = a.tokens; t < padded; ++t) p[t] = -__builtin_inff();
    V largest = Load(p);
    for (int t = kLanes; t < padded; t += kLanes) largest = Max(largest, Load(p + t));
    float m = ReduceMax(largest);
    if (!a.first) m = a.max[begin + r] > m ? a.max[begin + r] : m;
    const V shift = Set1(m);
    V total = Zero();
    for (int t = 0; t < padded; t += kLanes) {
      const V e = Exp(Sub(Load(p + t), shift));
      Store(p + t, e);
      total = Add(total, e);
    }
    const float sum = ReduceAdd(total);
    if (a.first) {
      factor[r] = 0;
      a.sum[begin + r] = sum;
    } else {
      alignas(64) float lanes[kLanes];
      Store(lanes, Exp(Sub(Set1(a.max[begin + r]), shift)));
      factor[r] = lanes[0];
      a.sum[begin + r] = __builtin_fmaf(a.sum[begin + r], factor[r], sum);
    }
    a.max[begin + r] = m;
  }
  int64_t i = 0;
  for (; i + kValueVectors * kLanes <= a.value_dim; i += kValueVectors * kLanes) {
    WeightedSum<Q, kValueVectors>(scores, factor, a.first, a.v, a.tokens, i, out);
  }
  for (; i + kLanes <= a.value_dim; i += kLanes) {
    WeightedSum<Q, 1>(scores, factor, a.first, a.v, a.tokens, i, out);
  }
  if (i < a.value_dim) {
    for (int r = 0; r < Q; ++r) {
      WeightedSumTail(scores + r * kTile, factor[r], a.first, a.v, a.tokens, i, a.value_dim - i,
                      out[r]);
    }
  }
}

void Attend(const AttendArgs& a) {
  int begin = 0;
  for (; begin + kMaxQueries <= a.queries; begin += kMaxQueries)
    AttendQueries<kMaxQueries>(a, begin);
  switch (a.queries - begin) {
    case 3:
      if constexpr (kMaxQueries > 3) AttendQueries<3>(a, begin);
      break;
    case 2:
      if constexpr (kMaxQueries > 2) AttendQueries<2>(a, begin);
      break;
    case 1:
      AttendQueries<1>(a, begin);
      break;
  }
}

constexpr KernelTable MakeTable(const char* name) {
  return {name,    &Product, &RmsNorm, &SwiGlu,       &SigmoidRow,
          &Attend, &Scale,   &Combine, &SoftmaxStats, &FindGreater};
}

}  // namespace
}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_KERNELS_INL_H_
