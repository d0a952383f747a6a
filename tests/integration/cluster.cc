#include "tests/integration/cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "client/health.h"
#include "model/tokenizer.h"
#include "nlohmann/json.hpp"

namespace coppice::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

}  // namespace

Process::Process(std::vector<std::string> argv, std::string log_path)
    : log_path_(std::move(log_path)) {
  std::vector<char*> args;
  for (std::string& arg : argv) args.push_back(arg.data());
  args.push_back(nullptr);
  const int log = open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, STDIN_FILENO);
    execv(args[0], args.data());
    std::perror(args[0]);
    _exit(127);
  }
  close(log);
}

Process::~Process() {
  if (Running()) {
    Signal(SIGKILL);
    Wait(std::chrono::seconds(10));
  }
}

void Process::Signal(int signal) const {
  if (!exit_code_) kill(pid_, signal);
}

bool Process::Running() { return !Wait(milliseconds(0)).has_value(); }

std::optional<int> Process::Wait(milliseconds timeout) {
  const auto end = steady_clock::now() + timeout;
  while (!exit_code_) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    } else if (steady_clock::now() >= end) {
      break;
    } else {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }
  return exit_code_;
}

std::string Process::Output() const { return ReadAll(log_path_); }

CommandResult RunCommand(std::vector<std::string> argv, milliseconds timeout) {
  TemporaryDirectory directory;
  Process process(std::move(argv), directory.path() + "/output");
  CommandResult result;
  result.exit_code = process.Wait(timeout);
  result.output = process.Output();
  return result;
}

std::string Binary(const std::string& name) {
  const char* directory = std::getenv("COPPICE_BIN");
  return std::string(directory != nullptr ? directory : "build/release/bin") + "/" + name;
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::perror("no free port");
    std::abort();
  }
  close(fd);
  return ntohs(address.sin_port);
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = std::filesystem::temp_directory_path() / "coppice-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) {
    std::perror("mkdtemp");
    std::abort();
  }
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Cluster::Cluster(ClusterOptions options) : options_(std::move(options)) {
  const auto address = [] { return "127.0.0.1:" + std::to_string(FreePort()); };
  verifier_address_ = address();
  drafter_address_ = address();
  for (int i = 0; i < options_.routers; ++i) router_addresses_.push_back(address());
  routers_.resize(options_.routers);
}

Cluster::~Cluster() = default;

std::string Cluster::NextLog(const std::string& name) {
  return directory_.path() + "/" + std::to_string(log_number_++) + "-" + name + ".log";
}

void Cluster::StartVerifier() {
  std::vector<std::string> argv = {
      Binary("coppice-verifier"), "--model",  options_.model, "--listen",
      verifier_address_,          "--device", "cpu",          "--tp",
      std::to_string(options_.tp)};
  argv.insert(argv.end(), options_.verifier_flags.begin(), options_.verifier_flags.end());
  verifier_ = std::make_unique<Process>(std::move(argv), NextLog("verifier"));
}

void Cluster::StartDrafter() {
  std::vector<std::string> argv = {Binary("coppice-drafter"),
                                   "--model",
                                   options_.model,
                                   "--drafter",
                                   options_.model + "/drafter",
                                   "--listen",
                                   drafter_address_,
                                   "--device",
                                   "cpu"};
  argv.insert(argv.end(), options_.drafter_flags.begin(), options_.drafter_flags.end());
  drafter_ = std::make_unique<Process>(std::move(argv), NextLog("drafter"));
}

void Cluster::StartRouter(int index) {
  std::vector<std::string> argv = {
      Binary("coppice-router"),         "--model",    options_.model,    "--listen",
      router_addresses_[index],         "--verifier", verifier_address_, "--name",
      "router-" + std::to_string(index)};
  if (options_.drafter) {
    argv.push_back("--drafter");
    argv.push_back(drafter_address_);
  }
  argv.insert(argv.end(), options_.router_flags.begin(), options_.router_flags.end());
  routers_[index] = std::make_unique<Process>(std::move(argv), NextLog("router"));
}

bool Cluster::WaitServing(const std::string& address, milliseconds timeout) const {
  return Eventually([&] { return IsServing(address); }, timeout);
}

bool Cluster::Start() {
  StartVerifier();
  if (options_.drafter) StartDrafter();
  bool up = WaitServing(verifier_address_, std::chrono::seconds(120)) &&
            (!options_.drafter || WaitServing(drafter_address_, std::chrono::seconds(60)));
  if (up) {
    StartRouter(0);
    up = WaitServing(router_addresses_[0], std::chrono::seconds(60));
  }
  if (!up) std::fprintf(stderr, "the cluster did not come up:\n%s", Logs().c_str());
  return up;
}

void Cluster::KillVerifier() {
  verifier_->Signal(SIGKILL);
  verifier_->Wait(std::chrono::seconds(10));
}

void Cluster::KillDrafter() {
  drafter_->Signal(SIGKILL);
  drafter_->Wait(std::chrono::seconds(10));
}

