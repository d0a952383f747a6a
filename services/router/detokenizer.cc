#include "services/router/detokenizer.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "model/utf8.h"

namespace coppice::router {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

absl::StatusOr<Detokenizer> Detokenizer::Create(const Tokenizer* tokenizer,
                                                std::vector<std::string> stop_strings,
                                                size_t min_tokens) {
  if (stop_strings.size() > kMaxStopStrings) {
    return absl::InvalidArgumentError(absl::StrCat("there are ", stop_strings.size(),
                                                   " stop strings; at most ", kMaxStopStrings,
                                                   " are allowed"));
  }
  std::vector<Stop> stops;
  for (size_t i = 0; i < stop_strings.size(); ++i) {
    std::string& text = stop_strings[i];
    if (text.empty())
      return absl::InvalidArgumentError(absl::StrCat("stop string ", i, " is empty"));
    if (text.size() > kMaxStopBytes) {
      return absl::InvalidArgumentError(absl::StrCat("stop string ", i, " is ", text.size(),
                                                     " bytes long; at most ", kMaxStopBytes,
                                                     " are allowed"));
    }
    if (FindInvalidUtf8(text) != std::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat("stop string ", i, " is not valid UTF-8"));
    }
    Stop stop;
    stop.failure.resize(text.size());
    for (size_t j = 1, k = 0; j < text.size(); ++j) {
      while (k > 0 && text[j] != text[k]) k = stop.failure[k - 1];
      if (text[j] == text[k]) ++k;
      stop.failure[j] = static_cast<uint32_t>(k);
    }
    stop.text = std::move(text);
    stops.push_back(std::move(stop));
  }
  return Detokenizer(tokenizer, std::move(stops), min_tokens);
}

bool Detokenizer::Push(char byte, bool may_stop) {
  pending_.push_back(byte);
  held_ = 0;
  for (size_t i = 0; i < stops_.size(); ++i) {
    Stop& stop = stops_[i];
    while (stop.state > 0 && stop.text[stop.state] != byte)
      stop.state = stop.failure[stop.state - 1];
    if (stop.text[stop.state] == byte) ++stop.state;
    if (stop.state == stop.text.size() && !may_stop) stop.state = stop.failure[stop.state - 1];
    // Of several that end here the longest begins first.
    if (stop.state == stop.text.size() &&
        (!stopped_ || stop.text.size() > stops_[matched_].text.size())) {
      stopped_ = true;
      matched_ = i;
    }
    held_ = std::max(held_, stop.state);
  }
  return stopped_;
}

void Detokenizer::Emit(size_t keep, bool final, std::string* text) {
  const std::string_view bytes = std::string_view(pending_).substr(head_);
  std::string_view rest = bytes.substr(0, bytes.size() - keep);
  while (!rest.empty()) {
    const Utf8Char c = DecodeUtf8(rest);
    if (c.kind == Utf8Char::kTruncated && !final) break;
    text->append(c.kind == Utf8Char::kValid ? rest.substr(0, c.length) : kReplacement);
    rest.remove_prefix(c.length);
  }
  head_ += bytes.size() - keep - rest.size();
  // Dropping the front only once it is the larger half keeps the cost per byte constant.
  if (head_ * 2 >= pending_.size()) {
    pending_.erase(0, head_);
    head_ = 0;
  }
}

Detokenizer::Output Detokenizer::Feed(absl::Span<const int32_t> ids) {
  Output output;
  if (stopped_) return output;
  for (const int32_t id : ids) {
    ++output.consumed;
    const bool may_stop = unstoppable_ == 0;
    if (!may_stop) --unstoppable_;
    if (tokenizer_->IsControl(id)) continue;
    for (const char byte : tokenizer_->TokenBytes(id)) {
      if (!Push(byte, may_stop)) continue;
      // Nothing can complete a character that the stop string cuts off.
      Emit(stops_[matched_].text.size(), /*final=*/true, &output.text);
      pending_.clear();
      head_ = 0;
      output.stopped = true;
      output.stop_string = stops_[matched_].text;
      return output;
    }
  }
  Emit(held_, /*final=*/false, &output.text);
  return output;
}

std::string Detokenizer::Flush() {
  std::string text;
  Emit(0, /*final=*/true, &text);
  held_ = 0;
  for (Stop& stop : stops_) stop.state = 0;
  return text;
}

}  // namespace coppice::router
