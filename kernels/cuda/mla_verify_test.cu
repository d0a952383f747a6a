// Verify attention against a double-precision reference, on every instance and cache type that this
// device runs, and the interface's answers to bad input, which need no device.
// docs/kernels_tests.md says which reported problem of other kernels each test stands for.
//
// For compute-sanitizer: --gtest_filter='*SmallGrid*'.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/mla_problem.h"
#include "kernels/cuda/mla_reference.h"
#include "kernels/cuda/mla_verify.h"

namespace coppice::mla {
namespace {

ProblemOptions Options(coppice_mla_cache_type type, coppice_mla_instance instance, int nodes,
                       std::vector<int32_t> contexts, int page_size = 64, int heads = 8) {
  ProblemOptions o;
  o.shape.batch = static_cast<int>(contexts.size());
  o.shape.nodes = nodes;
  o.shape.heads = heads;
  o.shape.page_size = page_size;
  o.shape.cache_type = type;
  o.shape.instance = instance;
  o.shape.softmax_scale = kProblemScale;
  o.contexts = std::move(contexts);
  return o;
}

// What the reference must agree to: the whole within 2e-3, each row within twice that, log-sum-exp
// within 1e-3.  Rounding the output to bf16 takes 1.67e-3 of it on average and up to 2e-3 in a
// single row: a whole of few rows gets 2.5e-3.
void ExpectClose(const std::vector<RowId>& rows, const std::vector<RowError>& errors,
                 const std::string& where) {
  const double whole = RelativeError(errors);
  EXPECT_TRUE(whole <= (rows.size() < 64 ? 2.5e-3 : 2e-3)) << where << ": relative error " << whole;
  int reported = 0;
  for (size_t i = 0; i < rows.size() && reported < 5; ++i) {
    const RowError& e = errors[i];
    const double row =
        e.difference_squared == 0 ? 0 : std::sqrt(e.difference_squared / e.reference_squared);
    if (row <= 4e-3 && e.lse_difference <= 1e-3) continue;
    ++reported;
    ADD_FAILURE() << where << ": request " << rows[i].request << " node " << rows[i].node
                  << " head " << rows[i].head << ": relative error " << row
                  << ", log-sum-exp off by " << e.lse_difference << " from " << e.lse;
  }
}

// Up to `limit` of the live rows, evenly spread, always the first and the last.
std::vector<RowId> SomeRows(const Problem& problem, size_t limit) {
  const std::vector<RowId> all = LiveRows(problem.shape(), problem.node_counts());
  if (all.size() <= limit) return all;
  std::vector<RowId> rows;
  for (size_t i = 0; i < limit; ++i) rows.push_back(all[i * (all.size() - 1) / (limit - 1)]);
  return rows;
}

void ExpectMatchesReference(Problem& problem, const std::string& where, size_t limit = 20000,
                            int cache = 0) {
  const std::vector<RowId> rows = SomeRows(problem, limit);
  std::vector<RowError> errors;
  ASSERT_EQ(
      CompareWithReference(problem.shape(), problem.tensors(cache), rows, nullptr, 0, &errors),
      cudaSuccess)
      << where;
  ExpectClose(rows, errors, where);
}

// Poisons, runs, checks against the reference and that nothing else was written.
void RunAndCheck(Problem& problem, const std::string& where, size_t limit = 20000) {
  ASSERT_EQ(problem.error(), "") << where;
  problem.PoisonOutputs();
  ASSERT_EQ(problem.Schedule(), COPPICE_MLA_OK) << where << ": " << coppice_mla_error();
  ASSERT_EQ(problem.Run(), COPPICE_MLA_OK) << where << ": " << coppice_mla_error();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << where;
  ExpectMatchesReference(problem, where, limit);
  EXPECT_EQ(problem.CheckUntouched(), "") << where;
}

// A stream and what is captured on it.
class Graph {
 public:
  Graph() { cudaStreamCreate(&stream_); }
  ~Graph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  // Global mode: any call that is not allowed while a stream captures fails the capture.
  template <typename Function>
  void Capture(Function launch) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    launch(stream_);
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  void Replay() { ASSERT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess); }
  void Synchronize() { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }
  cudaGraph_t graph() const { return graph_; }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

__global__ void CountDifferencesKernel(const uint32_t* a, const uint32_t* b, size_t words,
                                       unsigned long long* count) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  unsigned long long mine = 0;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words;
       i += stride) {
    mine += a[i] != b[i];
  }
  if (mine > 0) atomicAdd(count, mine);
}

size_t OutputBytes(const coppice_mla_shape& s) {
  return static_cast<size_t>(s.batch) * s.nodes * s.heads * COPPICE_MLA_LATENT * 2;
}

size_t LseBytes(const coppice_mla_shape& s) {
  return static_cast<size_t>(s.batch) * s.nodes * s.heads * sizeof(float);
}

struct Result {
  std::vector<uint16_t> output;
  std::vector<float> lse;
};

Result Download(const Problem& problem, int cache = 0) {
  const coppice_mla_tensors t = problem.tensors(cache);
  Result r;
  r.output.resize(OutputBytes(problem.shape()) / 2);
  r.lse.resize(LseBytes(problem.shape()) / sizeof(float));
  cudaMemcpy(r.output.data(), t.output, r.output.size() * 2, cudaMemcpyDeviceToHost);
  cudaMemcpy(r.lse.data(), t.lse, r.lse.size() * sizeof(float), cudaMemcpyDeviceToHost);
  return r;
}

float Bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// ---------------------------------------------------------------------------------------------
// The reference itself.

