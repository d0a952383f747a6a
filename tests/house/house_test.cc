// The house's own rules, checked on the sources: includes point down only, records are well-formed,
// and everything a reader is told to look at exists.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string ReadFile(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

bool IsSource(const fs::path& path) {
  static const std::set<std::string> kExtensions = {".h", ".cc", ".cu", ".cuh", ".inc"};
  return kExtensions.count(path.extension().string()) > 0;
}

// Every source below the rooms that hold code, as paths from the repository's root.
std::vector<std::string> Sources() {
  std::vector<std::string> sources;
  for (const char* room :
       {"kernels", "model", "speculation", "services", "client", "bench", "tests", "tools"}) {
    if (!fs::exists(room)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(room)) {
      if (entry.is_regular_file() && IsSource(entry.path())) {
        sources.push_back(entry.path().generic_string());
      }
    }
  }
  std::sort(sources.begin(), sources.end());
  return sources;
}

// The room a path lies in: the part of it that the arrows speak of.
std::string RoomOf(const std::string& path) {
  for (const char* room :
       {"services/common", "services/router", "services/drafter", "services/verifier"}) {
    if (path.rfind(std::string(room) + "/", 0) == 0) return room;
  }
  if (path.rfind("coppice/v1/", 0) == 0) return "proto";
  return path.substr(0, path.find('/'));
}

// Which rooms each room may include, itself always.  Arrows point down.
const std::map<std::string, std::set<std::string>>& Arrows() {
  static const auto* arrows = new std::map<std::string, std::set<std::string>>{
      {"kernels", {}},
      {"speculation", {}},
      {"model", {"kernels"}},
      {"proto", {}},
      {"services/common", {"proto"}},
      {"services/verifier", {"services/common", "proto", "model", "speculation", "kernels"}},
      {"services/drafter", {"services/common", "proto", "model", "kernels"}},
      {"services/router", {"services/common", "proto", "model", "speculation"}},
      {"client", {"services/common", "proto", "model"}},
  };
  return *arrows;
}

// What speculation/ may include besides itself: the standard library and Abseil.
bool IsStandardOrAbseil(const std::string& include, bool angled) {
  return include.rfind("absl/", 0) == 0 || (angled && include.find('/') == std::string::npos);
}

// The include lines of `text` that break the arrows if it stood at `path`.
std::vector<std::string> BrokenArrows(const std::string& path, const std::string& text) {
  const std::string room = RoomOf(path);
  const auto allowed = Arrows().find(room);
  if (allowed == Arrows().end()) return {};  // tests, benchmarks and tools may look at everything
  // Tests and what helps them may use the test libraries too.
  const bool is_test = std::regex_search(path, std::regex("(_|/)(test|fake|benchmark)[_.]"));
  std::vector<std::string> broken;
  static const std::regex kInclude("^\\s*#\\s*include\\s*([<\"])([^>\"]+)[>\"]");
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (!std::regex_search(line, match, kInclude)) continue;
    static const std::regex kRpc("^(grpc|google/protobuf)");
    const bool angled = match[1] == "<";
    const std::string include = match[2];
    const std::string target = RoomOf(include);
    if ((room == "kernels" || room == "model" || room == "speculation") &&
        std::regex_search(include, kRpc)) {
      broken.push_back(path + ": " + line + "  (" + room + " knows nothing of gRPC)");
    } else if (Arrows().count(target) > 0 && include.find('/') != std::string::npos) {
      if (target != room && allowed->second.count(target) == 0) {
        broken.push_back(path + ": " + line + "  (" + room + " may not include " + target + ")");
      }
    } else if (room == "speculation" && !is_test && !IsStandardOrAbseil(include, angled)) {
      broken.push_back(path + ": " + line +
                       "  (speculation includes only the standard library and Abseil)");
    } else if (room == "kernels" && !is_test && !angled && include.rfind("absl/", 0) != 0) {
      broken.push_back(path + ": " + line + "  (kernels include nothing of ours)");
    }
  }
  return broken;
}

TEST(IncludeArrows, PointDownOnly) {
  const std::vector<std::string> sources = Sources();
  ASSERT_GT(sources.size(), 20u) << "run from the repository's root";
  for (const std::string& path : sources) {
    EXPECT_THAT(BrokenArrows(path, ReadFile(path)), testing::IsEmpty());
  }
}

TEST(IncludeArrows, PlantedBreaksAreSeen) {
  EXPECT_THAT(BrokenArrows("kernels/cpu/x.cc", "#include \"model/config.h\"\n"),
              testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("model/x.cc", "#include \"services/common/queue.h\"\n"),
              testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("model/x.cc", "#include \"speculation/tree.h\"\n"), testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("services/router/x.cc", "#include \"services/verifier/page_pool.h\"\n"),
              testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("services/router/x.cc", "#include \"kernels/ops.h\"\n"),
              testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("kernels/x.cc", "#include <grpcpp/grpcpp.h>\n"), testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("model/x.cc", "#include <google/protobuf/message.h>\n"),
              testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("speculation/x.h", "#include <glog/logging.h>\n"), testing::SizeIs(1));
  EXPECT_THAT(BrokenArrows("speculation/x.h", "#include \"coppice/v1/common.pb.h\"\n"),
              testing::SizeIs(1));
  EXPECT_THAT(
      BrokenArrows("speculation/x.h", "#include <vector>\n#include \"absl/status/status.h\"\n"),
      testing::IsEmpty());
  EXPECT_THAT(BrokenArrows("services/verifier/x.cc", "#include \"model/target.h\"\n"),
              testing::IsEmpty());
}

