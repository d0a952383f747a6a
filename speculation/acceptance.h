// How often the target agrees with the drafter, as one sequence has seen it: what calibrates the
// drafter's probabilities.
#ifndef COPPICE_SPECULATION_ACCEPTANCE_H_
#define COPPICE_SPECULATION_ACCEPTANCE_H_

#include <array>

#include "speculation/build.h"

namespace coppice::speculation {

struct AcceptancePrior {
  // Observed over claimed acceptance before anything was observed.  Beside the spine the drafter is
  // right about 22 % of the time where it claims the 65–84 % that hold on it.
  float on_spine = 1.0f;
  float off_spine = 0.3f;
  float weight = 4.0f;  // how much claimed mass the prior counts for
  float half_life =
      64.0f;  // visited nodes of a (depth, class) cell after which an observation counts half
};

// For each depth, and for parents on and off the argmax spine: acceptances over the probability
// mass that the drafter gave to the children in the tree.  A value; copying it copies what it has
// learned.
class AcceptanceTracker {
 public:
  explicit AcceptanceTracker(const AcceptancePrior& prior = {});

  // The outcome of one round: of `built`, the nodes path_end and above it, up to the root, were
  // accepted.  A round that was cut short for another reason than a disagreement (a stop, the depth
  // cap) teaches nothing about its last node: `cut` says so.
  void Observe(const BuiltTree& built, int path_end, bool cut);

  // log(observed / claimed), bounded to [-4, 1].
  const Calibration& calibration() const { return calibration_; }

 private:
  struct Cell {
    float accepted = 0;
    float claimed = 0;
  };
  void Update(int depth, bool on_spine, bool accepted, float claimed);

  AcceptancePrior prior_;
  float keep_;  // per observation
  std::array<Cell, kMaxPositions> on_spine_;
  std::array<Cell, kMaxPositions> off_spine_;
  Calibration calibration_;
};

}  // namespace coppice::speculation

#endif  // COPPICE_SPECULATION_ACCEPTANCE_H_
