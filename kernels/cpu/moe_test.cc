// Routing against a plain reading of its definition, and the experts: right, and the same bits
// whether every rank has a slice of each or some of them whole, alone or in a batch.
#include <algorithm>
#include <array>
#include <numeric>

#include "gmock/gmock.h"
#include "kernels/cpu/test_support.h"

namespace coppice::kernels::cpu {
namespace {

using Encoding = HostMatrix::Encoding;
using ::testing::ElementsAre;

class RouteTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Routes rows of logits as they are: the gate is the identity.
  void Route(std::vector<float> logits, std::vector<float> bias, const RouterShape& shape) {
    const int64_t experts = shape.experts, rows = static_cast<int64_t>(logits.size()) / experts;
    Weight gate;
    gate.encoding = Encoding::kF32;
    gate.rows = gate.cols = experts;
    gate.f32.assign(experts * experts, 0);
    for (int64_t e = 0; e < experts; ++e) gate.f32[e * experts + e] = 1;
    ids_.assign(rows * shape.top_k, -7);
    weights_.assign(rows * shape.top_k, -7);
    ops_->Route(View(logits, rows, experts), *Prepare(*ops_, gate.Whole()), View(bias, 1, experts),
                shape, View(ids_, rows, shape.top_k), View(weights_, rows, shape.top_k));
  }

