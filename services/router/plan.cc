#include "services/router/plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace coppice::router {
namespace {

using speculation::BuiltTree;
using speculation::kWidths;
using speculation::Width;

// The least prefill that a step takes beside decoding.
constexpr int kMinChunk = 32;

using PerWidth = std::array<double, kWidths>;

// Options beyond the step's rows are not to be had; the first always is.
int Choose(std::vector<speculation::WidthOption> options, const speculation::RoundCost& cost,
           int max_rows) {
  while (options.size() > 1 && options.back().rows + cost.other_rows > max_rows) {
    options.pop_back();
  }
  return speculation::ChooseWidth(options, cost);
}

// Tokens that the first `nodes` nodes of a tree are expected to commit, for each width.
PerWidth ExpectedAtWidths(const BuiltTree& tree, const std::array<int, kWidths>& nodes) {
  PerWidth expected{};
  double sum = 0;
  int counted = 0;
  for (int width = 0; width < kWidths; ++width) {
    if (nodes[width] < counted) {  // a chain longer than the tree of 9
      sum = 0;
      counted = 0;
    }
    for (; counted < std::min(nodes[width], tree.tree.nodes()); ++counted) {
      sum += std::exp(tree.score[counted]);
    }
    expected[width] = sum;
  }
  return expected;
}

// One sequence whose size its mode fixes.
void PlanAlone(const RoundItem& item, speculation::TreeBuilder* builder, RoundGrant* grant) {
  speculation::BuildRequest request = item.build;
  if (!item.drafted) {
    request.candidates = {};
    builder->Build(request, 0, &grant->tree);
    return;
  }
  const int spine = speculation::SpineLength(request.candidates, request.max_depth);
  const int budget = item.mode == Speculation::kChain ? spine : item.tree_nodes - 1;
  const std::array<int, kWidths> nodes = WidthNodes(1 + spine);
  // As wide as the widest, so that it is known what each width would have brought; cut, it is the
  // tree that its own budget would have built.
  builder->Build(request, std::max({budget, spine, nodes[kWidths - 1] - 1}), &grant->tree);
  grant->expected = ExpectedAtWidths(grant->tree, nodes);
  grant->tree.Truncate(std::min(1 + budget, grant->tree.tree.nodes()));
}

// All on `auto`, whose widths are nested trees under one budget.
void PlanTogether(absl::Span<const RoundItem* const> autos, int other_rows, double other_tokens,
                  const RoundCosts& costs, speculation::TreeBuilder* builder,
                  absl::Span<RoundGrant* const> grants) {
  if (autos.empty()) return;
  const int count = static_cast<int>(autos.size());
  std::vector<speculation::BuildRequest> requests;
  int spines = 0;
  for (const RoundItem* item : autos) {
    requests.push_back(item->build);
    spines += std::min(speculation::SpineLength(item->build.candidates, item->build.max_depth),
                       item->build.max_nodes - 1);
  }
  // The budget below the roots at each width.
  std::array<int, kWidths> budget{};
  for (int width = 0; width < kWidths; ++width) {
    budget[width] =
        width == static_cast<int>(Width::kChain) ? spines : (WidthNodes(1)[width] - 1) * count;
  }
  std::vector<BuiltTree> trees;
  std::vector<int32_t> order;
  builder->BuildBatch(requests, *std::max_element(budget.begin(), budget.end()), &trees, &order);

  std::vector<speculation::WidthOption> options(kWidths);
  std::vector<PerWidth> expected(count);
  std::vector<std::array<int, kWidths>> nodes(count);
  for (int width = 0; width < kWidths; ++width) {
    const int cut = std::min(budget[width], static_cast<int>(order.size()));
    for (int i = 0; i < count; ++i) {
      nodes[i][width] = 1;
      expected[i][width] = 1;
    }
    for (int added = 0; added < cut; ++added) {
      const int i = order[added];
      expected[i][width] += std::exp(trees[i].score[nodes[i][width]++]);
    }
    for (int i = 0; i < count; ++i) options[width].tokens += expected[i][width];
    options[width].rows = count + cut;
  }
  speculation::RoundCost cost;
  cost.verify = costs.verify;
  cost.other_rows = other_rows;
  cost.other_tokens = other_tokens;
  cost.overhead_us = costs.overhead_us + costs.DraftMicroseconds(count);  // paid by now
  const int chosen = Choose(std::move(options), cost, costs.max_rows);
  for (int i = 0; i < count; ++i) {
    // Who only looks whether drafting would pay has to look at a draft.
    const bool looks = autos[i]->looks && chosen == static_cast<int>(Width::kOff);
    trees[i].Truncate(nodes[i][looks ? static_cast<int>(Width::kChain) : chosen]);
    grants[i]->tree = std::move(trees[i]);
    grants[i]->expected = expected[i];
  }
}

// Rows for prefill in a step whose trees have `tree_rows`: those who decode should not wait much
// longer than without.
int PrefillRows(const RoundInput& input, int tree_rows, const RoundCosts& costs) {
  if (input.decoding == 0 || costs.prefill_us_per_token <= 0) return costs.max_rows;
  const double gap = std::max(costs.DraftMicroseconds(input.asked),
                              costs.verify->Microseconds(std::max(tree_rows, input.decoding)));
  return static_cast<int>(
      std::clamp(gap / costs.prefill_us_per_token, static_cast<double>(kMinChunk),
                 std::max(static_cast<double>(costs.max_rows), static_cast<double>(kMinChunk))));
}

}  // namespace

