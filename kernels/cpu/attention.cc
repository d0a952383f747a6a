// Attention of the target (latent, paged, over trees) and of the drafter (grouped heads, ring of
// positions).
#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"

namespace coppice::kernels::cpu {
namespace {

// Rows of a chunk that walk the tiles together, so that each tile's keys are read once for many
// queries while their accumulators stay in the cache.
constexpr int kQueriesTogether = 64;

float* Row(const Tensor& t, int64_t row) { return t.f32() + row * t.stride; }

// Rotates the pairs (x[2i], x[2i + 1]).
void RotateInterleaved(const float* x, const float* cos, const float* sin, int pairs, float* out) {
  for (int i = 0; i < pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Rotates the pairs (x[i], x[i + pairs]) in place.
void RotateHalves(float* x, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    const float a = x[i], b = x[i + pairs];
    x[i] = a * cos[i] - b * sin[i];
    x[i + pairs] = b * cos[i] + a * sin[i];
  }
}

// One request's tokens in the cache, by logical slot.
class PageWalk {
 public:
  PageWalk(const RowBatch& batch, int request, const LatentCache& cache)
      : pages_(batch.page_table.i32() + int64_t{request} * batch.page_table.stride),
        cache_(cache) {}
  float* At(int64_t slot) const {
    return Row(cache_.rows, int64_t{pages_[slot / cache_.page_size]} * cache_.page_size +
                                slot % cache_.page_size);
  }
  // Slots [begin, end).
  void Append(int64_t begin, int64_t end, std::vector<const float*>* out) const {
    while (begin < end) {
      const float* row = At(begin);
      const int64_t stop = std::min(end, (begin / cache_.page_size + 1) * cache_.page_size);
      for (; begin < stop; ++begin, row += cache_.rows.stride) out->push_back(row);
    }
  }

 private:
  const int32_t* pages_;
  const LatentCache& cache_;
};

// Makes the list readable up to a multiple of kTokenPad.
void Pad(std::vector<const float*>* tokens) {
  while (tokens->size() % kTokenPad != 0) tokens->push_back(tokens->back());
}

}  // namespace

void CpuOps::MlaWriteCache(Tensor kv_a, Tensor norm_weight, float eps, const RopeTable& rope,
                           const RowBatch& batch, const MlaShape& shape, LatentCache cache) {
  const int pairs = shape.qk_rope_head_dim / 2;
  for (int r = 0; r < batch.requests; ++r) {
    const PageWalk pages(batch, r, cache);
    const int begin = batch.row_begin.i32()[r], end = batch.row_begin.i32()[r + 1];
    for (int row = begin; row < end; ++row) {
      float* to = pages.At(int64_t{batch.context_len.i32()[r]} + row - begin);
      const float* from = Row(kv_a, row);
      const int64_t position = batch.position.i32()[row];
      kernels_.rms_norm(from, norm_weight.f32(), shape.kv_lora_rank, eps, to);
      RotateInterleaved(from + shape.kv_lora_rank, Row(rope.cos, position), Row(rope.sin, position),
                        pairs, to + shape.kv_lora_rank);
    }
  }
}

void CpuOps::MlaAbsorbQuery(Tensor q, absl::Span<const std::unique_ptr<Matrix>> w_uk,
                            const RopeTable& rope, const RowBatch& batch, const MlaShape& shape,
                            Tensor q_latent) {
  const int head_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim;
  const int latent_dim = shape.kv_lora_rank + shape.qk_rope_head_dim;
  for (int h = 0; h < shape.heads; ++h) {
    Product(q.f32() + h * head_dim, q.stride, nullptr, batch.rows, *w_uk[h],
            q_latent.f32() + h * latent_dim, q_latent.stride,
            h + 1 < shape.heads ? w_uk[h + 1].get() : nullptr);
  }
  for (int row = 0; row < batch.rows; ++row) {
    const int64_t position = batch.position.i32()[row];
    for (int h = 0; h < shape.heads; ++h) {
      RotateInterleaved(Row(q, row) + h * head_dim + shape.qk_nope_head_dim,
                        Row(rope.cos, position), Row(rope.sin, position),
                        shape.qk_rope_head_dim / 2,
                        Row(q_latent, row) + h * latent_dim + shape.kv_lora_rank);
    }
  }
}

void CpuOps::MlaAttention(Tensor q_latent, const RowBatch& batch, const MlaShape& shape,
                          LatentCache cache, Tensor o_latent) {
  const int heads = shape.heads;
  const int64_t key_dim = shape.kv_lora_rank + shape.qk_rope_head_dim;
  AttentionLists& lists = lists_;
  AttendArgs args;
  args.key_dim = key_dim;
  args.value_dim = shape.kv_lora_rank;
  args.scale = shape.softmax_scale;

  for (int r = 0; r < batch.requests; ++r) {
    const PageWalk pages(batch, r, cache);
    const int begin = batch.row_begin.i32()[r], end = batch.row_begin.i32()[r + 1];
    const int64_t context = batch.context_len.i32()[r];
    const bool causal = batch.causal.i32()[r] != 0;
    auto visible = [&](int row) -> int64_t {
      return context + (causal ? row - begin + 1 : std::popcount(batch.ancestors.u64()[row]));
    };
    // The row's visible tokens number [from, to).
    auto append = [&](int row, int64_t from, int64_t to) {
      if (causal) {
        pages.Append(from, to, &lists.k);
        return;
      }
      pages.Append(from, std::min(to, context), &lists.k);
      uint64_t path = batch.ancestors.u64()[row];
      for (int64_t i = context; i < to; ++i) {
        if (i >= from) lists.k.push_back(pages.At(context + std::countr_zero(path)));
        path &= path - 1;
      }
    };
    auto attend = [&](int first_query, int queries, int tokens, bool first) {
      Pad(&lists.k);
      args.queries = queries;
      args.q = lists.q.data() + first_query;
      args.out = lists.out.data() + first_query;
      args.max = lists.max.data() + first_query;
      args.sum = lists.sum.data() + first_query;
      args.tokens = tokens;
      args.k = args.v = lists.k.data();
      args.first = first;
      kernels_.attend(args);
    };

    const int together = std::max(1, kQueriesTogether / heads);
    for (int row = begin; row < end; row += together) {
      const int rows = std::min(together, end - row);
      lists.q.clear();
      lists.out.clear();
      for (int i = 0; i < rows; ++i) {
        for (int h = 0; h < heads; ++h) {
          lists.q.push_back(Row(q_latent, row + i) + h * key_dim);
          lists.out.push_back(Row(o_latent, row + i) + h * shape.kv_lora_rank);
        }
      }
      lists.max.resize(rows * heads);
      lists.sum.resize(rows * heads);

      // Full tiles that all these rows see alike, then each row's own: its path differs from the
      // others'.
      const int64_t alike = (causal ? visible(row) : context) / kTile;
      for (int64_t tile = 0; tile < alike; ++tile) {
        lists.k.clear();
        pages.Append(tile * kTile, (tile + 1) * kTile, &lists.k);
        attend(0, rows * heads, kTile, tile == 0);
      }
      for (int i = 0; i < rows; ++i) {
        const int64_t tokens = visible(row + i);
        for (int64_t from = alike * kTile; from < tokens; from += kTile) {
          const int64_t to = std::min(tokens, from + kTile);
          lists.k.clear();
          append(row + i, from, to);
          attend(i * heads, heads, static_cast<int>(to - from), from == 0);
        }
      }
      for (int i = 0; i < rows * heads; ++i) {
        kernels_.scale(lists.out[i], shape.kv_lora_rank, 1.0f / lists.sum[i]);
      }
    }
  }
}

void CpuOps::DraftWriteContext(Tensor kv, absl::Span<const Tensor> k_norm, const RopeTable& rope,
                               Tensor slot, Tensor position, const GqaShape& shape,
                               DraftCache cache) {
  const int64_t width = int64_t{shape.kv_heads} * shape.head_dim;
  for (int64_t row = 0; row < kv.rows; ++row) {
    const int64_t p = position.i32()[row];
    for (int layer = 0; layer < cache.layers; ++layer) {
      const int64_t entry =
          (int64_t{slot.i32()[row]} * cache.layers + layer) * cache.window + p % cache.window;
      const float* from = Row(kv, row) + layer * 2 * width;
      float* key = Row(cache.keys, entry);
      for (int h = 0; h < shape.kv_heads; ++h) {
        kernels_.rms_norm(from + h * shape.head_dim, k_norm[layer].f32(), shape.head_dim,
                          shape.rms_norm_eps, key + h * shape.head_dim);
        RotateHalves(key + h * shape.head_dim, Row(rope.cos, p), Row(rope.sin, p),
                     shape.head_dim / 2);
      }
      std::memcpy(Row(cache.values, entry), from + width, width * sizeof(float));
    }
  }
}

void CpuOps::DraftAttention(Tensor qkv, Tensor q_norm, Tensor k_norm, const RopeTable& rope,
                            const DraftBatch& batch, int layer, bool causal, const GqaShape& shape,
                            DraftCache cache, Tensor out) {
  const int block = batch.block_size, heads = shape.heads, dim = shape.head_dim;
  const int group = heads / shape.kv_heads;  // query heads of one key/value head
  AttentionLists& lists = lists_;
  AttendArgs args;
  args.key_dim = args.value_dim = dim;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));

