// For tests: a deterministic target behind a verifier that keeps the wire's contract, a drafter
// that knows some of the truth, and a stream that remembers.
#ifndef COPPICE_SERVICES_ROUTER_FAKE_PEERS_H_
#define COPPICE_SERVICES_ROUTER_FAKE_PEERS_H_

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/tokenizer.h"
#include "services/router/peers.h"
#include "services/router/scheduler.h"
#include "services/router/stream.h"
#include "speculation/tree.h"

namespace coppice::router {

inline constexpr int kFakeVocab = 260;  // 256 bytes and four special tokens
inline constexpr int32_t kFakeEos = 256;
inline constexpr int kFakePositions = 4096;

inline const Tokenizer* FakeTokenizer() {
  static const Tokenizer* tokenizer = [] {
    std::vector<std::string> ranks;
    for (int i = 0; i < 256; ++i) ranks.push_back(std::string(1, static_cast<char>(i)));
    return Tokenizer::Create(ranks, {{kFakeEos, "[EOS]"}}, kFakeVocab, "fake").value().release();
  }();
  return tokenizer;
}

// The target's next token: letters a to f, now and then the end.
inline int32_t FakeNext(const std::vector<int32_t>& prefix, uint64_t seed) {
  uint64_t hash = 1469598103934665603u ^ (seed * 0x9e3779b97f4a7c15u);
  for (int32_t token : prefix) hash = (hash ^ static_cast<uint64_t>(token + 1)) * 1099511628211u;
  hash ^= hash >> 29;
  hash *= 0xbf58476d1ce4e5b9u;
  hash ^= hash >> 32;
  if (hash % 61 == 0) return kFakeEos;
  return static_cast<int32_t>('a' + (hash >> 8) % 6);
}

// ---- Stream

// What a stream was told.  Shared with the test, which outlives it.
struct StreamLog {
  std::vector<int32_t> tokens;  // received here, after `offset`
  int offset = 0;
  std::string text;
  std::vector<PositionScores> logprobs;
  std::optional<uint64_t> seed;
  std::optional<Final> final;
  std::optional<absl::Status> finish;
  int deltas = 0;
  bool full = false;  // Write refuses
};

class FakeStream : public Stream {
 public:
  FakeStream(StreamLog* log, int offset) : log_(log) { log_->offset = offset; }

  bool Write(Delta delta) override {
    EXPECT_FALSE(log_->finish.has_value()) << "a delta after the end";
    EXPECT_FALSE(log_->final.has_value()) << "a delta after the last";
    EXPECT_EQ(delta.token_offset, log_->offset + static_cast<int>(log_->tokens.size()));
    EXPECT_EQ(delta.seed.has_value(), log_->deltas == 0) << "the first delta tells the seed";
    if (log_->full) return false;
    ++log_->deltas;
    if (delta.seed.has_value()) log_->seed = delta.seed;
    log_->tokens.insert(log_->tokens.end(), delta.token_ids.begin(), delta.token_ids.end());
    log_->logprobs.insert(log_->logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
    log_->text += delta.text;
    if (delta.final.has_value()) log_->final = delta.final;
    return true;
  }
  void Finish(const absl::Status& status) override {
    EXPECT_FALSE(log_->finish.has_value()) << "two ends";
    EXPECT_EQ(status.ok(), log_->final.has_value()) << status;
    log_->finish = status;
  }

 private:
  StreamLog* const log_;
};

// ---- Verifier

class FakeVerifier : public VerifierLink {
 public:
  FakeVerifier() {
    info.name = "v";
    info.epoch = 7;
    info.fingerprint = 1;
    info.embedding_fingerprint = 2;
    info.drafter_fingerprint = 3;
    info.target_layer_ids = {1, 2};
    info.vocab_size = kFakeVocab;
    info.hidden_size = 16;
    info.max_position_embeddings = kFakePositions;
    info.tp = 1;
    info.max_rows = 128;
    info.max_tree_nodes = 64;
    info.max_sequences = 64;
    info.pool.pages = 1024;
    info.pool.free_pages = 1024;
    info.pool.page_size = 16;
    info.cost = {{1, 1000}, {64, 1300}, {128, 2000}};
    info.prefill_us_per_token = 20;
  }

