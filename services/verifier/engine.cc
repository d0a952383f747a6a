#include "services/verifier/engine.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "model/sampling.h"

namespace coppice::verifier {
namespace {

// One ReadFeatures when features are sent again.
constexpr int64_t kResendTokens = 256;

Limits MakeLimits(const ModelConfig& config, const EngineOptions& options) {
  Limits limits;
  limits.vocab_size = config.vocab_size;
  limits.max_position_embeddings = config.max_position_embeddings;
  limits.page_size = options.page_size;
  limits.pages = options.pages - 1;
  limits.max_rows = options.max_rows;
  limits.max_sequences = options.max_sequences;
  return limits;
}

}  // namespace

// Work on its way through a step.
struct Engine::Item {
  Sequence* sequence = nullptr;
  WorkResult* result = nullptr;
  absl::Span<const int32_t> tokens;  // the rows'
  speculation::DraftTree tree;       // empty: a prefill chunk
  std::vector<uint64_t> ancestors;
  std::vector<int32_t> logit_rows;
  int64_t base_len = 0;
  bool draft_ahead = false;
  bool dropped = false;       // answered without running
  int64_t new_pages = 0;      // to be allocated
  int64_t first_row = 0;      // among all rows of the forward
  std::vector<int32_t> kept;  // rows whose tokens were committed: base_len, base_len + 1, …

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  bool is_tree() const { return tree.nodes() > 0; }
  // Slots without which the work cannot run.
  int64_t least_rows() const { return is_tree() ? 1 : rows(); }
};

Engine::Engine(std::unique_ptr<Target> target, const EngineOptions& options, FeatureSink* sink,
               const Clock* clock)
    : target_(std::move(target)),
      limits_(MakeLimits(target_->config(), options)),
      check_every_step_(options.check_every_step),
      sink_(target_->has_features() ? sink : nullptr),
      clock_(clock),
      pool_(options.pages) {}

int32_t Engine::Slot(const Sequence& sequence, int64_t position) const {
  const int64_t page = sequence.pages[position / limits_.page_size];
  return static_cast<int32_t>(page * limits_.page_size + position % limits_.page_size);
}

void Engine::FreePages(Sequence* sequence) {
  pool_.Release(sequence->pages);
  sequence->pages.clear();
}

void Engine::End(Sequence* sequence) {
  FreePages(sequence);
  if (sequence->ended) return;
  sequence->ended = true;
  if (sink_ && !sequence->admit.drafter.empty()) {
    sink_->Release(sequence->admit.drafter, sequence->admit.sequence);
  }
}

void Engine::Erase(uint64_t sequence) {
  const auto it = sequences_.find(sequence);
  if (it == sequences_.end()) return;
  End(it->second.get());
  sequences_.erase(it);
}

void Engine::ReleaseAll() {
  for (const uint64_t sequence : sequences()) Erase(sequence);
  if (sink_) sink_->Flush();
}

absl::Status Engine::AdmitOne(const Admit& admit) {
  if (!refuse_.empty()) return absl::UnavailableError(refuse_);
  if (sequences_.contains(admit.sequence)) {
    return absl::AlreadyExistsError(
        absl::StrCat("sequence ", admit.sequence, " is admitted already"));
  }
  if (absl::Status s = CheckAdmit(admit, limits_); !s.ok()) return s;
  if (static_cast<int64_t>(sequences_.size()) >= limits_.max_sequences) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", limits_.max_sequences,
                     " sequences are in use; release some or raise --max-sequences"));
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->admit = admit;
  const absl::Span<const int32_t> tokens = admit.tokens;
  sequence->counts =
      TokenCounts(admit.sampling.rules, tokens.subspan(0, tokens.size() - admit.generated),
                  tokens.subspan(tokens.size() - admit.generated));
  sequence->order = next_order_++;
  sequences_[admit.sequence] = std::move(sequence);
  if (sink_ && !admit.drafter.empty()) sink_->Connect(admit.drafter);
  return absl::OkStatus();
}

