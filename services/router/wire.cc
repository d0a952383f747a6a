#include "services/router/wire.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace coppice::router {
namespace {

static_assert(static_cast<int>(Speculation::kAuto) == v1::SPECULATION_AUTO);
static_assert(static_cast<int>(Speculation::kOff) == v1::SPECULATION_OFF);
static_assert(static_cast<int>(Speculation::kChain) == v1::SPECULATION_CHAIN);
static_assert(static_cast<int>(Speculation::kTree) == v1::SPECULATION_TREE);
static_assert(static_cast<int>(FinishReason::kStop) == v1::FINISH_STOP);
static_assert(static_cast<int>(FinishReason::kLength) == v1::FINISH_LENGTH);
static_assert(static_cast<int>(FinishReason::kCancelled) == v1::FINISH_CANCELLED);
static_assert(static_cast<int>(FinishReason::kDeadline) == v1::FINISH_DEADLINE);
static_assert(static_cast<int>(Outcome::kDone) == v1::WorkResult::DONE);
static_assert(static_cast<int>(Outcome::kRejected) == v1::WorkResult::REJECTED);
static_assert(static_cast<int>(Outcome::kWrongBase) == v1::WorkResult::WRONG_BASE);
static_assert(static_cast<int>(Outcome::kUnknown) == v1::WorkResult::UNKNOWN);
static_assert(static_cast<int>(Outcome::kNoPages) == v1::WorkResult::NO_PAGES);
static_assert(static_cast<int>(Outcome::kPreempted) == v1::WorkResult::PREEMPTED);
static_assert(static_cast<int>(Outcome::kFailed) == v1::WorkResult::FAILED);
static_assert(static_cast<int>(DraftOutcome::kDrafted) == v1::DraftReply::DRAFTED);
static_assert(static_cast<int>(DraftOutcome::kGap) == v1::DraftReply::GAP);
static_assert(static_cast<int>(DraftOutcome::kUnknown) == v1::DraftReply::UNKNOWN);
static_assert(static_cast<int>(DraftOutcome::kLate) == v1::DraftReply::LATE);

// A number that no case names stands for none.
template <typename Enum>
Enum EnumOr(int number, int last, Enum otherwise) {
  return number >= 0 && number <= last ? static_cast<Enum>(number) : otherwise;
}

BuildLabel LabelFromWire(const v1::Build& build) {
  return {build.version(), build.git(), build.device()};
}

std::vector<speculation::CostSample> CostFromWire(
    const google::protobuf::RepeatedPtrField<v1::CostPoint>& points) {
  std::vector<speculation::CostSample> cost;
  for (const v1::CostPoint& point : points) {
    cost.push_back({static_cast<int>(point.rows()), point.microseconds()});
  }
  return cost;
}

PoolState PoolFromWire(const v1::PoolState& pool) {
  PoolState out;
  out.pages = pool.pages();
  out.free_pages = pool.free_pages();
  out.page_size = static_cast<int>(pool.page_size());
  out.sequences = static_cast<int>(pool.sequences());
  out.leaked_pages = pool.leaked_pages();
  return out;
}

PositionScores ScoresFromWire(const v1::PositionLogProbs& scores) {
  PositionScores out;
  out.chosen = {static_cast<int32_t>(scores.chosen().token()), scores.chosen().log_prob()};
  for (const v1::TokenLogProb& top : scores.top()) {
    out.top.push_back({static_cast<int32_t>(top.token()), top.log_prob()});
  }
  return out;
}

void CostToWire(const std::vector<speculation::CostSample>& cost,
                google::protobuf::RepeatedPtrField<v1::CostPoint>* out) {
  for (const speculation::CostSample& sample : cost) {
    v1::CostPoint* point = out->Add();
    point->set_rows(sample.rows);
    point->set_microseconds(static_cast<float>(sample.microseconds));
  }
}

}  // namespace

v1::Build ToWire(const BuildLabel& build) {
  v1::Build out;
  out.set_version(build.version);
  out.set_git(build.git);
  out.set_device(build.device);
  return out;
}

