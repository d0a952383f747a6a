// Expanded prefill against a double-precision reference of the same formula.  Keys and values are
// rounded to bf16 when they are rebuilt, as every implementation of the expanded form does; the
// reference rounds them too.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/mla_prefill.h"
#include "kernels/cuda/mla_problem.h"

namespace coppice::mla {
namespace {

constexpr float kScale = 2.5f / 13.86f;  // scores of unit-variance queries and keys spread by 2.5

__device__ float Uniform(uint64_t key) {
  key *= 0x9E3779B97F4A7C15ull;
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9ull;
  key ^= key >> 29;
  return (static_cast<float>(key & 0xFFFFFF) / 16777216.0f - 0.5f) * 3.4641f;
}

__global__ void FillKernel(__nv_bfloat16* to, size_t n, float scale, uint64_t seed) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += stride) {
    to[i] = __float2bfloat16(Uniform(seed * 1000003 + i) * scale);
  }
}

// One block per position, one thread per column of the head's keys (0 … 127) and values (128 …
// 255), rounded to bf16; the RoPE part follows.
__global__ void ExpandKernel(const coppice_mla_prefill_shape shape,
                             const coppice_mla_prefill_tensors t, int head, float* expanded) {
  __shared__ double latent[COPPICE_MLA_LATENT];
  const int position = blockIdx.x;
  const bool fp8 = shape.cache_type == COPPICE_MLA_FP8;
  const uint8_t* row = static_cast<const uint8_t*>(t.cache) +
                       t.page_table[position / shape.page_size] * t.page_stride +
                       position % shape.page_size * (fp8 ? 656 : 1152);
  for (int c = threadIdx.x; c < COPPICE_MLA_LATENT; c += blockDim.x) {
    if (fp8) {
      __nv_fp8_e4m3 value;
      value.__x = row[c];
      const float scaled = static_cast<float>(value) * *reinterpret_cast<const float*>(row + 512);
      latent[c] = __bfloat162float(__float2bfloat16(scaled));
    } else {
      latent[c] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[c]);
    }
  }
  __syncthreads();
  const __nv_bfloat16* weights =
      static_cast<const __nv_bfloat16*>(t.kv_b) +
      (static_cast<int64_t>(head) * 256 + threadIdx.x) * COPPICE_MLA_LATENT;
  double sum = 0;
  for (int c = 0; c < COPPICE_MLA_LATENT; ++c) sum += latent[c] * __bfloat162float(weights[c]);
  float* out = expanded + static_cast<int64_t>(position) * 320;
  out[threadIdx.x] = __bfloat162float(__float2bfloat16(static_cast<float>(sum)));
  if (threadIdx.x < 64) {
    const uint8_t* rope = row + (fp8 ? 528 : 1024);
    out[256 + threadIdx.x] =
        __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(rope)[threadIdx.x]);
  }
}

// One block of 128 threads per query: column by thread.
__global__ void ReferenceKernel(const coppice_mla_prefill_shape shape,
                                const coppice_mla_prefill_tensors t, int head, const int* queries,
                                const float* expanded, double* output, double* lse) {
  const int query = queries[blockIdx.x];
  const int64_t length = int64_t{*t.context_length} + query + 1;
  const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(t.query) +
                           (static_cast<int64_t>(query) * shape.heads + head) * COPPICE_MLA_QUERY;
  __shared__ double scores[128];
  __shared__ double maximum;
  double largest = -INFINITY, sum = 0, out = 0;
  for (int64_t first = 0; first < length; first += 128) {
    const int64_t key = first + threadIdx.x;
    double score = -INFINITY;
    if (key < length) {
      const float* k = expanded + key * 320;
      score = 0;
      for (int c = 0; c < 128; ++c) score += __bfloat162float(q[c]) * static_cast<double>(k[c]);
      for (int c = 0; c < 64; ++c) {
        score += __bfloat162float(q[128 + c]) * static_cast<double>(k[256 + c]);
      }
      score *= shape.softmax_scale;
    }
    scores[threadIdx.x] = score;
    __syncthreads();
    if (threadIdx.x == 0) {
      maximum = largest;
      for (int i = 0; i < 128; ++i) maximum = fmax(maximum, scores[i]);
    }
    __syncthreads();
    const double rescale = exp(largest - maximum);
    largest = maximum;
    sum *= rescale;
    out *= rescale;
    const double p = exp(scores[threadIdx.x] - largest);
    __syncthreads();
    scores[threadIdx.x] = p;
    __syncthreads();
    for (int i = 0; i < 128 && first + i < length; ++i) {
      sum += scores[i];
      out += scores[i] * expanded[(first + i) * 320 + 128 + threadIdx.x];
    }
    __syncthreads();
  }
  output[static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x] = out / sum;
  if (threadIdx.x == 0) lse[blockIdx.x] = largest + log(sum);
}

