#include "services/verifier/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "services/common/channel.h"
#include "services/common/server.h"
#include "services/verifier/fake_target.h"
#include "services/verifier/wire.h"

namespace coppice::verifier {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using StepCall = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResult>;

template <typename Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

// A cable between a client and a server, to be cut.
class Cable {
 public:
  explicit Cable(int server_port) : server_port_(server_port) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at = Loopback(0);
    socklen_t size = sizeof at;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size);
    address_ = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
    acceptor_ = std::thread([this] {
      client_ = accept(listener_, nullptr, nullptr);
      server_ = socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in to = Loopback(server_port_);
      EXPECT_EQ(connect(server_, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
      std::thread back([this] { Relay(server_, client_); });
      Relay(client_, server_);
      back.join();
      close(client_);
      close(server_);
    });
  }
  ~Cable() {
    Cut();
    acceptor_.join();
    close(listener_);
  }
  const std::string& address() const { return address_; }
  // As when the machine at one end loses its power, but noticed at once.
  void Cut() {
    for (const int fd : {client_.load(), server_.load()}) {
      if (fd >= 0) shutdown(fd, SHUT_RDWR);
    }
  }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(static_cast<uint16_t>(port));
    return at;
  }
  void Relay(int from, int to) {
    char buffer[4096];
    ssize_t n;
    while ((n = read(from, buffer, sizeof buffer)) > 0) {
      for (ssize_t sent = 0; sent < n;) {
        const ssize_t w = send(to, buffer + sent, n - sent, MSG_NOSIGNAL);
        if (w <= 0) break;
        sent += w;
      }
    }
    shutdown(to, SHUT_RDWR);
  }

  const int server_port_;
  int listener_ = -1;
  std::atomic<int> client_{-1};
  std::atomic<int> server_{-1};
  std::string address_;
  std::thread acceptor_;
};

struct Bench {
  Bench() {
    FakeTargetOptions options;
    auto fake = std::make_unique<FakeTarget>(options);
    target = fake.get();
    EngineOptions engine_options;
    engine_options.pages = options.pages;
    engine_options.page_size = options.page_size;
    engine_options.check_every_step = true;
    loop = std::make_unique<StepLoop>(
        std::make_unique<Engine>(std::move(fake), engine_options, nullptr, &clock),
        StepLoopOptions{}, &clock);
    auto started = RpcServer::Start(ServerOptions(), {&service});
    if (!started.ok()) ADD_FAILURE() << started.status();
    server = *std::move(started);
    stub = v1::Verifier::NewStub(MakeChannel(server->address()));
  }
  void Ready() {
    loop->Start();
    v1::VerifierInfo info;
    info.set_name("v1");
    info.set_max_rows(99);
    service.Ready(loop.get(), info);
    server->SetServing(true);
  }
  // The server first: its streams refer to the loop.
  ~Bench() { server.reset(); }

  FakeClock clock;
  FakeTarget* target;
  std::unique_ptr<StepLoop> loop;
  VerifierService service;
  std::unique_ptr<RpcServer> server;
  std::unique_ptr<v1::Verifier::Stub> stub;
};

v1::StepRequest Hello(const std::string& router, uint64_t epoch) {
  v1::StepRequest request;
  request.mutable_hello()->set_router(router);
  request.mutable_hello()->set_router_epoch(epoch);
  return request;
}

void AddAdmit(v1::StepRequest* request, uint64_t sequence) {
  v1::Admit* admit = request->add_admits();
  admit->set_sequence(sequence);
  for (const uint32_t t : {1, 2, 3}) admit->add_tokens(t);
  admit->set_max_tokens(5);
  admit->set_logprobs(2);
}

void AddPrefill(v1::StepRequest* request, uint64_t sequence) {
  v1::Work* work = request->add_work();
  work->set_sequence(sequence);
  work->set_prefill(3);
}

struct Router {
  Router(v1::Verifier::Stub* stub, const std::string& name, uint64_t epoch)
      : call(stub->Step(&context)) {
    call->Write(Hello(name, epoch));
  }
  v1::StepResult Read() {
    v1::StepResult result;
    read = call->Read(&result);
    return result;
  }
  grpc::Status End() {
    v1::StepResult result;
    while (call->Read(&result)) {
    }
    return call->Finish();
  }
  grpc::ClientContext context;
  std::unique_ptr<StepCall> call;
  bool read = false;
};

