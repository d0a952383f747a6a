// Which sequences get how many rows of the next step: a pure function.
#ifndef COPPICE_SERVICES_ROUTER_PLAN_H_
#define COPPICE_SERVICES_ROUTER_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace coppice::router {

// A sequence that could take part, in the order of rank (highest first).
struct PlanItem {
  uint64_t handle = 0;
  int tree_rows = 0;     // of its tree; 0: it is prefilling
  int prefill_rows = 0;  // of its prompt, still to come; 0: it is decoding
};

struct PlanLimits {
  int max_rows = 0;      // of the step
  int prefill_rows = 0;  // of it, for prefill chunks together
};

struct PlanGrant {
  uint64_t handle = 0;
  int rows = 0;  // the first so many nodes of the tree, or a chunk's tokens
  bool prefill = false;
};

// Decoding goes first: every tree gets its root before any gets more; what is left of max_rows goes
// to the trees in order of rank; then prefill chunks, in order of rank, as far as both limits go.
// Deterministic; grants are in the order of `items`, each of at least one row.
std::vector<PlanGrant> PlanStep(absl::Span<const PlanItem> items, const PlanLimits& limits);

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_PLAN_H_
