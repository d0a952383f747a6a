// Times the verify kernel over a grid of trees and contexts, beside the roofs of this GPU and the
// design it replaces, and writes a record (docs/architecture.md, section 11).
//
//   verify_kernel targets         the figures that the kernel was built to reach, as a table
//   verify_kernel grid [--full]   nodes × context × batch × page × type, ragged, both page orders
//   verify_kernel sweep           every node count from 1 to 64
//   verify_kernel baseline        the per-row design, four steps
//   verify_kernel accuracy        what the FP8 cache loses
//   verify_kernel prefill         chunks of new tokens in the expanded form
//   verify_kernel all             everything above
//   verify_kernel cell --nodes 9 --context 65536 …
//
// Method: a CUDA graph of one schedule and the layers that take 4 ms (in grid and sweep 2 ms), at
// most 61 as in a model, over caches that together exceed four times the L2, so that each layer
// finds its cache cold; median of 50 replays, divided by the layers. Schedule and combine are
// inside.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/record.h"
#include "bench/verify_kernel/per_row_baseline.h"
#include "bench/verify_kernel/roofs.h"
#include "kernels/cuda/mla_prefill.h"
#include "kernels/cuda/mla_problem.h"
#include "kernels/cuda/mla_reference.h"

namespace coppice::bench {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kMostPositions = 900000;  // cells over it are left out and listed

struct Cell {
  int nodes = 9;
  int context = 65536;
  int batch = 1;
  int page = 64;
  int heads = 8;
  coppice_mla_cache_type type = COPPICE_MLA_BF16;
  coppice_mla_instance instance = COPPICE_MLA_AUTO;
  bool ragged = false;
  bool permuted = true;
  mla::TreeKind tree = mla::TreeKind::kRandom;
  int64_t table_padding = 0;
  int max_splits = 0;
  int captured_context = 0;  // > 0: captured at this context, replayed at `context`
};

struct Figure {
  std::string error;  // empty, or why there is none
  double us = 0;
  double us_least = 0;
  double gbps = 0;
  double tflops = 0;
  double relative_error = 0;
};

const char* Name(mla::TreeKind tree) {
  return tree == mla::TreeKind::kRandom  ? "tree"
         : tree == mla::TreeKind::kChain ? "chain"
                                         : "root_only";
}

const char* Name(coppice_mla_instance instance) {
  return instance == COPPICE_MLA_COMMON         ? "common"
         : instance == COPPICE_MLA_COMMON_SMALL ? "common_small"
         : instance == COPPICE_MLA_HOPPER       ? "hopper"
                                                : "auto";
}

// Uniform: `context` for all.  Ragged: log-uniform from context / 16 to context, the first request
// the longest.
std::vector<int32_t> Contexts(const Cell& cell) {
  std::vector<int32_t> contexts(cell.batch, cell.context);
  std::mt19937 random(7);
  for (int b = 1; b < cell.batch && cell.ragged; ++b) {
    const double u = std::uniform_real_distribution<>(0, 1)(random);
    contexts[b] = std::max(1, static_cast<int>(cell.context * std::pow(16.0, -u)));
  }
  return contexts;
}

int64_t Positions(const Cell& cell) {
  int64_t sum = 0;
  for (int32_t context : Contexts(cell)) sum += context + cell.nodes;
  return sum;
}

int64_t L2Bytes() {
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, 0);
  return bytes;
}

// About how long a replay takes, in ms: its launch does not count, and one schedule is shared by as
// many layers as a model has.
double replay_ms = 4;