  std::unique_ptr<CpuGroup> group_ = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops_ = group_->CreateOps(0);
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
};

TEST_P(RouteTest, BiasSelectsAndUnbiasedProbabilitiesWeigh) {
  RouterShape shape;
  shape.experts = 4;
  shape.top_k = 2;
  shape.routed_scaling_factor = 2.827f;
  Route({4, 3, 2, 1}, {-10, 0, 0, 10}, shape);
  EXPECT_THAT(ids_, ElementsAre(3, 1));
  EXPECT_NEAR(weights_[0], 1.22752581, 1e-6);
  EXPECT_NEAR(weights_[1], 1.59947419, 1e-6);
  shape.norm_topk_prob = false;
  Route({4, 3, 2, 1}, {-10, 0, 0, 10}, shape);
  EXPECT_NEAR(weights_[0], 2.827 / (1 + std::exp(-1.0)), 1e-6);
}

TEST_P(RouteTest, NegativeChoicesAreOrderedAndTiesGoToTheLowerIndex) {
  RouterShape shape;
  shape.experts = 5;
  shape.top_k = 3;
  Route({0, 0, 0, 0, 0}, {-3, -1, -2, -1, -1}, shape);
  EXPECT_THAT(ids_, ElementsAre(1, 3, 4));
  EXPECT_THAT(weights_, ElementsAre(1 / 3.0f, 1 / 3.0f, 1 / 3.0f));
  // -0 and 0 are the same choice.
  Route({0, 0, 0, 0, 0}, {-0.5f, -5, -0.5f, -5, -5}, shape);
  EXPECT_THAT(ids_, ElementsAre(0, 2, 1));
}

TEST_P(RouteTest, ANonFiniteRowChoosesNothingAndSpoilsNoOther) {
  RouterShape shape;
  shape.experts = 3;
  shape.top_k = 2;
  Route({1, 2, 3, 1, NAN, 3, 1, INFINITY, 3, 3, 2, 1}, {0, 0, 0}, shape);
  // The identity gate spreads a NaN over its row, as any gate would.
  EXPECT_THAT(ids_, ElementsAre(2, 1, -1, -1, -1, -1, 0, 1));
  EXPECT_THAT(std::vector<float>(weights_.begin() + 2, weights_.begin() + 6),
              ElementsAre(0, 0, 0, 0));
}

TEST_P(RouteTest, OnlyTheBestGroupsTakePart) {
  RouterShape shape;
  shape.experts = 6;
  shape.top_k = 2;
  shape.n_group = 3;
  shape.topk_group = 1;
  // A group is worth its two best: the last group wins although the best expert is in the first.
  Route({5, -9, 0, 0, 3, 2}, {0, 0, 0, 0, 0, 0}, shape);
  EXPECT_THAT(ids_, ElementsAre(4, 5));
  shape.topk_group = 2;
  Route({5, -9, 0, 0.1f, 3, 2}, {0, 0, 0, 0, 0, 0}, shape);
  EXPECT_THAT(ids_, ElementsAre(4, 5));
  // Equal groups: the lower one.
  shape.topk_group = 1;
  Route({1, 1, 2, 0, 1, 1}, {0, 0, -9, -9, 0, 0}, shape);
  EXPECT_THAT(ids_, ElementsAre(0, 1));
}

TEST_P(RouteTest, MatchesAPlainReading) {
  Random random(1);
  struct Case {
    int experts, top_k, n_group, topk_group;
  };
  for (const Case& c :
       {Case{384, 8, 1, 1}, {16, 4, 1, 1}, {32, 4, 8, 4}, {7, 7, 1, 1}, {256, 8, 8, 4}}) {
    RouterShape shape;
    shape.experts = c.experts;
    shape.top_k = c.top_k;
    shape.n_group = c.n_group;
    shape.topk_group = c.topk_group;
    shape.routed_scaling_factor = 2.5f;
    const int rows = 20, inputs = 48;
    const Weight gate = RandomWeight(random, Encoding::kBf16, c.experts, inputs);
    std::vector<float> x = random.Normals(rows * inputs), bias = random.Normals(c.experts, 0.5f);
    std::vector<int32_t> ids(rows * c.top_k);
    std::vector<float> weights(rows * c.top_k);
    const std::unique_ptr<Matrix> matrix = Prepare(*ops_, gate.Whole());
    ops_->Route(View(x, rows, inputs), *matrix, View(bias, 1, c.experts), shape,
                View(ids, rows, c.top_k), View(weights, rows, c.top_k));
    for (int r = 0; r < rows; ++r) {
      std::vector<double> probability(c.experts), choice(c.experts);
      for (int e = 0; e < c.experts; ++e) {
        probability[e] =
            1 / (1 + std::exp(-double{ReferenceDot(x.data() + r * inputs, gate, e, 0, inputs)}));
        choice[e] = probability[e] + bias[e];
      }
      const int per_group = c.experts / c.n_group;
      std::vector<std::pair<double, int>> groups;
      for (int g = 0; g < c.n_group; ++g) {
        std::vector<double> in(choice.begin() + g * per_group,
                               choice.begin() + (g + 1) * per_group);
        std::sort(in.rbegin(), in.rend());
        groups.push_back({-(in[0] + (per_group > 1 ? in[1] : 0)), g});
      }
      std::sort(groups.begin(), groups.end());
      std::vector<int> allowed;
      for (int g = 0; g < c.topk_group; ++g) {
        for (int i = 0; i < per_group; ++i) allowed.push_back(groups[g].second * per_group + i);
      }
      std::sort(allowed.begin(), allowed.end());
      std::stable_sort(allowed.begin(), allowed.end(),
                       [&](int a, int b) { return choice[a] > choice[b]; });
      double sum = 0;
      for (int i = 0; i < c.top_k; ++i) sum += probability[allowed[i]];
      for (int i = 0; i < c.top_k; ++i) {
        ASSERT_EQ(ids[r * c.top_k + i], allowed[i]) << c.experts << " experts, row " << r;
        ASSERT_NEAR(weights[r * c.top_k + i], probability[allowed[i]] / sum * 2.5, 1e-6);
      }
    }
    // A row alone.
    for (int r = 0; r < rows; ++r) {
      std::vector<int32_t> one_id(c.top_k);
      std::vector<float> one(c.top_k);
      ops_->Route(View(x, rows, inputs).Rows(r, 1), *matrix, View(bias, 1, c.experts), shape,
                  View(one_id, 1, c.top_k), View(one, 1, c.top_k));
      EXPECT_EQ(std::memcmp(one.data(), weights.data() + r * c.top_k, c.top_k * 4), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, RouteTest, ::testing::ValuesIn(Isas()),
                         [](const auto& info) { return info.param; });

// One layer of experts as a checkpoint holds it.
struct Layer {
  Layer(Random& random, int experts, int64_t hidden, int64_t intermediate,
        int64_t shared_intermediate)
      : hidden(hidden) {
    auto make = [&](int64_t width, Encoding encoding) {
      gate.push_back(RandomWeight(random, encoding, width, hidden));
      up.push_back(RandomWeight(random, encoding, width, hidden));
      down.push_back(RandomWeight(random, encoding, hidden, width));
    };
    for (int e = 0; e < experts; ++e) make(intermediate, Encoding::kInt4Group32);
    if (shared_intermediate > 0) make(shared_intermediate, Encoding::kBf16);
    this->experts = experts;
    has_shared = shared_intermediate > 0;
  }

  // Segments [first, first + count) of expert e.
  ExpertWeights::Expert Take(Ops& ops, int e, int first, int count) const {
    const int64_t segment = down[e].cols / kSegments, slice = segment * count;
    ExpertWeights::Expert out;
    // Gate rows, then up rows, as one matrix: decoded here, for the two lie apart in the
    // checkpoint.
    Weight both;
    both.encoding = Encoding::kBf16;
    both.rows = 2 * slice;
    both.cols = hidden;
    for (const Weight* w : {&gate[e], &up[e]}) {
      for (int64_t r = 0; r < slice; ++r) {
        for (int64_t c = 0; c < hidden; ++c)
          both.bf16.push_back(FloatToBf16(w->At(first * segment + r, c)));
      }
    }
    out.gate_up = Prepare(ops, both.Whole());
    for (int s = first; s < first + count; ++s) {
      out.down_segments.push_back(Prepare(ops, down[e].Rectangle(0, hidden, s * segment, segment)));
    }
    return out;
  }
  ExpertWeights TensorParallel(Ops& ops) const {
    const int local = kSegments / ops.ranks(), first = ops.rank() * local;
    ExpertWeights w;
    for (int e = 0; e < experts; ++e) w.experts.push_back(Take(ops, e, first, local));
    if (has_shared) w.shared = Take(ops, experts, first, local);
    return w;
  }
  // Experts dealt out in turn; the one named `twice` is on every rank.
  ExpertWeights ExpertParallel(Ops& ops, int twice) const {
    const int local = kSegments / ops.ranks();
    ExpertWeights w;
    for (int e = 0; e < experts; ++e) {
      if (e % ops.ranks() == ops.rank() || e == twice) {
        w.experts.push_back(Take(ops, e, 0, kSegments));
      } else {
        w.experts.emplace_back();
      }
    }
    if (has_shared) w.shared = Take(ops, experts, ops.rank() * local, local);
    return w;
  }

  // The definition, operation by operation; exact but for the activation function.
  std::vector<double> Expert(int e, const float* x) const {
    const int64_t width = down[e].cols;
    std::vector<double> h(width), y(hidden);
    for (int64_t i = 0; i < width; ++i) {
      double g = 0, u = 0;
      for (int64_t k = 0; k < hidden; ++k) {
        g += double{gate[e].At(i, k)} * x[k];
        u += double{up[e].At(i, k)} * x[k];
      }
      h[i] = g / (1 + std::exp(-g)) * u;
    }
    for (int64_t o = 0; o < hidden; ++o) {
      for (int64_t i = 0; i < width; ++i) y[o] += h[i] * down[e].At(o, i);
    }
    return y;
  }

  int64_t hidden;
  int experts;
  bool has_shared;
  std::vector<Weight> gate, up, down;
};

struct Tokens {
  Tokens(Random& random, int rows, int top_k, int experts, int64_t hidden)
      : rows(rows),
        top_k(top_k),
        x(random.Normals(rows * hidden)),
        residual(random.Normals(rows * hidden)) {
    for (int r = 0; r < rows; ++r) {
      std::vector<int32_t> order(experts);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random.engine());
      for (int k = 0; k < top_k; ++k) {
        ids.push_back(order[k]);
        weights.push_back(0.1f + std::abs(random.Normal()));
      }
    }
  }
  void Drop(int row, int slot) {
    ids[row * top_k + slot] = -1;
    weights[row * top_k + slot] = 0;
  }
  int rows, top_k;
  std::vector<float> x, residual, weights;
  std::vector<int32_t> ids;
};

std::vector<float> RunMoe(Ops& ops, const ExpertWeights& w, Tokens t, int first, int rows) {
  const int64_t hidden = static_cast<int64_t>(t.x.size()) / t.rows;
  ops.Moe(View(t.x, t.rows, hidden).Rows(first, rows),
          View(t.ids, t.rows, t.top_k).Rows(first, rows),
          View(t.weights, t.rows, t.top_k).Rows(first, rows), w,
          View(t.residual, t.rows, hidden).Rows(first, rows));
  return std::vector<float>(t.residual.begin() + first * hidden,
                            t.residual.begin() + (first + rows) * hidden);
}

class MoeTest : public ::testing::TestWithParam<std::string> {};

TEST_P(MoeTest, MatchesItsDefinition) {
  Random random(1);
  for (int64_t shared : {0, 64}) {
    const Layer layer(random, 5, 48, 32, shared);
    Tokens tokens(random, 12, 3, 5, 48);
    for (int slot = 0; slot < 3; ++slot) tokens.Drop(4, slot);
    tokens.Drop(7, 1);
    std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
    std::unique_ptr<Ops> ops = group->CreateOps(0);
    const std::vector<float> got = RunMoe(*ops, layer.TensorParallel(*ops), tokens, 0, 12);
    for (int r = 0; r < 12; ++r) {
      std::vector<double> want(tokens.residual.begin() + r * 48,
                               tokens.residual.begin() + (r + 1) * 48);
      for (int slot = 0; slot < 3; ++slot) {
        const int e = tokens.ids[r * 3 + slot];
        if (e < 0) continue;
        const std::vector<double> y = layer.Expert(e, tokens.x.data() + r * 48);
        for (int c = 0; c < 48; ++c) want[c] += tokens.weights[r * 3 + slot] * y[c];
      }
      if (shared > 0) {
        const std::vector<double> y = layer.Expert(5, tokens.x.data() + r * 48);
        for (int c = 0; c < 48; ++c) want[c] += y[c];
      }
      for (int c = 0; c < 48; ++c) ASSERT_NEAR(got[r * 48 + c], want[c], 1e-4) << "row " << r;
    }
  }
}

void CompareRanksAndPlacements(const std::string& isa, int rows, int64_t hidden,
                               const std::vector<int>& rank_counts) {
  Random random(2);
  const int top_k = 4, experts = 9;
  const Layer layer(random, experts, hidden, 64, 128);
  Tokens tokens(random, rows, top_k, experts, hidden);
  tokens.Drop(3, 0);
  tokens.Drop(3, 2);
  std::vector<float> want;
  RunRanks(1, isa,
           [&](Ops& ops) { want = RunMoe(ops, layer.TensorParallel(ops), tokens, 0, rows); });
  for (int ranks : rank_counts) {
    RunRanks(ranks, isa, [&](Ops& ops) {
      const ExpertWeights tp = layer.TensorParallel(ops), ep = layer.ExpertParallel(ops, 2);
      EXPECT_TRUE(SameBits(RunMoe(ops, tp, tokens, 0, rows), want))
          << "TP" << ranks << ", rank " << ops.rank();
      EXPECT_TRUE(SameBits(RunMoe(ops, ep, tokens, 0, rows), want))
          << "EP" << ranks << ", rank " << ops.rank();
    });
  }
}

TEST_P(MoeTest, RanksAndPlacementChangeNothing) {
  CompareRanksAndPlacements(GetParam(), 33, 64, {1, 2, 4, 8});
}

// So many rows that the ranks divide the adding up among them.
TEST_P(MoeTest, RanksAndPlacementChangeNothingForManyRows) {
  CompareRanksAndPlacements(GetParam(), 300, 112, {2, 8});
}

TEST(MoeIsaTest, EveryInstructionSetGivesTheSameBits) {
  std::vector<float> first;
  for (const std::string& isa : Isas()) {
    Random random(6);
    const Layer layer(random, 5, 72, 40, 24);
    const Tokens tokens(random, 21, 3, 5, 72);
    RunRanks(1, isa, [&](Ops& ops) {
      const std::vector<float> out = RunMoe(ops, layer.TensorParallel(ops), tokens, 0, 21);
      if (first.empty()) first = out;
      EXPECT_TRUE(SameBits(out, first)) << isa;
    });
  }
}

TEST_P(MoeTest, ARowDoesNotDependOnItsBatch) {
  Random random(3);
  const int rows = 70, top_k = 2, experts = 4;
  const Layer layer(random, experts, 32, 32, 32);
  const Tokens tokens(random, rows, top_k, experts, 32);
  std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  const ExpertWeights w = layer.TensorParallel(*ops);
  const std::vector<float> all = RunMoe(*ops, w, tokens, 0, rows);
  for (int r = 0; r < rows; ++r) {
    EXPECT_EQ(std::memcmp(RunMoe(*ops, w, tokens, r, 1).data(), all.data() + r * 32, 32 * 4), 0)
        << r;
  }
  for (int n : {2, 7, 31, 69}) {
    EXPECT_EQ(std::memcmp(RunMoe(*ops, w, tokens, 1, n).data(), all.data() + 32, n * 32 * 4), 0)
        << n;
  }
}

TEST_P(MoeTest, ManyRowsAreTakenInChunks) {
  // Wide enough that a rank group of one must cut these rows; rows repeat, so results must.
  Random random(4);
  const int experts = 2, top_k = 2, distinct = 7, rows = 700;
  const int64_t hidden = 4096;
  const Layer layer(random, experts, hidden, 8, 8);
  Tokens few(random, distinct, top_k, experts, hidden), many = few;
  many.rows = rows;
  many.x.clear();
  many.residual.clear();
  many.ids.clear();
  many.weights.clear();
  for (int r = 0; r < rows; ++r) {
    const int d = r % distinct;
    many.x.insert(many.x.end(), few.x.begin() + d * hidden, few.x.begin() + (d + 1) * hidden);
    many.residual.insert(many.residual.end(), few.residual.begin() + d * hidden,
                         few.residual.begin() + (d + 1) * hidden);
    many.ids.insert(many.ids.end(), few.ids.begin() + d * top_k, few.ids.begin() + (d + 1) * top_k);
    many.weights.insert(many.weights.end(), few.weights.begin() + d * top_k,
                        few.weights.begin() + (d + 1) * top_k);
  }
  std::unique_ptr<CpuGroup> group = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops = group->CreateOps(0);
  const ExpertWeights w = layer.TensorParallel(*ops);
  const std::vector<float> want = RunMoe(*ops, w, few, 0, distinct);
  const std::vector<float> got = RunMoe(*ops, w, many, 0, rows);
  for (int r = 0; r < rows; ++r) {
    ASSERT_EQ(std::memcmp(got.data() + r * hidden, want.data() + r % distinct * hidden, hidden * 4),
              0)
        << r;
  }
}

TEST_P(MoeTest, NoRowsAndNoChoice) {
  Random random(5);
  const Layer layer(random, 3, 16, 8, 0);
  Tokens tokens(random, 2, 2, 3, 16);
  for (int r = 0; r < 2; ++r) {
    for (int slot = 0; slot < 2; ++slot) tokens.Drop(r, slot);
  }
  RunRanks(2, GetParam(), [&](Ops& ops) {
    const ExpertWeights w = layer.TensorParallel(ops);
    EXPECT_TRUE(RunMoe(ops, w, tokens, 0, 0).empty());
    EXPECT_EQ(RunMoe(ops, w, tokens, 0, 2), tokens.residual);
  });
}

INSTANTIATE_TEST_SUITE_P(Isas, MoeTest, ::testing::ValuesIn(Isas()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace coppice::kernels::cpu