  // ---- Transport
  void Send(uint64_t connection, StepRequest request) override {
    if (connection == this->connection && connected) requests.push_back(std::move(request));
  }

  VerifierUp Connect() {
    connected = true;
    VerifierUp up;
    up.connection = ++connection;
    up.info = info;
    up.info.pool = Pool();
    for (const auto& [id, sequence] : sequences) up.resumed.push_back(id);
    return up;
  }
  // Requests under way are lost, or the first `arrived` of them have been worked on; all results
  // are lost.
  VerifierDown Break(size_t arrived, bool keep) {
    for (; arrived > 0 && !requests.empty(); --arrived) Process();
    requests.clear();
    results.clear();
    connected = false;
    if (!keep) {
      sequences.clear();
      for (auto& [id, due] : owed) due = due == kDue ? kFreed : due;
    }
    return {connection, absl::UnavailableError("broken")};
  }

  // Works on the oldest request; false where there is none.
  bool Process() {
    if (requests.empty()) return false;
    const StepRequest request = std::move(requests.front());
    requests.pop_front();
    results.push_back({connection, Execute(request)});
    return true;
  }
  std::optional<VerifierStep> TakeResult() {
    if (results.empty()) return std::nullopt;
    VerifierStep result = std::move(results.front());
    results.pop_front();
    return result;
  }

  // ---- The verifier's side of the contract
  struct Sequence {
    Admit admit;
    std::vector<int32_t> tokens;  // admitted and generated
    int64_t committed = 0;
    int generated = 0;
    bool ended = false;
    uint64_t order = 0;
    std::optional<int64_t> kept_base;
    WorkResult kept;
  };

  StepResult Execute(const StepRequest& request) {
    StepResult result;
    result.step = request.step;
    EXPECT_GT(request.step, last_step);
    last_step = request.step;
    for (uint64_t id : request.releases) {
      EXPECT_NE(owed[id], kNotDue) << "released twice, or never admitted";
      owed[id] = kNotDue;
      sequences.erase(id);
      ++released;
    }
    for (const Admit& admit : request.admits) {
      EXPECT_EQ(ever.count(admit.sequence), 0u) << "a sequence id used again";
      if (refuse_next > 0) {
        --refuse_next;
        ever.insert(admit.sequence);
        owed[admit.sequence] = kFreed;  // it may have been given up on the way
        result.refused.push_back({admit.sequence, absl::ResourceExhaustedError("full")});
        continue;
      }
      EXPECT_GE(admit.max_tokens, 1);
      EXPECT_FALSE(admit.tokens.empty());
      ever.insert(admit.sequence);
      owed[admit.sequence] = kDue;
      Sequence& sequence = sequences[admit.sequence];
      sequence.admit = admit;
      sequence.tokens = admit.tokens;
      sequence.order = next_order++;
    }
    int rows = 0;
    for (const Work& work : request.work) rows += work.rows();
    EXPECT_LE(rows, info.max_rows);
    max_rows_seen = std::max(max_rows_seen, rows);
    // In order of age, as whoever is older is never preempted by a younger.
    std::vector<size_t> order(request.work.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return Age(request.work[a].sequence) < Age(request.work[b].sequence);
    });
    result.results.resize(request.work.size());
    std::set<uint64_t> preempted;
    for (size_t i : order) {
      result.results[i] = Do(request.work[i], &preempted);
      result.results[i].sequence = request.work[i].sequence;
    }
    for (size_t i = 0; i < request.work.size(); ++i) {
      if (preempted.count(request.work[i].sequence) > 0) {
        result.results[i] = {};
        result.results[i].sequence = request.work[i].sequence;
        result.results[i].outcome = Outcome::kPreempted;
      }
    }
    for (const auto& [id, sequence] : sequences) {
      EXPECT_LE(sequence.tokens.size(), static_cast<size_t>(info.max_position_embeddings));
    }
    result.pool = Pool();
    const auto cost = speculation::CostTable::Create(true_cost.empty() ? info.cost : true_cost);
    result.timing.forward_us = static_cast<float>(cost->Microseconds(rows));
    result.timing.rows = rows;
    return result;
  }

