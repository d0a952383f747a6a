// coppice up
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/process.h"
#include "client/cli/supervisor.h"
#include "client/health.h"

namespace coppice::cli {
namespace {

namespace fs = std::filesystem;

struct Flags {
  std::string model;
  std::string drafter;
  std::string device = "cpu";
  std::string listen = "127.0.0.1:0";
  int tp = 1;
  int drafter_tp = 1;
  int verifiers = 1;
  bool detach = false;
  int ready_seconds = 1800;
  int drain_seconds = 30;
  std::vector<std::string> verifier_args, drafter_args, router_args;
  ClusterFlags cluster;
};

// Where `up` speaks: the terminal, or, detached, a pipe to the process that started it and then a
// log.
class Voice {
 public:
  explicit Voice(int fd) : fd_(fd) {}
  void Say(const std::string& line) { Raw("coppice: " + line + "\n"); }
  void Raw(const std::string& text) {
    // Nobody may be there to listen.
    if (write(fd_, text.data(), text.size()) < 0) return;
  }
  void SetFd(int fd) { fd_ = fd; }

 private:
  int fd_;
};

// Among the detached child's words to its parent: the endpoints follow; all is ready.
constexpr char kEndpoints = '\x05';
constexpr char kReady = '\x06';

absl::Status CheckModel(const std::string& flag, const std::string& dir) {
  if (fs::exists(dir + "/config.json")) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat(flag, " ", dir, ": ",
                   fs::is_directory(dir) ? "there is no config.json in it" : "no such directory"));
}

// The drafter's directory, or "" for none.
absl::StatusOr<std::string> DrafterDir(const Flags& flags) {
  if (flags.drafter == "none") return "";
  if (!flags.drafter.empty()) {
    const absl::Status status = CheckModel("--drafter", flags.drafter);
    if (!status.ok()) return status;
    return flags.drafter;
  }
  const std::string beside = flags.model + "/drafter";
  return fs::exists(beside + "/config.json") ? beside : "";
}

struct Plan {
  std::vector<ServiceSpec> models;  // verifier and drafter: they load side by side
  std::vector<ServiceSpec> routers;
};

absl::StatusOr<Plan> MakePlan(const Flags& flags, const std::string& drafter_dir,
                              const StateDir& dir) {
  const absl::StatusOr<std::vector<int>> ports = FreePorts(3);
  if (!ports.ok()) return ports.status();
  const std::string verifier = absl::StrCat("127.0.0.1:", (*ports)[0]);
  const std::string drafter = absl::StrCat("127.0.0.1:", (*ports)[1]);
  std::string router = flags.listen;
  if (router.size() > 2 && router.compare(router.size() - 2, 2, ":0") == 0) {
    router = absl::StrCat(router.substr(0, router.size() - 1), (*ports)[2]);
  }
  const std::string drain = absl::StrCat(flags.drain_seconds);
  const auto with = [](std::vector<std::string> argv, const std::vector<std::string>& more) {
    argv.insert(argv.end(), more.begin(), more.end());
    return argv;
  };

  Plan plan;
  std::vector<std::string> argv = {SiblingBinary("coppice-verifier"),
                                   "--model",
                                   flags.model,
                                   "--listen",
                                   verifier,
                                   "--device",
                                   flags.device,
                                   "--tp",
                                   absl::StrCat(flags.tp),
                                   "--drain-seconds",
                                   drain};
  if (!drafter_dir.empty()) argv = with(argv, {"--drafter", drafter_dir});
  plan.models.push_back(
      {"verifier", with(argv, flags.verifier_args), verifier, dir.LogPath("verifier")});
  if (!drafter_dir.empty()) {
    argv = {SiblingBinary("coppice-drafter"),
            "--model",
            flags.model,
            "--drafter",
            drafter_dir,
            "--listen",
            drafter,
            "--device",
            flags.device,
            "--tp",
            absl::StrCat(flags.drafter_tp),
            "--drain-seconds",
            drain};
    plan.models.push_back(
        {"drafter", with(argv, flags.drafter_args), drafter, dir.LogPath("drafter")});
  }
  argv = {SiblingBinary("coppice-router"),
          "--model",
          flags.model,
          "--listen",
          router,
          "--verifier",
          verifier,
          "--drain-seconds",
          drain};
  if (!drafter_dir.empty()) argv = with(argv, {"--drafter", drafter});
  // To be reached from this machine, where it listens on every address.
  std::string reach = router;
  if (reach.rfind("0.0.0.0:", 0) == 0) reach = "127.0.0.1" + reach.substr(7);
  if (reach.rfind("[::]:", 0) == 0) reach = "[::1]" + reach.substr(4);
  plan.routers.push_back({"router", with(argv, flags.router_args), reach, dir.LogPath("router")});
  return plan;
}

std::string EndpointsText(const ClusterRecord& record, const std::string& state) {
  std::string out;
  for (const ClusterRecord::Process& p : record.processes) {
    absl::StrAppendFormat(&out, "%-9s %s  (process %d, log %s)\n", p.role, p.address, p.pid, p.log);
  }
  absl::StrAppendFormat(&out, "%-9s %s\n", "state", state);
  return out;
}

// Starts, watches and stops; `ready` is called once with the endpoints.
int Supervise(const Flags& flags, ShutdownSignals* signals, Voice* voice,
              const std::function<void(const std::string& endpoints)>& ready) {
  const auto fail = [&](const absl::Status& status) {
    voice->Say(std::string(status.message()));
    return absl::IsCancelled(status) ? 130 : 1;
  };
  StateDir dir(flags.cluster.state);
  if (const absl::Status status = dir.Lock(); !status.ok()) return fail(status);
  const absl::StatusOr<std::string> drafter_dir = DrafterDir(flags);
  if (!drafter_dir.ok()) return fail(drafter_dir.status());
  const absl::StatusOr<Plan> plan = MakePlan(flags, *drafter_dir, dir);
  if (!plan.ok()) return fail(plan.status());
  for (const char* role : {"verifier", "drafter", "router"}) {
    std::error_code error;
    fs::remove(dir.LogPath(role), error);
  }

  SupervisorOptions options;
  options.is_ready = IsServing;
  options.say = [voice](const std::string& line) { voice->Say(line); };
  options.pause = [signals](Duration d) {
    return signals->WaitUntil(std::chrono::steady_clock::now() + d) != 0;
  };
  Supervisor supervisor(options);
  ClusterRecord record;
  record.supervisor = getpid();
  record.model = flags.model;
  const auto write = [&] {
    record.processes = supervisor.Processes();
    return dir.Write(record);
  };
  const std::vector<std::string> order = {"router", "drafter", "verifier"};
  const Duration limit = std::chrono::seconds(flags.drain_seconds + 5);

  voice->Say(
      absl::StrCat("starting ", flags.model,
                   drafter_dir->empty() ? ", without a drafter" : ", drafted by " + *drafter_dir));
  absl::Status status = supervisor.Start(plan->models, std::chrono::seconds(flags.ready_seconds));
  if (status.ok()) {
    status = supervisor.Start(plan->routers, std::chrono::seconds(flags.ready_seconds));
  }
  if (status.ok()) status = write();
  if (!status.ok()) {
    supervisor.Stop(order, limit);
    return fail(status);
  }
  ready(EndpointsText(record, dir.path()));
  supervisor.Watch([&] {
    if (const absl::Status s = write(); !s.ok()) voice->Say(std::string(s.message()));
  });
  supervisor.Stop(order, limit);
  dir.Unlock();
  voice->Say("stopped");
  return 0;
}

int RunHere(const Flags& flags, ShutdownSignals* signals) {
  Voice voice(STDERR_FILENO);
  return Supervise(flags, signals, &voice, [&](const std::string& endpoints) {
    std::cout << endpoints << std::flush;
    voice.Say("Ctrl-C, or `coppice down`, stops it");
  });
}

// In the child of RunDetached: `pipe` leads to the parent until all is ready.
int RunBehind(const Flags& flags, ShutdownSignals* signals, int pipe) {
  setsid();
  const int null = open("/dev/null", O_RDWR);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, fd);
  Voice voice(pipe);
  return Supervise(flags, signals, &voice, [&](const std::string& endpoints) {
    voice.Raw(kEndpoints + endpoints + kReady);
    const std::string log = StateDir(flags.cluster.state).LogPath("up");
    const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    voice.SetFd(fd);
    close(pipe);
  });
}

