// From a stream of token ids to text that may be sent at once.
#ifndef COPPICE_SERVICES_ROUTER_DETOKENIZER_H_
#define COPPICE_SERVICES_ROUTER_DETOKENIZER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/tokenizer.h"

namespace coppice::router {

// One stream's detokenizer.  Works on bytes; O(1) amortised per byte and stop string.
//
// Invariant: pending_ holds exactly the bytes received but not yet emitted, and they are the
// shortest tail that is an unfinished UTF-8 character or begins with a proper prefix of a stop
// string.  So however the tokens are grouped, the concatenated output is the same.
//
// Control tokens (Tokenizer::IsControl: end of sequence, turn markers, reserved ids) and ids
// outside the vocabulary add nothing to the text; <think>, </think> and tool-call markers appear as
// they are spelled.  Stop strings match what the tokens spell: a U+FFFD in one matches a spelled
// U+FFFD, never a replacement.
class Detokenizer {
 public:
  static constexpr size_t kMaxStopStrings = 16;
  static constexpr size_t kMaxStopBytes = 1024;

  struct Output {
    // Valid UTF-8.  Bytes that can belong to no character become U+FFFD, as soon as that is
    // certain.
    std::string text;
    // How many of the ids given were used: all of them or, where a stop string was completed, those
    // up to and including the one that completed it.  What the ids after it spell is not part of
    // the reply.
    size_t consumed = 0;
    bool stopped = false;  // a stop string was completed; it and what follows are not in the text
    std::string stop_string;  // the one that was completed
  };

  // `tokenizer` must outlive the detokenizer.  The first `min_tokens` ids complete no stop string;
  // one may begin in them and end in a later id.  INVALID_ARGUMENT where a stop string is empty,
  // longer than kMaxStopBytes or not valid UTF-8, or where there are more than kMaxStopStrings.
  static absl::StatusOr<Detokenizer> Create(const Tokenizer* tokenizer,
                                            std::vector<std::string> stop_strings,
                                            size_t min_tokens = 0);

  // Any number of ids.  After a stop string was completed: consumes nothing.
  Output Feed(absl::Span<const int32_t> ids);
  Output Feed(int32_t id) { return Feed(absl::MakeConstSpan(&id, 1)); }

  // What is still held back, at the end of the stream; an unfinished character becomes U+FFFD.
  // Empty after a stop string was completed.
  std::string Flush();

  bool stopped() const { return stopped_; }

 private:
  // Knuth–Morris–Pratt matcher of one stop string; state = length of its longest prefix that ends
  // here.
  struct Stop {
    std::string text;
    std::vector<uint32_t> failure;
    size_t state = 0;
  };

  Detokenizer(const Tokenizer* tokenizer, std::vector<Stop> stops, size_t min_tokens)
      : tokenizer_(tokenizer), stops_(std::move(stops)), unstoppable_(min_tokens) {}

  // Appends one byte; true where it completes a stop string (matched_ tells which), which it does
  // only if it may.
  bool Push(char byte, bool may_stop);
  // Moves out of pending_ what lies before its last `keep` bytes.  `final`: unfinished characters
  // too.
  void Emit(size_t keep, bool final, std::string* text);

  const Tokenizer* tokenizer_;
  std::vector<Stop> stops_;
  size_t unstoppable_;  // ids still to come that complete no stop string
  std::string pending_;
  size_t head_ = 0;     // pending_ starts here: bytes are dropped from the front in bulk
  size_t held_ = 0;     // longest stop prefix that ends pending_
  size_t matched_ = 0;  // index of the completed stop string, where stopped_
  bool stopped_ = false;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_DETOKENIZER_H_
