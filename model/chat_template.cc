#include "model/chat_template.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "model/utf8.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using nlohmann::ordered_json;

constexpr int kMaxToolsDepth = 64;

absl::Status BadMessage(size_t index, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("message ", index, ": ", what));
}

class Pieces {
 public:
  void Special(std::string_view name) { pieces_.push_back({std::string(name), true}); }
  void Text(std::string_view text) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().special) pieces_.push_back({"", false});
    pieces_.back().text += text;
  }
  std::vector<TextPiece> Take() { return std::move(pieces_); }

 private:
  std::vector<TextPiece> pieces_;
};

absl::Status CheckMessage(const ChatMessage& message, size_t index) {
  const bool assistant = message.role == "assistant";
  const bool tool = message.role == "tool";
  if (!assistant && !tool && message.role != "user" && message.role != "system") {
    return BadMessage(index, absl::StrCat("role is \"", message.role,
                                          "\"; expected system, user, assistant or tool"));
  }
  if (!assistant && !message.reasoning.empty()) {
    return BadMessage(
        index,
        absl::StrCat("only an assistant message has reasoning; this one's role is ", message.role));
  }
  if (!assistant && !message.tool_calls.empty()) {
    return BadMessage(index,
                      absl::StrCat("only an assistant message has tool_calls; this one's role is ",
                                   message.role));
  }
  if (tool && message.tool_call_id.empty()) {
    return BadMessage(index,
                      "a tool message needs tool_call_id, the id of the call that it answers");
  }
  if (!tool && !message.tool_call_id.empty()) {
    return BadMessage(
        index,
        absl::StrCat("only a tool message has tool_call_id; this one's role is ", message.role));
  }
  for (size_t i = 0; i < message.tool_calls.size(); ++i) {
    if (message.tool_calls[i].id.empty() && message.tool_calls[i].name.empty()) {
      return BadMessage(index, absl::StrCat("tool call ", i, " has neither id nor name"));
    }
  }
  const auto invalid = [](const std::string& text) {
    return FindInvalidUtf8(text) != std::string::npos;
  };
  for (const auto& [field, text] :
       {std::make_pair("name", &message.name), std::make_pair("content", &message.content),
        std::make_pair("reasoning", &message.reasoning),
        std::make_pair("tool_call_id", &message.tool_call_id)}) {
    if (invalid(*text)) return BadMessage(index, absl::StrCat(field, " is not valid UTF-8"));
  }
  for (const ChatToolCall& call : message.tool_calls) {
    if (invalid(call.id) || invalid(call.name) || invalid(call.arguments)) {
      return BadMessage(index, "a tool call is not valid UTF-8");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<TextPiece>> RenderChat(absl::Span<const ChatMessage> messages,
                                                  const ChatOptions& options) {
  if (messages.empty()) {
    return absl::InvalidArgumentError("the conversation has no messages; expected at least one");
  }
  Pieces pieces;
  if (!options.tools_json.empty()) {
    // Serialising recurses, so the depth is bounded before it.
    bool deep = false;
    const auto shallow = [&deep](int depth, ordered_json::parse_event_t, ordered_json&) {
      deep = deep || depth > kMaxToolsDepth;
      return !deep;
    };
    const ordered_json tools =
        ordered_json::parse(options.tools_json, shallow, /*allow_exceptions=*/false);
    if (deep) {
      return absl::InvalidArgumentError(
          absl::StrCat("tools nests deeper than ", kMaxToolsDepth, " levels"));
    }
    if (!tools.is_array() || !std::all_of(tools.begin(), tools.end(), [](const ordered_json& tool) {
          return tool.is_object();
        })) {
      return absl::InvalidArgumentError("tools is not a JSON array of tool declarations (objects)");
    }
    if (!tools.empty()) {
      pieces.Special("<|im_system|>");
      pieces.Text("tool_declare");
      pieces.Special("<|im_middle|>");
      pieces.Text(tools.dump());
      pieces.Special("<|im_end|>");
    }
  }

  // Reasoning is kept behind the last assistant message that answered without calling a tool: only
  // what belongs to the tool loop still going on.
  ptrdiff_t last_answer = -1;
  for (size_t i = 0; i < messages.size(); ++i) {
    absl::Status status = CheckMessage(messages[i], i);
    if (!status.ok()) return status;
    if (messages[i].role == "assistant" && messages[i].tool_calls.empty()) {
      last_answer = static_cast<ptrdiff_t>(i);
    }
  }
  if (options.preserve_thinking) last_answer = -1;

  size_t calls = 0;  // of the whole conversation
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    const bool assistant = message.role == "assistant";
    pieces.Special(assistant                ? "<|im_assistant|>"
                   : message.role == "user" ? "<|im_user|>"
                                            : "<|im_system|>");
    pieces.Text(message.name.empty() ? message.role : message.name);
    pieces.Special("<|im_middle|>");
    if (assistant) {
      pieces.Special("<think>");
      if (static_cast<ptrdiff_t>(i) > last_answer) pieces.Text(message.reasoning);
      pieces.Special("</think>");
    } else if (message.role == "tool") {
      pieces.Text(absl::StrCat("## Return of ", message.tool_call_id, "\n"));
    }
    pieces.Text(message.content);
    if (!message.tool_calls.empty()) {
      pieces.Special("<|tool_calls_section_begin|>");
      for (const ChatToolCall& call : message.tool_calls) {
        pieces.Special("<|tool_call_begin|>");
        pieces.Text(call.id.empty() ? absl::StrCat("functions.", call.name, ":", calls) : call.id);
        pieces.Special("<|tool_call_argument_begin|>");
        pieces.Text(call.arguments);
        pieces.Special("<|tool_call_end|>");
        ++calls;
      }
      pieces.Special("<|tool_calls_section_end|>");
    }
    pieces.Special("<|im_end|>");
  }
  if (options.add_generation_prompt) {
    pieces.Special("<|im_assistant|>");
    pieces.Text("assistant");
    pieces.Special("<|im_middle|>");
    pieces.Special("<think>");
    if (!options.thinking) pieces.Special("</think>");
  }
  return pieces.Take();
}

absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                absl::Span<const ChatMessage> messages,
                                                const ChatOptions& options) {
  absl::StatusOr<std::vector<TextPiece>> pieces = RenderChat(messages, options);
  if (!pieces.ok()) return pieces.status();
  for (TextPiece& piece : *pieces) {
    if (piece.special && (piece.text == "<think>" || piece.text == "</think>") &&
        !tokenizer.IdOf(piece.text).has_value()) {
      piece.special = false;
    }
  }
  return tokenizer.EncodePieces(*pieces);
}

}  // namespace coppice
