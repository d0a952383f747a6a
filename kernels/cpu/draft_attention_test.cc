// The drafter's attention: rings of rotated keys, blocks that see their context and themselves.
#include <algorithm>
#include <numeric>

#include "kernels/cpu/test_support.h"

namespace coppice::kernels::cpu {
namespace {

constexpr int kPositions = 600;

struct Rig {
  Rig(const GqaShape& gqa, int slots, int layers, int window, uint32_t seed)
      : shape(gqa), random(seed) {
    const int pairs = shape.head_dim / 2;
    for (int p = 0; p < kPositions; ++p) {
      for (int i = 0; i < pairs; ++i) {
        const double angle = p * std::pow(50000.0, -2.0 * i / shape.head_dim);
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    const int64_t width = shape.kv_heads * shape.head_dim;
    keys.assign(int64_t{slots} * layers * window * width, NAN);
    values = keys;
    cache = {View(keys, int64_t{slots} * layers * window, width),
             View(values, int64_t{slots} * layers * window, width), slots, layers, window};
    for (int l = 0; l < layers; ++l) k_norms.push_back(random.Normals(shape.head_dim));
    q_norm = random.Normals(shape.head_dim);
  }
  RopeTable rope() {
    return {View(cos, kPositions, shape.head_dim / 2), View(sin, kPositions, shape.head_dim / 2)};
  }

  // Writes context rows of `slot` at the positions given; kv is [positions, layers * 2 * kv_heads *
  // head_dim].
  void Write(Ops& ops, int slot, const std::vector<int32_t>& positions, std::vector<float>& kv) {
    std::vector<int32_t> slots(positions.size(), slot), p = positions;
    std::vector<Tensor> norms;
    for (auto& n : k_norms) norms.push_back(View(n, 1, shape.head_dim));
    const int64_t n = positions.size();
    ops.DraftWriteContext(View(kv, n, static_cast<int64_t>(kv.size()) / n), norms, rope(),
                          View(slots, n), View(p, n), shape, cache);
  }

  GqaShape shape;
  Random random;
  std::vector<float> cos, sin, keys, values, q_norm;
  std::vector<std::vector<float>> k_norms;
  DraftCache cache;
};

struct Block {
  int slot, begin, end;
};

std::vector<float> Attend(Ops& ops, Rig& rig, const std::vector<Block>& blocks, int block_size,
                          int layer, bool causal, std::vector<float>& qkv) {
  const int rows = static_cast<int>(blocks.size()) * block_size;
  std::vector<int32_t> token(rows), position, slot, begin, end;
  for (const Block& b : blocks) {
    slot.push_back(b.slot);
    begin.push_back(b.begin);
    end.push_back(b.end);
    for (int k = 0; k < block_size; ++k) position.push_back(b.end + k);
  }
  DraftBatch batch;
  batch.blocks = static_cast<int>(blocks.size());
  batch.block_size = block_size;
  batch.token = View(token, rows);
  batch.position = View(position, rows);
  batch.slot = View(slot, batch.blocks);
  batch.context_begin = View(begin, batch.blocks);
  batch.context_end = View(end, batch.blocks);
  const int64_t width = int64_t{rig.shape.heads + 2 * rig.shape.kv_heads} * rig.shape.head_dim;
  std::vector<float> out(int64_t{rows} * rig.shape.heads * rig.shape.head_dim);
  ops.DraftAttention(View(qkv, rows, width), View(rig.q_norm, 1, rig.shape.head_dim),
                     View(rig.k_norms[layer], 1, rig.shape.head_dim), rig.rope(), batch, layer,
                     causal, rig.shape, rig.cache,
                     View(out, rows, rig.shape.heads * rig.shape.head_dim));
  return out;
}

std::vector<double> NormAndRotate(const Rig& rig, const float* x, const std::vector<float>& norm,
                                  int position) {
  const int dim = rig.shape.head_dim, pairs = dim / 2;
  double squares = 0;
  for (int i = 0; i < dim; ++i) squares += double{x[i]} * x[i];
  std::vector<double> v(dim), out(dim);
  for (int i = 0; i < dim; ++i)
    v[i] = x[i] / std::sqrt(squares / dim + rig.shape.rms_norm_eps) * norm[i];
  for (int i = 0; i < pairs; ++i) {
    const double c = rig.cos[position * pairs + i], s = rig.sin[position * pairs + i];
    out[i] = v[i] * c - v[i + pairs] * s;
    out[i + pairs] = v[i + pairs] * c + v[i] * s;
  }
  return out;
}

class DraftAttentionTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<CpuGroup> group_ = MakeGroup(1, GetParam());
  std::unique_ptr<Ops> ops_ = group_->CreateOps(0);
};

TEST_P(DraftAttentionTest, MatchesDoublePrecision) {
  const GqaShape shape = {6, 2, 24, 1e-5f};
  const int layers = 2, window = 150, block_size = 5, total = 400;
  Rig rig(shape, 3, layers, window, 1);
  const int64_t kv_width = shape.kv_heads * shape.head_dim;
  std::vector<float> kv = rig.random.Normals(total * layers * 2 * kv_width);
  std::vector<int32_t> positions(total);
  std::iota(positions.begin(), positions.end(), 0);
  rig.Write(*ops_, 2, positions, kv);
  rig.Write(*ops_, 1, positions, kv);
  // An empty context, one that fills the ring and wraps, one of more than a tile.
  const std::vector<Block> blocks = {{0, 0, 0}, {2, 250, 400}, {1, 320, 400}};
  const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  std::vector<float> qkv = rig.random.Normals(blocks.size() * block_size * width);
  for (bool causal : {false, true}) {
    for (int layer = 0; layer < layers; ++layer) {
      const std::vector<float> got = Attend(*ops_, rig, blocks, block_size, layer, causal, qkv);
      for (size_t b = 0; b < blocks.size(); ++b) {
        for (int k = 0; k < block_size; ++k) {
          for (int h = 0; h < shape.heads; ++h) {
            const int g = h / (shape.heads / shape.kv_heads);
            auto own = [&](int row, int column) {
              return qkv.data() + (b * block_size + row) * width + column * shape.head_dim;
            };
            const std::vector<double> q =
                NormAndRotate(rig, own(k, h), rig.q_norm, blocks[b].end + k);
            std::vector<std::vector<double>> keys;
            std::vector<const float*> values;
            for (int p = blocks[b].begin; p < blocks[b].end; ++p) {
              const float* row = kv.data() + (int64_t{p} * layers + layer) * 2 * kv_width;
              keys.push_back(NormAndRotate(rig, row + g * shape.head_dim, rig.k_norms[layer], p));
              values.push_back(row + kv_width + g * shape.head_dim);
            }
            for (int i = 0; i < (causal ? k + 1 : block_size); ++i) {
              keys.push_back(NormAndRotate(rig, own(i, shape.heads + g), rig.k_norms[layer],
                                           blocks[b].end + i));
              values.push_back(own(i, shape.heads + shape.kv_heads + g));
            }
            std::vector<double> p;
            for (const auto& key : keys) {
              p.push_back(std::inner_product(q.begin(), q.end(), key.begin(), 0.0) /
                          std::sqrt(shape.head_dim));
            }
            const double max = *std::max_element(p.begin(), p.end());
            double sum = 0;
            for (double& x : p) sum += x = std::exp(x - max);
            for (int d = 0; d < shape.head_dim; ++d) {
              double want = 0;
              for (size_t t = 0; t < p.size(); ++t) want += p[t] / sum * values[t][d];
              ASSERT_NEAR(got[((b * block_size + k) * shape.heads + h) * shape.head_dim + d], want,
                          2e-5)
                  << "block " << b << ", row " << k << ", head " << h;
            }
          }
        }
      }
    }
  }
}

TEST_P(DraftAttentionTest, ABlockIsTheSameAloneAndHoweverItsContextCame) {
  const GqaShape shape = {4, 2, 128, 1e-6f};
  const int layers = 2, window = 64, block_size = 8, total = 200;
  Rig one(shape, 2, layers, window, 2), other(shape, 5, layers, window, 2);
  const int64_t row = layers * 2 * shape.kv_heads * shape.head_dim;
  std::vector<float> kv = one.random.Normals(total * row);
  std::vector<int32_t> positions(total);
  std::iota(positions.begin(), positions.end(), 0);
  one.Write(*ops_, 0, positions, kv);
  // Row by row into another slot, with other sequences around.
  for (int p = 0; p < total; ++p) {
    std::vector<float> noise = other.random.Normals(row);
    other.Write(*ops_, 1, {p}, noise);
    std::vector<float> part(kv.begin() + p * row, kv.begin() + (p + 1) * row);
    other.Write(*ops_, 3, {p}, part);
  }
  const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  std::vector<float> qkv = one.random.Normals(block_size * width);
  const std::vector<float> want = Attend(*ops_, one, {{0, 140, 200}}, block_size, 1, false, qkv);
  std::vector<float> three = one.random.Normals(3 * block_size * width);
  std::copy(qkv.begin(), qkv.end(), three.begin() + block_size * width);
  const std::vector<float> got =
      Attend(*ops_, other, {{1, 150, 190}, {3, 140, 200}, {0, 0, 0}}, block_size, 1, false, three);
  EXPECT_EQ(std::memcmp(got.data() + want.size(), want.data(), want.size() * 4), 0);
}

TEST_P(DraftAttentionTest, EveryInstructionSetGivesTheSameBits) {
  std::unique_ptr<CpuGroup> generic_group = MakeGroup(1, "generic");
  std::unique_ptr<Ops> generic = generic_group->CreateOps(0);
  for (bool causal : {false, true}) {
    std::vector<std::vector<float>> outs;
    for (Ops* ops : {ops_.get(), generic.get()}) {
      Rig rig({6, 3, 40, 1e-6f}, 1, 1, 100, 3);
      std::vector<float> kv = rig.random.Normals(90 * 2 * 3 * 40);
      std::vector<int32_t> positions(90);
      std::iota(positions.begin(), positions.end(), 0);
      rig.Write(*ops, 0, positions, kv);
      std::vector<float> qkv = rig.random.Normals(7 * 12 * 40);
      outs.push_back(Attend(*ops, rig, {{0, 3, 90}}, 7, 0, causal, qkv));
    }
    EXPECT_TRUE(SameBits(outs[0], outs[1]));
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, DraftAttentionTest, ::testing::ValuesIn(Isas()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace coppice::kernels::cpu