std::unique_ptr<Engine::Item> Engine::Take(const Work& work, WorkResult* result) {
  result->sequence = work.sequence;
  const auto it = sequences_.find(work.sequence);
  if (it == sequences_.end()) {
    result->outcome = Outcome::kUnknown;
    result->error = "it is not admitted here, or was freed; admit it again with the tokens so far";
    return nullptr;
  }
  Sequence* sequence = it->second.get();
  if (work.base_len == sequence->last_base) {
    *result = sequence->last_result;
    ++counters_.repeated;
    return nullptr;
  }
  if (sequence->preempted) {
    TellPreempted(work.sequence, result);
    return nullptr;
  }
  result->base_len = sequence->committed;
  if (work.base_len != sequence->committed) {
    result->outcome = Outcome::kWrongBase;
    return nullptr;
  }
  absl::StatusOr<speculation::DraftTree> tree = CheckWork(work, *sequence, limits_);
  if (!tree.ok()) {
    result->outcome = Outcome::kRejected;
    result->error = std::string(tree.status().message());
    return nullptr;
  }
  auto item = std::make_unique<Item>();
  item->sequence = sequence;
  item->result = result;
  item->base_len = work.base_len;
  item->draft_ahead = work.draft_ahead;
  item->tree = *std::move(tree);
  item->tokens =
      item->is_tree()
          ? absl::MakeConstSpan(item->tree.token)
          : absl::MakeConstSpan(sequence->admit.tokens).subspan(work.base_len, work.prefill);
  return item;
}

bool Engine::PreemptLowest(const Sequence& than, std::vector<std::unique_ptr<Item>>* items) {
  Sequence* victim = nullptr;
  for (const auto& [id, sequence] : sequences_) {
    if (than.RanksBefore(*sequence) && !sequence->pages.empty() &&
        (!victim || victim->RanksBefore(*sequence))) {
      victim = sequence.get();
    }
  }
  if (!victim) return false;
  LOG(INFO) << "sequence " << victim->admit.sequence << " preempted: " << victim->pages.size()
            << " pages go to sequence " << than.admit.sequence;
  ++counters_.preempted;
  End(victim);
  victim->preempted = true;
  for (const std::unique_ptr<Item>& item : *items) {
    if (item->sequence != victim) continue;
    item->dropped = true;
    TellPreempted(victim->admit.sequence, item->result);
    break;
  }
  return true;
}

void Engine::TellPreempted(uint64_t sequence, WorkResult* result) {
  result->outcome = Outcome::kPreempted;
  result->error = "the pool is full; its pages went to a sequence that ranks above it";
  Erase(sequence);
}

