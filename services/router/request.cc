#include "services/router/request.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "speculation/tree.h"

namespace coppice::router {
namespace {

// Moves `ids` over where each lies in the vocabulary.
absl::Status CheckIds(const std::vector<uint32_t>& ids, const char* field, int vocab_size,
                      std::vector<int32_t>* out) {
  out->reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= static_cast<uint32_t>(vocab_size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          field, "[", i, "] is ", ids[i], "; the model's ids go from 0 to ", vocab_size - 1));
    }
    out->push_back(static_cast<int32_t>(ids[i]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Request> CheckRequest(RequestFields fields, const RequestLimits& limits,
                                     const std::function<uint64_t()>& random) {
  Request request;
  if (fields.request_id.size() > kMaxRequestIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat("request_id has ", fields.request_id.size(),
                                                   " bytes; at most ", kMaxRequestIdBytes,
                                                   " are taken"));
  }
  request.id = fields.request_id.empty() ? absl::StrFormat("req-%016x", random())
                                         : std::move(fields.request_id);
  if (fields.prompt.empty()) {
    return absl::InvalidArgumentError(
        "prompt is empty; give at least one token of text, chat or token_ids");
  }
  if (absl::Status status =
          CheckIds(fields.prompt, "token_ids", limits.vocab_size, &request.prompt);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckIds(fields.stop_token_ids, "stop_token_ids", limits.vocab_size,
                                     &request.stop_token_ids);
      !status.ok()) {
    return status;
  }
  if (request.stop_token_ids.size() > kMaxStopTokenIds) {
    return absl::InvalidArgumentError(absl::StrCat("stop_token_ids has ",
                                                   request.stop_token_ids.size(), " ids; at most ",
                                                   kMaxStopTokenIds, " are taken"));
  }
  if (!fields.ignore_eos) {
    request.stop_token_ids.insert(request.stop_token_ids.end(), limits.eos_token_ids.begin(),
                                  limits.eos_token_ids.end());
  }
  std::sort(request.stop_token_ids.begin(), request.stop_token_ids.end());
  request.stop_token_ids.erase(
      std::unique(request.stop_token_ids.begin(), request.stop_token_ids.end()),
      request.stop_token_ids.end());

  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t room = limits.max_position_embeddings - prompt;
  if (room < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the prompt has ", prompt, " tokens; the model's limit is ",
                     limits.max_position_embeddings, " with at least one generated"));
  }
  if (fields.max_tokens.has_value()) {
    if (*fields.max_tokens == 0) {
      return absl::InvalidArgumentError("max_tokens is 0; ask for at least 1");
    }
    if (*fields.max_tokens > room) {
      return absl::InvalidArgumentError(
          absl::StrCat("prompt (", prompt, " tokens) + max_tokens (", *fields.max_tokens,
                       ") exceed the model's limit of ", limits.max_position_embeddings,
                       "; max_tokens can be at most ", room, " here"));
    }
    request.max_tokens = static_cast<int>(*fields.max_tokens);
  } else {
    // As many as the model's limit and the pool leave.
    int64_t left = room;
    if (limits.pool_tokens > 0) left = std::min(left, limits.pool_tokens - kRoundSlots - prompt);
    request.max_tokens = static_cast<int>(std::max<int64_t>(left, 1));
  }

