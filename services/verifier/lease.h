// Who drives this verifier: one router at a time.
#ifndef COPPICE_SERVICES_VERIFIER_LEASE_H_
#define COPPICE_SERVICES_VERIFIER_LEASE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "services/common/clock.h"

namespace coppice::verifier {

// Held by a session (a Step stream).  When the session breaks, the lease is kept for a while for
// the same router epoch; whoever else asks is told the owner's name.  Time is told, not asked for.
class Lease {
 public:
  explicit Lease(Duration hold) : hold_(hold) {}

  // What a router got.
  struct Grant {
    bool resumed = false;                // from before a break
    std::optional<uint64_t> superseded;  // the same router's older session, which has ended now
  };
  // FAILED_PRECONDITION, naming the owner, where another router has it.  Call Expire first.
  absl::Status Take(uint64_t session, const std::string& router, uint64_t epoch, TimePoint now,
                    Grant* grant);
  // The session's stream broke.  Nothing where it is not the holder's.
  void Break(uint64_t session, TimePoint now);
  // The session's stream ended as it should: true where it was the holder's; the lease is free.
  bool GiveUp(uint64_t session);
  // True, once, when the time of a broken lease is over: it is free, and what was kept for its
  // owner is to be freed.
  bool Expire(TimePoint now);

  bool HeldBy(uint64_t session) const { return session_ == session; }
  std::optional<uint64_t> session() const { return session_; }
  // Empty: nobody, not even one whose stream broke.
  const std::string& owner() const { return owner_; }
  // When a broken lease ends.
  std::optional<TimePoint> deadline() const { return deadline_; }

 private:
  void Clear();

  const Duration hold_;
  std::string owner_;
  uint64_t epoch_ = 0;
  std::optional<uint64_t> session_;    // none: free or broken
  std::optional<TimePoint> deadline_;  // while broken
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_LEASE_H_