void Engine::FindPages(std::vector<std::unique_ptr<Item>>* items) {
  std::vector<Item*> by_rank;
  for (const std::unique_ptr<Item>& item : *items) by_rank.push_back(item.get());
  std::sort(by_rank.begin(), by_rank.end(),
            [](const Item* a, const Item* b) { return a->sequence->RanksBefore(*b->sequence); });

  // In order of rank, so that a victim, ranking below, was never promised anything before.
  int64_t promised = 0;
  for (Item* item : by_rank) {
    if (item->dropped) continue;
    const Sequence& sequence = *item->sequence;
    const int64_t held = static_cast<int64_t>(sequence.pages.size());
    const int64_t needed = std::max<int64_t>(
        0, PagesFor(item->base_len + item->least_rows(), limits_.page_size) - held);
    if (needed > pool_.free_pages() - promised) {
      int64_t obtainable = pool_.free_pages() - promised;
      for (const auto& [id, other] : sequences_) {
        if (sequence.RanksBefore(*other)) obtainable += static_cast<int64_t>(other->pages.size());
      }
      while (needed <= obtainable && needed > pool_.free_pages() - promised &&
             PreemptLowest(sequence, items)) {
      }
    }
    if (needed > pool_.free_pages() - promised) {
      item->dropped = true;
      item->result->outcome = Outcome::kNoPages;
      item->result->error =
          absl::StrCat("the pool is full: ", needed, " more pages are needed, ",
                       pool_.free_pages() - promised, " of ", pool_.capacity(), " are free");
      ++counters_.no_pages;
      continue;
    }
    item->new_pages = needed;
    promised += needed;
  }

  int64_t spare = pool_.free_pages() - promised;
  for (Item* item : by_rank) {
    if (item->dropped) continue;
    Sequence* sequence = item->sequence;
    const int64_t held = static_cast<int64_t>(sequence->pages.size()) + item->new_pages;
    const int64_t extra = std::min(
        spare,
        std::max<int64_t>(0, PagesFor(item->base_len + item->rows(), limits_.page_size) - held));
    spare -= extra;
    CHECK(pool_.Allocate(item->new_pages + extra, &sequence->pages));
    const int64_t slots = (held + extra) * limits_.page_size - item->base_len;
    if (slots < item->rows()) {
      // Parents precede children, so the first nodes are a tree, too.
      item->tree.token.resize(slots);
      item->tree.parent.resize(slots);
      item->tree.depth.resize(slots);
      item->tokens = item->tree.token;
      ++counters_.truncated;
    }
  }
  items->erase(std::remove_if(items->begin(), items->end(),
                              [](const std::unique_ptr<Item>& item) { return item->dropped; }),
               items->end());
}

// Draws what the target says next and cuts it to what may be committed.
void Engine::Walk(Item* item, absl::Span<const float> logits) {
  Sequence* sequence = item->sequence;
  const Admit& admit = sequence->admit;
  WorkResult* result = item->result;
  const auto row_logits = [&](int row) {
    return logits.subspan(row * limits_.vocab_size, limits_.vocab_size);
  };
  // Called once per token of the path, in its order, so `counts` is always of the text before it.
  const auto draw = [&](absl::Span<const float> row, int64_t position) {
    const int32_t token = SampleToken(ApplyRules(row, admit.sampling.rules, admit.stop_token_ids,
                                                 sequence->counts, &changed_logits_),
                                      admit.sampling, position);
    sequence->counts.Push(token);
    if (admit.logprobs) {
      std::vector<TokenLogProb> all = LogProbs(row, token, static_cast<int>(*admit.logprobs));
      PositionLogProbs entry;
      entry.chosen = all[0];
      entry.top.assign(all.begin() + 1, all.end());
      result->logprobs.push_back(std::move(entry));
    }
    return token;
  };
  const auto stops = [&](int32_t token) {
    return std::find(admit.stop_token_ids.begin(), admit.stop_token_ids.end(), token) !=
           admit.stop_token_ids.end();
  };

  if (item->is_tree()) {
    speculation::WalkResult walk = speculation::Walk(
        item->tree,
        [&](int node) {
          return draw(row_logits(node), item->base_len + item->tree.depth[node] + 1);
        },
        [&](int32_t token, int drawn) {
          return stops(token) || sequence->generated + drawn >= admit.max_tokens;
        });
    item->kept = std::move(walk.path);
    result->tokens = std::move(walk.tokens);
    result->accepted = static_cast<int64_t>(item->kept.size()) - 1;
    ++counters_.rounds;
    counters_.drafted += item->tree.nodes() - 1;
    counters_.accepted += result->accepted;
  } else {
    item->kept.resize(item->rows());
    std::iota(item->kept.begin(), item->kept.end(), 0);
    if (!item->logit_rows.empty()) {
      result->tokens.push_back(draw(row_logits(0), item->base_len + item->rows()));
    }
    counters_.prefilled += item->rows();
  }

  sequence->committed += static_cast<int64_t>(item->kept.size());
  result->outcome = Outcome::kDone;
  result->base_len = sequence->committed;
  if (!result->tokens.empty()) {
    sequence->pending = result->tokens.back();
    sequence->generated += static_cast<int64_t>(result->tokens.size());
    counters_.tokens += result->tokens.size();
    if (stops(sequence->pending)) {
      result->finish_reason = FinishReason::kStop;
    } else if (sequence->generated >= admit.max_tokens) {
      result->finish_reason = FinishReason::kLength;
    }
  }
  sequence->last_base = item->base_len;
  sequence->last_result = *result;
}

