// The KV pool's pages as numbers: which are free.
#ifndef COPPICE_SERVICES_VERIFIER_PAGE_POOL_H_
#define COPPICE_SERVICES_VERIFIER_PAGE_POOL_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace coppice::verifier {

// A bitmap: freed pages are in order by themselves, so low addresses go first and nothing is ever
// sorted.  Page 0 is a sink for padding and is never handed out.
//
// Invariant: a page is either free or used, never both; Check() proves it.
// Not thread-safe.
class PagePool {
 public:
  // Pages 1 … pages - 1 can be handed out; pages >= 1.
  explicit PagePool(int64_t pages);

  // Appends n pages, used from now on: the first run of at least n free pages, else the n lowest
  // free ones.  False, and nothing taken, where fewer than n are free.  O(pages / 64 · log n).
  bool Allocate(int64_t n, std::vector<int32_t>* out);
  void Release(absl::Span<const int32_t> pages);

  int64_t capacity() const { return capacity_; }
  int64_t free_pages() const { return free_pages_; }
  int64_t used_pages() const { return capacity_ - free_pages_; }
  bool used(int32_t page) const { return used_[page / 64] >> page % 64 & 1; }

  // How the free pages lie.
  struct Runs {
    int64_t runs = 0;
    int64_t longest = 0;
    // 0: all free pages are one run (or none is free); towards 1: they are scattered.
    double fragmentation = 0;
  };
  Runs FreeRuns() const;

  // INTERNAL, saying what is wrong, unless used and free pages are disjoint and together are all
  // but page 0, and the counts agree with the bitmaps.  O(pages / 64), cheap enough for every step.
  absl::Status Check() const;

 private:
  void Take(int64_t page);

  int64_t capacity_;
  int64_t free_pages_;
  std::vector<uint64_t> free_;  // bit p % 64 of word p / 64
  std::vector<uint64_t> used_;  // what free_ says, kept independently so that Check can compare
};

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_PAGE_POOL_H_
