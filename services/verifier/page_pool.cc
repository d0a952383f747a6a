#include "services/verifier/page_pool.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace coppice::verifier {
namespace {

constexpr int kWordBits = 64;

// Bit i of the result is set iff bits i … i + n - 1 of `word` are; 1 <= n <= 64.  Each doubling
// extends the runs known so far by as much again.
uint64_t RunStarts(uint64_t word, int n) {
  int known = 1;
  while (known < n && word != 0) {
    const int shift = std::min(known, n - known);
    word &= word >> shift;
    known += shift;
  }
  return word;
}

// The first page of the first run of at least n set bits, or -1.
int64_t FindRun(absl::Span<const uint64_t> words, int64_t n) {
  int64_t run = 0;  // set bits that end just before this word
  for (size_t w = 0; w < words.size(); ++w) {
    const uint64_t word = words[w];
    const int64_t begin = static_cast<int64_t>(w) * kWordBits;
    const int head = std::countr_one(word);
    if (run + head >= n) return begin - run;
    if (head == kWordBits) {
      run += kWordBits;
      continue;
    }
    if (n < kWordBits) {
      const uint64_t starts = RunStarts(word, static_cast<int>(n));
      if (starts != 0) return begin + std::countr_zero(starts);
    }
    run = std::countl_one(word);
  }
  return -1;
}

}  // namespace

PagePool::PagePool(int64_t pages)
    : capacity_(pages - 1),
      free_pages_(pages - 1),
      free_((pages + kWordBits - 1) / kWordBits),
      used_(free_.size()) {
  CHECK_GE(pages, 1);
  for (int64_t page = 1; page < pages; ++page) {
    free_[page / kWordBits] |= uint64_t{1} << page % kWordBits;
  }
}

void PagePool::Take(int64_t page) {
  const uint64_t bit = uint64_t{1} << page % kWordBits;
  DCHECK(free_[page / kWordBits] & bit);
  free_[page / kWordBits] &= ~bit;
  used_[page / kWordBits] |= bit;
  --free_pages_;
}

bool PagePool::Allocate(int64_t n, std::vector<int32_t>* out) {
  if (n > free_pages_) return false;
  if (n <= 0) return true;
  const int64_t first = FindRun(free_, n);
  if (first >= 0) {
    for (int64_t page = first; page < first + n; ++page) {
      Take(page);
      out->push_back(static_cast<int32_t>(page));
    }
    return true;
  }
  for (size_t w = 0; n > 0; ++w) {
    for (; n > 0 && free_[w] != 0; --n) {
      const int64_t page = static_cast<int64_t>(w) * kWordBits + std::countr_zero(free_[w]);
      Take(page);
      out->push_back(static_cast<int32_t>(page));
    }
  }
  return true;
}

void PagePool::Release(absl::Span<const int32_t> pages) {
  for (const int32_t page : pages) {
    CHECK(used(page)) << "page " << page << " is free already";
    const uint64_t bit = uint64_t{1} << page % kWordBits;
    free_[page / kWordBits] |= bit;
    used_[page / kWordBits] &= ~bit;
    ++free_pages_;
  }
}

PagePool::Runs PagePool::FreeRuns() const {
  Runs runs;
  int64_t run = 0;
  const auto end_run = [&] {
    if (run > 0) ++runs.runs;
    runs.longest = std::max(runs.longest, run);
    run = 0;
  };
  for (uint64_t word : free_) {
    for (int left = kWordBits; left > 0;) {
      const int ones = std::min(std::countr_one(word), left);
      run += ones;
      left -= ones;
      if (left == 0) break;
      end_run();
      word >>= ones;  // ones < 64 here
      const int zeros = std::min(std::countr_zero(word), left);
      left -= zeros;
      if (left == 0) break;
      word >>= zeros;
    }
  }
  end_run();
  if (free_pages_ > 0) {
    runs.fragmentation = 1 - static_cast<double>(runs.longest) / static_cast<double>(free_pages_);
  }
  return runs;
}

absl::Status PagePool::Check() const {
  int64_t free = 0;
  int64_t used = 0;
  const int64_t pages = capacity_ + 1;
  for (size_t w = 0; w < free_.size(); ++w) {
    const int64_t begin = static_cast<int64_t>(w) * kWordBits;
    uint64_t all = ~uint64_t{0};
    if (pages - begin < kWordBits) all >>= kWordBits - (pages - begin);
    if (w == 0) all &= ~uint64_t{1};
    if ((free_[w] & used_[w]) != 0) {
      return absl::InternalError(absl::StrCat(
          "page ", begin + std::countr_zero(free_[w] & used_[w]), " is both free and used"));
    }
    if ((free_[w] | used_[w]) != all) {
      return absl::InternalError(absl::StrCat("page ",
                                              begin + std::countr_zero((free_[w] | used_[w]) ^ all),
                                              " is neither free nor used, or does not exist"));
    }
    free += std::popcount(free_[w]);
    used += std::popcount(used_[w]);
  }
  if (free != free_pages_ || used != used_pages()) {
    return absl::InternalError(absl::StrCat("the bitmaps hold ", free, " free and ", used,
                                            " used pages, the counts say ", free_pages_, " and ",
                                            used_pages()));
  }
  return absl::OkStatus();
}

}  // namespace coppice::verifier
