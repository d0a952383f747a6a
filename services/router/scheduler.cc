#include "services/router/scheduler.h"

#include <glog/logging.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace coppice::router {
namespace {

// New tokens for which a sequence is given room in the pool when it is admitted.
constexpr int kGrowth = 256;
// A sequence on `auto` that goes undrafted is drafted for once in so many rounds, to see whether it
// would pay now.
// At first sooner, so that a table that misleads is soon found out.
constexpr int kProbeEvery = 64;
// Re-admissions without progress, and refusals of the only running sequence, before a request is
// given up.
constexpr int kMaxFailures = 5;
constexpr int kMaxLonelyRefusals = 50;

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

bool RanksBefore(const Session* a, const Session* b) {
  if (a->request.priority != b->request.priority) return a->request.priority > b->request.priority;
  return a->arrival < b->arrival;
}

}  // namespace

absl::Status CheckVerifier(const VerifierInfo& verifier, const SchedulerOptions& options) {
  const std::string who =
      absl::StrCat("the verifier ", verifier.name, " at ", options.verifier_address);
  if (verifier.vocab_size != options.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        who, " serves a model with a vocabulary of ", verifier.vocab_size,
        "; the router's --model has ", options.vocab_size, ". Start both with the same model"));
  }
  if (verifier.max_position_embeddings != options.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, " serves a model of ", verifier.max_position_embeddings,
                     " positions; the router's --model has ", options.max_position_embeddings,
                     ". Start both with the same model"));
  }
  if (verifier.max_rows < 1 || verifier.max_tree_nodes < 1 || verifier.max_sequences < 1 ||
      verifier.pool.pages < 1 || verifier.pool.page_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        who, " tells limits that nothing fits: max_rows ", verifier.max_rows, ", max_tree_nodes ",
        verifier.max_tree_nodes, ", max_sequences ", verifier.max_sequences, ", ",
        verifier.pool.pages, " pages of ", verifier.pool.page_size));
  }
  if (absl::StatusOr<speculation::CostTable> cost = speculation::CostTable::Create(verifier.cost);
      !cost.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, " tells no usable cost table: ", cost.status().message()));
  }
  return absl::OkStatus();
}

absl::Status CheckPair(const VerifierInfo& verifier, const DrafterInfo& drafter,
                       const std::string& verifier_address, const std::string& drafter_address) {
  const std::string pair =
      absl::StrCat("the drafter ", drafter.name, " at ", drafter_address, " and the verifier ",
                   verifier.name, " at ", verifier_address);
  auto differ = [&](const std::string& what, const std::string& a, const std::string& b,
                    const std::string& advice) {
    return absl::FailedPreconditionError(
        absl::StrCat(pair, " do not fit: ", what, " ", a, " and ", b, "; ", advice));
  };
  if (verifier.drafter_fingerprint == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the verifier ", verifier.name, " at ", verifier_address,
                     " was started without --drafter and can feed no drafter"));
  }
  if (verifier.drafter_fingerprint != drafter.drafter_fingerprint) {
    return differ("drafter fingerprints", Hex(drafter.drafter_fingerprint),
                  Hex(verifier.drafter_fingerprint), "start both with the same --drafter");
  }
  if (verifier.embedding_fingerprint != drafter.embedding_fingerprint) {
    return differ("embedding fingerprints", Hex(drafter.embedding_fingerprint),
                  Hex(verifier.embedding_fingerprint), "start both with the same --model");
  }
  if (verifier.vocab_size != drafter.vocab_size) {
    return differ("vocabularies of", absl::StrCat(drafter.vocab_size),
                  absl::StrCat(verifier.vocab_size), "start both with the same --model");
  }
  if (verifier.hidden_size != drafter.hidden_size) {
    return differ("hidden sizes", absl::StrCat(drafter.hidden_size),
                  absl::StrCat(verifier.hidden_size), "start both with the same --model");
  }
  if (verifier.target_layer_ids != drafter.target_layer_ids) {
    return differ("tapped layers", absl::StrJoin(drafter.target_layer_ids, ","),
                  absl::StrJoin(verifier.target_layer_ids, ","),
                  "start both with the same --drafter");
  }
  if (drafter.block_size < 2 || drafter.block_size - 1 > speculation::kMaxPositions ||
      drafter.max_top_k < 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the drafter ", drafter.name, " at ", drafter_address, " drafts blocks of ",
        drafter.block_size, " with ", drafter.max_top_k, " candidates; blocks of 2 to ",
        speculation::kMaxPositions + 1, " with at least 1 candidate can be used"));
  }
  if (absl::StatusOr<speculation::CostTable> cost = speculation::CostTable::Create(drafter.cost);
      !cost.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the drafter ", drafter.name, " at ", drafter_address,
                     " tells no usable cost table: ", cost.status().message()));
  }
  return absl::OkStatus();
}

Scheduler::Scheduler(const SchedulerOptions& options, const Tokenizer* tokenizer,
                     const Clock* clock, VerifierLink* verifier, DrafterLink* drafter,
                     std::function<uint64_t()> random)
    : options_(options),
      tokenizer_(tokenizer),
      clock_(clock),
      verifier_(verifier),
      drafter_(drafter),
      // Sequences of two routers that own a verifier one after the other should not meet.
      next_sequence_((random() & ~uint64_t{0xffffffff}) | 1),
      verifier_down_since_(clock->Now()),
      drafter_error_(options.drafter_address.empty() ? "no drafter was given"
                                                     : "not connected yet") {}