// Median and least time of one layer, in µs; false where a CUDA call failed.  `schedule` runs once
// a replay.  A replay has at least `layers` layers, and as many as take replay_ms, at most 61.
bool TimeLayers(int layers, const std::function<void(cudaStream_t)>& schedule,
                const std::function<void(cudaStream_t, int)>& layer, Figure* figure,
                const std::function<void()>& before_replay = nullptr) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin, end;
  cudaStreamCreate(&stream);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float ms = 0;
  schedule(stream);
  layer(stream, 0);  // loads what is loaded lazily
  cudaEventRecord(begin, stream);
  for (int i = 0; i < 2; ++i) layer(stream, i);
  cudaEventRecord(end, stream);
  cudaEventSynchronize(end);
  cudaEventElapsedTime(&ms, begin, end);
  layers = std::max(layers, std::min(61, static_cast<int>(2 * replay_ms / std::max(ms, 1e-3f))));
  std::vector<double> times;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  schedule(stream);
  for (int i = 0; i < layers; ++i) layer(stream, i);
  if (cudaStreamEndCapture(stream, &graph) == cudaSuccess &&
      cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess) {
    if (before_replay) before_replay();
    for (int i = -3; i < 50; ++i) {
      cudaEventRecord(begin, stream);
      cudaGraphLaunch(executable, stream);
      cudaEventRecord(end, stream);
      if (cudaEventSynchronize(end) != cudaSuccess) break;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 0) times.push_back(ms * 1e3 / layers);
    }
  }
  const cudaError_t status = cudaGetLastError();
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  if (status != cudaSuccess || times.size() < 50) {
    figure->error = cudaGetErrorString(status);
    return false;
  }
  figure->us = Median(times);
  figure->us_least = *std::min_element(times.begin(), times.end());
  return true;
}

mla::ProblemOptions Options(const Cell& cell) {
  mla::ProblemOptions o;
  o.shape.batch = cell.batch;
  o.shape.nodes = cell.nodes;
  o.shape.heads = cell.heads;
  o.shape.page_size = cell.page;
  o.shape.cache_type = cell.type;
  o.shape.instance = cell.instance;
  o.shape.max_splits = cell.max_splits;
  o.shape.softmax_scale = mla::kProblemScale;
  o.contexts = Contexts(cell);
  o.tree = cell.tree;
  o.permuted = cell.permuted;
  o.table_padding = cell.table_padding;
  o.pooled = true;
  const int64_t row = cell.type == COPPICE_MLA_BF16 ? 1152 : 656;
  o.caches = static_cast<int>(std::clamp<int64_t>(
      (4 * L2Bytes() + Positions(cell) * row - 1) / (Positions(cell) * row), 1, 64));
  return o;
}

// bf16 values of about unit size.
void FillRandom(void* data, size_t count) {
  std::vector<uint16_t> host(std::min<size_t>(count, 1 << 20));
  std::mt19937 random(3);
  for (uint16_t& value : host) value = 0x3F00 + random() % 0x80 + random() % 2 * 0x8000;
  for (size_t at = 0; at < count; at += host.size()) {
    cudaMemcpy(static_cast<uint16_t*>(data) + at, host.data(),
               2 * std::min(host.size(), count - at), cudaMemcpyHostToDevice);
  }
}

void FillRates(const Cell& cell, Figure* figure) {
  const double positions = static_cast<double>(Positions(cell));
  const double row = cell.type == COPPICE_MLA_BF16 ? 1152 : 656;
  figure->gbps = positions * row / figure->us / 1e3;
  figure->tflops = 2.0 * (COPPICE_MLA_ROW + COPPICE_MLA_LATENT) * cell.heads * cell.nodes *
                   positions / figure->us / 1e6;
}

// The error of eight rows of cache 0 against the reference.
double ErrorOfSomeRows(const mla::Problem& problem) {
  const std::vector<mla::RowId> all = mla::LiveRows(problem.shape(), problem.node_counts());
  std::vector<mla::RowId> rows;
  for (int i = 0; i < 8; ++i) rows.push_back(all[(all.size() - 1) * i / 7]);
  std::vector<mla::RowError> errors;
  if (mla::CompareWithReference(problem.shape(), problem.tensors(), rows, nullptr, 0, &errors) !=
      cudaSuccess) {
    return NAN;
  }
  return mla::RelativeError(errors);
}

Figure Measure(const Cell& cell) {
  Figure figure;
  mla::Problem problem(Options(cell));
  figure.error = problem.error();
  if (!figure.error.empty()) return figure;
  const int caches = Options(cell).caches;
  coppice_mla_status status = COPPICE_MLA_OK;
  const auto keep = [&](coppice_mla_status s) {
    if (s != COPPICE_MLA_OK) status = s;
  };
  if (cell.captured_context > 0) {
    problem.SetLengths(std::vector<int32_t>(cell.batch, cell.captured_context),
                       problem.node_counts());
  }
  const bool timed = TimeLayers(
      caches, [&](cudaStream_t stream) { keep(problem.Schedule(stream)); },
      [&](cudaStream_t stream, int i) { keep(problem.Run(stream, i % caches)); }, &figure,
      [&] {
        if (cell.captured_context > 0) {
          problem.SetLengths(std::vector<int32_t>(cell.batch, cell.context), problem.node_counts());
        }
      });
  if (status != COPPICE_MLA_OK) figure.error = coppice_mla_error();
  if (!timed || !figure.error.empty()) return figure;
  FillRates(cell, &figure);
  figure.relative_error = ErrorOfSomeRows(problem);
  if (!(figure.relative_error <= 2.5e-3)) {
    figure.error = "wrong: relative error " + std::to_string(figure.relative_error);
  }
  return figure;
}

