// The router over real gRPC, against fake peers behind servers of their own.
#include "services/router/service.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coppice/v1/drafter.grpc.pb.h"
#include "coppice/v1/verifier.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/common/channel.h"
#include "services/common/metrics.h"
#include "services/common/server.h"
#include "services/router/drafter_client.h"
#include "services/router/fake_peers.h"
#include "services/router/metrics.h"
#include "services/router/verifier_client.h"
#include "services/router/wire.h"

namespace coppice::router {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

template <typename Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

StepRequest FromWire(const v1::StepRequest& request) {
  StepRequest out;
  out.step = request.step();
  for (const v1::Admit& admit : request.admits()) {
    Admit& to = out.admits.emplace_back();
    to.sequence = admit.sequence();
    to.tokens.assign(admit.tokens().begin(), admit.tokens().end());
    to.temperature = admit.temperature();
    to.top_p = admit.top_p();
    to.top_k = static_cast<int>(admit.top_k());
    to.seed = admit.seed();
    to.max_tokens = static_cast<int>(admit.max_tokens());
    to.stop_token_ids.assign(admit.stop_token_ids().begin(), admit.stop_token_ids().end());
    if (admit.has_logprobs()) to.logprobs = static_cast<int>(admit.logprobs());
    to.drafter = admit.drafter();
  }
  for (const v1::Work& work : request.work()) {
    Work& to = out.work.emplace_back();
    to.sequence = work.sequence();
    to.base_len = static_cast<int64_t>(work.base_len());
    to.prefill = static_cast<int>(work.prefill());
    to.tokens.assign(work.tokens().begin(), work.tokens().end());
    to.parents.assign(work.parents().begin(), work.parents().end());
  }
  out.releases.assign(request.releases().begin(), request.releases().end());
  return out;
}

void PoolToWire(const PoolState& pool, v1::PoolState* out) {
  out->set_pages(pool.pages);
  out->set_free_pages(pool.free_pages);
  out->set_page_size(pool.page_size);
  out->set_sequences(pool.sequences);
}

v1::StepResult ResultToWire(const StepResult& result) {
  v1::StepResult out;
  out.set_step(result.step);
  for (const WorkResult& work : result.results) {
    v1::WorkResult* to = out.add_results();
    to->set_sequence(work.sequence);
    to->set_outcome(static_cast<v1::WorkResult::Outcome>(work.outcome));
    to->set_base_len(work.base_len);
    to->mutable_tokens()->Add(work.tokens.begin(), work.tokens.end());
    for (const PositionScores& scores : work.logprobs) {
      v1::PositionLogProbs* position = to->add_logprobs();
      position->mutable_chosen()->set_token(scores.chosen.token);
      position->mutable_chosen()->set_log_prob(scores.chosen.log_prob);
      v1::TokenLogProb* top = position->add_top();
      top->set_token(scores.chosen.token);
      top->set_log_prob(scores.chosen.log_prob);
    }
    to->set_accepted(work.accepted);
    to->set_finish_reason(static_cast<v1::FinishReason>(work.finish_reason));
    to->set_error(work.error);
    to->set_cached_tokens(work.cached_tokens);
  }
  PoolToWire(result.pool, out.mutable_pool());
  out.mutable_timing()->set_forward_us(result.timing.forward_us);
  for (const AdmitResult& refused : result.refused) {
    v1::AdmitResult* to = out.add_refused();
    to->set_sequence(refused.sequence);
    to->set_code(static_cast<int>(refused.status.code()));
    to->set_error(std::string(refused.status.message()));
  }
  return out;
}

// What both fake services share.
struct Peers {
  std::mutex mutex;
  FakeVerifier verifier;
  FakeDrafter drafter{&verifier};
  std::string owner;  // not empty: refuses
  milliseconds step_time{0};
  int streams = 0;
};

class VerifierServer : public v1::Verifier::Service {
 public:
  explicit VerifierServer(Peers* peers) : peers_(peers) {}

