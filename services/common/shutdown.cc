#include "services/common/shutdown.h"

#include <glog/logging.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

namespace coppice {
namespace {

sigset_t Signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

// Without exit handlers: another thread is still at work in what they would destroy.
[[noreturn]] void LeaveNow(int code) {
  google::FlushLogFiles(google::GLOG_INFO);
  _exit(code);
}

}  // namespace

ShutdownSignals::ShutdownSignals() {
  const sigset_t set = Signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

int ShutdownSignals::Wait() {
  const sigset_t set = Signals();
  int signal = 0;
  while (sigwait(&set, &signal) != 0) {
  }
  return signal;
}

int ShutdownSignals::WaitUntil(TimePoint deadline) {
  const sigset_t set = Signals();
  for (;;) {
    const auto left = std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(
                                               deadline - std::chrono::steady_clock::now())
                                               .count());
    const timespec wait = {static_cast<time_t>(left / 1'000'000'000),
                           static_cast<long>(left % 1'000'000'000)};
    const int signal = sigtimedwait(&set, nullptr, &wait);
    if (signal > 0) return signal;
    if (errno == EAGAIN) return 0;
  }
}

void ShutdownSignals::Request() { kill(getpid(), SIGTERM); }

int RunUntilShutdown(ShutdownSignals* signals, Duration limit,
                     const std::function<void(TimePoint deadline)>& drain) {
  constexpr Duration kGrace = std::chrono::seconds(2);
  const int signal = signals->Wait();
  const TimePoint deadline = std::chrono::steady_clock::now() + limit;
  LOG(INFO) << strsignal(signal) << ": draining";
  std::atomic<bool> done = false;
  std::thread watchdog([&] {
    while (!done) {
      const TimePoint now = std::chrono::steady_clock::now();
      if (now >= deadline + kGrace) {
        LOG(WARNING) << "the drain limit has passed: leaving what still runs";
        LeaveNow(0);
      }
      if (signals->WaitUntil(std::min(deadline + kGrace, now + std::chrono::milliseconds(50))) !=
          0) {
        LOG(WARNING) << "a second signal: leaving at once";
        LeaveNow(1);
      }
    }
  });
  drain(deadline);
  done = true;
  watchdog.join();
  LOG(INFO) << "stopped";
  return 0;
}

}  // namespace coppice
