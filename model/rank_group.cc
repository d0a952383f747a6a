#include "model/rank_group.h"

#include <utility>

namespace coppice {

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Create(int ranks) {
  absl::StatusOr<std::unique_ptr<kernels::CpuGroup>> cpu = kernels::CreateCpuGroup(ranks);
  if (!cpu.ok()) return cpu.status();
  std::unique_ptr<RankGroup> group(new RankGroup(*std::move(cpu)));
  for (int rank = 0; rank < ranks; ++rank) group->ops_.push_back(group->group_->CreateOps(rank));
  for (int rank = 1; rank < ranks; ++rank) {
    group->threads_.emplace_back([raw = group.get(), rank] { raw->Work(rank); });
  }
  return group;
}

RankGroup::~RankGroup() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankGroup::Run(absl::FunctionRef<void(int)> body) {
  if (threads_.empty()) return body(0);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    running_ = static_cast<int>(threads_.size());
    ++round_;
  }
  begun_.notify_all();
  body(0);
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return running_ == 0; });
  body_ = nullptr;
}

absl::Status RankGroup::RunWithStatus(absl::FunctionRef<absl::Status(int)> body) {
  std::vector<absl::Status> status(ranks());
  Run([&](int rank) { status[rank] = body(rank); });
  for (absl::Status& one : status) {
    if (!one.ok()) return std::move(one);
  }
  return absl::OkStatus();
}

void RankGroup::Work(int rank) {
  int64_t seen = 0;
  for (;;) {
    const absl::FunctionRef<void(int)>* body;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      begun_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      body = body_;
    }
    (*body)(rank);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ == 0) ended_.notify_one();
  }
}

}  // namespace coppice
