// Carries features to drafters: one AppendContext stream per address, with resending.
#ifndef COPPICE_SERVICES_VERIFIER_FEATURE_SENDER_H_
#define COPPICE_SERVICES_VERIFIER_FEATURE_SENDER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "services/common/clock.h"
#include "services/verifier/feature_sink.h"

namespace coppice::verifier {

struct FeatureSenderOptions {
  // Told to drafters in the hello.
  std::string verifier;
  uint64_t verifier_epoch = 0;
  uint64_t drafter_fingerprint = 0;
  uint64_t embedding_fingerprint = 0;
  int64_t hidden_size = 0;

  // Bytes that may wait for a slow drafter; what does not fit is dropped and sent again later.
  size_t max_queued_bytes = 32 << 20;
  // A message is closed once it holds so much.
  size_t message_bytes = 4 << 20;
  // Pause before connecting again: doubled from the first to the longest while it fails.
  std::chrono::milliseconds first_retry{50};
  std::chrono::milliseconds longest_retry{1000};
  // After a refusal (a drafter for another model), which waiting will hardly cure.
  std::chrono::milliseconds refused_retry{10'000};
};

// Totals over all drafters.
struct FeatureCounters {
  std::atomic<uint64_t> rows{0};         // queued for sending
  std::atomic<uint64_t> dropped{0};      // rows not sent when they came: away, slow or without slot
  std::atomic<uint64_t> resends{0};      // requests to send again
  std::atomic<uint64_t> connections{0};  // streams opened
  std::atomic<uint64_t> streams{0};      // open now
};

// Never blocks, and holds a bounded amount per drafter: rows that cannot be sent now are dropped,
// their sequence is marked, and once there is room again (the drafter reads on, or is back) the
// sequence's window is asked for anew through `resend`.  So speculation resumes by itself, and a
// drafter that hangs costs nothing but itself.
//
// The FeatureSink methods belong to the step loop's thread; everything else happens on gRPC's.
class FeatureSender : public FeatureSink {
 public:
  // Asks the step loop for Engine::Resend(drafter, sequence, from, request).  Called from any
  // thread until Shutdown returns; must not block.
  using ResendRequest =
      std::function<void(const std::string&, uint64_t sequence, int64_t from, uint64_t request)>;
  FeatureSender(const FeatureSenderOptions& options, ResendRequest resend);
  // As Shutdown.
  ~FeatureSender() override;

  void Connect(const std::string& drafter) override;
  int64_t Window(const std::string& drafter) override;
  void Append(const std::string& drafter, const FeatureRows& rows) override;
  void Release(const std::string& drafter, uint64_t sequence) override;
  void Flush() override;

  // Closes all streams and waits for their end.  What is given later goes nowhere.
  void Shutdown();

  const FeatureCounters& counters() const;

 private:
  struct Shared;
  class Peer;

  std::shared_ptr<Peer> Find(const std::string& drafter);

  const std::shared_ptr<Shared> shared_;  // what the peers use, who may outlive this for a moment
  absl::flat_hash_map<std::string, std::shared_ptr<Peer>> peers_;  // the step loop's thread's
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_FEATURE_SENDER_H_
