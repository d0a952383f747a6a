#include "services/verifier/lease.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace coppice::verifier {

void Lease::Clear() {
  owner_.clear();
  epoch_ = 0;
  session_.reset();
  deadline_.reset();
}

absl::Status Lease::Take(uint64_t session, const std::string& router, uint64_t epoch, TimePoint now,
                         Grant* grant) {
  *grant = Grant{};
  if (!owner_.empty() && epoch != epoch_) {
    if (session_) {
      return absl::FailedPreconditionError(
          absl::StrCat("this verifier belongs to router ", owner_,
                       "; it can be had once that router's Step stream has ended"));
    }
    const int64_t left =
        std::max<int64_t>(0, std::chrono::ceil<std::chrono::seconds>(*deadline_ - now).count());
    return absl::FailedPreconditionError(absl::StrCat("this verifier is kept for router ", owner_,
                                                      ", whose Step stream broke, for ", left,
                                                      " s more; try again then"));
  }
  grant->resumed = !owner_.empty();
  grant->superseded = session_;
  owner_ = router.empty() ? "(unnamed)" : router;
  epoch_ = epoch;
  session_ = session;
  deadline_.reset();
  return absl::OkStatus();
}

void Lease::Break(uint64_t session, TimePoint now) {
  if (session_ != session) return;
  session_.reset();
  deadline_ = now + hold_;
}

bool Lease::GiveUp(uint64_t session) {
  if (session_ != session) return false;
  Clear();
  return true;
}

bool Lease::Expire(TimePoint now) {
  if (!deadline_ || now < *deadline_) return false;
  Clear();
  return true;
}

}  // namespace coppice::verifier
