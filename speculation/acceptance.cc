#include "speculation/acceptance.h"

#include <algorithm>
#include <cmath>

namespace coppice::speculation {
namespace {

float LogRatio(float accepted, float claimed) {
  return std::clamp(std::log(std::max(accepted, 1e-6f) / claimed), -4.0f, 1.0f);
}

}  // namespace

AcceptanceTracker::AcceptanceTracker(const AcceptancePrior& prior)
    : prior_(prior), keep_(std::exp2(-1.0f / prior.half_life)) {
  on_spine_.fill({prior.weight * prior.on_spine, prior.weight});
  off_spine_.fill({prior.weight * prior.off_spine, prior.weight});
  calibration_.on_spine.fill(LogRatio(prior.on_spine, 1.0f));
  calibration_.off_spine.fill(LogRatio(prior.off_spine, 1.0f));
}

void AcceptanceTracker::Update(int depth, bool on_spine, bool accepted, float claimed) {
  Cell& cell = (on_spine ? on_spine_ : off_spine_)[depth - 1];
  const float ratio = on_spine ? prior_.on_spine : prior_.off_spine;
  // What is forgotten is replaced by the prior, so that a cell never weighs less than it.
  cell.accepted =
      keep_ * cell.accepted + (1 - keep_) * prior_.weight * ratio + (accepted ? 1.0f : 0.0f);
  cell.claimed = keep_ * cell.claimed + (1 - keep_) * prior_.weight + claimed;
  (on_spine ? calibration_.on_spine : calibration_.off_spine)[depth - 1] =
      LogRatio(cell.accepted, cell.claimed);
}

void AcceptanceTracker::Observe(const BuiltTree& built, int path_end, bool cut) {
  const DraftTree& tree = built.tree;
  int next = -1;  // the accepted child of `node`
  for (int node = path_end; node >= 0; next = node, node = tree.parent[node]) {
    if (next < 0 && cut) continue;
    float claimed = 0;
    for (int child = node + 1; child < tree.nodes(); ++child) {
      if (tree.parent[child] == node) claimed += std::exp(built.log_prob[child]);
    }
    const int depth = tree.depth[node] + 1;
    if (claimed > 0 && depth <= kMaxPositions) {
      Update(depth, built.on_spine[node] != 0, next >= 0, claimed);
    }
  }
}

}  // namespace coppice::speculation
