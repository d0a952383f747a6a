// The main of every Google Benchmark program here: with --out=DIR it also writes a record of the
// medians.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "bench/record.h"

namespace coppice::bench {
namespace {

// Prints as usual and keeps each run for the record.
class RecordingReporter : public benchmark::ConsoleReporter {
 public:
  explicit RecordingReporter(Record* record) : record_(record) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      if (run.error_occurred) failed_ = true;
      // With repetitions the record holds their median alone.
      if (run.error_occurred || (run.repetitions > 1 && run.aggregate_name != "median")) continue;
      nlohmann::ordered_json row = {{"name", run.run_name.str()}};
      row["us"] = run.GetAdjustedRealTime() / benchmark::GetTimeUnitMultiplier(run.time_unit) * 1e6;
      for (const auto& [name, counter] : run.counters) row[name] = counter.value;
      record_->Add(std::move(row));
    }
  }

  bool failed() const { return failed_; }

 private:
  Record* record_;
  bool failed_ = false;
};

int Main(int argc, char** argv) {
  std::string name = argv[0];
  name = name.substr(name.rfind('/') + 1);
  if (const size_t suffix = name.rfind("_benchmark"); suffix != std::string::npos)
    name.resize(suffix);
  std::string out;
  std::vector<char*> arguments;
  for (int i = 0; i < argc; ++i) {
    if (std::strncmp(argv[i], "--out=", 6) == 0) {
      out = argv[i] + 6;
    } else {
      arguments.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  Record record(name);
  RecordingReporter reporter(&record);
  if (benchmark::RunSpecifiedBenchmarks(&reporter) == 0 || reporter.failed()) return 1;
  return out.empty() || record.Write(out, "cpu") ? 0 : 1;
}

}  // namespace
}  // namespace coppice::bench

int main(int argc, char** argv) { return coppice::bench::Main(argc, argv); }
