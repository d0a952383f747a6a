#include "client/cli/state_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace coppice::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

}  // namespace

std::vector<std::string> ClusterRecord::Addresses(const std::string& role) const {
  std::vector<std::string> out;
  for (const Process& process : processes) {
    if (process.role == role) out.push_back(process.address);
  }
  return out;
}

std::string DefaultStateDir() {
  if (const char* base = std::getenv("XDG_STATE_HOME"); base != nullptr && *base == '/') {
    return absl::StrCat(base, "/coppice");
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return absl::StrCat(home, "/.local/state/coppice");
  }
  return absl::StrCat("/tmp/coppice-", getuid());
}

StateDir::Fd::~Fd() {
  if (fd >= 0) close(fd);
}

absl::Status StateDir::Lock() {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat("cannot make the state directory ", path_,
                                                      ": ", error.message(),
                                                      "; name another with --state"));
  }
  const std::string lock_path = path_ + "/lock";
  auto lock = std::make_shared<Fd>(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock->fd < 0) {
    return absl::FailedPreconditionError(absl::StrCat("cannot open ", lock_path, ": ",
                                                      std::strerror(errno),
                                                      "; name another directory with --state"));
  }
  if (flock(lock->fd, LOCK_EX | LOCK_NB) != 0) {
    const absl::StatusOr<ClusterRecord> record = Read();
    return absl::FailedPreconditionError(
        absl::StrCat("a cluster already runs with the state directory ", path_,
                     record.ok() ? absl::StrCat(" (process ", record->supervisor, ")") : "",
                     "; stop it with `coppice down`, or name another directory with --state"));
  }
  fs::remove(path_ + "/cluster.json", error);
  lock_ = std::move(lock);
  return absl::OkStatus();
}

void StateDir::Unlock() {
  if (!lock_) return;
  std::error_code error;
  fs::remove(path_ + "/cluster.json", error);
  lock_.reset();
}

absl::Status StateDir::Write(const ClusterRecord& record) const {
  json processes = json::array();
  for (const ClusterRecord::Process& p : record.processes) {
    processes.push_back({{"role", p.role}, {"address", p.address}, {"pid", p.pid}, {"log", p.log}});
  }
  const json out = {
      {"supervisor", record.supervisor}, {"model", record.model}, {"processes", processes}};
  const std::string path = path_ + "/cluster.json", draft = path + ".new";
  std::ofstream file(draft, std::ios::trunc);
  file << out.dump(2) << "\n";
  file.close();
  if (!file || std::rename(draft.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

bool StateDir::IsLive() const {
  const Fd lock(open((path_ + "/lock").c_str(), O_RDWR | O_CLOEXEC));
  if (lock.fd < 0) return false;
  return flock(lock.fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

absl::StatusOr<ClusterRecord> StateDir::Read() const {
  if (!IsLive()) {
    return absl::NotFoundError(absl::StrCat("no cluster is running (state directory ", path_,
                                            "); start one with `coppice up --model DIR`, or name "
                                            "a router with --router HOST:PORT"));
  }
  const std::string path = path_ + "/cluster.json";
  if (!fs::exists(path)) {
    return absl::UnavailableError(
        absl::StrCat("the cluster is still starting (state directory ", path_, ")"));
  }
  const json in = json::parse(ReadFile(path), nullptr, false);
  const auto text = [](const json& object, const char* key) {
    return object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : "";
  };
  const auto number = [](const json& object, const char* key) {
    return object.contains(key) && object[key].is_number_integer() ? object[key].get<pid_t>() : 0;
  };
  if (!in.is_object() || !in.contains("processes") || !in["processes"].is_array()) {
    return absl::DataLossError(absl::StrCat(path, " is not a cluster's record"));
  }
  ClusterRecord out;
  out.supervisor = number(in, "supervisor");
  out.model = text(in, "model");
  for (const json& p : in["processes"]) {
    if (!p.is_object())
      return absl::DataLossError(absl::StrCat(path, " is not a cluster's record"));
    out.processes.push_back(
        {text(p, "role"), text(p, "address"), number(p, "pid"), text(p, "log")});
  }
  return out;
}

}  // namespace coppice::cli
