#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cuda/mla_reference.h"

namespace coppice::mla {
namespace {

constexpr int kChunk = 512;    // positions per block
constexpr int kThreads = 256;  // two value columns each
constexpr int kWarps = kThreads / 32;

struct Arguments {
  coppice_mla_shape shape;
  coppice_mla_tensors tensors;
  const float* weights;
  int64_t weights_stride;
  int chunks;
};

__device__ const uint8_t* CacheRow(const Arguments& a, int request, int64_t position) {
  const int64_t row_bytes = a.shape.cache_type == COPPICE_MLA_BF16 ? 1152 : 656;
  const int64_t page =
      a.tensors.page_table[request * a.tensors.table_stride + position / a.shape.page_size];
  return static_cast<const uint8_t*>(a.tensors.cache) + page * a.tensors.page_stride +
         (position % a.shape.page_size) * row_bytes;
}

__device__ double CacheValue(const Arguments& a, const uint8_t* row, int column) {
  if (a.shape.cache_type == COPPICE_MLA_BF16) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[column]);
  }
  if (column >= COPPICE_MLA_LATENT) {
    return __bfloat162float(
        reinterpret_cast<const __nv_bfloat16*>(row + 528)[column - COPPICE_MLA_LATENT]);
  }
  __nv_fp8_e4m3 value;
  value.__x = row[column];
  return static_cast<double>(static_cast<float>(value)) *
         *reinterpret_cast<const float*>(row + 512);
}

// Unnormalised output, maximum and sum of one chunk of positions for one row.
__global__ void __launch_bounds__(kThreads)
    ChunkKernel(Arguments a, const RowId* rows, double* partial, double* maxima, double* sums) {
  const RowId id = rows[blockIdx.y];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t context = a.tensors.context_lengths[id.request];
  const int64_t length = context + a.tensors.node_counts[id.request];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t end = min(begin + kChunk, length);
  const int64_t node = static_cast<int64_t>(id.request) * a.shape.nodes + id.node;
  const uint64_t word = a.tensors.ancestor_words[node];
  const __nv_bfloat16* query = static_cast<const __nv_bfloat16*>(a.tensors.query) +
                               (node * a.shape.heads + id.head) * COPPICE_MLA_ROW;
  __shared__ double scores[kChunk];
  __shared__ double maximum;
  for (int64_t t = begin + warp; t < end; t += kWarps) {
    double weight = 1;
    if (t >= context && !(word >> (t - context) & 1)) weight = 0;
    if (a.weights != nullptr) weight *= a.weights[id.request * a.weights_stride + t];
    double sum = 0;
    if (weight > 0) {
      const uint8_t* row = CacheRow(a, id.request, t);
      for (int c = lane; c < COPPICE_MLA_ROW; c += 32) {
        sum += static_cast<double>(__bfloat162float(query[c])) * CacheValue(a, row, c);
      }
      for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
      sum = sum * a.shape.softmax_scale + log(weight);
    } else {
      sum = -INFINITY;
    }
    if (lane == 0) scores[t - begin] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double m = -INFINITY;
    for (int64_t t = begin; t < end; ++t) m = fmax(m, scores[t - begin]);
    maximum = m;
  }
  __syncthreads();
  const double m = maximum;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    scores[t - begin] = scores[t - begin] == -INFINITY ? 0 : exp(scores[t - begin] - m);
  }
  __syncthreads();
  double sum = 0;
  double out[2] = {0, 0};
  for (int64_t t = begin; t < end; ++t) {
    const double p = scores[t - begin];
    if (p == 0) continue;  // an invisible position's values may be anything
    const uint8_t* row = CacheRow(a, id.request, t);
    sum += p;
    for (int i = 0; i < 2; ++i) out[i] += p * CacheValue(a, row, threadIdx.x + i * kThreads);
  }
  const int64_t slot = static_cast<int64_t>(blockIdx.y) * a.chunks + blockIdx.x;
  for (int i = 0; i < 2; ++i) {
    partial[slot * COPPICE_MLA_LATENT + threadIdx.x + i * kThreads] = out[i];
  }
  if (threadIdx.x == 0) {
    maxima[slot] = m;
    sums[slot] = sum;
  }
}

