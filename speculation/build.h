// Building draft trees from per-position candidates: DDTree's best-first expansion (Ringel and
// Romano, arXiv 2604.12989), with the argmax spine first, for one sequence or for a whole batch
// under one node budget.
//
// A position's candidates do not know which earlier ones were taken, so a path's log-probability is
// the sum of its nodes', and the best tree of B nodes is the B likeliest prefixes.  Order is total,
// so equal inputs give equal trees everywhere: score descending, depth ascending, rank ascending,
// then order of insertion (sequences in the order given).
#ifndef COPPICE_SPECULATION_BUILD_H_
#define COPPICE_SPECULATION_BUILD_H_

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "speculation/tree.h"

namespace coppice::speculation {

inline constexpr int kMaxPositions = 16;
inline constexpr int kMaxCandidates = 64;

// What a drafter answered for one sequence; the spans must outlive the view.
struct CandidateView {
  int positions = 0;                 // L: position i proposes the token at depth i + 1
  int k = 0;                         // candidates per position
  absl::Span<const int32_t> tokens;  // [positions, k], best first
  absl::Span<const float>
      log_probs;  // [positions, k], of the drafter's softmax at T = 1; -inf: no candidate
};

// INVALID_ARGUMENT, naming position and rank, unless: 0 … kMaxPositions positions of 0 …
// kMaxCandidates candidates, spans of that size, tokens in [0, vocab_size), log-probabilities
// descending, not NaN and at most 0 (a rounding error of 1e-3 is let pass).
absl::Status Validate(const CandidateView& candidates, int vocab_size);

// What is added to a candidate's log-probability, by depth and by whether its *parent* lies on the
// argmax spine: the drafter's positions are implicitly conditioned on the spine, so beside it they
// overrate themselves.  Sums above 0 count as 0, which keeps a prefix at least as likely as its
// extensions.
struct Calibration {
  std::array<float, kMaxPositions> on_spine{};
  std::array<float, kMaxPositions> off_spine{};
};

struct BuildRequest {
  int32_t root_token = 0;
  CandidateView candidates;
  int max_depth =
      kMaxPositions;  // of a node; remaining max_tokens - 1, since each round commits depth + 1
  int max_nodes = kMaxNodes;  // of this tree, the root included
  int min_spine =
      kMaxPositions;  // so many nodes of the argmax spine come before any best-first expansion
  const Calibration* calibration = nullptr;  // null: the drafter's own probabilities
};

// A draft tree with what its builder thought of each node.
struct BuiltTree {
  DraftTree tree;
  std::vector<double>
      score;  // [nodes]; calibrated log-probability that the node is accepted; 0 for the root
  std::vector<float>
      log_prob;  // [nodes]; the drafter's own, of the node given its parent; 0 for the root
  std::vector<uint8_t> on_spine;  // [nodes]; 1 for the argmax spine, the root included

  // Keeps the first `nodes` (>= 1) nodes: the tree that a smaller budget would have built.
  void Truncate(int nodes);
};

// Tokens a round of this tree commits in expectation: the bonus, and each node with its
// probability.
double ExpectedTokens(const BuiltTree& tree);

// Length of the longest argmax spine: positions up to max_depth that have a candidate.
int SpineLength(const CandidateView& candidates, int max_depth);

// Keeps its scratch memory between calls, so that building allocates nothing once warm (given
// reused outputs).  Not thread-safe.
class TreeBuilder {
 public:
  // At most `budget` nodes below the root (further bounded by max_nodes).  Candidates must be
  // valid; a token repeated within a position counts once, at its best rank.
  void Build(const BuildRequest& request, int budget, BuiltTree* out);

  // All sequences' trees under one budget of nodes below the roots.  Minimum spines come first
  // (depth by depth, in the order given, as far as the budget reaches), then one heap over all
  // sequences, keyed by calibrated path log-probability.  With one sequence this is Build.  `out`
  // gets one tree per request; `order`, if not null, the index of the sequence that each node in
  // turn was added to: the trees of any smaller budget b are these trees truncated to what the
  // first b entries added.
  void BuildBatch(absl::Span<const BuildRequest> requests, int budget, std::vector<BuiltTree>* out,
                  std::vector<int32_t>* order = nullptr);

 private:
  struct Entry {
    double score;  // of the path that ends in this candidate
    double base;   // of its parent's
    float log_prob;
    int32_t depth;
    int32_t rank;
    uint32_t inserted;
    int32_t sequence;
    int32_t parent;
    bool parent_on_spine;
  };
  struct Worse;

  // Pushes the first usable candidate of rank >= `rank`.
  void Push(const BuildRequest& request, int sequence, int parent, int depth, int rank, double base,
            bool parent_on_spine);
  void BuildInto(absl::Span<const BuildRequest> requests, int budget, BuiltTree* out,
                 std::vector<int32_t>* order);

  std::vector<Entry> heap_;
  uint32_t inserted_ = 0;
};

}  // namespace coppice::speculation

#endif  // COPPICE_SPECULATION_BUILD_H_
