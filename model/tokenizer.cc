#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "model/json_file.h"
#include "model/utf8.h"

namespace coppice {
namespace {

using nlohmann::json;

constexpr size_t kMaxVocabularyBytes = 64 << 20;
// The reference tokenizer's own cuts, which move token borders in very long texts.
constexpr size_t kMaxSliceChars = 400'000;
constexpr size_t kMaxRunChars = 25'000;
// Up to this many parts a scan for the lowest rank beats a heap.
constexpr size_t kScanParts = 96;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// Kimi's pattern.  Its classes "letters of such case, or marks, but not Han" are intersections,
// which PCRE2 lacks; general categories partition all characters, so they are written as "none of
// the other categories, nor Han".  \s and \S are spelled out as Unicode's White_Space, because
// PCRE2's \s has U+180E as well.  Characters newer than PCRE2's Unicode (14 in version 10.42) count
// as unassigned.
constexpr char kSpace[] =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr char kUpperNotHan[] = R"([^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{sc:Han}])";
constexpr char kLowerNotHan[] = R"([^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{sc:Han}])";
constexpr char kSuffix[] = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)";

std::string Pattern() {
  return absl::StrCat(R"(\p{sc:Han}+)",                                                         //
                      R"(|[^\r\n\p{L}\p{N}]?)", kUpperNotHan, "*", kLowerNotHan, "+", kSuffix,  //
                      R"(|[^\r\n\p{L}\p{N}]?)", kUpperNotHan, "+", kLowerNotHan, "*", kSuffix,  //
                      R"(|\p{N}{1,3})",                                                         //
                      R"(| ?[^)", kSpace, R"(\p{L}\p{N}]+[\r\n]*)",                             //
                      "|[", kSpace, R"(]*[\r\n]+)",                                             //
                      "|[", kSpace, "]+(?![^", kSpace, "])",                                    //
                      "|[", kSpace, "]+");
}

// The compiled pattern; shared by all tokenizers.
class Regex {
 public:
  static absl::StatusOr<const Regex*> Get() {
    static const Regex* const regex = new Regex();
    if (regex->code_ == nullptr) return absl::InternalError(regex->error_);
    return regex;
  }

  // Calls fn(piece) for the matches in `text`, which must be valid UTF-8.
  template <typename Fn>
  absl::Status ForEachMatch(std::string_view text, Fn fn) const {
    struct Scratch {
      pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
      pcre2_match_context* context = pcre2_match_context_create(nullptr);
      pcre2_jit_stack* stack = pcre2_jit_stack_create(64 << 10, 16 << 20, nullptr);
      ~Scratch() {
        pcre2_jit_stack_free(stack);
        pcre2_match_context_free(context);
        pcre2_match_data_free(data);
      }
    } scratch;
    if (scratch.data == nullptr || scratch.context == nullptr || scratch.stack == nullptr) {
      return absl::ResourceExhaustedError("no memory for matching the tokenizer's pattern");
    }
    pcre2_jit_stack_assign(scratch.context, nullptr, scratch.stack);
    // Runs are cut to 25,000 characters before matching, so a match backtracks over at most that
    // many.
    pcre2_set_match_limit(scratch.context, std::numeric_limits<uint32_t>::max());
    for (size_t at = 0; at < text.size();) {
      const int found = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                    at, PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
      if (found == PCRE2_ERROR_NOMATCH) break;
      if (found < 0) {
        return absl::InternalError(
            absl::StrCat("the tokenizer's pattern failed with PCRE2 error ", found));
      }
      const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(scratch.data);
      fn(text.substr(bounds[0], bounds[1] - bounds[0]));
      at = bounds[1];
    }
    return absl::OkStatus();
  }

 private:
  Regex() {
    const std::string pattern = Pattern();
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_ =
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
    if (code_ == nullptr) {
      error_ = absl::StrCat("PCRE2 does not compile the tokenizer's pattern (error ", error, " at ",
                            offset, "); version 10.40 or later with Unicode is needed");
      return;
    }
    // Where the platform has no JIT compiler the interpreter gives the same matches.
    pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE);
  }

  pcre2_code* code_ = nullptr;
  std::string error_;
};

// Python's str.isspace, by which the reference cuts runs: White_Space and U+001C … U+001F.
bool IsPythonSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

// Walks a prompt character by character and tells where the reference would cut it: every 400,000
// characters, and inside a slice where a run of space or of other characters has reached 25,000.
class Cutter {
 public:
  // Whether a cut lies before this character.
  bool CutBefore(char32_t c) {
    const bool space = IsPythonSpace(c);
    bool cut = false;
    if (slice_ == kMaxSliceChars) {
      cut = true;
      slice_ = 0;
      run_ = 0;
    }
    if (run_ == 0 || space != space_) {
      run_ = 1;
    } else if (++run_ > kMaxRunChars) {
      cut = true;
      run_ = 1;
    }
    space_ = space;
    ++slice_;
    return cut;
  }

