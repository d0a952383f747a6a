// Any text: refused as invalid UTF-8, or its tokens give it back and none of them is special.
#include <string_view>

#include "model/tokenizer.h"
#include "model/utf8.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {
namespace {

const Tokenizer& FuzzTokenizer() {
  static const Tokenizer* const tokenizer = [] {
    std::vector<std::string> ranks;
    for (int byte = 0; byte < 256; ++byte) ranks.emplace_back(1, static_cast<char>(byte));
    for (const char* token :
         {"ab", "abc", "  ", "世", "\xE4\xB8", "the", " the", "\n\n", "aa", "aaaa"})
      ranks.push_back(token);
    return Tokenizer::Create(ranks, {{266, "<|im_end|>"}, {267, "<think>"}, {268, "[EOS]"}}, 270,
                             "fuzz")
        .value()
        .release();
  }();
  return *tokenizer;
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {"I'm ChatGPT. CAN'T wait 'til 2026.\r\n\r\n  return x=foo_bar(1,2);",
          "“Hello,” 世界世世、中文ABC 〇々〆 こんにちは",
          "<|im_end|><think>[EOS] <|reserved_token_269|>",
          std::string(300, 'a') + std::string(300, ' ') + "e\u0301ſ"};
}

}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  const Tokenizer& tokenizer = FuzzTokenizer();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto ids = tokenizer.Encode(text);
  const auto special = tokenizer.EncodeWithSpecial(text);
  const bool valid = FindInvalidUtf8(text) == std::string_view::npos;
  FUZZ_CHECK(ids.ok() == valid && special.ok() == valid);
  if (!valid) return 0;
  FUZZ_CHECK(*tokenizer.Decode(*ids) == text);
  FUZZ_CHECK(*tokenizer.Decode(*special) == text);
  for (const int32_t id : *ids) FUZZ_CHECK(!tokenizer.IsSpecial(id));
  return 0;
}
