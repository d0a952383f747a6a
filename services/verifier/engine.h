// What a step does: admissions, releases, one forward over all rows, walk, commit.  Knows neither
// threads nor the network.
#ifndef COPPICE_SERVICES_VERIFIER_ENGINE_H_
#define COPPICE_SERVICES_VERIFIER_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "model/target.h"
#include "services/common/clock.h"
#include "services/verifier/feature_sink.h"
#include "services/verifier/page_pool.h"
#include "services/verifier/sequence.h"
#include "services/verifier/step.h"

namespace coppice::verifier {

struct EngineOptions {
  int64_t page_size = 64;
  int64_t pages = 2;  // the target's, page 0 included
  int64_t max_rows = 2048;
  int64_t max_sequences = 256;
  // Run every invariant after every step and die where one is broken; for tests.
  bool check_every_step = false;
};

// Totals since the start.
struct EngineCounters {
  uint64_t steps = 0;
  uint64_t rounds = 0;    // trees verified
  uint64_t drafted = 0;   // their nodes below the roots
  uint64_t accepted = 0;  // of these, committed
  uint64_t tokens = 0;    // generated
  uint64_t prefilled = 0;
  uint64_t repeated = 0;   // answers given again
  uint64_t truncated = 0;  // trees cut for want of pages
  uint64_t no_pages = 0;
  uint64_t preempted = 0;
  uint64_t failed = 0;
  uint64_t rejected = 0;
};

// Owns the target, its pages and all sequences.  Not thread-safe: the step loop's thread calls it.
//
// Pages.  Every work needs pages for its root or its whole prefill chunk; these are found first, in
// order of rank (priority, then admission), and where the pool has none left the lowest-ranked
// sequence is preempted, provided it ranks below the one in need.  So the first always advances,
// and someone always ends.  Then the trees' other nodes share what is left: a tree is cut to what
// can be had, which changes no token.  After the commit no sequence holds a page beyond its tokens.
//
// A forward is finished when Target::Forward and Commit return, so pages that a step wrote are
// never freed or moved while it runs.
class Engine {
 public:
  // `sink` (null: none) and `clock` must outlive this.
  Engine(std::unique_ptr<Target> target, const EngineOptions& options, FeatureSink* sink,
         const Clock* clock = Clock::Real());

  // Releases first (so that what they free can be admitted to), then admissions, then the work.
  // Every field but timing.queue_us and total_us is set.
  StepResult Execute(const Step& step);

  // What the step gave to the sink leaves now.  After its result: a drafter that has the features
  // may take the processor for a whole forward, and the router has to ask for that draft.
  void SendFeatures();

  // Frees everything, as if each sequence had been released.
  void ReleaseAll();

  // Gives the sink the sequence's features from position `from` on (not older than the drafter's
  // window), in parts marked with `request` (not 0).  Nothing where the sequence has ended or its
  // features go elsewhere: the sink has been told.
  void Resend(const std::string& drafter, uint64_t sequence, int64_t from, uint64_t request);

  // While set, admissions are refused, UNAVAILABLE, with this sentence.
  void RefuseAdmissions(std::string why) { refuse_ = std::move(why); }

  const Target& target() const { return *target_; }
  const Limits& limits() const { return limits_; }
  PoolState pool_state() const;
  PagePool::Runs free_runs() const { return pool_.FreeRuns(); }
  const EngineCounters& counters() const { return counters_; }
  // Ids of the sequences known here, ended ones included, in order of admission.
  std::vector<uint64_t> sequences() const;
  // How many of them have not ended.
  int64_t live_sequences() const;

  // Times steps with the real target on pages of its own; call before the first Execute.
  struct Cost {
    struct Point {
      int64_t rows = 0;
      float microseconds = 0;  // the least of several runs
    };
    std::vector<Point> decode;
    float prefill_us_per_token = 0;
  };
  // Takes about `budget`.  Errors are the target's.
  absl::StatusOr<Cost> MeasureCost(Duration budget);

  // INTERNAL, saying what is wrong: the pool's own invariants; every used page belongs to exactly
  // one sequence; no sequence holds fewer or more pages than its tokens need.
  absl::Status CheckInvariants() const;

 private:
  struct Item;

  void Erase(uint64_t sequence);
  void FreePages(Sequence* sequence);
  void End(Sequence* sequence);
  absl::Status AdmitOne(const Admit& admit);
  // Either answers the work in `result`, or returns what is to be run.
  std::unique_ptr<Item> Take(const Work& work, WorkResult* result);
  // Answers the work of a preempted sequence, which is then gone.
  void TellPreempted(uint64_t sequence, WorkResult* result);
  void FindPages(std::vector<std::unique_ptr<Item>>* items);
  // False where none ranks below `than`.
  bool PreemptLowest(const Sequence& than, std::vector<std::unique_ptr<Item>>* items);
  // One forward over the items, to their results.  Where it fails the items stand as they were.
  absl::Status Run(absl::Span<Item* const> items, StepResult* result);
  void Walk(Item* item, absl::Span<const float> logits);
  void Commit(absl::Span<Item* const> items);
  int32_t Slot(const Sequence& sequence, int64_t position) const;

  std::unique_ptr<Target> target_;
  Limits limits_;
  bool check_every_step_;
  FeatureSink* sink_;
  const Clock* clock_;
  PagePool pool_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Sequence>> sequences_;
  uint64_t next_order_ = 0;
  std::string refuse_;
  EngineCounters counters_;
  ForwardResult forward_;              // reused between steps
  std::vector<uint16_t> features_;     // the same
  std::vector<float> changed_logits_;  // the same, of one row
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_ENGINE_H_
