#include "services/drafter/draft_engine.h"

#include <algorithm>

namespace coppice::drafter {

Event::Event(Event&& other) noexcept = default;
Event& Event::operator=(Event&& other) noexcept = default;
Event::~Event() = default;

DraftEngine::DraftEngine(Drafter* model, const EngineOptions& options, const Clock* clock,
                         std::function<void(int, float)> on_forward)
    : model_(model),
      options_(options),
      clock_(clock),
      on_forward_(std::move(on_forward)),
      windows_(options.slots, options.window),
      last_top_k_(options.max_top_k) {}

void DraftEngine::Turn(absl::Span<Event> events) {
  context_us_ = 0;
  for (Event& event : events) {
    std::visit([this](auto& e) { On(e); }, event.what);
  }
  for (auto& [stream, ack] : windows_.AdmitWaiting()) {
    if (const auto it = streams_.find(stream); it != streams_.end()) it->second.acks.push_back(ack);
  }

  // Which batches can go now: in order within a stream, all or nothing.
  const TimePoint now = clock_->Now();
  std::vector<Ready> ready;
  std::vector<uint64_t> held;  // streams whose earlier batch still waits
  for (auto it = queries_.begin(); it != queries_.end();) {
    const DraftAsked& asked = it->asked;
    bool go = std::find(held.begin(), held.end(), asked.stream) == held.end();
    if (go && now < it->deadline) {
      for (const Query& query : asked.queries) go = go && Judge(KeyOf(asked, query), query);
    }
    if (go) {
      last_top_k_ = asked.top_k;
      std::vector<std::shared_ptr<const Draft>> drafts(asked.queries.size());
      ready.push_back({std::move(it->asked), std::move(drafts)});
      it = queries_.erase(it);
    } else {
      held.push_back(asked.stream);
      ++it;
    }
  }

  // One forward for what will be asked and for what was asked and has not been drafted.
  std::vector<Block> blocks;
  int k = 0;
  for (const Block& block : ahead_) {
    const Context* context = windows_.Find(block.key);
    if (context == nullptr || context->have_len != block.base_len || context->has_gap()) continue;
    if (FindDraft(block, last_top_k_)) continue;
    blocks.push_back(block);
    k = last_top_k_;
  }
  ahead_.clear();
  for (Ready& batch : ready) {
    for (size_t i = 0; i < batch.drafts.size(); ++i) {
      const Query& query = batch.asked.queries[i];
      const Block block = {KeyOf(batch.asked, query), query.pending_token, query.base_len,
                           &batch.drafts[i]};
      if (Judge(block.key, query) != DraftOutcome::kDrafted) continue;
      batch.drafts[i] = FindDraft(block, batch.asked.top_k);
      if (batch.drafts[i]) {
        if (batch.drafts[i]->ahead) ++counters_.ahead_used;
        continue;
      }
      // The rows that came with the question may have asked for the same.
      std::erase_if(blocks,
                    [&](const Block& b) { return b.result == nullptr && b.key == block.key; });
      blocks.push_back(block);
      k = std::max(k, batch.asked.top_k);
    }
  }
  if (!blocks.empty()) Forward(blocks, k);
  for (const Ready& batch : ready) Answer(batch);
}

void DraftEngine::On(ContextOpened& event) {
  if (const auto it = stream_of_epoch_.find(event.verifier_epoch); it != stream_of_epoch_.end()) {
    CloseContext(it->second);
  }
  stream_of_epoch_[event.verifier_epoch] = event.stream;
  streams_[event.stream] = {event.verifier_epoch, std::move(event.acknowledge), {}};
}

void DraftEngine::On(ContextArrived& event) {
  if (streams_.contains(event.stream)) {  // else it has been replaced
    WriteRows(event);
    for (const uint64_t sequence : event.released) {
      windows_.Release({event.stream, sequence});
      drafts_.erase({event.stream, sequence});
    }
  }
}

void DraftEngine::WriteRows(const ContextArrived& event) {
  Stream& stream = streams_.at(event.stream);
  const int64_t width = model_->config().hidden_size;
  std::vector<ContextRows> writes;
  const auto flush = [&] {
    if (writes.empty()) return;
    const TimePoint start = clock_->Now();
    model_->AppendContext(writes);
    context_us_ += MicrosBetween(start, clock_->Now());
    writes.clear();
  };
  for (const Rows& rows : event.rows) {
    const SequenceKey key = {event.stream, rows.sequence};
    const ContextWindows::Placement place = windows_.Place(key, rows.first, rows.count);
    if (place.count > 0) {
      // A slot stands once in a call: two ranges of it might meet in its ring.
      for (const ContextRows& write : writes) {
        if (write.slot == place.slot) {
          flush();
          break;
        }
      }
      writes.push_back({place.slot, rows.first + place.skip,
                        rows.features.subspan(place.skip * width, place.count * width)});
      counters_.rows += place.count;
    }
    if (place.ack.need_from) ++counters_.gaps;
    stream.acks.push_back(place.ack);
    if (rows.pending_token && rows.draft_ahead && !place.ack.no_slot) {
      ahead_.push_back({key, *rows.pending_token, rows.first + rows.count, nullptr});
    }
  }
  flush();
}

void DraftEngine::On(ContextClosed& event) { CloseContext(event.stream); }

void DraftEngine::CloseContext(uint64_t stream) {
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  stream_of_epoch_.erase(it->second.verifier_epoch);
  streams_.erase(it);
  windows_.CloseStream(stream);
  absl::erase_if(drafts_, [&](const auto& d) { return d.first.stream == stream; });
}

void DraftEngine::On(DraftAsked& event) {
  const TimePoint deadline = clock_->Now() + event.wait;
  queries_.push_back({std::move(event), deadline});
}

void DraftEngine::On(DraftClosed& event) {
  for (auto it = queries_.begin(); it != queries_.end();) {
    it = it->asked.stream == event.stream ? queries_.erase(it) : it + 1;
  }
}

void DraftEngine::SendAcks() {
  for (auto& [id, stream] : streams_) {
    if (stream.acks.empty()) continue;
    stream.acknowledge(stream.acks);
    stream.acks.clear();
  }
}

SequenceKey DraftEngine::KeyOf(const DraftAsked& asked, const Query& query) const {
  const auto it = stream_of_epoch_.find(asked.verifier_epoch);
  return {it == stream_of_epoch_.end() ? 0 : it->second, query.sequence};
}

std::optional<DraftOutcome> DraftEngine::Judge(const SequenceKey& key, const Query& query) const {
  if (key.stream == 0 || windows_.IsWaiting(key)) return DraftOutcome::kUnknown;
  const Context* context = windows_.Find(key);
  if (context == nullptr) return std::nullopt;  // its first rows may be on their way
  if (query.base_len > context->have_len) {
    if (context->has_gap()) return DraftOutcome::kGap;
    return std::nullopt;
  }
  // A round long past may ask for what the window no longer has.
  if (query.base_len > windows_.ContextBegin(*context)) return DraftOutcome::kDrafted;
  return context->has_gap() ? DraftOutcome::kGap : DraftOutcome::kUnknown;
}

std::shared_ptr<const DraftEngine::Draft> DraftEngine::FindDraft(const Block& block, int k) const {
  const auto it = drafts_.find(block.key);
  if (it == drafts_.end()) return nullptr;
  const Draft& draft = *it->second;
  const bool same = draft.pending_token == block.pending_token &&
                    draft.base_len == block.base_len && draft.k >= k;
  return same ? it->second : nullptr;
}

void DraftEngine::Forward(const std::vector<Block>& blocks, int k) {
  std::vector<DraftBlock> inputs;
  for (const Block& block : blocks) {
    const Context& context = *windows_.Find(block.key);
    inputs.push_back(
        {context.slot, block.pending_token, block.base_len, windows_.ContextBegin(context)});
  }
  DraftCandidates out;
  const TimePoint start = clock_->Now();
  model_->Draft(inputs, k, &out);
  const float micros = MicrosBetween(start, clock_->Now());
  ++counters_.forwards;
  counters_.blocks += blocks.size();
  if (on_forward_) on_forward_(static_cast<int>(blocks.size()), micros);

  const size_t size = static_cast<size_t>(out.positions) * out.k;
  for (size_t i = 0; i < blocks.size(); ++i) {
    auto draft = std::make_shared<Draft>();
    draft->pending_token = blocks[i].pending_token;
    draft->base_len = blocks[i].base_len;
    draft->k = out.k;
    draft->ahead = blocks[i].result == nullptr;
    draft->micros = context_us_ + micros;
    draft->tokens.assign(out.tokens.begin() + i * size, out.tokens.begin() + (i + 1) * size);
    draft->log_probs.assign(out.log_probs.begin() + i * size,
                            out.log_probs.begin() + (i + 1) * size);
    if (draft->ahead) {
      ++counters_.ahead;
    } else {
      *blocks[i].result = draft;
    }
    drafts_[blocks[i].key] = std::move(draft);
  }
}

void DraftEngine::Answer(const Ready& ready) {
  const DraftAsked& asked = ready.asked;
  Reply reply;
  reply.batch = asked.batch;
  for (size_t i = 0; i < asked.queries.size(); ++i) {
    const Query& query = asked.queries[i];
    const SequenceKey key = KeyOf(asked, query);
    drafter::Answer answer;
    answer.sequence = query.sequence;
    answer.base_len = query.base_len;
    // Without a judgement the deadline has passed.
    answer.outcome =
        Judge(key, query)
            .value_or(windows_.Find(key) != nullptr ? DraftOutcome::kLate : DraftOutcome::kUnknown);
    if (const Draft* draft = ready.drafts[i].get()) {
      for (size_t row = 0; row < draft->tokens.size(); row += draft->k) {
        answer.tokens.insert(answer.tokens.end(), draft->tokens.begin() + row,
                             draft->tokens.begin() + row + asked.top_k);
        answer.log_probs.insert(answer.log_probs.end(), draft->log_probs.begin() + row,
                                draft->log_probs.begin() + row + asked.top_k);
      }
      reply.draft_us = std::max(reply.draft_us, draft->micros);
    }
    ++counters_.outcomes[static_cast<int>(answer.outcome)];
    reply.answers.push_back(std::move(answer));
  }
  asked.reply(std::move(reply));
}

std::optional<TimePoint> DraftEngine::NextDeadline() const {
  std::optional<TimePoint> next;
  std::vector<uint64_t>
      seen;  // streams: only a stream's first batch can go, so only its deadline counts
  for (const Waiting& waiting : queries_) {
    if (std::find(seen.begin(), seen.end(), waiting.asked.stream) != seen.end()) continue;
    seen.push_back(waiting.asked.stream);
    if (!next || waiting.deadline < *next) next = waiting.deadline;
  }
  return next;
}

EngineCounters DraftEngine::counters() const {
  EngineCounters out = counters_;
  out.sequences = windows_.used();
  out.waiting = windows_.waiting();
  out.context_tokens = windows_.tokens();
  return out;
}

std::vector<CostSample> MeasureDraftCost(Drafter* model, const EngineOptions& options,
                                         const Clock* clock) {
  constexpr int kRuns = 5;
  const int64_t width = model->config().hidden_size;
  const int64_t length = std::min(options.window, 256);
  // Any normal rows will do: 0.5 and -0.5 in turn.
  std::vector<uint16_t> features(length * width);
  for (size_t i = 0; i < features.size(); ++i) features[i] = i % 2 == 0 ? 0x3f00 : 0xbf00;
  std::vector<CostSample> out;
  for (const int blocks : {1, 2, 4, 8, 16}) {
    if (blocks > options.slots) break;
    std::vector<ContextRows> rows;
    std::vector<DraftBlock> inputs;
    for (int slot = 0; slot < blocks; ++slot) {
      rows.push_back({slot, 0, features});
      inputs.push_back({slot, 0, length, 0});
    }
    model->AppendContext(rows);
    DraftCandidates candidates;
    model->Draft(inputs, options.max_top_k, &candidates);  // warm
    std::vector<float> micros;
    for (int run = 0; run < kRuns; ++run) {
      const TimePoint start = clock->Now();
      model->Draft(inputs, options.max_top_k, &candidates);
      micros.push_back(MicrosBetween(start, clock->Now()));
    }
    std::nth_element(micros.begin(), micros.begin() + kRuns / 2, micros.end());
    out.push_back({blocks, micros[kRuns / 2]});
  }
  return out;
}

}  // namespace coppice::drafter