Scheduler::~Scheduler() {
  FailAll(absl::UnavailableError("the router is gone"));
  Deliver();
}

void Scheduler::Handle(Event event) {
  std::visit([this](auto&& e) { On(std::move(e)); }, std::move(event));
}

void Scheduler::Advance() {
  CheckTimes();
  if (verifier_up_) {
    AdmitWaiting();
    AskForDrafts();
    SendStep();
    SendReleases();
  }
  NoteSpeculation();
  Deliver();
  if (verifier_up_) SendReleases();  // of readers that proved too slow
  int64_t waiting = 0;
  for (const auto& [handle, session] : sessions_) {
    waiting += session->phase == Session::Phase::kQueued;
  }
  counters_.waiting = waiting;
  counters_.running = static_cast<int64_t>(sessions_.size()) - waiting;
  if (draining_ && sessions_.empty() && on_idle_) std::exchange(on_idle_, nullptr)();
}

TimePoint Scheduler::NextWake() const {
  TimePoint wake = TimePoint::max();
  const TimePoint now = clock_->Now();
  for (const auto& [handle, session] : sessions_) {
    if (session->deadline.has_value()) wake = std::min(wake, *session->deadline);
    if (session->not_before > now) wake = std::min(wake, session->not_before);
  }
  for (const InFlightBatch& batch : batches_) {
    if (!batch.expired) wake = std::min(wake, batch.deadline);
  }
  if (!verifier_up_ && verifier_down_since_.has_value() && !sessions_.empty()) {
    wake = std::min(wake, *verifier_down_since_ + options_.replay_limit);
  }
  return wake;
}

// ---- Requests

void Scheduler::On(Submit event) {
  const TimePoint now = clock_->Now();
  ++counters_.requests;
  auto refuse = [&](absl::Status status) {
    ++counters_.refused;
    outgoing_.push_back({event.handle, event.stream, std::nullopt, std::move(status)});
  };
  if (std::string reason = NotReadyReason();
      !reason.empty() &&
      (draining_ || !verifier_down_since_.has_value() || verifier_info_.epoch == 0 ||
       now - *verifier_down_since_ >= options_.ready_grace)) {
    return refuse(absl::UnavailableError(
        absl::StrCat("the router ", options_.name, " is not ready: ", reason)));
  }
  if (const auto known = by_id_.find(event.request.id); known != by_id_.end()) {
    if (!event.request.resumed) {
      return refuse(absl::AlreadyExistsError(
          absl::StrCat("a request with request_id ", event.request.id,
                       " is running; give each request an id of its own, or none")));
    }
    EndWith(sessions_.at(known->second).get(), FinishReason::kCancelled);
  }
  int waiting = 0;
  for (const auto& [handle, session] : sessions_) {
    waiting += session->phase == Session::Phase::kQueued;
  }
  if (waiting >= options_.max_queue) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat("the router ", options_.name, " has ", waiting,
                     " requests waiting, as many as it keeps (--max-queue); retry later")));
  }
  if (pool_tokens() > 0) {
    if (absl::Status status = CheckFits(event.request, pool_tokens()); !status.ok()) {
      return refuse(std::move(status));
    }
  }
  absl::StatusOr<std::unique_ptr<Session>> created =
      Session::Create(event.handle, std::move(event.request), tokenizer_, event.stream, now);
  if (!created.ok()) return refuse(created.status());
  Session* session = created->get();
  session->arrival = next_arrival_++;
  session->deadline = event.deadline;
  by_id_[session->request.id] = session->handle;
  sessions_[session->handle] = *std::move(created);
  counters_.prompt_tokens += session->request.prompt.size();
  if (session->FinishedOnArrival() != FinishReason::kNone) {
    EndWith(session, session->FinishedOnArrival());
  }
}

void Scheduler::On(CancelById event) {
  const auto known = by_id_.find(event.request_id);
  const bool found = known != by_id_.end();
  if (found) EndWith(sessions_.at(known->second).get(), FinishReason::kCancelled);
  if (event.done) event.done(found);
}

void Scheduler::On(ClientGone event) {
  const auto known = sessions_.find(event.handle);
  if (known != sessions_.end()) EndWith(known->second.get(), FinishReason::kCancelled);
}

void Scheduler::On(AskState event) { event.done(State()); }

void Scheduler::On(Drain event) {
  draining_ = true;
  on_idle_ = std::move(event.idle);
}

void Scheduler::On(Abandon event) { FailAll(absl::UnavailableError(event.reason)); }

void Scheduler::Say(Session* session, Delta delta) {
  counters_.tokens += delta.token_ids.size();
  outgoing_.push_back({session->handle, session->stream, std::move(delta), std::nullopt});
}

void Scheduler::EndWith(Session* session, FinishReason reason) {
  EndWith(session, session->End(reason, clock_->Now()));
}

void Scheduler::EndWith(Session* session, Delta last) {
  const FinishReason reason = last.final->finish_reason;
  if (reason == FinishReason::kCancelled || reason == FinishReason::kDeadline) {
    ++counters_.cancelled;
  }
  ++counters_.finished;
  Say(session, std::move(last));
  outgoing_.back().finish = absl::OkStatus();
  Remove(session);
}

