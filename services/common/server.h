// A gRPC server as every service starts it: explicit limits, paired keepalive, health and
// reflection.
#ifndef COPPICE_SERVICES_COMMON_SERVER_H_
#define COPPICE_SERVICES_COMMON_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/common/channel.h"
#include "services/common/clock.h"

namespace coppice {

// The host of host:port.  INVALID_ARGUMENT, saying what to give, where it is none.
absl::StatusOr<std::string> ListenHost(const std::string& listen);

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // host:port; port 0: any free one
  int max_message_bytes = kControlMessageBytes;
};

class RpcServer {
 public:
  // Listens and serves `services`, which must outlive the server.  Health (grpc.health.v1) says
  // NOT_SERVING until SetServing(true). Errors: INVALID_ARGUMENT (no host:port),
  // FAILED_PRECONDITION (port in use: never shared with another process), UNAVAILABLE (any other
  // refusal of the system); each names the address.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(
      const ServerOptions& options, const std::vector<grpc::Service*>& services);
  // Shuts down at once, cancelling what runs.
  ~RpcServer();

  int port() const { return port_; }
  // Where it listens, with the real port: "127.0.0.1:40123".
  const std::string& address() const { return address_; }

  // What health answers, for the server as a whole ("") and for each of its services.
  void SetServing(bool serving);
  // Refuses new calls, lets running ones finish until `deadline`, then cancels them.  Returns when
  // all are done.
  void Shutdown(TimePoint deadline);

 private:
  RpcServer() = default;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
  std::string address_;
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_SERVER_H_
