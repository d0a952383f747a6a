// What a round costs beyond its two forwards: one sequence over loopback, trees of 17 nodes, as the
// router measures it (time between the starts of two rounds minus the drafter's and the verifier's
// own forward times).
//
//   round_overhead [--generations 20] [--nodes 17] [--undisturbed] [--out DIR]
//
// Six wake-ups in a row are what a busy machine delays most, so the load that was there is
// recorded.  --undisturbed measures once more in the real-time class, which other programs cannot
// hold up; that takes the right to use it (root).
#include <sched.h>
#include <stdlib.h>

#include <cstdio>
#include <string>

#include "bench/record.h"
#include "services/common/flags.h"
#include "tests/integration/cluster.h"

namespace coppice {
namespace {

// One cluster's row; false, having said why, where it did not serve.
bool Measure(int generations, uint32_t nodes, const char* scheduling, bench::Record* record) {
  double load = 0;
  getloadavg(&load, 1);
  coppice::testing::Cluster cluster({});
  if (!cluster.Start()) return false;
  uint64_t rounds = 0;
  double decode_ms = 0;
  for (const auto& prompt : coppice::testing::SpreadPrompts(generations)) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->mutable_ids()->Add(prompt.ids.begin(), prompt.ids.end());
    request.set_max_tokens(256);
    request.set_ignore_eos(true);
    request.set_speculation(v1::SPECULATION_TREE);
    request.set_tree_nodes(nodes);
    const auto got = cluster.Generate(request);
    if (!got.status.ok()) {
      std::fprintf(stderr, "%s\n", got.status.error_message().c_str());
      return false;
    }
    rounds += got.final.speculation().rounds();
    decode_ms += got.final.timing().total_ms() - got.final.timing().ttft_ms();
  }
  const double overhead_us = cluster.State().speculation().round_overhead_us_p50();
  const double round_us = decode_ms * 1e3 / static_cast<double>(rounds);
  record->Add({{"nodes", nodes},
               {"batch", 1},
               {"scheduling", scheduling},
               {"load_average", load},
               {"rounds", rounds},
               {"round_us_mean", round_us},
               {"round_overhead_us_p50", overhead_us}});
  std::printf("%s: %llu rounds of %.0f us; beyond the two forwards, median %.0f us\n", scheduling,
              static_cast<unsigned long long>(rounds), round_us, overhead_us);
  return true;
}

int Main(int argc, char** argv) {
  int generations = 20;
  uint32_t nodes = 17;
  bool undisturbed = false;
  std::string out;
  FlagParser flags("round_overhead", "Measures a round's cost beyond its two forwards.");
  flags.Add("generations", &generations, "generations of 256 tokens")->check(CLI::Range(1, 10000));
  flags.Add("nodes", &nodes, "nodes of each tree")->check(CLI::Range(2, 64));
  flags.AddSwitch("undisturbed", &undisturbed, "once more in the real-time class");
  flags.Add("out", &out, "folder for the record; empty: print it");
  if (const auto code = flags.Parse(argc, argv)) return *code;

  bench::Record record("round_overhead");
  record.AddVersion("grpc", grpc::Version());
  if (!Measure(generations, nodes, "normal", &record)) return 1;
  if (undisturbed) {
    sched_param priority = {};
    priority.sched_priority = 1;
    if (sched_setscheduler(0, SCHED_RR, &priority) != 0) {
      std::perror("--undisturbed: the real-time class cannot be had");
      return 1;
    }
    if (!Measure(generations, nodes, "real-time", &record)) return 1;
  }
  return record.Write(out, "cpu") ? 0 : 1;
}

}  // namespace
}  // namespace coppice

int main(int argc, char** argv) { return coppice::Main(argc, argv); }
