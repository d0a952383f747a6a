// Routing and the experts.
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_ops.h"

namespace coppice::kernels::cpu {
namespace {

// Floats a rank may publish for one chunk of rows.
constexpr int64_t kChunkFloats = int64_t{4} << 20;

float* Row(const Tensor& t, int64_t row) { return t.f32() + row * t.stride; }

// The `count` best of values, best first, ties to the lower index; -infinity is never chosen.
// Returns how many.
int Best(const float* values, int n, int count, int32_t* out) {
  int held = 0;
  for (int i = 0; i < n; ++i) {
    if (values[i] == -std::numeric_limits<float>::infinity()) continue;
    if (held == count && !(values[i] > values[out[count - 1]])) continue;
    int at = held < count ? held++ : count - 1;
    for (; at > 0 && values[i] > values[out[at - 1]]; --at) out[at] = out[at - 1];
    out[at] = i;
  }
  return held;
}

}  // namespace

void CpuOps::Route(Tensor x, const Matrix& gate, Tensor bias, const RouterShape& shape, Tensor ids,
                   Tensor weights) {
  const int experts = shape.experts;
  const int per_group = experts / shape.n_group;
  // Per row: logits; then, for one row at a time, probabilities, choices and group scores.
  float* logits = rows_.Get((x.rows + 3) * int64_t{experts});
  float* probability = logits + x.rows * experts;
  float* choice = probability + experts;
  float* group_score = choice + experts;
  int32_t* groups = indices_.Get(shape.n_group);
  Product(x.f32(), x.stride, nullptr, x.rows, gate, logits, experts);
  for (int64_t r = 0; r < x.rows; ++r) {
    int32_t* id = ids.i32() + r * ids.stride;
    float* weight = Row(weights, r);
    const float* logit = logits + r * experts;
    std::fill(id, id + shape.top_k, -1);
    std::fill(weight, weight + shape.top_k, 0.0f);
    if (!std::all_of(logit, logit + experts, [](float v) { return std::isfinite(v); })) continue;

    kernels_.sigmoid(logit, experts, probability);
    for (int e = 0; e < experts; ++e) choice[e] = probability[e] + bias.f32()[e];
    if (shape.topk_group < shape.n_group) {
      for (int g = 0; g < shape.n_group; ++g) {
        std::array<int32_t, 2> best;
        const int found = Best(choice + g * per_group, per_group, 2, best.data());
        group_score[g] = 0;
        for (int i = 0; i < found; ++i) group_score[g] += choice[g * per_group + best[i]];
      }
      const int kept = Best(group_score, shape.n_group, shape.topk_group, groups);
      for (int g = 0; g < shape.n_group; ++g) {
        if (std::find(groups, groups + kept, g) != groups + kept) continue;
        std::fill(choice + g * per_group, choice + (g + 1) * per_group,
                  -std::numeric_limits<float>::infinity());
      }
    }
    const int found = Best(choice, experts, shape.top_k, id);
    float sum = 0;
    for (int i = 0; i < found; ++i) sum += probability[id[i]];
    const float denominator = shape.norm_topk_prob ? sum + 1e-20f : 1.0f;
    for (int i = 0; i < found; ++i) {
      weight[i] = probability[id[i]] / denominator * shape.routed_scaling_factor;
    }
  }
}

// Rows [begin, begin + rows) of a Moe call: their (row, slot) pairs sorted by expert.
struct CpuOps::MoeChunk {
  Tensor x;
  int64_t rows = 0;
  int64_t hidden = 0;
  int64_t pairs = 0;                      // (row, slot) pairs with an expert
  const int32_t* expert_begin = nullptr;  // [experts + 1]: each expert's pairs
  const int32_t* pair_row = nullptr;      // [pairs]
  float* out = nullptr;                   // segment s of pair p at out + (s * pairs + p) * hidden
  float* shared_out = nullptr;  // segment s of row r at shared_out + (s * rows + r) * hidden
};

void CpuOps::ComputeExperts(const MoeChunk& chunk, const ExpertWeights& experts) {
  auto run = [&](const ExpertWeights::Expert& expert, const int32_t* row_index, int64_t rows,
                 float* out, int64_t segment_stride, const Matrix* next) {
    const int64_t width = expert.gate_up->outputs(), slice = width / 2;
    float* gate_up = gate_up_.Get(rows * width);
    float* activation = activation_.Get(rows * slice);
    const SegmentedMatrix& down = expert.down_segments;
    Product(chunk.x.f32(), chunk.x.stride, row_index, rows, *expert.gate_up, gate_up, width,
            down[0].get());
    for (int64_t r = 0; r < rows; ++r) {
      kernels_.swiglu(gate_up + r * width, gate_up + r * width + slice, slice,
                      activation + r * slice);
    }
    if (static_cast<int>(down.size()) == kSegments) {
      Product(activation, slice, nullptr, rows, down, out, chunk.hidden, next);
      return;
    }
    for (size_t s = 0; s < down.size(); ++s) {
      Product(activation + s * down[s]->inputs(), slice, nullptr, rows, *down[s],
              out + s * segment_stride, chunk.hidden,
              s + 1 < down.size() ? down[s + 1].get() : next);
    }
  };
  const int num_experts = static_cast<int>(experts.experts.size());
  auto count = [&](int e) { return chunk.expert_begin[e + 1] - chunk.expert_begin[e]; };
  auto next_from = [&](int e) {
    while (e < num_experts && (count(e) == 0 || experts.experts[e].gate_up == nullptr)) ++e;
    return e;
  };
  for (int e = next_from(0); e < num_experts;) {
    const int after = next_from(e + 1);
    const int32_t begin = chunk.expert_begin[e];
    run(experts.experts[e], chunk.pair_row + begin, count(e), chunk.out + begin * chunk.hidden,
        chunk.pairs * chunk.hidden,
        after < num_experts ? experts.experts[after].gate_up.get() : experts.shared.gate_up.get());
    e = after;
  }
  if (experts.shared.gate_up != nullptr) {
    run(experts.shared, nullptr, chunk.rows, chunk.shared_out, chunk.rows * chunk.hidden, nullptr);
  }
}

void CpuOps::Moe(Tensor x, Tensor ids, Tensor weights, const ExpertWeights& experts,
                 Tensor residual) {
  const int num_experts = static_cast<int>(experts.experts.size());
  const int64_t top_k = ids.cols, hidden = residual.cols;
  const int per_rank = kSegments / ranks();
  const int sums_per_rank = ranks() == 1 ? 1 : per_rank;  // alone, a rank adds its segments at once
  // Every rank cuts the rows alike.
  const int64_t chunk_rows = std::max<int64_t>(
      16, kChunkFloats / (sums_per_rank * (top_k + 1) * std::max<int64_t>(hidden, 1)));
  for (int64_t begin = 0; begin < x.rows; begin += chunk_rows) {
    MoeChunk chunk;
    chunk.rows = std::min(chunk_rows, x.rows - begin);
    chunk.x = x.Rows(begin, chunk.rows);
    chunk.hidden = hidden;

    // A counting sort keeps the pairs of an expert in order of row.
    int32_t* expert_begin = indices_.Get(num_experts + 2 + 2 * chunk.rows * top_k);
    int32_t* pair_row = expert_begin + num_experts + 2;
    int32_t* pair_of = pair_row + chunk.rows * top_k;  // [rows, top_k]
    std::fill(expert_begin, expert_begin + num_experts + 2, 0);
    auto id_of = [&](int64_t r, int64_t slot) {
      return ids.i32()[(begin + r) * ids.stride + slot];
    };
    for (int64_t r = 0; r < chunk.rows; ++r) {
      for (int64_t slot = 0; slot < top_k; ++slot) {
        assert(id_of(r, slot) < num_experts);
        if (id_of(r, slot) >= 0) ++expert_begin[id_of(r, slot) + 2];
      }
    }
    for (int e = 2; e < num_experts + 2; ++e) expert_begin[e] += expert_begin[e - 1];
    for (int64_t r = 0; r < chunk.rows; ++r) {
      for (int64_t slot = 0; slot < top_k; ++slot) {
        const int32_t e = id_of(r, slot);
        if (e < 0) continue;
        const int32_t pair = expert_begin[e + 1]++;
        pair_row[pair] = static_cast<int32_t>(r);
        pair_of[r * top_k + slot] = pair;
      }
    }
    chunk.pairs = expert_begin[num_experts];
    chunk.expert_begin = expert_begin;
    chunk.pair_row = pair_row;
    const int64_t expert_floats = sums_per_rank * chunk.pairs * hidden;
    const int64_t all_floats = expert_floats + sums_per_rank * chunk.rows * hidden;
    chunk.out = shared_scratch().Get(all_floats + num_experts);
    chunk.shared_out = chunk.out + expert_floats;
    ComputeExperts(chunk, experts);

    // Beside its sums a rank says which experts it has whole; it keeps no pointer to the caller's.
    float* whole_here = chunk.out + all_floats;
    for (int e = 0; e < num_experts; ++e) {
      const ExpertWeights::Expert& expert = experts.experts[e];
      whole_here[e] = expert.gate_up != nullptr && expert.down_segments.size() == kSegments;
    }
    HostCollective::All all;
    if (ranks() == 1) {
      all[0] = {chunk.out, whole_here};
    } else {
      all = Exchange({chunk.out, whole_here});
    }
    auto base = [&](int rank) { return static_cast<const float*>(all[rank].data); };
    auto has_whole = [&](int rank, int e) {
      return static_cast<const float*>(all[rank].more)[e] != 0;
    };
    auto spread = [&](Segments* s, int64_t offset, int64_t stride) {
      s->count = kSegments;
      for (int i = 0; i < kSegments; ++i) {
        s->of[i] = base(i / per_rank) + offset + i % per_rank * stride;
      }
    };
    term_segments_.resize(top_k + 1);
    term_sums_.resize(top_k);
    term_weights_.resize(top_k);
    AddOverRanks(residual.Rows(begin, chunk.rows), [&](int64_t r, CombineArgs* args) {
      args->num_terms = 0;
      args->terms = term_sums_.data();
      args->weights = term_weights_.data();
      for (int64_t slot = 0; slot < top_k; ++slot) {
        const int32_t e = id_of(r, slot);
        if (e < 0) continue;
        Segments& s = term_segments_[args->num_terms];
        const int64_t offset = pair_of[r * top_k + slot] * hidden;
        int whole = 0;
        while (whole < ranks() && !has_whole(whole, e)) ++whole;
        if (whole < ranks()) {
          s.count = 1;
          s.of[0] = base(whole) + offset;
        } else {
          spread(&s, offset, chunk.pairs * hidden);
        }
        term_sums_[args->num_terms] = {s.of.data(), s.count};
        term_weights_[args->num_terms] = Row(weights, begin + r)[slot];
        ++args->num_terms;
      }
      if (experts.shared.gate_up == nullptr) return;
      Segments& s = term_segments_[top_k];
      const int64_t offset = expert_floats + r * hidden;
      if (ranks() == 1) {
        s.count = 1;
        s.of[0] = base(0) + offset;
      } else {
        spread(&s, offset, chunk.rows * hidden);
      }
      args->last = {s.of.data(), s.count};
    });
  }
}

}  // namespace coppice::kernels::cpu
