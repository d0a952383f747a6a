#include "services/drafter/service.h"

#include <glog/logging.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "services/common/read_gate.h"
#include "services/common/stream_writer.h"

namespace coppice::drafter {
namespace {

constexpr uint64_t kMaxPosition = uint64_t{1} << 40;
constexpr int kMaxQueries = 1 << 14;
constexpr uint32_t kMaxWaitUs = 10'000'000;

grpc::Status Invalid(const std::string& message) {
  return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, message);
}

grpc::Status Draining() {
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "this drafter is shutting down");
}

grpc::Status Loading() {
  return grpc::Status(grpc::StatusCode::UNAVAILABLE, "this drafter is still loading its model");
}

std::string Fingerprints(uint64_t drafter, uint64_t embedding, uint32_t hidden_size) {
  return absl::StrCat("drafter ", absl::Hex(drafter, absl::kZeroPad16), ", embedding ",
                      absl::Hex(embedding, absl::kZeroPad16), ", hidden size ", hidden_size);
}

grpc::Status CheckHello(const v1::ContextBatch::Hello& hello, const v1::DrafterInfo& info) {
  if (hello.drafter_fingerprint() == info.drafter_fingerprint() &&
      hello.embedding_fingerprint() == info.embedding_fingerprint() &&
      hello.hidden_size() == info.hidden_size()) {
    return grpc::Status::OK;
  }
  return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                      absl::StrCat("verifier ", hello.verifier(), " (",
                                   Fingerprints(hello.drafter_fingerprint(),
                                                hello.embedding_fingerprint(), hello.hidden_size()),
                                   ") does not match drafter ", info.name(), " (",
                                   Fingerprints(info.drafter_fingerprint(),
                                                info.embedding_fingerprint(), info.hidden_size()),
                                   "): start both with the same --model and --drafter"));
}

grpc::Status CheckRows(const v1::ContextRows& rows, const v1::DrafterInfo& info) {
  const uint64_t bytes = uint64_t{rows.count()} * info.hidden_size() * sizeof(uint16_t);
  if (rows.features().size() != bytes) {
    return Invalid(absl::StrCat("sequence ", rows.sequence(), ": ", rows.count(),
                                " feature rows of hidden size ", info.hidden_size(), " take ",
                                bytes, " bytes, not ", rows.features().size()));
  }
  if (rows.first() > kMaxPosition) {
    return Invalid(absl::StrCat("sequence ", rows.sequence(), ": position ", rows.first(),
                                " is out of range"));
  }
  if (rows.has_pending_token() && rows.pending_token() >= info.vocab_size()) {
    return Invalid(absl::StrCat("sequence ", rows.sequence(), ": pending token ",
                                rows.pending_token(), " is not below the vocabulary's size ",
                                info.vocab_size()));
  }
  return grpc::Status::OK;
}

grpc::Status CheckQueries(const v1::DraftBatch& batch, const v1::DrafterInfo& info) {
  if (batch.top_k() < 1 || batch.top_k() > info.max_top_k()) {
    return Invalid(absl::StrCat("top_k ", batch.top_k(), " is not within 1 … ", info.max_top_k()));
  }
  if (batch.queries_size() > kMaxQueries) {
    return Invalid(absl::StrCat(batch.queries_size(), " queries in one batch; at most ",
                                kMaxQueries, " are answered"));
  }
  for (const v1::DraftBatch::Query& query : batch.queries()) {
    if (query.pending_token() >= info.vocab_size()) {
      return Invalid(absl::StrCat("sequence ", query.sequence(), ": pending token ",
                                  query.pending_token(), " is not below the vocabulary's size ",
                                  info.vocab_size()));
    }
    if (query.base_len() < 1 || query.base_len() > kMaxPosition) {
      return Invalid(absl::StrCat("sequence ", query.sequence(), ": base_len ", query.base_len(),
                                  " is out of range"));
    }
  }
  return grpc::Status::OK;
}

v1::DraftReply::Outcome ToWire(DraftOutcome outcome) {
  switch (outcome) {
    case DraftOutcome::kDrafted:
      return v1::DraftReply::DRAFTED;
    case DraftOutcome::kGap:
      return v1::DraftReply::GAP;
    case DraftOutcome::kUnknown:
      return v1::DraftReply::UNKNOWN;
    case DraftOutcome::kLate:
      return v1::DraftReply::LATE;
  }
  return v1::DraftReply::OUTCOME_UNSPECIFIED;
}