TEST(VerifierService, AnswersUnavailableUntilTheModelIsLoaded) {
  Bench bench;
  grpc::ClientContext context;
  v1::VerifierInfo info;
  const grpc::Status status = bench.stub->GetInfo(&context, {}, &info);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("loading"));
  Router early(bench.stub.get(), "north", 7);
  EXPECT_EQ(early.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  bench.Ready();
  grpc::ClientContext again;
  EXPECT_TRUE(bench.stub->GetInfo(&again, {}, &info).ok());
  EXPECT_EQ(info.name(), "v1");
  EXPECT_EQ(info.max_rows(), 99u);
  EXPECT_EQ(info.pool().free_pages(), 64u);
}

TEST(VerifierService, StepsOverTheWire) {
  Bench bench;
  bench.Ready();
  Router router(bench.stub.get(), "north", 7);
  EXPECT_THAT(router.Read().resumed(), SizeIs(0));
  v1::StepRequest request;
  request.set_step(1);
  AddAdmit(&request, 5);
  AddPrefill(&request, 5);
  v1::Admit* refused = request.add_admits();
  refused->set_sequence(6);
  router.call->Write(request);
  v1::StepResult result = router.Read();
  EXPECT_EQ(result.step(), 1u);
  ASSERT_THAT(result.results(), SizeIs(1));
  const v1::WorkResult& prefill = result.results(0);
  EXPECT_EQ(prefill.outcome(), v1::WorkResult::DONE);
  EXPECT_EQ(prefill.base_len(), 3u);
  SamplingParams greedy;
  const std::vector<int32_t> expected = FakeTarget::Continue({1, 2, 3}, greedy, 5, 16);
  EXPECT_THAT(prefill.tokens(), ElementsAre(expected[0]));
  ASSERT_THAT(prefill.logprobs(), SizeIs(1));
  EXPECT_EQ(prefill.logprobs(0).chosen().token(), static_cast<uint32_t>(expected[0]));
  EXPECT_THAT(prefill.logprobs(0).top(), SizeIs(2));
  ASSERT_THAT(result.refused(), SizeIs(1));
  EXPECT_EQ(result.refused(0).sequence(), 6u);
  EXPECT_EQ(result.refused(0).code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(result.pool().free_pages(), 63u);
  EXPECT_EQ(result.pool().sequences(), 1u);
  EXPECT_EQ(result.timing().rows(), 3u);
  EXPECT_THAT(result.expert_counts(), ElementsAre(1, 1, 1));

  request.Clear();
  request.set_step(2);
  v1::Work* tree = request.add_work();
  tree->set_sequence(5);
  tree->set_base_len(3);
  for (int i = 0; i < 5; ++i) {
    tree->add_tokens(expected[i]);
    tree->add_parents(i - 1);
  }
  router.call->Write(request);
  result = router.Read();
  EXPECT_EQ(result.results(0).accepted(), 3u);
  EXPECT_EQ(result.results(0).finish_reason(), v1::FINISH_LENGTH);
  EXPECT_EQ(result.pool().free_pages(), 64u);

  grpc::ClientContext context;
  v1::VerifierInfo info;
  ASSERT_TRUE(bench.stub->GetInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.owner(), "north");
  router.call->WritesDone();
  EXPECT_TRUE(router.End().ok());
  EXPECT_TRUE(Eventually([&] { return bench.loop->snapshot().owner.empty(); }))
      << "a stream that ends as it should gives up the lease at once";
  EXPECT_EQ(bench.loop->snapshot().pool.sequences, 0);
}

TEST(VerifierService, TheStreamIsTheLease) {
  Bench bench;
  bench.Ready();
  auto north = std::make_unique<Router>(bench.stub.get(), "north", 7);
  north->Read();
  v1::StepRequest request;
  AddAdmit(&request, 5);
  AddPrefill(&request, 5);
  north->call->Write(request);
  const v1::StepResult first = north->Read();

  Router south(bench.stub.get(), "south", 8);
  const grpc::Status refused = south.End();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("north"));

  // The connection breaks: nothing is lost for the same epoch.
  north->context.TryCancel();
  EXPECT_EQ(north->End().error_code(), grpc::StatusCode::CANCELLED);
  north = std::make_unique<Router>(bench.stub.get(), "north", 7);
  EXPECT_THAT(north->Read().resumed(), ElementsAre(5));
  v1::StepRequest repeat;
  AddPrefill(&repeat, 5);
  north->call->Write(repeat);
  EXPECT_EQ(north->Read().results(0).tokens(0), first.results(0).tokens(0));

  north->context.TryCancel();
  north->End();
  ASSERT_TRUE(Eventually([&] {
    // Held, not free: a new epoch is refused although the stream is gone.
    Router other(bench.stub.get(), "south", 8);
    return other.End().error_message().find("kept for router north") != std::string::npos;
  }));
  bench.clock.Advance(seconds(10));
  Router other(bench.stub.get(), "south", 8);
  other.Read();
  EXPECT_TRUE(other.read);
  EXPECT_EQ(bench.loop->snapshot().pool.free_pages, 64);
  other.call->WritesDone();
  EXPECT_TRUE(other.End().ok());
}