VerifierInfo FromWire(const v1::VerifierInfo& info) {
  VerifierInfo out;
  out.name = info.name();
  out.epoch = info.epoch();
  out.fingerprint = info.fingerprint();
  out.embedding_fingerprint = info.embedding_fingerprint();
  out.drafter_fingerprint = info.drafter_fingerprint();
  out.target_layer_ids.assign(info.target_layer_ids().begin(), info.target_layer_ids().end());
  out.vocab_size = static_cast<int>(info.vocab_size());
  out.hidden_size = static_cast<int>(info.hidden_size());
  out.max_position_embeddings = static_cast<int>(info.max_position_embeddings());
  out.tp = static_cast<int>(info.tp());
  out.max_rows = static_cast<int>(info.max_rows());
  out.max_tree_nodes = static_cast<int>(info.max_tree_nodes());
  out.max_sequences = static_cast<int>(info.max_sequences());
  out.pool = PoolFromWire(info.pool());
  out.cost = CostFromWire(info.cost());
  out.prefill_us_per_token = info.prefill_us_per_token();
  out.owner = info.owner();
  out.build = LabelFromWire(info.build());
  return out;
}

v1::VerifierInfo ToWire(const VerifierInfo& info) {
  v1::VerifierInfo out;
  out.set_name(info.name);
  out.set_epoch(info.epoch);
  out.set_fingerprint(info.fingerprint);
  out.set_embedding_fingerprint(info.embedding_fingerprint);
  out.set_drafter_fingerprint(info.drafter_fingerprint);
  for (int layer : info.target_layer_ids) out.add_target_layer_ids(layer);
  out.set_vocab_size(info.vocab_size);
  out.set_hidden_size(info.hidden_size);
  out.set_max_position_embeddings(info.max_position_embeddings);
  out.set_tp(info.tp);
  out.set_max_rows(info.max_rows);
  out.set_max_tree_nodes(info.max_tree_nodes);
  out.set_max_sequences(info.max_sequences);
  v1::PoolState* pool = out.mutable_pool();
  pool->set_pages(info.pool.pages);
  pool->set_free_pages(info.pool.free_pages);
  pool->set_page_size(info.pool.page_size);
  pool->set_sequences(info.pool.sequences);
  pool->set_leaked_pages(info.pool.leaked_pages);
  CostToWire(info.cost, out.mutable_cost());
  out.set_prefill_us_per_token(static_cast<float>(info.prefill_us_per_token));
  out.set_owner(info.owner);
  *out.mutable_build() = ToWire(info.build);
  return out;
}

StepResult FromWire(const v1::StepResult& result) {
  StepResult out;
  out.step = result.step();
  out.results.reserve(result.results_size());
  for (const v1::WorkResult& work : result.results()) {
    WorkResult& to = out.results.emplace_back();
    to.sequence = work.sequence();
    to.outcome = EnumOr(work.outcome(), 7, Outcome::kUnspecified);
    to.base_len = static_cast<int64_t>(work.base_len());
    to.tokens.assign(work.tokens().begin(), work.tokens().end());
    for (const v1::PositionLogProbs& scores : work.logprobs()) {
      to.logprobs.push_back(ScoresFromWire(scores));
    }
    to.accepted = static_cast<int>(work.accepted());
    to.finish_reason = EnumOr(work.finish_reason(), 4, FinishReason::kNone);
    to.error = work.error();
    to.cached_tokens = static_cast<int>(work.cached_tokens());
  }
  out.pool = PoolFromWire(result.pool());
  out.timing.queue_us = result.timing().queue_us();
  out.timing.forward_us = result.timing().forward_us();
  out.timing.sample_us = result.timing().sample_us();
  out.timing.commit_us = result.timing().commit_us();
  out.timing.total_us = result.timing().total_us();
  out.timing.rows = static_cast<int>(result.timing().rows());
  for (const v1::AdmitResult& refused : result.refused()) {
    // A refusal without a code is one all the same.
    absl::StatusCode code = static_cast<absl::StatusCode>(refused.code());
    if (refused.code() <= 0 || refused.code() > 16) code = absl::StatusCode::kUnknown;
    out.refused.push_back({refused.sequence(), absl::Status(code, refused.error())});
  }
  return out;
}

