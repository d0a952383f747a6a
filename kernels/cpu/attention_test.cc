// Latent attention over pages and trees: right against double precision, and the same bits however
// a token is computed: alone, in a chain, in a tree, in a chunk, beside other requests, on whatever
// pages.
#include <algorithm>
#include <numeric>

#include "kernels/cpu/test_support.h"

namespace coppice::kernels::cpu {
namespace {

using Encoding = HostMatrix::Encoding;

// One request of a batch: its rows see `context` cached tokens and, if they are a tree, the rows of
// their path.
struct Request {
  int64_t context = 0;
  int rows = 1;
  bool causal = false;
  std::vector<uint64_t> ancestors;  // trees
};

std::vector<uint64_t> Chain(int rows) {
  std::vector<uint64_t> words;
  for (int i = 0; i < rows; ++i) words.push_back(i == 63 ? ~uint64_t{0} : (uint64_t{2} << i) - 1);
  return words;
}

std::vector<uint64_t> RandomTree(Random& random, int rows) {
  std::vector<uint64_t> words = {1};
  for (int i = 1; i < rows; ++i) words.push_back(words[random.Int(0, i)] | uint64_t{1} << i);
  return words;
}

// A batch with pages of its own, in random order, over a cache that is NaN wherever nothing was
// written.
class Batch {
 public:
  Batch(const MlaShape& shape, int page_size, const std::vector<Request>& requests, uint32_t seed)
      : shape_(shape), page_size_(page_size), requests_(requests) {
    int64_t pages = 1;
    row_begin_.push_back(0);
    for (const Request& r : requests) {
      const int64_t need = (r.context + r.rows + page_size - 1) / page_size;
      pages += need;
      max_pages_ = std::max<int64_t>(max_pages_, need);
      context_len_.push_back(static_cast<int32_t>(r.context));
      causal_.push_back(r.causal);
      row_begin_.push_back(row_begin_.back() + r.rows);
    }
    std::vector<int32_t> free(pages - 1);
    std::iota(free.begin(), free.end(), 1);
    std::shuffle(free.begin(), free.end(), std::mt19937(seed));
    page_table_.assign(requests.size() * max_pages_, 0);
    for (size_t i = 0; i < requests.size(); ++i) {
      const Request& r = requests[i];
      const int64_t need = (r.context + r.rows + page_size - 1) / page_size;
      for (int64_t p = 0; p < need; ++p) {
        page_table_[i * max_pages_ + p] = free.back();
        free.pop_back();
      }
      for (int j = 0; j < r.rows; ++j) {
        request_.push_back(static_cast<int32_t>(i));
        ancestors_.push_back(r.causal ? 0 : r.ancestors[j]);
        const int depth = r.causal ? j : __builtin_popcountll(r.ancestors[j]) - 1;
        position_.push_back(static_cast<int32_t>(r.context) + depth);
      }
    }
    token_.assign(rows(), 0);
    cache_.assign(pages * page_size * width(), NAN);
  }

  int rows() const { return row_begin_.back(); }
  int64_t width() const { return shape_.kv_lora_rank + shape_.qk_rope_head_dim; }
  int64_t Slot(int request, int64_t logical) const {
    return int64_t{page_table_[request * max_pages_ + logical / page_size_]} * page_size_ +
           logical % page_size_;
  }
  float* CacheRow(int request, int64_t logical) {
    return cache_.data() + Slot(request, logical) * width();
  }
  LatentCache cache() {
    return {View(cache_, static_cast<int64_t>(cache_.size()) / width(), width()), page_size_};
  }
  RowBatch view() {
    RowBatch b;
    b.rows = rows();
    b.requests = static_cast<int>(requests_.size());
    b.max_pages = static_cast<int>(max_pages_);
    b.token = View(token_, rows());
    b.position = View(position_, rows());
    b.request = View(request_, rows());
    b.row_begin = View(row_begin_, b.requests + 1);
    b.context_len = View(context_len_, b.requests);
    b.causal = View(causal_, b.requests);
    b.ancestors = View(ancestors_, rows());
    b.page_table = View(page_table_, b.requests, max_pages_);
    return b;
  }
  // Logical slots that row j of the request sees, in order.
  std::vector<int64_t> Visible(int request, int j) const {
    const Request& r = requests_[request];
    std::vector<int64_t> slots(r.context);
    std::iota(slots.begin(), slots.end(), 0);
    for (int i = 0; i < r.rows; ++i) {
      if (r.causal ? i <= j : (r.ancestors[j] >> i & 1) != 0) slots.push_back(r.context + i);
    }
    return slots;
  }
  const std::vector<Request>& requests() const { return requests_; }
  int row_begin(int request) const { return row_begin_[request]; }