void Scheduler::Fail(Session* session, absl::Status status) {
  ++counters_.failed;
  outgoing_.push_back({session->handle, session->stream, std::nullopt, std::move(status)});
  Remove(session);
}

void Scheduler::FailAll(const absl::Status& status) {
  while (!sessions_.empty()) Fail(sessions_.begin()->second.get(), status);
}

void Scheduler::Remove(Session* session) {
  Forget(session, false);
  if (const auto known = by_id_.find(session->request.id);
      known != by_id_.end() && known->second == session->handle) {
    by_id_.erase(known);
  }
  sessions_.erase(session->handle);
}

void Scheduler::Forget(Session* session, bool gone) {
  if (session->sequence == 0) return;
  by_sequence_.erase(session->sequence);
  // While the verifier is away nothing can be sent; once it is back it tells which sequences it
  // kept.
  if (session->admit_sent && !gone && verifier_up_) releases_.push_back(session->sequence);
}

void Scheduler::Replay(Session* session, bool gone) {
  Forget(session, gone);
  session->Requeue();
  ++counters_.replays;
}

// ---- Verifier

void Scheduler::On(VerifierUp event) {
  const bool same = verifier_info_.epoch == event.info.epoch && verify_cost_.has_value();
  verifier_up_ = true;
  verifier_connection_ = event.connection;
  verifier_info_ = std::move(event.info);
  verifier_error_.clear();
  verifier_down_since_.reset();
  pool_ = verifier_info_.pool;
  if (!same) {  // else what was learned of it still holds
    absl::StatusOr<speculation::CostTable> cost =
        speculation::CostTable::Create(verifier_info_.cost);
    CHECK(cost.ok()) << cost.status();  // CheckVerifier let it pass
    verify_cost_.emplace(*std::move(cost));
    prefill_us_per_token_ = verifier_info_.prefill_us_per_token;
  }
  steps_.clear();
  releases_.clear();
  round_began_.reset();
  if (drafter_up_) {
    drafter_fits_ = CheckPair(verifier_info_, drafter_info_, options_.verifier_address,
                              options_.drafter_address);
  }
  LOG(INFO) << "the verifier " << verifier_info_.name << " at " << options_.verifier_address
            << " is ours: " << pool_tokens() << " tokens of cache, " << verifier_info_.max_rows
            << " rows a step, " << event.resumed.size() << " sequences kept";
  absl::flat_hash_set<uint64_t> kept(event.resumed.begin(), event.resumed.end());
  for (const auto& [handle, session] : sessions_) {
    if (session->sequence == 0 || !session->admit_sent) continue;
    if (kept.erase(session->sequence) == 0) Replay(session.get(), true);
  }
  for (uint64_t sequence : event.resumed) {
    if (kept.contains(sequence)) releases_.push_back(sequence);  // ended while we were apart
  }
  ResendAfterBreak();
}

void Scheduler::ResendAfterBreak() {
  // Before the break there was at most one step with trees and one of prefill, so each again fits
  // one.
  StepRequest trees;
  StepRequest chunks;
  for (const auto& [handle, session] : sessions_) {
    if (!session->in_flight.has_value()) continue;
    (session->in_flight->prefill > 0 ? chunks : trees).work.push_back(*session->in_flight);
  }
  if (!trees.work.empty()) Transmit(std::move(trees));
  if (!chunks.work.empty()) Transmit(std::move(chunks));
}

void Scheduler::On(VerifierDown event) {
  if (verifier_up_ && event.connection != verifier_connection_) return;
  const bool was_up = verifier_up_;
  verifier_error_ = std::string(event.status.message());
  if (was_up) {
    verifier_up_ = false;
    verifier_down_since_ = clock_->Now();
    ++counters_.verifier_breaks;
    steps_.clear();
    releases_.clear();
    round_began_.reset();
    LOG(WARNING) << "the verifier at " << options_.verifier_address << " is away: " << event.status
                 << "; " << sessions_.size() << " streams wait for its return";
  } else {
    VLOG(1) << "the verifier at " << options_.verifier_address << ": " << event.status;
  }
  if (event.status.code() == absl::StatusCode::kFailedPrecondition && !sessions_.empty()) {
    // Somebody else's now: these streams can go on there, and only there.
    FailAll(absl::UnavailableError(
        absl::StrCat("the router ", options_.name, " lost its verifier (", verifier_error_,
                     "); resume the stream on the router that owns it")));
  }
}

void Scheduler::On(VerifierStep event) {
  if (!verifier_up_ || event.connection != verifier_connection_) return;
  StepResult& result = event.result;
  while (!steps_.empty() && steps_.front().step != result.step) {
    if (steps_.front().step > result.step) return;  // one we do not know
    steps_.pop_front();
  }
  if (steps_.empty()) return;
  const InFlightStep step = std::move(steps_.front());
  steps_.pop_front();
  pool_ = result.pool;
  for (const AdmitResult& refused : result.refused) OnRefused(refused);
  for (WorkResult& work : result.results) OnResult(std::move(work));
  for (uint64_t sequence : step.sequences) {
    const auto known = by_sequence_.find(sequence);
    if (known == by_sequence_.end()) continue;
    Session* session = known->second;
    if (session->in_flight.has_value() && session->in_flight_step == step.step) {
      LOG(ERROR) << "the verifier's result of step " << step.step << " lacks sequence "
                 << Hex(sequence) << "; it is admitted anew";
      Replay(session, false);
    }
  }
  NoteStep(step, result.timing);
}

