#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/cuda/mla_problem.h"

namespace coppice::mla {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr int32_t kWildEntry = 2100000000;  // FlashMLA's tests poison unused table entries alike

__host__ __device__ uint64_t Mix(uint64_t x) {
  x *= 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Uniform with mean 0 and variance 1.
__host__ __device__ float Uniform(uint64_t key) {
  return (static_cast<float>(Mix(key) & 0xFFFFFF) / 16777216.0f - 0.5f) * 3.4641f;
}

__device__ void WriteRow(uint8_t* row, int cache_type, int column, float value, float scale) {
  if (cache_type == COPPICE_MLA_BF16) {
    reinterpret_cast<__nv_bfloat16*>(row)[column] = __float2bfloat16(value);
  } else if (column < COPPICE_MLA_LATENT) {
    row[column] = __nv_cvt_float_to_fp8(value / scale, __NV_SATFINITE, __NV_E4M3);
    if (column == 0) *reinterpret_cast<float*>(row + 512) = scale;
  } else {
    reinterpret_cast<__nv_bfloat16*>(row + 528)[column - COPPICE_MLA_LATENT] =
        __float2bfloat16(value);
  }
}

// One block per position of a request.
__global__ void FillCacheKernel(uint8_t* cache, const int32_t* table, int64_t page_stride,
                                int page_size, int64_t row_bytes, int cache_type, uint64_t seed) {
  const int64_t t = blockIdx.x;
  uint8_t* row = cache + table[t / page_size] * page_stride + (t % page_size) * row_bytes;
  const float scale = 0.008f * (1 + 0.5f * Uniform(Mix(seed) + t) / 1.7321f);
  for (int c = threadIdx.x; c < COPPICE_MLA_ROW; c += blockDim.x) {
    WriteRow(row, cache_type, c, Uniform(Mix(seed) + t * COPPICE_MLA_ROW + c), scale);
  }
}

__global__ void SetRowKernel(uint8_t* row, int cache_type, const float* values) {
  __shared__ float largest;
  if (threadIdx.x == 0) {
    largest = 1e-6f;
    for (int c = 0; c < COPPICE_MLA_LATENT; ++c) largest = fmaxf(largest, fabsf(values[c]));
  }
  __syncthreads();
  for (int c = threadIdx.x; c < COPPICE_MLA_ROW; c += blockDim.x) {
    WriteRow(row, cache_type, c, values[c], largest / 448);
  }
}

// Live nodes' queries; the others stay NaN.
__global__ void FillQueryKernel(__nv_bfloat16* query, const int32_t* counts, int nodes, int heads,
                                uint64_t seed) {
  const int node = blockIdx.x % nodes;
  const int request = blockIdx.x / nodes;
  if (node >= counts[request]) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * heads * COPPICE_MLA_ROW;
  for (int c = threadIdx.x; c < heads * COPPICE_MLA_ROW; c += blockDim.x) {
    query[first + c] = __float2bfloat16(Uniform(Mix(seed) + 77 + first + c));
  }
}

size_t OutputBytes(const coppice_mla_shape& s) {
  return static_cast<size_t>(s.batch) * s.nodes * s.heads * COPPICE_MLA_LATENT * 2;
}

size_t LseBytes(const coppice_mla_shape& s) {
  return static_cast<size_t>(s.batch) * s.nodes * s.heads * sizeof(float);
}

}  // namespace

std::vector<uint64_t> TreeWords(TreeKind kind, int nodes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> words(nodes);
  for (int i = 0; i < nodes; ++i) {
    words[i] = uint64_t{1} << i;
    if (i == 0) continue;
    const uint64_t parent = kind == TreeKind::kChain      ? i - 1
                            : kind == TreeKind::kRootOnly ? 0
                                                          : random() % i;
    words[i] |= words[parent];
  }
  return words;
}

void* Problem::Allocate(size_t bytes) {
  void* data = nullptr;
  const size_t size = std::max<size_t>(bytes, 16);
  if (!Check(options_.pooled ? cudaMallocAsync(&data, size, nullptr) : cudaMalloc(&data, size),
             "allocating")) {
    return nullptr;
  }
  allocations_.push_back(data);
  cudaMemset(data, 0xFF, size);
  return data;
}

bool Problem::Check(int status, const char* what) {
  if (status == cudaSuccess) return true;
  if (error_.empty()) {
    error_ = std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(status));
  }
  return false;
}