v1::ContextAck ToWire(const std::vector<Ack>& acks) {
  v1::ContextAck out;
  for (const Ack& ack : acks) {
    v1::ContextAck::Entry* entry = out.add_entries();
    entry->set_sequence(ack.sequence);
    entry->set_have_len(static_cast<uint64_t>(ack.have_len));
    if (ack.need_from) entry->set_need_from(static_cast<uint64_t>(*ack.need_from));
    entry->set_no_slot(ack.no_slot);
  }
  return out;
}

v1::DraftReply ToWire(const Reply& reply) {
  v1::DraftReply out;
  out.set_batch(reply.batch);
  out.set_draft_us(reply.draft_us);
  for (const Answer& answer : reply.answers) {
    v1::DraftReply::Answer* to = out.add_answers();
    to->set_sequence(answer.sequence);
    to->set_base_len(static_cast<uint64_t>(answer.base_len));
    to->set_outcome(ToWire(answer.outcome));
    to->mutable_tokens()->Add(answer.tokens.begin(), answer.tokens.end());
    to->mutable_log_probs()->Add(answer.log_probs.begin(), answer.log_probs.end());
  }
  return out;
}

}  // namespace

// ---- A verifier's stream

class DrafterService::ContextReactor
    : public grpc::ServerBidiReactor<v1::ContextBatch, v1::ContextAck> {
 public:
  explicit ContextReactor(DrafterService* service)
      : service_(service),
        writer_(std::make_shared<Writer>([this](const v1::ContextAck& ack) { StartWrite(&ack); })),
        gate_(std::make_shared<ReadGate>([this] { Read(); })),
        stream_(service->Register([this, w = writer_](const grpc::Status& s) { End(w, s); })) {
    if (stream_ == 0) {
      End(writer_, service_->WhyNot());
    } else {
      Read();
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(writer_, grpc::Status::OK);
    if (const grpc::Status status = Take(); !status.ok()) {
      LOG(WARNING) << status.error_message();
      End(writer_, status);
    }
  }
  void OnWriteDone(bool ok) override { writer_->OnWriteDone(ok); }
  void OnCancel() override { End(writer_, grpc::Status::CANCELLED); }
  void OnDone() override {
    if (opened_) {
      service_->loop_->Push(ContextClosed{stream_});
      LOG(INFO) << "verifier " << verifier_ << " has left";
    }
    service_->Unregister(stream_);
    delete this;
  }

 private:
  using Writer = StreamWriter<v1::ContextAck>;

  // Callable while the writer has not ended, or by this reactor's own reactions; does nothing the
  // second time.
  void End(const std::shared_ptr<Writer>& writer, const grpc::Status& status) {
    writer->FinishNow([this, status] {
      gate_->Close();
      Finish(status);
    });
  }

  void Post(Event event, ReadTicket ticket) {
    event.ticket = std::move(ticket);
    service_->loop_->Push(std::move(event));
  }

  void Read() {
    batch_ = std::make_shared<v1::ContextBatch>();
    StartRead(batch_.get());
  }

  grpc::Status Take() {
    const v1::DrafterInfo& info = service_->info_;
    if (!opened_) {
      if (!batch_->has_hello()) return Invalid("a verifier's first message must have a hello");
      const v1::ContextBatch::Hello& hello = batch_->hello();
      if (const grpc::Status status = CheckHello(hello, info); !status.ok()) return status;
      verifier_ = hello.verifier();
      opened_ = true;
      LOG(INFO) << "verifier " << verifier_ << " feeds this drafter";
      Post(ContextOpened{stream_, hello.verifier_epoch(),
                         [this, w = writer_](const std::vector<Ack>& acks) {
                           if (w->Write(ToWire(acks)) == Writer::Result::kFull) {
                             End(w, grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                                 "acknowledgements are not being read"));
                           }
                         }},
           nullptr);
    } else if (batch_->has_hello()) {
      return Invalid("a second hello on one stream");
    }
    ContextArrived event;
    event.stream = stream_;
    for (const v1::ContextRows& rows : batch_->rows()) {
      if (const grpc::Status status = CheckRows(rows, info); !status.ok()) return status;
      Rows to;
      to.sequence = rows.sequence();
      to.first = static_cast<int64_t>(rows.first());
      to.count = rows.count();
      to.features = absl::MakeConstSpan(reinterpret_cast<const uint16_t*>(rows.features().data()),
                                        rows.features().size() / sizeof(uint16_t));
      if (rows.has_pending_token()) to.pending_token = static_cast<int32_t>(rows.pending_token());
      to.draft_ahead = rows.draft_ahead();
      event.rows.push_back(to);
    }
    event.released.assign(batch_->released().begin(), batch_->released().end());
    event.owner = batch_;
    Post(std::move(event), gate_->Took());
    return grpc::Status::OK;
  }

  DrafterService* const service_;
  const std::shared_ptr<Writer> writer_;
  const std::shared_ptr<ReadGate> gate_;
  const uint64_t stream_;
  std::shared_ptr<v1::ContextBatch> batch_;  // being read
  bool opened_ = false;
  std::string verifier_;
};