v1::StepRequest ToWire(const StepRequest& request) {
  v1::StepRequest out;
  out.set_step(request.step);
  for (const Admit& admit : request.admits) {
    v1::Admit* to = out.add_admits();
    to->set_sequence(admit.sequence);
    to->mutable_tokens()->Add(admit.tokens.begin(), admit.tokens.end());
    to->set_temperature(admit.temperature);
    to->set_top_p(admit.top_p);
    to->set_top_k(admit.top_k);
    to->set_min_p(admit.min_p);
    to->set_min_tokens(admit.rules.min_tokens);
    for (const auto& [token, bias] : admit.rules.logit_bias) {
      v1::LogitBias* entry = to->add_logit_bias();
      entry->set_token(token);
      entry->set_bias(bias);
    }
    to->set_repetition_penalty(admit.rules.repetition_penalty);
    to->set_frequency_penalty(admit.rules.frequency_penalty);
    to->set_presence_penalty(admit.rules.presence_penalty);
    to->set_generated(admit.generated);
    to->set_seed(admit.seed);
    to->set_max_tokens(admit.max_tokens);
    to->mutable_stop_token_ids()->Add(admit.stop_token_ids.begin(), admit.stop_token_ids.end());
    if (admit.logprobs.has_value()) to->set_logprobs(*admit.logprobs);
    to->set_drafter(admit.drafter);
    to->set_priority(admit.priority);
  }
  for (const Work& work : request.work) {
    v1::Work* to = out.add_work();
    to->set_sequence(work.sequence);
    to->set_base_len(work.base_len);
    to->set_prefill(work.prefill);
    to->mutable_tokens()->Add(work.tokens.begin(), work.tokens.end());
    to->mutable_parents()->Add(work.parents.begin(), work.parents.end());
    to->set_draft_ahead(work.draft_ahead);
  }
  out.mutable_releases()->Add(request.releases.begin(), request.releases.end());
  return out;
}

DrafterInfo FromWire(const v1::DrafterInfo& info) {
  DrafterInfo out;
  out.name = info.name();
  out.epoch = info.epoch();
  out.drafter_fingerprint = info.drafter_fingerprint();
  out.embedding_fingerprint = info.embedding_fingerprint();
  out.vocab_size = static_cast<int>(info.vocab_size());
  out.hidden_size = static_cast<int>(info.hidden_size());
  out.block_size = static_cast<int>(info.block_size());
  out.target_layer_ids.assign(info.target_layer_ids().begin(), info.target_layer_ids().end());
  out.window = static_cast<int>(info.window());
  out.max_sequences = static_cast<int>(info.max_sequences());
  out.max_top_k = static_cast<int>(info.max_top_k());
  out.cost = CostFromWire(info.cost());
  out.build = LabelFromWire(info.build());
  out.sequences = static_cast<int>(info.sequences());
  return out;
}

v1::DrafterInfo ToWire(const DrafterInfo& info) {
  v1::DrafterInfo out;
  out.set_name(info.name);
  out.set_epoch(info.epoch);
  out.set_drafter_fingerprint(info.drafter_fingerprint);
  out.set_embedding_fingerprint(info.embedding_fingerprint);
  out.set_vocab_size(info.vocab_size);
  out.set_hidden_size(info.hidden_size);
  out.set_block_size(info.block_size);
  for (int layer : info.target_layer_ids) out.add_target_layer_ids(layer);
  out.set_window(info.window);
  out.set_max_sequences(info.max_sequences);
  out.set_max_top_k(info.max_top_k);
  CostToWire(info.cost, out.mutable_cost());
  *out.mutable_build() = ToWire(info.build);
  out.set_sequences(info.sequences);
  return out;
}

DraftReply FromWire(const v1::DraftReply& reply) {
  DraftReply out;
  out.batch = reply.batch();
  out.answers.reserve(reply.answers_size());
  for (const v1::DraftReply::Answer& answer : reply.answers()) {
    DraftAnswer& to = out.answers.emplace_back();
    to.sequence = answer.sequence();
    to.base_len = static_cast<int64_t>(answer.base_len());
    to.outcome = EnumOr(answer.outcome(), 4, DraftOutcome::kUnspecified);
    to.tokens.assign(answer.tokens().begin(), answer.tokens().end());
    to.log_probs.assign(answer.log_probs().begin(), answer.log_probs().end());
  }
  out.draft_us = reply.draft_us();
  return out;
}

v1::DraftBatch ToWire(const DraftBatch& batch) {
  v1::DraftBatch out;
  out.set_batch(batch.batch);
  out.set_verifier_epoch(batch.verifier_epoch);
  for (const DraftQuery& query : batch.queries) {
    v1::DraftBatch::Query* to = out.add_queries();
    to->set_sequence(query.sequence);
    to->set_pending_token(query.pending_token);
    to->set_base_len(query.base_len);
  }
  out.set_top_k(batch.top_k);
  out.set_wait_us(batch.wait_us);
  return out;
}