Figure MeasureBaseline(const Cell& cell, int splits, bool wide) {
  Figure figure;
  mla::Problem problem(Options(cell));
  figure.error = problem.error();
  if (!figure.error.empty()) return figure;
  const int caches = Options(cell).caches;
  void* workspace = nullptr;
  if (cudaMalloc(&workspace, PerRowWorkspaceBytes(problem.shape(), splits)) != cudaSuccess) {
    figure.error = "no memory for the partial results";
    return figure;
  }
  const bool timed = TimeLayers(
      caches, [](cudaStream_t) {},
      [&](cudaStream_t stream, int i) {
        PerRowAttention(problem.shape(), problem.tensors(i % caches), splits, wide, workspace,
                        stream);
      },
      &figure);
  if (timed) {
    FillRates(cell, &figure);
    figure.relative_error = ErrorOfSomeRows(problem);
    if (!(figure.relative_error <= 2.5e-3)) {
      figure.error = "wrong: relative error " + std::to_string(figure.relative_error);
    }
  }
  cudaFree(workspace);
  return figure;
}

class Bench {
 public:
  Bench(Record* record, const Cell& base) : record_(record), base_(base) {
    roofs_ = MeasureRoofs();
    record_->Note("roofs", {{"copy_gbps", std::round(roofs_.copy_gbps)},
                            {"read_gbps", std::round(roofs_.read_gbps)},
                            {"mma_tflops", std::round(roofs_.mma_tflops)},
                            {"wgmma_tflops", std::round(roofs_.wgmma_tflops)}});
    std::printf("roofs: copy %.0f GB/s, read %.0f GB/s, mma.sync %.0f TFLOPS, wgmma %.0f TFLOPS\n",
                roofs_.copy_gbps, roofs_.read_gbps, roofs_.mma_tflops, roofs_.wgmma_tflops);
  }

  Cell With(const std::function<void(Cell&)>& change) const {
    Cell cell = base_;
    change(cell);
    return cell;
  }

  // Measures and adds a row.
  Figure Row(const std::string& kind, const Cell& cell) {
    return Add(kind, cell, Measure(cell), [](ordered_json&) {});
  }

  Figure Add(const std::string& kind, const Cell& cell, const Figure& figure,
             const std::function<void(ordered_json&)>& more) {
    ordered_json row = {{"kind", kind},
                        {"nodes", cell.nodes},
                        {"context", cell.context},
                        {"batch", cell.batch},
                        {"page", cell.page},
                        {"heads", cell.heads},
                        {"kv_dtype", cell.type == COPPICE_MLA_BF16 ? "bf16" : "fp8"},
                        {"instance", Name(cell.instance)},
                        {"lengths", cell.ragged ? "ragged" : "uniform"},
                        {"page_order", cell.permuted ? "permuted" : "sequential"},
                        {"tree", Name(cell.tree)}};
    if (cell.table_padding > 0) row["table_padding"] = cell.table_padding;
    if (cell.max_splits > 0) row["max_splits"] = cell.max_splits;
    if (cell.captured_context > 0) row["captured_context"] = cell.captured_context;
    more(row);
    if (!figure.error.empty()) {
      row["error"] = figure.error;
      ++failures_;
    } else {
      row["us"] = Round(figure.us);
      row["us_least"] = Round(figure.us_least);
      row["gbps"] = Round(figure.gbps);
      row["tflops"] = Round(figure.tflops);
      row["copy_share"] = Round(figure.gbps / roofs_.copy_gbps);
      row["mma_share"] = Round(figure.tflops / roofs_.mma_tflops);
      row["relative_error"] = figure.relative_error;
    }
    std::printf("%-10s n %2d ctx %6d b %2d page %2d %s %s %s %-9s%s: ", kind.c_str(), cell.nodes,
                cell.context, cell.batch, cell.page,
                cell.type == COPPICE_MLA_BF16 ? "bf16" : "fp8 ",
                cell.ragged ? "ragged " : "uniform", cell.permuted ? "perm" : "seq ",
                Name(cell.tree), Extra(row).c_str());
    if (figure.error.empty()) {
      std::printf("%8.2f us %6.0f GB/s %6.1f TFLOPS  error %.1e\n", figure.us, figure.gbps,
                  figure.tflops, figure.relative_error);
    } else {
      std::printf("%s\n", figure.error.c_str());
    }
    std::fflush(stdout);
    record_->Add(std::move(row));
    return figure;
  }