// The header's formula as a host loop over what the device holds.
void HostAttention(const Problem& problem, const RowId& id, std::vector<double>* output,
                   double* lse) {
  const coppice_mla_shape& s = problem.shape();
  const int64_t node = static_cast<int64_t>(id.request) * s.nodes + id.node;
  const int64_t context = problem.contexts()[id.request];
  const int64_t length = context + problem.node_counts()[id.request];
  std::vector<uint16_t> query(COPPICE_MLA_ROW);
  cudaMemcpy(query.data(),
             static_cast<const uint16_t*>(problem.tensors().query) +
                 (node * s.heads + id.head) * COPPICE_MLA_ROW,
             query.size() * 2, cudaMemcpyDeviceToHost);
  std::vector<std::vector<double>> keys;
  std::vector<double> scores;
  for (int64_t t = 0; t < length; ++t) {
    if (t >= context && !(problem.words()[node] >> (t - context) & 1)) continue;
    std::vector<uint8_t> row(problem.row_bytes());
    cudaMemcpy(row.data(), problem.Row(id.request, t), row.size(), cudaMemcpyDeviceToHost);
    std::vector<double> key(COPPICE_MLA_ROW);
    for (int c = 0; c < COPPICE_MLA_ROW; ++c) {
      uint16_t bits;
      if (s.cache_type == COPPICE_MLA_BF16) {
        std::memcpy(&bits, &row[c * 2], 2);
        key[c] = Bf16(bits);
      } else if (c >= COPPICE_MLA_LATENT) {
        std::memcpy(&bits, &row[528 + (c - COPPICE_MLA_LATENT) * 2], 2);
        key[c] = Bf16(bits);
      } else {
        __nv_fp8_e4m3 value;
        value.__x = row[c];
        float scale;
        std::memcpy(&scale, &row[512], sizeof(scale));
        key[c] = static_cast<double>(static_cast<float>(value)) * scale;
      }
    }
    double score = 0;
    for (int c = 0; c < COPPICE_MLA_ROW; ++c) score += Bf16(query[c]) * key[c];
    scores.push_back(score * s.softmax_scale);
    keys.push_back(std::move(key));
  }
  output->assign(COPPICE_MLA_LATENT, 0);
  const double maximum = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double score : scores) sum += std::exp(score - maximum);
  for (size_t t = 0; t < scores.size(); ++t) {
    const double p = std::exp(scores[t] - maximum) / sum;
    for (int c = 0; c < COPPICE_MLA_LATENT; ++c) (*output)[c] += p * keys[t][c];
  }
  *lse = maximum + std::log(sum);
}

TEST(MlaReference, AgreesWithAHostLoop) {
  SKIP_WITHOUT_GPU();
  for (coppice_mla_cache_type type : {COPPICE_MLA_BF16, COPPICE_MLA_FP8}) {
    Problem problem(Options(type, COPPICE_MLA_COMMON, 5, {0, 37, 700}, 4, 3));
    ASSERT_EQ(problem.error(), "");
    const std::vector<RowId> rows = LiveRows(problem.shape(), problem.node_counts());
    std::vector<double> outputs, lse;
    ASSERT_EQ(ReferenceAttention(problem.shape(), problem.tensors(), rows, &outputs, &lse),
              cudaSuccess);
    for (size_t i = 0; i < rows.size(); i += 4) {
      std::vector<double> want;
      double want_lse;
      HostAttention(problem, rows[i], &want, &want_lse);
      EXPECT_NEAR(lse[i], want_lse, 1e-9);
      for (int c = 0; c < COPPICE_MLA_LATENT; ++c) {
        ASSERT_NEAR(outputs[i * COPPICE_MLA_LATENT + c], want[c], 1e-9) << "row " << i;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Every instance on every cache type.

class MlaVerify
    : public testing::TestWithParam<std::tuple<coppice_mla_instance, coppice_mla_cache_type>> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    // Only an instance of one architecture's own may be missing on a device, and it must say so.
    const ProblemOptions o = Make(1, {16});
    size_t bytes = 0;
    const coppice_mla_status status = coppice_mla_verify_workspace(&o.shape, &bytes);
    if (status != COPPICE_MLA_OK && instance() == COPPICE_MLA_HOPPER) {
      ASSERT_STRNE(coppice_mla_error(), "");
      std::printf("*** SKIPPED on this device: %s\n", coppice_mla_error());
      GTEST_SKIP() << coppice_mla_error();
    }
    ASSERT_EQ(status, COPPICE_MLA_OK) << coppice_mla_error();
  }

  static coppice_mla_instance instance() { return std::get<0>(GetParam()); }
  static coppice_mla_cache_type type() { return std::get<1>(GetParam()); }

  static ProblemOptions Make(int nodes, std::vector<int32_t> contexts, int page_size = 64,
                             int heads = 8) {
    return Options(type(), instance(), nodes, std::move(contexts), page_size, heads);
  }
};

std::string Where(const ProblemOptions& o) {
  std::string text = "nodes " + std::to_string(o.shape.nodes) + " heads " +
                     std::to_string(o.shape.heads) + " page " + std::to_string(o.shape.page_size) +
                     " contexts";
  for (size_t b = 0; b < o.contexts.size() && b < 6; ++b) {
    text += " " + std::to_string(o.contexts[b]);
  }
  return text;
}

// Few enough launches for memcheck and racecheck.
TEST_P(MlaVerify, SmallGrid) {
  for (const auto& [nodes, heads, page] : std::vector<std::tuple<int, int, int>>{
           {1, 8, 64}, {4, 8, 1}, {9, 8, 16}, {17, 3, 2}, {64, 8, 64}, {2, 64, 32}}) {
    ProblemOptions o = Make(nodes, {0, 15, 16, 17, 700}, page, heads);
    o.node_counts = {nodes, 1, 0, nodes, nodes};
    o.table_padding = 5;
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    problem.PoisonOutputs();
    ASSERT_EQ(problem.Schedule(), COPPICE_MLA_OK) << coppice_mla_error();
    ASSERT_EQ(problem.Run(), COPPICE_MLA_OK) << coppice_mla_error();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ExpectMatchesReference(problem, Where(o), 60);
    EXPECT_EQ(problem.CheckUntouched(), "") << Where(o);
  }
}

TEST_P(MlaVerify, NodesAndHeads) {
  const int kPages[] = {1, 2, 4, 8, 16, 32, 64};
  int turn = 0;
  for (int heads : {1, 2, 4, 8, 12, 16, 64}) {
    for (int nodes : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 25, 33, 47, 64}) {
      ProblemOptions o = Make(nodes, {1000 + turn % 70, 40}, kPages[turn % 7], heads);
      o.seed = ++turn;
      o.node_counts = {nodes, (nodes + 1) / 2};
      Problem problem(o);
      ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o), 700));
    }
  }
}

TEST_P(MlaVerify, PageSizesAndOrders) {
  for (int page : {1, 2, 4, 8, 16, 32, 64}) {
    for (bool permuted : {false, true}) {
      for (int64_t gap : {0, 48}) {
        ProblemOptions o = Make(9, {5000, 129, 63}, page);
        o.permuted = permuted;
        o.page_gap = gap;
        o.table_padding = 1000;
        Problem problem(o);
        ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o)));
      }
    }
  }
}