// ---- A router's stream

class DrafterService::DraftReactor
    : public grpc::ServerBidiReactor<v1::DraftBatch, v1::DraftReply> {
 public:
  explicit DraftReactor(DrafterService* service)
      : service_(service),
        writer_(
            std::make_shared<Writer>([this](const v1::DraftReply& reply) { StartWrite(&reply); })),
        gate_(std::make_shared<ReadGate>([this] { StartRead(&batch_); })),
        stream_(service->Register([this, w = writer_](const grpc::Status& s) { End(w, s); })) {
    if (stream_ == 0) {
      End(writer_, service_->WhyNot());
    } else {
      StartRead(&batch_);
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(writer_, grpc::Status::OK);
    if (const grpc::Status status = CheckQueries(batch_, service_->info_); !status.ok()) {
      LOG(WARNING) << status.error_message();
      return End(writer_, status);
    }
    DraftAsked asked;
    asked.stream = stream_;
    asked.batch = batch_.batch();
    asked.verifier_epoch = batch_.verifier_epoch();
    asked.top_k = static_cast<int>(batch_.top_k());
    asked.wait = std::chrono::microseconds(std::min(batch_.wait_us(), kMaxWaitUs));
    for (const v1::DraftBatch::Query& query : batch_.queries()) {
      asked.queries.push_back({query.sequence(), static_cast<int32_t>(query.pending_token()),
                               static_cast<int64_t>(query.base_len())});
    }
    asked.reply = [this, w = writer_](const Reply& reply) {
      if (w->Write(ToWire(reply)) == Writer::Result::kFull) {
        End(w, grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "drafts are not being read"));
      }
    };
    Event event(std::move(asked));
    event.ticket = gate_->Took();
    service_->loop_->Push(std::move(event));
  }
  void OnWriteDone(bool ok) override { writer_->OnWriteDone(ok); }
  void OnCancel() override { End(writer_, grpc::Status::CANCELLED); }
  void OnDone() override {
    if (stream_ != 0) service_->loop_->Push(DraftClosed{stream_});
    service_->Unregister(stream_);
    delete this;
  }

 private:
  using Writer = StreamWriter<v1::DraftReply>;

  // As ContextReactor's.
  void End(const std::shared_ptr<Writer>& writer, const grpc::Status& status) {
    writer->FinishNow([this, status] {
      gate_->Close();
      Finish(status);
    });
  }

  DrafterService* const service_;
  const std::shared_ptr<Writer> writer_;
  const std::shared_ptr<ReadGate> gate_;
  const uint64_t stream_;
  v1::DraftBatch batch_;
};

// ---- The service

void DrafterService::Ready(DraftLoop* loop, v1::DrafterInfo info) {
  std::lock_guard<std::mutex> lock(mutex_);
  loop_ = loop;
  info_ = std::move(info);
}

grpc::ServerUnaryReactor* DrafterService::GetInfo(grpc::CallbackServerContext* context,
                                                  const v1::GetDrafterInfoRequest*,
                                                  v1::DrafterInfo* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  std::unique_lock<std::mutex> lock(mutex_);
  if (loop_ == nullptr) {
    lock.unlock();
    reactor->Finish(WhyNot());
    return reactor;
  }
  *response = info_;
  response->set_sequences(static_cast<uint32_t>(loop_->sequences()));
  lock.unlock();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerBidiReactor<v1::ContextBatch, v1::ContextAck>* DrafterService::AppendContext(
    grpc::CallbackServerContext*) {
  return new ContextReactor(this);
}

grpc::ServerBidiReactor<v1::DraftBatch, v1::DraftReply>* DrafterService::Draft(
    grpc::CallbackServerContext*) {
  return new DraftReactor(this);
}

uint64_t DrafterService::Register(End end) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (draining_ || loop_ == nullptr) return 0;
  streams_[++last_stream_] = std::move(end);
  return last_stream_;
}

grpc::Status DrafterService::WhyNot() {
  std::lock_guard<std::mutex> lock(mutex_);
  return draining_ ? Draining() : Loading();
}

void DrafterService::Unregister(uint64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(stream);
}

void DrafterService::Drain() {
  std::vector<End> ends;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    for (const auto& [stream, end] : streams_) ends.push_back(end);
  }
  // Outside the lock: a reaction may run within, and want it.
  for (const End& end : ends) end(Draining());
}

}  // namespace coppice::drafter
