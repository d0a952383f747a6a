// The turn layouts of Kimi K2's releases, as their chat templates write them, for messages that are
// already parsed.  Jinja is not rendered: each release has its renderer, and a directory's template
// text is only looked at to tell which release's it is.
#ifndef COPPICE_MODEL_CHAT_TEMPLATE_H_
#define COPPICE_MODEL_CHAT_TEMPLATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/tokenizer.h"

namespace coppice {

enum class ChatRelease { kInstruct, kThinking, kK25, kK26 };
// "instruct", "thinking", "k2.5" or "k2.6", as flags take them.
std::string_view ChatReleaseName(ChatRelease release);
std::optional<ChatRelease> ChatReleaseNamed(std::string_view name);

// A release's layout, with what its revisions differ in.
struct ChatTemplate {
  ChatRelease release = ChatRelease::kK26;
  // Of the turn that stands before messages which begin with none of system's; empty: no such turn.
  std::string default_system;
  // kThinking: whether the generation prompt ends with <think>.  (Instruct's never does; K2.5's and
  // K2.6's always does.)
  bool opens_think = false;
};

// The release whose markers `text`, a Jinja template, has beside `model_type`, config.json's.
// UNIMPLEMENTED for any other, naming what is there, what is not, and the nearest release.
absl::StatusOr<ChatTemplate> RecogniseChatTemplate(std::string_view text,
                                                   const std::string& model_type);
// The release nearest to `text`, for those who ask for it.
ChatTemplate NearestChatTemplate(std::string_view text, const std::string& model_type);

// DIR/chat_template.jinja or, where there is none, chat_template of DIR/tokenizer_config.json.
// NOT_FOUND where neither is there.
absl::StatusOr<std::string> ReadChatTemplate(const std::string& dir);

// What `choice` asks for, given the template in `dir`: "auto" (RecogniseChatTemplate), "nearest",
// or a release by name.  The last needs no template; where there is one, its revision counts.
absl::StatusOr<ChatTemplate> ChooseChatTemplate(const std::string& dir,
                                                const std::string& model_type,
                                                const std::string& choice);

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
  bool thinking = true;  // false: the generation prompt closes <think> at once; K2.5 and K2.6
  bool preserve_thinking =
      false;  // true: keep the reasoning of every turn, not only of the tool loop; K2.6
  bool add_generation_prompt = true;
  // EncodeChat: whatever spells a special token's name becomes that token, in messages too, as the
  // reference tokenizer has it.  Whoever writes a message can then end it and speak for others.
  bool special_tokens_in_text = false;
  std::string tools_json;  // JSON array of tool declarations; empty: none
};

// The prompt as pieces: special markers come from the layout alone, and whatever a message says is
// ordinary text.  INVALID_ARGUMENT names the message's index and field, or the option that the
// release does not have.
absl::StatusOr<std::vector<TextPiece>> RenderChat(const ChatTemplate& layout,
                                                  absl::Span<const ChatMessage> messages,
                                                  const ChatOptions& options);

// RenderChat, then token ids.  Where the vocabulary has no <think>, it is ordinary text
// (K2-Instruct).
absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                const ChatTemplate& layout,
                                                absl::Span<const ChatMessage> messages,
                                                const ChatOptions& options);

}  // namespace coppice

#endif  // COPPICE_MODEL_CHAT_TEMPLATE_H_
