// The directory by which `coppice up` lets the other commands find its cluster.
#ifndef COPPICE_CLIENT_CLI_STATE_DIR_H_
#define COPPICE_CLIENT_CLI_STATE_DIR_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace coppice::cli {

// What cluster.json says.
struct ClusterRecord {
  struct Process {
    std::string role;  // router, drafter or verifier
    std::string address;
    pid_t pid = 0;
    std::string log;
  };
  pid_t supervisor = 0;
  std::string model;
  std::vector<Process> processes;

  std::vector<std::string> Addresses(const std::string& role) const;
};

// $XDG_STATE_HOME/coppice, else ~/.local/state/coppice, else /tmp/coppice-UID.
std::string DefaultStateDir();

// A cluster lives exactly as long as somebody holds the lock on DIR/lock: the kernel lets go of it
// however the holder ends, so a process id that was given to another is never taken for ours.
class StateDir {
 public:
  explicit StateDir(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  std::string LogPath(const std::string& role) const { return path_ + "/" + role + ".log"; }

  // Creates the directory where needed, takes the lock and removes what a dead cluster left.
  // FAILED_PRECONDITION where a live cluster has it, naming its process.  Held until the object
  // goes or Unlock.
  absl::Status Lock();
  // Removes cluster.json and lets go.
  void Unlock();

  // Replaces cluster.json, at once or not at all.
  absl::Status Write(const ClusterRecord& record) const;
  // The live cluster's record.  NOT_FOUND, with a sentence that says how to start one, where none
  // is; UNAVAILABLE while one is starting.
  absl::StatusOr<ClusterRecord> Read() const;
  // Whether somebody holds the lock.
  bool IsLive() const;

  // Only on the process that called Lock.
  bool locked() const { return lock_ != nullptr; }

 private:
  struct Fd {
    int fd;
    explicit Fd(int f) : fd(f) {}
    ~Fd();
  };
  std::string path_;
  std::shared_ptr<Fd> lock_;
};

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_STATE_DIR_H_
