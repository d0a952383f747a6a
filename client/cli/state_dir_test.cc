#include "client/cli/state_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace coppice::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StateDirTest : public ::testing::Test {
 protected:
  StateDirTest() {
    std::string pattern = testing::TempDir() + "state_dir_test.XXXXXX";
    path_ = std::string(mkdtemp(pattern.data())) + "/deeper/state";
  }
  ~StateDirTest() override {
    std::filesystem::remove_all(std::filesystem::path(path_).parent_path().parent_path());
  }
  std::string path_;
};

TEST_F(StateDirTest, WhatIsWrittenIsRead) {
  StateDir dir(path_);
  ASSERT_TRUE(dir.Lock().ok());
  EXPECT_EQ(StateDir(path_).Read().status().code(), absl::StatusCode::kUnavailable);
  ClusterRecord record;
  record.supervisor = 42;
  record.model = "models/demo";
  record.processes = {{"verifier", "127.0.0.1:1", 43, "v.log"},
                      {"router", "127.0.0.1:2", 44, "r.log"}};
  ASSERT_TRUE(dir.Write(record).ok());
  const auto read = StateDir(path_).Read();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->supervisor, 42);
  EXPECT_EQ(read->model, "models/demo");
  EXPECT_THAT(read->Addresses("router"), ElementsAre("127.0.0.1:2"));
  EXPECT_EQ(read->processes[0].pid, 43);
  EXPECT_EQ(read->processes[0].log, "v.log");
}

TEST_F(StateDirTest, NoClusterNamesTheCommandThatStartsOne) {
  const auto read = StateDir(path_).Read();
  EXPECT_EQ(read.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(read.status().message()), HasSubstr("coppice up"));
  EXPECT_THAT(std::string(read.status().message()), HasSubstr(path_));
}

TEST_F(StateDirTest, ALiveClusterKeepsItsDirectory) {
  StateDir dir(path_);
  ASSERT_TRUE(dir.Lock().ok());
  ClusterRecord record;
  record.supervisor = 4711;
  ASSERT_TRUE(dir.Write(record).ok());
  StateDir other(path_);
  const absl::Status refused = other.Lock();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("process 4711"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("coppice down"));
  EXPECT_TRUE(StateDir(path_).Read().ok());
  dir.Unlock();
  EXPECT_FALSE(other.IsLive());
  EXPECT_TRUE(other.Lock().ok());
}

TEST_F(StateDirTest, WhatAKilledClusterLeftIsCleaned) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    StateDir dir(path_);
    ClusterRecord record;
    record.supervisor = getpid();
    const bool ok = dir.Lock().ok() && dir.Write(record).ok();
    if (write(ready[1], ok ? "y" : "n", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char answer = 0;
  ASSERT_EQ(read(ready[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  EXPECT_TRUE(StateDir(path_).IsLive());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(StateDir(path_).IsLive());
  EXPECT_EQ(StateDir(path_).Read().status().code(), absl::StatusCode::kNotFound);
  StateDir next(path_);
  EXPECT_TRUE(next.Lock().ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + "/cluster.json"));
}

TEST_F(StateDirTest, ADamagedRecordIsSaid) {
  StateDir dir(path_);
  ASSERT_TRUE(dir.Lock().ok());
  for (const char* text : {"", "{", "[]", "{\"processes\": 3}", "{\"processes\": [3]}"}) {
    std::ofstream(path_ + "/cluster.json") << text;
    EXPECT_EQ(dir.Read().status().code(), absl::StatusCode::kDataLoss) << text;
  }
}

TEST_F(StateDirTest, AnImpossibleDirectoryIsNamed) {
  StateDir dir("/proc/nowhere/state");
  const absl::Status status = dir.Lock();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/proc/nowhere/state"));
}

TEST(DefaultStateDirTest, FollowsTheEnvironment) {
  setenv("XDG_STATE_HOME", "/x", 1);
  EXPECT_EQ(DefaultStateDir(), "/x/coppice");
  unsetenv("XDG_STATE_HOME");
  const std::string home = std::getenv("HOME") ? std::getenv("HOME") : "";
  setenv("HOME", "/h", 1);
  EXPECT_EQ(DefaultStateDir(), "/h/.local/state/coppice");
  unsetenv("HOME");
  EXPECT_EQ(DefaultStateDir(), "/tmp/coppice-" + std::to_string(getuid()));
  if (!home.empty()) setenv("HOME", home.c_str(), 1);
}

}  // namespace
}  // namespace coppice::cli
