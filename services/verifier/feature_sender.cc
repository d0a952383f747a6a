#include "services/verifier/feature_sender.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "coppice/v1/drafter.grpc.pb.h"
#include "glog/logging.h"
#include "services/common/channel.h"
#include "services/common/peer_connection.h"

namespace coppice::verifier {
namespace {

// Before a drafter has told its window.
constexpr int64_t kDefaultWindow = 4096;
// Sequences that are being sent again at once.
constexpr int kMaxRequests = 2;
// A gap reported again so soon after it was filled is an old report.
constexpr std::chrono::milliseconds kGapPause{50};
// Released ids that wait for a drafter that does not read; beyond, the stream is cut instead, which
// releases all.
constexpr size_t kMaxReleased = 1 << 16;
// At most on the wire, beside the features of one sequence's rows; and one released id.
constexpr size_t kRowsBytes = 64;
constexpr size_t kReleasedBytes = 10;
constexpr size_t kMaxPeers = 64;

using Lock = std::unique_lock<std::mutex>;

}  // namespace

struct FeatureSender::Shared {
  FeatureSenderOptions options;
  ResendRequest resend;
  FeatureCounters counters;
};

// One drafter: its connection, and what is known of each of its sequences.
//
// A sequence is `missing` from the moment rows of it could not be sent until the answer to a
// request to send them again is complete; rows that come meanwhile are in that answer and are
// dropped.  Requests and rows both pass through the step loop, so their order is one order.
class FeatureSender::Peer {
 public:
  Peer(std::string address, std::shared_ptr<Shared> shared)
      : address_(std::move(address)),
        shared_(std::move(shared)),
        connection_(MakeHooks(),
                    {options().first_retry, options().longest_retry, options().refused_retry}) {
    ChannelOptions channel;
    channel.max_message_bytes = kFeatureMessageBytes;
    channel.own_connection = true;
    stub_ = v1::Drafter::NewStub(MakeChannel(address_, channel));
    connection_.Start();
  }

  // ---- From the step loop's thread.
  void Connect() {
    Lock lock(mutex_);
    wanted_ = true;
    connection_.Wake();
  }
  int64_t window() const { return window_.load(std::memory_order_relaxed); }
  void Append(const FeatureRows& rows);
  void Release(uint64_t sequence);
  void Flush();
  // Nothing is sent or awaited: the peer can be forgotten.
  bool Unused() {
    Lock lock(mutex_);
    return sequences_.empty() && stream_ == nullptr;
  }

  // Close never blocks, Stop waits for the end.
  void Close() {
    {
      Lock lock(mutex_);
      stopping_ = true;
    }
    connection_.Close();
  }
  void Stop() { connection_.Stop(); }

 private:
  using Connection = PeerConnection<v1::ContextBatch, v1::ContextAck>;
  using Stream = Connection::Stream;

  struct State {
    int64_t sent_len = 0;  // rows up to here were queued on this stream
    std::optional<int64_t> need_from;
    bool missing = false;
    uint64_t request = 0;  // under way; 0: none
    bool no_slot = false;
    TimePoint answered{};
    int64_t answered_from = -1;
  };
  struct Request {
    uint64_t sequence;
    int64_t from;
    uint64_t request;
  };

  const FeatureSenderOptions& options() const { return shared_->options; }
  bool Interesting() const { return wanted_ || !sequences_.empty(); }
  Connection::Hooks MakeHooks();
  // ---- From the connection.
  absl::Status Prepare(grpc::ClientContext* context);
  std::shared_ptr<Stream> Open();
  void OnOpened(const std::shared_ptr<Stream>& stream);
  void OnDown(const absl::Status& status);
  // ---- From its stream.
  void OnAck(const v1::ContextAck& ack);
  void OnWritten();

