// coppice chat
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <mutex>

#include "client/cli/commands.h"
#include "client/cli/interrupts.h"
#include "client/cli/request_flags.h"
#include "client/client.h"

namespace coppice::cli {
namespace {

struct Flags {
  std::string system;
  bool thinking = true;
  ClusterFlags cluster;
  RequestFlags request;
};

constexpr char kHelp[] =
    "/reset forgets the conversation, /quit leaves; Ctrl-C stops a reply, or leaves.\n";

// Splits a reply into what stood before </think> and what comes after.
v1::ChatMessage AssistantMessage(std::string text) {
  const std::string open = "<think>", close = "</think>";
  v1::ChatMessage message;
  message.set_role("assistant");
  if (const size_t end = text.find(close); end != std::string::npos) {
    std::string reasoning = text.substr(0, end);
    if (reasoning.rfind(open, 0) == 0) reasoning = reasoning.substr(open.size());
    message.set_reasoning(reasoning);
    text = text.substr(end + close.size());
  }
  message.set_content(text);
  return message;
}

// The reply under way, for Ctrl-C.
class Current {
 public:
  void Set(GenerateStream* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    stream_ = stream;
  }
  // False where none is.
  bool Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream_ == nullptr) return false;
    stream_->Cancel();
    return true;
  }

 private:
  std::mutex mutex_;
  GenerateStream* stream_ = nullptr;
};

int Run(const Flags& flags, ShutdownSignals* signals) {
  const absl::StatusOr<std::vector<std::string>> routers = flags.cluster.Routers();
  if (!routers.ok()) return Fail(std::string(routers.status().message()));
  ClientOptions options;
  options.routers = *routers;
  // A cluster that is up brings back a service that died: worth some seconds' wait.
  if (flags.cluster.routers.empty()) options.attempts_before_first = 12;
  Client client(options);
  const absl::StatusOr<v1::Model> model = client.GetModel();
  if (!model.ok()) return Fail(std::string(model.status().message()));
  const bool terminal = isatty(STDIN_FILENO) != 0;
  if (terminal) std::cerr << model->name() << ".  " << kHelp;

  v1::Chat chat;
  const auto reset = [&] {
    chat.clear_messages();
    chat.set_thinking(flags.thinking);
    if (flags.system.empty()) return;
    v1::ChatMessage* message = chat.add_messages();
    message->set_role("system");
    message->set_content(flags.system);
  };
  reset();

  Current current;
  const Interrupts interrupts(signals, [&](int) {
    if (current.Cancel()) return;
    // The main thread sits in a read that nothing else would end.
    std::fputs("\n", stdout);
    std::fflush(stdout);
    _exit(0);
  });
  bool failed = false;
  for (std::string line;;) {
    if (terminal) std::cerr << "> " << std::flush;
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    if (line == "/quit" || line == "/exit") break;
    if (line == "/reset") {
      reset();
      continue;
    }
    if (line[0] == '/') {
      std::cerr << kHelp;
      continue;
    }
    v1::ChatMessage* message = chat.add_messages();
    message->set_role("user");
    message->set_content(line);
    v1::GenerateRequest request = flags.request.Request();
    *request.mutable_chat() = chat;
    const std::unique_ptr<GenerateStream> stream = client.StartGenerate(request);
    current.Set(stream.get());
    std::string text;
    v1::GenerateDelta delta;
    while (stream->Next(&delta)) {
      text += delta.text();
      std::fwrite(delta.text().data(), 1, delta.text().size(), stdout);
      std::fflush(stdout);
    }
    current.Set(nullptr);
    if (!text.empty() && text.back() != '\n') std::puts("");
    std::fflush(stdout);
    const absl::Status status = stream->Finish().status();
    if (!status.ok() && !absl::IsCancelled(status)) {
      // The turn is as if it had not been.
      chat.mutable_messages()->RemoveLast();
      Fail(std::string(status.message()));
      failed = true;
      continue;
    }
    failed = false;
    *chat.add_messages() = AssistantMessage(text);
  }
  if (terminal) std::cerr << "\n";
  // To a script, the last turn's failure is this command's.
  return failed && !terminal ? 1 : 0;
}

}  // namespace

Command AddChat(FlagParser* flags) {
  auto own = std::make_shared<Flags>();
  CLI::App* command = flags->AddCommand("chat", "talk with the model");
  flags->Add("system", &own->system, "the system message", command);
  flags->Add("thinking", &own->thinking, "whether a reply begins with the model's reasoning",
             command);
  own->request.AddTo(flags, command);
  own->cluster.AddTo(flags, command, true);
  return {command, [own](ShutdownSignals* signals) { return Run(*own, signals); }};
}

}  // namespace coppice::cli
