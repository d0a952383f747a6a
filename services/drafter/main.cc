// coppice-drafter: wires flags, model, loop, service and server together.
#include <glog/logging.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "model/drafter.h"
#include "services/common/build_info.h"
#include "services/common/epoch.h"
#include "services/common/flags.h"
#include "services/common/logging.h"
#include "services/common/metrics.h"
#include "services/common/readiness.h"
#include "services/common/server.h"
#include "services/common/shutdown.h"
#include "services/drafter/draft_loop.h"
#include "services/drafter/metrics.h"
#include "services/drafter/service.h"

namespace coppice::drafter {
namespace {

struct Flags {
  std::string drafter;
  std::string model;
  std::string device = "cpu";
  std::string name;
  int window = 4096;
  int max_sequences = 64;
  int max_top_k = 16;
  int tp = 1;
  ServiceFlags service;
};

v1::DrafterInfo MakeInfo(const Flags& flags, const coppice::Drafter& model,
                         const EngineOptions& options, const std::vector<CostSample>& cost) {
  v1::DrafterInfo info;
  info.set_name(flags.name);
  info.set_epoch(RandomEpoch());
  info.set_drafter_fingerprint(model.drafter_fingerprint());
  info.set_embedding_fingerprint(model.embedding_fingerprint());
  const DraftConfig& config = model.config();
  info.set_vocab_size(config.vocab_size);
  info.set_hidden_size(config.hidden_size);
  info.set_block_size(config.block_size);
  for (const int layer : config.target_layer_ids) info.add_target_layer_ids(layer);
  info.set_window(options.window);
  info.set_max_sequences(options.slots);
  info.set_max_top_k(options.max_top_k);
  for (const CostSample& sample : cost) {
    v1::CostPoint* point = info.add_cost();
    point->set_rows(sample.blocks);
    point->set_microseconds(sample.micros);
  }
  info.mutable_build()->set_version(BuildVersion());
  info.mutable_build()->set_git(BuildGitRevision());
  info.mutable_build()->set_device(flags.device);
  return info;
}

absl::Status Run(const Flags& flags, ShutdownSignals* signals, int* exit_code) {
  if (flags.device != "cpu") {
    return absl::UnimplementedError(absl::StrCat(
        "--device ", flags.device, ": this build drafts on the CPU only; use --device cpu"));
  }
  absl::StatusOr<std::unique_ptr<Metrics>> metrics =
      Metrics::Create(flags.service.listen, flags.service.metrics_port);
  if (!metrics.ok()) return metrics.status();

  // The server comes first: a taken port is told before a long load, and health says NOT_SERVING
  // while it lasts.
  DrafterService service;
  ServerOptions server_options;
  server_options.listen = flags.service.listen;
  server_options.max_message_bytes = kFeatureMessageBytes;
  absl::StatusOr<std::unique_ptr<RpcServer>> server = RpcServer::Start(server_options, {&service});
  if (!server.ok()) return server.status();

  DrafterOptions model_options;
  model_options.drafter_dir = flags.drafter;
  model_options.target_dir = flags.model;
  model_options.tp = flags.tp;
  model_options.slots = flags.max_sequences;
  model_options.window = flags.window;
  LOG(INFO) << "loading " << flags.drafter;
  absl::StatusOr<std::unique_ptr<coppice::Drafter>> model = coppice::Drafter::Load(model_options);
  if (!model.ok()) return model.status();

  EngineOptions options;
  options.slots = flags.max_sequences;
  options.window = flags.window;
  options.max_top_k = std::min(flags.max_top_k, (*model)->config().vocab_size);
  const std::vector<CostSample> cost = MeasureDraftCost(model->get(), options, Clock::Real());
  const v1::DrafterInfo info = MakeInfo(flags, **model, options, cost);

  DraftLoop loop(std::move(*model), options, MakeObserver(metrics->get()));
  service.Ready(&loop, info);
  Readiness readiness(
      server->get(),
      Readiness::FromHeartbeat(&loop.heartbeat(), std::chrono::seconds(30), "draft loop"));
  LOG(INFO) << VersionLine("coppice-drafter") << " listens on " << (*server)->address()
            << "; block " << info.block_size() << ", window " << info.window() << ", "
            << info.max_sequences() << " sequences, " << (cost.empty() ? 0 : cost[0].micros)
            << " us a draft";
  *exit_code = RunUntilShutdown(signals, std::chrono::seconds(flags.service.drain_seconds),
                                [&](TimePoint deadline) {
                                  readiness.Drain("shutting down");
                                  // Its streams last as long as their peers do: they would never
                                  // end by themselves.
                                  service.Drain();
                                  (*server)->Shutdown(deadline);
                                  loop.Stop();
                                });
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  ShutdownSignals signals;
  Flags flags;
  flags.name = absl::StrCat("drafter-", getpid());
  flags.service.listen = "127.0.0.1:7002";
  FlagParser parser("coppice-drafter", "Drafts what may come next, position by position.");
  parser.Add("drafter", &flags.drafter, "directory of the draft model")->required();
  parser.Add("model", &flags.model, "directory of its target, whose embedding and lm_head it uses")
      ->required();
  parser.AddChoice("device", &flags.device, {"cpu", "cuda"}, "where to compute");
  parser.Add("tp", &flags.tp, "ranks that share each matrix product")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  parser.Add("name", &flags.name, "what peers and logs call it");
  parser.Add("window", &flags.window, "context positions kept per sequence")
      ->check(CLI::Range(1, 1 << 20));
  parser.Add("max-sequences", &flags.max_sequences, "sequences drafted for at once")
      ->check(CLI::Range(1, 1 << 14));
  parser.Add("max-top-k", &flags.max_top_k, "most candidates per position that may be asked for")
      ->check(CLI::Range(1, 64));
  flags.service.AddTo(&parser);
  if (const auto code = parser.Parse(argc, argv)) return *code;
  InitLogging("coppice-drafter", flags.service.log_level);
  int exit_code = 0;
  if (const absl::Status status = Run(flags, &signals, &exit_code); !status.ok()) {
    std::cerr << "coppice-drafter: " << status.message() << "\n";
    return 1;
  }
  return exit_code;
}

}  // namespace
}  // namespace coppice::drafter

int main(int argc, char** argv) { return coppice::drafter::Main(argc, argv); }
