#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <array>
#include <bit>
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
constexpr int kMaxSpecials = 1 << 16;  // Kimi's vocabularies have 256
// Up to this many parts a scan for the lowest rank beats a heap.
constexpr size_t kScanParts = 96;
// Pieces of one text whose merging is remembered.
constexpr size_t kMaxRemembered = 1 << 16;

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

enum AsciiClass : uint8_t { kOther, kUpper, kLower, kDigit, kBlank, kNewline, kBeyond };

constexpr std::array<uint8_t, 256> MakeAsciiClasses() {
  std::array<uint8_t, 256> classes{};
  for (int c = 0; c < 256; ++c) {
    classes[c] = c >= 0x80                              ? kBeyond
                 : c >= 'A' && c <= 'Z'                 ? kUpper
                 : c >= 'a' && c <= 'z'                 ? kLower
                 : c >= '0' && c <= '9'                 ? kDigit
                 : c == '\r' || c == '\n'               ? kNewline
                 : c == ' ' || (c >= '\t' && c <= '\r') ? kBlank
                                                        : kOther;
  }
  return classes;
}
constexpr std::array<uint8_t, 256> kAsciiClasses = MakeAsciiClasses();

// The length of the pattern's match at the start of `text`, or 0 where a character beyond ASCII
// takes part in deciding it: then only the pattern itself knows.  In ASCII the pattern's classes
// are those above and its alternatives need no backtracking:
//   letters   [^\r\n letter digit]? upper* lower* ('s|'t|'re|'ve|'m|'ll|'d)?, one letter at least
//   digits    one to three
//   others    " "? other+ [\r\n]*
//   white     up to its last newline; else all but the last where something follows; else all
size_t AsciiMatch(std::string_view text) {
  const size_t n = text.size();
  const auto kind = [&](size_t i) {
    return i < n ? kAsciiClasses[static_cast<uint8_t>(text[i])] : static_cast<uint8_t>(kNewline);
  };
  const uint8_t first = kind(0);
  if (first == kBeyond) return 0;
  size_t i = first == kOther || first == kBlank ? 1 : 0;
  const size_t letters = i;
  while (kind(i) == kUpper) ++i;
  while (kind(i) == kLower) ++i;
  if (kind(i) == kBeyond) return 0;
  if (i > letters) {
    if (i + 1 >= n || text[i] != '\'') return i;
    if (kind(i + 1) == kBeyond || (i + 2 < n && kind(i + 2) == kBeyond)) return 0;
    const char a = static_cast<char>(text[i + 1] | 0x20);
    const char b = i + 2 < n ? static_cast<char>(text[i + 2] | 0x20) : '\0';
    if (kind(i + 1) != kUpper && kind(i + 1) != kLower) return i;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
    const bool letter = i + 2 < n && (kind(i + 2) == kUpper || kind(i + 2) == kLower);
    if (letter && ((b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l'))) return i + 3;
    return i;
  }
  if (first == kDigit) {
    for (i = 1; i < 3 && i < n && kind(i) == kDigit;) ++i;
    return i < 3 && i < n && kind(i) == kBeyond ? 0 : i;
  }
  i = text[0] == ' ' ? 1 : 0;
  if (i < n && kind(i) == kOther) {
    while (i < n && kind(i) == kOther) ++i;
    if (i < n && kind(i) == kBeyond) return 0;
    while (i < n && kind(i) == kNewline) ++i;
    return i;
  }
  size_t newline = 0;  // one past the last
  for (i = 0; i < n && (kind(i) == kBlank || kind(i) == kNewline); ++i) {
    if (kind(i) == kNewline) newline = i + 1;
  }
  if (i < n && kind(i) == kBeyond) return 0;
  if (newline > 0) return newline;
  return i == n || i == 1 ? i : i - 1;
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
  absl::Status ForEachMatch(std::string_view text, Fn fn, bool pattern_only = false) const {
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
      if (!pattern_only) {
        if (const size_t length = AsciiMatch(text.substr(at)); length > 0) {
          fn(text.substr(at, length));
          at += length;
          continue;
        }
      }
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

namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

// Ranks of short tokens.  Merging asks for little else, mostly for what is no token; so bytes and
// length are one word, kept beside the rank, and what is no token is known, as a rule, from one bit
// of a table that stays in the cache.
class ShortRanks {
 public:
  static constexpr size_t kMaxShort = 7;

  void Build(absl::Span<const std::string> tokens) {
    const size_t count = std::count_if(tokens.begin(), tokens.end(), [](const std::string& token) {
      return token.size() <= kMaxShort;
    });
    size_t capacity = 16;
    while (capacity < 2 * count) capacity *= 2;
    shift_ = 64 - std::countr_zero(capacity);
    slots_.assign(capacity, {});
    pairs_.assign(1 << 16, kNoRank);
    maybe_.assign((size_t{1} << kFilterBits) / 64, 0);
    for (size_t id = 0; id < tokens.size(); ++id) {
      if (tokens[id].size() > kMaxShort) continue;
      const uint64_t key = Key(tokens[id]);
      size_t i = Home(key);
      while (slots_[i].key != 0) i = (i + 1) & (slots_.size() - 1);
      slots_[i] = {key, static_cast<int32_t>(id)};
      const uint64_t bit = Bit(key);
      maybe_[bit / 64] |= uint64_t{1} << bit % 64;
      if (tokens[id].size() == 1) bytes_[key & 0xFF] = static_cast<int32_t>(id);
      if (tokens[id].size() == 2) pairs_[key & 0xFFFF] = static_cast<int32_t>(id);
    }
  }

  int32_t OfByte(char byte) const { return bytes_[static_cast<uint8_t>(byte)]; }

  // `text` has 1 … kMaxShort bytes.
  int32_t Find(std::string_view text) const {
    const uint64_t key = Key(text);
    if (text.size() == 2) return pairs_[key & 0xFFFF];
    const uint64_t bit = Bit(key);
    if ((maybe_[bit / 64] >> bit % 64 & 1) == 0) return kNoRank;
    for (size_t i = Home(key); slots_[i].key != 0; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].key == key) return slots_[i].rank;
    }
    return kNoRank;
  }

 private:
  struct Slot {
    uint64_t key = 0;  // 0: free; no token is empty
    int32_t rank = kNoRank;
  };

  static uint64_t Key(std::string_view text) {
    uint64_t key = 0;
    // Byte by byte: a copy of variable length is a call.
    for (size_t i = 0; i < text.size(); ++i) {
      key |= static_cast<uint64_t>(static_cast<uint8_t>(text[i])) << (8 * i);
    }
    return key | static_cast<uint64_t>(text.size()) << 56;
  }
  size_t Home(uint64_t key) const { return (key * 0x9E3779B97F4A7C15ull) >> shift_; }
  static uint64_t Bit(uint64_t key) { return key * 0xBF58476D1CE4E5B9ull >> (64 - kFilterBits); }

  static constexpr int kFilterBits = 21;  // 256 KiB

  std::array<int32_t, 256> bytes_{};
  std::vector<Slot> slots_;
  std::vector<uint64_t> maybe_;
  std::vector<int32_t> pairs_;  // by the two bytes, the first lowest
  int shift_ = 60;
};

}  // namespace

struct Tokenizer::Impl {
  const Regex* regex = nullptr;
  // All tokens' bytes by id; the views below point into these strings.
  std::vector<std::string> bytes;
  absl::flat_hash_map<absl::string_view, int32_t> rank_of;
  ShortRanks short_ranks;  // the same for tokens of at most kMaxShort bytes
  absl::flat_hash_map<absl::string_view, int32_t> special_of;
  std::array<std::vector<int32_t>, 256> specials_by_first_byte;  // longest name first
  std::vector<bool> is_control;                                  // by id - num_base
  size_t longest_rank = 0;

  int32_t RankOf(std::string_view text) const {
    if (text.size() <= ShortRanks::kMaxShort) return short_ranks.Find(text);
    if (text.size() > longest_rank) return kNoRank;
    const auto it = rank_of.find(View(text));
    return it == rank_of.end() ? kNoRank : it->second;
  }

  // tiktoken's merge: of all adjacent pairs the one whose concatenation has the lowest rank, the
  // leftmost of equals, until no pair is a token.
  void MergeByScan(std::string_view piece, std::vector<int32_t>* ids) const {
    // Part i is [begin[i], begin[i + 1]), the token id[i]; joined with the next it has rank
    // pair[i].
    std::array<uint8_t, kScanParts + 1> begin;
    std::array<int32_t, kScanParts + 1> id;
    std::array<int32_t, kScanParts + 1> pair;
    size_t count = piece.size() + 1;
    for (size_t i = 0; i < count; ++i) {
      begin[i] = static_cast<uint8_t>(i);
      id[i] = i < piece.size() ? short_ranks.OfByte(piece[i]) : kNoRank;
      pair[i] = i + 2 <= piece.size() ? RankOf(piece.substr(i, 2)) : kNoRank;
    }
    const auto pair_rank = [&](size_t i) {
      return i + 2 < count ? RankOf(piece.substr(begin[i], begin[i + 2] - begin[i])) : kNoRank;
    };
    for (;;) {
      size_t best = 0;
      int32_t least = pair[0];
      for (size_t i = 1; i < count; ++i) {
        best = pair[i] < least ? i : best;
        least = std::min(least, pair[i]);
      }
      if (least == kNoRank) break;
      std::copy(begin.begin() + best + 2, begin.begin() + count, begin.begin() + best + 1);
      std::copy(pair.begin() + best + 2, pair.begin() + count, pair.begin() + best + 1);
      std::copy(id.begin() + best + 2, id.begin() + count, id.begin() + best + 1);
      --count;
      id[best] = pair[best];
      pair[best] = pair_rank(best);
      if (best > 0) pair[best - 1] = pair_rank(best - 1);
    }
    ids->insert(ids->end(), id.begin(), id.begin() + count - 1);
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
    // Words come again: where among the ids the merged pieces of this text lie.
    struct Where {
      size_t begin;
      size_t count;
    };
    absl::flat_hash_map<absl::string_view, Where> merged;
    return regex->ForEachMatch(text, [&](std::string_view piece) {
      const int32_t whole = RankOf(piece);
      if (whole != kNoRank) {
        ids->push_back(whole);
        return;
      }
      const size_t begin = ids->size();
      const bool remembered = piece.size() <= kScanParts && text.size() > kScanParts;
      if (remembered) {
        const auto known = merged.find(View(piece));
        if (known != merged.end()) {
          const Where where = known->second;
          for (size_t i = 0; i < where.count; ++i) ids->push_back((*ids)[where.begin + i]);
          return;
        }
      }
      if (piece.size() <= kScanParts) {
        MergeByScan(piece, ids);
      } else {
        MergeByHeap(piece, ids);
      }
      if (remembered && merged.size() < kMaxRemembered) {
        merged.emplace(View(piece), Where{begin, ids->size() - begin});
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
  // Every id gets a name, so a wrong vocab_size must not cost memory that no file accounts for.
  if (vocab_size - num_base > kMaxSpecials) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, " has ", num_base, " tokens, and the model's vocab_size is ",
                     vocab_size, ", which leaves ", vocab_size - num_base,
                     " ids for special tokens; at most ", kMaxSpecials, " are expected"));
  }
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
  impl->short_ranks.Build(absl::MakeConstSpan(impl->bytes).subspan(0, num_base));
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
  size_t bytes = 0;
  for (const TextPiece& piece : pieces) bytes += piece.text.size();
  ids.reserve(bytes / 4);

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

absl::StatusOr<std::vector<std::string_view>> PreTokenize(std::string_view text,
                                                          bool pattern_only) {
  absl::StatusOr<const Regex*> regex = Regex::Get();
  if (!regex.ok()) return regex.status();
  const size_t bad = FindInvalidUtf8(text);
  if (bad != std::string_view::npos) return InvalidUtf8(bad);
  std::vector<std::string_view> pieces;
  absl::Status status = (*regex)->ForEachMatch(
      text, [&](std::string_view piece) { pieces.push_back(piece); }, pattern_only);
  if (!status.ok()) return status;
  return pieces;
}

}  // namespace coppice
