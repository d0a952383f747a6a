// Which positions of which sequence the drafter has, and in which slot of the model they lie:
// bookkeeping only.
#ifndef COPPICE_SERVICES_DRAFTER_CONTEXT_WINDOW_H_
#define COPPICE_SERVICES_DRAFTER_CONTEXT_WINDOW_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace coppice::drafter {

// A verifier's sequence ids are unique within its stream.
struct SequenceKey {
  uint64_t stream = 0;
  uint64_t sequence = 0;

  friend bool operator==(const SequenceKey& a, const SequenceKey& b) {
    return a.stream == b.stream && a.sequence == b.sequence;
  }
  template <typename H>
  friend H AbslHashValue(H h, const SequenceKey& key) {
    return H::combine(std::move(h), key.stream, key.sequence);
  }
};

// What is said back about one sequence.
struct Ack {
  uint64_t sequence = 0;
  int64_t have_len = 0;
  std::optional<int64_t> need_from;
  bool no_slot = false;
};

// The context of one sequence: positions [begin, have_len), of which a slot's ring keeps the last
// `window`.
struct Context {
  int slot = -1;
  int64_t begin = 0;
  int64_t have_len = 0;
  // End of the furthest rows ever seen.  Beyond have_len: rows between were lost and have been
  // asked for.
  int64_t seen_len = 0;

  bool has_gap() const { return seen_len > have_len; }
};

// Invariant: every slot is either free or held by exactly one context; a sequence waits only while
// no slot is free. Positions of a sequence arrive in order, except that rows asked for come again;
// so rows that begin beyond have_len but before what was seen can only be an answer whose earlier
// rows will never come, and begin the context anew.
class ContextWindows {
 public:
  ContextWindows(int slots, int window);

  // Rows for positions [first, first + count) have come.  Which of them to write, and where, and
  // what to say.
  struct Placement {
    int slot = -1;      // -1: none of them
    int64_t skip = 0;   // rows at the start that are there already, or older than the window
    int64_t count = 0;  // rows to write after those; position of the first: first + skip
    Ack ack;
  };
  Placement Place(const SequenceKey& key, int64_t first, int64_t count);

  // Frees what it had; unknown sequences are no error.
  void Release(const SequenceKey& key);
  // Frees all that came on this stream.
  void CloseStream(uint64_t stream);

  // Gives free slots to those that wait, first come first served: their contexts are empty and must
  // be asked for. To be called after releases; the acks go to the streams named.
  std::vector<std::pair<uint64_t, Ack>> AdmitWaiting();

  // Null where the sequence has no context.
  const Context* Find(const SequenceKey& key) const;
  bool IsWaiting(const SequenceKey& key) const { return waiting_.contains(key); }

  // First position of the context that a draft at base_len ≤ have_len may use.
  int64_t ContextBegin(const Context& context) const;

  int slots() const { return slots_; }
  int used() const { return static_cast<int>(contexts_.size()); }
  int waiting() const { return static_cast<int>(waiting_.size()); }
  int64_t tokens() const;  // context positions held, over all sequences

  // The first broken invariant, or "".
  std::string Check() const;

 private:
  const int slots_;
  const int64_t window_;
  std::vector<int> free_;  // a heap, lowest slot first
  absl::flat_hash_map<SequenceKey, Context> contexts_;
  absl::flat_hash_map<SequenceKey, int64_t> waiting_;  // to the end of the furthest rows seen
  std::deque<SequenceKey> order_;                      // of waiting_; may name some that left
};

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_CONTEXT_WINDOW_H_