// Rows path[r] move to slots P + r, and their features with them; what an ended sequence would
// keep is not computed.
void Engine::Commit(absl::Span<Item* const> items) {
  CommitPlan plan;
  for (const Item* item : items) {
    if (item->result->finish_reason != FinishReason::kNone) continue;
    const Sequence& sequence = *item->sequence;
    for (size_t r = 0; r < item->kept.size(); ++r) {
      const int32_t row = item->kept[r];
      const int32_t slot = Slot(sequence, item->base_len + static_cast<int64_t>(r));
      if (row != static_cast<int32_t>(r)) {
        plan.moves.push_back({Slot(sequence, item->base_len + row), slot});
      }
      if (target_->has_features()) {
        plan.features.push_back({static_cast<int32_t>(item->first_row + row), slot});
      }
    }
  }
  features_.clear();
  if (!plan.moves.empty() || !plan.features.empty()) target_->Commit(plan, &features_);

  const int64_t hidden = target_->config().hidden_size;
  int64_t offset = 0;  // in rows of features_
  for (Item* item : items) {
    Sequence* sequence = item->sequence;
    if (item->result->finish_reason != FinishReason::kNone) {
      End(sequence);
      continue;
    }
    const int64_t rows = static_cast<int64_t>(item->kept.size());
    if (sink_ && !sequence->admit.drafter.empty()) {
      // Of a prompt, only what the drafter will still see at its end.
      const int64_t prompt = static_cast<int64_t>(sequence->admit.tokens.size());
      const int64_t skip = std::clamp<int64_t>(
          prompt - sink_->Window(sequence->admit.drafter) - item->base_len, 0, rows);
      FeatureRows out;
      out.sequence = sequence->admit.sequence;
      out.first = item->base_len + skip;
      out.count = rows - skip;
      out.features =
          absl::MakeConstSpan(features_).subspan((offset + skip) * hidden, out.count * hidden);
      if (sequence->pending >= 0) out.pending = sequence->pending;
      out.draft_ahead = item->draft_ahead && sequence->pending >= 0;
      if (out.count > 0) sink_->Append(sequence->admit.drafter, out);
    }
    offset += rows;
  }

  for (Item* item : items) {
    Sequence* sequence = item->sequence;
    const int64_t needed = PagesFor(sequence->committed, limits_.page_size);
    if (sequence->ended || static_cast<int64_t>(sequence->pages.size()) <= needed) continue;
    pool_.Release(absl::MakeConstSpan(sequence->pages).subspan(needed));
    sequence->pages.resize(needed);
  }
}

