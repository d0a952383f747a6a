// UTF-8 as Unicode 15, table 3-7, defines it: no surrogates, nothing overlong, nothing beyond
// U+10FFFF.
#ifndef COPPICE_MODEL_UTF8_H_
#define COPPICE_MODEL_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace coppice {

struct Utf8Char {
  enum Kind { kValid, kInvalid, kTruncated };
  Kind kind;
  // Bytes taken: of the character; of the ill-formed maximal subpart, which a decoder replaces by
  // one U+FFFD; or, where the text ends inside a character that may yet be completed, of that
  // start.
  uint8_t length;
  char32_t code_point;  // where kValid
};

// The character that starts `text`, which is not empty.
inline Utf8Char DecodeUtf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Utf8Char::kValid, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Char::kInvalid, 1, 0};
  const uint8_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range rules out overlong forms, surrogates and what lies beyond U+10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t code_point = lead & (0xFF >> (length + 1));
  for (uint8_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Char::kTruncated, i, 0};
    const uint8_t b = byte(i);
    if (b < (i == 1 ? low : 0x80) || b > (i == 1 ? high : 0xBF)) return {Utf8Char::kInvalid, i, 0};
    code_point = code_point << 6 | (b & 0x3F);
  }
  return {Utf8Char::kValid, length, code_point};
}

// Offset of the first byte that is not part of a whole, valid character; npos where there is none.
inline size_t FindInvalidUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = DecodeUtf8(text.substr(i));
    if (c.kind != Utf8Char::kValid) return i;
    i += c.length;
  }
  return std::string_view::npos;
}

}  // namespace coppice

#endif  // COPPICE_MODEL_UTF8_H_