 private:
  MlaShape shape_;
  int page_size_;
  std::vector<Request> requests_;
  int64_t max_pages_ = 1;
  std::vector<int32_t> token_, position_, request_, row_begin_, context_len_, causal_, page_table_;
  std::vector<uint64_t> ancestors_;
  std::vector<float> cache_;
};

MlaShape Shape(int heads, int kv_lora_rank = 512, int rope = 64) {
  MlaShape shape;
  shape.heads = heads;
  shape.kv_lora_rank = kv_lora_rank;
  shape.qk_nope_head_dim = 32;
  shape.qk_rope_head_dim = rope;
  shape.v_head_dim = 32;
  shape.softmax_scale = 0.11f;
  return shape;
}

std::vector<float> Attend(Ops& ops, const MlaShape& shape, Batch& batch, std::vector<float>& q) {
  std::vector<float> out(batch.rows() * shape.heads * shape.kv_lora_rank);
  ops.MlaAttention(View(q, batch.rows(), shape.heads * batch.width()), batch.view(), shape,
                   batch.cache(), View(out, batch.rows(), shape.heads * shape.kv_lora_rank));
  return out;
}

class AttentionTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<CpuGroup> group_ = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops_ = group_->CreateOps(0);
};

TEST_P(AttentionTest, MatchesDoublePrecision) {
  Random random(1);
  struct Case {
    MlaShape shape;
    int page_size;
    std::vector<Request> requests;
  };
  std::vector<Case> cases = {
      {Shape(8), 64, {{100, 9, false, RandomTree(random, 9)}}},
      {Shape(3),
       1,
       {{5, 1, false, {1}}, {0, 7, true, {}}, {130, 20, false, RandomTree(random, 20)}}},
      {Shape(1, 20, 6), 7, {{63, 2, false, Chain(2)}, {64, 1, false, {1}}, {0, 1, false, {1}}}},
      {Shape(2, 48, 16), 16, {{0, 200, true, {}}, {61, 64, false, RandomTree(random, 64)}}},
      {Shape(5, 33, 2), 3, {{200, 70, true, {}}}},
  };
  for (Case& c : cases) {
    const MlaShape& shape = c.shape;
    Batch batch(shape, c.page_size, c.requests, 5);
    for (size_t i = 0; i < c.requests.size(); ++i) {
      for (int64_t s = 0; s < c.requests[i].context + c.requests[i].rows; ++s) {
        const std::vector<float> row = random.Normals(batch.width(), 0.7f);
        std::copy(row.begin(), row.end(), batch.CacheRow(i, s));
      }
    }
    std::vector<float> q = random.Normals(batch.rows() * shape.heads * batch.width(), 0.7f);
    const std::vector<float> got = Attend(*ops_, shape, batch, q);
    for (size_t i = 0; i < c.requests.size(); ++i) {
      for (int j = 0; j < c.requests[i].rows; ++j) {
        const std::vector<int64_t> visible = batch.Visible(i, j);
        for (int h = 0; h < shape.heads; ++h) {
          const int64_t row = batch.row_begin(i) + j;
          const float* query = q.data() + (row * shape.heads + h) * batch.width();
          std::vector<double> p;
          for (int64_t s : visible) {
            double dot = 0;
            for (int64_t d = 0; d < batch.width(); ++d)
              dot += double{query[d]} * batch.CacheRow(i, s)[d];
            p.push_back(dot * shape.softmax_scale);
          }
          const double max = *std::max_element(p.begin(), p.end());
          double sum = 0;
          for (double& x : p) sum += x = std::exp(x - max);
          for (int64_t d = 0; d < shape.kv_lora_rank; ++d) {
            double want = 0;
            for (size_t t = 0; t < visible.size(); ++t)
              want += p[t] / sum * batch.CacheRow(i, visible[t])[d];
            ASSERT_NEAR(got[(row * shape.heads + h) * shape.kv_lora_rank + d], want, 2e-5)
                << "request " << i << ", row " << j << ", head " << h << ", column " << d;
          }
        }
      }
    }
  }
}

// The latents and queries of a sequence of tokens; token t of the sequence is the same wherever it
// is computed.
struct Sequence {
  Sequence(Random& random, int tokens, const MlaShape& shape)
      : width(shape.kv_lora_rank + shape.qk_rope_head_dim),
        q_width(shape.heads * width),
        latents(random.Normals(tokens * width, 0.7f)),
        queries(random.Normals(tokens * q_width, 0.7f)) {}
  int64_t width, q_width;
  std::vector<float> latents, queries;
};

// Computes rows [first …] of a request whose rows stand for tokens `tokens` of the sequence after a
// context of its first tokens, beside what else the batch holds, and returns row `row`'s output.
std::vector<float> OutputOf(Ops& ops, const MlaShape& shape, const Sequence& sequence,
                            const std::vector<Request>& requests, int which,
                            const std::vector<int>& tokens, int row, int page_size, uint32_t seed) {
  Random random(seed);
  Batch batch(shape, page_size, requests, seed);
  std::vector<float> q = random.Normals(batch.rows() * sequence.q_width);
  for (int i = 0; i < static_cast<int>(requests.size()); ++i) {
    for (int64_t s = 0; s < requests[i].context + requests[i].rows; ++s) {
      std::vector<float> latent = random.Normals(sequence.width);
      if (i == which) {
        const int64_t token = s < requests[i].context ? s : tokens[s - requests[i].context];
        if (token >= 0)
          latent.assign(sequence.latents.begin() + token * sequence.width,
                        sequence.latents.begin() + (token + 1) * sequence.width);
      }
      std::copy(latent.begin(), latent.end(), batch.CacheRow(i, s));
    }
  }
  for (size_t j = 0; j < tokens.size(); ++j) {
    if (tokens[j] < 0) continue;
    std::copy_n(sequence.queries.begin() + tokens[j] * sequence.q_width, sequence.q_width,
                q.begin() + (batch.row_begin(which) + static_cast<int64_t>(j)) * sequence.q_width);
  }
  const std::vector<float> out = Attend(ops, shape, batch, q);
  const int64_t width = int64_t{shape.heads} * shape.kv_lora_rank;
  const auto begin = out.begin() + (batch.row_begin(which) + row) * width;
  return std::vector<float>(begin, begin + width);
}

TEST_P(AttentionTest, ATokenIsTheSameAloneInAChainInATreeAndInAChunk) {
  std::vector<int> contexts = {0, 57, 100};
  if (GetParam() != "generic") contexts.insert(contexts.end(), {1, 62, 64, 127, 190});
  for (const MlaShape& shape : {Shape(8), Shape(1), Shape(3, 40, 8)}) {
    for (int context : contexts) {
      Random random(context);
      const int depth = 6;
      const Sequence sequence(random, context + depth, shape);
      const std::vector<Request> alone = {{context + depth - 1, 1, false, {1}}};
      const std::vector<float> want =
          OutputOf(*ops_, shape, sequence, alone, 0, {context + depth - 1}, 0, 64, 1);

      std::vector<int> tokens(depth);
      std::iota(tokens.begin(), tokens.end(), context);
      const std::vector<Request> chain = {{context, depth, false, Chain(depth)}};
      EXPECT_TRUE(
          SameBits(OutputOf(*ops_, shape, sequence, chain, 0, tokens, depth - 1, 16, 2), want))
          << context;

      const std::vector<Request> chunk = {{context, depth, true, {}}};
      EXPECT_TRUE(
          SameBits(OutputOf(*ops_, shape, sequence, chunk, 0, tokens, depth - 1, 5, 3), want))
          << context;

      // The whole sequence as one chunk.
      std::vector<int> all(context + depth);
      std::iota(all.begin(), all.end(), 0);
      const std::vector<Request> whole = {{0, context + depth, true, {}}};
      EXPECT_TRUE(SameBits(
          OutputOf(*ops_, shape, sequence, whole, 0, all, context + depth - 1, 64, 4), want))
          << context;

      // Spread through a tree of 20 nodes, in a batch of three.
      std::vector<int> nodes(20, -1);
      std::vector<uint64_t> words(20, 0);
      const std::vector<int> path = {0, 2, 3, 9, 15, 19};
      uint64_t word = 0;
      words[0] = 1;
      for (int i = 0; i < 20; ++i) words[i] = 1 | uint64_t{1} << i;
      for (int i = 0; i < depth; ++i) {
        word |= uint64_t{1} << path[i];
        words[path[i]] = word;
        nodes[path[i]] = context + i;
      }
      const std::vector<Request> tree = {
          {30, 40, true, {}}, {context, 20, false, words}, {7, 3, false, Chain(3)}};
      EXPECT_TRUE(SameBits(OutputOf(*ops_, shape, sequence, tree, 1, nodes, 19, 64, 5), want))
          << context;
      EXPECT_TRUE(SameBits(OutputOf(*ops_, shape, sequence, tree, 1, nodes, 19, 1, 6), want))
          << context;
    }
  }
}

TEST_P(AttentionTest, HeadsMayBeSplitOverRanks) {
  Random random(3);
  const MlaShape all = Shape(8), one = Shape(1);
  const int context = 90, rows = 9;
  const std::vector<Request> requests = {{context, rows, false, RandomTree(random, rows)}};
  Batch batch(all, 64, requests, 9);
  for (int s = 0; s < context + rows; ++s) {
    const std::vector<float> row = random.Normals(batch.width());
    std::copy(row.begin(), row.end(), batch.CacheRow(0, s));
  }
  const int64_t width = batch.width();
  std::vector<float> q = random.Normals(rows * 8 * width), out = Attend(*ops_, all, batch, q);
  for (int h = 0; h < 8; ++h) {
    std::vector<float> part(rows * 512);
    ops_->MlaAttention(View(q, rows, 8 * width).Cols(h * width, width), batch.view(), one,
                       batch.cache(), View(part, rows, 512));
    for (int r = 0; r < rows; ++r) {
      EXPECT_EQ(std::memcmp(part.data() + r * 512, out.data() + (r * 8 + h) * 512, 512 * 4), 0);
    }
  }
}

TEST_P(AttentionTest, WhatARowDoesNotSeeDoesNotTouchIt) {
  Random random(4);
  const MlaShape shape = Shape(8);
  const int context = 70;
  for (bool causal : {false, true}) {
    const std::vector<Request> requests = {{context, 6, causal, {1, 3, 5, 9, 17, 33}}};
    Batch batch(shape, 8, requests, 1);
    for (int s = 0; s < context + 6; ++s) {
      const std::vector<float> row = random.Normals(batch.width());
      std::copy(row.begin(), row.end(), batch.CacheRow(0, s));
    }
    std::vector<float> q = random.Normals(6 * 8 * batch.width());
    const std::vector<float> before = Attend(*ops_, shape, batch, q);
    // The last row's own latent goes bad: only rows that see it may notice.
    std::fill_n(batch.CacheRow(0, context + 5), batch.width(), NAN);
    const std::vector<float> after = Attend(*ops_, shape, batch, q);
    const size_t row = 8 * 512;
    EXPECT_EQ(std::memcmp(before.data(), after.data(), 5 * row * 4), 0);
    EXPECT_TRUE(std::isnan(after[5 * row]));
  }
}

TEST_P(AttentionTest, LargeScoresDoNotOverflow) {
  Random random(5);
  const MlaShape shape = Shape(2);
  Batch batch(shape, 64, {{200, 1, false, {1}}}, 1);
  for (int s = 0; s < 201; ++s) {
    const std::vector<float> row = random.Normals(batch.width(), 30);
    std::copy(row.begin(), row.end(), batch.CacheRow(0, s));
  }
  std::vector<float> q = random.Normals(2 * batch.width(), 30);
  for (float x : Attend(*ops_, shape, batch, q)) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(AttentionTest, WritesNormedLatentsAndRotatedKeys) {
  Random random(6);
  const MlaShape shape = Shape(1, 24, 4);
  const std::vector<Request> requests = {{5, 3, false, {1, 3, 5}}, {9, 4, true, {}}};
  Batch batch(shape, 4, requests, 3);
  const int64_t positions = 20, pairs = 2;
  std::vector<float> cos(positions * pairs), sin(positions * pairs);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < pairs; ++i) {
      cos[p * pairs + i] = std::cos(p * std::pow(50000.0f, -i / 2.0f));
      sin[p * pairs + i] = std::sin(p * std::pow(50000.0f, -i / 2.0f));
    }
  }
  const RopeTable rope = {View(cos, positions, pairs), View(sin, positions, pairs)};
  std::vector<float> kv_a = random.Normals(batch.rows() * batch.width()),
                     weight = random.Normals(24);
  ops_->MlaWriteCache(View(kv_a, batch.rows(), batch.width()), View(weight, 1, 24), 1e-6f, rope,
                      batch.view(), shape, batch.cache());
  const std::vector<std::vector<int>> want_positions = {{5, 6, 6}, {9, 10, 11, 12}};
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < requests[i].rows; ++j) {
      const float* x = kv_a.data() + (batch.row_begin(i) + j) * batch.width();
      const float* got = batch.CacheRow(i, requests[i].context + j);
      double squares = 0;
      for (int c = 0; c < 24; ++c) squares += double{x[c]} * x[c];
      for (int c = 0; c < 24; ++c)
        EXPECT_NEAR(got[c], x[c] / std::sqrt(squares / 24 + 1e-6) * weight[c], 1e-5);
      const int p = want_positions[i][j];
      for (int k = 0; k < 2; ++k) {
        const double a = x[24 + 2 * k], b = x[25 + 2 * k], co = cos[p * 2 + k], si = sin[p * 2 + k];
        EXPECT_NEAR(got[24 + 2 * k], a * co - b * si, 1e-6);
        EXPECT_NEAR(got[25 + 2 * k], b * co + a * si, 1e-6);
      }
    }
  }
  // Nothing else was written.
  for (int s = 0; s < 5; ++s) EXPECT_TRUE(std::isnan(batch.CacheRow(0, s)[0]));
}