void Cluster::KillRouter(int index) {
  routers_[index]->Signal(SIGKILL);
  routers_[index]->Wait(std::chrono::seconds(10));
}

std::shared_ptr<grpc::Channel> Cluster::channel(int index) const {
  auto& channel = channels_[router_addresses_[index]];
  if (channel == nullptr) {
    channel = grpc::CreateChannel(router_addresses_[index], grpc::InsecureChannelCredentials());
  }
  return channel;
}

coppice::v1::PoolState Cluster::Pool() const {
  auto stub = coppice::v1::Verifier::NewStub(
      grpc::CreateChannel(verifier_address_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  coppice::v1::PoolState pool;
  stub->GetPool(&context, {}, &pool);
  return pool;
}

coppice::v1::VerifierInfo Cluster::VerifierInfo() const {
  auto stub = coppice::v1::Verifier::NewStub(
      grpc::CreateChannel(verifier_address_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  coppice::v1::VerifierInfo info;
  stub->GetInfo(&context, {}, &info);
  return info;
}

coppice::v1::DrafterInfo Cluster::DrafterInfo() const {
  auto stub = coppice::v1::Drafter::NewStub(
      grpc::CreateChannel(drafter_address_, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  coppice::v1::DrafterInfo info;
  stub->GetInfo(&context, {}, &info);
  return info;
}

coppice::v1::ClusterState Cluster::State(int index) const {
  auto stub = coppice::v1::Cluster::NewStub(channel(index));
  grpc::ClientContext context;
  coppice::v1::ClusterState state;
  stub->GetState(&context, {}, &state);
  return state;
}

Generation Cluster::Generate(
    const coppice::v1::GenerateRequest& request, int router,
    const std::function<bool(const coppice::v1::GenerateDelta&)>& on_delta) const {
  auto stub = coppice::v1::Inference::NewStub(
      grpc::CreateChannel(router_addresses_[router], grpc::InsecureChannelCredentials()));
  Generation result;
  grpc::ClientContext context;
  auto reader = stub->Generate(&context, request);
  const size_t resumed = request.resume().token_ids_size();
  coppice::v1::GenerateDelta delta;
  bool first = true;
  while (reader->Read(&delta)) {
    const auto complain = [&](const std::string& what) {
      if (result.contract_error.empty())
        result.contract_error = what + ": " + delta.ShortDebugString();
    };
    if (result.finished) complain("a delta after the final one");
    if (delta.token_offset() != resumed + result.ids.size())
      complain("token_offset is not the number of ids so far");
    if (first && !delta.has_seed()) complain("the first delta carries no seed");
    if (first) result.seed = delta.seed();
    first = false;
    result.ids.insert(result.ids.end(), delta.token_ids().begin(), delta.token_ids().end());
    result.text += delta.text();
    if (delta.has_final()) {
      result.finished = true;
      result.final = delta.final();
      if (delta.final().usage().completion_tokens() != resumed + result.ids.size()) {
        complain("usage does not count the ids delivered");
      }
    }
    if (on_delta && !on_delta(delta)) {
      context.TryCancel();
      break;
    }
  }
  while (reader->Read(&delta)) {
  }
  result.status = reader->Finish();
  return result;
}

std::string Cluster::Logs() const {
  std::string logs;
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
    logs += "--- " + entry.path().filename().string() + "\n" + ReadAll(entry.path()) + "\n";
  }
  return logs;
}

bool Eventually(const std::function<bool()>& condition, milliseconds timeout) {
  const auto end = steady_clock::now() + timeout;
  while (!condition()) {
    if (steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(milliseconds(20));
  }
  return true;
}

std::vector<DemoPrompt> DemoPrompts() {
  std::ifstream in("models/demo/prompts.jsonl");
  const auto tokenizer = Tokenizer::Load("models/demo", 4096);
  if (!tokenizer.status().ok()) Die(tokenizer.status().ToString());
  std::vector<DemoPrompt> prompts;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json entry = nlohmann::json::parse(line);
    const auto ids = (*tokenizer)->EncodeWithSpecial(entry.at("prompt").get<std::string>());
    if (!ids.status().ok()) Die(ids.status().ToString());
    prompts.push_back({entry.at("category"), std::vector<uint32_t>(ids->begin(), ids->end())});
  }
  if (prompts.empty()) {
    std::fprintf(stderr,
                 "models/demo/prompts.jsonl is missing or empty; run from the repository's root\n");
    std::abort();
  }
  return prompts;
}

std::vector<DemoPrompt> SpreadPrompts(size_t count) {
  std::map<std::string, std::vector<DemoPrompt>> by_category;
  for (DemoPrompt& prompt : DemoPrompts())
    by_category[prompt.category].push_back(std::move(prompt));
  std::vector<DemoPrompt> spread;
  for (size_t round = 0; spread.size() < count; ++round) {
    bool any = false;
    for (const auto& [category, prompts] : by_category) {
      if (round < prompts.size() && spread.size() < count) {
        spread.push_back(prompts[round]);
        any = true;
      }
    }
    if (!any) break;
  }
  return spread;
}

}  // namespace coppice::testing