TEST_P(MlaVerify, RaggedLengthsBesideALongOne) {
  const std::vector<int32_t> lengths = {0,   1,   15,  16,  17,  31,   32,     33, 63,  64,  65,
                                        127, 128, 129, 255, 257, 1000, 200000, 2,  511, 513, 65536};
  for (int nodes : {1, 4, 9, 64}) {
    for (int page : {1, 64}) {
      ProblemOptions o = Make(nodes, lengths, page);
      for (size_t b = 0; b < lengths.size(); ++b) o.node_counts.push_back(1 + (b * 7) % nodes);
      Problem problem(o);
      // Every row of the short requests, a few of the long ones.
      ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o), 200));
      std::vector<RowId> rows;
      for (const RowId& id : LiveRows(o.shape, o.node_counts)) {
        if (lengths[id.request] <= 1000 && (nodes <= 9 || id.head % 3 == 0)) rows.push_back(id);
      }
      std::vector<RowError> errors;
      ASSERT_EQ(CompareWithReference(problem.shape(), problem.tensors(), rows, nullptr, 0, &errors),
                cudaSuccess);
      ExpectClose(rows, errors, Where(o));
    }
  }
}

TEST_P(MlaVerify, SixtyFourRequests) {
  for (int nodes : {1, 8, 33, 64}) {
    std::vector<int32_t> contexts, counts;
    for (int b = 0; b < 64; ++b) {
      contexts.push_back(b * b);
      counts.push_back(b % 5 == 4 ? 0 : 1 + b % nodes);
    }
    ProblemOptions o = Make(nodes, contexts, 16);
    o.node_counts = counts;
    Problem problem(o);
    ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o), 1500));
  }
}

TEST_P(MlaVerify, LongestContext) {
  for (int nodes : {1, 64}) {
    ProblemOptions o = Make(nodes, {COPPICE_MLA_MAX_CONTEXT - nodes}, 64);
    Problem problem(o);
    ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o), 12));
  }
}

// Offsets past 2^31 and 2^32 bytes, and past 2^31 elements, from few pages far apart.
TEST_P(MlaVerify, FarPages) {
  for (int page : {1, 64}) {
    ProblemOptions o = Make(9, {page == 1 ? 40 : 2000}, page);
    const int64_t bytes = page * (type() == COPPICE_MLA_BF16 ? 1152 : 656);
    o.page_gap = (int64_t{200} << 20) - bytes;  // 34 and more pages of 200 MB: past 6 GB
    o.page_gap -= o.page_gap % 16;
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    ASSERT_GT(problem.pages() * (int64_t{200} << 20), int64_t{3} << 31);
    ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o)));
  }
}

// A padded request's table, lengths' pages and queries are all NaN or wild (Problem leaves them
// so).
TEST_P(MlaVerify, PaddedRequests) {
  for (int nodes : {1, 9, 64}) {
    ProblemOptions o = Make(nodes, {300, 200000, 0, 77, 131072}, 64);
    o.node_counts = {0, 0, nodes, nodes, 0};
    Problem problem(o);
    ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o)));
  }
  ProblemOptions o = Make(9, {300, 100}, 64);
  o.node_counts = {0, 0};
  Problem problem(o);
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "nothing but padding"));
}

TEST_P(MlaVerify, ChainsAndRootOnlyTrees) {
  for (TreeKind tree : {TreeKind::kChain, TreeKind::kRootOnly}) {
    for (int nodes : {2, 9, 17, 64}) {
      ProblemOptions o = Make(nodes, {0, 500, 4096}, 16);
      o.tree = tree;
      Problem problem(o);
      ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, Where(o), 1500));
    }
  }
}

// A node of a chain sees what a plain decode step at its position sees.
TEST_P(MlaVerify, ChainNodeEqualsDecodeStep) {
  const int kNodes = 9;
  ProblemOptions o = Make(kNodes, {777}, 16);
  o.tree = TreeKind::kChain;
  Problem chain(o);
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(chain, "chain"));
  const Result want = Download(chain);
  for (int i = 0; i < kNodes; ++i) {
    coppice_mla_shape shape = chain.shape();
    shape.nodes = 1;
    coppice_mla_tensors t = chain.tensors();
    t.query = static_cast<const uint16_t*>(t.query) + i * shape.heads * COPPICE_MLA_ROW;
    Problem lengths(Make(1, {777 + i}, 16));  // its lengths, counts and words
    t.context_lengths = lengths.tensors().context_lengths;
    t.node_counts = lengths.tensors().node_counts;
    t.ancestor_words = lengths.tensors().ancestor_words;
    t.output = lengths.tensors().output;
    t.lse = lengths.tensors().lse;
    ASSERT_EQ(coppice_mla_verify_schedule(&shape, &t, nullptr), COPPICE_MLA_OK);
    ASSERT_EQ(coppice_mla_verify_run(&shape, &t, nullptr), COPPICE_MLA_OK);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const Result got = Download(lengths);
    for (int h = 0; h < shape.heads; ++h) {
      EXPECT_NEAR(got.lse[h], want.lse[i * shape.heads + h], 1e-4);
    }
    double difference = 0, norm = 0;
    for (size_t c = 0; c < got.output.size(); ++c) {
      const double x = Bf16(got.output[c]), y = Bf16(want.output[i * got.output.size() + c]);
      difference += (x - y) * (x - y);
      norm += y * y;
    }
    EXPECT_TRUE(std::sqrt(difference / norm) <= 4e-3) << "node " << i;
  }
}

// Rows of nodes that are no ancestors hold huge values: a tree verified as a chain, or with its
// mask one off, shows.
TEST_P(MlaVerify, SiblingPoison) {
  for (int nodes : {4, 9, 17, 64}) {
    for (int context : {0, 100, 1021}) {
      for (int leaf : {1, nodes / 2, nodes - 1}) {
        ProblemOptions o = Make(nodes, {context}, 16);
        o.seed = nodes + context;
        Problem problem(o);
        ASSERT_EQ(problem.error(), "");
        for (int j = 0; j < nodes; ++j) {
          if (problem.words()[leaf] >> j & 1) continue;
          problem.SetRow(0, context + j, std::vector<float>(COPPICE_MLA_ROW, 3e4f));
        }
        problem.PoisonOutputs();
        ASSERT_EQ(problem.Schedule(), COPPICE_MLA_OK) << coppice_mla_error();
        ASSERT_EQ(problem.Run(), COPPICE_MLA_OK) << coppice_mla_error();
        std::vector<RowId> rows;
        for (int h = 0; h < 8; ++h) rows.push_back({0, leaf, h});
        std::vector<RowError> errors;
        ASSERT_EQ(
            CompareWithReference(problem.shape(), problem.tensors(), rows, nullptr, 0, &errors),
            cudaSuccess);
        ExpectClose(rows, errors, Where(o) + " leaf " + std::to_string(leaf));
      }
    }
  }
}