TEST(Sources, SayNothingOfUnfinishedWork) {
  static const std::regex kUnfinished(
      "\\b(TO"
      "DO|FIX"
      "ME|X"
      "XX)\\b");
  for (const std::string& path : Sources()) {
    EXPECT_FALSE(std::regex_search(ReadFile(path), kUnfinished)) << path;
  }
}

// A benchmark record (docs/architecture.md, section 11); returns what is wrong with it.
std::string RecordError(const json& record) {
  if (!record.is_object()) return "is no JSON object";
  for (const char* key : {"bench", "date", "git"}) {
    if (!record.contains(key) || !record[key].is_string() ||
        record[key].get<std::string>().empty()) {
      return std::string("lacks the text '") + key + "'";
    }
  }
  static const std::regex kRevision("[0-9a-f]{7,40}(-dirty)?");
  if (!std::regex_match(record["git"].get<std::string>(), kRevision)) return "'git' is no revision";
  if (!record.contains("host") || !record["host"].is_object()) return "lacks 'host'";
  for (const char* key : {"cpu", "cores"}) {
    if (!record["host"].contains(key)) return std::string("'host' lacks '") + key + "'";
  }
  if (!record.contains("versions") || !record["versions"].is_object() ||
      record["versions"].empty()) {
    return "lacks 'versions'";
  }
  if (!record.contains("rows") || !record["rows"].is_array() || record["rows"].empty())
    return "lacks 'rows'";
  for (const json& row : record["rows"]) {
    if (!row.is_object()) return "has a row that is no object";
    const bool has_figure =
        std::any_of(row.begin(), row.end(), [](const json& value) { return value.is_number(); });
    if (!has_figure) return "has a row without a figure: " + row.dump();
  }
  return "";
}

TEST(Records, AreWellFormed) {
  for (const auto& entry : fs::recursive_directory_iterator("bench/results")) {
    if (entry.path().extension() != ".json") continue;
    const json record = json::parse(ReadFile(entry.path()), nullptr, /*allow_exceptions=*/false);
    ASSERT_FALSE(record.is_discarded()) << entry.path() << " is no JSON";
    EXPECT_EQ(RecordError(record), "") << entry.path();
  }
}

// bench/README.md's table names the folder of each claim's records.
TEST(Records, EveryClaimHasOne) {
  const std::string book = ReadFile("bench/README.md");
  static const std::regex kFolder("`results/([a-z_]+)/`");
  int folders = 0;
  for (std::sregex_iterator it(book.begin(), book.end(), kFolder), end; it != end;
       ++it, ++folders) {
    const fs::path folder = fs::path("bench/results") / (*it)[1].str();
    int records = 0;
    if (fs::exists(folder)) {
      for (const auto& entry : fs::directory_iterator(folder))
        records += entry.path().extension() == ".json";
    }
    EXPECT_GT(records, 0) << folder;
  }
  EXPECT_GE(folders, 5);
}

TEST(Records, PlantedErrorsAreSeen) {
  const json good = {{"bench", "x"},
                     {"date", "2026-01-01"},
                     {"git", "0123abc"},
                     {"host", {{"cpu", "c"}, {"cores", 2}}},
                     {"versions", {{"compiler", "g++"}}},
                     {"rows", {{{"nodes", 9}, {"us", 1.5}}}}};
  EXPECT_EQ(RecordError(good), "");
  for (const char* key : {"bench", "date", "git", "host", "versions", "rows"}) {
    json bad = good;
    bad.erase(key);
    EXPECT_NE(RecordError(bad), "") << key;
  }
  json bad = good;
  bad["git"] = "unknown";
  EXPECT_NE(RecordError(bad), "");
}

TEST(Readme, EveryFileItNamesExists) {
  static const std::regex kLink("\\]\\(([^)#:]+)(#[^)]*)?\\)");
  int links = 0;
  for (const char* page :
       {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/operations.md",
        "docs/protocol.md", "bench/README.md", "models/demo/README.md"}) {
    ASSERT_TRUE(fs::exists(page)) << page;
    const std::string text = ReadFile(page);
    for (std::sregex_iterator it(text.begin(), text.end(), kLink), end; it != end; ++it, ++links) {
      const fs::path target = fs::path(page).parent_path() / (*it)[1].str();
      EXPECT_TRUE(fs::exists(target)) << page << " links to " << (*it)[1];
    }
  }
  EXPECT_GT(links, 5);
}

}  // namespace
}  // namespace coppice
