// The inner loops of the CPU backend, once per instruction set.  Every table computes the same
// bits: each value is built from the same correctly rounded operations (add, multiply, fused
// multiply-add, divide, square root) in the same order, over vectors of 16 lanes that the
// instruction sets only split differently.
#ifndef COPPICE_KERNELS_CPU_KERNEL_TABLE_H_
#define COPPICE_KERNELS_CPU_KERNEL_TABLE_H_

#include <cstdint>

namespace coppice::kernels::cpu {

inline constexpr int kLanes = 16;   // lanes of a vector; outputs of a panel of a packed matrix
inline constexpr int kChunk = 256;  // inputs of a product that are staged at once
inline constexpr int kPitch = 272;  // floats between staged rows: off the L1 cache's 4 KiB period
inline constexpr int kStageRows = 96;  // rows that are staged at once
inline constexpr int kStageFloats = kStageRows * kPitch;
inline constexpr int kTile =
    64;  // visible tokens per softmax block, counted from the first visible one
inline constexpr int kTokenPad = 8;  // token lists are readable up to a multiple of this

// Packed weights: panels of 16 outputs (the last padded with zeros).  f32: [panel][input][16].
// bf16: [panel][ceil(input / 2)][16][2], so that a 32-bit lane holds two neighbouring inputs of one
// output.
static inline constexpr int64_t PanelBytes(int64_t inputs, bool bf16) {
  return bf16 ? (inputs + 1) / 2 * 2 * kLanes * 2 : inputs * kLanes * 4;
}

// y[i] = Σ_s x[row_index ? row_index[i] : i][s * inputs …] · segment[s]ᵀ: each segment over its
// inputs in order, then the segments in order.
struct ProductArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* row_index = nullptr;
  int64_t rows = 0;
  const void* const* segments = nullptr;
  int num_segments = 1;
  bool bf16 = true;
  int64_t inputs = 0;  // of one segment
  int64_t outputs = 0;
  const void* next = nullptr;  // weights of the product that follows, if known: fetched meanwhile
  float* y = nullptr;          // overlaps nothing
  int64_t y_stride = 0;
  float* stage = nullptr;    // kStageFloats
  float* segment = nullptr;  // rows * outputs, used when num_segments > 1 and inputs > kChunk
};

// One tile of at most kTile tokens for several queries that all see it.  Run over a query's tiles
// in order of position, it leaves in `out` the unnormalised softmax-weighted sum of values, in
// `sum` its denominator.
struct AttendArgs {
  int queries = 0;
  const float* const* q = nullptr;  // [queries] of key_dim
  float* const* out = nullptr;      // [queries] of value_dim
  float* max = nullptr;             // [queries]
  float* sum = nullptr;             // [queries]
  int tokens = 0;
  const float* const* k =
      nullptr;  // [tokens, padded with readable rows to a multiple of kTokenPad]
  const float* const* v = nullptr;  // [tokens]
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  float scale = 0;
  bool first = false;  // the queries' first tile: out, max and sum are written, not read
};

// out = (add ? out : nothing) + (Σ_term weight · (Σ_segment) + Σ_last segment), over n columns;
// sums in order.
struct CombineArgs {
  struct Sum {
    const float* const* segments = nullptr;
    int count = 0;
  };
  const Sum* terms = nullptr;
  const float* weights = nullptr;
  int num_terms = 0;
  Sum last;
  float* out = nullptr;
  bool add = true;
  int64_t n = 0;
};

struct KernelTable {
  const char* name;
  void (*product)(const ProductArgs& args);
  // out[i] = x[i] * (1 / sqrt(mean(x²) + eps)) * weight[i], one row of n.
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // out[i] = silu(gate[i]) * up[i].
  void (*swiglu)(const float* gate, const float* up, int64_t n, float* out);
  void (*sigmoid)(const float* x, int64_t n, float* out);
  void (*attend)(const AttendArgs& args);
  void (*scale)(float* x, int64_t n, float factor);
  void (*combine)(const CombineArgs& args);
  // The largest of x and Σ exp(x - largest).
  void (*softmax_stats)(const float* x, int64_t n, float* max, float* sum);
  // The first i in [begin, n) with x[i] > threshold, or n.
  int64_t (*find_greater)(const float* x, int64_t begin, int64_t n, float threshold);
};

const KernelTable& GenericKernels();
#ifdef COPPICE_CPU_X86
const KernelTable& Avx2Kernels();
const KernelTable& Avx512Kernels();
#endif

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_KERNEL_TABLE_H_
