// coppice generate
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/interrupts.h"
#include "client/cli/json_shapes.h"
#include "client/cli/request_flags.h"
#include "client/client.h"

namespace coppice::cli {
namespace {

struct Flags {
  std::string prompt;
  std::string chat;
  bool json = false;
  bool quiet = false;
  double timeout = 0;
  ClusterFlags cluster;
  RequestFlags request;
  CLI::Option* prompt_option = nullptr;
};

absl::StatusOr<std::string> ReadAll(const std::string& path) {
  std::ostringstream out;
  if (path == "-") {
    out << std::cin.rdbuf();
    return out.str();
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError("cannot read " + path);
  out << in.rdbuf();
  return out.str();
}

// One token a line: id, log-probability, and what stood beside it.
void PrintLogProbs(const Completion& done) {
  for (const v1::PositionLogProbs& position : done.logprobs) {
    std::string line =
        absl::StrFormat("%8d %9.4f ", position.chosen().token(), position.chosen().log_prob());
    for (const v1::TokenLogProb& t : position.top()) {
      absl::StrAppendFormat(&line, "  %d %.4f", t.token(), t.log_prob());
    }
    std::cerr << line << "\n";
  }
}

void PrintFigures(const Completion& done) {
  const auto json = CompletionJson(done);
  const double itl = json["timing"]["itl_ms"];
  const auto& speculation = done.final.speculation();
  std::string line = absl::StrFormat("%d tokens", done.token_ids.size());
  if (itl > 0) absl::StrAppendFormat(&line, ", %.1f tok/s", 1000 / itl);
  absl::StrAppendFormat(&line, ", ttft %.0f ms", json["timing"]["ttft_ms"].get<double>());
  if (speculation.rounds() > 0) {
    absl::StrAppendFormat(&line, ", acceptance length %.2f (%d rounds, %d of %d drafts accepted)",
                          speculation.acceptance_length(), speculation.rounds(),
                          speculation.accepted(), speculation.drafted());
  }
  absl::StrAppend(&line, ", finish ", json["finish_reason"].get<std::string>());
  if (done.resumes > 0) absl::StrAppend(&line, ", resumed ", done.resumes, " times");
  std::cerr << "[" << line << "]\n";
}

int Run(const Flags& flags, ShutdownSignals* signals) {
  v1::GenerateRequest request = flags.request.Request();
  const bool has_prompt = flags.prompt_option->count() > 0;
  if (has_prompt == !flags.chat.empty()) {
    return Fail(has_prompt ? "give a PROMPT or --chat FILE, not both"
                           : "give a PROMPT, or --chat FILE; see coppice generate --help",
                2);
  }
  if (has_prompt) {
    absl::StatusOr<std::string> text =
        flags.prompt == "-" ? ReadAll("-") : absl::StatusOr<std::string>(flags.prompt);
    request.set_text(*text);
  } else {
    const absl::StatusOr<std::string> text = ReadAll(flags.chat);
    if (!text.ok()) return Fail(std::string(text.status().message()), 2);
    absl::StatusOr<v1::Chat> chat =
        ParseChat(*text, flags.chat == "-" ? "standard input" : flags.chat);
    if (!chat.ok()) return Fail(std::string(chat.status().message()), 2);
    *request.mutable_chat() = std::move(*chat);
  }
  const absl::StatusOr<std::vector<std::string>> routers = flags.cluster.Routers();
  if (!routers.ok()) return Fail(std::string(routers.status().message()));

  ClientOptions options;
  options.routers = *routers;
  // A cluster that is up brings back a service that died: worth some seconds' wait.
  if (flags.cluster.routers.empty()) options.attempts_before_first = 12;
  Client client(options);
  std::optional<std::chrono::system_clock::time_point> deadline;
  if (flags.timeout > 0) {
    deadline = std::chrono::system_clock::now() +
               std::chrono::milliseconds(static_cast<int64_t>(flags.timeout * 1000));
  }
  const std::unique_ptr<GenerateStream> stream = client.StartGenerate(request, deadline);
  const Interrupts interrupts(signals, [&](int) { stream->Cancel(); });
  v1::GenerateDelta delta;
  bool printed = false, open_line = false;
  while (stream->Next(&delta)) {
    if (flags.json || delta.text().empty()) continue;
    std::fwrite(delta.text().data(), 1, delta.text().size(), stdout);
    if (std::fflush(stdout) != 0) {
      // Whoever read this has left (`| head`).
      stream->Cancel();
      break;
    }
    printed = true;
    open_line = delta.text().back() != '\n';
  }
  while (stream->Next(&delta)) {
  }
  if (printed && open_line) std::puts("");
  std::fflush(stdout);
  const absl::StatusOr<Completion> done = stream->Finish();
  if (!done.ok()) {
    return Fail(std::string(done.status().message()), absl::IsCancelled(done.status()) ? 130 : 1);
  }
  if (flags.json) {
    std::cout << CompletionJson(*done).dump(-1, ' ', false,
                                            nlohmann::json::error_handler_t::replace)
              << "\n";
  } else {
    PrintLogProbs(*done);
    if (!flags.quiet) PrintFigures(*done);
  }
  return 0;
}

}  // namespace

Command AddGenerate(FlagParser* flags) {
  auto own = std::make_shared<Flags>();
  CLI::App* command = flags->AddCommand("generate", "continue a prompt, or answer a conversation");
  own->prompt_option = command->add_option("PROMPT", own->prompt,
                                           "the text to continue; - reads it from standard input");
  flags->Add("chat", &own->chat,
             "file of chat messages in JSON, instead of PROMPT; - is standard input", command);
  flags->AddSwitch("json", &own->json, "print one JSON object at the end, instead of text",
                   command);
  flags->AddSwitch("quiet", &own->quiet, "do not print the figures", command);
  flags->Add("timeout", &own->timeout, "seconds the whole generation may take; 0: any", command)
      ->check(CLI::Range(0.0, 1e6));
  own->request.AddTo(flags, command);
  own->cluster.AddTo(flags, command, true);
  return {command, [own](ShutdownSignals* signals) { return Run(*own, signals); }};
}

}  // namespace coppice::cli