struct Case {
  int tokens;
  int count;
  int context;
  int heads = 8;
  int page = 64;
  coppice_mla_cache_type type = COPPICE_MLA_BF16;
  int spare_context = 0;  // max_context beyond the context
};

std::string Where(const Case& c) {
  return std::to_string(c.count) + " of " + std::to_string(c.tokens) + " tokens on " +
         std::to_string(c.context) + ", heads " + std::to_string(c.heads) + ", page " +
         std::to_string(c.page) + (c.type == COPPICE_MLA_FP8 ? ", fp8" : "");
}

class Prefill {
 public:
  explicit Prefill(const Case& c) : case_(c), problem_(Options(c)) {
    shape_.tokens = c.tokens;
    shape_.heads = c.heads;
    shape_.page_size = c.page;
    shape_.max_context = c.context + c.spare_context;
    shape_.cache_type = c.type;
    shape_.softmax_scale = kScale;
    const size_t rows = static_cast<size_t>(c.tokens) * c.heads;
    const coppice_mla_tensors paged = problem_.tensors();
    tensors_.query = Allocate(rows * COPPICE_MLA_QUERY * 2);
    tensors_.kv_b = Allocate(static_cast<size_t>(c.heads) * 256 * COPPICE_MLA_LATENT * 2);
    tensors_.cache = paged.cache;
    tensors_.page_stride = paged.page_stride;
    tensors_.page_table = paged.page_table;
    int* lengths = static_cast<int*>(Allocate(8));
    const int host[2] = {c.context, c.count};
    cudaMemcpy(lengths, host, 8, cudaMemcpyHostToDevice);
    tensors_.context_length = lengths;
    tensors_.token_count = lengths + 1;
    output_bytes_ = rows * COPPICE_MLA_HEAD * 2;
    tensors_.output = Allocate(output_bytes_ + kGuard);
    tensors_.lse = static_cast<float*>(Allocate(rows * sizeof(float)));
    // Queries past the live ones stay NaN.
    FillKernel<<<256, 256>>>(static_cast<__nv_bfloat16*>(const_cast<void*>(tensors_.query)),
                             static_cast<size_t>(c.count) * c.heads * COPPICE_MLA_QUERY, 1, 5);
    FillKernel<<<256, 256>>>(static_cast<__nv_bfloat16*>(const_cast<void*>(tensors_.kv_b)),
                             static_cast<size_t>(c.heads) * 256 * COPPICE_MLA_LATENT,
                             1 / std::sqrt(512.f), 6);
  }
  ~Prefill() {
    for (void* data : allocations_) cudaFree(data);
  }

