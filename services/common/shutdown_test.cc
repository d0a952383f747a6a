#include "services/common/shutdown.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

namespace coppice {
namespace {

using namespace std::chrono_literals;

// Each in a process of its own (EXPECT_EXIT), since signals and exits are the process's.
TEST(ShutdownTest, ASignalDrainsAndEndsWithZero) {
  EXPECT_EXIT(
      {
        ShutdownSignals signals;
        kill(getpid(), SIGTERM);
        bool drained = false;
        const int code = RunUntilShutdown(&signals, 5s, [&](TimePoint deadline) {
          drained = deadline > std::chrono::steady_clock::now() + 3s;
        });
        _exit(drained ? code : 9);
      },
      testing::ExitedWithCode(0), "draining");
}

TEST(ShutdownTest, ADrainThatHangsIsCutAtTheLimit) {
  EXPECT_EXIT(
      {
        ShutdownSignals signals;
        ShutdownSignals::Request();
        RunUntilShutdown(&signals, 0s, [](TimePoint) { std::this_thread::sleep_for(60s); });
        _exit(9);
      },
      testing::ExitedWithCode(0), "drain limit");
}

TEST(ShutdownTest, ASecondSignalLeavesAtOnce) {
  EXPECT_EXIT(
      {
        ShutdownSignals signals;
        kill(getpid(), SIGINT);
        RunUntilShutdown(&signals, 60s, [](TimePoint) {
          kill(getpid(), SIGINT);
          std::this_thread::sleep_for(60s);
        });
        _exit(9);
      },
      testing::ExitedWithCode(1), "second signal");
}

TEST(ShutdownTest, WaitUntilGivesUp) {
  EXPECT_EXIT(
      {
        ShutdownSignals signals;
        const int none = signals.WaitUntil(std::chrono::steady_clock::now() + 10ms);
        kill(getpid(), SIGINT);
        const int one = signals.WaitUntil(std::chrono::steady_clock::now() + 10s);
        _exit(none == 0 && one == SIGINT ? 0 : 9);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace coppice
