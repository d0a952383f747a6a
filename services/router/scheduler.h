// The router's state and what becomes of it: decides who runs next and with how much draft tree,
// and keeps every stream true through whatever its peers do.  Knows nothing of gRPC, threads or the
// machine's clock.
#ifndef COPPICE_SERVICES_ROUTER_SCHEDULER_H_
#define COPPICE_SERVICES_ROUTER_SCHEDULER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "model/tokenizer.h"
#include "services/common/clock.h"
#include "services/router/peers.h"
#include "services/router/plan.h"
#include "services/router/request.h"
#include "services/router/session.h"
#include "services/router/stream.h"
#include "speculation/build.h"
#include "speculation/cost_model.h"

namespace coppice::router {

struct SchedulerOptions {
  std::string name = "router";
  std::string verifier_address;  // for messages
  std::string drafter_address;   // told to the verifier; empty: no drafter, all decoding is plain
  int vocab_size = 0;            // of the router's tokenizer and configuration
  int max_position_embeddings = 0;
  int max_queue = 256;  // requests waiting for admission
  int top_k = 16;       // candidates asked for per position
  // How long the drafter may wait for features that are on their way, and what its answer may take
  // beyond its cost table: then the round goes without.
  Duration draft_wait = std::chrono::milliseconds(50);
  Duration draft_grace = std::chrono::milliseconds(150);
  // A stream whose verifier is away longer than this ends UNAVAILABLE (its client resumes it
  // elsewhere).
  Duration replay_limit = std::chrono::seconds(60);
  // New requests are refused where the verifier has been away longer than this.
  Duration ready_grace = std::chrono::seconds(10);
};

// Totals since the start, readable from any thread.
struct SchedulerCounters {
  std::atomic<uint64_t> requests{0};
  std::atomic<uint64_t> refused{0};    // queue full, not ready, never fitting
  std::atomic<uint64_t> finished{0};   // with a final delta
  std::atomic<uint64_t> cancelled{0};  // by id, by a client that went, by a deadline
  std::atomic<uint64_t> failed{0};     // ended with an error
  std::atomic<uint64_t> tokens{0};
  std::atomic<uint64_t> prompt_tokens{0};
  std::atomic<uint64_t> steps{0};
  std::atomic<uint64_t> rounds{0};
  std::atomic<uint64_t> drafted{0};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> round_tokens{0};
  std::atomic<uint64_t> plain_rounds{0};  // that wanted a draft and went without
  std::atomic<uint64_t> replays{0};       // sequences admitted anew with the tokens so far
  std::atomic<uint64_t> verifier_breaks{0};
  std::atomic<uint64_t> drafter_breaks{0};
  std::atomic<int64_t> running{0};  // gauges
  std::atomic<int64_t> waiting{0};
  std::atomic<bool> speculating{false};
};

// What GetState tells of the scheduler.
struct SchedulerState {
  std::string not_ready_reason;  // empty: ready
  bool verifier_connected = false;
  std::string verifier_error;
  VerifierInfo verifier;
  bool drafter_connected = false;
  bool speculating = false;
  std::string drafter_error;
  DrafterInfo drafter;
  double round_overhead_us_p50 = 0;
};

// INVALID_ARGUMENT, naming both sides, where this verifier is not one for a router so configured.
absl::Status CheckVerifier(const VerifierInfo& verifier, const SchedulerOptions& options);
// FAILED_PRECONDITION, naming both sides, where drafter and verifier do not fit each other.
absl::Status CheckPair(const VerifierInfo& verifier, const DrafterInfo& drafter,
                       const std::string& verifier_address, const std::string& drafter_address);

// ---- Events: all that the scheduler reacts to

struct Submit {
  uint64_t handle = 0;  // chosen by the caller, unique
  Request request;
  std::shared_ptr<Stream> stream;
  std::optional<TimePoint> deadline;
};
struct CancelById {
  std::string request_id;
  std::function<void(bool found)> done;
};
struct ClientGone {
  uint64_t handle = 0;
};
struct AskState {
  std::function<void(SchedulerState)> done;
};
// No new requests from now on; `idle` is called once none is left.
struct Drain {
  std::function<void()> idle;
};
// Ends what is left, UNAVAILABLE.
struct Abandon {
  std::string reason;
};

using Event = std::variant<Submit, CancelById, ClientGone, AskState, Drain, Abandon, VerifierUp,
                           VerifierStep, VerifierDown, DrafterUp, DrafterReplied, DrafterDown>;

// One thread calls Handle for each event, in order, and Advance when there are no more for the
// moment or NextWake has come.
//
// Invariants.  A sequence has at most one work in flight, which is kept until its result is there,
// so that after a break the same round is asked again.  Every admitted sequence is released exactly
// once, unless the verifier itself told that it is gone or lost it.  At most one step with trees is
// in flight, and beside it at most one of prefill alone, which fills the time in which drafts are
// made.
class Scheduler {
 public:
  // All pointers must outlive the scheduler.  `random` mints what identifies the router's
  // sequences.
  Scheduler(const SchedulerOptions& options, const Tokenizer* tokenizer, const Clock* clock,
            VerifierLink* verifier, DrafterLink* drafter, std::function<uint64_t()> random);
  ~Scheduler();

  void Handle(Event event);
  // Sends what can be sent, then delivers what has become true.
  void Advance();
  // When Advance has something to do without an event; TimePoint::max() for never.
  TimePoint NextWake() const;

