// Kimi K2.6's turn layout, as its chat_template.jinja writes it, for messages that are already
// parsed.
#ifndef COPPICE_MODEL_CHAT_TEMPLATE_H_
#define COPPICE_MODEL_CHAT_TEMPLATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/tokenizer.h"

namespace coppice {

struct ChatToolCall {
  // Echo what the model produced ("functions.{name}:{idx}"): it alone carries the function's name.
  // Where it is empty, "functions.{name}:{idx}" is made with idx counting all calls of the
  // conversation.
  std::string id;
  std::string name;
  std::string arguments;  // JSON text, passed on verbatim
};

struct ChatMessage {
  std::string role;  // "system", "user", "assistant" or "tool"
  std::string name;  // shown instead of the role where not empty
  std::string content;
  std::string reasoning;                 // assistant only
  std::vector<ChatToolCall> tool_calls;  // assistant only
  std::string tool_call_id;              // tool only, required
};

struct ChatOptions {
  bool thinking = true;  // false: the generation prompt closes <think> at once
  bool preserve_thinking =
      false;  // true: keep the reasoning of every turn, not only of the tool loop
  bool add_generation_prompt = true;
  std::string tools_json;  // JSON array of tool declarations; empty: none
};

// The prompt as pieces: special markers come from the layout alone, and whatever a message says is
// ordinary text.  INVALID_ARGUMENT names the message's index and field.
absl::StatusOr<std::vector<TextPiece>> RenderChat(absl::Span<const ChatMessage> messages,
                                                  const ChatOptions& options);

// RenderChat, then token ids.  Where the vocabulary has no <think>, it is ordinary text
// (K2-Instruct).
absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                absl::Span<const ChatMessage> messages,
                                                const ChatOptions& options);

}  // namespace coppice

#endif  // COPPICE_MODEL_CHAT_TEMPLATE_H_
