// What `--json` prints.
#ifndef COPPICE_CLIENT_CLI_JSON_SHAPES_H_
#define COPPICE_CLIENT_CLI_JSON_SHAPES_H_

#include <string>

#include "client/cli/state_dir.h"
#include "client/client.h"
#include "nlohmann/json.hpp"

namespace coppice::cli {

// stop, length, cancelled or deadline.
std::string FinishReasonName(v1::FinishReason reason);

// {text, token_ids, finish_reason, stop_matched?, usage{prompt_tokens, completion_tokens,
// cached_tokens},
//  speculation{rounds, drafted, accepted, acceptance_length}, timing{ttft_ms, itl_ms, total_ms,
//  queue_ms}, seed, request_id, resumes, logprobs[{token, log_prob, top[{token, log_prob}]}]?}
nlohmann::ordered_json CompletionJson(const Completion& completion);

// {router{…}, verifiers[…], drafters[…], speculation{…}, processes[{role, address, pid, log}]};
// epochs and fingerprints are 16 hexadecimal digits.
nlohmann::ordered_json StateJson(const v1::ClusterState& state, const ClusterRecord& record);

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_JSON_SHAPES_H_