  void RunAndCheck(int most_queries) {
    const std::string where = Where(case_);
    ASSERT_EQ(problem_.error(), "") << where;
    size_t bytes = 0;
    ASSERT_EQ(coppice_mla_prefill_workspace(&shape_, &bytes), COPPICE_MLA_OK)
        << coppice_mla_prefill_error();
    uint8_t* workspace = static_cast<uint8_t*>(Allocate(bytes + kGuard));
    tensors_.workspace = workspace;
    tensors_.workspace_bytes = bytes;
    ASSERT_EQ(coppice_mla_prefill_run(&shape_, &tensors_, nullptr), COPPICE_MLA_OK)
        << where << ": " << coppice_mla_prefill_error();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << where;

    // What lies past the live rows is as it was: 0xFF.
    std::vector<uint8_t> output(output_bytes_ + kGuard), guard(kGuard);
    cudaMemcpy(output.data(), tensors_.output, output.size(), cudaMemcpyDeviceToHost);
    cudaMemcpy(guard.data(), workspace + bytes, kGuard, cudaMemcpyDeviceToHost);
    const auto poisoned = [](uint8_t byte) { return byte == 0xFF; };
    const size_t live = static_cast<size_t>(case_.count) * case_.heads * COPPICE_MLA_HEAD * 2;
    EXPECT_TRUE(std::all_of(output.begin() + live, output.end(), poisoned)) << where;
    EXPECT_TRUE(std::all_of(guard.begin(), guard.end(), poisoned)) << where;

    std::vector<int> queries;
    const int n = std::min(most_queries, case_.count);
    for (int i = 0; i < n; ++i) {
      queries.push_back(n == 1 ? case_.count - 1
                               : static_cast<int>(int64_t{i} * (case_.count - 1) / (n - 1)));
    }
    if (n == 0) return;
    const int positions = case_.context + case_.count;
    float* expanded = static_cast<float*>(Allocate(static_cast<size_t>(positions) * 320 * 4));
    int* device_queries = static_cast<int*>(Allocate(n * sizeof(int)));
    double* want = static_cast<double*>(Allocate(n * 128 * sizeof(double)));
    double* want_lse = static_cast<double*>(Allocate(n * sizeof(double)));
    cudaMemcpy(device_queries, queries.data(), n * sizeof(int), cudaMemcpyHostToDevice);
    std::vector<float> lse(static_cast<size_t>(case_.tokens) * case_.heads);
    cudaMemcpy(lse.data(), tensors_.lse, lse.size() * sizeof(float), cudaMemcpyDeviceToHost);
    double difference = 0, norm = 0;
    for (int head = 0; head<case_.heads; head += case_.heads> 8 ? 21 : case_.heads > 2 ? 3 : 1) {
      ExpandKernel<<<positions, 256>>>(shape_, tensors_, head, expanded);
      ReferenceKernel<<<n, 128>>>(shape_, tensors_, head, device_queries, expanded, want, want_lse);
      std::vector<double> reference(n * 128), reference_lse(n);
      ASSERT_EQ(cudaMemcpy(reference.data(), want, reference.size() * 8, cudaMemcpyDeviceToHost),
                cudaSuccess);
      cudaMemcpy(reference_lse.data(), want_lse, n * 8, cudaMemcpyDeviceToHost);
      for (int i = 0; i < n; ++i) {
        const size_t row = static_cast<size_t>(queries[i]) * case_.heads + head;
        double row_difference = 0, row_norm = 0;
        for (int c = 0; c < 128; ++c) {
          uint16_t bits;
          std::memcpy(&bits, &output[(row * 128 + c) * 2], 2);
          const uint32_t wide = static_cast<uint32_t>(bits) << 16;
          float got;
          std::memcpy(&got, &wide, 4);
          const double w = reference[i * 128 + c];
          row_difference += (got - w) * (got - w);
          row_norm += w * w;
        }
        difference += row_difference;
        norm += row_norm;
        EXPECT_TRUE(std::sqrt(row_difference / row_norm) <= 5e-3)
            << where << ": query " << queries[i] << " head " << head << ": "
            << std::sqrt(row_difference / row_norm);
        EXPECT_TRUE(std::abs(lse[row] - reference_lse[i]) <= 1e-3)
            << where << ": query " << queries[i] << " head " << head << ": log-sum-exp " << lse[row]
            << " for " << reference_lse[i];
        if (testing::Test::HasFailure()) return;
      }
    }
    EXPECT_TRUE(std::sqrt(difference / norm) <= 2.5e-3)
        << where << ": relative error " << std::sqrt(difference / norm);
  }

 private:
  static constexpr size_t kGuard = 4096;

  static ProblemOptions Options(const Case& c) {
    ProblemOptions o;
    o.shape.batch = 1;
    o.shape.nodes = 1;
    o.shape.heads = 1;
    o.shape.page_size = c.page;
    o.shape.cache_type = c.type;
    o.shape.instance = COPPICE_MLA_COMMON;
    o.shape.softmax_scale = 1;
    o.contexts = {std::max(0, c.context + c.count - 1)};
    o.table_padding = 7;
    return o;
  }

  void* Allocate(size_t bytes) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, bytes), cudaSuccess) << bytes;
    allocations_.push_back(data);
    cudaMemset(data, 0xFF, bytes);
    return data;
  }

  Case case_;
  Problem problem_;
  coppice_mla_prefill_shape shape_ = {};
  coppice_mla_prefill_tensors tensors_ = {};
  size_t output_bytes_ = 0;
  std::vector<void*> allocations_;
};

TEST(MlaPrefill, SmallGrid) {
  SKIP_WITHOUT_GPU();
  for (const Case& c : {Case{16, 16, 0, 2}, Case{16, 9, 100, 2, 1}, Case{130, 130, 70, 1, 16}}) {
    Prefill prefill(c);
    ASSERT_NO_FATAL_FAILURE(prefill.RunAndCheck(16));
  }
}