// Adds a row's chunks up.
__global__ void __launch_bounds__(COPPICE_MLA_LATENT)
    MergeKernel(int chunks, const double* partial, const double* maxima, const double* sums,
                double* output, double* lse) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * chunks;
  double m = -INFINITY;
  for (int c = 0; c < chunks; ++c) m = fmax(m, maxima[first + c]);
  double sum = 0;
  double out = 0;
  for (int c = 0; c < chunks; ++c) {
    if (maxima[first + c] == -INFINITY) continue;
    const double scale = exp(maxima[first + c] - m);
    sum += scale * sums[first + c];
    out += scale * partial[(first + c) * COPPICE_MLA_LATENT + threadIdx.x];
  }
  output[static_cast<int64_t>(blockIdx.x) * COPPICE_MLA_LATENT + threadIdx.x] =
      sum > 0 ? out / sum : 0;
  if (threadIdx.x == 0) lse[blockIdx.x] = sum > 0 ? m + log(sum) : -INFINITY;
}

__global__ void CompareKernel(Arguments a, const RowId* rows, int count, const double* output,
                              const double* lse, RowError* errors) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const RowId id = rows[i];
  const int64_t row =
      (static_cast<int64_t>(id.request) * a.shape.nodes + id.node) * a.shape.heads + id.head;
  const __nv_bfloat16* got =
      static_cast<const __nv_bfloat16*>(a.tensors.output) + row * COPPICE_MLA_LATENT;
  RowError error = {0, 0, 0, lse[i]};
  for (int c = 0; c < COPPICE_MLA_LATENT; ++c) {
    const double want = output[static_cast<int64_t>(i) * COPPICE_MLA_LATENT + c];
    const double difference = static_cast<double>(__bfloat162float(got[c])) - want;
    error.difference_squared += difference * difference;
    error.reference_squared += want * want;
  }
  if (a.tensors.lse != nullptr) {
    const double difference = fabs(a.tensors.lse[row] - lse[i]);
    error.lse_difference = a.tensors.lse[row] == -INFINITY && lse[i] == -INFINITY ? 0 : difference;
  }
  errors[i] = error;
}

// Device memory of a scope.
struct Buffer {
  void* data = nullptr;
  ~Buffer() { cudaFree(data); }
};

#define COPPICE_RETURN_IF_CUDA_ERROR(call)                  \
  do {                                                      \
    const cudaError_t error_of_call = (call);               \
    if (error_of_call != cudaSuccess) return error_of_call; \
  } while (0)

