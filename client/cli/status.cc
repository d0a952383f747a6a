// coppice status
#include <unistd.h>

#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/json_shapes.h"
#include "client/client.h"

namespace coppice::cli {
namespace {

struct Flags {
  bool json = false;
  bool watch = false;
  ClusterFlags cluster;
};

std::string BuildText(const v1::Build& build) {
  if (build.version().empty()) return "";
  return absl::StrCat("  ", build.version(), " (", build.git(), ", ", build.device(), ")");
}

std::string StateText(const v1::ClusterState& state) {
  std::string out;
  const auto& router = state.router();
  absl::StrAppendFormat(
      &out, "router      %s  %s  running %d  waiting %d  requests %d  tokens %d  up %.0f s%s\n",
      router.name(), router.ready() ? "ready" : "NOT READY: " + router.not_ready_reason(),
      router.running(), router.waiting(), router.requests(), router.tokens(),
      router.uptime_seconds(), BuildText(router.build()));
  for (const auto& v : state.verifiers()) {
    const auto& pool = v.info().pool();
    absl::StrAppend(&out, "verifier    ", v.address(), "  ");
    if (v.connected()) {
      absl::StrAppendFormat(
          &out, "connected  tp %d  sequences %d/%d  pages %d free of %d (%d tokens each)%s\n",
          v.info().tp(), pool.sequences(), v.info().max_sequences(), pool.free_pages(),
          pool.pages(), pool.page_size(), BuildText(v.info().build()));
      if (pool.leaked_pages() > 0) {
        absl::StrAppend(&out, "            LEAKED PAGES: ", pool.leaked_pages(), "\n");
      }
    } else {
      absl::StrAppend(&out, "NOT CONNECTED: ", v.error(), "\n");
    }
  }
  for (const auto& d : state.drafters()) {
    absl::StrAppend(&out, "drafter     ", d.address(), "  ");
    if (d.connected()) {
      absl::StrAppendFormat(&out, "connected  %s  sequences %d/%d  block %d  window %d%s\n",
                            d.speculating() ? "speculating" : "NOT SPECULATING: " + d.error(),
                            d.info().sequences(), d.info().max_sequences(), d.info().block_size(),
                            d.info().window(), BuildText(d.info().build()));
    } else {
      absl::StrAppend(&out, "NOT CONNECTED: ", d.error(), "\n");
    }
  }
  if (state.drafters().empty()) absl::StrAppend(&out, "drafter     none\n");
  const auto& s = state.speculation();
  absl::StrAppendFormat(
      &out,
      "speculation rounds %d  drafted %d  accepted %d  acceptance length %.2f  round overhead "
      "%.0f us (p50)\n",
      s.rounds(), s.drafted(), s.accepted(), s.acceptance_length(), s.round_overhead_us_p50());
  return out;
}

int Run(const Flags& flags, ShutdownSignals* signals) {
  const absl::StatusOr<std::vector<std::string>> routers = flags.cluster.Routers();
  if (!routers.ok()) return Fail(std::string(routers.status().message()));
  ClusterRecord record;
  if (flags.cluster.routers.empty()) {
    if (absl::StatusOr<ClusterRecord> read = StateDir(flags.cluster.state).Read(); read.ok()) {
      record = std::move(*read);
    }
  }
  ClientOptions options;
  options.routers = *routers;
  options.call_timeout = std::chrono::seconds(5);
  Client client(options);
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  for (;;) {
    const absl::StatusOr<v1::ClusterState> state = client.GetState();
    std::string text;
    if (!state.ok()) {
      if (!flags.watch) return Fail(std::string(state.status().message()));
      text = absl::StrCat(std::string(state.status().message()), "\n");
      if (flags.json)
        text = nlohmann::json{{"error", text.substr(0, text.size() - 1)}}.dump() + "\n";
    } else if (flags.json) {
      text = StateJson(*state, record)
                 .dump(flags.watch ? -1 : 2, ' ', false, nlohmann::json::error_handler_t::replace) +
             "\n";
    } else {
      text = StateText(*state);
    }
    if (flags.watch && !flags.json && terminal) std::cout << "\x1b[H\x1b[2J";
    std::cout << text << std::flush;
    if (!flags.watch) return 0;
    if (signals->WaitUntil(std::chrono::steady_clock::now() + std::chrono::seconds(1)) != 0) {
      return 0;
    }
  }
}

}  // namespace

Command AddStatus(FlagParser* flags) {
  auto own = std::make_shared<Flags>();
  CLI::App* command = flags->AddCommand("status", "see the cluster");
  flags->AddSwitch("json", &own->json, "as JSON; with --watch one object a line", command);
  flags->AddSwitch("watch", &own->watch, "every second, until Ctrl-C", command);
  own->cluster.AddTo(flags, command, true);
  return {command, [own](ShutdownSignals* signals) { return Run(*own, signals); }};
}

}  // namespace coppice::cli