 private:
  size_t slice_ = 0;
  size_t run_ = 0;
  bool space_ = false;
};

absl::Status InvalidUtf8(size_t offset) {
  return absl::InvalidArgumentError(absl::StrCat("the text is not valid UTF-8 at byte ", offset));
}

bool IsMarkerForParsers(std::string_view name) {
  constexpr std::string_view kNames[] = {"<think>",
                                         "</think>",
                                         "<|tool_calls_section_begin|>",
                                         "<|tool_calls_section_end|>",
                                         "<|tool_call_begin|>",
                                         "<|tool_call_argument_begin|>",
                                         "<|tool_call_end|>"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace

struct Tokenizer::Impl {
  const Regex* regex = nullptr;
  // All tokens' bytes by id; the views below point into these strings.
  std::vector<std::string> bytes;
  absl::flat_hash_map<absl::string_view, int32_t> rank_of;
  absl::flat_hash_map<absl::string_view, int32_t> special_of;
  std::array<std::vector<int32_t>, 256> specials_by_first_byte;  // longest name first
  std::vector<bool> is_control;                                  // by id - num_base
  size_t longest_rank = 0;

  static constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

  int32_t RankOf(std::string_view text) const {
    if (text.size() > longest_rank) return kNoRank;
    const auto it = rank_of.find(View(text));
    return it == rank_of.end() ? kNoRank : it->second;
  }

  // tiktoken's merge: of all adjacent pairs the one whose concatenation has the lowest rank, the
  // leftmost of equals, until no pair is a token.
  void MergeByScan(std::string_view piece, std::vector<int32_t>* ids) const {
    struct Part {
      size_t begin;
      int32_t pair;  // rank of this part joined with the next
    };
    std::vector<Part> parts(piece.size() + 1);
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] = {i, i + 2 <= piece.size() ? RankOf(piece.substr(i, 2)) : kNoRank};
    }
    const auto pair_rank = [&](size_t i) {
      return i + 2 < parts.size()
                 ? RankOf(piece.substr(parts[i].begin, parts[i + 2].begin - parts[i].begin))
                 : kNoRank;
    };
    for (;;) {
      const auto best = std::min_element(
          parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.pair < b.pair; });
      if (best->pair == kNoRank) break;
      const size_t i = best - parts.begin();
      parts.erase(best + 1);
      parts[i].pair = pair_rank(i);
      if (i > 0) parts[i - 1].pair = pair_rank(i - 1);
    }
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      ids->push_back(RankOf(piece.substr(parts[i].begin, parts[i + 1].begin - parts[i].begin)));
    }
  }

  // The same merges in O(n log n): a heap of candidate pairs over a linked list of parts; a
  // candidate whose parts have changed since is skipped.
  void MergeByHeap(std::string_view piece, std::vector<int32_t>* ids) const {
    const size_t n = piece.size();
    std::vector<size_t> next(n + 1);      // where the part that begins here ends
    std::vector<size_t> previous(n + 1);  // where the part before the one that begins here begins
    std::vector<bool> begins(n + 1, true);
    for (size_t i = 0; i <= n; ++i) {
      next[i] = i + 1;
      previous[i] = i == 0 ? 0 : i - 1;
    }
    using Candidate = std::tuple<int32_t, size_t, size_t, size_t>;  // rank, begin, middle, end
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
    const auto consider = [&](size_t begin) {
      const size_t middle = next[begin];
      if (middle >= n) return;
      const size_t end = next[middle];
      const int32_t rank = RankOf(piece.substr(begin, end - begin));
      if (rank != kNoRank) heap.emplace(rank, begin, middle, end);
    };
    for (size_t i = 0; i < n; ++i) consider(i);
    while (!heap.empty()) {
      const auto [rank, begin, middle, end] = heap.top();
      heap.pop();
      if (!begins[begin] || next[begin] != middle || next[middle] != end) continue;
      begins[middle] = false;
      next[begin] = end;
      previous[end] = begin;
      consider(begin);
      if (begin > 0) consider(previous[begin]);
    }
    for (size_t i = 0; i < n; i = next[i]) ids->push_back(RankOf(piece.substr(i, next[i] - i)));
  }

  // `text`: valid UTF-8 between two cuts or special tokens.
  absl::Status EncodeOrdinary(std::string_view text, std::vector<int32_t>* ids) const {
    return regex->ForEachMatch(text, [&](std::string_view piece) {
      const int32_t whole = RankOf(piece);
      if (whole != kNoRank) {
        ids->push_back(whole);
      } else if (piece.size() <= kScanParts) {
        MergeByScan(piece, ids);
      } else {
        MergeByHeap(piece, ids);
      }
    });
  }

  // The special token whose name begins `text`, the longest of several; -1: none.
  int32_t SpecialAt(std::string_view text) const {
    for (const int32_t id : specials_by_first_byte[static_cast<uint8_t>(text[0])]) {
      if (text.substr(0, bytes[id].size()) == bytes[id]) return id;
    }
    return -1;
  }
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl, int num_base, int vocab_size)
    : impl_(std::move(impl)), num_base_(num_base), vocab_size_(vocab_size) {}

Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Create(
    std::vector<std::string> ranks, const std::map<int32_t, std::string>& added, int vocab_size,
    const std::string& source) {
  absl::StatusOr<const Regex*> regex = Regex::Get();
  if (!regex.ok()) return regex.status();
  if (vocab_size < 0 || ranks.size() > static_cast<size_t>(vocab_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        source, " has ", ranks.size(), " tokens, more than the model's vocab_size, ", vocab_size));
  }
  const int num_base = static_cast<int>(ranks.size());
  auto impl = std::make_unique<Impl>();
  impl->regex = *regex;
  impl->bytes = std::move(ranks);
  impl->bytes.resize(vocab_size);
  for (const auto& [id, name] : added) {
    if (id < num_base || id >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          source, ": the added token ", name, " has id ", id, "; expected an id from ", num_base,
          " (after the last rank) to ", vocab_size - 1, " (vocab_size - 1)"));
    }
    if (name.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": the added token with id ", id, " has no content"));
    }
    impl->bytes[id] = name;
  }
  impl->rank_of.reserve(num_base);
  impl->is_control.resize(vocab_size - num_base);
  for (int id = 0; id < vocab_size; ++id) {
    std::string& bytes = impl->bytes[id];
    const bool special = id >= num_base;
    if (special && bytes.empty()) bytes = absl::StrCat("<|reserved_token_", id, "|>");
    if (bytes.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": the token with rank ", id, " is empty"));
    }
    auto& map = special ? impl->special_of : impl->rank_of;
    const auto [it, inserted] = map.emplace(absl::string_view(bytes), id);
    if (!inserted) {
      return absl::InvalidArgumentError(absl::StrCat(source, ": ids ", it->second, " and ", id,
                                                     " have the same ",
                                                     special ? "name" : "bytes"));
    }
    if (special) {
      impl->specials_by_first_byte[static_cast<uint8_t>(bytes[0])].push_back(id);
      impl->is_control[id - num_base] = !IsMarkerForParsers(bytes);
    } else {
      impl->longest_rank = std::max(impl->longest_rank, bytes.size());
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (!impl->rank_of.contains(std::string(1, static_cast<char>(byte)))) {
      return absl::InvalidArgumentError(absl::StrCat(source, ": no token is the single byte ", byte,
                                                     "; a byte-level vocabulary has all 256"));
    }
    auto& specials = impl->specials_by_first_byte[byte];
    std::stable_sort(specials.begin(), specials.end(), [&](int32_t a, int32_t b) {
      return impl->bytes[a].size() > impl->bytes[b].size();
    });
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl), num_base, vocab_size));
}