  const SchedulerCounters& counters() const { return counters_; }
  SchedulerState State() const;
  // Empty: ready.
  std::string NotReadyReason() const;
  // Tokens that the verifier's pool holds; 0 while unknown.
  int64_t pool_tokens() const;
  // Of the verifier's target; 0 while unknown.
  uint64_t model_fingerprint() const { return verifier_info_.fingerprint; }
  bool idle() const { return sessions_.empty(); }

  // INTERNAL where an invariant is broken; for tests.
  absl::Status Check() const;

 private:
  struct InFlightStep {
    uint64_t step = 0;
    int rows = 0;
    bool has_trees = false;
    bool has_prefill = false;
    std::vector<uint64_t> sequences;
  };
  struct InFlightBatch {
    uint64_t batch = 0;
    TimePoint deadline{};
    bool expired = false;  // its queries have been given up
    std::vector<uint64_t> handles;
  };
  // What a stream is to be told, once nothing more urgent is to be sent.
  struct Outgoing {
    uint64_t handle = 0;
    std::shared_ptr<Stream> stream;
    std::optional<Delta> delta;
    std::optional<absl::Status> finish;
  };

  void On(Submit event);
  void On(CancelById event);
  void On(ClientGone event);
  void On(AskState event);
  void On(Drain event);
  void On(Abandon event);
  void On(VerifierUp event);
  void On(VerifierStep event);
  void On(VerifierDown event);
  void On(DrafterUp event);
  void On(DrafterReplied event);
  void On(DrafterDown event);

  void OnResult(WorkResult result);
  void OnDone(Session* session, const Work& work, WorkResult result);
  void OnRefused(const AdmitResult& refused);

  // Ending: each takes the session out of every table and leaves its last words for the delivery at
  // Advance's end.
  void EndWith(Session* session, FinishReason reason);
  void EndWith(Session* session, Delta last);
  void Fail(Session* session, absl::Status status);
  void FailAll(const absl::Status& status);
  void Remove(Session* session);
  // Its sequence is no longer wanted at the verifier (`gone`: nor is it there).
  void Forget(Session* session, bool gone);
  // To be admitted anew with the tokens so far, ahead of its class.
  void Replay(Session* session, bool gone);

  void CheckTimes();
  void AdmitWaiting();
  void AskForDrafts();
  RoundCosts Costs() const;
  bool DraftingPaysFor(const std::vector<Session*>& autos, int others) const;
  // The round goes without a draft; `failed`: though one was asked for.
  void GivePlain(Session* session, bool failed);
  void ResendAfterBreak();
  void SendStep();
  void SendReleases();
  void Deliver();
  void NoteSpeculation();
  void NoteStep(const InFlightStep& step, const StepTiming& timing);

  // Has an unanswered question that was given up.
  bool DrafterStuck() const;
  bool CanSpeculate() const { return drafter_up_ && drafter_fits_.ok() && !DrafterStuck(); }
  int64_t PagesFor(const Session& session) const;
  std::vector<Session*> Ranked(Session::Phase phase) const;
  void Transmit(StepRequest request);
  void Say(Session* session, Delta delta);

  const SchedulerOptions options_;
  const Tokenizer* const tokenizer_;
  const Clock* const clock_;
  VerifierLink* const verifier_;
  DrafterLink* const drafter_;

  absl::btree_map<uint64_t, std::unique_ptr<Session>> sessions_;  // by handle
  absl::flat_hash_map<uint64_t, Session*> by_sequence_;           // admitted ones
  absl::flat_hash_map<std::string, uint64_t> by_id_;              // request id to handle
  uint64_t next_arrival_ = 1;
  uint64_t next_sequence_;
  std::vector<Outgoing> outgoing_;
  std::vector<uint64_t> releases_;

  // Verifier.
  bool verifier_up_ = false;
  uint64_t verifier_connection_ = 0;
  VerifierInfo verifier_info_;
  std::optional<speculation::LiveCost> verify_cost_;
  double prefill_us_per_token_ = 0;
  std::string verifier_error_ = "not connected yet";
  std::optional<TimePoint> verifier_down_since_;  // also from the start
  PoolState pool_;
  uint64_t next_step_ = 1;
  std::deque<InFlightStep> steps_;

  // Drafter.
  bool drafter_up_ = false;
  uint64_t drafter_connection_ = 0;
  DrafterInfo drafter_info_;
  std::optional<speculation::LiveCost> draft_cost_;
  std::string drafter_error_;
  absl::Status drafter_fits_;  // this drafter and this verifier
  bool speculating_ = false;   // as last told
  uint64_t next_batch_ = 1;
  std::deque<InFlightBatch> batches_;
  // The next step with trees waits for these batches; later ones it does not.
  absl::flat_hash_set<uint64_t> awaited_;

  // The round in progress, for its overhead.
  std::optional<TimePoint> round_began_;
  bool round_pure_ = false;
  float round_draft_us_ = 0;
  double overhead_us_ = 400;  // mean, of a round beyond what the cost tables speak of
  std::array<float, 512> overheads_{};
  size_t overhead_count_ = 0;

  speculation::TreeBuilder builder_;

  bool draining_ = false;
  std::function<void()> on_idle_;
  SchedulerCounters counters_;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_SCHEDULER_H_
