#include "services/router/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace coppice::router {
namespace {

double Millis(Duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace

Session::Session(uint64_t handle, Request request, Detokenizer detokenizer,
                 std::shared_ptr<Stream> stream, TimePoint submitted)
    : handle(handle),
      request(std::move(request)),
      stream(std::move(stream)),
      submitted(submitted),
      detokenizer_(std::move(detokenizer)) {}

absl::StatusOr<std::unique_ptr<Session>> Session::Create(uint64_t handle, Request request,
                                                         const Tokenizer* tokenizer,
                                                         std::shared_ptr<Stream> stream,
                                                         TimePoint submitted) {
  absl::StatusOr<Detokenizer> detokenizer =
      Detokenizer::Create(tokenizer, request.stop, static_cast<size_t>(request.rules.min_tokens));
  if (!detokenizer.ok()) return detokenizer.status();
  std::unique_ptr<Session> session(new Session(handle, std::move(request), *std::move(detokenizer),
                                               std::move(stream), submitted));
  const Request& checked = session->request;
  for (int32_t token : checked.received) {
    if (session->finished_on_arrival_ != FinishReason::kNone) {
      return absl::InvalidArgumentError(
          absl::StrCat("resume.token_ids goes on after the token that ended the completion (index ",
                       session->completion_.size() - 1, ")"));
    }
    session->completion_.push_back(token);
    if (std::binary_search(checked.stop_token_ids.begin(), checked.stop_token_ids.end(), token)) {
      session->finished_on_arrival_ = FinishReason::kStop;
      session->matched_on_arrival_ = std::string(tokenizer->TokenBytes(token));
      continue;
    }
    Detokenizer::Output output = session->detokenizer_.Feed(token);
    if (output.stopped) {
      session->finished_on_arrival_ = FinishReason::kStop;
      session->matched_on_arrival_ = output.stop_string;
    }
  }
  if (session->finished_on_arrival_ == FinishReason::kNone && session->remaining() == 0) {
    session->finished_on_arrival_ = FinishReason::kLength;
  }
  return session;
}

Delta Session::Take(absl::Span<const int32_t> tokens, std::vector<PositionScores> logprobs,
                    FinishReason reason, const Tokenizer& tokenizer, TimePoint now) {
  Delta delta;
  delta.token_offset = static_cast<int>(completion_.size());
  // A token that stops the reply says nothing in it.
  const bool stop_token = reason == FinishReason::kStop && !tokens.empty() &&
                          std::binary_search(request.stop_token_ids.begin(),
                                             request.stop_token_ids.end(), tokens.back());
  Detokenizer::Output output =
      detokenizer_.Feed(stop_token ? tokens.subspan(0, tokens.size() - 1) : tokens);
  std::string matched;
  size_t taken = tokens.size();
  if (output.stopped) {
    taken = output.consumed;
    reason = FinishReason::kStop;
    matched = output.stop_string;
  } else if (stop_token) {
    matched = std::string(tokenizer.TokenBytes(tokens.back()));
  }
  delta.text = std::move(output.text);
  delta.token_ids.assign(tokens.begin(), tokens.begin() + taken);
  if (request.logprobs.has_value()) {
    logprobs.resize(std::min(logprobs.size(), taken));
    delta.logprobs = std::move(logprobs);
  }
  completion_.insert(completion_.end(), delta.token_ids.begin(), delta.token_ids.end());
  if (taken > 0) {
    if (!first_token_.has_value()) first_token_ = now;
    last_token_ = now;
    own_tokens_ += static_cast<int>(taken);
  }
  if (!seed_told_) {
    delta.seed = request.seed;
    seed_told_ = true;
  }
  if (reason != FinishReason::kNone) {
    delta.text += detokenizer_.Flush();
    delta.final = MakeFinal(reason, std::move(matched), now);
  }
  return delta;
}

Delta Session::End(FinishReason reason, TimePoint now) {
  Delta delta;
  delta.token_offset = static_cast<int>(completion_.size());
  delta.text = detokenizer_.Flush();
  if (!seed_told_) {
    delta.seed = request.seed;
    seed_told_ = true;
  }
  delta.final =
      MakeFinal(reason, reason == finished_on_arrival_ ? matched_on_arrival_ : std::string(), now);
  return delta;
}

Admit Session::MakeAdmit(const std::string& drafter) const {
  Admit admit;
  admit.sequence = sequence;
  admit.tokens.reserve(length());
  admit.tokens = request.prompt;
  admit.tokens.insert(admit.tokens.end(), completion_.begin(), completion_.end());
  admit.temperature = request.temperature;
  admit.top_p = request.top_p;
  admit.top_k = request.top_k;
  admit.min_p = request.min_p;
  admit.rules = request.rules;
  admit.generated = static_cast<int>(completion_.size());
  admit.seed = request.seed;
  admit.max_tokens = remaining();
  admit.stop_token_ids = request.stop_token_ids;
  admit.logprobs = request.logprobs;
  if (request.speculation != Speculation::kOff) admit.drafter = drafter;
  admit.priority = request.priority;
  return admit;
}

void Session::Requeue() {
  phase = Phase::kQueued;
  sequence = 0;
  admit_sent = false;
  base_len = 0;
  admitted_len = 0;
  in_flight.reset();
  drafting = Drafting::kUndecided;
  draft_batch = 0;
}

speculation::CandidateView Session::candidates() const {
  speculation::CandidateView view;
  view.positions = candidate_positions;
  view.k = candidate_positions == 0
               ? 0
               : static_cast<int>(candidate_tokens.size()) / candidate_positions;
  view.tokens = candidate_tokens;
  view.log_probs = candidate_log_probs;
  return view;
}

speculation::BuildRequest Session::MakeBuildRequest(int max_nodes) const {
  speculation::BuildRequest build;
  build.root_token = completion_.back();
  build.candidates = candidates();
  build.max_depth = remaining() - 1;
  build.max_nodes = max_nodes;
  build.calibration = &acceptance.calibration();
  return build;
}

void Session::CountRound(int drafted, int accepted, int tokens) {
  ++rounds_;
  drafted_ += drafted;
  accepted_ += accepted;
  round_tokens_ += tokens;
}

Final Session::MakeFinal(FinishReason reason, std::string matched, TimePoint now) const {
  Final final;
  final.finish_reason = reason;
  final.stop_matched = std::move(matched);
  final.prompt_tokens = static_cast<int>(request.prompt.size());
  final.completion_tokens = static_cast<int>(completion_.size());
  final.cached_tokens = cached_tokens;
  final.rounds = rounds_;
  final.drafted = drafted_;
  final.accepted = accepted_;
  final.acceptance_length = rounds_ > 0 ? static_cast<double>(round_tokens_) / rounds_ : 0.0;
  if (first_token_.has_value()) {
    final.ttft_ms = Millis(*first_token_ - submitted);
    if (own_tokens_ > 1) final.itl_ms = Millis(last_token_ - *first_token_) / (own_tokens_ - 1);
  }
  final.total_ms = Millis(now - submitted);
  final.queue_ms = Millis(admitted.value_or(now) - submitted);
  return final;
}

}  // namespace coppice::router