void Scheduler::OnRefused(const AdmitResult& refused) {
  const auto known = by_sequence_.find(refused.sequence);
  if (known == by_sequence_.end()) return;
  Session* session = known->second;
  switch (refused.status.code()) {
    case absl::StatusCode::kInvalidArgument:
      by_sequence_.erase(known);
      session->sequence = 0;
      return Fail(session, refused.status);
    case absl::StatusCode::kAlreadyExists:  // the next id will do
      break;
    default:
      session->not_before = clock_->Now() + std::chrono::milliseconds(std::min(
                                                20 << std::min(session->refusals, 6), 1000));
      ++session->refusals;
      VLOG(1) << "request " << session->request.id << " was not admitted: " << refused.status;
  }
  // Among others it waits for them to end; alone it will not do better for long.
  if (by_sequence_.size() == 1 && ++session->failures > kMaxLonelyRefusals) {
    return Fail(session, absl::ResourceExhaustedError(
                             absl::StrCat("the verifier does not admit the request: ",
                                          std::string(refused.status.message()), "; retry later")));
  }
  Forget(session, true);
  session->Requeue();
}

void Scheduler::OnResult(WorkResult result) {
  const auto known = by_sequence_.find(result.sequence);
  if (known == by_sequence_.end()) return;  // it ended meanwhile
  Session* session = known->second;
  if (!session->in_flight.has_value()) return;
  const Work work = *std::exchange(session->in_flight, std::nullopt);
  auto again = [&](bool gone) {
    if (++session->failures > kMaxFailures) {
      if (gone) {
        by_sequence_.erase(session->sequence);
        session->sequence = 0;
      }
      return Fail(session, absl::InternalError(
                               absl::StrCat("the verifier lost this request's sequence ",
                                            kMaxFailures + 1, " times in a row: ", result.error)));
    }
    Replay(session, gone);
  };
  switch (result.outcome) {
    case Outcome::kDone:
      return OnDone(session, work, std::move(result));
    case Outcome::kNoPages:
      // The verifier sees to it that the oldest always advances, so room will come; alone it will
      // not.
      ++session->refusals;
      if (by_sequence_.size() == 1 && session->refusals > kMaxLonelyRefusals) {
        return Fail(session, absl::ResourceExhaustedError(absl::StrCat(
                                 "the verifier's pool has no room though nobody else runs (",
                                 pool_.free_pages, " of ", pool_.pages, " pages free, ",
                                 pool_.leaked_pages, " leaked)")));
      }
      session->not_before =
          clock_->Now() + std::chrono::milliseconds(by_sequence_.size() == 1 ? 20 : 2);
      return;
    case Outcome::kPreempted:
      VLOG(1) << "request " << session->request.id << " was preempted and waits again";
      return Replay(session, true);
    case Outcome::kUnknown:
      LOG(WARNING) << "the verifier does not know request " << session->request.id
                   << " any more; it is admitted anew";
      return again(true);
    case Outcome::kWrongBase:
      LOG(WARNING) << "request " << session->request.id << " stands at " << work.base_len
                   << " here and at " << result.base_len << " at the verifier; it is admitted anew";
      return again(false);
    case Outcome::kFailed:
      by_sequence_.erase(session->sequence);
      session->sequence = 0;
      return Fail(session, absl::InternalError(absl::StrCat(
                               "the verifier could not compute the next token: ", result.error)));
    case Outcome::kRejected:
    case Outcome::kUnspecified:
      LOG(ERROR) << "the verifier rejected the work of request " << session->request.id << ": "
                 << result.error;
      return Fail(session, absl::InternalError(absl::StrCat(
                               "the verifier rejected the router's work: ", result.error)));
  }
}

void Scheduler::OnDone(Session* session, const Work& work, WorkResult result) {
  const TimePoint now = clock_->Now();
  const int64_t count = static_cast<int64_t>(result.tokens.size());
  // What it says must follow from what was asked, or the stream would not be the target's.
  bool follows;
  if (work.prefill > 0) {
    follows = result.base_len > work.base_len && result.base_len <= session->admitted_len &&
              count == (result.base_len == session->admitted_len ? 1 : 0);
  } else {
    follows = count >= 1 && result.base_len == work.base_len + count &&
              count <= session->remaining() && result.accepted < count;
  }
  for (int32_t token : result.tokens) {
    follows = follows && token >= 0 && token < options_.vocab_size;
  }
  if (!follows) {
    return Fail(session,
                absl::InternalError(absl::StrCat("the verifier answered a round at ", work.base_len,
                                                 " of ", work.rows(), " rows with ", count,
                                                 " tokens up to ", result.base_len)));
  }
  session->base_len = result.base_len;
  session->refusals = 0;
  if (work.prefill > 0) {
    session->cached_tokens = std::max(session->cached_tokens, result.cached_tokens);
    if (count == 0) return;
    session->phase = Session::Phase::kDecode;
  } else {
    const speculation::DraftTree& tree = session->tree.tree;
    session->CountRound(tree.nodes() - 1, result.accepted, static_cast<int>(count));
    ++counters_.rounds;
    counters_.drafted += tree.nodes() - 1;
    counters_.accepted += result.accepted;
    counters_.round_tokens += count;
    int end = 0;
    for (int i = 0; i < result.accepted; ++i) {
      int child = end + 1;
      while (child < tree.nodes() &&
             (tree.parent[child] != end || tree.token[child] != result.tokens[i])) {
        ++child;
      }
      if (child == tree.nodes()) break;
      end = child;
    }
    session->acceptance.Observe(session->tree, end, result.finish_reason != FinishReason::kNone);
  }
  session->failures = 0;
  session->drafting = Session::Drafting::kUndecided;
  FinishReason reason = result.finish_reason;
  if (reason == FinishReason::kNone && count == session->remaining())
    reason = FinishReason::kLength;
  Delta delta = session->Take(result.tokens, std::move(result.logprobs), reason, *tokenizer_, now);
  if (delta.final.has_value()) return EndWith(session, std::move(delta));
  Say(session, std::move(delta));
}

