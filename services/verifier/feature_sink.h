// Where committed tokens' projected features go.
#ifndef COPPICE_SERVICES_VERIFIER_FEATURE_SINK_H_
#define COPPICE_SERVICES_VERIFIER_FEATURE_SINK_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/types/span.h"

namespace coppice::verifier {

// Rows of one sequence, for positions first, first + 1, …
struct FeatureRows {
  uint64_t sequence = 0;
  int64_t first = 0;
  int64_t count = 0;
  absl::Span<const uint16_t> features;  // bf16 [count, hidden_size], valid during the call
  std::optional<int32_t> pending;       // the token at position first + count, where it is known
  bool draft_ahead = false;
  // Not 0: part of the answer to this request to send again, the last of it where `answered`.
  uint64_t request = 0;
  bool answered = false;
};

// Called by the step loop's thread alone; must not block.  Rows of a sequence come in order and
// without gaps, apart from those sent again.
class FeatureSink {
 public:
  virtual ~FeatureSink() = default;

  // A sequence was admitted whose features will go there: time to connect.
  virtual void Connect(const std::string& drafter) = 0;
  // Newest positions that the drafter at this address keeps per sequence; older rows need not be
  // given.
  virtual int64_t Window(const std::string& drafter) = 0;
  virtual void Append(const std::string& drafter, const FeatureRows& rows) = 0;
  // The sequence has ended; no rows of it follow.
  virtual void Release(const std::string& drafter, uint64_t sequence) = 0;
  // The end of a step: what was given since the last call should leave now, together.
  virtual void Flush() = 0;
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_FEATURE_SINK_H_
