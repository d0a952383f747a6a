#include "model/chat_template.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "model/json_file.h"
#include "model/tool_declaration.h"
#include "model/utf8.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kMaxToolsDepth = 64;
constexpr size_t kMaxTemplateBytes = 4 << 20;

constexpr std::pair<ChatRelease, std::string_view> kReleases[] = {
    {ChatRelease::kInstruct, "instruct"},
    {ChatRelease::kThinking, "thinking"},
    {ChatRelease::kK25, "k2.5"},
    {ChatRelease::kK26, "k2.6"}};

// The system turns that revisions of the templates open with.
constexpr std::string_view kDefaultSystems[] = {
    "You are Kimi, an AI assistant created by Moonshot AI.", "You are a helpful assistant"};

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Whether `text` has `name` as a whole identifier.
bool HasIdentifier(std::string_view text, std::string_view name) {
  const auto in_word = [&](size_t i) {
    return i < text.size() &&
           (absl::ascii_isalnum(static_cast<unsigned char>(text[i])) || text[i] == '_');
  };
  for (size_t i = text.find(name); i != std::string_view::npos; i = text.find(name, i + 1)) {
    if (!(i > 0 && in_word(i - 1)) && !in_word(i + name.size())) return true;
  }
  return false;
}

// What a template's text tells about its release.
struct Markers {
  explicit Markers(std::string_view text)
      : turns(Has(text, "<|im_middle|>") && Has(text, "<|im_end|>") && Has(text, "<|im_system|>")),
        tools(Has(text, "tool_declare") && Has(text, "<|tool_calls_section_begin|>")),
        think(Has(text, "<think>")),
        typescript(Has(text, "tools_ts_str")),
        thinking_switch(HasIdentifier(text, "thinking")),
        preserve_thinking(HasIdentifier(text, "preserve_thinking")) {}

  std::string Text() const {
    std::vector<std::string> with;
    std::vector<std::string> without;
    for (const auto& [name, there] :
         {std::pair<const char*, bool>("<|im_middle|>, <|im_end|> and <|im_system|>", turns),
          {"tool_declare and <|tool_calls_section_begin|>", tools},
          {"<think>", think},
          {"tools_ts_str", typescript},
          {"a variable thinking", thinking_switch},
          {"preserve_thinking", preserve_thinking}}) {
      (there ? with : without).push_back(name);
    }
    return absl::StrCat("it has ",
                        with.empty() ? "nothing of what is looked for" : absl::StrJoin(with, ", "),
                        without.empty() ? "" : "; it lacks ", absl::StrJoin(without, ", "));
  }

  bool turns;
  bool tools;
  bool think;
  bool typescript;
  bool thinking_switch;
  bool preserve_thinking;
};

ChatTemplate WithRevision(ChatRelease release, std::string_view text) {
  ChatTemplate layout;
  layout.release = release;
  for (const std::string_view system : kDefaultSystems) {
    if (!Has(text, system)) continue;
    layout.default_system = system;
    break;
  }
  const size_t prompt = text.rfind("add_generation_prompt");
  layout.opens_think = prompt != std::string_view::npos && Has(text.substr(prompt), "<think>");
  return layout;
}

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

std::string_view ChatReleaseName(ChatRelease release) {
  return kReleases[static_cast<int>(release)].second;
}

std::optional<ChatRelease> ChatReleaseNamed(std::string_view name) {
  for (const auto& [release, known] : kReleases) {
    if (known == name) return release;
  }
  return std::nullopt;
}

ChatTemplate NearestChatTemplate(std::string_view text, const std::string& model_type) {
  const Markers markers(text);
  if (model_type == "kimi_k25") {
    return WithRevision(markers.preserve_thinking ? ChatRelease::kK26 : ChatRelease::kK25, text);
  }
  return WithRevision(markers.think ? ChatRelease::kThinking : ChatRelease::kInstruct, text);
}

absl::StatusOr<ChatTemplate> RecogniseChatTemplate(std::string_view text,
                                                   const std::string& model_type) {
  const Markers markers(text);
  const ChatTemplate nearest = NearestChatTemplate(text, model_type);
  bool known = markers.turns && markers.tools;
  if (model_type == "kimi_k25") {
    known = known && markers.think && markers.typescript && markers.thinking_switch;
  } else {
    known = known && !markers.typescript && !markers.thinking_switch && !markers.preserve_thinking;
  }
  if (known) return nearest;
  return absl::UnimplementedError(absl::StrCat(
      "the chat template is of no release that Coppice knows (model_type is ", model_type, "; ",
      markers.Text(), "); the nearest is ", std::string(ChatReleaseName(nearest.release)),
      ", which --chat-template nearest uses"));
}