int RunDetached(const Flags& flags, ShutdownSignals* signals) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return Fail("cannot make a pipe");
  const pid_t child = fork();
  if (child < 0) return Fail("cannot start a process");
  if (child == 0) {
    close(ends[0]);
    _exit(RunBehind(flags, signals, ends[1]));
  }
  close(ends[1]);
  std::ostream* to = &std::cerr;
  for (;;) {
    pollfd wait = {ends[0], POLLIN, 0};
    if (poll(&wait, 1, 100) > 0) {
      char text[4096];
      const ssize_t n = read(ends[0], text, sizeof text);
      if (n <= 0) break;
      for (const char c : std::string_view(text, n)) {
        if (c == kEndpoints) {
          to = &std::cout;
        } else if (c != kReady) {
          *to << c;
        }
      }
      *to << std::flush;
      if (text[n - 1] == kReady) return 0;
    }
    if (signals->WaitUntil(std::chrono::steady_clock::now()) != 0) kill(child, SIGTERM);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) != 0 ? WEXITSTATUS(status) : 1;
}

int Run(const Flags& flags, ShutdownSignals* signals) {
  if (const absl::Status status = CheckModel("--model", flags.model); !status.ok()) {
    return Fail(std::string(status.message()));
  }
  return flags.detach ? RunDetached(flags, signals) : RunHere(flags, signals);
}

}  // namespace

