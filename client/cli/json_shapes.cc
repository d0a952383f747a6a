#include "client/cli/json_shapes.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace coppice::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string Hex(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

// The double whose shortest decimal form is the float's: 0.1, not 0.10000000149011612.
double Short(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double out = value;
  std::from_chars(text, end, out);
  return out;
}

// JSON has no infinity, which a log-probability may be.
Json LogProb(float value) { return std::isfinite(value) ? Json(Short(value)) : Json(nullptr); }

Json BuildJson(const v1::Build& build) {
  return {{"version", build.version()}, {"git", build.git()}, {"device", build.device()}};
}

template <typename Points>
Json CostJson(const Points& points) {
  Json out = Json::array();
  for (const v1::CostPoint& point : points) {
    out.push_back({{"rows", point.rows()}, {"us", Short(point.microseconds())}});
  }
  return out;
}

Json RouterJson(const v1::ClusterState::Router& router) {
  return {{"name", router.name()},
          {"epoch", Hex(router.epoch())},
          {"ready", router.ready()},
          {"not_ready_reason", router.not_ready_reason()},
          {"running", router.running()},
          {"waiting", router.waiting()},
          {"requests", router.requests()},
          {"tokens", router.tokens()},
          {"uptime_seconds", router.uptime_seconds()},
          {"build", BuildJson(router.build())}};
}

Json VerifierJson(const v1::ClusterState::VerifierState& state) {
  const v1::VerifierInfo& info = state.info();
  const v1::PoolState& pool = info.pool();
  return {{"address", state.address()},
          {"connected", state.connected()},
          {"error", state.error()},
          {"name", info.name()},
          {"epoch", Hex(info.epoch())},
          {"fingerprint", Hex(info.fingerprint())},
          {"embedding_fingerprint", Hex(info.embedding_fingerprint())},
          {"drafter_fingerprint", Hex(info.drafter_fingerprint())},
          {"vocab_size", info.vocab_size()},
          {"hidden_size", info.hidden_size()},
          {"max_position_embeddings", info.max_position_embeddings()},
          {"tp", info.tp()},
          {"max_rows", info.max_rows()},
          {"max_tree_nodes", info.max_tree_nodes()},
          {"max_sequences", info.max_sequences()},
          {"owner", info.owner()},
          {"pool",
           {{"pages", pool.pages()},
            {"free_pages", pool.free_pages()},
            {"page_size", pool.page_size()},
            {"sequences", pool.sequences()},
            {"leaked_pages", pool.leaked_pages()}}},
          {"cost", CostJson(info.cost())},
          {"prefill_us_per_token", Short(info.prefill_us_per_token())},
          {"build", BuildJson(info.build())}};
}

Json DrafterJson(const v1::ClusterState::DrafterState& state) {
  const v1::DrafterInfo& info = state.info();
  return {{"address", state.address()},
          {"connected", state.connected()},
          {"speculating", state.speculating()},
          {"error", state.error()},
          {"name", info.name()},
          {"epoch", Hex(info.epoch())},
          {"drafter_fingerprint", Hex(info.drafter_fingerprint())},
          {"embedding_fingerprint", Hex(info.embedding_fingerprint())},
          {"block_size", info.block_size()},
          {"window", info.window()},
          {"sequences", info.sequences()},
          {"max_sequences", info.max_sequences()},
          {"max_top_k", info.max_top_k()},
          {"cost", CostJson(info.cost())},
          {"build", BuildJson(info.build())}};
}

}  // namespace

std::string FinishReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_STOP:
      return "stop";
    case v1::FINISH_LENGTH:
      return "length";
    case v1::FINISH_CANCELLED:
      return "cancelled";
    case v1::FINISH_DEADLINE:
      return "deadline";
    default:
      return "unspecified";
  }
}

Json CompletionJson(const Completion& completion) {
  const v1::Final& final = completion.final;
  const v1::Final::Timing& timing = final.timing();
  // The router that ended a resumed stream knows only its own part of the time.
  const bool resumed = completion.resumes > 0;
  const size_t tokens = completion.token_ids.size();
  const double itl = tokens > 1 ? (completion.total_ms - completion.ttft_ms) / (tokens - 1) : 0;
  Json out = {{"text", completion.text},
              {"token_ids", completion.token_ids},
              {"finish_reason", FinishReasonName(final.finish_reason())},
              {"usage",
               {{"prompt_tokens", final.usage().prompt_tokens()},
                {"completion_tokens", final.usage().completion_tokens()},
                {"cached_tokens", final.usage().cached_tokens()}}},
              {"speculation",
               {{"rounds", final.speculation().rounds()},
                {"drafted", final.speculation().drafted()},
                {"accepted", final.speculation().accepted()},
                {"acceptance_length", Short(final.speculation().acceptance_length())}}},
              {"timing",
               {{"ttft_ms", resumed ? completion.ttft_ms : timing.ttft_ms()},
                {"itl_ms", resumed ? itl : timing.itl_ms()},
                {"total_ms", resumed ? completion.total_ms : timing.total_ms()},
                {"queue_ms", timing.queue_ms()}}},
              {"seed", completion.seed},
              {"request_id", completion.request_id},
              {"resumes", completion.resumes}};
  if (!final.stop_matched().empty()) out["stop_matched"] = final.stop_matched();
  if (!completion.logprobs.empty()) {
    out["logprobs"] = Json::array();
    for (const v1::PositionLogProbs& position : completion.logprobs) {
      Json top = Json::array();
      for (const v1::TokenLogProb& t : position.top()) {
        top.push_back({{"token", t.token()}, {"log_prob", LogProb(t.log_prob())}});
      }
      out["logprobs"].push_back({{"token", position.chosen().token()},
                                 {"log_prob", LogProb(position.chosen().log_prob())},
                                 {"top", top}});
    }
  }
  return out;
}

Json StateJson(const v1::ClusterState& state, const ClusterRecord& record) {
  Json out = {{"router", RouterJson(state.router())},
              {"verifiers", Json::array()},
              {"drafters", Json::array()},
              {"speculation",
               {{"rounds", state.speculation().rounds()},
                {"drafted", state.speculation().drafted()},
                {"accepted", state.speculation().accepted()},
                {"acceptance_length", state.speculation().acceptance_length()},
                {"round_overhead_us_p50", state.speculation().round_overhead_us_p50()}}},
              {"processes", Json::array()}};
  for (const auto& verifier : state.verifiers()) out["verifiers"].push_back(VerifierJson(verifier));
  for (const auto& drafter : state.drafters()) out["drafters"].push_back(DrafterJson(drafter));
  for (const ClusterRecord::Process& p : record.processes) {
    out["processes"].push_back(
        {{"role", p.role}, {"address", p.address}, {"pid", p.pid}, {"log", p.log}});
  }
  return out;
}

}  // namespace coppice::cli
