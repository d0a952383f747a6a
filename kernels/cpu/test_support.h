// What the kernel tests share: groups of ranks on threads, tensors over vectors, random weights as
// a checkpoint holds them.
#ifndef COPPICE_KERNELS_CPU_TEST_SUPPORT_H_
#define COPPICE_KERNELS_CPU_TEST_SUPPORT_H_

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/bf16.h"
#include "kernels/ops.h"

namespace coppice::kernels::cpu {

// The instruction sets this machine can run.
inline std::vector<std::string> Isas() {
  std::vector<std::string> isas = {"generic"};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas.push_back("avx2");
  if (__builtin_cpu_supports("avx512f")) isas.push_back("avx512");
#endif
  return isas;
}

inline std::unique_ptr<CpuGroup> MakeGroup(int ranks, const std::string& isa = "") {
  setenv("COPPICE_CPU_ISA", isa.c_str(), 1);
  auto group = CreateCpuGroup(ranks);
  unsetenv("COPPICE_CPU_ISA");
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

// Runs `body` once per rank, each on a thread of its own.
inline void RunRanks(int ranks, const std::string& isa, const std::function<void(Ops&)>& body) {
  std::unique_ptr<CpuGroup> group = MakeGroup(ranks, isa);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Ops> ops = group->CreateOps(rank);
      body(*ops);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float Normal() { return std::normal_distribution<float>()(engine_); }
  int Int(int begin, int end) {  // [begin, end)
    return std::uniform_int_distribution<int>(begin, end - 1)(engine_);
  }
  std::vector<float> Normals(int64_t n, float scale = 1) {
    std::vector<float> v(n);
    for (float& x : v) x = Normal() * scale;
    return v;
  }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
};

// Row-major views of vectors; `stride` 0 means dense.
inline Tensor View(std::vector<float>& v, int64_t rows, int64_t cols, int64_t stride = 0) {
  return {v.data(), DType::kF32, rows, cols, stride == 0 ? cols : stride};
}
inline Tensor View(std::vector<int32_t>& v, int64_t rows, int64_t cols = 1) {
  return {v.data(), DType::kI32, rows, cols, cols};
}
inline Tensor View(std::vector<uint64_t>& v, int64_t rows, int64_t cols = 1) {
  return {v.data(), DType::kU64, rows, cols, cols};
}
inline Tensor View(std::vector<uint16_t>& v, int64_t rows, int64_t cols) {
  return {v.data(), DType::kBf16, rows, cols, cols};
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// A weight in one of the encodings, and the value each element stands for.
struct Weight {
  HostMatrix::Encoding encoding = HostMatrix::Encoding::kBf16;
  int64_t rows = 0, cols = 0;
  std::vector<uint16_t> bf16;
  std::vector<float> f32;
  std::vector<uint32_t> words;
  std::vector<uint16_t> scales;

  float At(int64_t r, int64_t c) const {
    switch (encoding) {
      case HostMatrix::Encoding::kBf16:
        return Bf16ToFloat(bf16[r * cols + c]);
      case HostMatrix::Encoding::kF32:
        return f32[r * cols + c];
      case HostMatrix::Encoding::kInt4Group32: {
        const uint32_t word = words[r * Words() + c / 8];
        const int q = static_cast<int>((word >> (4 * (c % 8))) & 15) - 8;
        return Bf16ToFloat(
            FloatToBf16(static_cast<float>(q) * Bf16ToFloat(scales[r * Groups() + c / 32])));
      }
    }
    return 0;
  }
  int64_t Words() const { return (cols + 7) / 8; }
  int64_t Groups() const { return (cols + 31) / 32; }
  // The rectangle of `r` rows and `c` columns that begins at (row, col).
  HostMatrix Rectangle(int64_t row, int64_t r, int64_t col, int64_t c) const {
    HostMatrix m;
    m.encoding = encoding;
    m.rows = r;
    m.cols = c;
    switch (encoding) {
      case HostMatrix::Encoding::kBf16:
        m.data = bf16.data() + row * cols + col;
        m.row_bytes = cols * 2;
        break;
      case HostMatrix::Encoding::kF32:
        m.data = f32.data() + row * cols + col;
        m.row_bytes = cols * 4;
        break;
      case HostMatrix::Encoding::kInt4Group32:
        m.data = words.data() + row * Words() + col / 32 * 4;
        m.row_bytes = Words() * 4;
        m.scales = scales.data() + row * Groups() + col / 32;
        m.scale_row_bytes = Groups() * 2;
        m.first_col = col % 32;
        break;
    }
    return m;
  }
  HostMatrix Whole() const { return Rectangle(0, rows, 0, cols); }
};

inline Weight RandomWeight(Random& random, HostMatrix::Encoding encoding, int64_t rows,
                           int64_t cols) {
  Weight w;
  w.encoding = encoding;
  w.rows = rows;
  w.cols = cols;
  const float scale = 1 / std::sqrt(static_cast<float>(cols));
  switch (encoding) {
    case HostMatrix::Encoding::kBf16:
      for (int64_t i = 0; i < rows * cols; ++i)
        w.bf16.push_back(FloatToBf16(random.Normal() * scale));
      break;
    case HostMatrix::Encoding::kF32:
      w.f32 = random.Normals(rows * cols, scale);
      break;
    case HostMatrix::Encoding::kInt4Group32:
      for (int64_t i = 0; i < rows * w.Words(); ++i) w.words.push_back(random.engine()());
      for (int64_t i = 0; i < rows * w.Groups(); ++i) {
        w.scales.push_back(FloatToBf16((0.5f + std::abs(random.Normal())) * scale / 4));
      }
      break;
  }
  return w;
}

inline std::unique_ptr<Matrix> Prepare(Ops& ops, const HostMatrix& m) {
  auto matrix = ops.Prepare(m);
  EXPECT_TRUE(matrix.ok()) << matrix.status();
  return *std::move(matrix);
}

// Σ_k x[k] · w[row][first + k], k in order by fused multiply-adds: the sum that every product is
// made of.
inline float ReferenceDot(const float* x, const Weight& w, int64_t row, int64_t first,
                          int64_t count) {
  float sum = 0;
  for (int64_t k = 0; k < count; ++k) sum = std::fma(w.At(row, first + k), x[k], sum);
  return sum;
}

}  // namespace coppice::kernels::cpu

#endif  // COPPICE_KERNELS_CPU_TEST_SUPPORT_H_