namespace {

// One line a token: its bytes in base64, a space, its rank; ranks are the line numbers.
absl::StatusOr<std::vector<std::string>> ReadRanks(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxVocabularyBytes);
  if (!text.ok()) return text.status();
  std::vector<std::string> ranks;
  std::vector<bool> seen;
  size_t count = 0;
  size_t line_number = 0;
  std::string_view rest = *text;
  while (!rest.empty()) {
    const size_t newline = rest.find('\n');
    std::string_view line = rest.substr(0, newline);
    rest.remove_prefix(newline == std::string_view::npos ? rest.size() : newline + 1);
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    const auto bad = [&](const char* expected) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ", line ", line_number, ": expected ", expected));
    };
    const size_t space = line.find(' ');
    uint32_t rank = 0;
    std::string bytes;
    if (space == std::string_view::npos || !absl::SimpleAtoi(View(line.substr(space + 1)), &rank) ||
        !absl::Base64Unescape(View(line.substr(0, space)), &bytes)) {
      return bad("a token's bytes in base64, a space and its rank");
    }
    // A line takes at least five bytes, so a larger rank leaves a gap.
    if (rank > text->size() / 5) return bad("ranks without gaps from 0");
    if (rank >= ranks.size()) {
      ranks.resize(rank + 1);
      seen.resize(rank + 1);
    }
    if (seen[rank]) return bad("a rank that no earlier line has");
    seen[rank] = true;
    ranks[rank] = std::move(bytes);
    ++count;
  }
  if (count != ranks.size()) {
    const size_t gap = std::find(seen.begin(), seen.end(), false) - seen.begin();
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": no line has rank ", gap, ", but ranks go up to ", ranks.size() - 1));
  }
  if (ranks.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " has no tokens"));
  return ranks;
}

