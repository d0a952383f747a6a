#include "services/drafter/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "services/common/server.h"
#include "services/drafter/fake_model.h"

namespace coppice::drafter {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr int kWindow = 1 << 16;  // positions are 16 bits wide in the fake's rows

// A drafter with a fake model behind a real server on loopback.
class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() {
    EngineOptions options;
    options.slots = 2;
    options.window = kWindow;
    options.max_top_k = 4;
    loop_ = std::make_unique<DraftLoop>(std::make_unique<FakeModel>(2, kWindow), options);
    v1::DrafterInfo info;
    info.set_name("drafter-1");
    info.set_drafter_fingerprint(11);
    info.set_embedding_fingerprint(22);
    info.set_vocab_size(1000);
    info.set_hidden_size(FakeModel::kWidth);
    info.set_max_top_k(4);
    service_ = std::make_unique<DrafterService>();
    service_->Ready(loop_.get(), info);
    ServerOptions server_options;
    server_options.max_message_bytes = kFeatureMessageBytes;
    server_ = *RpcServer::Start(server_options, {service_.get()});
    ChannelOptions channel_options;
    channel_options.max_message_bytes = kFeatureMessageBytes;
    stub_ = v1::Drafter::NewStub(MakeChannel(server_->address(), channel_options));
  }
  ~ServiceTest() override {
    server_.reset();
    loop_->Stop();
  }

  // A verifier's stream, driven synchronously.
  struct Verifier {
    explicit Verifier(v1::Drafter::Stub* stub) : stream(stub->AppendContext(&context)) {}
    ~Verifier() { context.TryCancel(); }

    bool Hello(uint64_t epoch, uint64_t fingerprint = 11) {
      v1::ContextBatch batch;
      batch.mutable_hello()->set_verifier("verifier-1");
      batch.mutable_hello()->set_verifier_epoch(epoch);
      batch.mutable_hello()->set_drafter_fingerprint(fingerprint);
      batch.mutable_hello()->set_embedding_fingerprint(22);
      batch.mutable_hello()->set_hidden_size(FakeModel::kWidth);
      return stream->Write(batch);
    }
    static v1::ContextBatch Rows(uint64_t sequence, int64_t first, int64_t count) {
      v1::ContextBatch batch;
      v1::ContextRows* rows = batch.add_rows();
      rows->set_sequence(sequence);
      rows->set_first(first);
      rows->set_count(count);
      const auto features = FakeModel::Features(static_cast<int>(sequence), first, count);
      rows->set_features(features.data(), features.size() * sizeof(uint16_t));
      return batch;
    }
    // The next acknowledgement's only entry.
    v1::ContextAck::Entry Ack() {
      v1::ContextAck ack;
      if (!stream->Read(&ack) || ack.entries_size() != 1) {
        ADD_FAILURE() << ack.DebugString();
        return {};
      }
      return ack.entries(0);
    }
    grpc::Status End() {
      v1::ContextAck ack;
      while (stream->Read(&ack)) {
      }
      return stream->Finish();
    }

    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::ContextBatch, v1::ContextAck>> stream;
  };

  v1::DraftBatch Ask(uint64_t epoch, uint64_t sequence, uint32_t token, uint64_t base_len) {
    v1::DraftBatch batch;
    batch.set_batch(5);
    batch.set_verifier_epoch(epoch);
    batch.set_top_k(2);
    batch.set_wait_us(5'000'000);
    v1::DraftBatch::Query* query = batch.add_queries();
    query->set_sequence(sequence);
    query->set_pending_token(token);
    query->set_base_len(base_len);
    return batch;
  }
  // One question on a stream of its own.
  grpc::Status AskOnce(const v1::DraftBatch& batch, v1::DraftReply* reply) {
    grpc::ClientContext context;
    auto stream = stub_->Draft(&context);
    stream->Write(batch);
    if (stream->Read(reply)) context.TryCancel();
    return stream->Finish();
  }

