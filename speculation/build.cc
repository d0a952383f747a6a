#include "speculation/build.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace coppice::speculation {
namespace {

constexpr float kNoCandidate = -std::numeric_limits<float>::infinity();

int MaxDepth(const BuildRequest& request) {
  if (request.candidates.k < 1) return 0;
  return std::max(0, std::min(request.max_depth, request.candidates.positions));
}

double Calibrated(const BuildRequest& request, int depth, bool parent_on_spine, float log_prob) {
  double sum = log_prob;
  if (request.calibration != nullptr) {
    sum += parent_on_spine ? request.calibration->on_spine[depth - 1]
                           : request.calibration->off_spine[depth - 1];
  }
  return std::min(sum, 0.0);
}

void Reset(int32_t root_token, BuiltTree* out) {
  out->tree.token.assign(1, root_token);
  out->tree.parent.assign(1, -1);
  out->tree.depth.assign(1, 0);
  out->score.assign(1, 0.0);
  out->log_prob.assign(1, 0.0f);
  out->on_spine.assign(1, 1);
}

void Append(int32_t token, int32_t parent, int32_t depth, double score, float log_prob,
            bool on_spine, BuiltTree* out) {
  out->tree.token.push_back(token);
  out->tree.parent.push_back(parent);
  out->tree.depth.push_back(depth);
  out->score.push_back(score);
  out->log_prob.push_back(log_prob);
  out->on_spine.push_back(on_spine);
}

}  // namespace

absl::Status Validate(const CandidateView& candidates, int vocab_size) {
  const int positions = candidates.positions;
  const int k = candidates.k;
  if (positions < 0 || positions > kMaxPositions || k < 0 || k > kMaxCandidates) {
    return absl::InvalidArgumentError(
        absl::StrCat("a draft has at most ", kMaxPositions, " positions of at most ",
                     kMaxCandidates, " candidates; this one has ", positions, " of ", k));
  }
  const size_t count = static_cast<size_t>(positions) * k;
  if (candidates.tokens.size() != count || candidates.log_probs.size() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("a draft of ", positions, " positions of ", k, " candidates needs ", count,
                     " tokens and log-probabilities, not ", candidates.tokens.size(), " and ",
                     candidates.log_probs.size()));
  }
  for (size_t i = 0; i < count; ++i) {
    const float log_prob = candidates.log_probs[i];
    const bool first = i % k == 0;
    if (candidates.tokens[i] < 0 || candidates.tokens[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("draft position ", i / k, ", rank ", i % k,
                                                     ": token ", candidates.tokens[i],
                                                     " is outside the vocabulary of ", vocab_size));
    }
    if (!(log_prob <= 1e-3f)) {
      return absl::InvalidArgumentError(absl::StrCat("draft position ", i / k, ", rank ", i % k,
                                                     ": ", log_prob, " is not a log-probability"));
    }
    if (!first && log_prob > candidates.log_probs[i - 1]) {
      return absl::InvalidArgumentError(absl::StrCat("draft position ", i / k, ", rank ", i % k,
                                                     " is likelier than the rank before it; "
                                                     "candidates come best first"));
    }
  }
  return absl::OkStatus();
}

void BuiltTree::Truncate(int nodes) {
  tree.token.resize(nodes);
  tree.parent.resize(nodes);
  tree.depth.resize(nodes);
  score.resize(nodes);
  log_prob.resize(nodes);
  on_spine.resize(nodes);
}

double ExpectedTokens(const BuiltTree& tree) {
  double expected = 0;
  for (double score : tree.score) expected += std::exp(score);
  return expected;
}

int SpineLength(const CandidateView& candidates, int max_depth) {
  if (candidates.k < 1) return 0;
  const int limit = std::min(candidates.positions, max_depth);
  int length = 0;
  while (length < limit && candidates.log_probs[length * candidates.k] != kNoCandidate) ++length;
  return length;
}

// Heap order: true where `a` comes out after `b`.
struct TreeBuilder::Worse {
  bool operator()(const Entry& a, const Entry& b) const {
    if (a.score != b.score) return a.score < b.score;
    if (a.depth != b.depth) return a.depth > b.depth;
    if (a.rank != b.rank) return a.rank > b.rank;
    return a.inserted > b.inserted;
  }
};