  // A line of the table of targets.  `figure` is NaN where it could not be measured.
  void Target(const std::string& what, double target, bool at_least, double figure,
              const std::string& unit) {
    const bool met = at_least ? figure >= target : figure <= target;
    missed_ += !met;
    record_->Add({{"kind", "target"},
                  {"what", what},
                  {"unit", unit},
                  {at_least ? "at_least" : "at_most", target},
                  {"figure", std::isnan(figure) ? ordered_json() : ordered_json(Round(figure))},
                  {"met", met}});
    char line[200];
    std::snprintf(line, sizeof(line), "%-58s %s %8.3f %-7s %9.3f  %s\n", what.c_str(),
                  at_least ? ">=" : "<=", target, unit.c_str(), figure, met ? "met" : "NOT MET");
    table_ += line;
  }

  void Targets();
  void Grid(bool full, double seconds);
  void Sweep(const std::vector<int>& contexts);
  void Baseline();
  void Accuracy();
  double Prefill(int tokens, int context, coppice_mla_cache_type type);
  void Prefills();

  const std::string& table() const { return table_; }
  int failures() const { return failures_; }
  const Roofs& roofs() const { return roofs_; }

 private:
  static double Round(double value) { return std::round(value * 1000) / 1000; }
  static std::string Extra(const ordered_json& row) {
    std::string text;
    for (const char* key :
         {"baseline", "splits", "table_padding", "max_splits", "captured_context"}) {
      if (row.contains(key)) text += std::string(" ") + key + " " + row[key].dump();
    }
    return text;
  }

  Record* record_;
  Cell base_;
  Roofs roofs_;
  std::string table_;
  int failures_ = 0;
  int missed_ = 0;
};

double Us(const Figure& f) { return f.error.empty() ? f.us : NAN; }
double Gbps(const Figure& f) { return f.error.empty() ? f.gbps : NAN; }
double Tflops(const Figure& f) { return f.error.empty() ? f.tflops : NAN; }

void Bench::Targets() {
  const auto cell = [&](int nodes, int context, int batch = 1) {
    return With([&](Cell& c) {
      c.nodes = nodes;
      c.context = context;
      c.batch = batch;
      c.page = 64;
    });
  };
  for (int nodes : {1, 2, 3, 4}) {
    Target(std::to_string(nodes) + " nodes, 200k", 3000, true,
           Gbps(Row("target", cell(nodes, 200000))), "GB/s");
  }
  Target("8 nodes, 200k", 2400, true, Gbps(Row("target", cell(8, 200000))), "GB/s");
  const Figure nine = Row("target", cell(9, 65536));
  Target("9 nodes, 65k", 45, false, Us(nine), "us");
  const Figure most = Row("target", cell(64, 65536));
  Target("64 nodes, 65k", 300, true, Tflops(most), "TFLOPS");
  Target("64 nodes, 65k (stretch)", 500, true, Tflops(most), "TFLOPS");
  Target("9 nodes, 4k", 12, false, Us(Row("target", cell(9, 4096))), "us");
  for (int batch : {8, 32}) {
    const std::string at = ", 16k, batch " + std::to_string(batch);
    Target("9 nodes" + at, 300, true, Tflops(Row("target", cell(9, 16384, batch))), "TFLOPS");
    for (int nodes : {1, 4}) {
      Target(std::to_string(nodes) + " nodes" + at + ", share of copy", 0.7, true,
             Gbps(Row("target", cell(nodes, 16384, batch))) / roofs_.copy_gbps, "");
    }
  }
  // Ratios of nearly equal times: each cell twice, in turn, and the lesser median of each.
  const auto in_turn = [&](const std::string& kind, const std::vector<Cell>& cells) {
    std::vector<double> times(cells.size(), INFINITY);
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t i = 0; i < cells.size(); ++i) {
        const double us = Us(Row(kind, cells[i]));
        times[i] = std::isnan(us) ? NAN : std::min(times[i], us);
      }
    }
    return times;
  };
  for (int context : {16384, 65536, 200000}) {
    for (int nodes : {1, 9, 64}) {
      const Cell page64 = cell(nodes, context);
      Cell page1 = page64;
      page1.page = 1;
      const std::vector<double> times = in_turn("page", {page64, page1});
      Target("page 1 / page 64, " + std::to_string(nodes) + " nodes, " + std::to_string(context),
             1.05, false, times[1] / times[0], "");
    }
  }
  for (int context : {16384, 65536}) {
    for (int nodes : {9, 64}) {
      std::vector<Cell> cells(3, cell(nodes, context));
      cells[1].tree = mla::TreeKind::kChain;
      cells[2].tree = mla::TreeKind::kRootOnly;
      const std::vector<double> times = in_turn("tree", cells);
      Target(
          "slowest / fastest mask, " + std::to_string(nodes) + " nodes, " + std::to_string(context),
          1.02, false,
          *std::max_element(times.begin(), times.end()) /
              *std::min_element(times.begin(), times.end()),
          "");
    }
  }
  {
    Cell one = cell(9, 200000);
    const double fresh = Us(Row("capture", one));
    one.captured_context = 4096;
    Target("captured at 4k / at 200k, 9 nodes, 200k", 1.1, false, Us(Row("capture", one)) / fresh,
           "");
  }
  {
    Cell one = cell(9, 65536, 8);
    const double tight = Us(Row("table", one));
    one.table_padding = 65536;
    Target("wide page table / tight, 9 nodes, 65k, batch 8", 1.02, false,
           Us(Row("table", one)) / tight, "");
  }
  Target("expanded prefill, 2048 tokens on 32k", 250, true, Prefill(2048, 32768, COPPICE_MLA_BF16),
         "TFLOPS");
}