absl::Status Engine::Run(absl::Span<Item* const> items, StepResult* result) {
  std::vector<SequenceRows> batch;
  int64_t rows = 0;
  for (Item* item : items) {
    const Sequence& sequence = *item->sequence;
    item->first_row = rows;
    rows += item->rows();
    item->logit_rows.clear();
    SequenceRows& out = batch.emplace_back();
    if (item->is_tree()) {
      item->ancestors = speculation::AncestorWords(item->tree);
      item->logit_rows.resize(item->rows());
      std::iota(item->logit_rows.begin(), item->logit_rows.end(), 0);
      out.depths = item->tree.depth;
      out.ancestors = item->ancestors;
    } else if (item->rows() == sequence.prompt_left()) {
      item->logit_rows = {static_cast<int32_t>(item->rows() - 1)};
    }
    out.context_len = item->base_len;
    out.tokens = item->tokens;
    out.page_table = sequence.pages;
    out.logit_rows = item->logit_rows;
  }

  const TimePoint start = clock_->Now();
  absl::Status status = target_->Forward(batch, &forward_);
  const TimePoint computed = clock_->Now();
  result->timing.forward_us += MicrosBetween(start, computed);
  if (!status.ok()) return status;
  result->timing.rows += rows;
  result->expert_counts.resize(
      std::max(result->expert_counts.size(), forward_.expert_counts.size()));
  for (size_t i = 0; i < forward_.expert_counts.size(); ++i) {
    result->expert_counts[i] += forward_.expert_counts[i];
  }

  absl::Span<const float> logits = forward_.logits;
  for (Item* item : items) {
    const size_t size = item->logit_rows.size() * limits_.vocab_size;
    Walk(item, logits.subspan(0, size));
    logits.remove_prefix(size);
  }
  const TimePoint walked = clock_->Now();
  result->timing.sample_us += MicrosBetween(computed, walked);
  Commit(items);
  result->timing.commit_us += MicrosBetween(walked, clock_->Now());
  return absl::OkStatus();
}

StepResult Engine::Execute(const Step& step) {
  StepResult result;
  result.step = step.step;
  ++counters_.steps;

  absl::flat_hash_set<uint64_t> released(step.releases.begin(), step.releases.end());
  for (const uint64_t sequence : step.releases) Erase(sequence);
  for (const Admit& admit : step.admits) {
    if (released.contains(admit.sequence)) continue;
    if (absl::Status s = AdmitOne(admit); !s.ok()) {
      result.refused.push_back({admit.sequence, std::move(s)});
    }
  }

  result.results.resize(step.work.size());
  std::vector<std::unique_ptr<Item>> items;
  absl::flat_hash_set<uint64_t> taken;
  int64_t rows = 0;
  for (size_t i = 0; i < step.work.size(); ++i) {
    WorkResult* out = &result.results[i];
    if (!taken.insert(step.work[i].sequence).second) {
      out->sequence = step.work[i].sequence;
      out->outcome = Outcome::kRejected;
      out->error = "the sequence has other work in this step already";
      continue;
    }
    std::unique_ptr<Item> item = Take(step.work[i], out);
    if (!item) continue;
    rows += item->rows();
    items.push_back(std::move(item));
  }
  if (rows > limits_.max_rows) {
    for (const std::unique_ptr<Item>& item : items) {
      item->result->outcome = Outcome::kRejected;
      item->result->error = absl::StrCat("the step has ", rows, " rows and at most ",
                                         limits_.max_rows, " (--max-rows) are computed at once");
    }
    items.clear();
  }

  FindPages(&items);
  if (!items.empty()) {
    std::vector<Item*> batch;
    for (const std::unique_ptr<Item>& item : items) batch.push_back(item.get());
    // What is wrong with one sequence must not stop the others, and rows do not depend on their
    // neighbours: after a failure each runs alone.
    absl::Status status = Run(batch, &result);
    for (size_t i = 0; !status.ok() && i < batch.size(); ++i) {
      Item* item = batch[i];
      const absl::Status alone =
          batch.size() == 1 ? status : Run(absl::MakeConstSpan(&batch[i], 1), &result);
      if (alone.ok()) continue;
      LOG(ERROR) << "sequence " << item->sequence->admit.sequence << " failed at position "
                 << item->base_len << ": " << alone.message();
      item->result->outcome = Outcome::kFailed;
      item->result->error = std::string(alone.message());
      ++counters_.failed;
      Erase(item->sequence->admit.sequence);
    }
  }
  for (const WorkResult& r : result.results) {
    if (r.outcome == Outcome::kRejected) ++counters_.rejected;
  }
  result.pool = pool_state();
  if (check_every_step_) CHECK_EQ(CheckInvariants(), absl::OkStatus());
  return result;
}

void Engine::SendFeatures() {
  if (sink_) sink_->Flush();
}