void TreeBuilder::Push(const BuildRequest& request, int sequence, int parent, int depth, int rank,
                       double base, bool parent_on_spine) {
  const int k = request.candidates.k;
  const int32_t* tokens = request.candidates.tokens.data() + static_cast<size_t>(depth - 1) * k;
  const float* log_probs = request.candidates.log_probs.data() + static_cast<size_t>(depth - 1) * k;
  for (; rank < k; ++rank) {
    if (log_probs[rank] == kNoCandidate) return;  // and so are all worse ones
    if (std::find(tokens, tokens + rank, tokens[rank]) != tokens + rank) continue;  // a repetition
    heap_.push_back({base + Calibrated(request, depth, parent_on_spine, log_probs[rank]), base,
                     log_probs[rank], depth, rank, inserted_++, sequence, parent, parent_on_spine});
    std::push_heap(heap_.begin(), heap_.end(), Worse());
    return;
  }
}

void TreeBuilder::BuildInto(absl::Span<const BuildRequest> requests, int budget, BuiltTree* out,
                            std::vector<int32_t>* order) {
  heap_.clear();
  inserted_ = 0;
  if (order != nullptr) order->clear();
  for (size_t i = 0; i < requests.size(); ++i) Reset(requests[i].root_token, &out[i]);

  // Spines, depth by depth so that a small budget serves all sequences alike.
  bool grown = true;
  for (int depth = 1; grown && budget > 0; ++depth) {
    grown = false;
    for (size_t i = 0; i < requests.size() && budget > 0; ++i) {
      const BuildRequest& request = requests[i];
      BuiltTree& built = out[i];
      if (built.tree.nodes() != depth || depth > std::min(MaxDepth(request), request.min_spine) ||
          depth >= std::min(request.max_nodes, kMaxNodes)) {
        continue;
      }
      const size_t at = static_cast<size_t>(depth - 1) * request.candidates.k;
      const float log_prob = request.candidates.log_probs[at];
      if (log_prob == kNoCandidate) continue;
      Append(request.candidates.tokens[at], depth - 1, depth,
             built.score.back() + Calibrated(request, depth, true, log_prob), log_prob, true,
             &built);
      if (order != nullptr) order->push_back(static_cast<int32_t>(i));
      --budget;
      grown = true;
    }
  }
  if (budget <= 0) return;

  // Each spine node's next sibling, and what may follow the spine's end.
  for (size_t i = 0; i < requests.size(); ++i) {
    const BuildRequest& request = requests[i];
    const int max_depth = MaxDepth(request);
    const int spine = out[i].tree.nodes() - 1;
    for (int parent = 0; parent <= spine && parent < max_depth; ++parent) {
      Push(request, static_cast<int>(i), parent, parent + 1, parent < spine ? 1 : 0,
           out[i].score[parent], true);
    }
  }
  while (!heap_.empty() && budget > 0) {
    std::pop_heap(heap_.begin(), heap_.end(), Worse());
    const Entry entry = heap_.back();
    heap_.pop_back();
    const BuildRequest& request = requests[entry.sequence];
    BuiltTree& built = out[entry.sequence];
    const int node = built.tree.nodes();
    if (node >= std::min(request.max_nodes, kMaxNodes)) continue;
    const size_t at = static_cast<size_t>(entry.depth - 1) * request.candidates.k + entry.rank;
    const bool on_spine = entry.parent_on_spine && entry.rank == 0;
    Append(request.candidates.tokens[at], entry.parent, entry.depth, entry.score, entry.log_prob,
           on_spine, &built);
    if (order != nullptr) order->push_back(entry.sequence);
    --budget;
    Push(request, entry.sequence, entry.parent, entry.depth, entry.rank + 1, entry.base,
         entry.parent_on_spine);
    if (entry.depth < MaxDepth(request)) {
      Push(request, entry.sequence, node, entry.depth + 1, 0, entry.score, on_spine);
    }
  }
}

void TreeBuilder::Build(const BuildRequest& request, int budget, BuiltTree* out) {
  BuildInto(absl::MakeConstSpan(&request, 1), budget, out, nullptr);
}

void TreeBuilder::BuildBatch(absl::Span<const BuildRequest> requests, int budget,
                             std::vector<BuiltTree>* out, std::vector<int32_t>* order) {
  out->resize(requests.size());
  BuildInto(requests, budget, out->data(), order);
}

}  // namespace coppice::speculation