  grpc::Status GetInfo(grpc::ServerContext*, const v1::GetVerifierInfoRequest*,
                       v1::VerifierInfo* response) override {
    std::lock_guard<std::mutex> lock(peers_->mutex);
    *response = ToWire(peers_->verifier.info);
    PoolToWire(peers_->verifier.Pool(), response->mutable_pool());
    return grpc::Status::OK;
  }
  grpc::Status Step(grpc::ServerContext*,
                    grpc::ServerReaderWriter<v1::StepResult, v1::StepRequest>* stream) override {
    v1::StepRequest request;
    if (!stream->Read(&request)) return grpc::Status::OK;
    EXPECT_TRUE(request.has_hello());
    EXPECT_EQ(request.hello().router(), "r1");
    EXPECT_EQ(request.hello().router_epoch(), 42u);
    v1::StepResult first;
    {
      std::lock_guard<std::mutex> lock(peers_->mutex);
      if (!peers_->owner.empty()) {
        return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "owned by " + peers_->owner);
      }
      ++peers_->streams;
      for (const auto& [id, sequence] : peers_->verifier.sequences) first.add_resumed(id);
      PoolToWire(peers_->verifier.Pool(), first.mutable_pool());
    }
    stream->Write(first);
    while (stream->Read(&request)) {
      v1::StepResult result;
      {
        std::lock_guard<std::mutex> lock(peers_->mutex);
        result = ResultToWire(peers_->verifier.Execute(FromWire(request)));
      }
      std::this_thread::sleep_for(peers_->step_time);
      stream->Write(result);
    }
    return grpc::Status::OK;
  }

 private:
  Peers* const peers_;
};

class DrafterServer : public v1::Drafter::Service {
 public:
  explicit DrafterServer(Peers* peers) : peers_(peers) {}

  grpc::Status GetInfo(grpc::ServerContext*, const v1::GetDrafterInfoRequest*,
                       v1::DrafterInfo* response) override {
    *response = ToWire(peers_->drafter.info);
    return grpc::Status::OK;
  }
  grpc::Status Draft(grpc::ServerContext*,
                     grpc::ServerReaderWriter<v1::DraftReply, v1::DraftBatch>* stream) override {
    v1::DraftBatch message;
    while (stream->Read(&message)) {
      std::unique_lock<std::mutex> lock(peers_->mutex);
      DraftBatch batch;
      batch.batch = message.batch();
      batch.verifier_epoch = message.verifier_epoch();
      for (const v1::DraftBatch::Query& query : message.queries()) {
        batch.queries.push_back({query.sequence(), static_cast<int32_t>(query.pending_token()),
                                 static_cast<int64_t>(query.base_len())});
      }
      batch.top_k = static_cast<int>(message.top_k());
      peers_->drafter.batches.assign(1, batch);
      const DraftReply reply = peers_->drafter.Answer()->reply;
      lock.unlock();
      v1::DraftReply out;
      out.set_batch(reply.batch);
      out.set_draft_us(reply.draft_us);
      for (const DraftAnswer& answer : reply.answers) {
        v1::DraftReply::Answer* to = out.add_answers();
        to->set_sequence(answer.sequence);
        to->set_base_len(answer.base_len);
        to->set_outcome(static_cast<v1::DraftReply::Outcome>(answer.outcome));
        to->mutable_tokens()->Add(answer.tokens.begin(), answer.tokens.end());
        to->mutable_log_probs()->Add(answer.log_probs.begin(), answer.log_probs.end());
      }
      stream->Write(out);
    }
    return grpc::Status::OK;
  }

 private:
  Peers* const peers_;
};

class RouterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StartVerifier("127.0.0.1:0");
    StartDrafter("127.0.0.1:0");
    verifier_address_ = verifier_server_->address();
    drafter_address_ = drafter_server_->address();

    options_.name = "r1";
    options_.verifier_address = verifier_address_;
    options_.drafter_address = drafter_address_;
    options_.vocab_size = kFakeVocab;
    options_.max_position_embeddings = kFakePositions;
    auto post = [this](Event event, ReadTicket ticket) {
      loop_->Post(std::move(event), std::move(ticket));
    };
    VerifierClient::Options verifier;
    verifier.address = verifier_address_;
    verifier.router = "r1";
    verifier.router_epoch = 42;
    verifier.retry = milliseconds(20);
    verifier_client_ = std::make_unique<VerifierClient>(
        verifier, [this](const VerifierInfo& info) { return CheckVerifier(info, options_); }, post);
    DrafterClient::Options drafter;
    drafter.address = drafter_address_;
    drafter.retry = milliseconds(20);
    drafter_client_ = std::make_unique<DrafterClient>(drafter, post);
    auto random = [this] {
      std::lock_guard<std::mutex> lock(random_mutex_);
      return static_cast<uint64_t>(random_());
    };
    loop_ = std::make_unique<SchedulerLoop>(options_, FakeTokenizer(), Clock::Real(),
                                            verifier_client_.get(), drafter_client_.get(), random);
    metrics_ = Metrics::Create("127.0.0.1:0", 0).value();
    router_metrics_ = std::make_unique<RouterMetrics>(metrics_.get(), &loop_->counters());
    InferenceOptions inference;
    inference.limits.vocab_size = kFakeVocab;
    inference.limits.max_position_embeddings = kFakePositions;
    inference.limits.eos_token_ids = {kFakeEos};
    inference.model_name = "fake";
    inference.build = {"1.2.3", "abc", "cpu"};
    inference.on_final = [this](const Final& final) { router_metrics_->Observe(final); };
    inference_ =
        std::make_unique<InferenceService>(inference, FakeTokenizer(), loop_.get(), random);
    cluster_ = std::make_unique<ClusterService>(
        ClusterOptions{"r1", 42, verifier_address_, drafter_address_, {"1.2.3", "abc", "cpu"}},
        loop_.get());
    server_ = RpcServer::Start(ServerOptions(), {inference_.get(), cluster_.get()}).value();
    const std::shared_ptr<grpc::Channel> channel = MakeChannel(server_->address());
    stub_ = v1::Inference::NewStub(channel);
    admin_ = v1::Cluster::NewStub(channel);
    loop_->Start();
    verifier_client_->Start();
    drafter_client_->Start();
  }
  void TearDown() override {
    server_.reset();
    if (loop_ != nullptr) loop_->Stop();
    verifier_client_.reset();
    drafter_client_.reset();
    verifier_server_.reset();
    drafter_server_.reset();
  }

  void StartVerifier(const std::string& listen) {
    ServerOptions options;
    options.listen = listen;
    verifier_server_ = RpcServer::Start(options, {&verifier_service_}).value();
  }
  void StartDrafter(const std::string& listen) {
    ServerOptions options;
    options.listen = listen;
    drafter_server_ = RpcServer::Start(options, {&drafter_service_}).value();
  }
  bool Ready() {
    return Eventually(
        [&] { return loop_->NotReadyReason().empty() && loop_->counters().speculating.load(); });
  }
  v1::ClusterState State() {
    grpc::ClientContext context;
    v1::ClusterState state;
    EXPECT_TRUE(admin_->GetState(&context, v1::GetStateRequest(), &state).ok());
    return state;
  }
  bool NothingLeft() {
    return Eventually([&] {
      std::lock_guard<std::mutex> lock(peers_.mutex);
      return peers_.verifier.sequences.empty();
    });
  }

  static v1::GenerateRequest MakeRequest(const std::string& text, int max_tokens, uint64_t seed) {
    v1::GenerateRequest request;
    request.set_text(text);
    request.set_max_tokens(max_tokens);
    request.set_seed(seed);
    request.set_ignore_eos(true);
    return request;
  }
  struct Reply {
    std::vector<int32_t> tokens;
    std::string text;
    std::vector<v1::GenerateDelta> deltas;
    grpc::Status status;

    const v1::Final* final() const {
      return deltas.empty() || !deltas.back().has_final() ? nullptr : &deltas.back().final();
    }
  };
  // Reads it all; `each` sees every delta.
  Reply Generate(const v1::GenerateRequest& request,
                 std::function<void(const v1::GenerateDelta&)> each = nullptr,
                 std::optional<milliseconds> deadline = std::nullopt) {
    grpc::ClientContext context;
    if (deadline.has_value()) {
      context.set_deadline(std::chrono::system_clock::now() + *deadline);
    }
    auto reader = stub_->Generate(&context, request);
    Reply reply;
    v1::GenerateDelta delta;
    while (reader->Read(&delta)) {
      EXPECT_EQ(delta.token_offset(), reply.tokens.size() + request.resume().token_ids_size());
      EXPECT_EQ(delta.has_seed(), reply.deltas.empty());
      reply.tokens.insert(reply.tokens.end(), delta.token_ids().begin(), delta.token_ids().end());
      reply.text += delta.text();
      reply.deltas.push_back(delta);
      if (each) each(delta);
    }
    reply.status = reader->Finish();
    return reply;
  }
  static std::vector<int32_t> Truth(const v1::GenerateRequest& request) {
    std::vector<int32_t> prefix;
    for (char byte : request.text()) prefix.push_back(static_cast<unsigned char>(byte));
    std::vector<int32_t> truth;
    for (uint32_t i = 0; i < request.max_tokens(); ++i) {
      truth.push_back(FakeNext(prefix, request.seed()));
      prefix.push_back(truth.back());
    }
    return truth;
  }
  // The sentence of a refusal.
  std::string Refusal(const v1::GenerateRequest& request, grpc::StatusCode code) {
    const Reply reply = Generate(request);
    EXPECT_EQ(reply.status.error_code(), code) << reply.status.error_message();
    EXPECT_TRUE(reply.deltas.empty());
    return reply.status.error_message();
  }

  Peers peers_;
  VerifierServer verifier_service_{&peers_};
  DrafterServer drafter_service_{&peers_};
  std::unique_ptr<RpcServer> verifier_server_;
  std::unique_ptr<RpcServer> drafter_server_;
  std::string verifier_address_;
  std::string drafter_address_;
  SchedulerOptions options_;
  std::mutex random_mutex_;
  std::mt19937_64 random_{7};
  std::unique_ptr<VerifierClient> verifier_client_;
  std::unique_ptr<DrafterClient> drafter_client_;
  std::unique_ptr<SchedulerLoop> loop_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<RouterMetrics> router_metrics_;
  std::unique_ptr<InferenceService> inference_;
  std::unique_ptr<ClusterService> cluster_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::Inference::Stub> stub_;
  std::unique_ptr<v1::Cluster::Stub> admin_;
};