void Engine::Resend(const std::string& drafter, uint64_t id, int64_t from, uint64_t request) {
  const auto it = sequences_.find(id);
  if (!sink_ || it == sequences_.end()) return;
  const Sequence& sequence = *it->second;
  if (sequence.ended || sequence.admit.drafter != drafter) return;
  const int64_t known = std::max<int64_t>(sequence.committed, sequence.admit.tokens.size());
  int64_t begin =
      std::clamp<int64_t>(std::max(from, known - sink_->Window(drafter)), 0, sequence.committed);
  do {
    const int64_t end = std::min(begin + kResendTokens, sequence.committed);
    std::vector<int32_t> slots;
    for (int64_t position = begin; position < end; ++position) {
      slots.push_back(Slot(sequence, position));
    }
    features_.clear();
    if (!slots.empty()) target_->ReadFeatures(slots, &features_);
    FeatureRows out;
    out.sequence = id;
    out.first = begin;
    out.count = end - begin;
    out.features = features_;
    out.request = request;
    out.answered = end == sequence.committed;
    if (out.answered && sequence.pending >= 0) out.pending = sequence.pending;
    sink_->Append(drafter, out);
    begin = end;
  } while (begin < sequence.committed);
  sink_->Flush();
}

PoolState Engine::pool_state() const {
  PoolState state;
  state.pages = pool_.capacity();
  state.free_pages = pool_.free_pages();
  state.page_size = limits_.page_size;
  state.sequences = static_cast<int64_t>(sequences_.size());
  state.leaked_pages = pool_.used_pages();
  for (const auto& [id, sequence] : sequences_) {
    state.leaked_pages -= static_cast<int64_t>(sequence->pages.size());
  }
  return state;
}

std::vector<uint64_t> Engine::sequences() const {
  std::vector<std::pair<uint64_t, uint64_t>> by_order;
  for (const auto& [id, sequence] : sequences_) by_order.push_back({sequence->order, id});
  std::sort(by_order.begin(), by_order.end());
  std::vector<uint64_t> ids;
  for (const auto& [order, id] : by_order) ids.push_back(id);
  return ids;
}

int64_t Engine::live_sequences() const {
  return std::count_if(sequences_.begin(), sequences_.end(),
                       [](const auto& entry) { return !entry.second->ended; });
}

