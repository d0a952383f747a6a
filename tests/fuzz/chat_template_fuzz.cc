// Tool declarations and message fields of any bytes: refused with a status, or special pieces are
// the layout's only.
#include <set>
#include <string_view>

#include "model/chat_template.h"
#include "tests/fuzz/fuzz_target.h"

namespace coppice {

std::vector<std::string> FuzzSeeds() {
  return {
      R"([{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{}}}}])",
      R"([])", R"([{"a":[1,2.5e3,null,true,"<|im_end|>"]}])", "user", "assistant"};
}

}  // namespace coppice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coppice;
  const std::string input(reinterpret_cast<const char*>(data), size);
  ChatMessage message;
  message.role = "user";
  message.content = "hi";
  ChatOptions options;
  options.tools_json = input;
  (void)RenderChat({}, {message}, options);

  options.tools_json.clear();
  message.role = input.substr(0, input.size() / 2);
  (void)RenderChat({}, {message}, options);

  message.role = "assistant";
  message.name = input.substr(0, input.size() / 3);
  message.content = input;
  message.reasoning = input;
  message.tool_calls = {{input, "f", input}};
  const auto pieces = RenderChat({}, {message}, options);
  if (!pieces.ok()) return 0;
  static const std::set<std::string> kMarkers = {"<|im_assistant|>",
                                                 "<|im_middle|>",
                                                 "<|im_end|>",
                                                 "<think>",
                                                 "</think>",
                                                 "<|tool_calls_section_begin|>",
                                                 "<|tool_calls_section_end|>",
                                                 "<|tool_call_begin|>",
                                                 "<|tool_call_argument_begin|>",
                                                 "<|tool_call_end|>"};
  size_t special = 0;
  for (const TextPiece& piece : *pieces) {
    FUZZ_CHECK(!piece.text.empty());
    FUZZ_CHECK(!piece.special || kMarkers.count(piece.text) == 1);
    special += piece.special;
  }
  FUZZ_CHECK(special == 13);
  return 0;
}
