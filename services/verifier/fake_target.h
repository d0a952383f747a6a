// A target for tests: what follows a text is a hash of that text as it lies in the cache.
#ifndef COPPICE_SERVICES_VERIFIER_FAKE_TARGET_H_
#define COPPICE_SERVICES_VERIFIER_FAKE_TARGET_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/sampling.h"
#include "model/target.h"

namespace coppice::verifier {

struct FakeTargetOptions {
  int vocab_size = 16;  // small, so that drafts are often right
  int hidden_size = 4;
  int max_position_embeddings = 512;
  int64_t pages = 65;
  int page_size = 4;
  bool features = true;
  // A sequence whose visible text holds this token has no finite logits.
  std::optional<int32_t> poison;
};

// Every row reads the text before it from the cache by way of the page table, so that a wrong page,
// a wrong move or a page written by two sequences changes what follows.  What the contract forbids
// (page 0, positions out of order, tables too short, …) is counted in `violations`.
class FakeTarget : public Target {
 public:
  explicit FakeTarget(const FakeTargetOptions& options);

  const ModelConfig& config() const override { return config_; }
  int tp() const override { return 1; }
  bool has_features() const override { return options_.features; }
  uint64_t fingerprint() const override { return 11; }
  uint64_t embedding_fingerprint() const override { return 22; }
  uint64_t drafter_fingerprint() const override { return options_.features ? 33 : 0; }
  absl::Status Forward(absl::Span<const SequenceRows> sequences, ForwardResult* result) override;
  void Commit(const CommitPlan& plan, std::vector<uint16_t>* features) override;
  void ReadFeatures(absl::Span<const int32_t> slots, std::vector<uint16_t>* features) override;

  // What a text is followed by, without any cache.
  static std::vector<float> Logits(absl::Span<const int32_t> text, int vocab_size);
  // `count` tokens after `text`, drawn one by one.
  static std::vector<int32_t> Continue(std::vector<int32_t> text, const SamplingParams& params,
                                       int count, int vocab_size);
  // The feature row of the last token of `text`.
  static std::vector<uint16_t> Feature(absl::Span<const int32_t> text, int hidden_size);

  const std::vector<std::string>& violations() const { return violations_; }
  int64_t forwards() const { return forwards_; }
  int64_t rows() const { return rows_; }
  // Called at the start of every Forward.
  std::function<void()> on_forward;

 private:
  struct Entry {
    int32_t token = -1;
    int64_t position = -1;
  };
  void Violation(std::string what) { violations_.push_back(std::move(what)); }

  FakeTargetOptions options_;
  ModelConfig config_;
  std::vector<Entry> cache_;                 // [slots]
  std::vector<std::vector<uint16_t>> kept_;  // [slots]
  std::vector<uint64_t> row_hashes_;         // of the last Forward
  std::vector<std::string> violations_;
  int64_t forwards_ = 0;
  int64_t rows_ = 0;
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_FAKE_TARGET_H_