TEST_P(AttentionTest, RotationVectorOfPositionFive) {
  // Pair 0 turns by the position itself: (1, 2) at position 5.
  const MlaShape shape = Shape(1, 16, 2);
  Batch batch(shape, 8, {{5, 1, false, {1}}}, 1);
  std::vector<float> cos(6), sin(6);
  for (int p = 0; p < 6; ++p) {
    cos[p] = std::cos(static_cast<float>(p));
    sin[p] = std::sin(static_cast<float>(p));
  }
  std::vector<float> kv_a(18, 1.0f), weight(16, 1.0f);
  kv_a[17] = 2;
  ops_->MlaWriteCache(View(kv_a, 1, 18), View(weight, 1, 16), 1e-6f,
                      {View(cos, 6, 1), View(sin, 6, 1)}, batch.view(), shape, batch.cache());
  EXPECT_NEAR(batch.CacheRow(0, 5)[16], 2.20151073, 1e-6);
  EXPECT_NEAR(batch.CacheRow(0, 5)[17], -0.39159990, 1e-6);
}

TEST_P(AttentionTest, AbsorbsQueries) {
  Random random(7);
  const MlaShape shape = Shape(3, 40, 4);
  const int nope = shape.qk_nope_head_dim, head = nope + 4, latent = 44;
  Batch batch(shape, 8, {{2, 3, false, Chain(3)}, {4, 1, false, {1}}}, 1);
  std::vector<Weight> weights;
  std::vector<std::unique_ptr<Matrix>> w_uk;
  for (int h = 0; h < 3; ++h) {
    weights.push_back(RandomWeight(random, Encoding::kBf16, nope, 40));
    HostMatrix m = weights.back().Whole();
    m.transposed = true;
    w_uk.push_back(Prepare(*ops_, m));
  }
  std::vector<float> cos = random.Normals(10 * 2), sin = random.Normals(10 * 2);
  std::vector<float> q = random.Normals(4 * 3 * head), got(4 * 3 * latent);
  ops_->MlaAbsorbQuery(View(q, 4, 3 * head), w_uk, {View(cos, 10, 2), View(sin, 10, 2)},
                       batch.view(), shape, View(got, 4, 3 * latent));
  const int positions[] = {2, 3, 4, 4};
  for (int r = 0; r < 4; ++r) {
    for (int h = 0; h < 3; ++h) {
      const float* x = q.data() + (r * 3 + h) * head;
      const float* y = got.data() + (r * 3 + h) * latent;
      for (int d = 0; d < 40; ++d) {
        float sum = 0;
        for (int k = 0; k < nope; ++k) sum = std::fma(weights[h].At(k, d), x[k], sum);
        EXPECT_EQ(y[d], sum);
      }
      for (int i = 0; i < 2; ++i) {
        const float c = cos[positions[r] * 2 + i], s = sin[positions[r] * 2 + i];
        EXPECT_NEAR(y[40 + 2 * i], x[nope + 2 * i] * c - x[nope + 2 * i + 1] * s, 1e-6);
        EXPECT_NEAR(y[41 + 2 * i], x[nope + 2 * i + 1] * c + x[nope + 2 * i] * s, 1e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, AttentionTest, ::testing::ValuesIn(Isas()),
                         [](const auto& info) { return info.param; });

TEST(AttentionIsaTest, EveryInstructionSetGivesTheSameBits) {
  for (const MlaShape& shape : {Shape(8), Shape(1), Shape(3, 41, 6)}) {
    std::vector<float> first;
    for (const std::string& isa : Isas()) {
      std::unique_ptr<CpuGroup> group = MakeGroup(1, isa);
      std::unique_ptr<Ops> ops = group->CreateOps(0);
      Random random(8);
      const std::vector<Request> requests = {{150, 9, false, RandomTree(random, 9)},
                                             {0, 70, true, {}}};
      Batch batch(shape, 16, requests, 1);
      for (int i = 0; i < 2; ++i) {
        for (int64_t s = 0; s < requests[i].context + requests[i].rows; ++s) {
          const std::vector<float> row = random.Normals(batch.width());
          std::copy(row.begin(), row.end(), batch.CacheRow(i, s));
        }
      }
      std::vector<float> q = random.Normals(batch.rows() * shape.heads * batch.width());
      const std::vector<float> out = Attend(*ops, shape, batch, q);
      if (first.empty()) first = out;
      EXPECT_TRUE(SameBits(out, first)) << isa;
    }
  }
}

}  // namespace
}  // namespace coppice::kernels::cpu