void Bench::Sweep(const std::vector<int>& contexts) {
  replay_ms = 2;
  for (int context : contexts) {
    double previous = 0, worst = 0;
    int worst_at = 0;
    bool met = true;
    for (int nodes = 1; nodes <= 64; ++nodes) {
      const double us = Us(Row("sweep", With([&](Cell& c) {
                                 c.nodes = nodes;
                                 c.context = context;
                                 c.batch = 1;
                                 c.page = 64;
                               })));
      if (nodes > 1) {
        const int before = nodes - 1;
        const double allowed = 1 + 1.1 / ((before + 7) / 8);
        if (!(us / previous <= allowed)) met = false;
        if (us / previous / allowed > worst) {
          worst = us / previous / allowed;
          worst_at = before;
        }
      }
      previous = us;
    }
    Target("t(n+1)/t(n) over its bound, n = 1 ... 63, worst at n = " + std::to_string(worst_at) +
               ", " + std::to_string(context),
           1, false, met ? worst : std::max(worst, 1.001), "");
  }
}

void Bench::Grid(bool full, double seconds) {
  replay_ms = 2;
  ordered_json left_out = ordered_json::array();
  int skipped = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int context : {4096, 16384, 65536, 200000}) {
    for (int batch : {1, 8, 32}) {
      if (static_cast<int64_t>(context) * batch > kMostPositions) {
        left_out.push_back({{"context", context}, {"batch", batch}});
        continue;
      }
      for (coppice_mla_cache_type type : {COPPICE_MLA_BF16, COPPICE_MLA_FP8}) {
        for (int page : {1, 16, 64}) {
          for (bool permuted : {true, false}) {
            for (bool ragged : {false, true}) {
              if (ragged && batch == 1) continue;  // a batch of one has one length
              // The short grid varies one thing at a time from page 64, permuted, uniform.
              if (!full && (page != 64) + !permuted + ragged > 1) continue;
              for (int nodes : {1, 4, 8, 9, 16, 17, 33, 64}) {
                if (!full && (page != 64 || !permuted) && nodes != 1 && nodes != 9 && nodes != 64) {
                  continue;
                }
                const std::chrono::duration<double> elapsed =
                    std::chrono::steady_clock::now() - begin;
                if (elapsed.count() > seconds) {
                  ++skipped;
                  continue;
                }
                Row("grid", With([&](Cell& c) {
                      c.nodes = nodes;
                      c.context = context;
                      c.batch = batch;
                      c.type = type;
                      c.page = page;
                      c.permuted = permuted;
                      c.ragged = ragged;
                    }));
              }
            }
          }
        }
      }
    }
  }
  record_->Note("left_out_over_900k_tokens", left_out);
  if (skipped > 0) {
    std::printf("grid: %d cells left out after %.0f s\n", skipped, seconds);
    record_->Note("left_out_for_time", skipped);
  }
}