absl::StatusOr<Engine::Cost> Engine::MeasureCost(Duration budget) {
  CHECK(sequences_.empty());
  constexpr int64_t kRows[] = {1, 2, 4, 8, 9, 16, 17, 32, 33, 64};
  constexpr int64_t kChunk = 128;
  constexpr int kMostRounds = 15;
  // As much context as there is room for beside the widest step.
  const int64_t room =
      std::min(pool_.capacity() * limits_.page_size, limits_.max_position_embeddings);
  const int64_t widest = std::min<int64_t>({std::end(kRows)[-1], limits_.max_rows, room});
  const int64_t context = std::clamp<int64_t>(room - widest, 0, std::min(kChunk, limits_.max_rows));

  Sequence sequence;
  if (!pool_.Allocate(PagesFor(context + widest, limits_.page_size), &sequence.pages)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the pool has no page to hand out; start the verifier with more --pool-tokens (at least ",
        limits_.page_size, ")"));
  }
  const TimePoint start = clock_->Now();
  std::vector<int32_t> tokens(std::max(context, widest));
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>((i * 997 + 13) % limits_.vocab_size);
  }
  // Microseconds of one forward of `rows` at `position`, with the commit of its first `committed`.
  const auto time = [&](int64_t position, int64_t rows, bool tree,
                        int64_t committed) -> absl::StatusOr<float> {
    speculation::DraftTree chain;
    for (int32_t i = 0; tree && i < rows; ++i) {
      chain.token.push_back(tokens[i]);
      chain.parent.push_back(i - 1);
      chain.depth.push_back(i);
    }
    const std::vector<uint64_t> ancestors = speculation::AncestorWords(chain);
    std::vector<int32_t> logit_rows(tree ? rows : 1);
    std::iota(logit_rows.begin(), logit_rows.end(), tree ? 0 : static_cast<int32_t>(rows - 1));
    SequenceRows in;
    in.context_len = position;
    in.tokens = absl::MakeConstSpan(tokens).subspan(0, rows);
    in.depths = chain.depth;
    in.ancestors = ancestors;
    in.page_table = sequence.pages;
    in.logit_rows = logit_rows;
    CommitPlan plan;
    for (int64_t r = 0; target_->has_features() && r < committed; ++r) {
      plan.features.push_back({static_cast<int32_t>(r), Slot(sequence, position + r)});
    }
    const TimePoint begin = clock_->Now();
    absl::Status status = target_->Forward(absl::MakeConstSpan(&in, 1), &forward_);
    if (!status.ok()) return status;
    if (!plan.features.empty()) target_->Commit(plan, &features_);
    return MicrosBetween(begin, clock_->Now());
  };

  Cost cost;
  absl::Status status;
  const auto measure = [&]() -> absl::Status {
    if (context > 0) {
      float best = 0;
      for (int round = 0; round < 2; ++round) {
        if (round > 0 && clock_->Now() - start > budget / 2) break;
        absl::StatusOr<float> us = time(0, context, false, context);
        if (!us.ok()) return us.status();
        best = round == 0 ? *us : std::min(best, *us);
      }
      cost.prefill_us_per_token = best / static_cast<float>(context);
    }
    std::vector<int64_t> rows;
    for (const int64_t n : kRows) {
      if (n <= widest) rows.push_back(n);
    }
    std::vector<float> best(rows.size());
    // Round-robin, so that a slow moment is spread over all.
    for (int round = 0; round < kMostRounds; ++round) {
      if (round > 0 && clock_->Now() - start > budget) break;
      for (size_t i = 0; i < rows.size(); ++i) {
        absl::StatusOr<float> us = time(context, rows[i], true, 1);
        if (!us.ok()) return us.status();
        best[i] = round == 0 ? *us : std::min(best[i], *us);
      }
    }
    // What else the machine does at start-up only ever adds, so the least of several runs is the
    // step's own time, and no step costs more than a wider one.
    for (size_t i = rows.size() - 1; i-- > 0;) best[i] = std::min(best[i], best[i + 1]);
    for (size_t i = 0; i < rows.size(); ++i) cost.decode.push_back({rows[i], best[i]});
    return absl::OkStatus();
  };
  status = measure();
  FreePages(&sequence);
  if (!status.ok()) return status;
  return cost;
}

absl::Status Engine::CheckInvariants() const {
  if (absl::Status s = pool_.Check(); !s.ok()) return s;
  absl::flat_hash_set<int32_t> owned;
  for (const auto& [id, sequence] : sequences_) {
    for (const int32_t page : sequence->pages) {
      if (!owned.insert(page).second) {
        return absl::InternalError(absl::StrCat("page ", page, " belongs to two sequences"));
      }
      if (!pool_.used(page)) {
        return absl::InternalError(absl::StrCat("page ", page, " of sequence ", id, " is free"));
      }
    }
    const int64_t needed = sequence->ended ? 0 : PagesFor(sequence->committed, limits_.page_size);
    if (static_cast<int64_t>(sequence->pages.size()) != needed) {
      return absl::InternalError(absl::StrCat("sequence ", id, " with ", sequence->committed,
                                              " tokens holds ", sequence->pages.size(),
                                              " pages instead of ", needed));
    }
  }
  if (static_cast<int64_t>(owned.size()) != pool_.used_pages()) {
    return absl::InternalError(absl::StrCat(pool_.used_pages(), " pages are in use, ", owned.size(),
                                            " belong to a sequence"));
  }
  return absl::OkStatus();
}

}  // namespace coppice::verifier