cudaError_t Run(const Arguments& arguments, const std::vector<RowId>& rows,
                std::vector<double>* outputs, std::vector<double>* lse,
                std::vector<RowError>* errors) {
  Arguments a = arguments;
  std::vector<int32_t> contexts(a.shape.batch), counts(a.shape.batch);
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMemcpy(contexts.data(), a.tensors.context_lengths,
                                          contexts.size() * sizeof(int32_t), cudaMemcpyDefault));
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMemcpy(counts.data(), a.tensors.node_counts,
                                          counts.size() * sizeof(int32_t), cudaMemcpyDefault));
  int64_t longest = 1;
  for (const RowId& id : rows) {
    longest = std::max<int64_t>(longest, int64_t{contexts[id.request]} + counts[id.request]);
  }
  a.chunks = static_cast<int>((longest + kChunk - 1) / kChunk);
  // A grid's height is at most 65,535; the partial results stay below 512 MB.
  const size_t row_bytes = static_cast<size_t>(a.chunks) * COPPICE_MLA_LATENT * sizeof(double);
  const size_t at_once = std::clamp<size_t>((512u << 20) / row_bytes, 1, 4096);
  const size_t rows_at_once = std::min(at_once, std::max<size_t>(rows.size(), 1));
  Buffer ids, partial, maxima, sums, output, row_lse, row_errors;
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMalloc(&ids.data, rows_at_once * sizeof(RowId)));
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMalloc(&partial.data, rows_at_once * row_bytes));
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMalloc(&maxima.data, rows_at_once * a.chunks * sizeof(double)));
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMalloc(&sums.data, rows_at_once * a.chunks * sizeof(double)));
  COPPICE_RETURN_IF_CUDA_ERROR(
      cudaMalloc(&output.data, rows_at_once * COPPICE_MLA_LATENT * sizeof(double)));
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMalloc(&row_lse.data, rows_at_once * sizeof(double)));
  COPPICE_RETURN_IF_CUDA_ERROR(cudaMalloc(&row_errors.data, rows_at_once * sizeof(RowError)));
  if (outputs != nullptr) outputs->resize(rows.size() * COPPICE_MLA_LATENT);
  if (lse != nullptr) lse->resize(rows.size());
  if (errors != nullptr) errors->resize(rows.size());
  for (size_t first = 0; first < rows.size(); first += rows_at_once) {
    const size_t n = std::min(rows_at_once, rows.size() - first);
    COPPICE_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(ids.data, &rows[first], n * sizeof(RowId), cudaMemcpyHostToDevice));
    ChunkKernel<<<dim3(a.chunks, n), kThreads>>>(
        a, static_cast<RowId*>(ids.data), static_cast<double*>(partial.data),
        static_cast<double*>(maxima.data), static_cast<double*>(sums.data));
    MergeKernel<<<n, COPPICE_MLA_LATENT>>>(
        a.chunks, static_cast<double*>(partial.data), static_cast<double*>(maxima.data),
        static_cast<double*>(sums.data), static_cast<double*>(output.data),
        static_cast<double*>(row_lse.data));
    if (errors != nullptr) {
      CompareKernel<<<(n + 63) / 64, 64>>>(
          a, static_cast<RowId*>(ids.data), n, static_cast<double*>(output.data),
          static_cast<double*>(row_lse.data), static_cast<RowError*>(row_errors.data));
    }
    COPPICE_RETURN_IF_CUDA_ERROR(cudaGetLastError());
    COPPICE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
    if (outputs != nullptr) {
      COPPICE_RETURN_IF_CUDA_ERROR(cudaMemcpy(&(*outputs)[first * COPPICE_MLA_LATENT], output.data,
                                              n * COPPICE_MLA_LATENT * sizeof(double),
                                              cudaMemcpyDeviceToHost));
    }
    if (lse != nullptr) {
      COPPICE_RETURN_IF_CUDA_ERROR(
          cudaMemcpy(&(*lse)[first], row_lse.data, n * sizeof(double), cudaMemcpyDeviceToHost));
    }
    if (errors != nullptr) {
      COPPICE_RETURN_IF_CUDA_ERROR(cudaMemcpy(&(*errors)[first], row_errors.data,
                                              n * sizeof(RowError), cudaMemcpyDeviceToHost));
    }
  }
  return cudaSuccess;
}

}  // namespace

std::vector<RowId> LiveRows(const coppice_mla_shape& shape,
                            const std::vector<int32_t>& node_counts) {
  std::vector<RowId> rows;
  for (int b = 0; b < shape.batch; ++b) {
    for (int i = 0; i < node_counts[b]; ++i) {
      for (int h = 0; h < shape.heads; ++h) rows.push_back({b, i, h});
    }
  }
  return rows;
}

cudaError_t CompareWithReference(const coppice_mla_shape& shape, const coppice_mla_tensors& tensors,
                                 const std::vector<RowId>& rows, const float* weights,
                                 int64_t weights_stride, std::vector<RowError>* errors) {
  return Run({shape, tensors, weights, weights_stride, 0}, rows, nullptr, nullptr, errors);
}

cudaError_t ReferenceAttention(const coppice_mla_shape& shape, const coppice_mla_tensors& tensors,
                               const std::vector<RowId>& rows, std::vector<double>* outputs,
                               std::vector<double>* lse) {
  return Run({shape, tensors, nullptr, 0, 0}, rows, outputs, lse, nullptr);
}

double RelativeError(const std::vector<RowError>& errors) {
  double difference = 0;
  double reference = 0;
  for (const RowError& e : errors) {
    difference += e.difference_squared;
    reference += e.reference_squared;
  }
  return difference == 0 ? 0 : std::sqrt(difference / reference);
}

}  // namespace coppice::mla
