#include "services/verifier/wire.h"

#include <algorithm>
#include <limits>

namespace coppice::verifier {
namespace {

int64_t Length(uint64_t value) {
  return static_cast<int64_t>(std::min<uint64_t>(value, std::numeric_limits<int64_t>::max() / 4));
}

// Ids beyond int32 turn negative, which no vocabulary has.
std::vector<int32_t> Tokens(const google::protobuf::RepeatedField<uint32_t>& tokens) {
  return {tokens.begin(), tokens.end()};
}

Admit FromWire(const v1::Admit& admit) {
  Admit out;
  out.sequence = admit.sequence();
  out.tokens = Tokens(admit.tokens());
  out.sampling.temperature = admit.temperature();
  out.sampling.top_p = admit.top_p() == 0 ? 1 : admit.top_p();
  out.sampling.top_k =
      static_cast<int>(std::min<uint32_t>(admit.top_k(), std::numeric_limits<int32_t>::max()));
  out.sampling.seed = admit.seed();
  out.sampling.min_p = admit.min_p();
  LogitRules& rules = out.sampling.rules;
  rules.min_tokens = admit.min_tokens();
  for (const v1::LogitBias& entry : admit.logit_bias()) {
    rules.logit_bias.push_back({static_cast<int32_t>(entry.token()), entry.bias()});
  }
  rules.repetition_penalty = admit.repetition_penalty() == 0 ? 1 : admit.repetition_penalty();
  rules.frequency_penalty = admit.frequency_penalty();
  rules.presence_penalty = admit.presence_penalty();
  out.generated = admit.generated();
  out.max_tokens = admit.max_tokens();
  out.stop_token_ids = Tokens(admit.stop_token_ids());
  if (admit.has_logprobs()) out.logprobs = admit.logprobs();
  out.drafter = admit.drafter();
  out.priority = admit.priority();
  return out;
}

Work FromWire(const v1::Work& work) {
  Work out;
  out.sequence = work.sequence();
  out.base_len = Length(work.base_len());
  out.prefill = work.prefill();
  out.tokens = Tokens(work.tokens());
  out.parents.assign(work.parents().begin(), work.parents().end());
  out.draft_ahead = work.draft_ahead();
  return out;
}

v1::WorkResult::Outcome ToWire(Outcome outcome) {
  switch (outcome) {
    case Outcome::kDone:
      return v1::WorkResult::DONE;
    case Outcome::kRejected:
      return v1::WorkResult::REJECTED;
    case Outcome::kWrongBase:
      return v1::WorkResult::WRONG_BASE;
    case Outcome::kUnknown:
      return v1::WorkResult::UNKNOWN;
    case Outcome::kNoPages:
      return v1::WorkResult::NO_PAGES;
    case Outcome::kPreempted:
      return v1::WorkResult::PREEMPTED;
    case Outcome::kFailed:
      return v1::WorkResult::FAILED;
  }
  return v1::WorkResult::OUTCOME_UNSPECIFIED;
}

v1::FinishReason ToWire(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return v1::FINISH_UNSPECIFIED;
    case FinishReason::kStop:
      return v1::FINISH_STOP;
    case FinishReason::kLength:
      return v1::FINISH_LENGTH;
  }
  return v1::FINISH_UNSPECIFIED;
}

void ToWire(const TokenLogProb& log_prob, v1::TokenLogProb* out) {
  out->set_token(log_prob.token);
  out->set_log_prob(log_prob.log_prob);
}

void ToWire(const WorkResult& result, v1::WorkResult* out) {
  out->set_sequence(result.sequence);
  out->set_outcome(ToWire(result.outcome));
  out->set_base_len(result.base_len);
  out->mutable_tokens()->Add(result.tokens.begin(), result.tokens.end());
  for (const PositionLogProbs& position : result.logprobs) {
    v1::PositionLogProbs* to = out->add_logprobs();
    ToWire(position.chosen, to->mutable_chosen());
    for (const TokenLogProb& top : position.top) ToWire(top, to->add_top());
  }
  out->set_accepted(result.accepted);
  out->set_finish_reason(ToWire(result.finish_reason));
  out->set_error(result.error);
  out->set_cached_tokens(result.cached_tokens);
}

}  // namespace

Step FromWire(const v1::StepRequest& request) {
  Step out;
  out.step = request.step();
  out.admits.reserve(request.admits_size());
  for (const v1::Admit& admit : request.admits()) out.admits.push_back(FromWire(admit));
  out.work.reserve(request.work_size());
  for (const v1::Work& work : request.work()) out.work.push_back(FromWire(work));
  out.releases.assign(request.releases().begin(), request.releases().end());
  return out;
}

v1::PoolState ToWire(const PoolState& pool) {
  v1::PoolState out;
  out.set_pages(pool.pages);
  out.set_free_pages(pool.free_pages);
  out.set_page_size(pool.page_size);
  out.set_sequences(pool.sequences);
  out.set_leaked_pages(pool.leaked_pages);
  return out;
}

v1::StepResult ToWire(const StepResult& result) {
  v1::StepResult out;
  out.set_step(result.step);
  for (const WorkResult& work : result.results) ToWire(work, out.add_results());
  *out.mutable_pool() = ToWire(result.pool);
  v1::StepTiming* timing = out.mutable_timing();
  timing->set_queue_us(result.timing.queue_us);
  timing->set_forward_us(result.timing.forward_us);
  timing->set_sample_us(result.timing.sample_us);
  timing->set_commit_us(result.timing.commit_us);
  timing->set_total_us(result.timing.total_us);
  timing->set_rows(result.timing.rows);
  out.mutable_expert_counts()->Add(result.expert_counts.begin(), result.expert_counts.end());
  out.mutable_resumed()->Add(result.resumed.begin(), result.resumed.end());
  for (const Refusal& refusal : result.refused) {
    v1::AdmitResult* to = out.add_refused();
    to->set_sequence(refusal.sequence);
    to->set_code(static_cast<int32_t>(refusal.status.code()));
    to->set_error(std::string(refusal.status.message()));
  }
  return out;
}

void SetCost(const Engine::Cost& cost, v1::VerifierInfo* info) {
  for (const Engine::Cost::Point& point : cost.decode) {
    v1::CostPoint* to = info->add_cost();
    to->set_rows(point.rows);
    to->set_microseconds(point.microseconds);
  }
  info->set_prefill_us_per_token(cost.prefill_us_per_token);
}

}  // namespace coppice::verifier
