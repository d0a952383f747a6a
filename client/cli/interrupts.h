// Turns Ctrl-C into a call while the main thread waits for something else.
#ifndef COPPICE_CLIENT_CLI_INTERRUPTS_H_
#define COPPICE_CLIENT_CLI_INTERRUPTS_H_

#include <atomic>
#include <functional>
#include <thread>

#include "services/common/shutdown.h"

namespace coppice::cli {

// While it lives, each SIGINT or SIGTERM calls `on_signal` on a thread of its own.
class Interrupts {
 public:
  Interrupts(ShutdownSignals* signals, std::function<void(int signal)> on_signal)
      : thread_([this, signals, on_signal = std::move(on_signal)] {
          while (!stop_) {
            const int signal = signals->WaitUntil(std::chrono::steady_clock::now() +
                                                  std::chrono::milliseconds(50));
            if (signal != 0) on_signal(signal);
          }
        }) {}
  ~Interrupts() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_INTERRUPTS_H_