void Scheduler::NoteStep(const InFlightStep& step, const StepTiming& timing) {
  const float computed = timing.forward_us + timing.sample_us + timing.commit_us;
  const int rows = timing.rows > 0 ? timing.rows : step.rows;
  if (step.has_trees && !step.has_prefill) {
    verify_cost_->Observe(rows, computed);
  } else if (step.has_prefill && !step.has_trees && rows >= 8 && computed > 0) {
    prefill_us_per_token_ += 0.25 * (computed / rows - prefill_us_per_token_);
  }
  if (!step.has_trees) return;
  const TimePoint now = clock_->Now();
  if (round_began_.has_value() && round_pure_) {
    const float took = MicrosBetween(*round_began_, now) - round_draft_us_;
    overheads_[overhead_count_++ % overheads_.size()] = std::max(0.0f, took - timing.forward_us);
    overhead_us_ += 0.05 * (std::max(0.0f, took - computed) - overhead_us_);
  }
  round_began_ = now;
  round_draft_us_ = 0;
  round_pure_ = true;
}

// ---- Drafter

void Scheduler::On(DrafterUp event) {
  drafter_up_ = true;
  drafter_connection_ = event.connection;
  drafter_info_ = std::move(event.info);
  drafter_error_.clear();
  absl::StatusOr<speculation::CostTable> cost = speculation::CostTable::Create(drafter_info_.cost);
  draft_cost_.reset();
  if (cost.ok()) draft_cost_.emplace(*std::move(cost));
  batches_.clear();
  awaited_.clear();
  drafter_fits_ = verifier_info_.epoch == 0
                      ? absl::FailedPreconditionError("the verifier is not known yet")
                      : CheckPair(verifier_info_, drafter_info_, options_.verifier_address,
                                  options_.drafter_address);
  for (const auto& [handle, session] : sessions_) {
    session->draft_failures = 0;
    session->draft_pause = 0;
  }
}

void Scheduler::On(DrafterDown event) {
  if (drafter_up_ && event.connection != drafter_connection_) return;
  if (drafter_up_) ++counters_.drafter_breaks;
  drafter_up_ = false;
  drafter_error_ = std::string(event.status.message());
  batches_.clear();
  awaited_.clear();
  for (const auto& [handle, session] : sessions_) {
    if (session->drafting == Session::Drafting::kAsked) GivePlain(session.get(), true);
  }
}

void Scheduler::On(DrafterReplied event) {
  if (!drafter_up_ || event.connection != drafter_connection_) return;
  // Answers come in order: an older question without one will get none.
  while (!batches_.empty() && batches_.front().batch <= event.reply.batch) {
    const InFlightBatch batch = std::move(batches_.front());
    batches_.pop_front();
    const bool answered = batch.batch == event.reply.batch;
    if (answered && !batch.expired) {
      if (awaited_.contains(batch.batch)) round_draft_us_ += event.reply.draft_us;
      if (draft_cost_.has_value()) {
        draft_cost_->Observe(static_cast<int>(batch.handles.size()), event.reply.draft_us);
      }
      for (DraftAnswer& answer : event.reply.answers) {
        const auto known = by_sequence_.find(answer.sequence);
        if (known == by_sequence_.end()) continue;
        Session* session = known->second;
        if (session->drafting != Session::Drafting::kAsked || session->draft_batch != batch.batch ||
            session->base_len != answer.base_len) {
          continue;
        }
        if (answer.outcome != DraftOutcome::kDrafted) {
          GivePlain(session, true);
          continue;
        }
        session->candidate_positions = drafter_info_.block_size - 1;
        session->candidate_tokens = std::move(answer.tokens);
        session->candidate_log_probs = std::move(answer.log_probs);
        if (absl::Status status = speculation::Validate(session->candidates(), options_.vocab_size);
            !status.ok()) {
          LOG(ERROR) << "the drafter at " << options_.drafter_address
                     << " sent a malformed draft: " << status.message();
          GivePlain(session, true);
          continue;
        }
        session->drafting = Session::Drafting::kReady;
        session->draft_failures = 0;
      }
    }
    awaited_.erase(batch.batch);
    for (uint64_t handle : batch.handles) {
      const auto known = sessions_.find(handle);
      if (known == sessions_.end()) continue;
      Session* session = known->second.get();
      if (session->drafting == Session::Drafting::kAsked && session->draft_batch == batch.batch) {
        GivePlain(session, true);
      }
    }
  }
}