RequestFields FieldsFromWire(const v1::GenerateRequest& request) {
  RequestFields out;
  out.request_id = request.request_id();
  if (request.has_max_tokens()) out.max_tokens = request.max_tokens();
  if (request.has_temperature()) out.temperature = request.temperature();
  if (request.has_top_p()) out.top_p = request.top_p();
  if (request.has_top_k()) out.top_k = request.top_k();
  if (request.has_min_p()) out.min_p = request.min_p();
  if (request.has_repetition_penalty()) out.repetition_penalty = request.repetition_penalty();
  if (request.has_frequency_penalty()) out.frequency_penalty = request.frequency_penalty();
  if (request.has_presence_penalty()) out.presence_penalty = request.presence_penalty();
  for (const v1::LogitBias& entry : request.logit_bias()) {
    out.logit_bias.push_back({entry.token(), entry.bias()});
  }
  out.min_tokens = request.min_tokens();
  if (request.has_prompt_logprobs()) out.prompt_logprobs = request.prompt_logprobs();
  if (request.has_seed()) out.seed = request.seed();
  out.stop.assign(request.stop().begin(), request.stop().end());
  out.stop_token_ids.assign(request.stop_token_ids().begin(), request.stop_token_ids().end());
  out.ignore_eos = request.ignore_eos();
  if (request.has_logprobs()) out.logprobs = request.logprobs();
  out.speculation = request.speculation();
  if (request.has_tree_nodes()) out.tree_nodes = request.tree_nodes();
  out.priority = request.priority();
  if (request.has_resume()) {
    ResumeFrom& resume = out.resume.emplace();
    resume.seed = request.resume().seed();
    resume.token_ids.assign(request.resume().token_ids().begin(),
                            request.resume().token_ids().end());
  }
  return out;
}

absl::StatusOr<std::vector<ChatMessage>> MessagesFromWire(const v1::Chat& chat) {
  std::vector<ChatMessage> out;
  for (const v1::ChatMessage& message : chat.messages()) {
    const size_t index = out.size();
    ChatMessage& to = out.emplace_back();
    to.role = message.role();
    to.name = message.name();
    to.content = message.content();
    if (!message.content().empty() && message.parts_size() > 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("message ", index, " has both content and parts; give one of them"));
    }
    for (int i = 0; i < message.parts_size(); ++i) {
      if (message.parts(i).has_image()) {
        return absl::InvalidArgumentError(
            absl::StrCat("message ", index, ": parts[", i,
                         "] is an image; Coppice runs the text model and takes text parts only"));
      }
      to.content += message.parts(i).text();
    }
    to.reasoning = message.reasoning();
    for (const v1::ChatMessage::ToolCall& call : message.tool_calls()) {
      to.tool_calls.push_back({call.id(), call.name(), call.arguments()});
    }
    to.tool_call_id = message.tool_call_id();
  }
  return out;
}

ChatOptions OptionsFromWire(const v1::Chat& chat) {
  ChatOptions out;
  out.thinking = chat.has_thinking() ? chat.thinking() : true;
  out.preserve_thinking = chat.preserve_thinking();
  out.tools_json = chat.tools_json();
  return out;
}

v1::GenerateDelta ToWire(const Delta& delta) {
  v1::GenerateDelta out;
  out.set_token_offset(delta.token_offset);
  out.mutable_token_ids()->Add(delta.token_ids.begin(), delta.token_ids.end());
  out.set_text(delta.text);
  for (const PositionScores& scores : delta.logprobs) {
    v1::PositionLogProbs* to = out.add_logprobs();
    to->mutable_chosen()->set_token(scores.chosen.token);
    to->mutable_chosen()->set_log_prob(scores.chosen.log_prob);
    for (const TokenScore& score : scores.top) {
      v1::TokenLogProb* top = to->add_top();
      top->set_token(score.token);
      top->set_log_prob(score.log_prob);
    }
  }
  if (delta.seed.has_value()) out.set_seed(*delta.seed);
  if (delta.final.has_value()) {
    const Final& from = *delta.final;
    v1::Final* final = out.mutable_final();
    final->set_finish_reason(static_cast<v1::FinishReason>(from.finish_reason));
    final->set_stop_matched(from.stop_matched);
    final->mutable_usage()->set_prompt_tokens(from.prompt_tokens);
    final->mutable_usage()->set_completion_tokens(from.completion_tokens);
    final->mutable_usage()->set_cached_tokens(from.cached_tokens);
    final->mutable_speculation()->set_rounds(from.rounds);
    final->mutable_speculation()->set_drafted(from.drafted);
    final->mutable_speculation()->set_accepted(from.accepted);
    final->mutable_speculation()->set_acceptance_length(static_cast<float>(from.acceptance_length));
    final->mutable_timing()->set_ttft_ms(from.ttft_ms);
    final->mutable_timing()->set_itl_ms(from.itl_ms);
    final->mutable_timing()->set_total_ms(from.total_ms);
    final->mutable_timing()->set_queue_ms(from.queue_ms);
  }
  return out;
}

}  // namespace coppice::router
