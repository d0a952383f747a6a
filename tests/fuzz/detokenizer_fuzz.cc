// Any token stream and stop strings: the text is valid UTF-8 and does not depend on how tokens are
// grouped. Input: lines, the first ones stop strings, the last one pairs of bytes that make token
// ids.
#include <string_view>

#include "model/utf8.h"
#include "services/router/detokenizer.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {
namespace {

const Tokenizer& FuzzTokenizer() {
  static const Tokenizer* const tokenizer = [] {
    std::vector<std::string> ranks;
    for (int byte = 0; byte < 256; ++byte) ranks.emplace_back(1, static_cast<char>(byte));
    for (const char* token : {"ab", "abab", "STOP", "\xE4\xB8", "\x96\xE7\x95", "hello"})
      ranks.push_back(token);
    return Tokenizer::Create(ranks, {{262, "[EOS]"}, {263, "<think>"}, {264, "</think>"}}, 266,
                             "fuzz")
        .value()
        .release();
  }();
  return *tokenizer;
}

std::string Ids(std::initializer_list<int> ids) {
  std::string bytes;
  for (const int id : ids) bytes += {static_cast<char>(id >> 8), static_cast<char>(id)};
  return bytes;
}

struct Reply {
  std::string text;
  size_t consumed = 0;
  std::string stop_string;
};

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {"\uFFFD\n" + Ids({'a', 0xD4, 'b', 0xEF, 0xBF, 0xBD}), "STOP\n" + Ids({261, 258, 'x'}),
          "abab\n世界\n" + Ids({256, 'a', 259, 260, 0x8C, 263, 'b', 262}),
          "</think>\n" + Ids({263, 'a', 264, 'b'}), Ids({0xF0, 0x9F, 0x98, 'q', 0x80})};
}

}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  std::string_view input(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> stops;
  for (size_t newline;
       stops.size() < 4 && (newline = input.find('\n')) != std::string_view::npos;) {
    stops.emplace_back(input.substr(0, newline));
    input.remove_prefix(newline + 1);
  }
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < input.size(); i += 2) {
    ids.push_back(static_cast<uint8_t>(input[i]) % 2 << 8 | static_cast<uint8_t>(input[i + 1]));
  }

  Reply replies[3];
  const size_t chunks[3] = {1, 3, ids.size() + 1};
  for (int k = 0; k < 3; ++k) {
    auto detokenizer = router::Detokenizer::Create(&FuzzTokenizer(), stops);
    if (!detokenizer.ok()) return 0;
    for (size_t i = 0; i < ids.size() && !detokenizer->stopped(); i += chunks[k]) {
      const auto output = detokenizer->Feed(absl::MakeConstSpan(ids).subspan(i, chunks[k]));
      FUZZ_CHECK(FindInvalidUtf8(output.text) == std::string_view::npos);
      replies[k].text += output.text;
      replies[k].consumed += output.consumed;
      replies[k].stop_string = output.stop_string;
    }
    replies[k].text += detokenizer->Flush();
    FUZZ_CHECK(FindInvalidUtf8(replies[k].text) == std::string_view::npos);
    FUZZ_CHECK(replies[k].text == replies[0].text && replies[k].consumed == replies[0].consumed &&
               replies[k].stop_string == replies[0].stop_string);
  }
  for (const std::string& stop : stops) {
    // A replacement is not what the tokens spelled, so a stop string does not match it.
    if (stop.find("\uFFFD") != std::string::npos) continue;
    FUZZ_CHECK(replies[0].text.find(stop) == std::string::npos);
  }
  return 0;
}
