// Starts a cluster's services, keeps them running, and drains them in order.
#ifndef COPPICE_CLIENT_CLI_SUPERVISOR_H_
#define COPPICE_CLIENT_CLI_SUPERVISOR_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/process.h"
#include "client/cli/state_dir.h"
#include "services/common/clock.h"

namespace coppice::cli {

struct ServiceSpec {
  std::string role;  // router, drafter or verifier
  std::vector<std::string> argv;
  std::string address;
  std::string log;
};

struct SupervisorOptions {
  // Whether the service at this address can work; called from the supervisor's thread, may take a
  // moment.
  std::function<bool(const std::string& address)> is_ready;
  // One line to the person who watches.
  std::function<void(const std::string& line)> say;
  // Waits so long, or less; true where a signal asks to stop.
  std::function<bool(Duration)> pause;
  Duration first_backoff = std::chrono::milliseconds(500);
  Duration max_backoff = std::chrono::seconds(30);
  // A service that ran so long has recovered: its next restart waits for the first back-off again.
  Duration recovered_after = std::chrono::seconds(60);
};

// Not thread-safe; all children belong to the thread that calls Start.
class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options);

  // Starts these services and waits until all are ready.  Errors: INTERNAL where one dies (with the
  // end of its log), DEADLINE_EXCEEDED, CANCELLED where a signal came.  Whatever was started stays:
  // call Stop.
  absl::Status Start(const std::vector<ServiceSpec>& specs, Duration limit);

  // Looks after them until a signal comes: a service that dies is started again, after a pause that
  // doubles each time. `changed` is called after each restart.
  void Watch(const std::function<void()>& changed);

  // Asks each role's services in turn to drain, and waits for them; kills what is not gone after
  // `limit` or, where a (further) signal comes, at once.
  void Stop(const std::vector<std::string>& roles, Duration limit);

  std::vector<ClusterRecord::Process> Processes() const;

 private:
  struct Service {
    ServiceSpec spec;
    std::optional<Process> process;
    bool ready = false;
    TimePoint started;
    TimePoint restart_at;
    Duration backoff;
  };
  absl::Status Spawn(Service* service);
  void LookAfter(Service* service, const std::function<void()>& changed);

  const SupervisorOptions options_;
  std::vector<std::unique_ptr<Service>> services_;
};

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_SUPERVISOR_H_
