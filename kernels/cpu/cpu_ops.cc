#include "kernels/cpu/cpu_ops.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/bf16.h"
#include "kernels/cpu/dispatch.h"

namespace coppice::kernels::cpu {
namespace {

class HostBuffer : public Buffer {
 public:
  HostBuffer(void* memory, void* data, size_t bytes)
      : memory_(memory), data_(data), bytes_(bytes) {}
  ~HostBuffer() override { std::free(memory_); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  void* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }

 private:
  void* memory_;
  void* data_;
  size_t bytes_;
};

const PackedMatrix& Packed(const Matrix& m) { return static_cast<const PackedMatrix&>(m); }

float* Row(const Tensor& t, int64_t row) { return t.f32() + row * t.stride; }
char* RowBytes(const Tensor& t, int64_t row) {
  return static_cast<char*>(t.data) + row * t.stride * SizeOf(t.dtype);
}

}  // namespace

// --- memory ---

absl::StatusOr<std::unique_ptr<Buffer>> CpuOps::Allocate(size_t bytes) {
  constexpr size_t kAlign = 64;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t all = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  // calloc leaves large blocks to the kernel, which zeroes a page when it is first touched.
  void* memory = bytes <= all ? std::calloc(1, bytes + kAlign) : nullptr;
  if (memory == nullptr) {
    const size_t left = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes: ", left,
                                                     " bytes of memory are free of ", all));
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  void* data = static_cast<char*>(memory) + (kAlign - begin % kAlign) % kAlign;
  return std::make_unique<HostBuffer>(memory, data, bytes);
}

void CpuOps::Upload(const void* host, void* device, size_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
}

void CpuOps::Download(const void* device, void* host, size_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
}

absl::StatusOr<std::unique_ptr<Matrix>> CpuOps::Prepare(const HostMatrix& weight) {
  return PackedMatrix::Pack(weight);
}

// --- rows ---

void CpuOps::Embed(Tensor ids, const uint16_t* table, Tensor out) {
  for (int64_t r = 0; r < out.rows; ++r) {
    const char* source =
        reinterpret_cast<const char*>(table) + int64_t{ids.i32()[r]} * out.cols * 2;
    float* row = Row(out, r);
    for (int64_t c = 0; c < out.cols; ++c) {
      uint16_t bits;
      std::memcpy(&bits, source + c * 2, 2);  // a mapped file aligns nothing
      row[c] = Bf16ToFloat(bits);
    }
  }
}

void CpuOps::RmsNorm(Tensor x, Tensor weight, float eps, Tensor out) {
  for (int64_t r = 0; r < x.rows; ++r) {
    kernels_.rms_norm(Row(x, r), weight.f32(), x.cols, eps, Row(out, r));
  }
}

void CpuOps::Copy(Tensor x, Tensor out) {
  for (int64_t r = 0; r < x.rows; ++r) {
    std::memcpy(RowBytes(out, r), RowBytes(x, r), x.cols * SizeOf(x.dtype));
  }
}

void CpuOps::GatherRows(Tensor x, Tensor indices, Tensor out) {
  for (int64_t r = 0; r < out.rows; ++r) {
    std::memcpy(RowBytes(out, r), RowBytes(x, indices.i32()[r]), out.cols * SizeOf(x.dtype));
  }
}

void CpuOps::ToBf16(Tensor x, Tensor out) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* from = Row(x, r);
    uint16_t* to = out.bf16() + r * out.stride;
    for (int64_t c = 0; c < x.cols; ++c) to[c] = FloatToBf16(from[c]);
  }
}

void CpuOps::FromBf16(Tensor x, Tensor out) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const uint16_t* from = x.bf16() + r * x.stride;
    float* to = Row(out, r);
    for (int64_t c = 0; c < x.cols; ++c) to[c] = Bf16ToFloat(from[c]);
  }
}

void CpuOps::SwiGlu(Tensor gate_up, Tensor out) {
  for (int64_t r = 0; r < out.rows; ++r) {
    kernels_.swiglu(Row(gate_up, r), Row(gate_up, r) + out.cols, out.cols, Row(out, r));
  }
}

