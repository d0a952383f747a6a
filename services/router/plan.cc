#include "services/router/plan.h"

#include <algorithm>

namespace coppice::router {

std::vector<PlanGrant> PlanStep(absl::Span<const PlanItem> items, const PlanLimits& limits) {
  std::vector<int> rows(items.size(), 0);
  int left = limits.max_rows;
  for (size_t i = 0; i < items.size() && left > 0; ++i) {
    if (items[i].tree_rows > 0) {
      rows[i] = 1;
      --left;
    }
  }
  for (size_t i = 0; i < items.size() && left > 0; ++i) {
    if (rows[i] == 0) continue;
    const int more = std::min(left, items[i].tree_rows - 1);
    rows[i] += more;
    left -= more;
  }
  int prefill = std::min(left, limits.prefill_rows);
  for (size_t i = 0; i < items.size() && prefill > 0; ++i) {
    if (items[i].tree_rows > 0) continue;
    rows[i] = std::min(prefill, items[i].prefill_rows);
    prefill -= rows[i];
  }
  std::vector<PlanGrant> grants;
  for (size_t i = 0; i < items.size(); ++i) {
    if (rows[i] > 0) grants.push_back({items[i].handle, rows[i], items[i].tree_rows == 0});
  }
  return grants;
}

}  // namespace coppice::router
