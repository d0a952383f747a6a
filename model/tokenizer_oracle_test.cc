// Random texts, encoded by PyPI tiktoken while the test runs.  COPPICE_PYTHON names the interpreter
// that has it; by default it is the python3 on the PATH.
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/test_files.h"
#include "model/tokenizer.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using nlohmann::json;

constexpr char kDemo[] = "models/demo";

TEST(TokenizerOracle, AgreesWithTiktokenOnRandomTexts) {
  const json config = json::parse(ReadTestFile(std::string(kDemo) + "/config.json"));
  const json& text_config = config.contains("text_config") ? config["text_config"] : config;
  const auto loaded = Tokenizer::Load(kDemo, text_config["vocab_size"].get<int>());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Tokenizer& tokenizer = **loaded;
  const char* python = std::getenv("COPPICE_PYTHON");
  const std::string command = std::string(python == nullptr ? "python3" : python) +
                              " tests/oracle/tokenizer_oracle.py fuzz " + kDemo + " 1 100000";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  // A line at a time: some texts are long.
  size_t compared = 0;
  size_t longest = 0;
  char* line = nullptr;
  size_t capacity = 0;
  for (; getline(&line, &capacity, pipe) > 0 && !HasFailure(); ++compared) {
    const json item = json::parse(line);
    const std::string text = item["text"].get<std::string>();
    longest = std::max(longest, text.size());
    EXPECT_EQ(*tokenizer.Encode(text), item["ids"].get<std::vector<int32_t>>())
        << item["text"].dump().substr(0, 1000);
    EXPECT_EQ(*tokenizer.EncodeWithSpecial(text), item["ids_special"].get<std::vector<int32_t>>())
        << item["text"].dump().substr(0, 1000);
    EXPECT_EQ(*tokenizer.Decode(*tokenizer.Encode(text)), text);
  }
  std::free(line);
  const int status = pclose(pipe);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (code == 77 || code == 127) {
    GTEST_SKIP() << "NOT COMPARED WITH TIKTOKEN: python3 with PyPI tiktoken is missing (pip "
                    "install tiktoken, and name its interpreter in COPPICE_PYTHON)";
  }
  ASSERT_FALSE(HasFailure());
  ASSERT_EQ(code, 0) << command;
  EXPECT_GT(longest, 400'000u);
  EXPECT_EQ(compared, 100000u);
}

}  // namespace
}  // namespace coppice
