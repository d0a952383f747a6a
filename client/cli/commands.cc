#include "client/cli/commands.h"

#include <iostream>

namespace coppice::cli {

int Fail(const std::string& sentence, int code) {
  std::cerr << "coppice: " << sentence << "\n";
  return code;
}

void ClusterFlags::AddTo(FlagParser* flags, CLI::App* command, bool with_router) {
  state = DefaultStateDir();
  flags->Add("state", &state, "directory by which commands find the cluster", command);
  if (!with_router) return;
  command
      ->add_option("--router", routers,
                   "host:port of a router, instead of the state directory's; may be given several "
                   "times: the next is used when one goes away")
      ->envname("COPPICE_ROUTER")
      ->allow_extra_args(false)
      ->delimiter(',');
}

absl::StatusOr<std::vector<std::string>> ClusterFlags::Routers() const {
  if (!routers.empty()) return routers;
  absl::StatusOr<ClusterRecord> record = StateDir(state).Read();
  if (!record.ok()) return record.status();
  return record->Addresses("router");
}

}  // namespace coppice::cli
