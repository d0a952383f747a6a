#include "services/common/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

namespace coppice {
namespace {

using ::testing::HasSubstr;

struct Values {
  int rows = 1;
  double rate = 0.5;
  std::string name = "none";
  std::string mode = "auto";
  bool quick = false;
};

class FlagsTest : public ::testing::Test {
 protected:
  FlagsTest() : parser_("tool", "does things") {
    parser_.Add("max-rows", &values_.rows, "rows")->check(CLI::Range(1, 100));
    parser_.Add("rate", &values_.rate, "rate");
    parser_.Add("name", &values_.name, "name");
    parser_.AddChoice("mode", &values_.mode, {"auto", "on", "off"}, "mode");
    parser_.AddSwitch("quick", &values_.quick, "quick");
  }
  ~FlagsTest() override {
    for (const char* name : {"COPPICE_MAX_ROWS", "COPPICE_MODE", "COPPICE_QUICK"}) unsetenv(name);
  }

  std::optional<int> Parse(std::vector<const char*> args) {
    args.insert(args.begin(), "tool");
    testing::internal::CaptureStderr();
    testing::internal::CaptureStdout();
    const auto code = parser_.Parse(static_cast<int>(args.size()), args.data());
    err_ = testing::internal::GetCapturedStderr();
    out_ = testing::internal::GetCapturedStdout();
    return code;
  }
  void ExpectRefused(std::vector<const char*> args, const std::string& sentence) {
    EXPECT_EQ(Parse(args), 2);
    EXPECT_EQ(parser_.error(), sentence);
    EXPECT_EQ(err_, "tool: " + sentence + "; see tool --help\n");
  }
  std::string WriteFile(const std::string& text) {
    const std::string path = testing::TempDir() + "flags_test.toml";
    std::ofstream(path) << text;
    return path;
  }

