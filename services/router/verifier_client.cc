#include "services/router/verifier_client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "services/common/channel.h"
#include "services/router/wire.h"

namespace coppice::router {
VerifierClient::VerifierClient(const Options& options,
                               std::function<absl::Status(const VerifierInfo&)> check,
                               std::function<void(Event, ReadTicket)> post)
    : options_(options),
      check_(std::move(check)),
      post_(std::move(post)),
      connection_({[this](grpc::ClientContext* context) { return Prepare(context); },
                   [this](uint64_t connection) {
                     using Stream = BidiStream<v1::StepRequest, v1::StepResult>;
                     Stream::Hooks hooks;
                     hooks.message = [this, connection](const v1::StepResult& result,
                                                        ReadTicket ticket) {
                       OnResult(connection, result, std::move(ticket));
                     };
                     auto stream = std::make_shared<Stream>(std::move(hooks));
                     stub_->async()->Step(stream->context(), stream.get());
                     return stream;
                   },
                   [this](uint64_t, const auto& stream) {
                     v1::StepRequest request;
                     request.mutable_hello()->set_router(options_.router);
                     request.mutable_hello()->set_router_epoch(options_.router_epoch);
                     stream->Write(std::move(request));
                   },
                   [this](uint64_t connection, absl::Status status) {
                     post_(VerifierDown{connection, std::move(status)}, nullptr);
                   },
                   nullptr},
                  {options.retry, options.retry, options.retry}) {
  ChannelOptions channel;
  channel.own_connection = true;
  stub_ = v1::Verifier::NewStub(MakeChannel(options_.address, channel));
}

VerifierClient::~VerifierClient() { connection_.Stop(); }

void VerifierClient::Start() { connection_.Start(); }

absl::Status VerifierClient::Prepare(grpc::ClientContext* context) {
  v1::VerifierInfo reply;
  const grpc::Status status = stub_->GetInfo(context, v1::GetVerifierInfoRequest(), &reply);
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat("it does not answer: ", status.error_message()));
  }
  VerifierInfo info = FromWire(reply);
  if (absl::Status fits = check_(info); !fits.ok()) return fits;
  std::lock_guard<std::mutex> lock(mutex_);
  greeting_ = std::move(info);
  return absl::OkStatus();
}

void VerifierClient::OnResult(uint64_t connection, const v1::StepResult& result,
                              ReadTicket ticket) {
  std::optional<VerifierInfo> greeting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    greeting = std::exchange(greeting_, std::nullopt);
  }
  StepResult step = FromWire(result);
  if (!greeting.has_value()) {
    post_(VerifierStep{connection, std::move(step)}, std::move(ticket));
    return;
  }
  // The first result answers the hello: the lease is ours.
  VerifierUp up;
  up.connection = connection;
  up.info = *std::move(greeting);
  if (step.pool.pages > 0) up.info.pool = step.pool;
  up.resumed.assign(result.resumed().begin(), result.resumed().end());
  post_(std::move(up), std::move(ticket));
}

void VerifierClient::Send(uint64_t connection, StepRequest request) {
  connection_.Write(connection, ToWire(request));
}

}  // namespace coppice::router
