#include "model/utf8.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace coppice {
namespace {

std::string Encoded(char32_t c) {
  std::string out;
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
  return out;
}

TEST(DecodeUtf8, ReadsEveryCharacterAndItsTruncations) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    const std::string text = Encoded(c);
    const Utf8Char decoded = DecodeUtf8(text);
    if (c >= 0xD800 && c <= 0xDFFF) {
      ASSERT_EQ(decoded.kind, Utf8Char::kInvalid) << static_cast<uint32_t>(c);
      continue;
    }
    ASSERT_EQ(decoded.kind, Utf8Char::kValid) << static_cast<uint32_t>(c);
    ASSERT_EQ(decoded.code_point, c);
    ASSERT_EQ(decoded.length, text.size());
    for (size_t n = 1; n < text.size(); ++n) {
      const Utf8Char part = DecodeUtf8(std::string_view(text).substr(0, n));
      ASSERT_EQ(part.kind, Utf8Char::kTruncated);
      ASSERT_EQ(part.length, n);
    }
  }
}

TEST(DecodeUtf8, NamesTheMaximalSubpart) {
  const struct {
    std::string text;
    int length;
  } cases[] = {
      {"\x80", 1},
      {"\xBF", 1},
      {"\xC0\x80", 1},
      {"\xC1\xBF", 1},
      {"\xF5\x80", 1},
      {"\xFF", 1},
      {"\xC3\x28", 1},
      {"\xE0\x80\x80", 1},
      {"\xE2\x82\x28", 2},
      {"\xED\xA0\x80", 1},
      {"\xF0\x80\x80\x80", 1},
      {"\xF0\x90\x28", 2},
      {"\xF0\x9F\x98\x28", 3},
      {"\xF4\x90\x80\x80", 1},
  };
  for (const auto& [text, length] : cases) {
    const Utf8Char decoded = DecodeUtf8(text);
    EXPECT_EQ(decoded.kind, Utf8Char::kInvalid) << testing::PrintToString(text);
    EXPECT_EQ(decoded.length, length) << testing::PrintToString(text);
  }
}

TEST(FindInvalidUtf8, FindsTheOffset) {
  EXPECT_EQ(FindInvalidUtf8(""), std::string_view::npos);
  EXPECT_EQ(FindInvalidUtf8("abc 世界 \U0001F642"), std::string_view::npos);
  EXPECT_EQ(FindInvalidUtf8("abc\x80"), 3u);
  EXPECT_EQ(FindInvalidUtf8("世\xE4\xB8"), 3u);
}

}  // namespace
}  // namespace coppice
