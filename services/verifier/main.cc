// coppice-verifier: wires flags, target, engine, loop, drafter streams and gRPC together.
#include <glog/logging.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "model/target.h"
#include "services/common/build_info.h"
#include "services/common/epoch.h"
#include "services/common/flags.h"
#include "services/common/logging.h"
#include "services/common/metrics.h"
#include "services/common/readiness.h"
#include "services/common/server.h"
#include "services/common/shutdown.h"
#include "services/verifier/feature_sender.h"
#include "services/verifier/metrics.h"
#include "services/verifier/pool_size.h"
#include "services/verifier/service.h"
#include "services/verifier/step_loop.h"
#include "services/verifier/wire.h"

namespace coppice::verifier {
namespace {

struct Flags {
  std::string model;
  std::string drafter;
  std::string device = "cpu";
  std::string name;
  int tp = 1;
  int page_size = 64;
  int64_t pool_tokens = 0;
  int max_rows = 512;
  int max_sequences = 256;
  double lease_seconds = 10;
  double lora_norm_eps = 0;
  ServiceFlags service;
};

// How long warm-up and the cost table may take.
constexpr auto kMeasureBudget = std::chrono::milliseconds(500);
// A step of many rows may take this long before the loop counts as stuck.
constexpr auto kStuck = std::chrono::seconds(30);

std::string DefaultDrafter(const std::string& model) {
  const std::filesystem::path beside = std::filesystem::path(model) / "drafter";
  std::error_code ignored;
  return std::filesystem::is_directory(beside, ignored) ? beside.string() : "";
}

absl::StatusOr<std::unique_ptr<Target>> LoadTarget(const Flags& flags, ShutdownSignals* signals,
                                                   EngineOptions* engine_options) {
  TargetOptions options;
  options.model_dir = flags.model;
  options.drafter_dir = flags.drafter;
  options.tp = flags.tp;
  options.page_size = flags.page_size;
  options.max_rows = flags.max_rows;
  if (flags.lora_norm_eps > 0) options.lora_norm_eps = flags.lora_norm_eps;

  absl::StatusOr<ModelConfig> config = LoadModelConfig(flags.model);
  if (!config.ok()) return config.status();
  const int64_t bytes_per_token = BytesPerToken(*config, flags.tp, !options.drafter_dir.empty());
  const int64_t tokens =
      flags.pool_tokens > 0
          ? flags.pool_tokens
          : DefaultPoolTokens(bytes_per_token, AvailableMemory(), flags.page_size);
  const int64_t memory = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  absl::StatusOr<int64_t> pages = PoolPages(tokens, flags.page_size, bytes_per_token, memory);
  if (!pages.ok()) return pages.status();
  options.pages = *pages;
  LOG(INFO) << "loading " << flags.model << " and "
            << (options.drafter_dir.empty() ? "no drafter" : options.drafter_dir) << "; pool of "
            << *pages - 1 << " pages of " << flags.page_size << " tokens, " << bytes_per_token
            << " bytes a token";
  int64_t last_tenth = 0;
  options.progress = [&last_tenth, signals](int64_t done, int64_t all) {
    // A long load can be given up.
    if (signals->WaitUntil(std::chrono::steady_clock::now()) != 0) {
      LOG(INFO) << "stopped while loading";
      google::FlushLogFiles(google::GLOG_INFO);
      _exit(0);
    }
    const int64_t tenth = all > 0 ? done * 10 / all : 10;
    if (tenth != last_tenth && all > int64_t{1} << 30) {
      LOG(INFO) << "loaded " << tenth * 10 << " % of " << (all >> 20) << " MiB";
    }
    last_tenth = tenth;
  };
  engine_options->page_size = flags.page_size;
  engine_options->pages = options.pages;
  engine_options->max_rows = flags.max_rows;
  engine_options->max_sequences = flags.max_sequences;
  return Target::Load(options);
}

v1::VerifierInfo MakeInfo(const Flags& flags, const Target& target, const Limits& limits,
                          const Engine::Cost& cost, uint64_t epoch) {
  v1::VerifierInfo info;
  info.set_name(flags.name);
  info.set_epoch(epoch);
  info.set_fingerprint(target.fingerprint());
  info.set_embedding_fingerprint(target.embedding_fingerprint());
  info.set_drafter_fingerprint(target.drafter_fingerprint());
  info.set_vocab_size(limits.vocab_size);
  info.set_hidden_size(target.config().hidden_size);
  info.set_max_position_embeddings(limits.max_position_embeddings);
  info.set_tp(target.tp());
  info.set_max_rows(limits.max_rows);
  info.set_max_tree_nodes(speculation::kMaxNodes);
  info.set_max_sequences(limits.max_sequences);
  SetCost(cost, &info);
  info.mutable_build()->set_version(BuildVersion());
  info.mutable_build()->set_git(BuildGitRevision());
  info.mutable_build()->set_device(flags.device);
  return info;
}

absl::Status Run(Flags flags, ShutdownSignals* signals, int* exit_code) {
  if (flags.device != "cpu") {
    return absl::UnimplementedError(absl::StrCat(
        "--device ", flags.device, ": this build has no CUDA backend; use --device cpu"));
  }
  absl::StatusOr<std::unique_ptr<Metrics>> metrics =
      Metrics::Create(flags.service.listen, flags.service.metrics_port);
  if (!metrics.ok()) return metrics.status();

  // The server comes first: a taken port is told before a long load, and health says NOT_SERVING
  // while it lasts.
  VerifierService service;
  ServerOptions server_options;
  server_options.listen = flags.service.listen;
  absl::StatusOr<std::unique_ptr<RpcServer>> server = RpcServer::Start(server_options, {&service});
  if (!server.ok()) return server.status();
  if (flags.drafter.empty()) flags.drafter = DefaultDrafter(flags.model);
  if (flags.name.empty()) flags.name = "verifier@" + (*server)->address();

  const auto started = std::chrono::steady_clock::now();
  EngineOptions engine_options;
  absl::StatusOr<std::unique_ptr<Target>> target = LoadTarget(flags, signals, &engine_options);
  if (!target.ok()) return target.status();
  const auto loaded = std::chrono::steady_clock::now();

  const uint64_t epoch = RandomEpoch();
  FeatureSenderOptions sender_options;
  sender_options.verifier = flags.name;
  sender_options.verifier_epoch = epoch;
  sender_options.drafter_fingerprint = (*target)->drafter_fingerprint();
  sender_options.embedding_fingerprint = (*target)->embedding_fingerprint();
  sender_options.hidden_size = (*target)->config().hidden_size;
  StepLoop* resender = nullptr;  // set before any sequence is admitted
  FeatureSender sender(sender_options, [&resender](const std::string& drafter, uint64_t sequence,
                                                   int64_t from, uint64_t request) {
    resender->Resend(drafter, sequence, from, request);
  });
  auto engine = std::make_unique<Engine>(*std::move(target), engine_options, &sender);
  absl::StatusOr<Engine::Cost> cost = engine->MeasureCost(kMeasureBudget);
  if (!cost.ok()) return cost.status();
  v1::VerifierInfo info = MakeInfo(flags, engine->target(), engine->limits(), *cost, epoch);
  if (!flags.drafter.empty()) {
    absl::StatusOr<DraftConfig> draft = LoadDraftConfig(flags.drafter);
    if (!draft.ok()) return draft.status();
    for (const int layer : draft->target_layer_ids) info.add_target_layer_ids(layer);
  }

  StepLoopOptions loop_options;
  loop_options.lease_hold =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(flags.lease_seconds));
  StepLoop loop(std::move(engine), loop_options);
  resender = &loop;
  VerifierMetrics verifier_metrics(metrics->get());
  loop.on_step = [&](const StepResult& result) { verifier_metrics.OnStep(result); };
  loop.Start();
  service.Ready(&loop, info);
  // The thread that watches readiness also carries totals and levels to the metrics.
  Readiness readiness(server->get(),
                      [&, beat = Readiness::FromHeartbeat(&loop.heartbeat(), kStuck, "step loop")] {
                        verifier_metrics.Update(loop.snapshot(), sender.counters());
                        return beat();
                      });
  LOG(INFO) << VersionLine("coppice-verifier") << " listens on " << (*server)->address()
            << "; loaded in " << MicrosBetween(started, loaded) / 1e6 << " s, a step of one row "
            << cost->decode.front().microseconds << " us, prefill " << cost->prefill_us_per_token
            << " us a token";

