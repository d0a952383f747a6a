// Keeps a server's health in step with whether its service can work.
#ifndef COPPICE_SERVICES_COMMON_READINESS_H_
#define COPPICE_SERVICES_COMMON_READINESS_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "services/common/heartbeat.h"
#include "services/common/server.h"

namespace coppice {

// A thread that does nothing else asks `not_ready` four times a second and sets the server's health
// by it; changes are logged.  `not_ready` returns the reason, or "" when the service is ready; it
// must not block.
class Readiness {
 public:
  Readiness(RpcServer* server, std::function<std::string()> not_ready);
  ~Readiness();

  // From now on: not ready, for this reason, whatever `not_ready` says.  The first act of a
  // shutdown.
  void Drain(const std::string& reason);

  // A `not_ready` for services whose only condition is a loop that goes round: a reason when the
  // last beat is older than `limit`.
  static std::function<std::string()> FromHeartbeat(const Heartbeat* heartbeat, Duration limit,
                                                    const std::string& loop);

 private:
  void Run();

  RpcServer* server_;
  std::function<std::string()> not_ready_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::string draining_;
  std::thread thread_;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_READINESS_H_