  // Normed and rotated queries, then keys, of one block.
  float* queries = rows_.Get(int64_t{block} * (heads + shape.kv_heads) * dim);
  float* keys = queries + int64_t{block} * heads * dim;
  for (int b = 0; b < batch.blocks; ++b) {
    for (int i = 0; i < block; ++i) {
      const int64_t row = int64_t{b} * block + i;
      const int64_t position = batch.position.i32()[row];
      const float* cos = Row(rope.cos, position);
      const float* sin = Row(rope.sin, position);
      auto place = [&](const float* from, const Tensor& norm, float* to) {
        kernels_.rms_norm(from, norm.f32(), dim, shape.rms_norm_eps, to);
        RotateHalves(to, cos, sin, dim / 2);
      };
      for (int h = 0; h < heads; ++h) {
        place(Row(qkv, row) + h * dim, q_norm, queries + (int64_t{i} * heads + h) * dim);
      }
      for (int h = 0; h < shape.kv_heads; ++h) {
        place(Row(qkv, row) + (heads + h) * dim, k_norm,
              keys + (int64_t{i} * shape.kv_heads + h) * dim);
      }
    }
    const int64_t context_begin = batch.context_begin.i32()[b];
    const int64_t context = batch.context_end.i32()[b] - context_begin;
    assert(context >= 0 && context <= cache.window);
    const int64_t first_entry = context_begin % cache.window;
    const int64_t ring = (int64_t{batch.slot.i32()[b]} * cache.layers + layer) * cache.window;
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      lists.q.clear();
      lists.out.clear();
      for (int i = 0; i < block; ++i) {
        for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          lists.q.push_back(queries + (int64_t{i} * heads + h) * dim);
          lists.out.push_back(Row(out, int64_t{b} * block + i) + h * dim);
        }
      }
      lists.max.resize(block * group);
      lists.sum.resize(block * group);
      // Visible tokens [from, to): the context in order of position, then the block's own rows.
      auto attend = [&](int first_query, int count, int64_t from, int64_t to) {
        lists.k.clear();
        lists.v.clear();
        for (int64_t t = from; t < to; ++t) {
          if (t < context) {
            // The context fits the ring, so it wraps at most once.
            const int64_t wrapped =
                first_entry + t - (first_entry + t < cache.window ? 0 : cache.window);
            const int64_t entry = ring + wrapped;
            lists.k.push_back(Row(cache.keys, entry) + kv_head * dim);
            lists.v.push_back(Row(cache.values, entry) + kv_head * dim);
          } else {
            const int64_t own = t - context;
            lists.k.push_back(keys + (own * shape.kv_heads + kv_head) * dim);
            lists.v.push_back(Row(qkv, int64_t{b} * block + own) +
                              (heads + shape.kv_heads + kv_head) * dim);
          }
        }
        Pad(&lists.k);
        args.queries = count;
        args.q = lists.q.data() + first_query;
        args.out = lists.out.data() + first_query;
        args.max = lists.max.data() + first_query;
        args.sum = lists.sum.data() + first_query;
        args.tokens = static_cast<int>(to - from);
        args.k = lists.k.data();
        args.v = lists.v.data();
        args.first = from == 0;
        kernels_.attend(args);
      };
      const int64_t alike = causal ? context / kTile * kTile : context + block;
      for (int64_t from = 0; from < alike; from += kTile) {
        attend(0, block * group, from, std::min(alike, from + kTile));
      }
      if (causal) {
        for (int i = 0; i < block; ++i) {
          for (int64_t from = alike; from < context + i + 1; from += kTile) {
            attend(i * group, group, from, std::min(context + i + 1, from + kTile));
          }
        }
      }
      for (int i = 0; i < block * group; ++i)
        kernels_.scale(lists.out[i], dim, 1.0f / lists.sum[i]);
    }
  }
}

}  // namespace coppice::kernels::cpu