  request.temperature = fields.temperature.value_or(0.0f);
  if (!std::isfinite(request.temperature) || request.temperature < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature is ", request.temperature,
                     "; give 0 (always the likeliest token) or a finite number above it"));
  }
  request.top_p = fields.top_p.value_or(1.0f);
  if (!(request.top_p > 0 && request.top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "top_p is ", request.top_p, "; give a number above 0 and at most 1 (1 turns it off)"));
  }
  request.top_k = static_cast<int>(
      std::min<uint32_t>(fields.top_k.value_or(0), static_cast<uint32_t>(limits.vocab_size)));
  request.min_p = fields.min_p.value_or(0.0f);
  LogitRules& rules = request.rules;
  rules.repetition_penalty = fields.repetition_penalty.value_or(1.0f);
  rules.frequency_penalty = fields.frequency_penalty.value_or(0.0f);
  rules.presence_penalty = fields.presence_penalty.value_or(0.0f);
  rules.min_tokens = fields.min_tokens;
  for (const auto& [id, bias] : fields.logit_bias) {
    rules.logit_bias.push_back({static_cast<int32_t>(id), bias});
  }
  SamplingParams sampling;
  sampling.min_p = request.min_p;
  sampling.rules = rules;
  if (absl::Status status = Validate(sampling, limits.vocab_size); !status.ok()) return status;
  if (rules.min_tokens > request.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "min_tokens is ", rules.min_tokens, ", more than max_tokens (", request.max_tokens, ")"));
  }
  if (fields.prompt_logprobs.has_value()) {
    return absl::InvalidArgumentError(
        "prompt_logprobs is set; Coppice computes log-probabilities of generated tokens only "
        "(logprobs)");
  }
  if (fields.logprobs.has_value()) {
    if (*fields.logprobs > static_cast<uint32_t>(kMaxLogProbs)) {
      return absl::InvalidArgumentError(absl::StrCat("logprobs is ", *fields.logprobs, "; at most ",
                                                     kMaxLogProbs, " alternatives are told"));
    }
    request.logprobs = static_cast<int>(*fields.logprobs);
  }
  if (fields.speculation < 0 || fields.speculation > 4) {
    return absl::InvalidArgumentError(absl::StrCat("speculation is ", fields.speculation,
                                                   "; it is auto (1), off (2), chain (3) or "
                                                   "tree (4)"));
  }
  request.speculation = fields.speculation == 0 ? limits.default_speculation
                                                : static_cast<Speculation>(fields.speculation);
  request.tree_nodes = static_cast<int>(
      fields.tree_nodes.value_or(static_cast<uint32_t>(limits.default_tree_nodes)));
  if (fields.tree_nodes.has_value() &&
      (*fields.tree_nodes < 1 || *fields.tree_nodes > speculation::kMaxNodes)) {
    return absl::InvalidArgumentError(absl::StrCat("tree_nodes is ", *fields.tree_nodes,
                                                   "; a tree has 1 to ", speculation::kMaxNodes,
                                                   " nodes, the root counted"));
  }
  request.stop = std::move(fields.stop);
  request.priority = fields.priority;

  if (fields.resume.has_value()) {
    request.resumed = true;
    request.seed = fields.resume->seed;
    if (fields.seed.has_value() && *fields.seed != fields.resume->seed) {
      return absl::InvalidArgumentError(
          absl::StrCat("resume.seed is ", fields.resume->seed, " but seed is ", *fields.seed,
                       "; a resumed stream goes on with the seed it began with"));
    }
    if (absl::Status status = CheckIds(fields.resume->token_ids, "resume.token_ids",
                                       limits.vocab_size, &request.received);
        !status.ok()) {
      return status;
    }
    if (request.received.size() > static_cast<size_t>(request.max_tokens)) {
      return absl::InvalidArgumentError(
          absl::StrCat("resume.token_ids has ", request.received.size(),
                       " ids, more than max_tokens (", request.max_tokens, ")"));
    }
  } else {
    request.seed = fields.seed.has_value() ? *fields.seed : random();
  }
  if (limits.pool_tokens > 0) {
    if (absl::Status status = CheckFits(request, limits.pool_tokens); !status.ok()) return status;
  }
  return request;
}

absl::Status CheckFits(const Request& request, int64_t pool_tokens) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt + request.max_tokens + kRoundSlots <= pool_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("prompt (", prompt, " tokens) + max_tokens (", request.max_tokens, ") + ",
                   kRoundSlots, " for a round can never fit the verifier's pool of ", pool_tokens,
                   " tokens; ask for less, or start the verifier with a larger --pool-tokens"));
}

}  // namespace coppice::router