// One position after another stands out.  That a tile left out or counted twice would then fail by
// ten times the tolerance is shown on the reference.
TEST_P(MlaVerify, NeedleInEachTile) {
  const int kContext = 16 * 24 + 5, kNodes = 9;
  ProblemOptions o = Make(kNodes, {kContext}, 8);
  o.tree = TreeKind::kChain;
  for (int split_tokens : {0, 64, 128}) {
    o.shape.split_tokens = split_tokens;
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    const std::vector<RowId> rows = LiveRows(problem.shape(), problem.node_counts());
    float* weights = nullptr;
    ASSERT_EQ(cudaMalloc(&weights, (kContext + kNodes) * sizeof(float)), cudaSuccess);
    for (int tile = 0; tile * 16 < kContext; ++tile) {
      const int position = std::min(tile * 16 + (tile * 5) % 16, kContext - 1);
      // Along no query in particular, but the largest values of all: visible in every row's value
      // columns.
      std::vector<float> needle(COPPICE_MLA_ROW);
      for (int c = 0; c < COPPICE_MLA_ROW; ++c) needle[c] = (c * 7 + tile) % 2 == 0 ? 6.f : -6.f;
      std::vector<uint8_t> saved(problem.row_bytes());
      cudaMemcpy(saved.data(), problem.Row(0, position), saved.size(), cudaMemcpyDeviceToHost);
      problem.SetRow(0, position, needle);
      problem.PoisonOutputs();
      ASSERT_EQ(problem.Schedule(), COPPICE_MLA_OK) << coppice_mla_error();
      ASSERT_EQ(problem.Run(), COPPICE_MLA_OK) << coppice_mla_error();
      ExpectMatchesReference(problem, "needle at " + std::to_string(position));
      if (tile % 8 == 0 || HasFailure()) {
        for (float weight : {0.f, 2.f}) {
          std::vector<float> all(kContext + kNodes, 1.f);
          for (int t = tile * 16; t < std::min(tile * 16 + 16, kContext); ++t) all[t] = weight;
          cudaMemcpy(weights, all.data(), all.size() * sizeof(float), cudaMemcpyHostToDevice);
          std::vector<RowError> errors;
          ASSERT_EQ(CompareWithReference(problem.shape(), problem.tensors(), rows, weights,
                                         kContext + kNodes, &errors),
                    cudaSuccess);
          double lse_difference = 0;
          for (const RowError& e : errors) {
            lse_difference = std::max(lse_difference, e.lse_difference);
          }
          EXPECT_GT(std::max(RelativeError(errors) / 2e-3, lse_difference / 1e-3), 10)
              << "a tile of weight " << weight << " hides";
        }
      }
      ASSERT_FALSE(HasFailure());
      cudaMemcpy(problem.Row(0, position), saved.data(), saved.size(), cudaMemcpyHostToDevice);
    }
    cudaFree(weights);
  }
}

// Every row zero but one, which answers every query with the same score ln(length): half of the
// weight, whatever the length.
__global__ void PlaceNeedleKernel(uint8_t* row, uint8_t* previous, int row_bytes, int cache_type,
                                  float rope, float scale) {
  if (previous != nullptr) {
    for (int i = threadIdx.x; i < row_bytes; i += blockDim.x) previous[i] = 0;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < COPPICE_MLA_ROW; c += blockDim.x) {
    const float value = c < COPPICE_MLA_LATENT ? 1.f : c == COPPICE_MLA_LATENT ? rope : 0.f;
    if (cache_type == COPPICE_MLA_BF16) {
      reinterpret_cast<__nv_bfloat16*>(row)[c] = __float2bfloat16(value);
    } else if (c < COPPICE_MLA_LATENT) {
      row[c] = __nv_cvt_float_to_fp8(value / scale, __NV_SATFINITE, __NV_E4M3);
      if (c == 0) *reinterpret_cast<float*>(row + 512) = scale;
    } else {
      reinterpret_cast<__nv_bfloat16*>(row + 528)[c - COPPICE_MLA_LATENT] = __float2bfloat16(value);
    }
  }
}

__global__ void CheckNeedleKernel(const __nv_bfloat16* output, const float* lse, int rows,
                                  float want, float want_lse, int* failures) {
  for (int i = blockIdx.x; i < rows; i += gridDim.x) {
    for (int c = threadIdx.x; c < COPPICE_MLA_LATENT; c += blockDim.x) {
      const float got = __bfloat162float(output[static_cast<int64_t>(i) * COPPICE_MLA_LATENT + c]);
      if (!(fabsf(got - want) <= 4e-3f)) atomicAdd(failures, 1);
    }
    if (threadIdx.x == 0 && !(fabsf(lse[i] - want_lse) <= 1e-3f)) atomicAdd(failures, 1);
  }
}

