// What the CPU kernels reach on one core.  `gflops` counts a multiply-add as two.
//
// DemoStep is one whole step of a target of the demo pair's size (hidden 256, 4 layers, 8 heads,
// latent 512 + 64, 16 experts of 256, 4 of them per token, vocabulary 4096) with random weights:
// what a round's verification costs.
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/cpu/bf16.h"
#include "kernels/ops.h"

namespace coppice::kernels {
namespace {

CpuGroup& Group() {
  static std::unique_ptr<CpuGroup> group = [] {
    auto made = CreateCpuGroup(1);
    if (!made.ok()) {
      std::cerr << made.status() << "\n";
      std::exit(1);
    }
    return *std::move(made);
  }();
  return *group;
}

std::vector<float> Normals(int64_t n, float scale = 1) {
  static std::mt19937 engine(1);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(engine);
  return v;
}

std::unique_ptr<Matrix> RandomMatrix(Ops& ops, int64_t outputs, int64_t inputs) {
  std::vector<uint16_t> bits;
  for (float x : Normals(outputs * inputs, 1 / std::sqrt(static_cast<float>(inputs)))) {
    bits.push_back(cpu::FloatToBf16(x));
  }
  HostMatrix m;
  m.data = bits.data();
  m.row_bytes = inputs * 2;
  m.rows = outputs;
  m.cols = inputs;
  return *ops.Prepare(m);
}

std::vector<std::unique_ptr<Matrix>> RandomMatrices(Ops& ops, int count, int64_t outputs,
                                                    int64_t inputs) {
  std::vector<std::unique_ptr<Matrix>> v;
  for (int i = 0; i < count; ++i) v.push_back(RandomMatrix(ops, outputs, inputs));
  return v;
}

Tensor View(std::vector<float>& v, int64_t rows, int64_t cols) {
  return {v.data(), DType::kF32, rows, cols, cols};
}
Tensor View(std::vector<int32_t>& v, int64_t rows, int64_t cols = 1) {
  return {v.data(), DType::kI32, rows, cols, cols};
}

void ReportFlops(benchmark::State& state, double multiply_adds) {
  state.counters["gflops"] = benchmark::Counter(
      2e-9 * multiply_adds * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void BM_Linear(benchmark::State& state) {
  const int64_t rows = state.range(0), inputs = state.range(1), outputs = state.range(2);
  std::unique_ptr<Ops> ops = Group().CreateOps(0);
  const std::unique_ptr<Matrix> w = RandomMatrix(*ops, outputs, inputs);
  std::vector<float> x = Normals(rows * inputs), y(rows * outputs);
  for (auto _ : state) {
    ops->Linear(View(x, rows, inputs), *w, View(y, rows, outputs));
    benchmark::DoNotOptimize(y.data());
  }
  ReportFlops(state, static_cast<double>(rows * inputs * outputs));
}
BENCHMARK(BM_Linear)
    ->ArgNames({"rows", "inputs", "outputs"})
    ->ArgsProduct({{1, 9, 17, 33, 256}, {256}, {4096}})
    ->ArgsProduct({{1, 9, 33}, {256}, {576}})
    ->ArgsProduct({{1, 9, 33}, {2048}, {2048}});

// The rows of one request, as a tree whose nodes all hang from the root, or as a causal chunk.
struct Rows {
  Rows(int rows, int64_t context, bool causal) {
    const int64_t pages = (context + rows + kPage - 1) / kPage;
    token.assign(rows, 1);
    request.assign(rows, 0);
    row_begin = {0, rows};
    context_len = {static_cast<int32_t>(context)};
    this->causal = {causal};
    for (int64_t p = 0; p < pages; ++p) page_table.push_back(static_cast<int32_t>(pages - 1 - p));
    for (int i = 0; i < rows; ++i) {
      position.push_back(static_cast<int32_t>(context) + (causal ? i : i > 0));
      ancestors.push_back(causal ? 0 : uint64_t{1} | uint64_t{1} << i);
    }
    batch.rows = rows;
    batch.requests = 1;
    batch.max_pages = static_cast<int>(pages);
    batch.token = View(token, rows);
    batch.position = View(position, rows);
    batch.request = View(request, rows);
    batch.row_begin = View(row_begin, 2);
    batch.context_len = View(context_len, 1);
    batch.causal = View(this->causal, 1);
    batch.ancestors = {ancestors.data(), DType::kU64, rows, 1, 1};
    batch.page_table = View(page_table, 1, pages);
  }
  static constexpr int kPage = 64;
  std::vector<int32_t> token, position, request, row_begin, context_len, causal, page_table;
  std::vector<uint64_t> ancestors;
  RowBatch batch;
};

MlaShape DemoShape(int heads) {
  MlaShape shape;
  shape.heads = heads;
  shape.kv_lora_rank = 512;
  shape.qk_nope_head_dim = 32;
  shape.qk_rope_head_dim = 64;
  shape.v_head_dim = 32;
  shape.softmax_scale = 0.1f;
  return shape;
}

void Attention(benchmark::State& state, int rows, int64_t context, bool causal, int heads) {
  std::unique_ptr<Ops> ops = Group().CreateOps(0);
  const MlaShape shape = DemoShape(heads);
  Rows request(rows, context, causal);
  const int64_t tokens = request.batch.max_pages * Rows::kPage;
  std::vector<float> cache = Normals(tokens * 576, 0.3f), q = Normals(rows * heads * 576, 0.3f);
  std::vector<float> out(rows * heads * 512);
  const LatentCache latents = {View(cache, tokens, 576), Rows::kPage};
  for (auto _ : state) {
    ops->MlaAttention(View(q, rows, heads * 576), request.batch, shape, latents,
                      View(out, rows, heads * 512));
    benchmark::DoNotOptimize(out.data());
  }
  const double visible = causal ? context + (rows + 1) / 2.0 : context + 2.0;
  ReportFlops(state, rows * heads * visible * (576 + 512));
}
void BM_TreeAttention(benchmark::State& state) {
  Attention(state, static_cast<int>(state.range(0)), state.range(1), false,
            static_cast<int>(state.range(2)));
}
BENCHMARK(BM_TreeAttention)
    ->ArgNames({"rows", "context", "heads"})
    ->ArgsProduct({{1, 9, 33}, {64, 512, 4096}, {8}})
    ->ArgsProduct({{1, 9}, {512}, {1}});
void BM_ChunkAttention(benchmark::State& state) {
  Attention(state, static_cast<int>(state.range(0)), 0, true, static_cast<int>(state.range(1)));
}
BENCHMARK(BM_ChunkAttention)
    ->ArgNames({"rows", "heads"})
    ->Args({256, 8})
    ->Args({2048, 8})
    ->Args({256, 1});

struct Experts {
  Experts(Ops& ops, int experts, int64_t hidden, int64_t intermediate) {
    auto make = [&] {
      ExpertWeights::Expert e;
      e.gate_up = RandomMatrix(ops, 2 * intermediate, hidden);
      e.down_segments = RandomMatrices(ops, kSegments, hidden, intermediate / kSegments);
      return e;
    };
    for (int i = 0; i < experts; ++i) weights.experts.push_back(make());
    weights.shared = make();
  }
  ExpertWeights weights;
};

void BM_Moe(benchmark::State& state) {
  const int64_t rows = state.range(0), hidden = 256, intermediate = 256, top_k = 4;
  const int experts = static_cast<int>(state.range(1));
  std::unique_ptr<Ops> ops = Group().CreateOps(0);
  const Experts e(*ops, experts, hidden, intermediate);
  std::vector<float> x = Normals(rows * hidden), residual(rows * hidden),
                     weights(rows * top_k, 0.6f);
  std::vector<int32_t> ids;
  std::mt19937 engine(1);
  for (int64_t i = 0; i < rows; ++i) {
    const int first = static_cast<int>(engine() % experts);
    for (int k = 0; k < top_k; ++k) ids.push_back((first + k * 5) % experts);
  }
  for (auto _ : state) {
    ops->Moe(View(x, rows, hidden), View(ids, rows, top_k), View(weights, rows, top_k), e.weights,
             View(residual, rows, hidden));
    benchmark::DoNotOptimize(residual.data());
  }
  ReportFlops(state, static_cast<double>(rows * (top_k + 1) * 3 * hidden * intermediate));
}
BENCHMARK(BM_Moe)->ArgNames({"rows", "experts"})->ArgsProduct({{1, 9, 17, 33, 256}, {16}});

void BM_TopKLogProbs(benchmark::State& state) {
  const int64_t rows = 7, vocab = state.range(0);
  const int k = 16;
  std::unique_ptr<Ops> ops = Group().CreateOps(0);
  std::vector<float> logits = Normals(rows * vocab, 3), log_probs(rows * k);
  std::vector<int32_t> ids(rows * k);
  for (auto _ : state) {
    ops->TopKLogProbs(View(logits, rows, vocab), k, View(ids, rows, k), View(log_probs, rows, k));
    benchmark::DoNotOptimize(ids.data());
  }
}
BENCHMARK(BM_TopKLogProbs)->ArgName("vocab")->Arg(4096)->Arg(163840);

struct DemoLayer {
  DemoLayer(Ops& ops, bool dense) {
    kv_a = RandomMatrix(ops, 576, 256);
    q_a = RandomMatrix(ops, 128, 256);
    q_b = RandomMatrix(ops, 8 * 96, 128);
    w_uk = RandomMatrices(ops, 8, 512, 32);
    w_uv = RandomMatrices(ops, 8, 32, 512);
    o = RandomMatrices(ops, kSegments, 256, 32);
    if (dense) {
      gate_up = RandomMatrix(ops, 1024, 256);
      down = RandomMatrices(ops, kSegments, 256, 64);
    } else {
      gate = RandomMatrix(ops, 16, 256);
      experts = std::make_unique<Experts>(ops, 16, 256, 256);
    }
  }
  std::unique_ptr<Matrix> kv_a, q_a, q_b, gate_up, gate;
  std::vector<std::unique_ptr<Matrix>> w_uk, w_uv, o, down;
  std::unique_ptr<Experts> experts;
};

void BM_DemoStep(benchmark::State& state) {
  const int rows = static_cast<int>(state.range(0));
  const int64_t context = state.range(1);
  std::unique_ptr<Ops> ops = Group().CreateOps(0);
  std::vector<DemoLayer> layers;
  std::vector<std::vector<float>> caches;
  Rows request(rows, context, false);
  const int64_t tokens = request.batch.max_pages * Rows::kPage;
  for (int l = 0; l < 4; ++l) {
    layers.emplace_back(*ops, l == 0);
    caches.push_back(Normals(tokens * 576, 0.3f));
  }
  const std::unique_ptr<Matrix> lm_head = RandomMatrix(*ops, 4096, 256);
  const MlaShape shape = DemoShape(8);
  RouterShape router;
  router.experts = 16;
  router.top_k = 4;
  std::vector<float> cos((context + 64) * 32, 1), sin((context + 64) * 32, 0), ones(512, 1),
      bias(16, 0);
  const RopeTable rope = {View(cos, context + 64, 32), View(sin, context + 64, 32)};
  std::vector<float> h = Normals(rows * 256), x(rows * 256), kv_a(rows * 576), q_a(rows * 128),
                     q(rows * 768);
  std::vector<float> q_latent(rows * 8 * 576), o_latent(rows * 8 * 512), o(rows * 256),
      gate_up(rows * 1024);
  std::vector<float> act(rows * 512), weights(rows * 4), logits(rows * 4096);
  std::vector<int32_t> ids(rows * 4);
  const Tensor ht = View(h, rows, 256), xt = View(x, rows, 256);
  for (auto _ : state) {
    for (int l = 0; l < 4; ++l) {
      DemoLayer& layer = layers[l];
      const LatentCache cache = {View(caches[l], tokens, 576), Rows::kPage};
      ops->RmsNorm(ht, View(ones, 1, 256), 1e-6f, xt);
      ops->Linear(xt, *layer.kv_a, View(kv_a, rows, 576));
      ops->MlaWriteCache(View(kv_a, rows, 576), View(ones, 1, 512), 1e-6f, rope, request.batch,
                         shape, cache);
      ops->Linear(xt, *layer.q_a, View(q_a, rows, 128));
      ops->RmsNorm(View(q_a, rows, 128), View(ones, 1, 128), 1e-6f, View(q_a, rows, 128));
      ops->Linear(View(q_a, rows, 128), *layer.q_b, View(q, rows, 768));
      ops->MlaAbsorbQuery(View(q, rows, 768), layer.w_uk, rope, request.batch, shape,
                          View(q_latent, rows, 8 * 576));
      ops->MlaAttention(View(q_latent, rows, 8 * 576), request.batch, shape, cache,
                        View(o_latent, rows, 8 * 512));
      ops->HeadLinear(View(o_latent, rows, 8 * 512), layer.w_uv, View(o, rows, 256));
      ops->RowLinear(View(o, rows, 256), layer.o, ht);
      ops->RmsNorm(ht, View(ones, 1, 256), 1e-6f, xt);
      if (l == 0) {
        ops->Linear(xt, *layer.gate_up, View(gate_up, rows, 1024));
        ops->SwiGlu(View(gate_up, rows, 1024), View(act, rows, 512));
        ops->RowLinear(View(act, rows, 512), layer.down, ht);
      } else {
        ops->Route(xt, *layer.gate, View(bias, 1, 16), router, View(ids, rows, 4),
                   View(weights, rows, 4));
        ops->Moe(xt, View(ids, rows, 4), View(weights, rows, 4), layer.experts->weights, ht);
      }
    }
    ops->RmsNorm(ht, View(ones, 1, 256), 1e-6f, xt);
    ops->Linear(xt, *lm_head, View(logits, rows, 4096));
    benchmark::DoNotOptimize(logits.data());
  }
}
BENCHMARK(BM_DemoStep)
    ->ArgNames({"rows", "context"})
    ->ArgsProduct({{1, 9, 17, 33}, {100}})
    ->Args({9, 1000})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace coppice::kernels
