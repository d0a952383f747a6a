// One admitted sequence, and what may be asked of it.
#ifndef COPPICE_SERVICES_VERIFIER_SEQUENCE_H_
#define COPPICE_SERVICES_VERIFIER_SEQUENCE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/verifier/step.h"
#include "speculation/tree.h"

namespace coppice::verifier {

// What the engine can hold.
struct Limits {
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  int64_t page_size = 64;
  int64_t pages = 0;            // that can be handed out
  int64_t max_rows = 2048;      // of one step
  int64_t max_sequences = 256;  // known at once
};

// Invariants: committed tokens fill slots 0 … committed - 1 of `pages`, and between steps there is
// no page beyond them.  While prefill lasts, pending < 0 and the committed tokens are the first
// of the admitted ones; then the pending token stands at position `committed`, without a slot.
// A sequence that has ended holds no pages.
struct Sequence {
  Admit admit;
  TokenCounts counts;      // of the admitted tokens and of what was generated since
  uint64_t order = 0;      // of admission
  bool preempted = false;  // ended for want of pages; its next work is told so
  int64_t committed = 0;
  int32_t pending = -1;
  int64_t generated = 0;
  bool ended = false;
  std::vector<int32_t> pages;
  int64_t last_base = -1;  // base_len of the work that `last_result` answers; -1: none yet
  WorkResult last_result;

  // Whether pages go to this one before that one: by priority, then by admission.  Nobody is
  // preempted for a sequence that ranks below it, so the first of all always advances.
  bool RanksBefore(const Sequence& other) const {
    if (admit.priority != other.admit.priority) return admit.priority > other.admit.priority;
    return order < other.order;
  }
  int64_t prompt_left() const { return static_cast<int64_t>(admit.tokens.size()) - committed; }
};

// Whether a sequence can be admitted, whatever else runs.  INVALID_ARGUMENT names the field or the
// token; RESOURCE_EXHAUSTED where it could not finish with the whole pool for itself.
absl::Status CheckAdmit(const Admit& admit, const Limits& limits);

// Work that stands at the sequence's committed length, checked.  `tree` is empty for prefill.
// INVALID_ARGUMENT with a sentence where it is malformed.
absl::StatusOr<speculation::DraftTree> CheckWork(const Work& work, const Sequence& sequence,
                                                 const Limits& limits);

// Pages that hold `tokens` slots.
inline int64_t PagesFor(int64_t tokens, int64_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_SEQUENCE_H_