  int64_t PagesOf(const Sequence& sequence) const {
    return (sequence.committed + info.pool.page_size - 1) / info.pool.page_size;
  }
  PoolState Pool() const {
    PoolState pool = info.pool;
    pool.free_pages = pool.pages;
    for (const auto& [id, sequence] : sequences) pool.free_pages -= PagesOf(sequence);
    pool.sequences = static_cast<int>(sequences.size());
    return pool;
  }

  VerifierInfo info;
  std::vector<speculation::CostSample> true_cost;  // where info's table lies
  bool connected = false;
  uint64_t connection = 0;
  std::deque<StepRequest> requests;
  std::deque<VerifierStep> results;
  std::map<uint64_t, Sequence> sequences;
  // Of each sequence ever admitted, whether its release is still to come (or, freed here, may
  // come).
  enum Due { kNotDue, kDue, kFreed };
  std::map<uint64_t, Due> owed;
  std::set<uint64_t> ever;
  uint64_t released = 0;
  uint64_t last_step = 0;
  uint64_t next_order = 0;
  int max_rows_seen = 0;
  int refuse_next = 0;
  int fail_next = 0;
  int unknown_next = 0;
  int trees = 0;
  int largest_tree = 0;
  uint64_t preemptions = 0;
  uint64_t repeats = 0;

 private:
  uint64_t Age(uint64_t id) const {
    const auto known = sequences.find(id);
    return known == sequences.end() ? UINT64_MAX : known->second.order;
  }

  // Room for `more` tokens of `sequence`, if need be by preempting who is younger.
  bool FindPages(const Sequence& sequence, int more, std::set<uint64_t>* preempted) {
    const int64_t wanted =
        (sequence.committed + more + info.pool.page_size - 1) / info.pool.page_size;
    while (Pool().free_pages < wanted - PagesOf(sequence)) {
      auto youngest = sequences.end();
      for (auto it = sequences.begin(); it != sequences.end(); ++it) {
        if (it->second.committed == 0 || it->second.order <= sequence.order) continue;
        if (youngest == sequences.end() || it->second.order > youngest->second.order) youngest = it;
      }
      if (youngest == sequences.end()) return false;
      preempted->insert(youngest->first);
      owed[youngest->first] = kFreed;
      ++preemptions;
      sequences.erase(youngest);
    }
    return true;
  }

