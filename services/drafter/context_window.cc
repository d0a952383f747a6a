#include "services/drafter/context_window.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"

namespace coppice::drafter {

ContextWindows::ContextWindows(int slots, int window) : slots_(slots), window_(window) {
  for (int slot = 0; slot < slots; ++slot) free_.push_back(slot);
  std::make_heap(free_.begin(), free_.end(), std::greater<>());
}

ContextWindows::Placement ContextWindows::Place(const SequenceKey& key, int64_t first,
                                                int64_t count) {
  Placement out;
  out.ack.sequence = key.sequence;
  const int64_t end = first + count;
  auto it = contexts_.find(key);
  if (it == contexts_.end()) {
    const bool waits = waiting_.contains(key);
    if (waits || free_.empty()) {
      int64_t& seen = waiting_[key];
      seen = std::max(seen, end);
      if (!waits) order_.push_back(key);
      out.ack.no_slot = true;
      return out;
    }
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    Context context;
    context.slot = free_.back();
    context.begin = context.have_len = context.seen_len = first;
    free_.pop_back();
    it = contexts_.emplace(key, context).first;
  }

  Context& context = it->second;
  if (first > context.have_len) {
    const bool answer = first < context.seen_len;
    if (!answer && count < window_) {
      context.seen_len = std::max(context.seen_len, end);
      const int64_t need = std::max(context.have_len, end - window_);
      // Nothing older than that will be wanted again.
      if (need > context.have_len) context.begin = context.have_len = need;
      out.ack.have_len = context.have_len;
      out.ack.need_from = need;
      return out;
    }
    context.begin = context.have_len = first;
  }
  if (end > context.have_len) {
    out.slot = context.slot;
    out.skip = std::max(context.have_len - first, count - window_);
    out.count = count - out.skip;
    context.begin = std::max(context.begin, first + count - window_);
    context.have_len = end;
    context.seen_len = std::max(context.seen_len, end);
  }
  out.ack.have_len = context.have_len;
  return out;
}

void ContextWindows::Release(const SequenceKey& key) {
  waiting_.erase(key);
  const auto it = contexts_.find(key);
  if (it == contexts_.end()) return;
  free_.push_back(it->second.slot);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
  contexts_.erase(it);
}

void ContextWindows::CloseStream(uint64_t stream) {
  std::vector<SequenceKey> gone;
  for (const auto& [key, context] : contexts_) {
    if (key.stream == stream) gone.push_back(key);
  }
  for (const auto& [key, seen] : waiting_) {
    if (key.stream == stream) gone.push_back(key);
  }
  for (const SequenceKey& key : gone) Release(key);
}

std::vector<std::pair<uint64_t, Ack>> ContextWindows::AdmitWaiting() {
  std::vector<std::pair<uint64_t, Ack>> acks;
  while (!order_.empty()) {
    const SequenceKey key = order_.front();
    const auto it = waiting_.find(key);
    if (it != waiting_.end() && free_.empty()) break;
    order_.pop_front();
    if (it == waiting_.end()) continue;
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    Context context;
    context.slot = free_.back();
    free_.pop_back();
    context.seen_len = it->second;
    context.begin = context.have_len = std::max<int64_t>(0, context.seen_len - window_);
    waiting_.erase(it);
    contexts_.emplace(key, context);
    Ack ack;
    ack.sequence = key.sequence;
    ack.have_len = context.have_len;
    ack.need_from = context.have_len;
    acks.emplace_back(key.stream, ack);
  }
  return acks;
}

const Context* ContextWindows::Find(const SequenceKey& key) const {
  const auto it = contexts_.find(key);
  return it == contexts_.end() ? nullptr : &it->second;
}

int64_t ContextWindows::ContextBegin(const Context& context) const {
  return std::max(context.begin, context.have_len - window_);
}

int64_t ContextWindows::tokens() const {
  int64_t sum = 0;
  for (const auto& [key, context] : contexts_) sum += context.have_len - ContextBegin(context);
  return sum;
}

std::string ContextWindows::Check() const {
  std::vector<int> owners(slots_, 0);
  for (const int slot : free_) ++owners[slot];
  for (const auto& [key, context] : contexts_) {
    ++owners[context.slot];
    if (context.begin > context.have_len || context.have_len > context.seen_len) {
      return absl::StrCat("sequence ", key.sequence, ": begin ", context.begin, ", have_len ",
                          context.have_len, ", seen_len ", context.seen_len);
    }
    if (waiting_.contains(key))
      return absl::StrCat("sequence ", key.sequence, " has a slot and waits");
  }
  for (int slot = 0; slot < slots_; ++slot) {
    if (owners[slot] != 1) return absl::StrCat("slot ", slot, " has ", owners[slot], " owners");
  }
  return "";
}

}  // namespace coppice::drafter
