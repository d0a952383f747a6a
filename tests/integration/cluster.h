// A real cluster of child processes on loopback, for tests and benchmarks: starts them, kills them,
// restarts them, and speaks to them through the generated stubs.
#ifndef COPPICE_TESTS_INTEGRATION_CLUSTER_H_
#define COPPICE_TESTS_INTEGRATION_CLUSTER_H_

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coppice/v1/cluster.grpc.pb.h"
#include "coppice/v1/drafter.grpc.pb.h"
#include "coppice/v1/inference.grpc.pb.h"
#include "coppice/v1/verifier.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace coppice::testing {

// A child process that dies with its parent.  Its output goes to a file.
class Process {
 public:
  Process(std::vector<std::string> argv, std::string log_path);
  ~Process();  // SIGKILL if it still runs
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int signal) const;
  bool Running();
  // The exit code, or 128 + signal; nullopt if it still runs after `timeout`.
  std::optional<int> Wait(std::chrono::milliseconds timeout);
  std::string Output() const;  // everything it printed so far

 private:
  pid_t pid_ = -1;
  std::optional<int> exit_code_;
  std::string log_path_;
};

// Runs a command to its end; exit code (or nullopt after `timeout`) and output.
struct CommandResult {
  std::optional<int> exit_code;
  std::string output;
};
CommandResult RunCommand(std::vector<std::string> argv,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60));

// The path of one of our binaries: $COPPICE_BIN/name, or build/release/bin/name.
std::string Binary(const std::string& name);
// A port on loopback that was free a moment ago.
int FreePort();
// A directory that is removed with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct ClusterOptions {
  std::string model = "models/demo";
  bool drafter = true;
  int tp = 1;
  int routers = 1;
  std::vector<std::string> verifier_flags;
  std::vector<std::string> drafter_flags;
  std::vector<std::string> router_flags;
};

// What one generation came to.
struct Generation {
  grpc::Status status;
  std::vector<uint32_t> ids;
  std::string text;
  uint64_t seed = 0;
  bool finished = false;
  coppice::v1::Final final;
  // The first violation of the stream's contract (offsets, doubled or lost ids, more than one
  // final); empty: none.
  std::string contract_error;
};

class Cluster {
 public:
  explicit Cluster(ClusterOptions options);
  ~Cluster();

  // Starts everything and waits until the first router serves; false, with the logs printed, if
  // that fails.
  bool Start();
  void StartVerifier();
  void StartDrafter();
  void StartRouter(int index);
  bool WaitServing(const std::string& address, std::chrono::milliseconds timeout) const;

  Process& verifier() { return *verifier_; }
  Process& drafter() { return *drafter_; }
  Process& router(int index = 0) { return *routers_[index]; }
  void KillDrafter();
  void KillRouter(int index);
  void KillVerifier();

  std::string router_address(int index = 0) const { return router_addresses_[index]; }
  std::string verifier_address() const { return verifier_address_; }
  std::string drafter_address() const { return drafter_address_; }
  std::shared_ptr<grpc::Channel> channel(int index = 0) const;

  coppice::v1::PoolState Pool() const;
  coppice::v1::DrafterInfo DrafterInfo() const;
  coppice::v1::VerifierInfo VerifierInfo() const;
  coppice::v1::ClusterState State(int index = 0) const;

  // Runs a request to its end.  `on_delta`, if given, may return false to drop the stream.
  Generation Generate(
      const coppice::v1::GenerateRequest& request, int router = 0,
      const std::function<bool(const coppice::v1::GenerateDelta&)>& on_delta = nullptr) const;

  std::string Logs() const;

 private:
  ClusterOptions options_;
  TemporaryDirectory directory_;
  std::string verifier_address_;
  std::string drafter_address_;
  std::vector<std::string> router_addresses_;
  std::unique_ptr<Process> verifier_;
  std::unique_ptr<Process> drafter_;
  std::vector<std::unique_ptr<Process>> routers_;
  mutable std::map<std::string, std::shared_ptr<grpc::Channel>> channels_;
  int log_number_ = 0;

  std::string NextLog(const std::string& name);
};

// Polls until `condition` holds or the time is over.
bool Eventually(const std::function<bool()>& condition, std::chrono::milliseconds timeout);

// One line of models/demo/prompts.jsonl.
struct DemoPrompt {
  std::string category;
  std::vector<uint32_t> ids;  // with the control tokens that conversations hold
};
std::vector<DemoPrompt> DemoPrompts();
// `count` of them, spread evenly over the categories.
std::vector<DemoPrompt> SpreadPrompts(size_t count);

}  // namespace coppice::testing

#endif  // COPPICE_TESTS_INTEGRATION_CLUSTER_H_