Problem::Problem(const ProblemOptions& options) : options_(options) {
  cudaMemPool_t pool = nullptr;
  if (options_.pooled && cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess) {
    uint64_t keep_all = UINT64_MAX;  // freed memory stays in the pool
    cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_all);
  }
  const coppice_mla_shape& s = options_.shape;
  if (options_.node_counts.empty()) options_.node_counts.assign(s.batch, s.nodes);
  int64_t entries = 1;
  std::vector<int64_t> request_pages(s.batch);
  for (int b = 0; b < s.batch; ++b) {
    const int64_t length =
        options_.node_counts[b] > 0 ? options_.contexts[b] + options_.node_counts[b] : 0;
    request_pages[b] = (length + s.page_size - 1) / s.page_size;
    pages_ += request_pages[b];
    entries = std::max(entries, request_pages[b]);
  }
  pages_ += options_.foreign_pages;
  table_stride_ = entries + options_.table_padding;
  page_stride_ = s.page_size * row_bytes() + options_.page_gap;

  std::vector<int32_t> order(pages_);
  std::iota(order.begin(), order.end(), 0);
  if (options_.permuted) {
    std::shuffle(order.begin(), order.end(), std::mt19937_64(options_.seed));
  }
  table_.assign(s.batch * table_stride_, kWildEntry);
  size_t next = 0;
  for (int b = 0; b < s.batch; ++b) {
    for (int64_t p = 0; p < request_pages[b]; ++p) table_[b * table_stride_ + p] = order[next++];
  }

  device_table_ = static_cast<int32_t*>(Allocate(table_.size() * sizeof(int32_t)));
  device_contexts_ = static_cast<int32_t*>(Allocate(s.batch * sizeof(int32_t)));
  device_counts_ = static_cast<int32_t*>(Allocate(s.batch * sizeof(int32_t)));
  device_words_ = static_cast<uint64_t*>(Allocate(s.batch * s.nodes * sizeof(uint64_t)));
  query_ = Allocate(static_cast<size_t>(s.batch) * s.nodes * s.heads * COPPICE_MLA_ROW * 2);
  if (!error_.empty()) return;
  Check(cudaMemcpy(device_table_, table_.data(), table_.size() * sizeof(int32_t),
                   cudaMemcpyHostToDevice),
        "table");
  SetLengths(options_.contexts, options_.node_counts);
  std::vector<uint64_t> words;
  for (int b = 0; b < s.batch; ++b) {
    const std::vector<uint64_t> tree = TreeWords(options_.tree, s.nodes, options_.seed + b);
    words.insert(words.end(), tree.begin(), tree.end());
  }
  SetWords(words);
  FillQueryKernel<<<s.batch * s.nodes, 256>>>(static_cast<__nv_bfloat16*>(query_), device_counts_,
                                              s.nodes, s.heads, options_.seed);
  for (int i = 0; i < options_.caches; ++i) {
    caches_.push_back(static_cast<uint8_t*>(Allocate(pages_ * page_stride_)));
    outputs_.push_back(Allocate(OutputBytes(s) + kGuardBytes));
    lse_.push_back(static_cast<float*>(Allocate(LseBytes(s) + kGuardBytes)));
    if (!error_.empty()) return;
    for (int b = 0; b < s.batch; ++b) {
      const int64_t length =
          options_.node_counts[b] > 0 ? options_.contexts[b] + options_.node_counts[b] : 0;
      if (length == 0) continue;
      FillCacheKernel<<<length, 192>>>(caches_[i], device_table_ + b * table_stride_, page_stride_,
                                       s.page_size, row_bytes(), s.cache_type,
                                       options_.seed * 1000003 + i * 1009 + b);
    }
  }
  Check(cudaGetLastError(), "filling");
  if (coppice_mla_verify_workspace(&s, &workspace_bytes_) != COPPICE_MLA_OK) {
    error_ = coppice_mla_error();
    return;
  }
  workspace_ = static_cast<uint8_t*>(Allocate(workspace_bytes_ + kGuardBytes));
  Check(cudaDeviceSynchronize(), "filling");
}

Problem::~Problem() {
  for (void* data : allocations_) {
    if (options_.pooled) {
      cudaFreeAsync(data, nullptr);
    } else {
      cudaFree(data);
    }
  }
}

int64_t Problem::row_bytes() const {
  return options_.shape.cache_type == COPPICE_MLA_BF16 ? 1152 : 656;
}

int64_t Problem::live_positions() const {
  int64_t sum = 0;
  for (int b = 0; b < options_.shape.batch; ++b) {
    if (options_.node_counts[b] > 0) sum += options_.contexts[b] + options_.node_counts[b];
  }
  return sum;
}

