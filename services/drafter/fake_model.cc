#include "services/drafter/fake_model.h"

#include "absl/strings/str_cat.h"

namespace coppice::drafter {

FakeModel::FakeModel(int slots, int window, int block_size, int vocab_size)
    : window_(window), rings_(slots, std::vector<Row>(window)) {
  config_.vocab_size = vocab_size;
  config_.hidden_size = kWidth;
  config_.block_size = block_size;
  config_.target_layer_ids = {1, 3};
}

void FakeModel::AppendContext(absl::Span<const ContextRows> rows) {
  std::vector<bool> seen(rings_.size());
  for (const ContextRows& r : rows) {
    if (seen[r.slot]) error_ = absl::StrCat("slot ", r.slot, " twice in one call");
    seen[r.slot] = true;
    const int64_t count = static_cast<int64_t>(r.features.size()) / kWidth;
    if (count > window_) error_ = absl::StrCat(count, " rows in one call");
    for (int64_t i = 0; i < count; ++i) {
      const Row row = {r.features[i * kWidth], r.features[i * kWidth + 1]};
      if (row.position != r.first + i) {
        error_ = absl::StrCat("row of position ", row.position, " given as ", r.first + i);
      }
      rings_[r.slot][row.position % window_] = row;
    }
  }
}

void FakeModel::Draft(absl::Span<const DraftBlock> blocks, int k, DraftCandidates* out) {
  Call call = {{blocks.begin(), blocks.end()}, {}, k};
  out->positions = config_.block_size - 1;
  out->k = k;
  out->tokens.clear();
  out->log_probs.clear();
  for (const DraftBlock& block : blocks) {
    int owner = -1;
    for (int64_t p = block.context_begin; p < block.base_len; ++p) {
      const Row& row = rings_[block.slot][p % window_];
      if (owner < 0) owner = row.owner;
      if (row.position != p || row.owner != owner) {
        error_ = absl::StrCat("slot ", block.slot, " at position ", p, " has position ",
                              row.position, " of ", row.owner, ", not of ", owner);
      }
    }
    call.owners.push_back(owner);
    for (int position = 0; position < out->positions; ++position) {
      for (int rank = 0; rank < k; ++rank) {
        out->tokens.push_back(Token(block.anchor, block.base_len, position, rank));
        out->log_probs.push_back(-1.0f - static_cast<float>(rank));
      }
    }
  }
  calls_.push_back(std::move(call));
}

std::vector<uint16_t> FakeModel::Features(int owner, int64_t first, int64_t count) {
  std::vector<uint16_t> out;
  for (int64_t i = 0; i < count; ++i) {
    out.push_back(static_cast<uint16_t>(owner));
    out.push_back(static_cast<uint16_t>(first + i));
  }
  return out;
}

int32_t FakeModel::Token(int32_t anchor, int64_t base_len, int position, int rank) {
  return static_cast<int32_t>((anchor * 31 + base_len * 7 + position * 3 + rank) % 1000);
}

}  // namespace coppice::drafter
