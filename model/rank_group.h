// The ranks of a tensor-parallel group, each with its own thread.
#ifndef COPPICE_MODEL_RANK_GROUP_H_
#define COPPICE_MODEL_RANK_GROUP_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace coppice {

// Rank 0 runs on the caller's thread, so that a group of one costs nothing; every other rank has a
// thread of its own for life, which a device context may be bound to.  One thread at a time calls
// Run.
class RankGroup {
 public:
  static absl::StatusOr<std::unique_ptr<RankGroup>> Create(int ranks);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int ranks() const { return static_cast<int>(ops_.size()); }
  kernels::Ops& ops(int rank) { return *ops_[rank]; }

  // Calls body(rank) on every rank at once and returns when all are done.
  void Run(absl::FunctionRef<void(int rank)> body);
  // The same; the status of the lowest rank that failed.  A body that fails must not leave other
  // ranks waiting in a collective.
  absl::Status RunWithStatus(absl::FunctionRef<absl::Status(int rank)> body);

 private:
  explicit RankGroup(std::unique_ptr<kernels::CpuGroup> group) : group_(std::move(group)) {}
  void Work(int rank);

  std::unique_ptr<kernels::CpuGroup> group_;
  std::vector<std::unique_ptr<kernels::Ops>> ops_;

  std::mutex mutex_;  // of all below but the threads
  std::condition_variable begun_;
  std::condition_variable ended_;
  int64_t round_ = 0;
  int running_ = 0;  // threads that have not finished this round
  bool stop_ = false;
  const absl::FunctionRef<void(int)>* body_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace coppice

#endif  // COPPICE_MODEL_RANK_GROUP_H_
