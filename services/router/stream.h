// Where a request's results go.
#ifndef COPPICE_SERVICES_ROUTER_STREAM_H_
#define COPPICE_SERVICES_ROUTER_STREAM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/router/peers.h"

namespace coppice::router {

// The last delta's figures (inference.proto, Final).
struct Final {
  FinishReason finish_reason = FinishReason::kNone;
  std::string stop_matched;
  int prompt_tokens = 0;
  int completion_tokens = 0;
  int cached_tokens = 0;
  int rounds = 0;
  int drafted = 0;
  int accepted = 0;
  double acceptance_length = 0;
  double ttft_ms = 0;
  double itl_ms = 0;
  double total_ms = 0;
  double queue_ms = 0;
};

struct Delta {
  int token_offset = 0;
  std::vector<int32_t> token_ids;
  std::string text;
  std::vector<PositionScores> logprobs;
  std::optional<uint64_t> seed;
  std::optional<Final> final;
};

// The scheduler ends every stream with exactly one Finish, after which it calls nothing more.  A
// stream that ended well got a delta with `final` before it.
class Stream {
 public:
  virtual ~Stream() = default;
  // Never blocks.  False where the reader is so slow that nothing more can be kept for it.
  virtual bool Write(Delta delta) = 0;
  virtual void Finish(const absl::Status& status) = 0;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_STREAM_H_
