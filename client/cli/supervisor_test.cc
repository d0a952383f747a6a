#include "client/cli/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"

namespace coppice::cli {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

// Shell scripts stand for services: one is ready once it has made the file that is its address.
class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorTest() {
    std::string pattern = testing::TempDir() + "supervisor_test.XXXXXX";
    dir_ = mkdtemp(pattern.data());
    options_.is_ready = [](const std::string& address) { return std::filesystem::exists(address); };
    options_.say = [this](const std::string& line) { said_.push_back(line); };
    options_.pause = [this](Duration) {
      std::this_thread::sleep_for(2ms);
      return ++pauses_ >= stop_after_;
    };
    options_.first_backoff = 5ms;
    options_.max_backoff = 20ms;
  }
  ~SupervisorTest() override { std::filesystem::remove_all(dir_); }

  ServiceSpec Spec(const std::string& role, const std::string& script) {
    return {role, {"/bin/sh", "-c", script}, dir_ + "/" + role, dir_ + "/" + role + ".log"};
  }
  // Gets ready, and notes when it is asked to end.
  ServiceSpec Good(const std::string& role) {
    return Spec(role, "trap 'echo " + role + " >> " + dir_ + "/ended; exit 0' TERM; touch " + dir_ +
                          "/" + role + "; while :; do sleep 0.01; done");
  }
  bool Said(const std::string& part) const {
    for (const std::string& line : said_) {
      if (absl::StrContains(line, part)) return true;
    }
    return false;
  }
  std::string Ended() {
    std::ifstream in(dir_ + "/ended");
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }

  std::string dir_;
  SupervisorOptions options_;
  std::vector<std::string> said_;
  int pauses_ = 0, stop_after_ = 100'000;
};

TEST_F(SupervisorTest, StartsAndStopsInOrder) {
  Supervisor supervisor(options_);
  ASSERT_TRUE(supervisor.Start({Good("verifier"), Good("drafter")}, 30s).ok());
  ASSERT_TRUE(supervisor.Start({Good("router")}, 30s).ok());
  EXPECT_THAT(supervisor.Processes(), testing::SizeIs(3));
  EXPECT_GT(supervisor.Processes()[0].pid, 0);
  supervisor.Stop({"router", "drafter", "verifier"}, 30s);
  EXPECT_EQ(Ended(), "router\ndrafter\nverifier\n");
}

TEST_F(SupervisorTest, AServiceThatDiesWhileStartingShowsTheEndOfItsLog) {
  Supervisor supervisor(options_);
  const absl::Status status = supervisor.Start(
      {Spec("verifier", "echo shard model-00002.safetensors is missing >&2; exit 3")}, 30s);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the verifier exited with code 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("shard model-00002.safetensors is missing"));
}

TEST_F(SupervisorTest, AMissingProgramIsSaid) {
  Supervisor supervisor(options_);
  ServiceSpec spec = Spec("verifier", "");
  spec.argv = {"/nowhere/coppice-verifier"};
  const absl::Status status = supervisor.Start({spec}, 30s);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot run"));
}

TEST_F(SupervisorTest, NeverReadyIsGivenUp) {
  Supervisor supervisor(options_);
  const absl::Status status = supervisor.Start({Spec("drafter", "sleep 60")}, 20ms);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("drafter"));
}

TEST_F(SupervisorTest, ASignalInterruptsTheStart) {
  stop_after_ = 3;
  Supervisor supervisor(options_);
  EXPECT_EQ(supervisor.Start({Spec("drafter", "sleep 60")}, 30s).code(),
            absl::StatusCode::kCancelled);
}

TEST_F(SupervisorTest, AServiceThatDiesIsStartedAgain) {
  Supervisor supervisor(options_);
  ASSERT_TRUE(supervisor.Start({Good("drafter")}, 30s).ok());
  const pid_t first = supervisor.Processes()[0].pid;
  std::filesystem::remove(dir_ + "/drafter");
  kill(first, SIGKILL);
  int changes = 0;
  pauses_ = 0;
  stop_after_ = 100'000;
  supervisor.Watch([&] {
    ++changes;
    pauses_ = stop_after_ - 200;  // 200 more pauses: time to be ready
  });
  EXPECT_EQ(changes, 1);
  EXPECT_NE(supervisor.Processes()[0].pid, first);
  EXPECT_TRUE(Said("the drafter was killed by signal 9 (Killed); starting it again in 0.0 s"));
  EXPECT_TRUE(Said("the drafter is back"));
}

TEST_F(SupervisorTest, RestartsSlowDown) {
  Supervisor supervisor(options_);
  ASSERT_TRUE(
      supervisor.Start({Spec("router", "touch " + dir_ + "/router; sleep 0.02")}, 30s).ok());
  stop_after_ = pauses_ + 150;  // some 300 ms
  int changes = 0;
  supervisor.Watch([&] { ++changes; });
  EXPECT_GE(changes, 2);
  EXPECT_LE(changes, 12);
}

TEST_F(SupervisorTest, WhatDoesNotEndIsKilled) {
  Supervisor supervisor(options_);
  ASSERT_TRUE(supervisor
                  .Start({Spec("router", "trap '' TERM; touch " + dir_ +
                                             "/router; while :; do sleep 0.01; done")},
                         30s)
                  .ok());
  const pid_t pid = supervisor.Processes()[0].pid;
  supervisor.Stop({"router"}, 30ms);
  EXPECT_TRUE(Said("killing"));
  EXPECT_NE(kill(pid, 0), 0);
}

TEST(ProcessTest, FreePortsDiffer) {
  const auto ports = FreePorts(3);
  ASSERT_TRUE(ports.ok());
  EXPECT_NE((*ports)[0], (*ports)[1]);
  EXPECT_NE((*ports)[1], (*ports)[2]);
  EXPECT_NE((*ports)[0], (*ports)[2]);
}

TEST(ProcessTest, LastLinesOfAFile) {
  const std::string path = testing::TempDir() + "last_lines";
  std::ofstream(path) << "a\nb\nc\n";
  EXPECT_EQ(LastLines(path, 2), "b\nc\n");
  EXPECT_EQ(LastLines(path, 5), "a\nb\nc\n");
  EXPECT_EQ(LastLines(path + ".none", 5), "");
}

}  // namespace
}  // namespace coppice::cli