TEST(MlaPrefill, ChunksAndContexts) {
  SKIP_WITHOUT_GPU();
  const int kPages[] = {1, 2, 4, 8, 16, 32, 64};
  int turn = 0;
  for (int tokens : {1, 15, 16, 17, 63, 64, 65, 100, 128, 129, 300, 1000}) {
    for (int context : {0, 1, 63, 64, 65, 127, 1000, 5000}) {
      Prefill prefill(Case{tokens, tokens, context, turn % 3 == 0 ? 3 : 8, kPages[turn % 7]});
      ++turn;
      ASSERT_NO_FATAL_FAILURE(prefill.RunAndCheck(40));
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(MlaPrefill, FewerTokensAndShorterContextsThanTheShape) {
  SKIP_WITHOUT_GPU();
  for (int count : {0, 1, 64, 127, 128, 200, 511}) {
    for (int spare : {0, 70, 30000}) {
      Case c{512, count, 777};
      c.spare_context = spare;
      Prefill prefill(c);
      ASSERT_NO_FATAL_FAILURE(prefill.RunAndCheck(40));
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(MlaPrefill, Fp8) {
  SKIP_WITHOUT_GPU();
  for (int page : {1, 64}) {
    for (int tokens : {16, 200}) {
      Case c{tokens, tokens, 1500, 8, page, COPPICE_MLA_FP8};
      Prefill prefill(c);
      ASSERT_NO_FATAL_FAILURE(prefill.RunAndCheck(40));
    }
  }
}

TEST(MlaPrefill, LongContexts) {
  SKIP_WITHOUT_GPU();
  // 64 heads: the context takes more than one slab of rebuilt keys.
  for (const Case& c : {Case{2048, 2048, 32768}, Case{64, 64, 40000, 64}, Case{256, 200, 20000, 64},
                        Case{16, 16, 200000}}) {
    Prefill prefill(c);
    ASSERT_NO_FATAL_FAILURE(prefill.RunAndCheck(6));
    ASSERT_FALSE(HasFailure());
  }
}

TEST(MlaPrefillArguments, AreChecked) {
  coppice_mla_prefill_shape good = {};
  good.tokens = 128;
  good.heads = 8;
  good.page_size = 64;
  good.max_context = 1000;
  good.softmax_scale = 0.1f;
  coppice_mla_prefill_tensors tensors = {};
  const auto address = [](uintptr_t i) { return reinterpret_cast<void*>(i << 20); };
  tensors.query = address(1);
  tensors.kv_b = address(2);
  tensors.cache = address(3);
  tensors.page_stride = 64 * 1152;
  tensors.page_table = static_cast<int32_t*>(address(4));
  tensors.context_length = static_cast<int32_t*>(address(5));
  tensors.token_count = static_cast<int32_t*>(address(6));
  tensors.output = address(7);
  tensors.workspace = address(8);
  const auto refused = [&](const coppice_mla_prefill_shape& s, const coppice_mla_prefill_tensors& t,
                           const std::string& culprit) {
    EXPECT_EQ(coppice_mla_prefill_run(&s, &t, nullptr), COPPICE_MLA_INVALID_ARGUMENT) << culprit;
    EXPECT_THAT(coppice_mla_prefill_error(), testing::HasSubstr(culprit));
  };
  const auto shape = [&](auto change, const std::string& culprit) {
    coppice_mla_prefill_shape s = good;
    change(s);
    refused(s, tensors, culprit);
  };
  const auto tensor = [&](auto change, const std::string& culprit) {
    coppice_mla_prefill_tensors t = tensors;
    change(t);
    refused(good, t, culprit);
  };
  for (int tokens : {0, 2049}) shape([&](auto& s) { s.tokens = tokens; }, "tokens");
  for (int heads : {0, 65}) shape([&](auto& s) { s.heads = heads; }, "heads");
  for (int page : {0, 3, 128}) shape([&](auto& s) { s.page_size = page; }, "page_size");
  for (int context : {-1, 262144}) shape([&](auto& s) { s.max_context = context; }, "max_context");
  shape([](auto& s) { s.cache_type = static_cast<coppice_mla_cache_type>(9); }, "cache_type");
  shape([](auto& s) { s.softmax_scale = 0; }, "softmax_scale");
  tensor([](auto& t) { t.query = nullptr; }, "query");
  tensor([](auto& t) { t.kv_b = nullptr; }, "kv_b");
  tensor([&](auto& t) { t.cache = reinterpret_cast<void*>(0x100008); }, "cache");
  tensor([&](auto& t) { t.workspace = nullptr; }, "workspace");
  tensor([](auto& t) { t.page_stride -= 16; }, "page_stride");
  if (HaveGpu()) tensor([](auto& t) { t.workspace_bytes = 1000; }, "workspace_bytes");
  size_t bytes = 0;
  EXPECT_EQ(coppice_mla_prefill_workspace(nullptr, &bytes), COPPICE_MLA_INVALID_ARGUMENT);
  EXPECT_EQ(coppice_mla_prefill_workspace(&good, nullptr), COPPICE_MLA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace coppice::mla