// --- products ---

void CpuOps::RunProduct(const float* x, int64_t x_stride, const int32_t* row_index, int64_t rows,
                        const Matrix& first, absl::Span<const void* const> panels, float* y,
                        int64_t y_stride, const Matrix* next) {
  if (rows == 0) return;
  ProductArgs args;
  args.x = x;
  args.x_stride = x_stride;
  args.row_index = row_index;
  args.rows = rows;
  args.segments = panels.data();
  args.num_segments = static_cast<int>(panels.size());
  args.bf16 = Packed(first).bf16();
  args.inputs = first.inputs();
  args.outputs = first.outputs();
  args.next = next == nullptr ? nullptr : Packed(*next).panels();
  args.y = y;
  args.y_stride = y_stride;
  args.stage = stage_.Get(kStageFloats);
  if (args.num_segments > 1 && args.inputs > kChunk) {
    args.segment = segment_.Get(std::min<int64_t>(rows, kStageRows) * args.outputs);
  }
  kernels_.product(args);
}

void CpuOps::Product(const float* x, int64_t x_stride, const int32_t* row_index, int64_t rows,
                     absl::Span<const std::unique_ptr<Matrix>> segments, float* y, int64_t y_stride,
                     const Matrix* next) {
  assert(!segments.empty() && segments.size() <= kSegments);
  std::array<const void*, kSegments> panels;
  for (size_t s = 0; s < segments.size(); ++s) panels[s] = Packed(*segments[s]).panels();
  RunProduct(x, x_stride, row_index, rows, *segments[0],
             absl::MakeConstSpan(panels.data(), segments.size()), y, y_stride, next);
}

void CpuOps::Product(const float* x, int64_t x_stride, const int32_t* row_index, int64_t rows,
                     const Matrix& w, float* y, int64_t y_stride, const Matrix* next) {
  const void* panels = Packed(w).panels();
  RunProduct(x, x_stride, row_index, rows, w, absl::MakeConstSpan(&panels, 1), y, y_stride, next);
}

void CpuOps::Linear(Tensor x, const Matrix& w, Tensor y) {
  Product(x.f32(), x.stride, nullptr, x.rows, w, y.f32(), y.stride);
}

void CpuOps::HeadLinear(Tensor x, absl::Span<const std::unique_ptr<Matrix>> w, Tensor y) {
  for (size_t h = 0; h < w.size(); ++h) {
    Product(x.f32() + h * w[h]->inputs(), x.stride, nullptr, x.rows, *w[h],
            y.f32() + h * w[h]->outputs(), y.stride);
  }
}

void CpuOps::RowLinear(Tensor x, const SegmentedMatrix& w, Tensor residual) {
  const int64_t rows = residual.rows, cols = residual.cols, size = rows * cols;
  std::array<const float*, kSegments> segments;
  if (ranks() == 1) {
    float* sums = rows_.Get(size);
    Product(x.f32(), x.stride, nullptr, rows, w, sums, cols);
    AddOverRanks(residual, [&](int64_t r, CombineArgs* args) {
      segments[0] = sums + r * cols;
      args->last = {segments.data(), 1};
    });
    return;
  }
  float* mine = shared_scratch().Get(w.size() * size);
  for (size_t s = 0; s < w.size(); ++s) {
    Product(x.f32() + s * w[s]->inputs(), x.stride, nullptr, rows, *w[s], mine + s * size, cols,
            s + 1 < w.size() ? w[s + 1].get() : nullptr);
  }
  const HostCollective::All& all = Exchange({mine, nullptr});
  const int per_rank = kSegments / ranks();
  AddOverRanks(residual, [&](int64_t r, CombineArgs* args) {
    for (int s = 0; s < kSegments; ++s) {
      segments[s] =
          static_cast<const float*>(all[s / per_rank].data) + s % per_rank * size + r * cols;
    }
    args->last = {segments.data(), kSegments};
  });
}