  void WriteBatch();
  // Which sequences to send again now.
  std::vector<Request> NextRequests();
  void Send(const std::vector<Request>& requests) {
    for (const Request& r : requests) shared_->resend(address_, r.sequence, r.from, r.request);
  }
  void SetMissing(State* state, std::optional<int64_t> need_from) {
    if (!state->missing) ++missing_;
    if (state->request != 0) --requests_;
    state->missing = true;
    state->request = 0;
    state->need_from = need_from;
  }
  void Forget(const State& state) {
    if (state.missing) --missing_;
    if (state.request != 0) --requests_;
  }

  const std::string address_;
  const std::shared_ptr<Shared> shared_;
  std::unique_ptr<v1::Drafter::Stub> stub_;
  std::atomic<int64_t> window_{kDefaultWindow};

  std::mutex mutex_;
  bool stopping_ = false;
  bool wanted_ = false;
  bool reported_ = false;           // that it is away
  std::shared_ptr<Stream> stream_;  // while it can be written to
  absl::flat_hash_map<uint64_t, State> sequences_;
  int missing_ = 0;   // of them
  int requests_ = 0;  // of them with a request under way
  uint64_t last_request_ = 0;
  v1::ContextBatch batch_;  // of this step
  size_t batch_bytes_ = 0;
  std::vector<uint64_t> released_;  // not sent yet
  Connection connection_;           // its thread ends before the rest goes
};

// ---- Connection

FeatureSender::Peer::Connection::Hooks FeatureSender::Peer::MakeHooks() {
  Connection::Hooks hooks;
  hooks.prepare = [this](grpc::ClientContext* context) { return Prepare(context); };
  hooks.open = [this](uint64_t) { return Open(); };
  hooks.opened = [this](uint64_t, const std::shared_ptr<Stream>& stream) { OnOpened(stream); };
  hooks.down = [this](uint64_t, const absl::Status& status) { OnDown(status); };
  hooks.wanted = [this] {
    Lock lock(mutex_);
    return Interesting();
  };
  return hooks;
}

absl::Status FeatureSender::Peer::Prepare(grpc::ClientContext* context) {
  v1::DrafterInfo info;
  const grpc::Status status = stub_->GetInfo(context, v1::GetDrafterInfoRequest(), &info);
  if (status.ok() && info.window() > 0) window_ = info.window();
  return FromGrpcStatus(status);
}

std::shared_ptr<FeatureSender::Peer::Stream> FeatureSender::Peer::Open() {
  Stream::Hooks hooks;
  hooks.message = [this](const v1::ContextAck& ack, const ReadTicket&) { OnAck(ack); };
  hooks.written = [this] { OnWritten(); };
  StreamWriter<v1::ContextBatch>::Options queue;
  queue.max_bytes = options().max_queued_bytes;
  auto stream = std::make_shared<Stream>(std::move(hooks), std::move(queue));
  stub_->async()->AppendContext(stream->context(), stream.get());
  return stream;
}

void FeatureSender::Peer::OnOpened(const std::shared_ptr<Stream>& stream) {
  v1::ContextBatch hello;
  hello.mutable_hello()->set_verifier_epoch(options().verifier_epoch);
  hello.mutable_hello()->set_verifier(options().verifier);
  hello.mutable_hello()->set_drafter_fingerprint(options().drafter_fingerprint);
  hello.mutable_hello()->set_embedding_fingerprint(options().embedding_fingerprint);
  hello.mutable_hello()->set_hidden_size(options().hidden_size);
  stream->Write(std::move(hello));
  Lock lock(mutex_);
  stream_ = stream;
  ++shared_->counters.connections;
  ++shared_->counters.streams;
  const std::vector<Request> requests = NextRequests();
  lock.unlock();
  Send(requests);
}

void FeatureSender::Peer::OnDown(const absl::Status& status) {
  Lock lock(mutex_);
  if (stream_ != nullptr) {
    stream_.reset();
    --shared_->counters.streams;
    // The drafter has freed all that came by this stream.
    batch_.Clear();
    batch_bytes_ = 0;
    released_.clear();
    for (auto& [id, state] : sequences_) {
      SetMissing(&state, std::nullopt);
      state.sent_len = 0;
      state.no_slot = false;
      state.answered_from = -1;
    }
  }
  if (stopping_ || !Interesting() || reported_) return;
  LOG(WARNING) << "drafter " << address_ << ": " << status.message()
               << "; its sequences go on undrafted";
  reported_ = true;
}

// ---- Rows

void FeatureSender::Peer::Append(const FeatureRows& rows) {
  Lock lock(mutex_);
  if (stopping_) return;
  const auto [it, fresh] = sequences_.try_emplace(rows.sequence);
  State& state = it->second;
  if (fresh) state.sent_len = rows.first;
  if (rows.request != 0) {
    if (state.request != rows.request) return;  // asked by a stream that is no more
    if (rows.answered) {
      Forget(state);
      state.missing = false;
      state.request = 0;
      state.answered = std::chrono::steady_clock::now();
    }
  } else if (stream_ == nullptr || state.missing || state.no_slot) {
    if (stream_ == nullptr && !state.missing) SetMissing(&state, std::nullopt);
    shared_->counters.dropped += rows.count;
    if (stream_ == nullptr) connection_.Wake();
    return;
  }
  if (rows.count == 0) return;
  state.sent_len = rows.first + rows.count;
  shared_->counters.rows += rows.count;
  v1::ContextRows* out = batch_.add_rows();
  out->set_sequence(rows.sequence);
  out->set_first(rows.first);
  out->set_count(rows.count);
  const size_t bytes = rows.features.size() * sizeof(uint16_t);
  out->set_features(rows.features.data(), bytes);
  if (rows.pending) out->set_pending_token(*rows.pending);
  out->set_draft_ahead(rows.draft_ahead);
  batch_bytes_ += bytes + kRowsBytes;
  if (batch_bytes_ >= options().message_bytes) WriteBatch();
}

void FeatureSender::Peer::Release(uint64_t sequence) {
  Lock lock(mutex_);
  const auto it = sequences_.find(sequence);
  if (it != sequences_.end()) {
    Forget(it->second);
    sequences_.erase(it);
    if (stream_ != nullptr) released_.push_back(sequence);
  }
  if (sequences_.empty()) wanted_ = false;
}

// Only holders of the lock write, so the room that is seen here cannot shrink.
void FeatureSender::Peer::WriteBatch() {
  if (stream_ == nullptr) return;
  v1::ContextBatch batch;
  batch.Swap(&batch_);
  const size_t bytes = std::exchange(batch_bytes_, 0);
  const size_t queued = stream_->queued_bytes();
  if (queued > 0 &&
      queued + bytes + kReleasedBytes * (released_.size() + 2) > options().max_queued_bytes) {
    for (const v1::ContextRows& rows : batch.rows()) {
      shared_->counters.dropped += rows.count();
      const auto it = sequences_.find(rows.sequence());
      if (it == sequences_.end()) continue;
      State& state = it->second;
      const int64_t first = static_cast<int64_t>(rows.first());
      state.sent_len = std::min(state.sent_len, first);
      SetMissing(&state, std::nullopt);
    }
    if (released_.size() > kMaxReleased) {
      LOG(WARNING) << "drafter " << address_ << " does not read; connecting to it anew";
      stream_->Cancel();
    }
    return;
  }
  // After the rows, and after all rows of earlier messages.
  for (const uint64_t sequence : released_) batch.add_released(sequence);
  released_.clear();
  stream_->Write(std::move(batch));
}

void FeatureSender::Peer::Flush() {
  Lock lock(mutex_);
  if (batch_.rows_size() > 0 || !released_.empty()) WriteBatch();
  const std::vector<Request> requests = NextRequests();
  lock.unlock();
  Send(requests);
}

std::vector<FeatureSender::Peer::Request> FeatureSender::Peer::NextRequests() {
  std::vector<Request> requests;
  if (stopping_ || stream_ == nullptr || missing_ == requests_ || requests_ >= kMaxRequests ||
      stream_->queued_bytes() > options().max_queued_bytes / 8) {
    return requests;
  }
  for (auto& [id, state] : sequences_) {
    if (!state.missing || state.request != 0 || state.no_slot) continue;
    state.request = ++last_request_;
    state.answered_from = state.need_from.value_or(state.sent_len);
    requests.push_back({id, state.answered_from, state.request});
    ++shared_->counters.resends;
    if (++requests_ >= kMaxRequests) break;
  }
  return requests;
}

void FeatureSender::Peer::OnWritten() {
  Lock lock(mutex_);
  if (stream_ == nullptr) return;  // the hello, before it is known here
  v1::ContextBatch batch;
  // What was held back while the queue was full.  (Rows of these sequences may still be in the
  // batch that the step loop is filling; they then leave with it.)
  if (batch_.rows_size() == 0 && stream_->queued_bytes() < options().max_queued_bytes / 2) {
    for (const uint64_t sequence : released_) batch.add_released(sequence);
    released_.clear();
  }
  if (batch.released_size() > 0) stream_->Write(std::move(batch));
  const std::vector<Request> requests = NextRequests();
  lock.unlock();
  Send(requests);
}

void FeatureSender::Peer::OnAck(const v1::ContextAck& ack) {
  Lock lock(mutex_);
  if (stream_ == nullptr) return;
  // Only now is it certain that the drafter did not refuse the hello.
  if (reported_) LOG(INFO) << "drafter " << address_ << " is back";
  reported_ = false;
  connection_.Succeeded();
  for (const v1::ContextAck::Entry& entry : ack.entries()) {
    const auto it = sequences_.find(entry.sequence());
    if (it == sequences_.end()) continue;
    State& state = it->second;
    if (entry.no_slot()) state.no_slot = true;
    if (!entry.has_need_from()) continue;
    const bool had_no_slot = std::exchange(state.no_slot, false);
    if (state.missing) continue;  // will be sent again anyway
    const int64_t from =
        static_cast<int64_t>(std::min<uint64_t>(entry.need_from(), uint64_t{1} << 40));
    if (!had_no_slot && from == state.answered_from &&
        std::chrono::steady_clock::now() - state.answered < kGapPause) {
      continue;
    }
    SetMissing(&state, from);
  }
  const std::vector<Request> requests = NextRequests();
  lock.unlock();
  Send(requests);
}

// ---- FeatureSender

FeatureSender::FeatureSender(const FeatureSenderOptions& options, ResendRequest resend)
    : shared_(std::make_shared<Shared>()) {
  shared_->options = options;
  shared_->resend = std::move(resend);
}

FeatureSender::~FeatureSender() { Shutdown(); }

const FeatureCounters& FeatureSender::counters() const { return shared_->counters; }

std::shared_ptr<FeatureSender::Peer> FeatureSender::Find(const std::string& drafter) {
  std::shared_ptr<Peer>& peer = peers_[drafter];
  if (!peer) peer = std::make_shared<Peer>(drafter, shared_);
  return peer;
}

void FeatureSender::Connect(const std::string& drafter) { Find(drafter)->Connect(); }

int64_t FeatureSender::Window(const std::string& drafter) { return Find(drafter)->window(); }

void FeatureSender::Append(const std::string& drafter, const FeatureRows& rows) {
  Find(drafter)->Append(rows);
}

void FeatureSender::Release(const std::string& drafter, uint64_t sequence) {
  const auto it = peers_.find(drafter);
  if (it == peers_.end()) return;
  it->second->Release(sequence);
  // Addresses that answer nobody are not kept for ever.
  if (peers_.size() > kMaxPeers && it->second->Unused()) {
    it->second->Close();
    peers_.erase(it);
  }
}

void FeatureSender::Flush() {
  for (const auto& [address, peer] : peers_) peer->Flush();
}

void FeatureSender::Shutdown() {
  for (const auto& [address, peer] : peers_) peer->Close();
  for (const auto& [address, peer] : peers_) peer->Stop();
}

}  // namespace coppice::verifier
