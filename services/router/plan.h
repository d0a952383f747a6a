// What a round does: who is drafted for, with how much tree each sequence takes part, and which
// prompts are prefilled beside.  Pure functions of what they are given.
#ifndef COPPICE_SERVICES_ROUTER_PLAN_H_
#define COPPICE_SERVICES_ROUTER_PLAN_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "services/router/request.h"
#include "speculation/build.h"
#include "speculation/cost_model.h"

namespace coppice::router {

// What is known of this verifier and this drafter.
struct RoundCosts {
  const speculation::LiveCost* verify = nullptr;
  const speculation::LiveCost* draft = nullptr;  // by blocks; null: nothing drafts
  double overhead_us = 0;                        // of a round beyond what the tables speak of
  double prefill_us_per_token = 0;               // 0: unknown
  int max_rows = 0;                              // of a step
  int block_size = 0;                            // of the drafter

  double DraftMicroseconds(int blocks) const {
    return blocks == 0 || draft == nullptr ? 0.0 : draft->Microseconds(blocks);
  }
};

// Nodes of one sequence's tree at each width: the root alone, a chain of `chain` nodes, then the
// trees that `auto` chooses among.
std::array<int, speculation::kWidths> WidthNodes(int chain);

// ---- Before the drafts

// A sequence that decodes.
struct Decoding {
  Speculation mode = Speculation::kAuto;
  int tree_nodes = 0;  // where the mode is `tree`
  const speculation::WidthForecast* forecast = nullptr;
};

// Whether a round in which the sequences on `auto` are drafted for is expected to give more tokens
// per time than one in which they decode plainly.  All of them have their say together, since they
// share the forward.  `deciding` of them are asked about now; `others` drafts are made in any case.
bool DraftingPays(absl::Span<const Decoding> decoding, absl::Span<const Decoding> deciding,
                  int others, const RoundCosts& costs);

// ---- The step

// A sequence that could take part.
struct RoundItem {
  uint64_t handle = 0;
  int prefill_rows = 0;  // of its prompt, still to come; 0: it is decoding, and:
  Speculation mode = Speculation::kAuto;
  int tree_nodes = 0;    // where the mode is `tree`
  bool drafted = false;  // else its tree is the root
  bool looks = false;    // on `auto`: drafted only to see whether that would pay
  speculation::BuildRequest build;
};

struct RoundInput {
  std::vector<RoundItem> items;  // in the order of rank, highest first
  int decoding = 0;              // sequences that decode, those that do not take part included
  int asked = 0;                 // of them, those whose draft is being made
};

struct RoundGrant {
  uint64_t handle = 0;
  int prefill = 0;              // tokens of a chunk; or
  speculation::BuiltTree tree;  // a tree
  // Of a drafted tree: the tokens that each width of this draft is expected to commit.
  std::optional<std::array<double, speculation::kWidths>> expected;
};

// The trees of all that decode under one budget: each mode's own size, and for all on `auto`
// together the width with the best rate.  Decoding goes first: every tree gets its root before any
// gets more; what is left of max_rows goes to the trees in order of rank; then prefill chunks, in
// order of rank, as far as the step goes and as far as those who decode need not wait much longer
// for it (a chunk of at least 32 rows is let pass).  Grants are in the order of the items, each of
// at least one row.  `builder` is scratch memory.
std::vector<RoundGrant> PlanRound(const RoundInput& input, const RoundCosts& costs,
                                  speculation::TreeBuilder* builder);

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_PLAN_H_
