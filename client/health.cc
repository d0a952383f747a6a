#include "client/health.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "grpc/health/v1/health.grpc.pb.h"

namespace coppice {

bool IsServing(const std::string& address) {
  // A channel of its own each time: one that has failed would wait before it tries again.
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
  grpc::health::v1::HealthCheckResponse response;
  return stub->Check(&context, {}, &response).ok() &&
         response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

}  // namespace coppice