TEST_P(MlaVerify, NeedleInEachTileOfLongContexts) {
  for (const auto& [nodes, context, stride] :
       std::vector<std::tuple<int, int, int>>{{1, 16384, 1},
                                              {4, 16384, 1},
                                              {9, 65536, 1},
                                              {17, 16384, 3},
                                              {64, 16384, 1},
                                              {8, 200000, 5}}) {
    ProblemOptions o = Make(nodes, {context}, 64);
    o.tree = TreeKind::kRootOnly;
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    const coppice_mla_tensors t = problem.tensors();
    // Each node but the root also sees itself and the root: zero rows, like the rest.  All lengths
    // differ by one row of weight e^0 at most, far below the tolerances.
    cudaMemset(const_cast<void*>(t.cache), 0, problem.pages() * t.page_stride);
    const float score = std::log(static_cast<float>(context));
    std::vector<uint16_t> query(static_cast<size_t>(nodes) * 8 * COPPICE_MLA_ROW, 0);
    for (size_t r = 0; r < static_cast<size_t>(nodes) * 8; ++r) {
      query[r * COPPICE_MLA_ROW + COPPICE_MLA_LATENT] = 0x3F80;  // 1.0
    }
    cudaMemcpy(const_cast<void*>(t.query), query.data(), query.size() * 2, cudaMemcpyHostToDevice);
    const __nv_bfloat16 rope = __float2bfloat16(score / o.shape.softmax_scale);
    const double needle = std::exp(__bfloat162float(rope) * double{o.shape.softmax_scale});
    const double others = context + (nodes > 1 ? 2 : 1) - 1;
    const int tiles = (context + 15) / 16;
    int* failures = nullptr;
    ASSERT_EQ(cudaMalloc(&failures, tiles * sizeof(int)), cudaSuccess);
    cudaMemset(failures, 0, tiles * sizeof(int));
    problem.PoisonOutputs();
    ASSERT_EQ(problem.Schedule(), COPPICE_MLA_OK);
    uint8_t* previous = nullptr;
    for (int tile = 0; tile < tiles; tile += stride) {
      uint8_t* row = problem.Row(0, std::min(tile * 16 + (tile * 5) % 16, context - 1));
      PlaceNeedleKernel<<<1, 192>>>(row, previous, problem.row_bytes(), type(),
                                    __bfloat162float(rope), 1.f / 64);
      previous = row;
      ASSERT_EQ(problem.Run(), COPPICE_MLA_OK) << coppice_mla_error();
      CheckNeedleKernel<<<32, 128>>>(static_cast<const __nv_bfloat16*>(t.output), t.lse, nodes * 8,
                                     needle / (needle + others), std::log(needle + others),
                                     failures + tile);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int> counts(tiles);
    cudaMemcpy(counts.data(), failures, tiles * sizeof(int), cudaMemcpyDeviceToHost);
    cudaFree(failures);
    int reported = 0;
    for (int tile = 0; tile < tiles && reported < 5; ++tile) {
      if (counts[tile] == 0) continue;
      ++reported;
      ADD_FAILURE() << Where(o) << ": tile " << tile << ": " << counts[tile] << " values off";
    }
  }
}

TEST_P(MlaVerify, SplitCountChangesNothing) {
  for (int nodes : {1, 9, 33}) {
    ProblemOptions o = Make(nodes, {4000, 100, 17}, 16);
    for (int splits : {1, 2, 3, 5, 8, 16, 63, 64, 132, 0}) {
      o.shape.max_splits = splits;
      Problem problem(o);
      ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "splits " + std::to_string(splits), 300));
    }
    for (int tokens : {64, 128, 512, 4096}) {
      o.shape.split_tokens = tokens;
      Problem problem(o);
      ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "split_tokens " + std::to_string(tokens), 300));
    }
  }
}

// With parts of a fixed length a request's result does not depend on its batch, bit for bit.
TEST_P(MlaVerify, FixedPartsAreIndependentOfTheBatch) {
  for (int nodes : {1, 9, 64}) {
    ProblemOptions o = Make(nodes, {3000, 64, 200, 9999}, 16);
    o.shape.split_tokens = 256;
    Problem batch(o);
    ASSERT_NO_FATAL_FAILURE(RunAndCheck(batch, Where(o), 200));
    const Result together = Download(batch);
    for (int b = 0; b < 4; ++b) {
      std::vector<int32_t> counts(4, 0);
      counts[b] = nodes;
      batch.SetLengths(o.contexts, counts);
      batch.PoisonOutputs();
      ASSERT_EQ(batch.Schedule(), COPPICE_MLA_OK);
      ASSERT_EQ(batch.Run(), COPPICE_MLA_OK);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const Result alone = Download(batch);
      const size_t row = static_cast<size_t>(nodes) * 8;
      EXPECT_TRUE(std::equal(alone.output.begin() + b * row * 512,
                             alone.output.begin() + (b + 1) * row * 512,
                             together.output.begin() + b * row * 512))
          << Where(o) << " request " << b;
      EXPECT_TRUE(std::equal(alone.lse.begin() + b * row, alone.lse.begin() + (b + 1) * row,
                             together.lse.begin() + b * row))
          << Where(o) << " request " << b;
    }
  }
}

