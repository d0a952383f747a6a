#include "speculation/cost_model.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace coppice::speculation {

absl::StatusOr<CostTable> CostTable::Create(absl::Span<const CostSample> samples) {
  if (samples.empty()) {
    return absl::InvalidArgumentError("a cost table needs at least one sample");
  }
  std::vector<CostSample> sorted(samples.begin(), samples.end());
  for (const CostSample& sample : sorted) {
    if (sample.rows < 1 || !std::isfinite(sample.microseconds) || sample.microseconds <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a cost sample has at least 1 row and a positive time, not ", sample.rows,
                       " rows in ", sample.microseconds, " us"));
    }
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const CostSample& a, const CostSample& b) { return a.rows < b.rows; });
  std::vector<CostSample> kept;
  for (const CostSample& sample : sorted) {
    if (!kept.empty() && kept.back().rows == sample.rows) kept.pop_back();
    kept.push_back(sample);
  }
  for (size_t i = 1; i < kept.size(); ++i) {
    kept[i].microseconds = std::max(kept[i].microseconds, kept[i - 1].microseconds);
  }
  return CostTable(std::move(kept));
}

double CostTable::Microseconds(int rows) const {
  const CostSample& first = samples_.front();
  if (rows <= first.rows || samples_.size() == 1) return first.microseconds;
  auto above =
      std::lower_bound(samples_.begin(), samples_.end(), rows,
                       [](const CostSample& sample, int wanted) { return sample.rows < wanted; });
  if (above == samples_.end()) --above;
  const CostSample& high = *above;
  const CostSample& low = *(above - 1);
  return low.microseconds + (high.microseconds - low.microseconds) * (rows - low.rows) /
                                static_cast<double>(high.rows - low.rows);
}

namespace {

int CellOf(int rows) {
  int bits = 0;
  for (unsigned left = static_cast<unsigned>(std::max(rows, 1) - 1); left > 0; left >>= 1) ++bits;
  return std::min(bits, 19);
}

}  // namespace

void LiveCost::Cell::Add(double value, double memory) {
  weight = std::min(weight + 1, memory);
  log_ratio += (value - log_ratio) / weight;
}

double LiveCost::Microseconds(int rows) const {
  const Cell& cell = cells_[CellOf(rows)];
  // One part of what is known of all rows, so that a single observation is not taken for the whole
  // truth.
  const double log_ratio = (cell.weight * cell.log_ratio + all_.log_ratio) / (cell.weight + 1);
  return table_.Microseconds(rows) * std::exp(log_ratio);
}

void LiveCost::Observe(int rows, double microseconds) {
  if (rows < 1 || !(microseconds > 0) || !std::isfinite(microseconds)) return;
  const double log_ratio =
      std::clamp(std::log(microseconds / table_.Microseconds(rows)), -5.0, 5.0);
  cells_[CellOf(rows)].Add(log_ratio, 16);
  all_.Add(log_ratio, 64);
}

double Rate(const WidthOption& option, const RoundCost& cost) {
  const double time = cost.verify->Microseconds(cost.other_rows + option.rows) + cost.overhead_us +
                      (option.drafted ? cost.draft_us : 0.0);
  return (option.tokens + cost.other_tokens) / time;
}

int ChooseWidth(absl::Span<const WidthOption> options, const RoundCost& cost) {
  int best = 0;
  double best_rate = Rate(options[0], cost);
  for (int i = 1; i < static_cast<int>(options.size()); ++i) {
    const double rate = Rate(options[i], cost);
    if (rate > best_rate || (rate == best_rate && options[i].rows < options[best].rows)) {
      best = i;
      best_rate = rate;
    }
  }
  return best;
}

WidthForecast::WidthForecast() : tokens_{1.0, 3.0, 3.2, 3.5, 3.8} {}

void WidthForecast::Observe(const std::array<double, kWidths>& tokens) {
  const double weight = observed_ ? 0.125 : 1.0;
  for (int i = 0; i < kWidths; ++i) tokens_[i] += weight * (tokens[i] - tokens_[i]);
  observed_ = true;
}

}  // namespace coppice::speculation
