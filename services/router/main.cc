// coppice-router: takes requests, drives a verifier and a drafter, streams text.
#include <glog/logging.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "model/chat_template.h"
#include "model/config.h"
#include "model/tokenizer.h"
#include "services/common/build_info.h"
#include "services/common/epoch.h"
#include "services/common/flags.h"
#include "services/common/logging.h"
#include "services/common/metrics.h"
#include "services/common/readiness.h"
#include "services/common/server.h"
#include "services/common/shutdown.h"
#include "services/router/drafter_client.h"
#include "services/router/metrics.h"
#include "services/router/scheduler_loop.h"
#include "services/router/service.h"
#include "services/router/verifier_client.h"

namespace coppice::router {
namespace {

// A loop that has not gone round for so long is stuck.
constexpr std::chrono::seconds kStuck{5};

std::string DefaultName() {
  char host[256] = "router";
  gethostname(host, sizeof(host) - 1);
  return std::string(host) + "-" + std::to_string(getpid());
}

int Fail(const absl::Status& status) {
  std::cerr << "coppice-router: " << status.message() << "\n";
  return 1;
}

int Main(int argc, char** argv) {
  ShutdownSignals signals;
  ServiceFlags service;
  service.listen = "127.0.0.1:7000";
  std::string name = DefaultName();
  std::string model_dir;
  std::string model_name;
  std::string verifier_address = "127.0.0.1:7001";
  std::string drafter_address;
  std::string speculation = "auto";
  std::string chat_template = "auto";
  bool special_tokens_in_text = false;
  int tree_nodes = 17;
  int max_queue = 256;
  int top_k = 16;

  FlagParser flags("coppice-router", "Takes requests and streams text, by tree speculation.");
  service.AddTo(&flags);
  flags.Add("model", &model_dir, "directory of the target model (tokenizer and configuration)")
      ->required();
  flags.Add("model-name", &model_name, "what GetModel calls it; the directory's name where empty");
  flags.Add("name", &name, "this router's name, told to others that want its verifier");
  flags.Add("verifier", &verifier_address, "host:port of the verifier");
  flags.Add("drafter", &drafter_address,
            "host:port of the drafter, as the verifier reaches it too; empty: plain decoding");
  flags.AddChoice(
      "chat-template", &chat_template, {"auto", "nearest", "instruct", "thinking", "k2.5", "k2.6"},
      "layout of chats: the release whose template the model has; nearest: of an unknown "
      "template, the release most like it");
  flags.AddSwitch("special-tokens-in-text", &special_tokens_in_text,
                  "let prompts and messages spell control tokens, as the reference tokenizer does; "
                  "users can then write turns of others");
  flags.AddChoice("speculation", &speculation, {"auto", "off", "chain", "tree"},
                  "for requests that ask for none in particular");
  flags
      .Add("tree-nodes", &tree_nodes,
           "nodes of a tree, the root counted, where a request says no number")
      ->check(CLI::Range(1, 64));
  flags.Add("max-queue", &max_queue, "requests that may wait for admission")
      ->check(CLI::Range(1, 1 << 20));
  flags.Add("draft-top-k", &top_k, "candidates asked of the drafter per position")
      ->check(CLI::Range(1, 64));
  if (const std::optional<int> code = flags.Parse(argc, argv)) return *code;
  InitLogging("coppice-router", service.log_level);

  const absl::StatusOr<ModelConfig> config = LoadModelConfig(model_dir);
  if (!config.ok()) return Fail(config.status());
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      Tokenizer::Load(model_dir, config->vocab_size);
  if (!tokenizer.ok()) return Fail(tokenizer.status());
  if (model_name.empty()) {
    model_name = std::filesystem::weakly_canonical(model_dir).filename().string();
  }

  const uint64_t epoch = RandomEpoch();
  std::mutex random_mutex;
  std::mt19937_64 generator(RandomEpoch());
  auto random = [&] {
    std::lock_guard<std::mutex> lock(random_mutex);
    return static_cast<uint64_t>(generator());
  };
  const BuildLabel build{BuildVersion(), BuildGitRevision(), "cpu"};

  SchedulerOptions options;
  options.name = name;
  options.verifier_address = verifier_address;
  options.drafter_address = drafter_address;
  options.vocab_size = config->vocab_size;
  options.max_position_embeddings = config->max_position_embeddings;
  options.max_queue = max_queue;
  options.top_k = top_k;

  // The links post to the loop, which sends through the links: they start once it stands, and
  // stop before it falls.
  SchedulerLoop* to_loop = nullptr;
  auto post = [&to_loop](Event event, ReadTicket ticket) {
    to_loop->Post(std::move(event), std::move(ticket));
  };
  VerifierClient::Options verifier_options;
  verifier_options.address = verifier_address;
  verifier_options.router = name;
  verifier_options.router_epoch = epoch;
  auto verifier = std::make_unique<VerifierClient>(
      verifier_options, [&](const VerifierInfo& info) { return CheckVerifier(info, options); },
      post);
  DrafterClient::Options drafter_options;
  drafter_options.address = drafter_address;
  auto drafter = std::make_unique<DrafterClient>(drafter_options, post);
  SchedulerLoop loop(options, tokenizer->get(), Clock::Real(), verifier.get(), drafter.get(),
                     random);
  to_loop = &loop;

  absl::StatusOr<std::unique_ptr<Metrics>> metrics =
      Metrics::Create(service.listen, service.metrics_port);
  if (!metrics.ok()) return Fail(metrics.status());
  RouterMetrics router_metrics(metrics->get(), &loop.counters());

  InferenceOptions inference_options;
  inference_options.limits.vocab_size = config->vocab_size;
  inference_options.limits.max_position_embeddings = config->max_position_embeddings;
  inference_options.limits.eos_token_ids = config->eos_token_ids;
  inference_options.limits.default_tree_nodes = tree_nodes;
  inference_options.limits.default_speculation = speculation == "off"     ? Speculation::kOff
                                                 : speculation == "chain" ? Speculation::kChain
                                                 : speculation == "tree"  ? Speculation::kTree
                                                                          : Speculation::kAuto;
  inference_options.model_name = model_name;
  inference_options.special_tokens_in_text = special_tokens_in_text;
  inference_options.chat_template =
      ChooseChatTemplate(model_dir, config->model_type, chat_template);
  if (inference_options.chat_template.ok()) {
    LOG(INFO) << "chats are laid out as those of "
              << ChatReleaseName(inference_options.chat_template->release);
  } else {
    LOG(WARNING) << "chats are refused: " << inference_options.chat_template.status().message();
  }
  inference_options.build = build;
  inference_options.on_final = [&](const Final& final) { router_metrics.Observe(final); };
  InferenceService inference(inference_options, tokenizer->get(), &loop, random);
  ClusterService cluster({name, epoch, verifier_address, drafter_address, build}, &loop);

  ServerOptions server_options;
  server_options.listen = service.listen;
  absl::StatusOr<std::unique_ptr<RpcServer>> server =
      RpcServer::Start(server_options, {&inference, &cluster});
  if (!server.ok()) return Fail(server.status());
  loop.Start();
  verifier->Start();
  drafter->Start();
  LOG(INFO) << "router " << name << " listens on " << (*server)->address();

  const auto stuck = Readiness::FromHeartbeat(&loop.heartbeat(), kStuck, "scheduler loop");
  auto readiness = std::make_unique<Readiness>(server->get(), [&] {
    std::string reason = stuck();
    if (reason.empty()) reason = loop.NotReadyReason();
    router_metrics.Update(reason.empty());
    return reason;
  });

  const int code = RunUntilShutdown(
      &signals, std::chrono::seconds(service.drain_seconds), [&](TimePoint deadline) {
        readiness->Drain("shutting down");
        Queue<bool> idle;
        loop.Post(Drain{[&idle] { idle.Push(true); }});
        // A little is left of the limit for those who are cut off to be told.
        const TimePoint cut = deadline - std::chrono::milliseconds(500);
        if (!idle.PopUntil(cut).has_value()) {
          loop.Post(Abandon{"the router is shutting down; resume the stream on another"});
          idle.PopUntil(deadline);
        }
        (*server)->Shutdown(deadline);
        readiness.reset();
        loop.Stop();
        // The verifier sees its stream close.
        verifier.reset();
        drafter.reset();
      });
  return code;
}

}  // namespace
}  // namespace coppice::router

int main(int argc, char** argv) { return coppice::router::Main(argc, argv); }
