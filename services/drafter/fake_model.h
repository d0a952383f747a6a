// A draft model for tests: its drafts are a function of the question, and it knows what its context
// should hold.
#ifndef COPPICE_SERVICES_DRAFTER_FAKE_MODEL_H_
#define COPPICE_SERVICES_DRAFTER_FAKE_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "model/drafter.h"

namespace coppice::drafter {

// Rows have two numbers: whose they are, and their position.
class FakeModel : public Drafter {
 public:
  static constexpr int kWidth = 2;

  FakeModel(int slots, int window, int block_size = 4, int vocab_size = 1000);

  const DraftConfig& config() const override { return config_; }
  uint64_t drafter_fingerprint() const override { return 11; }
  uint64_t embedding_fingerprint() const override { return 22; }
  void AppendContext(absl::Span<const ContextRows> rows) override;
  void Draft(absl::Span<const DraftBlock> blocks, int k, DraftCandidates* out) override;

  // The rows of positions [first, first + count) of `owner`.
  static std::vector<uint16_t> Features(int owner, int64_t first, int64_t count);
  // What Draft says at `position` as its `rank`-th choice.
  static int32_t Token(int32_t anchor, int64_t base_len, int position, int rank);

  struct Call {
    std::vector<DraftBlock> blocks;
    std::vector<int> owners;  // of the context each block saw; -1: empty
    int k;
  };
  const std::vector<Call>& calls() const { return calls_; }
  // The first violation: a row missing from a context, or of another sequence; "": none.
  const std::string& error() const { return error_; }

 private:
  struct Row {
    int owner = -1;
    int64_t position = -1;
  };
  const int window_;
  DraftConfig config_;
  std::vector<std::vector<Row>> rings_;  // [slot][position % window]
  std::vector<Call> calls_;
  std::string error_;
};

}  // namespace coppice::drafter

#endif  // COPPICE_SERVICES_DRAFTER_FAKE_MODEL_H_
