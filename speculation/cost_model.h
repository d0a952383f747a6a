// What a step costs, and which width of drafting earns the most tokens per unit of time.
#ifndef COPPICE_SPECULATION_COST_MODEL_H_
#define COPPICE_SPECULATION_COST_MODEL_H_

#include <array>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace coppice::speculation {

struct CostSample {
  int rows = 0;
  double microseconds = 0;
};

// T(rows), measured.  Between two samples it is the straight line; before the first, the first's
// time; beyond the last, the line through the last two.  A staircase is told by a sample on each
// side of each step.  Never descends: a sample below an earlier one is noise and counts as equal to
// it.
class CostTable {
 public:
  // Any order; of samples with the same rows the last counts.  INVALID_ARGUMENT where there is
  // none, or where one has rows < 1 or a time that is not positive and finite.
  static absl::StatusOr<CostTable> Create(absl::Span<const CostSample> samples);

  double Microseconds(int rows) const;

 private:
  explicit CostTable(std::vector<CostSample> samples) : samples_(std::move(samples)) {}

  std::vector<CostSample> samples_;  // rows strictly ascending, times ascending; never empty
};

// A cost table that learns: measured in a bad moment, or on a machine whose load changes, it would
// mislead for ever. Each observation corrects its neighbourhood (rows up to the same power of two),
// and, a little, all the rest.
class LiveCost {
 public:
  explicit LiveCost(CostTable table) : table_(std::move(table)) {}

  double Microseconds(int rows) const;
  // A step of so many rows took so long.  Nonsense (no rows, no time) is ignored.
  void Observe(int rows, double microseconds);

  const CostTable& table() const { return table_; }

 private:
  // Mean of log(observed / table), recent observations weighing more.
  struct Cell {
    double log_ratio = 0;
    double weight = 0;

    void Add(double value, double memory);
  };

  CostTable table_;
  std::array<Cell, 20> cells_;  // by the bit width of rows - 1
  Cell all_;
};

// What a sequence's round may be.
enum class Width { kOff = 0, kChain, kTree9, kTree17, kTree33 };
inline constexpr int kWidths = 5;

// One way to run the batch's next round.
struct WidthOption {
  double tokens = 0;  // expected to be committed, over the sequences whose width is being chosen
  int rows = 0;       // they put into the step
  bool drafted = false;
};

struct RoundCost {
  const LiveCost* verify = nullptr;
  int other_rows = 0;       // in the step whatever is chosen
  double other_tokens = 0;  // committed by them
  double draft_us = 0;      // paid by a drafted round
  double overhead_us = 0;   // paid by every round
};

// Tokens per microsecond of a round.
double Rate(const WidthOption& option, const RoundCost& cost);

// The index of the option with the best rate; of equals the one with the fewest rows, then the
// first.  `options` is not empty.
int ChooseWidth(absl::Span<const WidthOption> options, const RoundCost& cost);

// What each width is expected to commit in a sequence's next round, before its draft is known: a
// moving average of what the builder expected of its past drafts.  Begins optimistic, so that a new
// sequence is drafted for.
class WidthForecast {
 public:
  WidthForecast();

  // Expected tokens per width, of a draft that was made (whichever width was then chosen).
  void Observe(const std::array<double, kWidths>& tokens);
  double tokens(Width width) const { return tokens_[static_cast<int>(width)]; }

 private:
  std::array<double, kWidths> tokens_;
  bool observed_ = false;
};

}  // namespace coppice::speculation

#endif  // COPPICE_SPECULATION_COST_MODEL_H_
