#include "services/common/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace coppice {
namespace {

struct HostPort {
  std::string host;
  std::string port;
};

absl::StatusOr<HostPort> SplitAddress(const std::string& listen) {
  const size_t colon = listen.rfind(':');
  HostPort out;
  if (colon != std::string::npos) {
    out.host = listen.substr(0, colon);
    out.port = listen.substr(colon + 1);
  }
  int port = -1;
  const char* end = out.port.data() + out.port.size();
  const auto [rest, error] = std::from_chars(out.port.data(), end, port);
  const bool bare_ipv6 = out.host.find(':') != std::string::npos && out.host.front() != '[';
  if (out.host.empty() || bare_ipv6 || error != std::errc() || rest != end || port < 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on \"", listen,
                     "\": give host:port, for example 127.0.0.1:7000, [::1]:7000 or 0.0.0.0:0"));
  }
  return out;
}

// gRPC says only that it could not bind; the system says why.
absl::Status WhyNotBound(const std::string& listen, const HostPort& at) {
  std::string host = at.host;
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host.c_str(), at.port.c_str(), &hints, &found); rc != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", listen, ": host ", host, ": ", gai_strerror(rc)));
  }
  int cause = 0;
  for (addrinfo* a = found; a != nullptr && cause == 0; a = a->ai_next) {
    const int fd = socket(a->ai_family, a->ai_socktype, 0);
    if (fd < 0) continue;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || ::listen(fd, 1) != 0) {
      cause = errno;
    }
    close(fd);
  }
  freeaddrinfo(found);
  if (cause == EADDRINUSE) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot listen on ", listen,
        ": the port is in use; stop what listens there or choose another with --listen"));
  }
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", listen, ": ",
                   cause != 0 ? std::strerror(cause) : "the system refused the address",
                   "; choose another address with --listen"));
}

}  // namespace

absl::StatusOr<std::string> ListenHost(const std::string& listen) {
  absl::StatusOr<HostPort> at = SplitAddress(listen);
  if (!at.ok()) return at.status();
  return at->host;
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(
    const ServerOptions& options, const std::vector<grpc::Service*>& services) {
  absl::StatusOr<HostPort> at = SplitAddress(options.listen);
  if (!at.ok()) return at.status();

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(kKeepaliveTime.count()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             static_cast<int>(kKeepaliveTimeout.count()));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             static_cast<int>(kMinPingInterval.count()));
  for (grpc::Service* service : services) builder.RegisterService(service);

  std::unique_ptr<RpcServer> out(new RpcServer);
  out->server_ = builder.BuildAndStart();
  if (!out->server_ || port == 0) return WhyNotBound(options.listen, *at);
  out->port_ = port;
  out->address_ = absl::StrCat(at->host, ":", port);
  out->SetServing(false);
  return out;
}

RpcServer::~RpcServer() {
  if (server_) Shutdown(std::chrono::steady_clock::now());
}

void RpcServer::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
}

void RpcServer::Shutdown(TimePoint deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  server_->Shutdown(std::chrono::system_clock::now() +
                    std::chrono::duration_cast<std::chrono::system_clock::duration>(left));
  server_->Wait();
}

}  // namespace coppice
