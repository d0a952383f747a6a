#include "bench/record.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

#include "services/common/build_info.h"

namespace coppice::bench {
namespace {

std::string CpuName() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string Today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &utc);
  return text;
}

}  // namespace

Record::Record(const std::string& bench) {
  record_["bench"] = bench;
  record_["date"] = Today();
  record_["git"] = BuildGitRevision();
  record_["host"] = {{"cpu", CpuName()}, {"cores", std::thread::hardware_concurrency()}};
  record_["versions"] = {{"coppice", BuildVersion()}, {"compiler", __VERSION__}};
  record_["rows"] = nlohmann::ordered_json::array();
}

void Record::Add(nlohmann::ordered_json row) { record_["rows"].push_back(std::move(row)); }

void Record::AddVersion(const std::string& of, const std::string& version) {
  record_["versions"][of] = version;
}

void Record::AddHost(const std::string& what, const std::string& value) {
  record_["host"][what] = value;
}

void Record::Note(const std::string& key, nlohmann::ordered_json value) {
  record_[key] = std::move(value);
}

bool Record::Write(const std::string& directory, const std::string& device) const {
  const std::string text = record_.dump(1) + "\n";
  if (directory.empty()) {
    std::fputs(text.c_str(), stdout);
    return true;
  }
  const std::filesystem::path folder =
      std::filesystem::path(directory) / record_["bench"].get<std::string>();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::filesystem::path path =
      folder / (record_["date"].get<std::string>() + "-" + device + ".json");
  std::ofstream out(path);
  out << text;
  out.close();
  if (!out) {
    std::fprintf(stderr, "cannot write %s; is the folder writable?\n", path.c_str());
    return false;
  }
  std::printf("wrote %s\n", path.c_str());
  return true;
}

double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const size_t below = static_cast<size_t>(std::floor(at));
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (at - static_cast<double>(below));
}

}  // namespace coppice::bench