TEST_F(RouterTest, StreamsTheTargetsTokensInEveryMode) {
  ASSERT_TRUE(Ready());
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      v1::GenerateRequest request = MakeRequest("prompt " + std::to_string(i), 60, 100 + i);
      request.set_speculation(static_cast<v1::SpeculationMode>(1 + i % 4));
      request.set_logprobs(1);
      const Reply reply = Generate(request);
      EXPECT_TRUE(reply.status.ok()) << reply.status.error_message();
      EXPECT_EQ(reply.tokens, Truth(request));
      ASSERT_NE(reply.final(), nullptr);
      EXPECT_EQ(reply.final()->finish_reason(), v1::FINISH_LENGTH);
      EXPECT_EQ(reply.final()->usage().completion_tokens(), 60u);
      EXPECT_EQ(reply.final()->usage().prompt_tokens(), 8u);
      EXPECT_EQ(reply.deltas[0].seed(), request.seed());
      EXPECT_GT(reply.final()->timing().total_ms(), 0);
      int scores = 0;
      for (const v1::GenerateDelta& delta : reply.deltas) {
        EXPECT_EQ(delta.logprobs_size(), delta.token_ids_size());
        EXPECT_EQ(delta.request_id(), reply.deltas[0].request_id());
        scores += delta.logprobs_size();
      }
      EXPECT_EQ(scores, 60);
      EXPECT_EQ(reply.final()->speculation().drafted() == 0,
                request.speculation() == v1::SPECULATION_OFF);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(NothingLeft());
  const v1::ClusterState state = State();
  EXPECT_TRUE(state.router().ready());
  EXPECT_EQ(state.router().name(), "r1");
  EXPECT_EQ(state.router().epoch(), 42u);
  EXPECT_EQ(state.router().requests(), 8u);
  EXPECT_EQ(state.router().tokens(), 480u);
  EXPECT_EQ(state.router().running(), 0u);
  ASSERT_EQ(state.verifiers_size(), 1);
  EXPECT_EQ(state.verifiers(0).address(), verifier_address_);
  EXPECT_TRUE(state.verifiers(0).connected());
  EXPECT_EQ(state.verifiers(0).info().owner(), "r1");
  ASSERT_EQ(state.drafters_size(), 1);
  EXPECT_TRUE(state.drafters(0).speculating());
  EXPECT_GT(state.speculation().acceptance_length(), 1);
  router_metrics_->Update(true);
  for (const prometheus::MetricFamily& family : metrics_->registry().Collect()) {
    if (family.name == "router_generated_tokens_total") {
      EXPECT_EQ(family.metric[0].counter.value, 480);
    }
    if (family.name == "router_time_to_first_token_seconds") {
      EXPECT_EQ(family.metric[0].histogram.sample_count, 8u);
    }
  }
}