coppice_mla_tensors Problem::tensors(int cache) const {
  coppice_mla_tensors t = {};
  t.query = query_;
  t.cache = caches_[cache];
  t.page_stride = page_stride_;
  t.page_table = device_table_;
  t.table_stride = table_stride_;
  t.context_lengths = device_contexts_;
  t.node_counts = device_counts_;
  t.ancestor_words = device_words_;
  t.output = outputs_[cache];
  t.lse = lse_[cache];
  t.workspace = workspace_;
  t.workspace_bytes = workspace_bytes_;
  return t;
}

uint8_t* Problem::Row(int request, int64_t position, int cache) const {
  const int page_size = options_.shape.page_size;
  return caches_[cache] + table_[request * table_stride_ + position / page_size] * page_stride_ +
         (position % page_size) * row_bytes();
}

void Problem::SetWords(const std::vector<uint64_t>& words) {
  words_ = words;
  Check(cudaMemcpy(device_words_, words.data(), words.size() * sizeof(uint64_t),
                   cudaMemcpyHostToDevice),
        "words");
}

void Problem::SetRow(int request, int64_t position, const std::vector<float>& values, int cache) {
  float* device = nullptr;
  cudaMalloc(&device, values.size() * sizeof(float));
  cudaMemcpy(device, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice);
  SetRowKernel<<<1, 192>>>(Row(request, position, cache), options_.shape.cache_type, device);
  Check(cudaDeviceSynchronize(), "SetRow");
  cudaFree(device);
}

void Problem::SetLengths(const std::vector<int32_t>& contexts,
                         const std::vector<int32_t>& node_counts) {
  options_.contexts = contexts;
  options_.node_counts = node_counts;
  const size_t bytes = contexts.size() * sizeof(int32_t);
  Check(cudaMemcpy(device_contexts_, contexts.data(), bytes, cudaMemcpyHostToDevice), "lengths");
  Check(cudaMemcpy(device_counts_, node_counts.data(), bytes, cudaMemcpyHostToDevice), "counts");
}

void Problem::PoisonOutputs(int cache) {
  cudaMemset(outputs_[cache], 0xFF, OutputBytes(options_.shape) + kGuardBytes);
  cudaMemset(lse_[cache], 0xFF, LseBytes(options_.shape) + kGuardBytes);
  cudaMemset(workspace_, 0xFF, workspace_bytes_ + kGuardBytes);
  Check(cudaDeviceSynchronize(), "poisoning");
}

std::string Problem::CheckUntouched(int cache) const {
  const coppice_mla_shape& s = options_.shape;
  std::vector<uint8_t> output(OutputBytes(s) + kGuardBytes), lse(LseBytes(s) + kGuardBytes),
      guard(kGuardBytes);
  cudaMemcpy(output.data(), outputs_[cache], output.size(), cudaMemcpyDeviceToHost);
  cudaMemcpy(lse.data(), lse_[cache], lse.size(), cudaMemcpyDeviceToHost);
  cudaMemcpy(guard.data(), workspace_ + workspace_bytes_, guard.size(), cudaMemcpyDeviceToHost);
  const auto poisoned = [](const std::vector<uint8_t>& bytes, size_t begin, size_t end) {
    return std::all_of(bytes.begin() + begin, bytes.begin() + end,
                       [](uint8_t byte) { return byte == 0xFF; });
  };
  if (!poisoned(output, OutputBytes(s), output.size())) return "written past the output";
  if (!poisoned(lse, LseBytes(s), lse.size())) return "written past the log-sum-exp";
  if (!poisoned(guard, 0, guard.size())) return "written past the workspace";
  for (int b = 0; b < s.batch; ++b) {
    const size_t begin = (static_cast<size_t>(b) * s.nodes + options_.node_counts[b]) * s.heads;
    const size_t end = static_cast<size_t>(b + 1) * s.nodes * s.heads;
    if (!poisoned(output, begin * COPPICE_MLA_LATENT * 2, end * COPPICE_MLA_LATENT * 2) ||
        !poisoned(lse, begin * sizeof(float), end * sizeof(float))) {
      return "request " + std::to_string(b) + ": a row past its " +
             std::to_string(options_.node_counts[b]) + " nodes was written";
    }
  }
  return "";
}

coppice_mla_status Problem::Schedule(coppice_stream_t stream) const {
  const coppice_mla_tensors t = tensors();
  return coppice_mla_verify_schedule(&options_.shape, &t, stream);
}

coppice_mla_status Problem::Run(coppice_stream_t stream, int cache) const {
  const coppice_mla_tensors t = tensors(cache);
  return coppice_mla_verify_run(&options_.shape, &t, stream);
}

}  // namespace coppice::mla
