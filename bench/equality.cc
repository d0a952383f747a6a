// Losslessness, shown on a real cluster: for every (prompt, temperature, seed) the token ids are
// bitwise the same with speculation off, chain and trees of 9, 17 and 33 nodes, alone and 8 at
// once, at TP1 and TP8.
//
//   equality [--prompts 100] [--tokens 64] [--out DIR]      exit 1 on the first grid with a
//   difference
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "bench/record.h"
#include "services/common/flags.h"
#include "tests/integration/cluster.h"

namespace coppice {
namespace {

using bench::Record;
using coppice::testing::Cluster;
using coppice::testing::ClusterOptions;
using coppice::testing::DemoPrompt;
using coppice::testing::Generation;
using v1::GenerateRequest;

struct Mode {
  const char* name;
  v1::SpeculationMode mode;
  uint32_t nodes;
};
constexpr Mode kModes[] = {{"off", v1::SPECULATION_OFF, 1},
                           {"chain", v1::SPECULATION_CHAIN, 8},
                           {"tree", v1::SPECULATION_TREE, 9},
                           {"tree", v1::SPECULATION_TREE, 17},
                           {"tree", v1::SPECULATION_TREE, 33}};

struct Draw {
  float temperature;
  uint64_t seed;
};
constexpr Draw kDraws[] = {{0.0f, 1}, {0.8f, 1}, {0.8f, 2}, {0.8f, 3}};

struct Case {
  size_t prompt;
  size_t draw;
  size_t mode;
};

struct Tally {
  uint64_t generations = 0;
  uint64_t tokens = 0;
  uint64_t differences = 0;
  std::map<size_t, std::pair<uint64_t, uint64_t>> drafted_accepted;  // by mode
};

class Grid {
 public:
  Grid(std::vector<DemoPrompt> prompts, uint32_t tokens)
      : prompts_(std::move(prompts)), tokens_(tokens) {
    for (size_t p = 0; p < prompts_.size(); ++p) {
      for (size_t d = 0; d < std::size(kDraws); ++d) {
        for (size_t m = 0; m < std::size(kModes); ++m) cases_.push_back({p, d, m});
      }
    }
  }

  // Runs every case on `cluster`, `at_once` at a time.
  Tally Run(const Cluster& cluster, int at_once) {
    Tally tally;
    std::mutex mutex;
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < at_once; ++t) {
      threads.emplace_back([&] {
        for (size_t i = next++; i < cases_.size(); i = next++) {
          const Case& c = cases_[i];
          GenerateRequest request;
          request.mutable_token_ids()->mutable_ids()->Add(prompts_[c.prompt].ids.begin(),
                                                          prompts_[c.prompt].ids.end());
          request.set_max_tokens(tokens_);
          request.set_ignore_eos(true);
          request.set_temperature(kDraws[c.draw].temperature);
          request.set_seed(kDraws[c.draw].seed);
          request.set_speculation(kModes[c.mode].mode);
          if (kModes[c.mode].mode == v1::SPECULATION_TREE)
            request.set_tree_nodes(kModes[c.mode].nodes);
          const Generation got = cluster.Generate(request);
          std::lock_guard<std::mutex> lock(mutex);
          Compare(c, got, &tally);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return tally;
  }

 private:
  void Compare(const Case& c, const Generation& got, Tally* tally) {
    ++tally->generations;
    tally->tokens += got.ids.size();
    auto& [drafted, accepted] = tally->drafted_accepted[c.mode];
    drafted += got.final.speculation().drafted();
    accepted += got.final.speculation().accepted();
    std::string wrong;
    if (!got.status.ok()) {
      wrong = "failed: " + got.status.error_message();
    } else if (!got.contract_error.empty()) {
      wrong = got.contract_error;
    } else if (got.ids.size() != tokens_) {
      wrong = "gave " + std::to_string(got.ids.size()) + " tokens";
    } else {
      const auto [it, first] = reference_.try_emplace({c.prompt, c.draw}, got.ids);
      if (!first && it->second != got.ids) {
        const size_t at = std::mismatch(got.ids.begin(), got.ids.end(), it->second.begin()).first -
                          got.ids.begin();
        wrong = "differs from token " + std::to_string(at) + " on";
      }
    }
    if (wrong.empty()) return;
    if (++tally->differences <= 5) {
      std::fprintf(stderr, "prompt %zu (%s), T %.1f, seed %d, %s %u: %s\n", c.prompt,
                   prompts_[c.prompt].category.c_str(), kDraws[c.draw].temperature,
                   static_cast<int>(kDraws[c.draw].seed), kModes[c.mode].name, kModes[c.mode].nodes,
                   wrong.c_str());
    }
  }

  const std::vector<DemoPrompt> prompts_;
  const uint32_t tokens_;
  std::vector<Case> cases_;
  std::map<std::pair<size_t, size_t>, std::vector<uint32_t>> reference_;  // by (prompt, draw)
};

int Main(int argc, char** argv) {
  size_t prompts = 100;
  uint32_t tokens = 64;
  std::string out;
  FlagParser flags("equality",
                   "Compares token ids over speculation modes, batching and tensor parallelism.");
  flags.Add("prompts", &prompts, "demo prompts to run")->check(CLI::Range(1, 1000));
  flags.Add("tokens", &tokens, "tokens per generation")->check(CLI::Range(1, 512));
  flags.Add("out", &out, "folder for the record; empty: print it");
  if (const auto code = flags.Parse(argc, argv)) return *code;

  Record record("equality");
  record.AddVersion("grpc", grpc::Version());
  record.Note("grid", {{"prompts", prompts},
                       {"tokens", tokens},
                       {"speculation", {"off", "chain", "tree 9", "tree 17", "tree 33"}},
                       {"draws", {"T 0", "T 0.8 seed 1", "T 0.8 seed 2", "T 0.8 seed 3"}}});
  Grid grid(coppice::testing::SpreadPrompts(prompts), tokens);
  bool good = true;
  for (int tp : {1, 8}) {
    ClusterOptions options;
    options.tp = tp;
    Cluster cluster(options);
    if (!cluster.Start()) return 1;
    for (int at_once : {1, 8}) {
      const auto start = std::chrono::steady_clock::now();
      Tally tally = grid.Run(cluster, at_once);
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      for (const auto& [mode, counts] : tally.drafted_accepted) {
        // A grid in which nothing was drafted or accepted would show nothing.
        if (kModes[mode].mode != v1::SPECULATION_OFF && (counts.first == 0 || counts.second == 0)) {
          std::fprintf(stderr, "%s %u: nothing was drafted or accepted\n", kModes[mode].name,
                       kModes[mode].nodes);
          ++tally.differences;
        }
      }
      std::printf("TP%d, %d at once: %llu generations, %llu tokens, %llu differ (%.0f s)\n", tp,
                  at_once, static_cast<unsigned long long>(tally.generations),
                  static_cast<unsigned long long>(tally.tokens),
                  static_cast<unsigned long long>(tally.differences), seconds);
      std::fflush(stdout);
      record.Add({{"tp", tp},
                  {"batch", at_once},
                  {"generations", tally.generations},
                  {"tokens", tally.tokens},
                  {"differences", tally.differences},
                  {"seconds", seconds}});
      good = good && tally.differences == 0;
    }
  }
  return record.Write(out, "cpu") && good ? 0 : 1;
}

}  // namespace
}  // namespace coppice

int main(int argc, char** argv) { return coppice::Main(argc, argv); }