  WorkResult Do(const Work& work, std::set<uint64_t>* preempted) {
    WorkResult result;
    const auto known = sequences.find(work.sequence);
    if (unknown_next > 0 && known != sequences.end()) {
      --unknown_next;
      owed[work.sequence] = kFreed;
      sequences.erase(known);
      result.outcome = Outcome::kUnknown;
      return result;
    }
    if (known == sequences.end()) {
      result.outcome = Outcome::kUnknown;
      return result;
    }
    Sequence& sequence = known->second;
    if (sequence.kept_base == work.base_len) {
      ++repeats;
      return sequence.kept;
    }
    if (work.base_len != sequence.committed || sequence.ended) {
      result.outcome = Outcome::kWrongBase;
      result.base_len = sequence.committed;
      return result;
    }
    if (fail_next > 0) {
      --fail_next;
      result.outcome = Outcome::kFailed;
      result.error = "not a number";
      owed[work.sequence] = kFreed;
      sequences.erase(known);
      return result;
    }
    if (!FindPages(sequence, work.prefill > 0 ? work.prefill : 1, preempted)) {
      result.outcome = Outcome::kNoPages;
      return result;
    }
    auto is_stop = [&](int32_t token) {
      return std::binary_search(sequence.admit.stop_token_ids.begin(),
                                sequence.admit.stop_token_ids.end(), token);
    };
    auto finish = [&](int32_t token) {
      ++sequence.generated;
      if (is_stop(token)) {
        result.finish_reason = FinishReason::kStop;
      } else if (sequence.generated == sequence.admit.max_tokens) {
        result.finish_reason = FinishReason::kLength;
      }
      return result.finish_reason != FinishReason::kNone;
    };
    if (work.prefill > 0) {
      EXPECT_TRUE(work.tokens.empty());
      const int64_t all = static_cast<int64_t>(sequence.admit.tokens.size());
      EXPECT_LE(sequence.committed + work.prefill, all);
      EXPECT_EQ(sequence.generated, 0);
      sequence.committed += work.prefill;
      if (sequence.committed == all) {
        const int32_t token = FakeNext(sequence.tokens, sequence.admit.seed);
        sequence.tokens.push_back(token);
        result.tokens.push_back(token);
        finish(token);
      }
    } else {
      speculation::DraftTree tree;
      tree.token = work.tokens;
      tree.parent = work.parents;
      for (int32_t parent : tree.parent) {
        tree.depth.push_back(parent < 0 ? 0 : tree.depth[parent] + 1);
      }
      EXPECT_TRUE(speculation::Validate(tree).ok()) << speculation::Validate(tree);
      EXPECT_EQ(tree.token[0], sequence.tokens.back());
      EXPECT_LT(*std::max_element(tree.depth.begin(), tree.depth.end()),
                sequence.admit.max_tokens - sequence.generated)
          << "deeper than max_tokens leaves";
      ++trees;
      largest_tree = std::max(largest_tree, tree.nodes());
      std::vector<int32_t> prefix = sequence.tokens;
      const speculation::WalkResult walk = speculation::Walk(
          tree,
          [&](int) {
            const int32_t token = FakeNext(prefix, sequence.admit.seed);
            prefix.push_back(token);
            return token;
          },
          [&](int32_t token, int) { return finish(token); });
      sequence.tokens = prefix;
      sequence.committed += static_cast<int64_t>(walk.tokens.size());
      result.tokens = walk.tokens;
      result.accepted = static_cast<int>(walk.path.size()) - 1;
    }
    sequence.ended = result.finish_reason != FinishReason::kNone;
    if (sequence.admit.logprobs.has_value()) {
      for (int32_t token : result.tokens) result.logprobs.push_back({{token, -0.5f}, {}});
    }
    result.outcome = Outcome::kDone;
    result.base_len = sequence.committed;
    result.sequence = work.sequence;
    sequence.kept_base = work.base_len;
    sequence.kept = result;
    return result;
  }
};

// ---- Drafter

class FakeDrafter : public DrafterLink {
 public:
  // Its answers come from the verifier's truth.
  explicit FakeDrafter(const FakeVerifier* verifier) : verifier_(verifier) {
    info.name = "d";
    info.epoch = 9;
    info.drafter_fingerprint = 3;
    info.embedding_fingerprint = 2;
    info.vocab_size = kFakeVocab;
    info.hidden_size = 16;
    info.block_size = 8;
    info.target_layer_ids = {1, 2};
    info.window = 4096;
    info.max_sequences = 64;
    info.max_top_k = 16;
    info.cost = {{1, 200}, {64, 800}};
  }

  void Send(uint64_t connection, DraftBatch batch) override {
    if (connection == this->connection && connected) batches.push_back(std::move(batch));
  }
  DrafterUp Connect() {
    connected = true;
    return {++connection, info};
  }
  DrafterDown Break() {
    connected = false;
    batches.clear();
    return {connection, absl::UnavailableError("gone")};
  }

