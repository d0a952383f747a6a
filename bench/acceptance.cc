// What speculation buys on the demo pair, in one run on a real cluster: acceptance length by
// category, and tokens per second, for off, chain, trees of 9, 17 and 33 nodes, and auto.  One
// request at a time.
//
//   acceptance [--prompts 99] [--tokens 128] [--temperature 0] [--tp 1] [--out DIR]
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "bench/record.h"
#include "services/common/flags.h"
#include "tests/integration/cluster.h"

namespace coppice {
namespace {

using bench::Median;
using bench::Record;
using coppice::testing::Cluster;
using coppice::testing::ClusterOptions;
using coppice::testing::DemoPrompt;
using coppice::testing::Generation;

struct Mode {
  const char* name;
  v1::SpeculationMode mode;
  uint32_t nodes;  // 0: not fixed
};
constexpr Mode kModes[] = {{"off", v1::SPECULATION_OFF, 1},    {"chain", v1::SPECULATION_CHAIN, 8},
                           {"tree", v1::SPECULATION_TREE, 9},  {"tree", v1::SPECULATION_TREE, 17},
                           {"tree", v1::SPECULATION_TREE, 33}, {"auto", v1::SPECULATION_AUTO, 0}};

struct Sum {
  uint64_t rounds = 0, committed = 0, tokens = 0;
  double decode_s = 0;
  std::vector<double> itl_ms;
  double acceptance_length() const {
    return rounds == 0 ? 1.0 : static_cast<double>(committed) / rounds;
  }
  double tok_s() const { return decode_s == 0 ? 0 : static_cast<double>(tokens) / decode_s; }
};

int Main(int argc, char** argv) {
  size_t prompts = 99;
  uint32_t tokens = 128;
  float temperature = 0;
  int tp = 1;
  std::string out;
  FlagParser flags("acceptance",
                   "Measures acceptance length and tokens per second by speculation mode.");
  flags.Add("prompts", &prompts, "demo prompts to run")->check(CLI::Range(1, 1000));
  flags.Add("tokens", &tokens, "most tokens per generation")->check(CLI::Range(2, 512));
  flags.Add("temperature", &temperature, "0: argmax")->check(CLI::Range(0.0f, 2.0f));
  flags.Add("tp", &tp, "tensor-parallel ranks of the verifier")->check(CLI::Range(1, 8));
  flags.Add("out", &out, "folder for the record; empty: print it");
  if (const auto code = flags.Parse(argc, argv)) return *code;

  ClusterOptions options;
  options.tp = tp;
  Cluster cluster(options);
  if (!cluster.Start()) return 1;
  const std::vector<DemoPrompt> set = coppice::testing::SpreadPrompts(prompts);
  const auto run = [&](const DemoPrompt& prompt, const Mode& mode) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->mutable_ids()->Add(prompt.ids.begin(), prompt.ids.end());
    request.set_max_tokens(tokens);
    request.set_temperature(temperature);
    request.set_seed(7);
    request.set_speculation(mode.mode);
    if (mode.mode == v1::SPECULATION_TREE) request.set_tree_nodes(mode.nodes);
    return cluster.Generate(request);
  };
  for (const Mode& mode : kModes) run(set[0], mode);  // warm-up

  // Modes alternate within each prompt, so that a noisy neighbour disturbs all alike.
  std::map<std::pair<size_t, std::string>, Sum>
      sums;  // by (mode, category); category "all" over everything
  for (const DemoPrompt& prompt : set) {
    for (size_t m = 0; m < std::size(kModes); ++m) {
      const Generation got = run(prompt, kModes[m]);
      if (!got.status.ok() || !got.contract_error.empty()) {
        std::fprintf(stderr, "%s: %s%s\n", kModes[m].name, got.status.error_message().c_str(),
                     got.contract_error.c_str());
        return 1;
      }
      for (const std::string& category : {prompt.category, std::string("all")}) {
        Sum& sum = sums[{m, category}];
        sum.rounds += got.final.speculation().rounds();
        sum.committed += got.ids.size() - 1;  // the first token came from prefill
        sum.tokens += got.ids.size() - 1;
        sum.decode_s += (got.final.timing().total_ms() - got.final.timing().ttft_ms()) / 1e3;
        sum.itl_ms.push_back(got.final.timing().itl_ms());
      }
    }
  }

  Record record("acceptance");
  record.AddVersion("grpc", grpc::Version());
  const double off = sums[{0, "all"}].tok_s();
  std::printf("%-10s %6s %6s %10s %8s %8s\n", "mode", "nodes", "", "accepted", "tok/s", "x off");
  for (const auto& [key, sum] : sums) {
    const Mode& mode = kModes[key.first];
    nlohmann::ordered_json row = {{"speculation", mode.name}};
    if (mode.nodes > 0) row["nodes"] = mode.nodes;
    row["category"] = key.second;
    row["temperature"] = temperature;
    row["tp"] = tp;
    row["tokens"] = sum.tokens;
    row["rounds"] = sum.rounds;
    row["acceptance_length"] = sum.acceptance_length();
    row["step_ms"] = sum.rounds == 0 ? 0 : sum.decode_s * 1e3 / static_cast<double>(sum.rounds);
    row["itl_ms"] = Median(sum.itl_ms);
    row["tok_s"] = sum.tok_s();
    if (key.second == "all") {
      row["speedup"] = sum.tok_s() / off;
      std::printf("%-10s %6u %6s %10.2f %8.1f %8.2f\n", mode.name, mode.nodes, "",
                  sum.acceptance_length(), sum.tok_s(), sum.tok_s() / off);
    }
    record.Add(std::move(row));
  }
  return record.Write(out, "cpu") ? 0 : 1;
}

}  // namespace
}  // namespace coppice

int main(int argc, char** argv) { return coppice::Main(argc, argv); }
