// A generation request: what a caller may ask for, and the checked form that the scheduler works
// with.
#ifndef COPPICE_SERVICES_ROUTER_REQUEST_H_
#define COPPICE_SERVICES_ROUTER_REQUEST_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "model/sampling.h"

namespace coppice::router {

// As in the wire's SpeculationMode.
enum class Speculation { kAuto = 1, kOff = 2, kChain = 3, kTree = 4 };

inline constexpr size_t kMaxStopTokenIds = 256;
inline constexpr size_t kMaxRequestIdBytes = 128;

// Where a stream that was broken off is to go on.
struct ResumeFrom {
  uint64_t seed = 0;
  std::vector<uint32_t> token_ids;
};

// As the caller sent it, except that the prompt is token ids.
struct RequestFields {
  std::string request_id;
  std::vector<uint32_t> prompt;
  std::optional<uint32_t> max_tokens;
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<uint32_t> top_k;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<float> frequency_penalty;
  std::optional<float> presence_penalty;
  std::vector<std::pair<uint32_t, float>> logit_bias;
  uint32_t min_tokens = 0;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
  std::optional<uint32_t> logprobs;
  std::optional<uint32_t> prompt_logprobs;
  int speculation = 0;  // the wire's number
  std::optional<uint32_t> tree_nodes;
  int priority = 0;
  std::optional<ResumeFrom> resume;
};

struct Request {
  std::string id;
  std::vector<int32_t> prompt;
  int max_tokens = 0;  // of the whole completion, what was received before a resumption included
  float temperature = 0;
  float top_p = 1;
  int top_k = 0;
  float min_p = 0;
  LogitRules rules = {};
  uint64_t seed = 0;
  std::vector<std::string> stop;
  std::vector<int32_t>
      stop_token_ids;  // ascending; the model's end-of-sequence ids included, unless ignored
  std::optional<int> logprobs;
  Speculation speculation = Speculation::kAuto;
  int tree_nodes = 0;
  int priority = 0;
  bool resumed = false;
  std::vector<int32_t> received;  // of a resumed stream
};

struct RequestLimits {
  int vocab_size = 0;
  int max_position_embeddings = 0;
  std::vector<int32_t> eos_token_ids;
  // What the verifier's pool holds, in tokens; 0: not known (yet), then the scheduler checks.
  int64_t pool_tokens = 0;
  Speculation default_speculation = Speculation::kAuto;
  int default_tree_nodes = 17;
};

// Cache slots that the round after a sequence's last token may need beyond it.
inline constexpr int kRoundSlots = 64;

// INVALID_ARGUMENT, with a sentence that names the field, the value and what would do.  `random`
// mints the seed and the id where the caller gave none.
absl::StatusOr<Request> CheckRequest(RequestFields fields, const RequestLimits& limits,
                                     const std::function<uint64_t()>& random);

// INVALID_ARGUMENT where a pool of `pool_tokens` can never hold this request.
absl::Status CheckFits(const Request& request, int64_t pool_tokens);

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_REQUEST_H_