  bool AwaitSequences(uint32_t want) {
    for (int i = 0; i < 500; ++i) {
      grpc::ClientContext context;
      v1::DrafterInfo info;
      if (stub_->GetInfo(&context, {}, &info).ok() && info.sequences() == want) return true;
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }

  std::unique_ptr<DraftLoop> loop_;
  std::unique_ptr<DrafterService> service_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::Drafter::Stub> stub_;
};

TEST_F(ServiceTest, FeaturesInDraftsOutAndSlotsFreeWhenTheVerifierLeaves) {
  {
    Verifier verifier(stub_.get());
    ASSERT_TRUE(verifier.Hello(77));
    verifier.stream->Write(Verifier::Rows(5, 0, 3));
    EXPECT_EQ(verifier.Ack().have_len(), 3u);

    v1::DraftReply reply;
    AskOnce(Ask(77, 5, 42, 3), &reply);
    EXPECT_EQ(reply.batch(), 5u);
    ASSERT_EQ(reply.answers_size(), 1);
    EXPECT_EQ(reply.answers(0).outcome(), v1::DraftReply::DRAFTED);
    EXPECT_EQ(reply.answers(0).base_len(), 3u);
    ASSERT_EQ(reply.answers(0).tokens_size(), 6);
    EXPECT_EQ(reply.answers(0).tokens(3), uint32_t(FakeModel::Token(42, 3, 1, 1)));
    EXPECT_EQ(reply.answers(0).log_probs_size(), 6);

    verifier.stream->Write(Verifier::Rows(5, 4, 1));
    const v1::ContextAck::Entry gap = verifier.Ack();
    EXPECT_EQ(gap.have_len(), 3u);
    ASSERT_TRUE(gap.has_need_from());
    EXPECT_EQ(gap.need_from(), 3u);
    AskOnce(Ask(77, 5, 42, 5), &reply);
    EXPECT_EQ(reply.answers(0).outcome(), v1::DraftReply::GAP);

    verifier.stream->Write(Verifier::Rows(6, 0, 1));
    EXPECT_FALSE(verifier.Ack().no_slot());
    verifier.stream->Write(Verifier::Rows(7, 0, 1));
    EXPECT_TRUE(verifier.Ack().no_slot());
    v1::ContextBatch release;
    release.add_released(5);
    verifier.stream->Write(release);
    const v1::ContextAck::Entry again = verifier.Ack();
    EXPECT_EQ(again.sequence(), 7u);
    EXPECT_EQ(again.need_from(), 0u);
    EXPECT_TRUE(AwaitSequences(2));
  }
  EXPECT_TRUE(AwaitSequences(0));
}

TEST_F(ServiceTest, LargeFeatureMessages) {
  Verifier verifier(stub_.get());
  ASSERT_TRUE(verifier.Hello(77));
  v1::ContextBatch batch;
  for (uint64_t round = 0; round < 40; ++round) {
    // 60,000 rows of 4 bytes, 40 times over: beyond gRPC's own limit of 4 MiB.
    *batch.add_rows() = Verifier::Rows(5, 0, 60'000).rows(0);
  }
  ASSERT_GT(batch.ByteSizeLong(), 8u << 20);
  ASSERT_TRUE(verifier.stream->Write(batch));
  v1::ContextAck ack;
  ASSERT_TRUE(verifier.stream->Read(&ack));
  ASSERT_EQ(ack.entries_size(), 40);
  EXPECT_EQ(ack.entries(39).have_len(), 60'000u);
}

TEST_F(ServiceTest, AMismatchNamesBothSides) {
  Verifier verifier(stub_.get());
  verifier.Hello(77, 12);
  const grpc::Status status = verifier.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("verifier-1 (drafter 000000000000000c"));
  EXPECT_THAT(status.error_message(), HasSubstr("drafter-1 (drafter 000000000000000b"));
}

TEST_F(ServiceTest, MalformedMessagesEndTheStreamWithASentence) {
  const auto ends = [&](const v1::ContextBatch& batch, bool hello) {
    Verifier verifier(stub_.get());
    if (hello) verifier.Hello(77);
    verifier.stream->Write(batch);
    const grpc::Status status = verifier.End();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status.error_message();
  };
  EXPECT_THAT(ends(Verifier::Rows(5, 0, 3), false), HasSubstr("hello"));
  v1::ContextBatch batch = Verifier::Rows(5, 0, 3);
  batch.mutable_rows(0)->set_count(4);
  EXPECT_THAT(ends(batch, true), HasSubstr("take 16 bytes, not 12"));
  batch = Verifier::Rows(5, 0, 3);
  batch.mutable_rows(0)->set_pending_token(1000);
  EXPECT_THAT(ends(batch, true), HasSubstr("pending token 1000"));
  batch = Verifier::Rows(5, 0, 3);
  batch.mutable_rows(0)->set_first(uint64_t{1} << 60);
  EXPECT_THAT(ends(batch, true), HasSubstr("out of range"));
  EXPECT_TRUE(AwaitSequences(0));

  v1::DraftReply reply;
  v1::DraftBatch ask = Ask(77, 5, 42, 3);
  ask.set_top_k(5);
  grpc::Status status = AskOnce(ask, &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("top_k 5 is not within 1 … 4"));
  status = AskOnce(Ask(77, 5, 1000, 3), &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("pending token 1000"));
  status = AskOnce(Ask(77, 5, 42, 0), &reply);
  EXPECT_THAT(status.error_message(), HasSubstr("base_len 0"));
}

TEST_F(ServiceTest, DrainEndsStreamsAndRefusesNewOnes) {
  Verifier verifier(stub_.get());
  verifier.Hello(77);
  verifier.stream->Write(Verifier::Rows(5, 0, 3));
  verifier.Ack();
  grpc::ClientContext context;
  auto router = stub_->Draft(&context);
  router->Write(Ask(77, 5, 42, 3));
  v1::DraftReply reply;
  ASSERT_TRUE(router->Read(&reply));

  service_->Drain();
  EXPECT_EQ(verifier.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(router->Read(&reply));
  EXPECT_EQ(router->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  Verifier late(stub_.get());
  EXPECT_EQ(late.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(AwaitSequences(0));
}

TEST_F(ServiceTest, WhileItLoadsItSaysSo) {
  DrafterService loading;
  const std::unique_ptr<RpcServer> server = *RpcServer::Start(ServerOptions(), {&loading});
  const auto stub = v1::Drafter::NewStub(MakeChannel(server->address()));
  grpc::ClientContext context;
  v1::DrafterInfo info;
  const grpc::Status status = stub->GetInfo(&context, v1::GetDrafterInfoRequest(), &info);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("loading"));
  Verifier early(stub.get());
  EXPECT_EQ(early.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  grpc::ClientContext draft;
  auto router = stub->Draft(&draft);
  v1::DraftReply reply;
  EXPECT_FALSE(router->Read(&reply));
  EXPECT_EQ(router->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServiceTest, ManyShortLives) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        Verifier verifier(stub_.get());
        verifier.Hello(100 * t + i);
        verifier.stream->Write(Verifier::Rows(i, 0, 3));
        if (i % 3 == 0) {
          v1::ContextAck ack;
          EXPECT_TRUE(verifier.stream->Read(&ack));
        }
        v1::DraftReply reply;
        v1::DraftBatch ask = Ask(100 * t + i, i, 42, 3);
        ask.set_wait_us(i % 2 == 0 ? 1000 : 0);
        AskOnce(ask, &reply);
        EXPECT_EQ(reply.answers_size(), 1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_TRUE(AwaitSequences(0));
}

}  // namespace
}  // namespace coppice::drafter
