// The drafter's whole behaviour, one turn at a time: contexts in, drafts out.  Knows neither
// threads nor the network.
#ifndef COPPICE_SERVICES_DRAFTER_DRAFT_ENGINE_H_
#define COPPICE_SERVICES_DRAFTER_DRAFT_ENGINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "model/drafter.h"
#include "services/common/clock.h"
#include "services/common/read_gate.h"
#include "services/drafter/context_window.h"

namespace coppice::drafter {

// ---- What happens to the drafter

// A verifier's stream, numbered by the caller, has said hello.  An older stream of the same epoch
// is over.
struct ContextOpened {
  uint64_t stream = 0;  // not 0
  uint64_t verifier_epoch = 0;
  std::function<void(const std::vector<Ack>&)> acknowledge;  // must not block
};

struct Rows {
  uint64_t sequence = 0;
  int64_t first = 0;
  int64_t count = 0;
  absl::Span<const uint16_t> features;  // bf16 [count, hidden_size]
  std::optional<int32_t> pending_token;
  bool draft_ahead = false;
};

struct ContextArrived {
  uint64_t stream = 0;
  std::vector<Rows> rows;
  std::vector<uint64_t> released;
  std::shared_ptr<const void> owner;  // of what the rows' features lie in
};

struct ContextClosed {
  uint64_t stream = 0;
};

struct Query {
  uint64_t sequence = 0;
  int32_t pending_token = 0;
  int64_t base_len = 0;
};

enum class DraftOutcome { kDrafted, kGap, kUnknown, kLate };

struct Answer {
  uint64_t sequence = 0;
  int64_t base_len = 0;
  DraftOutcome outcome = DraftOutcome::kUnknown;
  // [block_size - 1, top_k] where drafted.
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;
};

struct Reply {
  uint64_t batch = 0;
  std::vector<Answer> answers;
  // Of the slowest forward the answers came from, with the context rows taken in just before it:
  // DFlash computes their keys and values within its forward.
  float draft_us = 0;
};

struct DraftAsked {
  uint64_t stream =
      0;  // of a router, numbered by the caller: its answers keep the order of its questions
  uint64_t batch = 0;
  uint64_t verifier_epoch = 0;
  std::vector<Query> queries;
  int top_k = 0;  // 1 … max_top_k
  Duration wait = {};
  std::function<void(Reply)> reply;  // must not block
};

struct DraftClosed {
  uint64_t stream = 0;
};

// Its moves are out of line because g++ 12, where it inlines a variant's, warns of uninitialised
// members.
struct Event {
  template <typename T>
  Event(T event) : what(std::move(event)) {}  // NOLINT: any of the below is one
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  ~Event();

  std::variant<ContextOpened, ContextArrived, ContextClosed, DraftAsked, DraftClosed> what;
  ReadTicket ticket;  // dropped once all that the turn has to say is said
};

// ---- The engine

struct EngineOptions {
  int slots = 64;
  int window = 4096;
  int max_top_k = 16;  // at most the vocabulary
};

// Totals since the start, and levels now.
struct EngineCounters {
  uint64_t forwards = 0;
  uint64_t blocks = 0;         // drafted by them
  uint64_t ahead = 0;          // of these, before they were asked for
  uint64_t ahead_used = 0;     // queries answered by those
  uint64_t rows = 0;           // feature rows taken into contexts
  uint64_t gaps = 0;           // times that rows were asked for again
  uint64_t outcomes[4] = {};   // answers by DraftOutcome
  int sequences = 0;           // slots in use
  int waiting = 0;             // sequences without one
  int64_t context_tokens = 0;  // context positions held
};

// Not thread-safe: the draft loop's thread calls it.  The model has at least `slots` slots and
// `window` positions each.
//
// One turn takes all events that are there, then runs at most one forward, over the blocks drafted
// ahead and those of the queries that can be answered now.  A query waits, to its deadline, for
// features on their way; the answers of a batch leave together, and the batches of a stream in
// order.
class DraftEngine {
 public:
  // `on_forward(blocks, microseconds)` may be empty.
  DraftEngine(Drafter* model, const EngineOptions& options, const Clock* clock,
              std::function<void(int, float)> on_forward = nullptr);

  void Turn(absl::Span<Event> events);

  // Sends the acknowledgements of the turns since the last call.
  void SendAcks();

  // When the next turn is due without any event; nothing where no query waits.
  std::optional<TimePoint> NextDeadline() const;

  EngineCounters counters() const;
  const ContextWindows& windows() const { return windows_; }

 private:
  // A draft, kept until the sequence moves on: whoever asks for this block gets this answer.
  struct Draft {
    int32_t pending_token = -1;
    int64_t base_len = -1;
    int k = 0;
    bool ahead = false;
    float micros = 0;
    std::vector<int32_t> tokens;  // [positions, k]
    std::vector<float> log_probs;
  };
  struct Waiting {
    DraftAsked asked;
    TimePoint deadline;
  };
  struct Block {
    SequenceKey key;
    int32_t pending_token;
    int64_t base_len;
    std::shared_ptr<const Draft>* result;  // null: drafted ahead
  };
  // A batch that goes now, with the draft of each query that has one.
  struct Ready {
    DraftAsked asked;
    std::vector<std::shared_ptr<const Draft>> drafts;
  };

  void On(ContextOpened& event);
  void On(ContextArrived& event);
  void On(ContextClosed& event);
  void On(DraftAsked& event);
  void On(DraftClosed& event);

  void CloseContext(uint64_t stream);
  void WriteRows(const ContextArrived& event);
  // What can be said of a query now; nothing: it must wait.
  std::optional<DraftOutcome> Judge(const SequenceKey& key, const Query& query) const;
  SequenceKey KeyOf(const DraftAsked& asked, const Query& query) const;
  std::shared_ptr<const Draft> FindDraft(const Block& block, int k) const;
  void Forward(const std::vector<Block>& blocks, int k);
  void Answer(const Ready& ready);

  Drafter* const model_;
  const EngineOptions options_;
  const Clock* const clock_;
  const std::function<void(int, float)> on_forward_;
  ContextWindows windows_;
  EngineCounters counters_;
  struct Stream {
    uint64_t verifier_epoch = 0;
    std::function<void(const std::vector<Ack>&)> acknowledge;
    std::vector<Ack> acks;  // not sent yet
  };
  absl::flat_hash_map<uint64_t, Stream> streams_;
  absl::flat_hash_map<uint64_t, uint64_t> stream_of_epoch_;
  absl::flat_hash_map<SequenceKey, std::shared_ptr<const Draft>> drafts_;  // the latest of each
  std::vector<Block> ahead_;  // asked for by this turn's rows
  std::deque<Waiting> queries_;
  int last_top_k_;        // what routers ask for: what to draft ahead
  float context_us_ = 0;  // of this turn's AppendContext
};

// Microseconds of one forward over 1, 2, 4, 8 and 16 blocks (no more than there are slots): medians
// over a few runs with a context of up to 256 positions.  Overwrites slots, so only before the
// engine runs.
struct CostSample {
  int blocks = 0;
  float micros = 0;
};
std::vector<CostSample> MeasureDraftCost(Drafter* model, const EngineOptions& options,
                                         const Clock* clock);

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_DRAFT_ENGINE_H_
