// SIGTERM and SIGINT: not a kill but a request to drain.
#ifndef COPPICE_SERVICES_COMMON_SHUTDOWN_H_
#define COPPICE_SERVICES_COMMON_SHUTDOWN_H_

#include <functional>

#include "services/common/clock.h"

namespace coppice {

// Construct first in main, before any thread and before the model loads: it blocks SIGTERM and
// SIGINT in this thread and so in all that it starts, and ignores SIGPIPE.
class ShutdownSignals {
 public:
  ShutdownSignals();

  // Waits for a signal and returns its number.
  int Wait();
  // Waits for one until `deadline`; 0 where none came.
  int WaitUntil(TimePoint deadline);
  // As if a signal had come.  Callable from any thread.
  static void Request();
};

// Waits for a signal, calls `drain(deadline)` with deadline = now + `limit`, and returns main's
// exit code: 0. Where `drain` is not back shortly after its deadline, or a second signal comes, the
// process ends at once, with 0 and 1 respectively.
int RunUntilShutdown(ShutdownSignals* signals, Duration limit,
                     const std::function<void(TimePoint deadline)>& drain);

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_SHUTDOWN_H_
