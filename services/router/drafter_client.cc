#include "services/router/drafter_client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "services/common/channel.h"
#include "services/router/wire.h"

namespace coppice::router {
DrafterClient::DrafterClient(const Options& options, std::function<void(Event, ReadTicket)> post)
    : options_(options),
      post_(std::move(post)),
      connection_({[this](grpc::ClientContext* context) { return Prepare(context); },
                   [this](uint64_t connection) {
                     using Stream = BidiStream<v1::DraftBatch, v1::DraftReply>;
                     Stream::Hooks hooks;
                     hooks.message = [this, connection](const v1::DraftReply& reply,
                                                        ReadTicket ticket) {
                       post_(DrafterReplied{connection, FromWire(reply)}, std::move(ticket));
                     };
                     auto stream = std::make_shared<Stream>(std::move(hooks));
                     stub_->async()->Draft(stream->context(), stream.get());
                     return stream;
                   },
                   [this](uint64_t connection, const auto&) {
                     post_(DrafterUp{connection, info_}, nullptr);
                   },
                   [this](uint64_t connection, absl::Status status) {
                     post_(DrafterDown{connection, std::move(status)}, nullptr);
                   },
                   nullptr},
                  {options.retry, options.retry, options.retry}) {
  ChannelOptions channel;
  channel.own_connection = true;
  if (!options_.address.empty()) {
    stub_ = v1::Drafter::NewStub(MakeChannel(options_.address, channel));
  }
}

DrafterClient::~DrafterClient() { connection_.Stop(); }

void DrafterClient::Start() {
  if (stub_ != nullptr) connection_.Start();
}

absl::Status DrafterClient::Prepare(grpc::ClientContext* context) {
  v1::DrafterInfo reply;
  const grpc::Status status = stub_->GetInfo(context, v1::GetDrafterInfoRequest(), &reply);
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat("it does not answer: ", status.error_message()));
  }
  info_ = FromWire(reply);
  return absl::OkStatus();
}

void DrafterClient::Send(uint64_t connection, DraftBatch batch) {
  connection_.Write(connection, ToWire(batch));
}

}  // namespace coppice::router