  // The oldest question's answer.
  std::optional<DrafterReplied> Answer() {
    if (batches.empty()) return std::nullopt;
    const DraftBatch batch = std::move(batches.front());
    batches.pop_front();
    DraftReply reply;
    reply.batch = batch.batch;
    reply.draft_us = 200;
    for (const DraftQuery& query : batch.queries) {
      ++queries;
      DraftAnswer& answer = reply.answers.emplace_back();
      answer.sequence = query.sequence;
      answer.base_len = query.base_len;
      const auto known = verifier_->sequences.find(query.sequence);
      if (batch.verifier_epoch != verifier_->info.epoch || known == verifier_->sequences.end() ||
          rng() % 100 < unknown_percent) {
        answer.outcome = DraftOutcome::kUnknown;
        continue;
      }
      answer.outcome = DraftOutcome::kDrafted;
      std::vector<int32_t> prefix(
          known->second.tokens.begin(),
          known->second.tokens.begin() +
              std::min<size_t>(known->second.tokens.size(), query.base_len));
      prefix.push_back(query.pending_token);
      for (int position = 0; position + 1 < info.block_size; ++position) {
        const int32_t truth = FakeNext(prefix, known->second.admit.seed);
        prefix.push_back(truth);
        // The truth is at rank 0 `right_percent` of the time, else lower or nowhere.
        std::vector<int32_t> row;
        if (rng() % 100 < right_percent) row.push_back(truth);
        for (int32_t other = 'a' + static_cast<int32_t>(rng() % 6);
             static_cast<int>(row.size()) < batch.top_k; ++other) {
          if (std::find(row.begin(), row.end(), other) == row.end()) row.push_back(other);
        }
        for (int rank = 0; rank < batch.top_k; ++rank) {
          answer.tokens.push_back(row[rank]);
          answer.log_probs.push_back(std::log(confidence) + rank * std::log(1.0f - confidence));
        }
      }
      if (malformed) answer.log_probs[0] = NAN;
    }
    return DrafterReplied{connection, std::move(reply)};
  }

  DrafterInfo info;
  bool connected = false;
  uint64_t connection = 0;
  std::deque<DraftBatch> batches;
  std::mt19937 rng{1};
  unsigned right_percent = 80;
  unsigned unknown_percent = 0;
  float confidence = 0.8f;
  bool malformed = false;
  uint64_t queries = 0;

 private:
  const FakeVerifier* const verifier_;
};

// ---- All of it together

struct Cluster {
  explicit Cluster(SchedulerOptions given = {}) : options(std::move(given)), drafter(&verifier) {
    options.verifier_address = "verifier:1";
    if (options.drafter_address.empty()) options.drafter_address = "drafter:2";
    options.vocab_size = kFakeVocab;
    options.max_position_embeddings = kFakePositions;
  }
  ~Cluster() { scheduler.reset(); }

  // With the verifier (and the drafter) connected.
  void Start(bool with_drafter = true) {
    scheduler = std::make_unique<Scheduler>(options, FakeTokenizer(), &clock, &verifier, &drafter,
                                            [this] { return rng(); });
    Handle(verifier.Connect());
    if (with_drafter) Handle(drafter.Connect());
  }
  void Handle(Event event) {
    scheduler->Handle(std::move(event));
    Advance();
  }
  void Advance() {
    scheduler->Advance();
    const absl::Status status = scheduler->Check();
    ASSERT_TRUE(status.ok()) << status;
  }

  Request MakeRequest(int prompt, int max_tokens) {
    RequestFields fields;
    for (int i = 0; i < prompt; ++i) fields.prompt.push_back('a' + rng() % 6);
    fields.max_tokens = max_tokens;
    RequestLimits limits;
    limits.vocab_size = kFakeVocab;
    limits.max_position_embeddings = kFakePositions;
    limits.eos_token_ids = {kFakeEos};
    return CheckRequest(std::move(fields), limits, [this] { return rng(); }).value();
  }
  // Returns the stream's handle.
  uint64_t Submit(const Request& request, std::optional<TimePoint> deadline = std::nullopt) {
    const uint64_t handle = ++last_handle;
    logs[handle] = std::make_unique<StreamLog>();
    router::Submit submit;
    submit.handle = handle;
    submit.request = request;
    submit.deadline = deadline;
    submit.stream =
        std::make_shared<FakeStream>(logs[handle].get(), static_cast<int>(request.received.size()));
    Handle(std::move(submit));
    return handle;
  }