TEST_F(RouterTest, RefusalsNameTheField) {
  ASSERT_TRUE(Ready());
  const auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  v1::GenerateRequest good = MakeRequest("hello", 5, 1);
  EXPECT_THAT(Refusal(v1::GenerateRequest(), kInvalid), HasSubstr("prompt is empty"));
  v1::GenerateRequest request = good;
  request.set_text("");
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("prompt is empty"));
  request = good;
  request.mutable_chat();
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("chat has no messages"));
  request.mutable_chat()->add_messages()->set_role("nobody");
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("chat: "));
  v1::ChatMessage* message = request.mutable_chat()->mutable_messages(0);
  message->set_role("user");
  message->add_parts()->set_text("look: ");
  message->add_parts()->mutable_image()->set_url("data:");
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("chat: message 0: parts[1] is an image"));
  message->mutable_parts()->RemoveLast();
  message->set_content("hi");
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("message 0 has both content and parts"));
  request = good;
  request.set_prompt_logprobs(0);
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("prompt_logprobs is set"));
  request = good;
  request.set_min_p(-1);
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("min_p is -1"));
  request = good;
  request.add_logit_bias()->set_token(kFakeVocab);
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("logit_bias names the id 260"));
  request = good;
  request.mutable_token_ids()->add_ids(kFakeVocab);
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("token_ids[0] is 260"));
  request = good;
  request.set_speculation(static_cast<v1::SpeculationMode>(17));
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("speculation is 17"));
  request = good;
  request.set_max_tokens(1 << 20);
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("max_tokens (1048576)"));
  request = good;
  request.set_temperature(-1);
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("temperature is -1"));
  request = good;
  request.add_stop("");
  EXPECT_THAT(Refusal(request, kInvalid), HasSubstr("stop"));
  EXPECT_TRUE(Generate(good).status.ok());
  {
    std::lock_guard<std::mutex> lock(peers_.mutex);
    EXPECT_EQ(peers_.verifier.ever.size(), 1u);
  }
}

TEST_F(RouterTest, TokenizesDetokenizesAndDescribesTheModel) {
  grpc::ClientContext tokenize;
  v1::TokenizeRequest text;
  text.set_text("h\xC3\xA9");
  v1::TokenizeResponse ids;
  ASSERT_TRUE(stub_->Tokenize(&tokenize, text, &ids).ok());
  EXPECT_THAT(ids.ids(), ::testing::ElementsAre('h', 0xC3, 0xA9));
  grpc::ClientContext nothing;
  EXPECT_EQ(stub_->Tokenize(&nothing, v1::TokenizeRequest(), &ids).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);

  v1::DetokenizeRequest bytes;
  for (uint32_t id : {0x68, 0xC3, 0xA9, 0xC3}) bytes.add_ids(id);
  v1::DetokenizeResponse back;
  grpc::ClientContext detokenize;
  ASSERT_TRUE(stub_->Detokenize(&detokenize, bytes, &back).ok());
  EXPECT_EQ(back.text(), "h\xC3\xA9\xEF\xBF\xBD");
  bytes.add_ids(kFakeVocab);
  grpc::ClientContext outside;
  const grpc::Status status = stub_->Detokenize(&outside, bytes, &back);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("ids[4] is 260"));

  ASSERT_TRUE(Ready());
  grpc::ClientContext model_context;
  v1::Model model;
  ASSERT_TRUE(stub_->GetModel(&model_context, v1::GetModelRequest(), &model).ok());
  EXPECT_EQ(model.name(), "fake");
  EXPECT_EQ(model.fingerprint(), "0000000000000001");
  EXPECT_EQ(model.vocab_size(), static_cast<uint32_t>(kFakeVocab));
  EXPECT_EQ(model.build().version(), "1.2.3");
}

