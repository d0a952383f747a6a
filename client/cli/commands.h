// The commands of `coppice`.  Each adds its flags, and after parsing runs and returns the exit
// code: 0, 1 (it failed; a sentence on standard error says why) or 2 (usage).
#ifndef COPPICE_CLIENT_CLI_COMMANDS_H_
#define COPPICE_CLIENT_CLI_COMMANDS_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/state_dir.h"
#include "services/common/flags.h"
#include "services/common/shutdown.h"

namespace coppice::cli {

// A command on the command line, and what it does.
struct Command {
  CLI::App* app = nullptr;
  std::function<int(ShutdownSignals* signals)> run;
};

Command AddUp(FlagParser* flags);
Command AddDown(FlagParser* flags);
Command AddGenerate(FlagParser* flags);
Command AddChat(FlagParser* flags);
Command AddStatus(FlagParser* flags);
Command AddInspect(FlagParser* flags);

// Prints "coppice: SENTENCE" and returns `code`.
int Fail(const std::string& sentence, int code = 1);

// --state, and for commands that talk to a cluster --router.
struct ClusterFlags {
  std::string state;
  std::vector<std::string> routers;

  void AddTo(FlagParser* flags, CLI::App* command, bool with_router);
  // The routers named, else those of the live cluster in the state directory.
  absl::StatusOr<std::vector<std::string>> Routers() const;
};

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_COMMANDS_H_
