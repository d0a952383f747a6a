#include "services/common/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "coppice/v1/inference.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "services/common/readiness.h"

namespace coppice {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class Echo : public v1::Inference::CallbackService {
 public:
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override {
    response->add_ids(static_cast<uint32_t>(request->text().size()));
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

std::string Health(const std::string& address) {
  auto stub = grpc::health::v1::Health::NewStub(MakeChannel(address));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 10s);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, {}, &response);
  if (!status.ok()) return status.error_message();
  return grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status());
}

TEST(ServerTest, ServesOnAFreePortWithTheMessageLimitsItWasGiven) {
  Echo echo;
  auto server = RpcServer::Start({}, {&echo});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_NE((*server)->port(), 0);
  EXPECT_EQ((*server)->address(), "127.0.0.1:" + std::to_string((*server)->port()));

  auto stub = v1::Inference::NewStub(MakeChannel((*server)->address()));
  const auto tokenize = [&](size_t bytes, v1::TokenizeResponse* response) {
    v1::TokenizeRequest request;
    request.set_text(std::string(bytes, 'x'));
    grpc::ClientContext context;
    return stub->Tokenize(&context, request, response);
  };
  v1::TokenizeResponse response;
  ASSERT_TRUE(tokenize(8 << 20, &response).ok());  // beyond gRPC's own default of 4 MiB
  EXPECT_EQ(response.ids(0), 8u << 20);
  EXPECT_EQ(tokenize(17 << 20, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST(ServerTest, HealthFollowsReadiness) {
  Echo echo;
  auto server = RpcServer::Start({}, {&echo});
  ASSERT_TRUE(server.ok());
  EXPECT_EQ(Health((*server)->address()), "NOT_SERVING");
  std::atomic<bool> ready = true;
  Readiness readiness(server->get(), [&] { return ready ? "" : "the loop is stuck"; });
  const auto await = [&](const std::string& want) {
    for (int i = 0; i < 100 && Health((*server)->address()) != want; ++i) {
      std::this_thread::sleep_for(50ms);
    }
    return Health((*server)->address());
  };
  EXPECT_EQ(await("SERVING"), "SERVING");
  ready = false;
  EXPECT_EQ(await("NOT_SERVING"), "NOT_SERVING");
  ready = true;
  EXPECT_EQ(await("SERVING"), "SERVING");
  readiness.Drain("draining");
  EXPECT_EQ(Health((*server)->address()), "NOT_SERVING");
}

TEST(ServerTest, HeartbeatReason) {
  FakeClock clock;
  Heartbeat heartbeat(&clock);
  const auto reason = Readiness::FromHeartbeat(&heartbeat, 5s, "step loop");
  EXPECT_EQ(reason(), "");
  clock.Advance(6s);
  EXPECT_EQ(reason(), "the step loop has not gone round for more than 5 s");
}

TEST(ServerTest, PortInUseNamesTheAddress) {
  Echo echo, other;
  auto server = RpcServer::Start({}, {&echo});
  ASSERT_TRUE(server.ok());
  ServerOptions same;
  same.listen = (*server)->address();
  const auto second = RpcServer::Start(same, {&other});
  ASSERT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(same.listen));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
}

TEST(ServerTest, BadAddressesAreRefusedWithASentence) {
  Echo echo;
  for (const char* listen : {"", "7000", "localhost", ":7000", "localhost:http", "localhost:70000",
                             "::1:7000", "localhost:-1"}) {
    ServerOptions options;
    options.listen = listen;
    const auto server = RpcServer::Start(options, {&echo});
    EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument) << listen;
  }
  ServerOptions options;
  options.listen = "192.0.2.1:7000";  // reserved for documentation: nobody's
  const auto server = RpcServer::Start(options, {&echo});
  EXPECT_EQ(server.status().code(), absl::StatusCode::kUnavailable) << server.status();
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("192.0.2.1:7000"));
}

}  // namespace
}  // namespace coppice