void Scheduler::GivePlain(Session* session, bool failed) {
  session->drafting = Session::Drafting::kPlain;
  session->draft_batch = 0;
  if (!failed) return;
  ++counters_.plain_rounds;
  // One who gets no drafts asks less and less often.
  if (++session->draft_failures >= 3) {
    session->draft_pause = std::min(1 << std::min(session->draft_failures - 3, 4), 16);
  }
}

bool Scheduler::DrafterStuck() const {
  return std::any_of(batches_.begin(), batches_.end(),
                     [](const InFlightBatch& batch) { return batch.expired; });
}

void Scheduler::NoteSpeculation() {
  const bool speculating = CanSpeculate();
  if (!drafter_up_) {
    // drafter_error_ tells why.
  } else if (!drafter_fits_.ok()) {
    drafter_error_ = std::string(drafter_fits_.message());
  } else {
    drafter_error_ = DrafterStuck() ? "it does not answer in time" : "";
  }
  counters_.speculating = speculating;
  if (speculating == speculating_) return;
  speculating_ = speculating;
  if (options_.drafter_address.empty()) return;
  if (speculating) {
    LOG(INFO) << "speculating with the drafter " << drafter_info_.name << " at "
              << options_.drafter_address;
  } else {
    LOG(WARNING) << "decoding plainly: the drafter at " << options_.drafter_address << ": "
                 << drafter_error_;
  }
}

// ---- The next step

void Scheduler::CheckTimes() {
  const TimePoint now = clock_->Now();
  std::vector<Session*> expired;
  for (const auto& [handle, session] : sessions_) {
    if (session->deadline.has_value() && *session->deadline <= now) {
      expired.push_back(session.get());
    }
  }
  for (Session* session : expired) EndWith(session, FinishReason::kDeadline);
  for (InFlightBatch& batch : batches_) {
    if (batch.expired || batch.deadline > now) continue;
    batch.expired = true;
    awaited_.erase(batch.batch);
    for (uint64_t handle : batch.handles) {
      const auto known = sessions_.find(handle);
      if (known == sessions_.end()) continue;
      Session* session = known->second.get();
      if (session->drafting == Session::Drafting::kAsked && session->draft_batch == batch.batch) {
        GivePlain(session, true);
      }
    }
  }
  if (!verifier_up_ && verifier_down_since_.has_value() && !sessions_.empty() &&
      now - *verifier_down_since_ >= options_.replay_limit) {
    FailAll(absl::UnavailableError(absl::StrCat("the verifier at ", options_.verifier_address,
                                                " has been away too long: ", verifier_error_)));
  }
}

std::vector<Session*> Scheduler::Ranked(Session::Phase phase) const {
  std::vector<Session*> ranked;
  for (const auto& [handle, session] : sessions_) {
    if (session->phase == phase) ranked.push_back(session.get());
  }
  std::sort(ranked.begin(), ranked.end(), RanksBefore);
  return ranked;
}

int64_t Scheduler::PagesFor(const Session& session) const {
  const int64_t tokens = session.length() + std::min(session.remaining(), kGrowth) + kRoundSlots;
  return (tokens + pool_.page_size - 1) / pool_.page_size;
}

void Scheduler::AdmitWaiting() {
  const TimePoint now = clock_->Now();
  std::vector<Session*> waiting = Ranked(Session::Phase::kQueued);
  if (waiting.empty()) return;
  int64_t pages = 0;
  int running = 0;
  for (const auto& [handle, session] : sessions_) {
    if (session->phase == Session::Phase::kQueued) continue;
    ++running;
    pages += PagesFor(*session);
  }
  for (Session* session : waiting) {
    if (absl::Status status = CheckFits(session->request, pool_tokens()); !status.ok()) {
      Fail(session, std::move(status));
      continue;
    }
    if (session->not_before > now) continue;
    // In order: a small request does not overtake a large one, which would then never run.
    // Nor are there more than a step has rows: each gets at least its root into every one.
    if (running >= std::min(verifier_info_.max_sequences, verifier_info_.max_rows)) break;
    if (running > 0 && pages + PagesFor(*session) > pool_.pages) break;
    ++running;
    pages += PagesFor(*session);
    session->phase = Session::Phase::kPrefill;
    session->sequence = next_sequence_++;
    session->admit_sent = false;
    session->base_len = 0;
    session->admitted_len = session->length();
    if (!session->admitted.has_value()) session->admitted = now;
    by_sequence_[session->sequence] = session;
  }
}

RoundCosts Scheduler::Costs() const {
  RoundCosts costs;
  costs.verify = &*verify_cost_;
  costs.draft = draft_cost_.has_value() ? &*draft_cost_ : nullptr;
  costs.overhead_us = overhead_us_;
  costs.prefill_us_per_token = prefill_us_per_token_;
  costs.max_rows = verifier_info_.max_rows;
  costs.block_size = drafter_info_.block_size;
  return costs;
}

bool Scheduler::DraftingPaysFor(const std::vector<Session*>& autos, int others) const {
  const auto decoding = [](const Session& session) {
    return Decoding{session.request.speculation, session.request.tree_nodes, &session.forecast};
  };
  std::vector<Decoding> all;
  for (const auto& [handle, session] : sessions_) {
    if (session->phase == Session::Phase::kDecode) all.push_back(decoding(*session));
  }
  std::vector<Decoding> deciding;
  for (const Session* session : autos) deciding.push_back(decoding(*session));
  return DraftingPays(all, deciding, others, Costs());
}