absl::StatusOr<std::map<int32_t, std::string>> ReadAddedTokens(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxVocabularyBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<json> config = ParseJsonObject(*text, path);
  if (!config.ok()) return config.status();
  std::map<int32_t, std::string> added;
  const auto decoder = config->find("added_tokens_decoder");
  if (decoder == config->end() || !decoder->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has no added_tokens_decoder (an object from ids to special tokens)"));
  }
  for (const auto& [key, token] : decoder->items()) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(key, &id) || !token.is_object() || !token.contains("content") ||
        !token["content"].is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": added_tokens_decoder has the entry \"", key,
                       "\", which is not an id with an object whose content is a string"));
    }
    if (!added.emplace(id, token["content"].get<std::string>()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": added_tokens_decoder names id ", id, " twice"));
    }
  }
  return added;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& dir, int vocab_size) {
  absl::StatusOr<std::vector<std::string>> ranks = ReadRanks(absl::StrCat(dir, "/tiktoken.model"));
  if (!ranks.ok()) return ranks.status();
  absl::StatusOr<std::map<int32_t, std::string>> added =
      ReadAddedTokens(absl::StrCat(dir, "/tokenizer_config.json"));
  if (!added.ok()) return added.status();
  return Create(*std::move(ranks), *added, vocab_size, absl::StrCat("the tokenizer in ", dir));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodePieces(
    absl::Span<const TextPiece> pieces) const {
  std::vector<int32_t> ids;
  Cutter cutter;
  std::string joined;  // ordinary text since the last special token
  std::vector<size_t> cuts;

  const auto flush = [&]() -> absl::Status {
    size_t begin = 0;
    cuts.push_back(joined.size());
    for (const size_t end : cuts) {
      absl::Status status =
          impl_->EncodeOrdinary(std::string_view(joined).substr(begin, end - begin), &ids);
      if (!status.ok()) return status;
      begin = end;
    }
    cuts.clear();
    joined.clear();
    return absl::OkStatus();
  };

  for (const TextPiece& piece : pieces) {
    std::optional<int32_t> id;
    if (piece.special) {
      id = IdOf(piece.text);
      if (!id.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("the vocabulary has no special token named ", piece.text));
      }
      absl::Status status = flush();
      if (!status.ok()) return status;
      ids.push_back(*id);
    }
    // A special token's characters count toward the cuts, but it is never cut itself.
    const std::string_view text = piece.text;
    for (size_t i = 0; i < text.size();) {
      const Utf8Char c = DecodeUtf8(text.substr(i));
      if (c.kind != Utf8Char::kValid) return InvalidUtf8(i);
      if (cutter.CutBefore(c.code_point) && !piece.special) cuts.push_back(joined.size() + i);
      i += c.length;
    }
    if (!piece.special) joined += piece.text;
  }
  absl::Status status = flush();
  if (!status.ok()) return status;
  return ids;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text) const {
  return EncodePieces({{std::string(text), false}});
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodeWithSpecial(std::string_view text) const {
  std::vector<TextPiece> pieces;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const int32_t id = impl_->SpecialAt(text.substr(i));
    if (id < 0) {
      ++i;
      continue;
    }
    if (i > begin) pieces.push_back({std::string(text.substr(begin, i - begin)), false});
    pieces.push_back({impl_->bytes[id], true});
    i += impl_->bytes[id].size();
    begin = i;
  }
  if (begin < text.size()) pieces.push_back({std::string(text.substr(begin)), false});
  return EncodePieces(pieces);
}

absl::StatusOr<std::string> Tokenizer::Decode(absl::Span<const int32_t> ids) const {
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size_) {
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", ids[i], " at position ", i,
                       " is out of range; the vocabulary has ids 0 to ", vocab_size_ - 1));
    }
    text += impl_->bytes[ids[i]];
  }
  return text;
}

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size_) return {};
  return impl_->bytes[id];
}

bool Tokenizer::IsControl(int32_t id) const {
  return IsSpecial(id) && impl_->is_control[id - num_base_];
}

std::optional<int32_t> Tokenizer::IdOf(std::string_view special_name) const {
  const auto it = impl_->special_of.find(View(special_name));
  if (it == impl_->special_of.end()) return std::nullopt;
  return it->second;
}

absl::StatusOr<std::vector<std::string_view>> PreTokenize(std::string_view text) {
  absl::StatusOr<const Regex*> regex = Regex::Get();
  if (!regex.ok()) return regex.status();
  const size_t bad = FindInvalidUtf8(text);
  if (bad != std::string_view::npos) return InvalidUtf8(bad);
  std::vector<std::string_view> pieces;
  absl::Status status =
      (*regex)->ForEachMatch(text, [&](std::string_view piece) { pieces.push_back(piece); });
  if (!status.ok()) return status;
  return pieces;
}

}  // namespace coppice
