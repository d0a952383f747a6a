// coppice inspect
#include <iostream>
#include <memory>

#include "client/cli/commands.h"
#include "model/inspect.h"

namespace coppice::cli {
namespace {

struct Flags {
  std::string dir;
  bool json = false;
  InspectOptions options;
};

}  // namespace

Command AddInspect(FlagParser* flags) {
  auto given = std::make_shared<Flags>();
  CLI::App* command = flags->AddCommand(
      "inspect", "Tells what a checkpoint directory is, what it needs, and what would be refused.");
  command->add_option("DIR", given->dir, "directory of a target model")->required();
  flags->AddSwitch("json", &given->json, "print one JSON object", command);
  flags->AddSwitch("values", &given->options.check_values,
                   "look at every value too, as loading does; reads the whole checkpoint", command);
  flags->Add("drafter", &given->options.drafter_dir,
             "directory of its drafter (default: DIR/drafter where that exists)", command);
  return {command, [given](ShutdownSignals*) {
            const Inspection inspection = Inspect(given->dir, given->options);
            std::cout << (given->json ? InspectionJson(inspection).dump(1) + "\n"
                                      : InspectionText(inspection));
            if (inspection.refused.empty()) return 0;
            return Fail(inspection.refused.front());
          }};
}

}  // namespace coppice::cli