void Scheduler::AskForDrafts() {
  std::vector<Session*> asking;
  std::vector<Session*> autos;
  const bool can = CanSpeculate();
  for (Session* session : Ranked(Session::Phase::kDecode)) {
    if (session->in_flight.has_value() || session->drafting != Session::Drafting::kUndecided) {
      continue;
    }
    const Speculation mode = session->request.speculation;
    const bool wants = session->remaining() > 1 && mode != Speculation::kOff &&
                       !(mode == Speculation::kTree && session->request.tree_nodes < 2);
    if (!wants) {
      GivePlain(session, false);
    } else if (!can || session->draft_pause > 0) {
      session->draft_pause = std::max(session->draft_pause - 1, 0);
      if (!options_.drafter_address.empty()) ++counters_.plain_rounds;
      GivePlain(session, false);
    } else if (mode == Speculation::kAuto) {
      autos.push_back(session);
    } else {
      asking.push_back(session);
    }
  }
  if (!autos.empty()) {
    const bool pays = DraftingPaysFor(autos, static_cast<int>(asking.size()));
    for (Session* session : autos) {
      if (pays) {
        session->undrafted_rounds = 0;
        asking.push_back(session);
      } else if (++session->undrafted_rounds >= session->next_probe) {
        session->undrafted_rounds = 0;
        session->next_probe = std::min(2 * session->next_probe, kProbeEvery);
        session->probing = true;
        asking.push_back(session);
      } else {
        GivePlain(session, false);
      }
    }
  }
  if (asking.empty()) return;
  const bool trees_in_flight = std::any_of(steps_.begin(), steps_.end(),
                                           [](const InFlightStep& step) { return step.has_trees; });
  DraftBatch batch;
  batch.batch = next_batch_++;
  batch.verifier_epoch = verifier_info_.epoch;
  batch.top_k = std::min({options_.top_k, drafter_info_.max_top_k, speculation::kMaxCandidates});
  batch.wait_us = static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(options_.draft_wait).count());
  InFlightBatch in_flight;
  in_flight.batch = batch.batch;
  in_flight.deadline = clock_->Now() + options_.draft_wait + options_.draft_grace +
                       std::chrono::microseconds(static_cast<int64_t>(
                           4 * Costs().DraftMicroseconds(static_cast<int>(asking.size()))));
  for (Session* session : asking) {
    batch.queries.push_back({session->sequence, session->completion().back(), session->base_len});
    in_flight.handles.push_back(session->handle);
    session->drafting = Session::Drafting::kAsked;
    session->draft_batch = batch.batch;
  }
  batches_.push_back(std::move(in_flight));
  // Who comes while the others already wait, or work, does not hold them up.
  if (!trees_in_flight && awaited_.empty()) awaited_.insert(batch.batch);
  drafter_->Send(drafter_connection_, std::move(batch));
}

void Scheduler::SendStep() {
  const TimePoint now = clock_->Now();
  bool trees_in_flight = false;
  bool prefill_in_flight = false;
  for (const InFlightStep& step : steps_) {
    trees_in_flight = trees_in_flight || step.has_trees;
    prefill_in_flight = prefill_in_flight || step.has_prefill;
  }
  RoundInput input;
  const int max_nodes = std::min(verifier_info_.max_tree_nodes, speculation::kMaxNodes);
  for (Session* session : Ranked(Session::Phase::kDecode)) {
    ++input.decoding;
    input.asked += session->drafting == Session::Drafting::kAsked;
    if (trees_in_flight || !awaited_.empty() || session->in_flight.has_value() ||
        session->not_before > now) {
      continue;
    }
    if (session->drafting == Session::Drafting::kReady ||
        session->drafting == Session::Drafting::kPlain) {
      RoundItem& item = input.items.emplace_back();
      item.handle = session->handle;
      item.mode = session->request.speculation;
      item.tree_nodes = session->request.tree_nodes;
      item.drafted = session->drafting == Session::Drafting::kReady;
      item.looks = session->probing;
      item.build = session->MakeBuildRequest(max_nodes);
    }
  }
  // Prefill rides on the step with trees, or fills the gap while drafts are made; it never queues
  // up behind trees.
  if (!prefill_in_flight && !trees_in_flight) {
    for (Session* session : Ranked(Session::Phase::kPrefill)) {
      if (!session->in_flight.has_value() && session->not_before <= now) {
        RoundItem& item = input.items.emplace_back();
        item.handle = session->handle;
        item.prefill_rows = static_cast<int>(session->admitted_len - session->base_len);
      }
    }
  }
  if (input.items.empty()) return;

  StepRequest request;
  for (RoundGrant& grant : PlanRound(input, Costs(), &builder_)) {
    Session* session = sessions_.at(grant.handle).get();
    Work work;
    work.sequence = session->sequence;
    work.base_len = session->base_len;
    const Speculation mode = session->request.speculation;
    if (grant.prefill > 0) {
      work.prefill = grant.prefill;
      work.draft_ahead = speculating_ && mode != Speculation::kOff;
      if (!session->admit_sent) {
        request.admits.push_back(session->MakeAdmit(
            verifier_info_.drafter_fingerprint != 0 ? options_.drafter_address : ""));
        session->admit_sent = true;
      }
    } else {
      if (grant.expected.has_value()) {
        session->forecast.Observe(*grant.expected);
        session->probing = false;
      }
      session->tree = std::move(grant.tree);
      work.tokens = session->tree.tree.token;
      work.parents = session->tree.tree.parent;
      work.draft_ahead = speculating_ && session->draft_pause == 0 &&
                         (mode == Speculation::kChain || mode == Speculation::kTree ||
                          session->drafting == Session::Drafting::kReady);
    }
    session->in_flight = work;
    request.work.push_back(std::move(work));
  }
  Transmit(std::move(request));
}

