#include "services/common/readiness.h"

#include <glog/logging.h>

#include "absl/strings/str_cat.h"

namespace coppice {

Readiness::Readiness(RpcServer* server, std::function<std::string()> not_ready)
    : server_(server), not_ready_(std::move(not_ready)), thread_([this] { Run(); }) {}

Readiness::~Readiness() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Readiness::Drain(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  draining_ = reason;
  server_->SetServing(false);
}

void Readiness::Run() {
  std::string last = "starting";
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const std::string reason = draining_.empty() ? not_ready_() : draining_;
    if (reason != last) {
      server_->SetServing(reason.empty());
      LOG(INFO) << (reason.empty() ? "ready" : "not ready: " + reason);
      last = reason;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(250), [&] { return stop_; });
  }
}

std::function<std::string()> Readiness::FromHeartbeat(const Heartbeat* heartbeat, Duration limit,
                                                      const std::string& loop) {
  return [=]() -> std::string {
    const Duration age = heartbeat->Age();
    if (age <= limit) return "";
    return absl::StrCat("the ", loop, " has not gone round for more than ",
                        std::chrono::duration_cast<std::chrono::seconds>(limit).count(), " s");
  };
}

}  // namespace coppice