absl::StatusOr<std::string> ReadChatTemplate(const std::string& dir) {
  absl::StatusOr<std::string> text =
      ReadSmallFile(absl::StrCat(dir, "/chat_template.jinja"), kMaxTemplateBytes);
  if (text.ok() || !absl::IsNotFound(text.status())) return text;
  const std::string path = absl::StrCat(dir, "/tokenizer_config.json");
  absl::StatusOr<std::string> config = ReadSmallFile(path, 64 << 20);
  if (config.ok()) {
    const absl::StatusOr<json> parsed = ParseJsonObject(*config, path);
    if (!parsed.ok()) return parsed.status();
    const auto it = parsed->find("chat_template");
    if (it != parsed->end() && it->is_string()) return it->get<std::string>();
  }
  return absl::NotFoundError(
      absl::StrCat(dir,
                   " has no chat template: neither chat_template.jinja nor a chat_template in "
                   "tokenizer_config.json"));
}

absl::StatusOr<ChatTemplate> ChooseChatTemplate(const std::string& dir,
                                                const std::string& model_type,
                                                const std::string& choice) {
  const absl::StatusOr<std::string> text = ReadChatTemplate(dir);
  if (const std::optional<ChatRelease> release = ChatReleaseNamed(choice)) {
    return WithRevision(*release, text.ok() ? *text : "");
  }
  if (!text.ok()) return text.status();
  if (choice == "nearest") return NearestChatTemplate(*text, model_type);
  absl::StatusOr<ChatTemplate> known = RecogniseChatTemplate(*text, model_type);
  if (known.ok()) return known;
  return absl::Status(known.status().code(),
                      absl::StrCat(dir, ": ", std::string(known.status().message())));
}

absl::StatusOr<std::vector<TextPiece>> RenderChat(const ChatTemplate& layout,
                                                  absl::Span<const ChatMessage> messages,
                                                  const ChatOptions& options) {
  const bool reasons = layout.release != ChatRelease::kInstruct;
  const bool since_k25 = layout.release == ChatRelease::kK25 || layout.release == ChatRelease::kK26;
  const std::string release(ChatReleaseName(layout.release));
  if (messages.empty()) {
    return absl::InvalidArgumentError("the conversation has no messages; expected at least one");
  }
  if (options.preserve_thinking && layout.release != ChatRelease::kK26) {
    return absl::InvalidArgumentError(
        absl::StrCat("preserve_thinking is set, which the template of this model, ", release,
                     ", does not have"));
  }
  if (!options.thinking && layout.release == ChatRelease::kThinking) {
    return absl::InvalidArgumentError(
        "thinking is false, but the template of this model, thinking, has no way to turn it off");
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
      if (since_k25) {
        const json sorted = json::parse(options.tools_json, nullptr, /*allow_exceptions=*/false);
        const std::optional<std::string> typescript = TypeScriptTools(sorted);
        pieces.Text(typescript.has_value() ? *typescript : PythonJson(sorted));
      } else {
        pieces.Text(PythonJson(tools));
      }
      pieces.Special("<|im_end|>");
    }
  }
  if (!layout.default_system.empty() && messages[0].role != "system") {
    pieces.Special("<|im_system|>");
    pieces.Text("system");
    pieces.Special("<|im_middle|>");
    pieces.Text(layout.default_system);
    pieces.Special("<|im_end|>");
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
    if (assistant && reasons) {
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
    if (since_k25 || (layout.release == ChatRelease::kThinking && layout.opens_think)) {
      pieces.Special("<think>");
      if (!options.thinking) pieces.Special("</think>");
    }
  }
  return pieces.Take();
}

absl::StatusOr<std::vector<int32_t>> EncodeChat(const Tokenizer& tokenizer,
                                                const ChatTemplate& layout,
                                                absl::Span<const ChatMessage> messages,
                                                const ChatOptions& options) {
  absl::StatusOr<std::vector<TextPiece>> pieces = RenderChat(layout, messages, options);
  if (!pieces.ok()) return pieces.status();
  for (TextPiece& piece : *pieces) {
    if (piece.special && (piece.text == "<think>" || piece.text == "</think>") &&
        !tokenizer.IdOf(piece.text).has_value()) {
      piece.special = false;
    }
  }
  if (options.special_tokens_in_text) {
    std::string text;
    for (const TextPiece& piece : *pieces) text += piece.text;
    return tokenizer.EncodeWithSpecial(text);
  }
  return tokenizer.EncodePieces(*pieces);
}

}  // namespace coppice
