#include "client/client.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <thread>

#include "coppice/v1/cluster.grpc.pb.h"
#include "coppice/v1/inference.grpc.pb.h"
#include "services/common/server.h"

namespace coppice {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::GenerateDelta Delta(uint32_t offset, std::vector<uint32_t> ids, const std::string& text) {
  v1::GenerateDelta delta;
  delta.set_request_id("r1");
  delta.set_token_offset(offset);
  delta.mutable_token_ids()->Add(ids.begin(), ids.end());
  delta.set_text(text);
  return delta;
}
v1::GenerateDelta WithSeed(v1::GenerateDelta delta, uint64_t seed) {
  delta.set_seed(seed);
  return delta;
}
v1::GenerateDelta Last(v1::GenerateDelta delta) {
  delta.mutable_final()->set_finish_reason(v1::FINISH_LENGTH);
  return delta;
}

// A router that plays one script per call, in order, and remembers what it was asked.
class FakeRouter : public v1::Inference::Service {
 public:
  struct Script {
    std::vector<v1::GenerateDelta> deltas;
    grpc::Status status;
    bool hang = false;  // until cancelled
  };
  std::vector<Script> scripts;
  std::vector<v1::GenerateRequest> requests;
  bool cancelled = false;

  explicit FakeRouter(const std::string& listen = "127.0.0.1:0")
      : server_(*RpcServer::Start({.listen = listen}, {this, &cluster_})) {}
  const std::string& address() const { return server_->address(); }
  void Stop() { server_.reset(); }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateDelta>* writer) override {
    const size_t call = requests.size();
    requests.push_back(*request);
    if (call >= scripts.size()) return {grpc::StatusCode::INTERNAL, "no script is left"};
    for (const v1::GenerateDelta& delta : scripts[call].deltas) writer->Write(delta);
    while (scripts[call].hang && !context->IsCancelled()) std::this_thread::sleep_for(1ms);
    cancelled = cancelled || context->IsCancelled();
    return scripts[call].status;
  }
  grpc::Status Tokenize(grpc::ServerContext*, const v1::TokenizeRequest* request,
                        v1::TokenizeResponse* response) override {
    if (request->has_chat()) response->add_ids(request->chat().messages_size());
    for (const char c : request->text()) response->add_ids(c);
    return grpc::Status::OK;
  }
  grpc::Status Detokenize(grpc::ServerContext*, const v1::DetokenizeRequest* request,
                          v1::DetokenizeResponse* response) override {
    for (const uint32_t id : request->ids()) response->mutable_text()->push_back(id);
    return grpc::Status::OK;
  }
  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest*,
                        v1::Model* response) override {
    response->set_name("demo");
    return grpc::Status::OK;
  }
  grpc::Status Cancel(grpc::ServerContext*, const v1::CancelRequest* request,
                      v1::CancelResponse* response) override {
    response->set_found(request->request_id() == known_request);
    return grpc::Status::OK;
  }
  std::string known_request;

 private:
  class FakeCluster : public v1::Cluster::Service {
    grpc::Status GetState(grpc::ServerContext*, const v1::GetStateRequest*,
                          v1::ClusterState* response) override {
      response->mutable_router()->set_name("router-1");
      return grpc::Status::OK;
    }
  } cluster_;
  std::unique_ptr<RpcServer> server_;
};

const grpc::Status kUnavailable(grpc::StatusCode::UNAVAILABLE, "shutting down");

ClientOptions Options(std::vector<std::string> routers) {
  ClientOptions options;
  options.routers = std::move(routers);
  options.first_backoff = 1ms;
  options.max_backoff = 5ms;
  options.attempts_to_resume = 4;
  return options;
}

v1::GenerateRequest Request() {
  v1::GenerateRequest request;
  request.set_text("hello");
  request.set_max_tokens(4);
  return request;
}

