#include "services/verifier/fake_target.h"

#include <algorithm>
#include <bit>
#include <set>

#include "absl/strings/str_cat.h"

namespace coppice::verifier {
namespace {

constexpr uint64_t kEmpty = 0x243F6A8885A308D3ull;

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

uint64_t Extend(uint64_t hash, int32_t token) {
  return Mix(hash * 3 + static_cast<uint64_t>(token) + 1);
}

uint64_t HashOf(absl::Span<const int32_t> text) {
  uint64_t hash = kEmpty;
  for (const int32_t token : text) hash = Extend(hash, token);
  return hash;
}

void AppendLogits(uint64_t hash, int vocab_size, std::vector<float>* out) {
  for (int v = 0; v < vocab_size; ++v) {
    out->push_back(static_cast<float>(Mix(hash ^ Mix(v + 1)) >> 40) / (1 << 21));
  }
}

void AppendFeature(uint64_t hash, int hidden_size, std::vector<uint16_t>* out) {
  for (int h = 0; h < hidden_size; ++h) {
    out->push_back(static_cast<uint16_t>(Mix(hash + 77 * (h + 1))));
  }
}

}  // namespace

FakeTarget::FakeTarget(const FakeTargetOptions& options)
    : options_(options),
      cache_(options.pages * options.page_size),
      kept_(options.pages * options.page_size) {
  config_.vocab_size = options.vocab_size;
  config_.hidden_size = options.hidden_size;
  config_.max_position_embeddings = options.max_position_embeddings;
  config_.num_hidden_layers = 2;
  config_.first_k_dense_replace = 1;
  config_.n_routed_experts = 3;
}

absl::Status FakeTarget::Forward(absl::Span<const SequenceRows> sequences, ForwardResult* result) {
  if (on_forward) on_forward();
  ++forwards_;
  row_hashes_.clear();
  result->vocab_size = options_.vocab_size;
  result->logits.clear();
  result->expert_counts.assign(config_.n_routed_experts, 0);
  absl::Status status;
  std::set<int32_t> pages;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const SequenceRows& in = sequences[s];
    const int64_t n = static_cast<int64_t>(in.tokens.size());
    const bool tree = !in.ancestors.empty();
    if (n == 0) Violation("no rows");
    if (static_cast<int64_t>(in.page_table.size()) * options_.page_size < in.context_len + n) {
      Violation(absl::StrCat("a page table of ", in.page_table.size(), " pages for ",
                             in.context_len + n, " tokens"));
      continue;
    }
    for (const int32_t page : in.page_table) {
      if (page <= 0 || page >= options_.pages) Violation(absl::StrCat("page ", page));
      if (!pages.insert(page).second) Violation(absl::StrCat("page ", page, " is in two tables"));
    }
    const auto slot = [&](int64_t position) {
      return in.page_table[position / options_.page_size] * options_.page_size +
             position % options_.page_size;
    };
    bool poisoned = false;
    uint64_t context = kEmpty;
    for (int64_t p = 0; p < in.context_len; ++p) {
      const Entry& entry = cache_[slot(p)];
      if (entry.position != p) {
        Violation(absl::StrCat("position ", p, " holds position ", entry.position));
      }
      poisoned |= options_.poison && entry.token == *options_.poison;
      context = Extend(context, entry.token);
    }
    std::vector<uint64_t> hashes;
    for (int64_t i = 0; i < n; ++i) {
      uint64_t hash = context;
      if (tree) {
        for (int64_t j = 0; j <= i; ++j) {
          if (in.ancestors[i] >> j & 1) hash = Extend(hash, in.tokens[j]);
        }
        if (std::popcount(in.ancestors[i]) != in.depths[i] + 1) Violation("depth and ancestors");
      } else {
        hash = Extend(i == 0 ? context : hashes[i - 1], in.tokens[i]);
      }
      poisoned |= options_.poison && in.tokens[i] == *options_.poison;
      hashes.push_back(hash);
      row_hashes_.push_back(hash);
      cache_[slot(in.context_len + i)] = {in.tokens[i], in.context_len + (tree ? in.depths[i] : i)};
      ++result->expert_counts[in.tokens[i] % config_.n_routed_experts];
    }
    rows_ += n;
    for (const int32_t row : in.logit_rows) {
      AppendLogits(hashes[row], options_.vocab_size, &result->logits);
    }
    if (poisoned) {
      status = absl::InternalError(absl::StrCat("sequence ", s, " has logits that are not finite"));
    }
  }
  return status;
}

void FakeTarget::Commit(const CommitPlan& plan, std::vector<uint16_t>* features) {
  for (const CommitPlan::Move& move : plan.moves) {
    cache_[move.dst] = cache_[move.src];
    cache_[move.src] = Entry{};
  }
  features->clear();
  for (const CommitPlan::Feature& feature : plan.features) {
    std::vector<uint16_t> row;
    AppendFeature(row_hashes_[feature.row], options_.hidden_size, &row);
    features->insert(features->end(), row.begin(), row.end());
    kept_[feature.slot] = std::move(row);
  }
}

void FakeTarget::ReadFeatures(absl::Span<const int32_t> slots, std::vector<uint16_t>* features) {
  features->clear();
  for (const int32_t slot : slots) {
    if (kept_[slot].empty()) Violation(absl::StrCat("no feature at slot ", slot));
    features->insert(features->end(), kept_[slot].begin(), kept_[slot].end());
  }
}

std::vector<float> FakeTarget::Logits(absl::Span<const int32_t> text, int vocab_size) {
  std::vector<float> logits;
  AppendLogits(HashOf(text), vocab_size, &logits);
  return logits;
}

std::vector<int32_t> FakeTarget::Continue(std::vector<int32_t> text, const SamplingParams& params,
                                          int count, int vocab_size) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) {
    tokens.push_back(
        SampleToken(Logits(text, vocab_size), params, static_cast<int64_t>(text.size())));
    text.push_back(tokens.back());
  }
  return tokens;
}

std::vector<uint16_t> FakeTarget::Feature(absl::Span<const int32_t> text, int hidden_size) {
  std::vector<uint16_t> row;
  AppendFeature(HashOf(text), hidden_size, &row);
  return row;
}

}  // namespace coppice::verifier