void Bench::Baseline() {
  for (int context : {4096, 65536}) {
    const Cell cell = With([&](Cell& c) {
      c.nodes = 9;
      c.context = context;
      c.batch = 1;
      c.page = 64;
      c.type = COPPICE_MLA_BF16;
    });
    const double ours = Us(Row("baseline", cell));
    double best = NAN;
    for (bool wide : {false, true}) {
      for (int splits : {16, 64}) {
        best =
            Us(Add("baseline", cell, MeasureBaseline(cell, splits, wide), [&](ordered_json& row) {
              row["instance"] = "none";
              row["baseline"] = wide ? "per row, 128-bit loads" : "per row, scalar loads";
              row["splits"] = splits;
            }));
      }
    }
    if (context == 65536) {
      Target("per-row design (128-bit, 64 splits) / ours, 9 nodes, 65k", 25, true, best / ours, "");
    }
  }
}

void Bench::Accuracy() {
  for (int context : {1000, 16384, 65536}) {
    Cell cell = With([&](Cell& c) {
      c.nodes = 9;
      c.context = context;
      c.batch = 1;
      c.page = 64;
      c.type = COPPICE_MLA_BF16;
    });
    mla::Problem exact(Options(cell));  // the same values before they were rounded to e4m3
    cell.type = COPPICE_MLA_FP8;
    mla::Problem fp8(Options(cell));
    if (!exact.error().empty() || !fp8.error().empty()) continue;
    if (fp8.Schedule() != COPPICE_MLA_OK || fp8.Run() != COPPICE_MLA_OK) {
      std::printf("accuracy: %s\n", coppice_mla_error());
      continue;
    }
    const std::vector<mla::RowId> rows = mla::LiveRows(exact.shape(), exact.node_counts());
    coppice_mla_tensors tensors = exact.tensors();
    tensors.output = fp8.tensors().output;
    tensors.lse = fp8.tensors().lse;
    std::vector<mla::RowError> to_bf16, to_fp8;
    mla::CompareWithReference(exact.shape(), tensors, rows, nullptr, 0, &to_bf16);
    mla::CompareWithReference(fp8.shape(), fp8.tensors(), rows, nullptr, 0, &to_fp8);
    double lse = 0;
    for (const mla::RowError& e : to_bf16) lse = std::max(lse, e.lse_difference);
    std::printf(
        "accuracy   fp8, 9 nodes, context %6d: error %.2e against the bf16 cache "
        "(log-sum-exp off by at most %.1e), %.2e against its own values\n",
        context, mla::RelativeError(to_bf16), lse, mla::RelativeError(to_fp8));
    record_->Add({{"kind", "accuracy"},
                  {"nodes", 9},
                  {"context", context},
                  {"kv_dtype", "fp8"},
                  {"instance", Name(cell.instance)},
                  {"relative_error_to_bf16_cache", mla::RelativeError(to_bf16)},
                  {"lse_difference_to_bf16_cache", lse},
                  {"relative_error", mla::RelativeError(to_fp8)}});
  }
}