TEST_P(MlaVerify, AThousandReplaysAreBitwiseIdentical) {
  for (int nodes : {1, 9, 64}) {
    ProblemOptions o = Make(nodes, {4096, 333}, 64);
    o.caches = 2;
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    problem.PoisonOutputs(0);
    problem.PoisonOutputs(1);
    Graph graph;
    ASSERT_NO_FATAL_FAILURE(graph.Capture([&](cudaStream_t stream) {
      ASSERT_EQ(problem.Schedule(stream), COPPICE_MLA_OK);
      for (int layer = 0; layer < 2; ++layer) {
        ASSERT_EQ(problem.Run(stream, layer), COPPICE_MLA_OK);
      }
    }));
    ASSERT_NO_FATAL_FAILURE(graph.Replay());
    ASSERT_NO_FATAL_FAILURE(graph.Synchronize());
    const size_t bytes[2] = {OutputBytes(o.shape), LseBytes(o.shape)};
    void* kept[2][2];
    unsigned long long* differences = nullptr;
    ASSERT_EQ(cudaMalloc(&differences, 8), cudaSuccess);
    cudaMemset(differences, 0, 8);
    const auto part = [&](int layer, int i) -> const void* {
      const coppice_mla_tensors t = problem.tensors(layer);
      return i == 0 ? t.output : t.lse;
    };
    for (int layer = 0; layer < 2; ++layer) {
      for (int i = 0; i < 2; ++i) {
        ASSERT_EQ(cudaMalloc(&kept[layer][i], bytes[i]), cudaSuccess);
        cudaMemcpy(kept[layer][i], part(layer, i), bytes[i], cudaMemcpyDeviceToDevice);
      }
      ExpectMatchesReference(problem, Where(o), 100, layer);
    }
    for (int replay = 0; replay < 1000; ++replay) {
      ASSERT_NO_FATAL_FAILURE(graph.Replay());
      for (int layer = 0; layer < 2; ++layer) {
        for (int i = 0; i < 2; ++i) {
          CountDifferencesKernel<<<64, 256, 0, graph.stream()>>>(
              static_cast<const uint32_t*>(part(layer, i)),
              static_cast<const uint32_t*>(kept[layer][i]), bytes[i] / 4, differences);
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(graph.Synchronize());
    unsigned long long count = 0;
    cudaMemcpy(&count, differences, 8, cudaMemcpyDeviceToHost);
    EXPECT_EQ(count, 0u) << Where(o);
    cudaFree(differences);
    for (auto& layer : kept) {
      for (void* data : layer) cudaFree(data);
    }
  }
}

// Layers that share a workspace, launched without a pause: none reads another's partial results.
TEST_P(MlaVerify, LayersShareAWorkspace) {
  for (int nodes : {4, 17, 64}) {
    ProblemOptions o = Make(nodes, {2500, 80}, 16);
    o.caches = 12;
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    for (int layer = 0; layer < o.caches; ++layer) problem.PoisonOutputs(layer);
    Graph graph;
    ASSERT_NO_FATAL_FAILURE(graph.Capture([&](cudaStream_t stream) {
      ASSERT_EQ(problem.Schedule(stream), COPPICE_MLA_OK);
      for (int layer = 0; layer < o.caches; ++layer) {
        ASSERT_EQ(problem.Run(stream, layer), COPPICE_MLA_OK);
      }
    }));
    for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(graph.Replay());
    ASSERT_NO_FATAL_FAILURE(graph.Synchronize());
    for (int layer = 0; layer < o.caches; ++layer) {
      ExpectMatchesReference(problem, Where(o) + " layer " + std::to_string(layer), 60, layer);
    }
  }
}

// A graph is right at lengths, counts and trees that it was not captured at, and holds kernels
// alone: no memset, no copy.
TEST_P(MlaVerify, ReplayAtOtherLengths) {
  for (int nodes : {1, 9, 64}) {
    // Made at the longest lengths, captured at short ones.
    ProblemOptions o = Make(nodes, {200000, 4096, 3000}, 64);
    Problem problem(o);
    ASSERT_EQ(problem.error(), "");
    problem.SetLengths({4096, 16, 0}, {nodes, 1, nodes});
    problem.PoisonOutputs();
    Graph graph;
    ASSERT_NO_FATAL_FAILURE(graph.Capture([&](cudaStream_t stream) {
      ASSERT_EQ(problem.Schedule(stream), COPPICE_MLA_OK);
      ASSERT_EQ(problem.Run(stream), COPPICE_MLA_OK);
    }));
    size_t count = 0;
    ASSERT_EQ(cudaGraphGetNodes(graph.graph(), nullptr, &count), cudaSuccess);
    std::vector<cudaGraphNode_t> captured(count);
    ASSERT_EQ(cudaGraphGetNodes(graph.graph(), captured.data(), &count), cudaSuccess);
    EXPECT_GT(count, 0u);
    for (cudaGraphNode_t node : captured) {
      cudaGraphNodeType kind;
      ASSERT_EQ(cudaGraphNodeGetType(node, &kind), cudaSuccess);
      EXPECT_EQ(kind, cudaGraphNodeTypeKernel);
    }
    const std::vector<std::vector<int32_t>> lengths = {{4096, 16, 0},   {200000, 4096, 3000},
                                                       {0, 0, 0},       {65, 63, 2999},
                                                       {200000, 1, 64}, {1, 4095, 17}};
    for (size_t i = 0; i < lengths.size(); ++i) {
      std::vector<int32_t> counts(3, nodes);
      if (i % 2 == 1) counts[1] = 0;
      if (i % 3 == 1) counts[2] = (nodes + 1) / 2;
      problem.SetLengths(lengths[i], counts);
      std::vector<uint64_t> words;
      for (int b = 0; b < 3; ++b) {
        const std::vector<uint64_t> tree = TreeWords(TreeKind::kRandom, nodes, 100 * i + b);
        words.insert(words.end(), tree.begin(), tree.end());
      }
      problem.SetWords(words);
      problem.PoisonOutputs();
      ASSERT_NO_FATAL_FAILURE(graph.Replay());
      ASSERT_NO_FATAL_FAILURE(graph.Synchronize());
      ExpectMatchesReference(problem, Where(o) + " replay " + std::to_string(i), 60);
      EXPECT_EQ(problem.CheckUntouched(), "") << "replay " << i;
    }
  }
}

// A row that sees nothing is zero with log-sum-exp −∞; one that sees only the context, or only the
// tree, is a part that another can be merged with through the log-sum-exps, as context-parallel
// ranks do.
TEST_P(MlaVerify, PartsMergeThroughTheLogSumExp) {
  const int kNodes = 9, kContext = 1000;
  ProblemOptions o = Make(kNodes, {kContext}, 16);
  Problem problem(o);
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "whole"));
  const std::vector<uint64_t> words = problem.words();
  std::vector<double> want, want_lse;
  const std::vector<RowId> rows = LiveRows(problem.shape(), problem.node_counts());
  ASSERT_EQ(ReferenceAttention(problem.shape(), problem.tensors(), rows, &want, &want_lse),
            cudaSuccess);
  // The context alone: no word has a bit.
  problem.SetWords(std::vector<uint64_t>(kNodes, 0));
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "context alone"));
  const Result context = Download(problem);
  // The tree alone: its rows are the first positions of another request.
  Problem tree(Make(kNodes, {0}, 16));
  ASSERT_EQ(tree.error(), "");
  for (int j = 0; j < kNodes; ++j) {
    cudaMemcpy(tree.Row(0, j), problem.Row(0, kContext + j), problem.row_bytes(),
               cudaMemcpyDeviceToDevice);
  }
  cudaMemcpy(const_cast<void*>(tree.tensors().query), problem.tensors().query,
             static_cast<size_t>(kNodes) * 8 * COPPICE_MLA_ROW * 2, cudaMemcpyDeviceToDevice);
  tree.SetWords(words);
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(tree, "tree alone"));
  const Result drafted = Download(tree);
  double difference = 0, norm = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const double lse =
        std::log(std::exp(double{context.lse[r]}) + std::exp(double{drafted.lse[r]}));
    EXPECT_NEAR(lse, want_lse[r], 1e-3);
    const double a = std::exp(context.lse[r] - lse), b = std::exp(drafted.lse[r] - lse);
    for (int c = 0; c < COPPICE_MLA_LATENT; ++c) {
      const size_t i = r * COPPICE_MLA_LATENT + c;
      const double merged = a * Bf16(context.output[i]) + b * Bf16(drafted.output[i]);
      difference += (merged - want[i]) * (merged - want[i]);
      norm += want[i] * want[i];
    }
  }
  EXPECT_TRUE(std::sqrt(difference / norm) <= 3e-3);
  // Nothing at all.
  tree.SetWords(std::vector<uint64_t>(kNodes, 0));
  tree.PoisonOutputs();
  ASSERT_EQ(tree.Schedule(), COPPICE_MLA_OK);
  ASSERT_EQ(tree.Run(), COPPICE_MLA_OK);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Result nothing = Download(tree);
  for (uint16_t value : nothing.output) ASSERT_EQ(value & 0x7FFF, 0);
  for (float lse : nothing.lse) ASSERT_EQ(lse, -std::numeric_limits<float>::infinity());
}