TEST_F(RouterTest, ADroppedStreamFreesItsSequence) {
  ASSERT_TRUE(Ready());
  peers_.step_time = milliseconds(5);
  {
    grpc::ClientContext context;
    auto reader = stub_->Generate(&context, MakeRequest("long", 2000, 1));
    v1::GenerateDelta delta;
    ASSERT_TRUE(reader->Read(&delta));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(NothingLeft());
  EXPECT_TRUE(Eventually([&] { return loop_->counters().cancelled == 1u; }));
}

TEST_F(RouterTest, CancelByIdEndsTheStreamWell) {
  ASSERT_TRUE(Ready());
  peers_.step_time = milliseconds(5);
  v1::GenerateRequest request = MakeRequest("long", 2000, 1);
  request.set_request_id("mine");
  bool asked = false;
  const Reply reply = Generate(request, [&](const v1::GenerateDelta& delta) {
    EXPECT_EQ(delta.request_id(), "mine");
    if (std::exchange(asked, true)) return;
    grpc::ClientContext context;
    v1::CancelRequest cancel;
    cancel.set_request_id("mine");
    v1::CancelResponse response;
    EXPECT_TRUE(stub_->Cancel(&context, cancel, &response).ok());
    EXPECT_TRUE(response.found());
  });
  EXPECT_TRUE(reply.status.ok());
  ASSERT_NE(reply.final(), nullptr);
  EXPECT_EQ(reply.final()->finish_reason(), v1::FINISH_CANCELLED);
  EXPECT_TRUE(NothingLeft());
  grpc::ClientContext context;
  v1::CancelRequest cancel;
  cancel.set_request_id("mine");
  v1::CancelResponse response;
  EXPECT_TRUE(stub_->Cancel(&context, cancel, &response).ok());
  EXPECT_FALSE(response.found());
}

TEST_F(RouterTest, TheDeadlinesDeltaStillArrives) {
  ASSERT_TRUE(Ready());
  peers_.step_time = milliseconds(5);
  const Reply reply = Generate(MakeRequest("long", 2000, 1), nullptr, milliseconds(400));
  // On a machine under load the client's own clock may win.
  if (reply.status.ok()) {
    ASSERT_NE(reply.final(), nullptr);
    EXPECT_EQ(reply.final()->finish_reason(), v1::FINISH_DEADLINE);
  } else {
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_GT(reply.tokens.size(), 1u);
  EXPECT_TRUE(NothingLeft());
}

TEST_F(RouterTest, PeersMayDieAndReturnMidStream) {
  ASSERT_TRUE(Ready());
  peers_.step_time = milliseconds(3);
  const v1::GenerateRequest request = MakeRequest("survivor", 400, 3);
  int deltas = 0;
  const Reply reply = Generate(request, [&](const v1::GenerateDelta&) {
    switch (++deltas) {
      case 5:
        drafter_server_.reset();
        break;
      case 10:
        StartDrafter(drafter_address_);
        break;
      case 15:
        verifier_server_.reset();
        StartVerifier(verifier_address_);
        break;
      case 25:
        verifier_server_.reset();
        {
          std::lock_guard<std::mutex> lock(peers_.mutex);
          peers_.verifier.sequences.clear();  // it comes back as another
          for (auto& [id, due] : peers_.verifier.owed) due = FakeVerifier::kFreed;
          peers_.verifier.info.epoch = 8;
        }
        StartVerifier(verifier_address_);
        break;
      default:
        break;
    }
  });
  EXPECT_TRUE(reply.status.ok()) << reply.status.error_message();
  EXPECT_EQ(reply.tokens, Truth(request));
  EXPECT_TRUE(NothingLeft());
  EXPECT_EQ(loop_->counters().verifier_breaks, 2u);
  EXPECT_GE(loop_->counters().drafter_breaks, 1u);
}

TEST_F(RouterTest, ASlowReaderGetsItAllInFewerDeltas) {
  ASSERT_TRUE(Ready());
  v1::GenerateRequest request = MakeRequest("patience", 3000, 9);
  request.set_speculation(v1::SPECULATION_OFF);
  request.set_logprobs(1);
  // A receive window that the reply does not fit into.
  grpc::ChannelArguments small;
  small.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  small.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1024);
  small.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  stub_ = v1::Inference::NewStub(
      grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), small));
  bool slept = false;
  const Reply reply = Generate(request, [&](const v1::GenerateDelta&) {
    if (std::exchange(slept, true)) return;
    EXPECT_TRUE(Eventually([&] { return loop_->counters().finished == 1u; }));
  });
  EXPECT_TRUE(reply.status.ok());
  EXPECT_EQ(reply.tokens, Truth(request));
  EXPECT_LT(reply.deltas.size(), 3000u);
  EXPECT_EQ(reply.text.size(),
            3000u - std::count(reply.tokens.begin(), reply.tokens.end(), kFakeEos));
}