  *exit_code = RunUntilShutdown(
      signals, std::chrono::seconds(flags.service.drain_seconds), [&](TimePoint deadline) {
        const std::string why = "verifier " + flags.name + " is shutting down";
        readiness.Drain("shutting down");
        loop.Drain(why);
        while (loop.snapshot().live_sequences > 0 && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        // The loop ends the router's stream by itself; what remains is cut.
        (*server)->Shutdown(
            std::min(deadline, std::chrono::steady_clock::now() + std::chrono::milliseconds(500)));
        loop.Stop();
        sender.Shutdown();
      });
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  ShutdownSignals signals;
  Flags flags;
  flags.service.listen = "127.0.0.1:7001";
  FlagParser parser("coppice-verifier", "Turns draft trees into true tokens.");
  parser.Add("model", &flags.model, "directory of the target model")->required();
  parser.Add("drafter", &flags.drafter,
             "directory of its drafter, whose fc projects the features sent to drafters; "
             "empty: MODEL/drafter where that exists");
  parser.AddChoice("device", &flags.device, {"cpu", "cuda"}, "where to compute");
  parser.Add("tp", &flags.tp, "ranks that share each matrix product")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  parser.Add("name", &flags.name, "what peers and logs call it; empty: verifier@ADDRESS");
  parser.Add("page-size", &flags.page_size, "tokens in a page of the KV pool")
      ->check(CLI::Range(1, 64));
  parser
      .Add("pool-tokens", &flags.pool_tokens,
           "tokens the KV pool holds; 0: 65536, or what fits into a quarter of the memory that "
           "is available")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  parser
      .Add("max-rows", &flags.max_rows, "rows of one step, tree nodes and prefill tokens together")
      ->check(CLI::Range(1, 1 << 16));
  parser.Add("max-sequences", &flags.max_sequences, "sequences known at once")
      ->check(CLI::Range(1, 1 << 16));
  parser
      .Add("lease-seconds", &flags.lease_seconds,
           "how long sequences are kept for a router whose stream broke")
      ->check(CLI::Range(0.0, 3600.0));
  parser
      .Add("lora-norm-eps", &flags.lora_norm_eps,
           "epsilon of q_a_layernorm and kv_a_layernorm, on which the reference implementations "
           "disagree; 0: the model's rms_norm_eps; transformers uses 1e-6")
      ->check(CLI::Range(0.0, 1.0));
  flags.service.AddTo(&parser);
  if (const auto code = parser.Parse(argc, argv)) return *code;
  InitLogging("coppice-verifier", flags.service.log_level);
  int exit_code = 0;
  if (const absl::Status status = Run(flags, &signals, &exit_code); !status.ok()) {
    std::cerr << "coppice-verifier: " << status.message() << "\n";
    return 1;
  }
  return exit_code;
}

}  // namespace
}  // namespace coppice::verifier

int main(int argc, char** argv) { return coppice::verifier::Main(argc, argv); }
