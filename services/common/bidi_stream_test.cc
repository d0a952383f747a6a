#include "services/common/bidi_stream.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "coppice/v1/drafter.grpc.pb.h"
#include "services/common/channel.h"
#include "services/common/server.h"

namespace coppice {
namespace {

using std::chrono::seconds;
using Stream = BidiStream<v1::ContextBatch, v1::ContextAck>;

// Says three things, and ends the stream: at once, or when the client has said its last word.
class Peer : public v1::Drafter::Service {
 public:
  grpc::Status AppendContext(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::ContextAck, v1::ContextBatch>* stream) override {
    for (int i = 0; i < 3; ++i) stream->Write(v1::ContextAck());
    v1::ContextBatch batch;
    while (waits && stream->Read(&batch)) {
    }
    return grpc::Status(grpc::StatusCode::ABORTED, "enough");
  }
  bool waits = false;
};

class BidiStreamTest : public ::testing::Test {
 protected:
  void Begin(bool waits) {
    peer_.waits = waits;
    server_ = RpcServer::Start(ServerOptions(), {&peer_}).value();
    stub_ = v1::Drafter::NewStub(MakeChannel(server_->address()));
    Stream::Hooks hooks;
    hooks.message = [this](const v1::ContextAck&, ReadTicket ticket) {
      std::lock_guard<std::mutex> lock(mutex_);
      tickets_.push_back(std::move(ticket));
      changed_.notify_all();
    };
    stream_ = std::make_shared<Stream>(std::move(hooks));
    stub_->async()->AppendContext(stream_->context(), stream_.get());
    stream_->Begin();
  }
  // Messages read so far, once there are that many.
  size_t WaitForMessages(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, seconds(20), [&] { return tickets_.size() >= count; });
    return tickets_.size();
  }
  void Drop(size_t i) {
    ReadTicket ticket;
    std::lock_guard<std::mutex> lock(mutex_);
    ticket.swap(tickets_[i]);
  }

  Peer peer_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<v1::Drafter::Stub> stub_;
  std::shared_ptr<Stream> stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ReadTicket> tickets_;
};

TEST_F(BidiStreamTest, ReadsOneMessagePerTicket) {
  Begin(true);
  EXPECT_EQ(WaitForMessages(1), 1u);
  EXPECT_FALSE(stream_->WaitFor(std::chrono::milliseconds(50)));
  EXPECT_EQ(WaitForMessages(1), 1u);
  Drop(0);
  EXPECT_EQ(WaitForMessages(2), 2u);
  stream_->Cancel();
  Drop(1);
  EXPECT_EQ(stream_->Wait().error_code(), grpc::StatusCode::CANCELLED);
}

// gRPC tells how a stream ended once all that came before has been read.
TEST_F(BidiStreamTest, EndsThoughATicketIsHeldWhenWritingFails) {
  Begin(false);
  EXPECT_EQ(WaitForMessages(1), 1u);
  const auto end = std::chrono::steady_clock::now() + seconds(20);
  while (!stream_->WaitFor(std::chrono::milliseconds(1)) &&
         std::chrono::steady_clock::now() < end) {
    stream_->Write(v1::ContextBatch());
  }
  ASSERT_TRUE(stream_->WaitFor(seconds(0)));
  EXPECT_EQ(stream_->Wait().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(WaitForMessages(3), 3u);
}

TEST_F(BidiStreamTest, EndsThoughATicketIsHeldWhenItIsClosed) {
  Begin(true);
  EXPECT_EQ(WaitForMessages(1), 1u);
  stream_->Close();
  EXPECT_EQ(stream_->Wait().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(WaitForMessages(3), 3u);
}

}  // namespace
}  // namespace coppice