Command AddUp(FlagParser* flags) {
  auto own = std::make_shared<Flags>();
  CLI::App* command =
      flags->AddCommand("up", "start verifier, drafter and router, and keep them running");
  flags->Add("model", &own->model, "directory of the target model", command)->required();
  flags->Add("drafter", &own->drafter,
             "directory of its draft model; none: without (default: MODEL/drafter, if it exists)",
             command);
  flags->AddChoice("device", &own->device, {"cpu", "cuda"}, "where to compute", command);
  flags->Add("tp", &own->tp, "tensor-parallel ranks of the verifier", command)
      ->check(CLI::IsMember({1, 2, 4, 8}));
  flags->Add("drafter-tp", &own->drafter_tp, "ranks of the drafter", command)
      ->check(CLI::IsMember({1, 2, 4, 8}));
  flags->Add("verifiers", &own->verifiers, "how many verifiers: 1", command)
      ->check([](const std::string& given) -> std::string {
        if (given == "1") return "";
        return "a router drives one verifier in this version, not " + given +
               "; leave it out or give 1";
      });
  flags->Add("listen", &own->listen, "host:port of the router; port 0: any free one", command);
  flags->AddSwitch("detach", &own->detach, "return once all is ready; `coppice down` stops it",
                   command);
  flags->Add("ready-seconds", &own->ready_seconds, "how long loading may take", command)
      ->check(CLI::Range(1, 86400));
  flags
      ->Add("drain-seconds", &own->drain_seconds,
            "how long running requests may take when it is stopped", command)
      ->check(CLI::Range(0, 86400));
  const auto more = [&](const std::string& role, std::vector<std::string>* args) {
    command
        ->add_option("--" + role + "-arg", *args,
                     "a further argument of coppice-" + role + ", as --" + role +
                         "-arg=--flag=value; may be given several times")
        ->allow_extra_args(false);
  };
  more("verifier", &own->verifier_args);
  more("drafter", &own->drafter_args);
  more("router", &own->router_args);
  own->cluster.AddTo(flags, command, false);
  return {command, [own](ShutdownSignals* signals) { return Run(*own, signals); }};
}

}  // namespace coppice::cli