void Scheduler::SendReleases() {
  // In a storm of cancellations they gather behind the steps under way, whose results bring us here
  // again.
  if (!releases_.empty() && steps_.size() < 4) Transmit(StepRequest{});
}

void Scheduler::Transmit(StepRequest request) {
  InFlightStep step;
  step.step = request.step = next_step_++;
  request.releases = std::exchange(releases_, {});
  for (const Work& work : request.work) {
    step.rows += work.rows();
    (work.prefill > 0 ? step.has_prefill : step.has_trees) = true;
    step.sequences.push_back(work.sequence);
    by_sequence_.at(work.sequence)->in_flight_step = step.step;
  }
  if (step.has_prefill) round_pure_ = false;
  steps_.push_back(std::move(step));
  ++counters_.steps;
  verifier_->Send(verifier_connection_, std::move(request));
}

void Scheduler::Deliver() {
  // A slow reader's end adds to the list.
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    Outgoing out = std::move(outgoing_[i]);
    if (out.delta.has_value() && !out.stream->Write(*std::move(out.delta))) {
      const auto known = sessions_.find(out.handle);
      if (known != sessions_.end()) {
        Fail(known->second.get(),
             absl::ResourceExhaustedError(
                 "the client reads too slowly: its share of the router's memory is full"));
      }
    }
    if (out.finish.has_value()) out.stream->Finish(*out.finish);
  }
  outgoing_.clear();
}

// ---- What others may know

int64_t Scheduler::pool_tokens() const { return pool_.pages * pool_.page_size; }

std::string Scheduler::NotReadyReason() const {
  if (draining_) return "it is shutting down";
  if (verifier_up_) return "";
  return absl::StrCat("the verifier at ", options_.verifier_address, ": ", verifier_error_);
}

SchedulerState Scheduler::State() const {
  SchedulerState state;
  state.not_ready_reason = NotReadyReason();
  state.verifier_connected = verifier_up_;
  state.verifier_error = verifier_error_;
  state.verifier = verifier_info_;
  if (verifier_up_) {
    state.verifier.pool = pool_;
    state.verifier.owner = options_.name;
  }
  state.drafter_connected = drafter_up_;
  state.speculating = speculating_;
  state.drafter_error = drafter_error_;
  state.drafter = drafter_info_;
  const size_t count = std::min(overhead_count_, overheads_.size());
  if (count > 0) {
    std::vector<float> sorted(overheads_.begin(), overheads_.begin() + count);
    std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.end());
    state.round_overhead_us_p50 = sorted[count / 2];
  }
  return state;
}

absl::Status Scheduler::Check() const {
  size_t admitted = 0;
  for (const auto& [handle, owned] : sessions_) {
    const Session* session = owned.get();
    const std::string who = absl::StrCat("request ", session->request.id, ": ");
    if (session->handle != handle) return absl::InternalError(who + "wrong handle");
    const auto id = by_id_.find(session->request.id);
    if (id == by_id_.end() || id->second != handle) return absl::InternalError(who + "no id");
    if ((session->sequence == 0) != (session->phase == Session::Phase::kQueued)) {
      return absl::InternalError(who + "admitted and queued");
    }
    if (session->sequence == 0) {
      if (session->in_flight.has_value()) return absl::InternalError(who + "works unadmitted");
      continue;
    }
    ++admitted;
    const auto known = by_sequence_.find(session->sequence);
    if (known == by_sequence_.end() || known->second != session) {
      return absl::InternalError(who + "its sequence is not known");
    }
    if (session->phase == Session::Phase::kDecode && session->base_len != session->length() - 1) {
      return absl::InternalError(absl::StrCat(who, "stands at ", session->base_len, " with ",
                                              session->length(), " tokens"));
    }
    if (session->drafting == Session::Drafting::kAsked &&
        std::none_of(batches_.begin(), batches_.end(), [&](const InFlightBatch& batch) {
          return batch.batch == session->draft_batch && !batch.expired;
        })) {
      return absl::InternalError(who + "waits for a draft that nobody makes");
    }
    if (verifier_up_ && session->in_flight.has_value() &&
        std::none_of(steps_.begin(), steps_.end(), [&](const InFlightStep& step) {
          return step.step == session->in_flight_step;
        })) {
      return absl::InternalError(who + "waits for a step that nobody runs");
    }
  }
  if (admitted != by_sequence_.size()) return absl::InternalError("stray sequences");
  if (by_id_.size() != sessions_.size()) return absl::InternalError("stray ids");
  const auto with_trees = std::count_if(steps_.begin(), steps_.end(),
                                        [](const InFlightStep& step) { return step.has_trees; });
  if (with_trees > 1) return absl::InternalError("two steps with trees are in flight");
  return absl::OkStatus();
}

}  // namespace coppice::router
