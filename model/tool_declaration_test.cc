#include "model/tool_declaration.h"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>

#include "gtest/gtest.h"
#include "model/test_files.h"

namespace coppice {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

void ExpectReference(const json& item) {
  const std::optional<std::string> text = TypeScriptTools(item["tools"]);
  if (item["typescript"].is_null()) {
    EXPECT_EQ(text, std::nullopt) << item["tools"].dump();
  } else {
    EXPECT_EQ(text, item["typescript"].get<std::string>()) << item["tools"].dump();
  }
}

// What the encoder that ships with Kimi K2.5's tokenizer writes, and where it fails:
// tests/oracle/tool_declaration_oracle.py.
TEST(TypeScriptTools, WritesWhatTheReferenceWrites) {
  const json golden = json::parse(ReadTestFile("tests/goldens/chat_template/tools_ts.json"));
  int declared = 0;
  for (const json& item : golden) {
    ExpectReference(item);
    declared += !item["typescript"].is_null();
  }
  EXPECT_GE(declared, 100);
  EXPECT_GE(golden.size(), 170u);
}

TEST(TypeScriptTools, AgreesWithTheReferenceOnRandomTools) {
  const char* python = std::getenv("COPPICE_PYTHON");
  const std::string command = std::string(python == nullptr ? "python3" : python) +
                              " tests/oracle/tool_declaration_oracle.py fuzz 11 3000 2>/dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  char buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) output.append(buffer, n);
  const int status = pclose(pipe);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (code == 77 || code == 127) {
    GTEST_SKIP() << "NOT COMPARED WITH THE ENCODER: python3 with PyPI tinker-cookbook is missing "
                    "(pip install --no-deps tinker-cookbook, and name its interpreter in "
                    "COPPICE_PYTHON)";
  }
  ASSERT_EQ(code, 0) << command;
  int compared = 0;
  for (size_t begin = 0; begin < output.size(); ++compared) {
    const size_t end = output.find('\n', begin);
    ExpectReference(json::parse(output.substr(begin, end - begin)));
    begin = end + 1;
  }
  EXPECT_EQ(compared, 3000);
}

TEST(PythonJson, SpellsNumbersAsPythonDoes) {
  const ordered_json value = ordered_json::parse(
      R"({"b":[1,-0.0,1.0,1e15,1e16,123456789.125,0.0001,0.00001,-2.5e-7,1e300],"a":"é\n\u0001","n":null})");
  EXPECT_EQ(PythonJson(value),
            "{\"b\":[1,-0.0,1.0,1000000000000000.0,1e+16,123456789.125,0.0001,1e-05,-2.5e-07,"
            "1e+300],\"a\":\"é\\n\\u0001\",\"n\":null}");
  EXPECT_EQ(PythonJson(json(value), ", ", ": ").substr(0, 6), "{\"a\": ");
}

}  // namespace
}  // namespace coppice