  // One message from each peer that has one; false where neither has.
  bool Turn() {
    bool any = verifier.Process();
    if (auto result = verifier.TakeResult()) {
      Handle(*std::move(result));
      any = true;
    }
    if (auto reply = drafter.Answer()) {
      Handle(*std::move(reply));
      any = true;
    }
    return any;
  }
  // Until all streams have ended, with the clock going where nothing else moves.
  void Run(int limit = 100000) {
    while (!scheduler->idle() && limit-- > 0) {
      if (Turn()) continue;
      clock.Advance(std::chrono::milliseconds(10));
      Advance();
    }
    ASSERT_TRUE(scheduler->idle()) << "streams hang";
    while (Turn()) {
    }
  }

  // What the target continues this request with, up to its end, and how that ends.
  struct Truth {
    std::vector<int32_t> tokens;
    std::string text;
    FinishReason reason;
  };
  static Truth TruthOf(const Request& request) {
    Truth truth;
    std::vector<int32_t> prefix = request.prompt;
    Detokenizer detokenizer = Detokenizer::Create(FakeTokenizer(), request.stop).value();
    while (true) {
      const int32_t token = FakeNext(prefix, request.seed);
      prefix.push_back(token);
      truth.tokens.push_back(token);
      if (std::binary_search(request.stop_token_ids.begin(), request.stop_token_ids.end(), token)) {
        truth.reason = FinishReason::kStop;
        break;
      }
      const Detokenizer::Output output = detokenizer.Feed(token);
      truth.text += output.text;
      if (output.stopped) {
        truth.reason = FinishReason::kStop;
        return truth;
      }
      if (static_cast<int>(truth.tokens.size()) == request.max_tokens) {
        truth.reason = FinishReason::kLength;
        break;
      }
    }
    truth.text += detokenizer.Flush();
    return truth;
  }

  void ExpectComplete(const Request& request, const StreamLog& log) {
    const Truth truth = TruthOf(request);
    std::vector<int32_t> tokens = request.received;
    tokens.insert(tokens.end(), log.tokens.begin(), log.tokens.end());
    EXPECT_EQ(tokens, truth.tokens) << request.id;
    ASSERT_TRUE(log.final.has_value());
    EXPECT_EQ(log.final->finish_reason, truth.reason);
    EXPECT_EQ(log.final->completion_tokens, static_cast<int>(truth.tokens.size()));
    EXPECT_EQ(log.final->prompt_tokens, static_cast<int>(request.prompt.size()));
    if (request.received.empty()) {
      EXPECT_EQ(log.text, truth.text);
    }
    EXPECT_EQ(log.seed, request.seed);
    ASSERT_TRUE(log.finish.has_value());
    EXPECT_TRUE(log.finish->ok()) << *log.finish;
  }
  void ExpectNothingLeft() {
    EXPECT_TRUE(verifier.sequences.empty());
    for (const auto& [id, due] : verifier.owed) {
      EXPECT_NE(due, FakeVerifier::kDue) << "never released: " << id;
    }
    EXPECT_EQ(verifier.Pool().free_pages, verifier.info.pool.pages);
  }

  SchedulerOptions options;
  FakeClock clock;
  std::mt19937_64 rng{12345};
  FakeVerifier verifier;
  FakeDrafter drafter;
  std::map<uint64_t, std::unique_ptr<StreamLog>> logs;
  uint64_t last_handle = 0;
  std::unique_ptr<Scheduler> scheduler;
};

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_FAKE_PEERS_H_
