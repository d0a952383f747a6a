#include "services/verifier/service.h"

#include <memory>
#include <string>
#include <utility>

#include "services/common/rpc_status.h"
#include "services/common/stream_writer.h"
#include "services/verifier/wire.h"

namespace coppice::verifier {
namespace {

grpc::Status Loading() {
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "this verifier is still loading its model");
}

grpc::Status Invalid(const std::string& sentence) {
  return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, sentence);
}

}  // namespace

// One router's stream.  The loop holds on to the client below, which outlives the reactor: what it
// does with the reactor goes through the writer, which lets nothing through after Finish.
//
// Every message is answered by one result, and the next is read once that is written: so no more
// than one waits, and the window update that reading brings travels with the result.  The result
// may be written, and the next message read, before the reaction to this one has returned: it hands
// over last.
class VerifierService::StepStream
    : public grpc::ServerBidiReactor<v1::StepRequest, v1::StepResult> {
 public:
  StepStream(StepLoop* loop, grpc::CallbackServerContext* context)
      : loop_(loop), context_(context), client_(std::make_shared<Client>(this)) {
    if (!loop_) {
      End(Loading());
      return;
    }
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      // The router has said its last word, or is gone; OnDone knows which.
      End(grpc::Status::OK);
      return;
    }
    if (!greeted_) {
      if (!request_.has_hello() || request_.work_size() > 0 || request_.admits_size() > 0 ||
          request_.releases_size() > 0) {
        End(Invalid("the first message of a Step stream is a hello and nothing else"));
        return;
      }
      greeted_ = true;
      session_ = loop_->NewSession();
      loop_->Open(session_, request_.hello().router(), request_.hello().router_epoch(), client_);
    } else if (request_.has_hello()) {
      End(Invalid("only the first message of a Step stream is a hello"));
      return;
    } else {
      loop_->Submit(session_, FromWire(request_));
    }
  }

  void OnWriteDone(bool ok) override {
    // Before the writer hears of it: then Finish cannot have been called.
    StartRead(&request_);
    client_->writer->OnWriteDone(ok);
  }

  void OnCancel() override {
    client_->writer->FinishNow([this] { Finish(grpc::Status::CANCELLED); });
  }

  void OnDone() override {
    if (greeted_) loop_->Close(session_, !context_->IsCancelled());
    delete this;
  }

 private:
  struct Client : public StepClient {
    explicit Client(StepStream* stream)
        : stream(stream),
          writer(std::make_shared<StreamWriter<v1::StepResult>>(
              [stream](const v1::StepResult& result) { stream->StartWrite(&result); })) {}

    void OnResult(const StepResult& result) override { writer->Write(ToWire(result)); }
    void OnEnd(const absl::Status& status) override {
      writer->Finish([stream = stream, status = ToGrpcStatus(status)] { stream->Finish(status); });
    }

    StepStream* const stream;
    const std::shared_ptr<StreamWriter<v1::StepResult>> writer;
  };

  void End(const grpc::Status& status) {
    client_->writer->Finish([this, status] { Finish(status); });
  }

  StepLoop* const loop_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Client> client_;
  v1::StepRequest request_;
  bool greeted_ = false;
  uint64_t session_ = 0;
};

void VerifierService::Ready(StepLoop* loop, v1::VerifierInfo info) {
  std::lock_guard<std::mutex> lock(mutex_);
  loop_ = loop;
  info_ = std::move(info);
}

StepLoop* VerifierService::loop() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return loop_;
}

grpc::ServerUnaryReactor* VerifierService::GetInfo(grpc::CallbackServerContext* context,
                                                   const v1::GetVerifierInfoRequest*,
                                                   v1::VerifierInfo* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  StepLoop* const loop = this->loop();
  if (!loop) {
    reactor->Finish(Loading());
    return reactor;
  }
  *response = info_;
  const LoopSnapshot snapshot = loop->snapshot();
  *response->mutable_pool() = ToWire(snapshot.pool);
  response->set_owner(snapshot.owner);
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* VerifierService::GetPool(grpc::CallbackServerContext* context,
                                                   const v1::GetPoolRequest*,
                                                   v1::PoolState* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (StepLoop* const loop = this->loop()) {
    *response = ToWire(loop->snapshot().pool);
    reactor->Finish(grpc::Status::OK);
  } else {
    reactor->Finish(Loading());
  }
  return reactor;
}

grpc::ServerBidiReactor<v1::StepRequest, v1::StepResult>* VerifierService::Step(
    grpc::CallbackServerContext* context) {
  return new StepStream(loop(), context);
}

}  // namespace coppice::verifier