TEST_F(RouterTest, AnotherRoutersVerifierIsWaitedFor) {
  ASSERT_TRUE(Ready());
  {
    std::lock_guard<std::mutex> lock(peers_.mutex);
    peers_.owner = "r2";
  }
  verifier_server_.reset();
  StartVerifier(verifier_address_);
  ASSERT_TRUE(
      Eventually([&] { return loop_->NotReadyReason().find("owned by r2") != std::string::npos; }));
  const v1::ClusterState state = State();
  EXPECT_FALSE(state.router().ready());
  EXPECT_THAT(state.router().not_ready_reason(), HasSubstr("owned by r2"));
  EXPECT_THAT(state.verifiers(0).error(), HasSubstr("owned by r2"));
  {
    std::lock_guard<std::mutex> lock(peers_.mutex);
    peers_.owner.clear();
  }
  ASSERT_TRUE(Ready());
  EXPECT_TRUE(Generate(MakeRequest("now", 5, 1)).status.ok());
}

TEST_F(RouterTest, ResumesFromTheClientsOffset) {
  ASSERT_TRUE(Ready());
  v1::GenerateRequest request = MakeRequest("again", 50, 5);
  const std::vector<int32_t> truth = Truth(request);
  request.clear_seed();
  request.mutable_resume()->set_seed(5);
  for (int i = 0; i < 20; ++i) request.mutable_resume()->add_token_ids(truth[i]);
  const Reply reply = Generate(request);
  EXPECT_TRUE(reply.status.ok());
  EXPECT_EQ(reply.tokens, std::vector<int32_t>(truth.begin() + 20, truth.end()));
  EXPECT_EQ(reply.deltas[0].token_offset(), 20u);
  EXPECT_EQ(reply.deltas[0].seed(), 5u);
  EXPECT_EQ(reply.final()->usage().completion_tokens(), 50u);
}

TEST_F(RouterTest, AStoppedEngineRefusesInsteadOfHanging) {
  ASSERT_TRUE(Ready());
  peers_.step_time = milliseconds(5);
  std::thread stopper;
  const Reply reply = Generate(MakeRequest("long", 2000, 1), [&](const v1::GenerateDelta&) {
    if (!stopper.joinable()) stopper = std::thread([&] { loop_->Stop(); });
  });
  stopper.join();
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(Refusal(MakeRequest("late", 5, 1), grpc::StatusCode::UNAVAILABLE),
              HasSubstr("shutting down"));
}

}  // namespace
}  // namespace coppice::router
