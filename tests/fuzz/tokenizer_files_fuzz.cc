// A tiktoken.model and a tokenizer_config.json of any bytes, divided by the first NUL: refused with
// a status, or the tokenizer decodes every id and gives text back.
#include <string_view>

#include "absl/strings/escaping.h"
#include "model/test_files.h"
#include "model/tokenizer.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {

std::vector<std::string> FuzzSeeds() {
  std::string vocabulary;
  for (int i = 0; i < 256; ++i) {
    vocabulary +=
        absl::Base64Escape(std::string(1, static_cast<char>(i))) + " " + std::to_string(i) + "\n";
  }
  vocabulary += "YWI= 256\n";
  const std::string added =
      R"({"added_tokens_decoder":{"257":{"content":"[EOS]"},"259":{"content":"<think>"}}})";
  return {vocabulary + '\0' + added, vocabulary + '\0' + R"({"added_tokens_decoder":{}})"};
}

}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  static const TempDir dir;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t divider = input.find('\0');
  dir.Write("tiktoken.model", input.substr(0, divider));
  dir.Write("tokenizer_config.json",
            divider == std::string_view::npos ? "" : input.substr(divider + 1));
  const auto tokenizer = Tokenizer::Load(dir.path(), 260);
  if (!tokenizer.ok()) {
    FUZZ_CHECK(!tokenizer.status().message().empty());
    return 0;
  }
  for (int32_t id = 0; id < 260; ++id) FUZZ_CHECK(!(*tokenizer)->TokenBytes(id).empty());
  const auto ids = (*tokenizer)->EncodeWithSpecial("ab [EOS] 世界");
  FUZZ_CHECK(ids.ok() && *(*tokenizer)->Decode(*ids) == "ab [EOS] 世界");
  return 0;
}
