// Kimi's tokenizer: tiktoken's byte-level BPE behind a Han-aware pre-tokenisation pattern.
#ifndef COPPICE_MODEL_TOKENIZER_H_
#define COPPICE_MODEL_TOKENIZER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace coppice {

// A stretch of a prompt: ordinary text, or the name of one special token.
struct TextPiece {
  std::string text;
  bool special = false;

  friend bool operator==(const TextPiece& a, const TextPiece& b) {
    return a.text == b.text && a.special == b.special;
  }
};

// Immutable and thread-safe.  Ids 0 … num_base()-1 are the ranks of tiktoken.model; ids num_base()
// … vocab_size()-1 are special tokens, named by `added_tokens_decoder` or
// `<|reserved_token_{id}|>`. Encoding costs O(n log n) in the text's bytes; texts may be megabytes
// long.
class Tokenizer {
 public:
  // Reads DIR/tiktoken.model and DIR/tokenizer_config.json.  `vocab_size` is the model's.
  // Errors: NOT_FOUND (no file), INVALID_ARGUMENT naming file and line or key.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& dir, int vocab_size);

  // From the vocabulary itself: `ranks[i]` is the byte string of id i (all 256 single bytes must
  // occur), `added` names special ids in [ranks.size(), vocab_size).  `source` is named in errors.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(
      std::vector<std::string> ranks, const std::map<int32_t, std::string>& added, int vocab_size,
      const std::string& source);
  ~Tokenizer();

  // Ordinary text, which never becomes a special token whatever it spells: "<|im_end|>" is seven or
  // so ordinary tokens.  INVALID_ARGUMENT where `text` is not valid UTF-8.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text) const;

  // Text in which the name of a special token is that token; for what a template wrote, never for
  // what a user wrote.
  absl::StatusOr<std::vector<int32_t>> EncodeWithSpecial(std::string_view text) const;

  // A rendered prompt.  Adjacent ordinary pieces count as one text.  INVALID_ARGUMENT where a
  // special piece names no special token.
  absl::StatusOr<std::vector<int32_t>> EncodePieces(absl::Span<const TextPiece> pieces) const;

  // The bytes of `ids` (not always valid UTF-8), special tokens as their names.  INVALID_ARGUMENT
  // names the first id that is out of range.
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids) const;

  // The bytes of one token, for a special one its name; empty where `id` is out of range.
  std::string_view TokenBytes(int32_t id) const;

  bool IsSpecial(int32_t id) const { return id >= num_base_ && id < vocab_size_; }
  // Special and never part of a reply's text: all special tokens except <think>, </think> and the
  // five tool-call markers, on which parsers work.
  bool IsControl(int32_t id) const;
  // The id of the special token with this name.
  std::optional<int32_t> IdOf(std::string_view special_name) const;

  int vocab_size() const { return vocab_size_; }
  int num_base() const { return num_base_; }

 private:
  struct Impl;
  Tokenizer(std::unique_ptr<Impl> impl, int num_base, int vocab_size);

  std::unique_ptr<Impl> impl_;
  int num_base_;
  int vocab_size_;
};

// The pieces into which Kimi's pattern cuts `text` (valid UTF-8), as views into it.  For tests and
// tools.  `pattern_only`: by the regular expression alone, as a check of the scanner that goes
// before it.
absl::StatusOr<std::vector<std::string_view>> PreTokenize(std::string_view text,
                                                          bool pattern_only = false);

}  // namespace coppice

#endif  // COPPICE_MODEL_TOKENIZER_H_
