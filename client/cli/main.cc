// coppice: the command line.
#include <vector>

#include "client/cli/commands.h"
#include "services/common/flags.h"
#include "services/common/logging.h"
#include "services/common/shutdown.h"

namespace coppice::cli {
namespace {

int Main(int argc, char** argv) {
  ShutdownSignals signals;
  FlagParser flags("coppice", "Runs a Coppice cluster and talks to it.");
  std::string log_level = "warning";
  flags.AddChoice("log-level", &log_level, LogLevels(), "the least severe messages shown");
  const std::vector<Command> commands = {AddUp(&flags),   AddDown(&flags),   AddGenerate(&flags),
                                         AddChat(&flags), AddStatus(&flags), AddInspect(&flags)};
  flags.app().require_subcommand(0, 1);
  if (const auto code = flags.Parse(argc, argv)) return *code;
  InitLogging("coppice", log_level);
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run(&signals);
  }
  return Fail("a command is missing; see coppice --help", 2);
}

}  // namespace
}  // namespace coppice::cli

int main(int argc, char** argv) { return coppice::cli::Main(argc, argv); }
