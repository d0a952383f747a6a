// coppice down
#include <signal.h>

#include <iostream>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"

namespace coppice::cli {
namespace {

struct Flags {
  int wait_seconds = 120;
  ClusterFlags cluster;
};

int Run(const Flags& flags, ShutdownSignals* signals) {
  const StateDir dir(flags.cluster.state);
  if (!dir.IsLive()) {
    std::cerr << "coppice: no cluster is running (state directory " << dir.path() << ")\n";
    return 0;
  }
  const absl::StatusOr<ClusterRecord> record = dir.Read();
  if (!record.ok()) return Fail(std::string(record.status().message()));
  if (record->supervisor <= 0 || kill(record->supervisor, SIGTERM) != 0) {
    return Fail(absl::StrCat("cannot signal process ", record->supervisor,
                             ", which runs the cluster: is it another user's?"));
  }
  const TimePoint deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(flags.wait_seconds);
  while (dir.IsLive()) {
    const TimePoint now = std::chrono::steady_clock::now();
    if (now > deadline) {
      return Fail(absl::StrCat("the cluster has not stopped after ", flags.wait_seconds,
                               " s; process ", record->supervisor, " runs it"));
    }
    if (signals->WaitUntil(now + std::chrono::milliseconds(50)) != 0) return 130;
  }
  std::cerr << "coppice: stopped\n";
  return 0;
}

}  // namespace

Command AddDown(FlagParser* flags) {
  auto own = std::make_shared<Flags>();
  CLI::App* command = flags->AddCommand("down", "drain and stop the cluster");
  flags->Add("wait-seconds", &own->wait_seconds, "how long to wait for that", command)
      ->check(CLI::Range(1, 86400));
  own->cluster.AddTo(flags, command, false);
  return {command, [own](ShutdownSignals* signals) { return Run(*own, signals); }};
}

}  // namespace coppice::cli