TEST(ClientTest, StreamsToTheEnd) {
  FakeRouter router;
  router.scripts = {{{WithSeed(Delta(0, {1, 2}, "ab"), 9), Last(Delta(2, {3}, "c"))}, {}}};
  Client client(Options({router.address()}));
  std::vector<std::string> texts;
  const auto done = client.Generate(Request(), [&](const v1::GenerateDelta& delta) {
    texts.push_back(delta.text());
    return true;
  });
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_THAT(texts, ElementsAre("ab", "c"));
  EXPECT_THAT(done->token_ids, ElementsAre(1, 2, 3));
  EXPECT_EQ(done->text, "abc");
  EXPECT_EQ(done->seed, 9u);
  EXPECT_EQ(done->request_id, "r1");
  EXPECT_EQ(done->final.finish_reason(), v1::FINISH_LENGTH);
  EXPECT_EQ(done->resumes, 0);
  EXPECT_GT(done->ttft_ms, 0);
  EXPECT_GE(done->total_ms, done->ttft_ms);
}

TEST(ClientTest, ResumesOnTheNextRouterWithTheSameSeedAndDropsWhatComesTwice) {
  FakeRouter first, second;
  first.scripts = {{{WithSeed(Delta(0, {1, 2}, "ab"), 9)}, kUnavailable}};
  second.scripts = {
      {{Delta(0, {1, 2}, "ab"), Delta(2, {3}, "c"), Delta(2, {3}, "c"), Last(Delta(3, {4}, "d"))},
       {}}};
  Client client(Options({first.address(), second.address()}));
  std::string text;
  const auto done = client.Generate(Request(), [&](const v1::GenerateDelta& delta) {
    text += delta.text();
    return true;
  });
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_THAT(done->token_ids, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(done->text, "abcd");
  EXPECT_EQ(text, "abcd");
  EXPECT_EQ(done->resumes, 1);
  ASSERT_EQ(second.requests.size(), 1u);
  const v1::GenerateRequest& resumed = second.requests[0];
  EXPECT_EQ(resumed.text(), "hello");
  EXPECT_EQ(resumed.max_tokens(), 4u);
  EXPECT_EQ(resumed.resume().seed(), 9u);
  EXPECT_THAT(resumed.resume().token_ids(), ElementsAre(1, 2));
}

TEST(ClientTest, NothingReceivedIsSentAgainAsItWas) {
  FakeRouter first, second;
  first.scripts = {{{}, kUnavailable}};
  second.scripts = {{{Last(WithSeed(Delta(0, {1}, "a"), 9))}, {}}};
  Client client(Options({first.address(), second.address()}));
  ASSERT_TRUE(client.Generate(Request()).ok());
  EXPECT_FALSE(second.requests[0].has_resume());
}

TEST(ClientTest, AStreamThatEndsTooEarlyOrSkipsTokensIsResumed) {
  FakeRouter router;
  router.scripts = {{{WithSeed(Delta(0, {1}, "a"), 9)}, {}},
                    {{Delta(2, {3}, "c")}, {}},
                    {{Delta(0, {1, 2}, "ab")}, {}},
                    {{Delta(1, {2}, "b"), Last(Delta(2, {}, ""))}, {}}};
  Client client(Options({router.address()}));
  const auto done = client.Generate(Request());
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(done->text, "ab");
  EXPECT_THAT(done->token_ids, ElementsAre(1, 2));
  EXPECT_EQ(router.requests.size(), 4u);
}

TEST(ClientTest, GivesUpAfterABoundedNumberOfAttempts) {
  FakeRouter router;
  router.scripts.assign(20, {{}, kUnavailable});
  router.scripts[0].deltas = {WithSeed(Delta(0, {1}, "a"), 9)};
  Client client(Options({router.address()}));
  const auto done = client.Generate(Request());
  EXPECT_EQ(done.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(done.status().message()), HasSubstr(router.address()));
  EXPECT_EQ(router.requests.size(), 4u);
}

TEST(ClientTest, ARouterThatComesBackIsNoticedAtOnce) {
  auto router = std::make_unique<FakeRouter>();
  const std::string address = router->address();
  router->scripts = {{{WithSeed(Delta(0, {1}, "a"), 9)}, {}, true}};
  ClientOptions options = Options({address});
  options.first_backoff = options.max_backoff = 20s;
  Client client(options);
  auto stream = client.StartGenerate(Request());
  v1::GenerateDelta delta;
  ASSERT_TRUE(stream->Next(&delta));
  router->Stop();
  router.reset();
  std::thread restart([&] {
    std::this_thread::sleep_for(300ms);
    router = std::make_unique<FakeRouter>(address);
    router->scripts = {{{Last(Delta(1, {2}, "b"))}, {}}};
  });
  const auto start = std::chrono::steady_clock::now();
  while (stream->Next(&delta)) {
  }
  restart.join();
  EXPECT_EQ(stream->Finish()->text, "ab");
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
}

TEST(ClientTest, UnreachableRoutersAreNamed) {
  FakeRouter router;
  const std::string address = router.address();
  router.Stop();
  Client client(Options({address}));
  const auto done = client.Generate(Request());
  EXPECT_EQ(done.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(done.status().message()), HasSubstr(address));
  EXPECT_EQ(client.GetModel().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Client(Options({})).Generate(Request()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ClientTest, OtherErrorsAreNotRetried) {
  FakeRouter router;
  router.scripts = {{{}, {grpc::StatusCode::INVALID_ARGUMENT, "temperature is negative"}}};
  Client client(Options({router.address()}));
  const auto done = client.Generate(Request());
  EXPECT_EQ(done.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(done.status().message(), "temperature is negative");
  EXPECT_EQ(router.requests.size(), 1u);
}

TEST(ClientTest, CancelEndsTheStreamOnBothSides) {
  FakeRouter router;
  router.scripts = {{{WithSeed(Delta(0, {1}, "a"), 9)}, {}, true}};
  Client client(Options({router.address()}));
  auto stream = client.StartGenerate(Request());
  v1::GenerateDelta delta;
  ASSERT_TRUE(stream->Next(&delta));
  std::thread other([&] { stream->Cancel(); });
  EXPECT_FALSE(stream->Next(&delta));
  other.join();
  EXPECT_EQ(stream->Finish().status().code(), absl::StatusCode::kCancelled);
  router.Stop();
  EXPECT_TRUE(router.cancelled);
}

TEST(ClientTest, DroppingTheStreamCancels) {
  FakeRouter router;
  router.scripts = {{{WithSeed(Delta(0, {1}, "a"), 9)}, {}, true}};
  {
    Client client(Options({router.address()}));
    auto stream = client.StartGenerate(Request());
    v1::GenerateDelta delta;
    ASSERT_TRUE(stream->Next(&delta));
  }
  router.Stop();
  EXPECT_TRUE(router.cancelled);
}

TEST(ClientTest, TheDeadlineIsTheWholeGenerations) {
  FakeRouter router;
  router.scripts = {{{WithSeed(Delta(0, {1}, "a"), 9)}, {}, true}};
  Client client(Options({router.address()}));
  auto stream = client.StartGenerate(Request(), std::chrono::system_clock::now() + 100ms);
  v1::GenerateDelta delta;
  while (stream->Next(&delta)) {
  }
  EXPECT_EQ(stream->Finish().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ClientTest, UnaryCallsFallOverToARouterThatIsThere) {
  FakeRouter gone, router;
  const std::string address = gone.address();
  gone.Stop();
  router.known_request = "r1";
  Client client(Options({address, router.address()}));
  EXPECT_THAT(*client.Tokenize("ab"), ElementsAre('a', 'b'));
  v1::Chat chat;
  chat.add_messages();
  EXPECT_THAT(*client.Tokenize(chat), ElementsAre(1));
  EXPECT_EQ(*client.Detokenize({'a', 'b'}), "ab");
  EXPECT_EQ(client.GetModel()->name(), "demo");
  EXPECT_EQ(client.GetState()->router().name(), "router-1");
  EXPECT_TRUE(*client.Cancel("r1"));
  EXPECT_FALSE(*client.Cancel("r2"));
}

}  // namespace
}  // namespace coppice