TEST_P(MlaVerify, LogSumExpIsOptional) {
  Problem problem(Make(9, {700}, 16));
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "with"));
  const Result with = Download(problem);
  problem.PoisonOutputs();
  coppice_mla_tensors t = problem.tensors();
  t.lse = nullptr;
  ASSERT_EQ(coppice_mla_verify_schedule(&problem.shape(), &t, nullptr), COPPICE_MLA_OK);
  ASSERT_EQ(coppice_mla_verify_run(&problem.shape(), &t, nullptr), COPPICE_MLA_OK);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(Download(problem).output, with.output);
}

// Scores of hundreds: the running maximum moves, nothing overflows.
TEST_P(MlaVerify, LargeScores) {
  ProblemOptions o = Make(9, {3000, 20}, 16);
  o.shape.softmax_scale = 3;
  Problem problem(o);
  ASSERT_NO_FATAL_FAILURE(RunAndCheck(problem, "large scores"));
}

TEST_P(MlaVerify, CheckFindsWhatTheKernelsTrust) {
  Problem problem(Make(9, {700, 0}, 16));
  ASSERT_EQ(problem.error(), "");
  const coppice_mla_tensors t = problem.tensors();
  const auto check = [&] {
    return coppice_mla_verify_check(&problem.shape(), &t, problem.pages(), nullptr);
  };
  EXPECT_EQ(check(), COPPICE_MLA_OK) << coppice_mla_error();
  const std::vector<uint64_t> good = problem.words();
  std::vector<uint64_t> bad = good;
  bad[3] |= uint64_t{1} << 5;  // forward
  problem.SetWords(bad);
  EXPECT_EQ(check(), COPPICE_MLA_INVALID_ARGUMENT);
  EXPECT_THAT(coppice_mla_error(), testing::HasSubstr("3"));
  bad = good;
  bad[12] &= ~(uint64_t{1} << 3);  // its own
  problem.SetWords(bad);
  EXPECT_EQ(check(), COPPICE_MLA_INVALID_ARGUMENT);
  bad = TreeWords(TreeKind::kChain, 9, 1);
  bad[8] &= ~uint64_t{1};  // its ancestors' ancestor
  bad.insert(bad.end(), good.begin() + 9, good.end());
  problem.SetWords(bad);
  EXPECT_EQ(check(), COPPICE_MLA_INVALID_ARGUMENT);
  problem.SetWords(good);
  problem.SetLengths({700, 0}, {10, 9});
  EXPECT_EQ(check(), COPPICE_MLA_INVALID_ARGUMENT);
  problem.SetLengths({-1, 0}, {9, 9});
  EXPECT_EQ(check(), COPPICE_MLA_INVALID_ARGUMENT);
  problem.SetLengths({COPPICE_MLA_MAX_CONTEXT, 0}, {9, 9});
  EXPECT_EQ(check(), COPPICE_MLA_INVALID_ARGUMENT);
  problem.SetLengths({700, 0}, {9, 9});
  EXPECT_EQ(check(), COPPICE_MLA_OK) << coppice_mla_error();
  EXPECT_EQ(coppice_mla_verify_check(&problem.shape(), &t, 1, nullptr),
            COPPICE_MLA_INVALID_ARGUMENT);  // entries past the pages
}

std::string ParameterName(
    const testing::TestParamInfo<std::tuple<coppice_mla_instance, coppice_mla_cache_type>>& info) {
  const coppice_mla_instance instance = std::get<0>(info.param);
  return std::string(instance == COPPICE_MLA_COMMON         ? "Common"
                     : instance == COPPICE_MLA_COMMON_SMALL ? "CommonSmall"
                                                            : "Hopper") +
         (std::get<1>(info.param) == COPPICE_MLA_BF16 ? "Bf16" : "Fp8");
}

INSTANTIATE_TEST_SUITE_P(All, MlaVerify,
                         testing::Combine(testing::Values(COPPICE_MLA_COMMON,
                                                          COPPICE_MLA_COMMON_SMALL,
                                                          COPPICE_MLA_HOPPER),
                                          testing::Values(COPPICE_MLA_BF16, COPPICE_MLA_FP8)),
                         ParameterName);

// ---------------------------------------------------------------------------------------------
// Bad input: a status and a sentence that names the culprit, before any launch.  Needs no device:
// the pointers are never followed.

struct Call {
  coppice_mla_shape shape = {};
  coppice_mla_tensors tensors = {};
};

Call GoodCall() {
  Call c;
  c.shape.batch = 2;
  c.shape.nodes = 9;
  c.shape.heads = 8;
  c.shape.page_size = 64;
  c.shape.cache_type = COPPICE_MLA_BF16;
  c.shape.instance = COPPICE_MLA_COMMON;
  c.shape.softmax_scale = 0.1f;
  const auto address = [](uintptr_t i) { return reinterpret_cast<void*>(i << 20); };
  c.tensors.query = address(1);
  c.tensors.cache = address(2);
  c.tensors.page_stride = 64 * 1152;
  c.tensors.page_table = static_cast<int32_t*>(address(3));
  c.tensors.table_stride = 100;
  c.tensors.context_lengths = static_cast<int32_t*>(address(4));
  c.tensors.node_counts = static_cast<int32_t*>(address(5));
  c.tensors.ancestor_words = static_cast<uint64_t*>(address(6));
  c.tensors.output = address(7);
  c.tensors.lse = static_cast<float*>(address(8));
  c.tensors.workspace = address(9);
  c.tensors.workspace_bytes = size_t{1} << 40;
  return c;
}

// Both launching calls refuse; the sentence has `culprit` in it.
void ExpectRefused(const Call& call, const std::string& culprit) {
  for (const auto& function : {coppice_mla_verify_schedule, coppice_mla_verify_run}) {
    EXPECT_EQ(function(&call.shape, &call.tensors, nullptr), COPPICE_MLA_INVALID_ARGUMENT)
        << culprit;
    EXPECT_THAT(coppice_mla_error(), testing::HasSubstr(culprit));
  }
}

