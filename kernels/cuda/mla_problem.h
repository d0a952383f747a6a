// Random verify-attention problems in device memory, for tests and benchmarks: a paged cache whose
// every byte that belongs to no live position is NaN, tables whose unused entries are wild, outputs
// with guards behind them.
#ifndef COPPICE_KERNELS_CUDA_MLA_PROBLEM_H_
#define COPPICE_KERNELS_CUDA_MLA_PROBLEM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/mla_verify.h"

namespace coppice::mla {

enum class TreeKind { kRandom, kChain, kRootOnly };

struct ProblemOptions {
  coppice_mla_shape shape = {};
  std::vector<int32_t> contexts;     // [batch]
  std::vector<int32_t> node_counts;  // [batch]; empty: shape.nodes everywhere
  TreeKind tree = TreeKind::kRandom;
  bool permuted = true;       // physical pages in random order, else ascending
  int64_t page_gap = 0;       // bytes of NaN between pages, a multiple of 16
  int64_t table_padding = 0;  // wild entries after the longest request's
  int foreign_pages = 3;      // pages of NaN that no table names
  int caches = 1;             // distinct caches of the same lengths: the layers of a model
  bool pooled = false;        // from the device's memory pool: quicker, but sanitizers see less
  uint64_t seed = 1;
};

// Softmax scale at which the scores of a problem's unit-variance queries and rows spread by 2.5
// (natural units): a few positions carry most of the weight, as in a trained model.
inline constexpr float kProblemScale = 2.5f / 24;

// Words of a tree: node i's parent is a random earlier node (or none: a second root, as drafts have
// none, is never made).
std::vector<uint64_t> TreeWords(TreeKind kind, int nodes, uint64_t seed);

class Problem {
 public:
  explicit Problem(const ProblemOptions& options);
  ~Problem();
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  // Empty, or what failed (the device's memory, mostly).
  const std::string& error() const { return error_; }

  const coppice_mla_shape& shape() const { return options_.shape; }
  const std::vector<int32_t>& contexts() const { return options_.contexts; }
  const std::vector<int32_t>& node_counts() const { return options_.node_counts; }
  const std::vector<uint64_t>& words() const { return words_; }
  int64_t pages() const { return pages_; }
  int64_t row_bytes() const;
  // Σ contexts + live nodes.
  int64_t live_positions() const;

  // The tensors with cache `i`.
  coppice_mla_tensors tensors(int cache = 0) const;

  // Device address of a position's row.
  uint8_t* Row(int request, int64_t position, int cache = 0) const;

  // New ancestor words [batch][nodes], to the device too.
  void SetWords(const std::vector<uint64_t>& words);
  // Overwrites one position's row with 576 values (rounded to the cache type).
  void SetRow(int request, int64_t position, const std::vector<float>& values, int cache = 0);
  // Other lengths within the positions that this problem was made with, to the device too.
  void SetLengths(const std::vector<int32_t>& contexts, const std::vector<int32_t>& node_counts);

  // Fills output, log-sum-exp, workspace and the guards behind them with 0xFF.
  void PoisonOutputs(int cache = 0);
  // Empty, or which guard or dead row was written.
  std::string CheckUntouched(int cache = 0) const;

  // The schedule, then the attention of one cache.
  coppice_mla_status Schedule(coppice_stream_t stream = nullptr) const;
  coppice_mla_status Run(coppice_stream_t stream = nullptr, int cache = 0) const;

 private:
  void* Allocate(size_t bytes);
  bool Check(int status, const char* what);

  ProblemOptions options_;
  std::string error_;
  std::vector<void*> allocations_;
  std::vector<int32_t> table_;
  std::vector<uint64_t> words_;
  int64_t pages_ = 0;
  int64_t page_stride_ = 0;
  int64_t table_stride_ = 0;
  size_t workspace_bytes_ = 0;
  std::vector<uint8_t*> caches_;
  std::vector<void*> outputs_;
  std::vector<float*> lse_;
  void* query_ = nullptr;
  int32_t* device_table_ = nullptr;
  int32_t* device_contexts_ = nullptr;
  int32_t* device_counts_ = nullptr;
  uint64_t* device_words_ = nullptr;
  uint8_t* workspace_ = nullptr;
};

}  // namespace coppice::mla

#endif  // COPPICE_KERNELS_CUDA_MLA_PROBLEM_H_