// TFLOPS of a chunk of new tokens on a cached prefix; NaN where it failed.  FLOPs are those of
// attention alone, 2 · (192 + 128) per query, visible key and head; with the rebuilding of keys and
// values they are given beside.
double Bench::Prefill(int tokens, int context, coppice_mla_cache_type type) {
  Cell cell = With([&](Cell& c) {
    c.nodes = 1;
    c.context = context + tokens - 1;
    c.batch = 1;
    c.page = 64;
    c.type = type;
  });
  mla::Problem problem(Options(cell));
  const int heads = cell.heads;
  coppice_mla_prefill_shape shape = {};
  shape.tokens = tokens;
  shape.heads = heads;
  shape.page_size = cell.page;
  shape.max_context = context;
  shape.cache_type = type;
  shape.softmax_scale = 2.5f / 13.86f;
  size_t bytes = 0;
  if (!problem.error().empty() || coppice_mla_prefill_workspace(&shape, &bytes) != COPPICE_MLA_OK) {
    std::printf("prefill: %s\n", coppice_mla_prefill_error());
    ++failures_;
    return NAN;
  }
  std::vector<void*> allocations;
  const auto allocate = [&](size_t size, bool random) {
    void* data = nullptr;
    if (cudaMalloc(&data, size) != cudaSuccess) return data;
    allocations.push_back(data);
    if (random) FillRandom(data, size / 2);
    return data;
  };
  const size_t rows = static_cast<size_t>(tokens) * heads;
  coppice_mla_prefill_tensors t = {};
  t.query = allocate(rows * COPPICE_MLA_QUERY * 2, true);
  t.kv_b = allocate(static_cast<size_t>(heads) * 256 * COPPICE_MLA_LATENT * 2, true);
  t.page_stride = problem.tensors().page_stride;
  t.page_table = problem.tensors().page_table;
  int* lengths = static_cast<int*>(allocate(8, false));
  const int host_lengths[2] = {context, tokens};
  cudaMemcpy(lengths, host_lengths, 8, cudaMemcpyHostToDevice);
  t.context_length = lengths;
  t.token_count = lengths + 1;
  t.output = allocate(rows * COPPICE_MLA_HEAD * 2, false);
  t.workspace = allocate(bytes, false);
  t.workspace_bytes = bytes;
  const int caches = Options(cell).caches;
  Figure figure;
  const bool timed = TimeLayers(
      caches, [](cudaStream_t) {},
      [&](cudaStream_t stream, int i) {
        t.cache = problem.tensors(i % caches).cache;
        if (coppice_mla_prefill_run(&shape, &t, stream) != COPPICE_MLA_OK) {
          figure.error = coppice_mla_prefill_error();
        }
      },
      &figure);
  for (void* data : allocations) cudaFree(data);
  ordered_json row = {{"kind", "prefill"},
                      {"tokens", tokens},
                      {"context", context},
                      {"batch", 1},
                      {"page", cell.page},
                      {"heads", heads},
                      {"kv_dtype", type == COPPICE_MLA_BF16 ? "bf16" : "fp8"}};
  double tflops = NAN;
  if (timed && figure.error.empty()) {
    const double pairs = static_cast<double>(tokens) * context + 0.5 * tokens * (tokens + 1.0);
    const double attention = 2.0 * int{COPPICE_MLA_QUERY + COPPICE_MLA_HEAD} * heads * pairs;
    const double rebuild = 2.0 * int{COPPICE_MLA_LATENT} * 256 * heads * (context + tokens);
    tflops = attention / figure.us / 1e6;
    row["us"] = Round(figure.us);
    row["us_least"] = Round(figure.us_least);
    row["tflops"] = Round(tflops);
    row["tflops_with_rebuilding"] = Round((attention + rebuild) / figure.us / 1e6);
    row["mma_share"] = Round(tflops / roofs_.mma_tflops);
    std::printf(
        "prefill    tokens %4d ctx %6d %s: %9.2f us %6.1f TFLOPS (%.1f with the rebuilding)\n",
        tokens, context, type == COPPICE_MLA_BF16 ? "bf16" : "fp8 ", figure.us, tflops,
        (attention + rebuild) / figure.us / 1e6);
  } else {
    row["error"] = figure.error;
    ++failures_;
    std::printf("prefill    tokens %4d ctx %6d: %s\n", tokens, context, figure.error.c_str());
  }
  std::fflush(stdout);
  record_->Add(std::move(row));
  return tflops;
}

void Bench::Prefills() {
  for (int context : {0, 4096, 65536, 200000}) {
    for (int tokens : {16, 64, 256, 1024, 2048}) Prefill(tokens, context, COPPICE_MLA_BF16);
  }
  Prefill(2048, 32768, COPPICE_MLA_FP8);
}

