// Tree build and ancestor words at the drafter's size: 7 positions, 16 candidates, 64 nodes.
#include <algorithm>
#include <cmath>
#include <random>

#include "benchmark/benchmark.h"
#include "speculation/build.h"
#include "speculation/tree.h"

namespace coppice::speculation {
namespace {

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;
  CandidateView view(int k) const {
    return {static_cast<int>(tokens.size()) / k, k, tokens, log_probs};
  }
};

// Softmax over random logits, sorted.
Draft RandomDraft(std::mt19937& rng, int positions, int k) {
  Draft draft;
  for (int p = 0; p < positions; ++p) {
    std::vector<float> row(k);
    double sum = 0;
    for (float& value : row) {
      value = std::normal_distribution<float>(0.0f, 2.0f)(rng);
      sum += std::exp(value);
    }
    std::sort(row.rbegin(), row.rend());
    for (int r = 0; r < k; ++r) {
      draft.tokens.push_back(static_cast<int32_t>(100 * r + rng() % 100));
      draft.log_probs.push_back(row[r] - static_cast<float>(std::log(sum)));
    }
  }
  return draft;
}

void BM_TreeBuild(benchmark::State& state) {
  const int nodes = static_cast<int>(state.range(0));
  std::mt19937 rng(1);
  std::vector<Draft> drafts;
  for (int i = 0; i < 64; ++i) drafts.push_back(RandomDraft(rng, 7, 16));
  TreeBuilder builder;
  BuiltTree built;
  size_t next = 0;
  for (auto _ : state) {
    BuildRequest request;
    request.candidates = drafts[next++ % drafts.size()].view(16);
    builder.Build(request, nodes - 1, &built);
    benchmark::DoNotOptimize(built.tree.token.data());
  }
  if (built.tree.nodes() != nodes) state.SkipWithError("the tree is not full");
}
BENCHMARK(BM_TreeBuild)->Arg(9)->Arg(17)->Arg(33)->Arg(64)->ArgName("nodes");

void BM_BatchBuild(benchmark::State& state) {
  const int sequences = static_cast<int>(state.range(0));
  std::mt19937 rng(2);
  std::vector<Draft> drafts;
  std::vector<BuildRequest> requests(sequences);
  for (int i = 0; i < sequences; ++i) drafts.push_back(RandomDraft(rng, 7, 16));
  for (int i = 0; i < sequences; ++i) requests[i].candidates = drafts[i].view(16);
  TreeBuilder builder;
  std::vector<BuiltTree> built;
  std::vector<int32_t> order;
  for (auto _ : state) {
    builder.BuildBatch(requests, 32 * sequences, &built, &order);
    benchmark::DoNotOptimize(order.data());
  }
}
BENCHMARK(BM_BatchBuild)->Arg(1)->Arg(8)->Arg(32)->ArgName("sequences");

void BM_AncestorWords(benchmark::State& state) {
  std::mt19937 rng(3);
  const Draft draft = RandomDraft(rng, 7, 16);
  BuildRequest request;
  request.candidates = draft.view(16);
  BuiltTree built;
  TreeBuilder().Build(request, 63, &built);
  for (auto _ : state) {
    std::vector<uint64_t> words = AncestorWords(built.tree);
    benchmark::DoNotOptimize(words.data());
  }
}
BENCHMARK(BM_AncestorWords);

}  // namespace
}  // namespace coppice::speculation
