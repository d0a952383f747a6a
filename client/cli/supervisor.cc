#include "client/cli/supervisor.h"

#include <signal.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace coppice::cli {
namespace {

TimePoint Now() { return std::chrono::steady_clock::now(); }

std::string Seconds(Duration d) {
  return absl::StrFormat("%.1f s", std::chrono::duration<double>(d).count());
}

constexpr Duration kTick = std::chrono::milliseconds(50);

}  // namespace

Supervisor::Supervisor(SupervisorOptions options) : options_(std::move(options)) {}

absl::Status Supervisor::Spawn(Service* service) {
  absl::StatusOr<Process> process = Process::Start(service->spec.argv, service->spec.log);
  if (!process.ok()) return process.status();
  service->process.emplace(std::move(*process));
  service->started = Now();
  service->ready = false;
  return absl::OkStatus();
}

absl::Status Supervisor::Start(const std::vector<ServiceSpec>& specs, Duration limit) {
  const TimePoint start = Now();
  const size_t first = services_.size();
  for (const ServiceSpec& spec : specs) {
    services_.push_back(std::make_unique<Service>());
    services_.back()->spec = spec;
    services_.back()->backoff = options_.first_backoff;
    if (const absl::Status status = Spawn(services_.back().get()); !status.ok()) return status;
  }
  TimePoint next_word = start + std::chrono::seconds(5);
  for (;;) {
    std::vector<std::string> missing;
    for (size_t i = first; i < services_.size(); ++i) {
      Service& service = *services_[i];
      if (const std::optional<int> status = service.process->Poll()) {
        return absl::InternalError(absl::StrCat(
            "the ", service.spec.role, " ", DescribeExit(*status), " while starting; the end of ",
            service.spec.log, ":\n", LastLines(service.spec.log, 10)));
      }
      if (!service.ready && options_.is_ready(service.spec.address)) {
        service.ready = true;
        options_.say(absl::StrCat(service.spec.role, " is ready at ", service.spec.address,
                                  " after ", Seconds(Now() - service.started)));
      }
      if (!service.ready) missing.push_back(service.spec.role);
    }
    if (missing.empty()) return absl::OkStatus();
    if (Now() > start + limit) {
      return absl::DeadlineExceededError(
          absl::StrCat("not ready after ", Seconds(limit), ": ", absl::StrJoin(missing, ", ")));
    }
    if (Now() > next_word) {
      options_.say(absl::StrCat("still waiting for ", absl::StrJoin(missing, " and "), " (",
                                Seconds(Now() - start), ")"));
      next_word = Now() + std::chrono::seconds(5);
    }
    if (options_.pause(kTick)) return absl::CancelledError("interrupted");
  }
}

void Supervisor::Watch(const std::function<void()>& changed) {
  do {
    for (const auto& service : services_) LookAfter(service.get(), changed);
  } while (!options_.pause(kTick));
}

void Supervisor::LookAfter(Service* service, const std::function<void()>& changed) {
  const std::string& role = service->spec.role;
  if (service->process) {
    if (const std::optional<int> status = service->process->Poll()) {
      if (Now() - service->started > options_.recovered_after) {
        service->backoff = options_.first_backoff;
      }
      options_.say(absl::StrCat("the ", role, " ", DescribeExit(*status), "; starting it again in ",
                                Seconds(service->backoff), " (its log: ", service->spec.log, ")"));
      service->process.reset();
      service->restart_at = Now() + service->backoff;
      service->backoff = std::min(service->backoff * 2, options_.max_backoff);
    } else if (!service->ready && options_.is_ready(service->spec.address)) {
      service->ready = true;
      options_.say(absl::StrCat("the ", role, " is back"));
    }
  } else if (Now() >= service->restart_at) {
    if (const absl::Status status = Spawn(service); status.ok()) {
      changed();
    } else {
      options_.say(std::string(status.message()));
      service->restart_at = Now() + service->backoff;
    }
  }
}

void Supervisor::Stop(const std::vector<std::string>& roles, Duration limit) {
  bool hurry = false;
  for (const std::string& role : roles) {
    std::vector<Service*> mine;
    for (const auto& service : services_) {
      if (service->spec.role == role && service->process && !service->process->Poll()) {
        mine.push_back(service.get());
      }
    }
    if (mine.empty()) continue;
    options_.say("stopping the " + role);
    for (Service* service : mine) service->process->Signal(SIGTERM);
    const TimePoint deadline = Now() + limit;
    const auto running = [&] {
      return std::any_of(mine.begin(), mine.end(), [](Service* s) { return !s->process->Poll(); });
    };
    while (running() && !hurry && Now() < deadline) hurry = options_.pause(kTick);
    for (Service* service : mine) {
      if (service->process->Poll()) continue;
      options_.say("the " + role + " is not done: killing it");
      service->process.reset();
    }
  }
}

std::vector<ClusterRecord::Process> Supervisor::Processes() const {
  std::vector<ClusterRecord::Process> out;
  for (const auto& service : services_) {
    out.push_back({service->spec.role, service->spec.address,
                   service->process ? service->process->pid() : 0, service->spec.log});
  }
  return out;
}

}  // namespace coppice::cli
