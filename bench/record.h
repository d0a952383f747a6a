// Benchmark records: what was measured, on what, by which revision (docs/architecture.md, section
// 11).
#ifndef COPPICE_BENCH_RECORD_H_
#define COPPICE_BENCH_RECORD_H_

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace coppice::bench {

class Record {
 public:
  // `bench`: the benchmark's name, and the folder its records live in.
  explicit Record(const std::string& bench);

  // One row: parameters under the field's names, figures with their units in the name.
  void Add(nlohmann::ordered_json row);
  void AddVersion(const std::string& of, const std::string& version);
  // What the machine has besides processors.
  void AddHost(const std::string& what, const std::string& value);
  // Any other top-level entry.
  void Note(const std::string& key, nlohmann::ordered_json value);

  // Writes DIR/<bench>/<date>-<device>.json and prints where; with an empty DIR prints the record
  // alone. False, with a sentence on standard error, where the file cannot be written.
  bool Write(const std::string& directory, const std::string& device) const;

 private:
  nlohmann::ordered_json record_;
};

double Median(std::vector<double> values);
// The q-quantile (0 … 1) by linear interpolation; 0 for no values.
double Quantile(std::vector<double> values, double q);

}  // namespace coppice::bench

#endif  // COPPICE_BENCH_RECORD_H_