TEST(MlaVerifyArguments, ShapesAreChecked) {
  const auto with = [](auto change) {
    Call c = GoodCall();
    change(c.shape);
    return c;
  };
  for (int value : {0, -1, 65}) {
    ExpectRefused(with([&](auto& s) { s.batch = value; }), "batch");
    ExpectRefused(with([&](auto& s) { s.nodes = value; }), "nodes");
    ExpectRefused(with([&](auto& s) { s.heads = value; }), "heads");
  }
  for (int value : {0, -1, 3, 48, 65, 128}) {
    ExpectRefused(with([&](auto& s) { s.page_size = value; }), "page_size");
  }
  ExpectRefused(with([](auto& s) { s.cache_type = static_cast<coppice_mla_cache_type>(7); }),
                "cache_type");
  ExpectRefused(with([](auto& s) { s.instance = static_cast<coppice_mla_instance>(7); }),
                "instance");
  ExpectRefused(with([](auto& s) { s.max_splits = -1; }), "max_splits");
  ExpectRefused(with([](auto& s) { s.split_tokens = 100; }), "split_tokens");
  ExpectRefused(with([](auto& s) { s.split_tokens = -64; }), "split_tokens");
  ExpectRefused(with([](auto& s) { s.softmax_scale = NAN; }), "softmax_scale");
  size_t bytes = 0;
  Call c = with([](auto& s) { s.nodes = 65; });
  EXPECT_EQ(coppice_mla_verify_workspace(&c.shape, &bytes), COPPICE_MLA_INVALID_ARGUMENT);
  EXPECT_THAT(coppice_mla_error(), testing::HasSubstr("65"));
  EXPECT_EQ(coppice_mla_verify_workspace(nullptr, &bytes), COPPICE_MLA_INVALID_ARGUMENT);
  c = GoodCall();
  EXPECT_EQ(coppice_mla_verify_workspace(&c.shape, nullptr), COPPICE_MLA_INVALID_ARGUMENT);
  EXPECT_EQ(coppice_mla_verify_run(nullptr, &c.tensors, nullptr), COPPICE_MLA_INVALID_ARGUMENT);
  EXPECT_EQ(coppice_mla_verify_run(&c.shape, nullptr, nullptr), COPPICE_MLA_INVALID_ARGUMENT);
}

TEST(MlaVerifyArguments, TensorsAreChecked) {
  const auto with = [](auto change) {
    Call c = GoodCall();
    change(c.tensors);
    return c;
  };
  const auto off = [](auto pointer, int bytes) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + bytes);
  };
  ExpectRefused(with([](auto& t) { t.query = nullptr; }), "query");
  ExpectRefused(with([](auto& t) { t.cache = nullptr; }), "cache");
  ExpectRefused(with([](auto& t) { t.page_table = nullptr; }), "page_table");
  ExpectRefused(with([](auto& t) { t.context_lengths = nullptr; }), "context_lengths");
  ExpectRefused(with([](auto& t) { t.node_counts = nullptr; }), "node_counts");
  ExpectRefused(with([](auto& t) { t.ancestor_words = nullptr; }), "ancestor_words");
  ExpectRefused(with([](auto& t) { t.output = nullptr; }), "output");
  ExpectRefused(with([](auto& t) { t.workspace = nullptr; }), "workspace");
  ExpectRefused(with([&](auto& t) { t.query = off(t.query, 8); }), "query");
  ExpectRefused(with([&](auto& t) { t.cache = off(t.cache, 4); }), "cache");
  ExpectRefused(with([&](auto& t) { t.output = off(t.output, 2); }), "output");
  ExpectRefused(with([&](auto& t) { t.workspace = off(t.workspace, 8); }), "workspace");
  ExpectRefused(with([&](auto& t) { t.page_table = off(t.page_table, 2); }), "page_table");
  ExpectRefused(with([&](auto& t) { t.ancestor_words = off(t.ancestor_words, 4); }),
                "ancestor_words");
  ExpectRefused(with([](auto& t) { t.page_stride = 64 * 1152 - 16; }), "page_stride");
  ExpectRefused(with([](auto& t) { t.page_stride += 8; }), "page_stride");
  ExpectRefused(with([](auto& t) { t.page_stride = -64 * 1152; }), "page_stride");
  ExpectRefused(with([](auto& t) { t.table_stride = 0; }), "table_stride");
}

TEST(MlaVerifyArguments, AnInstanceThatThisDeviceLacksIsNamed) {
  if (HaveGpu()) {
    cudaDeviceProp device;
    ASSERT_EQ(cudaGetDeviceProperties(&device, 0), cudaSuccess);
    if (device.major == 9) GTEST_SKIP() << "this device has every instance";
  }
  Call c = GoodCall();
  c.shape.instance = COPPICE_MLA_HOPPER;
  size_t bytes = 0;
  const coppice_mla_status status = coppice_mla_verify_workspace(&c.shape, &bytes);
  EXPECT_TRUE(status == COPPICE_MLA_UNSUPPORTED_DEVICE || status == COPPICE_MLA_CUDA_ERROR);
  EXPECT_STRNE(coppice_mla_error(), "");
}

TEST(MlaVerifyArguments, ASmallWorkspaceIsRefused) {
  SKIP_WITHOUT_GPU();
  for (int nodes : {1, 64}) {
    Call c = GoodCall();
    c.shape.nodes = nodes;
    size_t bytes = 0;
    ASSERT_EQ(coppice_mla_verify_workspace(&c.shape, &bytes), COPPICE_MLA_OK);
    c.tensors.workspace_bytes = bytes - 1;
    ExpectRefused(c, "workspace");
  }
}

// The workspace stays within what one wave needs, however large the batch: other designs' grew past
// 4 GB.
TEST(MlaVerifyArguments, TheWorkspaceIsBounded) {
  SKIP_WITHOUT_GPU();
  Call c = GoodCall();
  c.shape.batch = 32;
  c.shape.nodes = 64;
  size_t bytes = 0;
  ASSERT_EQ(coppice_mla_verify_workspace(&c.shape, &bytes), COPPICE_MLA_OK);
  EXPECT_LT(bytes, size_t{256} << 20);
}

}  // namespace
}  // namespace coppice::mla
