// Child processes and what they left in their logs.
#ifndef COPPICE_CLIENT_CLI_PROCESS_H_
#define COPPICE_CLIENT_CLI_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace coppice::cli {

// A child in a process group of its own (so that a terminal's Ctrl-C does not reach it), which is
// asked to end (SIGTERM) should the thread that started it die.  Its standard output and error are
// appended to a file.
class Process {
 public:
  static absl::StatusOr<Process> Start(const std::vector<std::string>& argv,
                                       const std::string& log_path);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  // Kills it if it still runs.
  ~Process();

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Nothing while it runs, else the status that wait(2) gave.  Does not wait.
  std::optional<int> Poll();

 private:
  explicit Process(pid_t pid) : pid_(pid) {}
  void Kill();
  pid_t pid_ = -1;
  std::optional<int> status_;
};

// "exited with code 3", "was killed by signal 9 (Killed)".
std::string DescribeExit(int wait_status);

// The file's last `count` lines, or "" where there is none.
std::string LastLines(const std::string& path, int count);

// The binary of this name beside this program's own, else the name alone, to be found in PATH.
std::string SiblingBinary(const std::string& name);

// Ports of the loopback that were free just now, all different.
absl::StatusOr<std::vector<int>> FreePorts(int count);

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_PROCESS_H_