  Values values_;
  FlagParser parser_;
  std::string err_, out_;
};

TEST_F(FlagsTest, Defaults) {
  EXPECT_EQ(Parse({}), std::nullopt);
  EXPECT_EQ(values_.rows, 1);
  EXPECT_EQ(values_.name, "none");
  EXPECT_FALSE(values_.quick);
}

TEST_F(FlagsTest, FlagBeforeEnvironmentBeforeFile) {
  const std::string file = WriteFile("max-rows = 3\nmode = \"on\"\nname = \"from file\"\n");
  setenv("COPPICE_MAX_ROWS", "5", 1);
  setenv("COPPICE_MODE", "off", 1);
  EXPECT_EQ(Parse({"--config", file.c_str(), "--max-rows", "7"}), std::nullopt) << err_;
  EXPECT_EQ(values_.rows, 7);
  EXPECT_EQ(values_.mode, "off");
  EXPECT_EQ(values_.name, "from file");
}

TEST_F(FlagsTest, SwitchFromEnvironmentAndFile) {
  setenv("COPPICE_QUICK", "true", 1);
  EXPECT_EQ(Parse({}), std::nullopt) << err_;
  EXPECT_TRUE(values_.quick);
}

TEST_F(FlagsTest, SwitchFromFile) {
  const std::string file = WriteFile("quick = true\n");
  EXPECT_EQ(Parse({"--config", file.c_str()}), std::nullopt) << err_;
  EXPECT_TRUE(values_.quick);
}

TEST_F(FlagsTest, EmptyEnvironmentVariableIsUnset) {
  setenv("COPPICE_MAX_ROWS", "", 1);
  EXPECT_EQ(Parse({}), std::nullopt);
  EXPECT_EQ(values_.rows, 1);
}

TEST_F(FlagsTest, VersionAndHelpEndWithZero) {
  EXPECT_EQ(Parse({"--version"}), 0);
  EXPECT_THAT(out_, HasSubstr("tool 0."));
}

TEST_F(FlagsTest, HelpNamesFlagsAndTheirVariables) {
  EXPECT_EQ(Parse({"--help"}), 0);
  EXPECT_THAT(out_, HasSubstr("--max-rows"));
  EXPECT_THAT(out_, HasSubstr("COPPICE_MAX_ROWS"));
}

TEST_F(FlagsTest, UnknownFlag) { ExpectRefused({"--frob"}, "unknown flag --frob"); }
TEST_F(FlagsTest, UnexpectedArgument) { ExpectRefused({"frob"}, "unexpected argument frob"); }
TEST_F(FlagsTest, NotANumber) {
  ExpectRefused({"--rate", "fast"}, "--rate takes a number, not 'fast'");
}
TEST_F(FlagsTest, OutOfRange) {
  ExpectRefused({"--max-rows", "101"}, "--max-rows: Value 101 not in range 1 to 100");
}
TEST_F(FlagsTest, UnknownChoice) {
  ExpectRefused({"--mode", "maybe"}, "--mode takes auto, on or off, not 'maybe'");
}
TEST_F(FlagsTest, MissingValue) { ExpectRefused({"--name"}, "--name needs a value"); }
TEST_F(FlagsTest, BadEnvironmentIsNamed) {
  setenv("COPPICE_MODE", "maybe", 1);
  ExpectRefused({}, "--mode takes auto, on or off, not 'maybe' (from COPPICE_MODE)");
}
TEST_F(FlagsTest, UnknownConfigKey) {
  const std::string file = WriteFile("frob = 3\n");
  ExpectRefused({"--config", file.c_str()}, "the configuration file has an unknown key 'frob'");
}
TEST_F(FlagsTest, BadConfigValueIsNamed) {
  const std::string file = WriteFile("rate = \"fast\"\n");
  ExpectRefused({"--config", file.c_str()},
                "--rate takes a number, not 'fast' (from the configuration file)");
}
TEST_F(FlagsTest, MissingConfigFile) {
  EXPECT_EQ(Parse({"--config", "/nowhere/at/all"}), 2);
  EXPECT_THAT(parser_.error(), HasSubstr("/nowhere/at/all"));
}

TEST(CommandsTest, ErrorsNameTheCommand) {
  const auto parse = [](std::vector<const char*> args) {
    FlagParser parser("tool", "does things");
    int rows = 0;
    parser.Add("rows", &rows, "rows", parser.AddCommand("run", "runs"));
    args.insert(args.begin(), "tool");
    testing::internal::CaptureStderr();
    EXPECT_EQ(parser.Parse(static_cast<int>(args.size()), args.data()), 2);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(parse({"frob"}), "tool: unknown command frob; see tool --help\n");
  EXPECT_EQ(parse({"--frob"}), "tool: unknown flag --frob; see tool --help\n");
  EXPECT_EQ(parse({"run", "--frob"}), "tool: unknown flag --frob; see tool run --help\n");
  EXPECT_EQ(parse({"run", "x"}), "tool: unexpected argument x; see tool run --help\n");
  EXPECT_EQ(parse({"run", "--rows", "x"}),
            "tool: --rows takes a whole number, not 'x'; see tool run --help\n");
}

TEST(CommandsTest, AnotherCommandsEnvironmentDoesNotMatter) {
  FlagParser parser("tool", "does things");
  int rows = 0, columns = 0;
  parser.Add("rows", &rows, "rows", parser.AddCommand("run", "runs"));
  parser.Add("columns", &columns, "columns", parser.AddCommand("walk", "walks"));
  setenv("COPPICE_ROWS", "many", 1);
  setenv("COPPICE_COLUMNS", "3", 1);
  const char* argv[] = {"tool", "walk"};
  EXPECT_EQ(parser.Parse(2, argv), std::nullopt);
  EXPECT_EQ(columns, 3);
  unsetenv("COPPICE_ROWS");
  unsetenv("COPPICE_COLUMNS");
}

TEST(EnvironmentNameTest, Upcases) {
  EXPECT_EQ(FlagParser::EnvironmentName("max-rows"), "COPPICE_MAX_ROWS");
}

TEST(ServiceFlagsTest, KeepTheServicesOwnDefaults) {
  FlagParser parser("tool", "does things");
  ServiceFlags service;
  service.listen = "127.0.0.1:7000";
  service.AddTo(&parser);
  const char* argv[] = {"tool", "--metrics-port", "9000"};
  EXPECT_EQ(parser.Parse(3, argv), std::nullopt);
  EXPECT_EQ(service.listen, "127.0.0.1:7000");
  EXPECT_EQ(service.metrics_port, 9000);
}

}  // namespace
}  // namespace coppice