TEST(VerifierService, ABrokenConnectionIsABreakNotAnEnd) {
  Bench bench;
  bench.Ready();
  for (int i = 0; i < 10; ++i) {
    Cable cable(bench.server->port());
    ChannelOptions options;
    options.own_connection = true;
    auto stub = v1::Verifier::NewStub(MakeChannel(cable.address(), options));
    Router north(stub.get(), "north", 7);
    const v1::StepResult hello = north.Read();
    ASSERT_TRUE(north.read);
    EXPECT_THAT(hello.resumed(), SizeIs(i));
    v1::StepRequest request;
    AddAdmit(&request, 100 + i);
    north.call->Write(request);
    north.Read();
    cable.Cut();
    EXPECT_EQ(north.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_EQ(bench.loop->snapshot().owner, "north");
}

TEST(VerifierService, TheFirstMessageIsAHelloAndNothingElse) {
  Bench bench;
  bench.Ready();
  const auto expect = [&](const std::vector<v1::StepRequest>& requests, const std::string& error) {
    grpc::ClientContext context;
    auto call = bench.stub->Step(&context);
    for (const v1::StepRequest& request : requests) call->Write(request);
    v1::StepResult result;
    while (call->Read(&result)) {
    }
    const grpc::Status status = call->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(error));
  };
  v1::StepRequest work;
  AddPrefill(&work, 1);
  expect({work}, "a hello and nothing else");
  v1::StepRequest both = Hello("north", 7);
  AddAdmit(&both, 1);
  expect({both}, "a hello and nothing else");
  expect({Hello("north", 7), Hello("north", 7)}, "only the first");
  EXPECT_TRUE(Eventually([&] { return bench.loop->snapshot().owner.empty(); }));
}

TEST(VerifierService, ManyStepsMayBeUnderWay) {
  Bench bench;
  bench.target->on_forward = [] { std::this_thread::sleep_for(milliseconds(1)); };
  bench.Ready();
  Router router(bench.stub.get(), "north", 7);
  // More than the stream takes at once: it is read on as answers leave.
  constexpr int kSteps = 60;
  std::thread writer([&] {
    for (int s = 1; s <= kSteps; ++s) {
      v1::StepRequest request;
      request.set_step(s);
      AddAdmit(&request, s);
      AddPrefill(&request, s);
      request.add_releases(s - 1);
      router.call->Write(request);
    }
    router.call->WritesDone();
  });
  router.Read();
  int answered = 0;
  // Half-closing ends the stream once all that was read is answered or dropped; until then the
  // answers come in order.
  v1::StepResult result;
  while (router.call->Read(&result)) EXPECT_EQ(result.step(), static_cast<uint64_t>(++answered));
  writer.join();
  EXPECT_TRUE(router.call->Finish().ok());
  EXPECT_GE(answered, kSteps - 20);
}

TEST(VerifierService, CancelAtAnyMomentLeavesNothingBehind) {
  Bench bench;
  bench.Ready();
  for (int i = 0; i < 30; ++i) {
    Router router(bench.stub.get(), "north", 7);
    v1::StepRequest request;
    AddAdmit(&request, 100 + i);
    AddPrefill(&request, 100 + i);
    router.call->Write(request);
    if (i % 3 > 0) router.Read();
    if (i % 3 > 1) router.Read();
    std::this_thread::sleep_for(std::chrono::microseconds(i * 37));
    router.context.TryCancel();
    router.End();
  }
  EXPECT_TRUE(Eventually([&] {
    bench.clock.Advance(seconds(10));
    return bench.loop->snapshot().owner.empty();
  }));
  EXPECT_EQ(bench.loop->snapshot().pool.free_pages, 64);
  EXPECT_EQ(bench.loop->snapshot().pool.sequences, 0);
}

TEST(Wire, NumbersTheEngineCannotHoldAreRefusedNotChanged) {
  v1::StepRequest request;
  v1::Admit* admit = request.add_admits();
  admit->add_tokens(4294967295u);
  admit->set_top_k(4294967295u);
  v1::Work* work = request.add_work();
  work->set_base_len(~uint64_t{0});
  const Step step = FromWire(request);
  EXPECT_LT(step.admits[0].tokens[0], 0);
  EXPECT_GT(step.admits[0].sampling.top_k, 0);
  EXPECT_EQ(step.admits[0].sampling.top_p, 1) << "0 is off";
  EXPECT_GT(step.work[0].base_len, int64_t{1} << 50);
}

}  // namespace
}  // namespace coppice::verifier