int Main(int argc, char** argv) {
  CLI::App app("Times the verify-attention kernel on this GPU and writes a record");
  std::string mode = "targets", instance = "auto", out, type = "bf16", tree = "tree",
              name = "verify_kernel";
  std::string device_name;
  bool full = false, ragged = false, sequential = false;
  double grid_seconds = 1e9;
  Cell cell;
  std::vector<int> contexts = {16384, 65536};
  app.add_option("mode", mode, "targets, grid, sweep, baseline, accuracy, prefill, cell or all")
      ->check(CLI::IsMember(
          {"targets", "grid", "sweep", "baseline", "accuracy", "prefill", "cell", "all"}));
  app.add_option("--instance", instance, "common, common_small, hopper or auto")
      ->check(CLI::IsMember({"common", "common_small", "hopper", "auto"}));
  app.add_flag("--full", full, "grid: every combination, not one change at a time");
  app.add_option("--grid-seconds", grid_seconds, "grid: leave out what does not start within this");
  app.add_option("--contexts", contexts, "sweep: at these contexts");
  app.add_option("--out", out, "write DIR/verify_kernel/<date>-<device>.json");
  app.add_option("--device-name", device_name, "the device in the record's file name");
  app.add_option("--nodes", cell.nodes, "cell: nodes");
  app.add_option("--context", cell.context, "cell: context");
  app.add_option("--batch", cell.batch, "cell: batch");
  app.add_option("--page", cell.page, "cell: page size");
  app.add_option("--heads", cell.heads, "heads of this rank");
  app.add_option("--max-splits", cell.max_splits, "cell: bound on the parts of a context");
  app.add_option("--type", type, "cell: bf16 or fp8")->check(CLI::IsMember({"bf16", "fp8"}));
  app.add_option("--tree", tree, "cell: tree, chain or root_only")
      ->check(CLI::IsMember({"tree", "chain", "root_only"}));
  app.add_flag("--ragged", ragged, "cell: log-uniform lengths");
  app.add_flag("--sequential", sequential, "cell: pages in ascending order");
  CLI11_PARSE(app, argc, argv);
  cell.instance = instance == "common"         ? COPPICE_MLA_COMMON
                  : instance == "common_small" ? COPPICE_MLA_COMMON_SMALL
                  : instance == "hopper"       ? COPPICE_MLA_HOPPER
                                               : COPPICE_MLA_AUTO;
  cell.type = type == "bf16" ? COPPICE_MLA_BF16 : COPPICE_MLA_FP8;
  cell.tree = tree == "tree"    ? mla::TreeKind::kRandom
              : tree == "chain" ? mla::TreeKind::kChain
                                : mla::TreeKind::kRootOnly;
  cell.ragged = ragged;
  cell.permuted = !sequential;

  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
    std::fprintf(stderr, "verify_kernel: no GPU here (%s)\n",
                 cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  Record record(name);
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  record.AddHost("gpu", device.name);
  record.AddHost("driver",
                 std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10));
  record.AddVersion("cuda_runtime",
                    std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10));
  record.Note(
      "method",
      "graph replay of one schedule and 4 ms of layers (grid and sweep: 2 ms; at most 61) over "
      "caches cold in L2; "
      "median of 50 replays per layer; schedule and combine included");
  std::printf("%s, instance %s\n", device.name, instance.c_str());
  Bench bench(&record, cell);
  const bool all = mode == "all";
  if (mode == "cell") bench.Row("cell", cell);
  if (all || mode == "targets") bench.Targets();
  if (all || mode == "baseline" || mode == "targets") bench.Baseline();
  if (all || mode == "sweep") bench.Sweep(contexts);
  if (all || mode == "accuracy") bench.Accuracy();
  if (all || mode == "prefill") bench.Prefills();
  if (device_name.empty()) {
    device_name = device.name;
    std::transform(device_name.begin(), device_name.end(), device_name.begin(),
                   [](unsigned char c) { return c == ' ' ? '-' : std::tolower(c); });
    if (device_name.rfind("nvidia-", 0) == 0) device_name = device_name.substr(7);
  }
  // Before the grid too, which takes longest.
  if (all && !out.empty() && !record.Write(out, device_name)) return 1;
  if (all || mode == "grid") bench.Grid(full, grid_seconds);
  if (!bench.table().empty()) {
    std::printf("\n%-58s %11s %-7s %9s\n%s", "what", "target", "", "figure", bench.table().c_str());
  }
  std::printf("roofs: copy %.0f GB/s, read %.0f GB/s, mma.sync %.0f TFLOPS, wgmma %.0f TFLOPS\n",
              bench.roofs().copy_gbps, bench.roofs().read_gbps, bench.roofs().mma_tflops,
              bench.roofs().wgmma_tflops);
  if (bench.failures() > 0) std::printf("%d cells FAILED\n", bench.failures());
  if (!out.empty() && !record.Write(out, device_name)) return 1;
  return bench.failures() > 0 ? 1 : 0;
}

}  // namespace
}  // namespace coppice::bench

int main(int argc, char** argv) { return coppice::bench::Main(argc, argv); }