void CpuOps::AllGatherColumns(Tensor x, Tensor out) {
  if (ranks() == 1) {
    Copy(x, out);
    return;
  }
  // The caller may reuse x at once, so the others read a copy.
  float* mine = shared_scratch().Get(x.rows * x.cols);
  Tensor copy{mine, DType::kF32, x.rows, x.cols, x.cols};
  Copy(x, copy);
  const HostCollective::All& all = Exchange({mine, nullptr});
  for (int rank = 0; rank < ranks(); ++rank) {
    copy.data = const_cast<void*>(all[rank].data);
    Copy(copy, out.Cols(rank * x.cols, x.cols));
  }
}

// --- cache maintenance ---

void CpuOps::MoveRows(Tensor cache, Tensor src, Tensor dst) {
  const int64_t count = std::max(src.rows * src.cols, int64_t{0});
  const int64_t row_bytes = cache.cols * SizeOf(cache.dtype);
  char* held = bytes_.Get(count * row_bytes);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(held + i * row_bytes, RowBytes(cache, src.i32()[i]), row_bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(RowBytes(cache, dst.i32()[i]), held + i * row_bytes, row_bytes);
  }
}

void CpuOps::ScatterRows(Tensor x, Tensor dst, Tensor out) {
  for (int64_t r = 0; r < x.rows; ++r) {
    std::memcpy(RowBytes(out, dst.i32()[r]), RowBytes(x, r), x.cols * SizeOf(x.dtype));
  }
}

// --- candidates ---

void CpuOps::TopKLogProbs(Tensor logits, int k, Tensor ids, Tensor log_probs) {
  if (k <= 0) return;
  for (int64_t r = 0; r < logits.rows; ++r) {
    const float* x = Row(logits, r);
    int32_t* id = ids.i32() + r * ids.stride;
    float* value = Row(log_probs, r);
    float max, sum;
    kernels_.softmax_stats(x, logits.cols, &max, &sum);
    // The best so far, in order; a later equal one ranks behind, so only a strictly greater one
    // enters a full list.
    int held = 0;
    int64_t i = 0;
    while (true) {
      if (held == k) i = kernels_.find_greater(x, i, logits.cols, value[k - 1]);
      if (i >= logits.cols) break;
      const float candidate = x[i];
      if (candidate == candidate) {
        int at = held < k ? held++ : k - 1;
        for (; at > 0 && candidate > value[at - 1]; --at) {
          value[at] = value[at - 1];
          id[at] = id[at - 1];
        }
        value[at] = candidate;
        id[at] = static_cast<int32_t>(i);
      }
      ++i;
    }
    const float log_sum = static_cast<float>(std::log(static_cast<double>(sum)));
    for (int j = 0; j < held; ++j) value[j] = (value[j] - max) - log_sum;
    for (int j = held; j < k; ++j) {
      id[j] = -1;
      value[j] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace coppice::kernels::cpu

namespace coppice::kernels {
namespace {

class ThreadGroup : public CpuGroup {
 public:
  ThreadGroup(const cpu::KernelTable* kernels, int ranks) : kernels_(kernels), collective_(ranks) {}
  int ranks() const override { return collective_.ranks(); }
  std::unique_ptr<Ops> CreateOps(int rank) override {
    assert(rank >= 0 && rank < ranks());
    return std::make_unique<cpu::CpuOps>(kernels_, &collective_, rank);
  }

 private:
  const cpu::KernelTable* kernels_;
  cpu::HostCollective collective_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CpuGroup>> CreateCpuGroup(int ranks) {
  if (ranks < 1 || kSegments % ranks != 0) {
    return absl::InvalidArgumentError(absl::StrCat(ranks, " ranks cannot share ", kSegments,
                                                   " segments evenly; use 1, 2, 4 or 8"));
  }
  absl::StatusOr<const cpu::KernelTable*> kernels = cpu::SelectKernels();
  if (!kernels.ok()) return kernels.status();
  return std::make_unique<ThreadGroup>(*kernels, ranks);
}

}  // namespace coppice::kernels
