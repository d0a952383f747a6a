#include "services/verifier/step_loop.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace coppice::verifier {
namespace {

// How often an idle loop looks at the lease's clock and checks the pool.
constexpr Duration kIdleWait = std::chrono::milliseconds(200);
static_assert(kIdleWait < Heartbeat::kMaxIdle);

}  // namespace

StepLoop::StepLoop(std::unique_ptr<Engine> engine, const StepLoopOptions& options,
                   const Clock* clock)
    : engine_(std::move(engine)), clock_(clock), lease_(options.lease_hold) {
  Publish();
}

StepLoop::~StepLoop() { Stop(); }

void StepLoop::Stop() {
  queue_.Close();
  if (thread_.joinable()) thread_.join();
}

void StepLoop::Start() {
  thread_ = std::thread([this] {
    while (Turn(kIdleWait)) {
    }
  });
}

bool StepLoop::Turn(Duration wait) {
  heartbeat_.Beat();
  batch_.clear();
  if (queue_.PopAllUntil(std::chrono::steady_clock::now() + wait, &batch_) == 0) {
    if (queue_.closed()) return false;
    // Nothing runs: time for the integrity check of the whole pool.
    if (absl::Status s = engine_->CheckInvariants(); !s.ok()) LOG(DFATAL) << s.message();
  }
  for (Event& event : batch_) {
    event();
    heartbeat_.Beat();
  }
  Tick();
  Publish();
  return true;
}

void StepLoop::Tick() {
  const std::string owner = lease_.owner();
  if (lease_.Expire(clock_->Now())) {
    LOG(WARNING) << "router " << owner << " did not come back; freeing its "
                 << engine_->pool_state().sequences << " sequences";
    engine_->ReleaseAll();
  }
  if (!draining_.empty() && engine_->live_sequences() == 0 && lease_.session()) {
    EndSession(*lease_.session(), absl::UnavailableError(draining_));
  }
}

void StepLoop::EndSession(uint64_t session, const absl::Status& status) {
  const auto it = clients_.find(session);
  if (it == clients_.end()) return;
  it->second->OnEnd(status);
  clients_.erase(it);
  if (lease_.GiveUp(session)) engine_->ReleaseAll();
}

void StepLoop::Open(uint64_t session, const std::string& router, uint64_t epoch,
                    std::shared_ptr<StepClient> client) {
  queue_.Push([this, session, router, epoch, client = std::move(client)] {
    Tick();  // a lease that is over must not refuse anybody
    if (!draining_.empty()) {
      client->OnEnd(absl::UnavailableError(draining_));
      return;
    }
    Lease::Grant grant;
    if (absl::Status s = lease_.Take(session, router, epoch, clock_->Now(), &grant); !s.ok()) {
      client->OnEnd(s);
      return;
    }
    if (grant.superseded) {
      const auto old = clients_.find(*grant.superseded);
      if (old != clients_.end()) {
        old->second->OnEnd(absl::AbortedError("the same router has opened a newer Step stream"));
        clients_.erase(old);
      }
    }
    clients_[session] = client;
    StepResult hello;
    hello.resumed = engine_->sequences();
    hello.pool = engine_->pool_state();
    LOG(INFO) << "router " << router
              << (grant.resumed ? " is back, with " : " has the lease, with ")
              << hello.resumed.size() << " sequences kept";
    Publish();
    client->OnResult(hello);
  });
}

void StepLoop::Submit(uint64_t session, Step step) {
  step.arrival = clock_->Now();
  // std::function wants what can be copied.
  queue_.Push([this, session, step = std::make_shared<Step>(std::move(step))] {
    HandleStep(session, std::move(*step));
  });
}

void StepLoop::HandleStep(uint64_t session, Step step) {
  // A refused or superseded stream's steps are nobody's.
  if (!lease_.HeldBy(session)) return;
  const TimePoint taken = clock_->Now();
  StepResult result = engine_->Execute(step);
  result.timing.queue_us = MicrosBetween(step.arrival, taken);
  result.timing.total_us = MicrosBetween(step.arrival, clock_->Now());
  last_step_ = result.timing;
  // Whoever asks for the pool after this result must not see an older one.
  Publish();
  clients_[session]->OnResult(result);
  engine_->SendFeatures();
  if (on_step) on_step(result);
}

void StepLoop::Close(uint64_t session, bool clean) {
  queue_.Push([this, session, clean] {
    clients_.erase(session);
    const std::string owner = lease_.owner();
    if (clean) {
      if (!lease_.GiveUp(session)) return;
      LOG(INFO) << "router " << owner << " has given up the lease";
      engine_->ReleaseAll();
    } else if (lease_.HeldBy(session)) {
      lease_.Break(session, clock_->Now());
      LOG(WARNING) << "the stream of router " << owner << " broke; its "
                   << engine_->pool_state().sequences << " sequences are kept for a while";
    }
  });
}

void StepLoop::Resend(const std::string& drafter, uint64_t sequence, int64_t from,
                      uint64_t request) {
  queue_.Push([=, this] { engine_->Resend(drafter, sequence, from, request); });
}

void StepLoop::Drain(const std::string& why) {
  queue_.Push([this, why] {
    draining_ = why;
    engine_->RefuseAdmissions(why);
  });
}

void StepLoop::Publish() {
  LoopSnapshot now;
  now.pool = engine_->pool_state();
  now.free_runs = engine_->free_runs();
  now.counters = engine_->counters();
  now.live_sequences = engine_->live_sequences();
  now.owner = lease_.owner();
  now.last_step = last_step_;
  std::lock_guard<std::mutex> lock(snapshot_mutex_);
  snapshot_ = std::move(now);
}

LoopSnapshot StepLoop::snapshot() const {
  std::lock_guard<std::mutex> lock(snapshot_mutex_);
  return snapshot_;
}

}  // namespace coppice::verifier