std::array<int, kWidths> WidthNodes(int chain) { return {1, chain, 9, 17, 33}; }

bool DraftingPays(absl::Span<const Decoding> decoding, absl::Span<const Decoding> deciding,
                  int others, const RoundCosts& costs) {
  const std::array<int, kWidths> nodes = WidthNodes(costs.block_size);
  std::vector<speculation::WidthOption> options(kWidths);
  for (int i = 0; i < kWidths; ++i) {
    options[i].drafted = i > 0;
    for (const Decoding& d : deciding) {
      options[i].tokens += i == 0 ? 1.0 : d.forecast->tokens(static_cast<Width>(i));
      options[i].rows += nodes[i];
    }
  }
  speculation::RoundCost cost;
  cost.verify = costs.verify;
  for (const Decoding& d : decoding) {
    switch (d.mode) {
      case Speculation::kAuto:
        break;
      case Speculation::kOff:
        cost.other_rows += 1;
        cost.other_tokens += 1;
        break;
      case Speculation::kChain:
        cost.other_rows += costs.block_size;
        cost.other_tokens += d.forecast->tokens(Width::kChain);
        break;
      case Speculation::kTree: {
        // The forecast of the widest of the known trees that is not wider.
        Width width = Width::kOff;
        for (const Width tree : {Width::kTree9, Width::kTree17, Width::kTree33}) {
          if (width == Width::kOff || nodes[static_cast<int>(tree)] <= d.tree_nodes) width = tree;
        }
        cost.other_rows += d.tree_nodes;
        cost.other_tokens += d.forecast->tokens(width);
        break;
      }
    }
  }
  cost.overhead_us = costs.overhead_us + costs.DraftMicroseconds(others);
  cost.draft_us = costs.DraftMicroseconds(others + static_cast<int>(deciding.size())) -
                  costs.DraftMicroseconds(others);
  return Choose(std::move(options), cost, costs.max_rows) != static_cast<int>(Width::kOff);
}

std::vector<RoundGrant> PlanRound(const RoundInput& input, const RoundCosts& costs,
                                  speculation::TreeBuilder* builder) {
  std::vector<RoundGrant> grants(input.items.size());
  std::vector<const RoundItem*> autos;
  std::vector<RoundGrant*> of_autos;
  int tree_rows = 0;
  double tokens = 0;
  for (size_t i = 0; i < grants.size(); ++i) {
    const RoundItem& item = input.items[i];
    grants[i].handle = item.handle;
    if (item.prefill_rows > 0) continue;
    if (item.drafted && item.mode == Speculation::kAuto) {
      autos.push_back(&item);
      of_autos.push_back(&grants[i]);
      continue;
    }
    PlanAlone(item, builder, &grants[i]);
    tree_rows += grants[i].tree.tree.nodes();
    tokens += speculation::ExpectedTokens(grants[i].tree);
  }
  PlanTogether(autos, tree_rows, tokens, costs, builder, absl::MakeSpan(of_autos));
  for (const RoundGrant* grant : of_autos) tree_rows += grant->tree.tree.nodes();

  const int prefill_rows = PrefillRows(input, tree_rows, costs);
  int left = costs.max_rows;
  std::vector<int> rows(grants.size(), 0);
  for (size_t i = 0; i < grants.size() && left > 0; ++i) {
    if (input.items[i].prefill_rows == 0) {
      rows[i] = 1;
      --left;
    }
  }
  for (size_t i = 0; i < grants.size() && left > 0; ++i) {
    if (rows[i] == 0) continue;
    const int more = std::min(left, grants[i].tree.tree.nodes() - 1);
    rows[i] += more;
    left -= more;
  }
  int prefill = std::min(left, prefill_rows);
  for (size_t i = 0; i < grants.size(); ++i) {
    if (input.items[i].prefill_rows == 0) {
      if (rows[i] > 0) grants[i].tree.Truncate(rows[i]);
    } else {
      rows[i] = grants[i].prefill = std::min(prefill, input.items[i].prefill_rows);
      prefill -= rows[i];
    }
  }
  size_t kept = 0;
  for (size_t i = 0; i < grants.size(); ++i) {
    if (rows[i] == 0) continue;
    if (kept != i) grants[kept] = std::move(grants[i]);
    ++kept;
  }
  grants.resize(kept);
  return grants;
}

}  // namespace coppice::router
