#include "client/cli/request_flags.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "model/sampling.h"
#include "nlohmann/json.hpp"

namespace coppice::cli {
namespace {

using nlohmann::json;

// Reads optional members, remembering the first that is not of its type.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  std::string Text(const char* key) {
    if (!object_.contains(key) || object_[key].is_null()) return "";
    if (object_[key].is_string()) return object_[key].get<std::string>();
    Complain(key, "a string");
    return "";
  }
  bool Has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  bool Flag(const char* key) {
    if (object_[key].is_boolean()) return object_[key].get<bool>();
    Complain(key, "true or false");
    return false;
  }
  void Complain(const std::string& key, const std::string& want) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": \"", key, "\" must be ", want));
    }
  }
  void Know(const std::vector<std::string>& keys) {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end() && status_.ok()) {
        status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": unknown key \"", key, "\""));
      }
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  const json& object_;
  const std::string where_;
  absl::Status status_;
};

absl::Status ParseToolCalls(const json& calls, const std::string& where, v1::ChatMessage* message) {
  if (!calls.is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": \"tool_calls\" must be an array"));
  }
  for (const json& call : calls) {
    // Flat, or as OpenAI nests them.
    const bool nested =
        call.is_object() && call.contains("function") && call["function"].is_object();
    if (!call.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": a tool call must be an object"));
    }
    Reader outer(call, where);
    Reader inner(nested ? call["function"] : call, where);
    v1::ChatMessage::ToolCall* to = message->add_tool_calls();
    to->set_id(outer.Text("id"));
    to->set_name(inner.Text("name"));
    to->set_arguments(inner.Text("arguments"));
    if (!outer.status().ok()) return outer.status();
    if (!inner.status().ok()) return inner.status();
  }
  return absl::OkStatus();
}

// A list of parts, as OpenAI has it: {"type": "text", "text": …} or {"type": "image_url", …}.
absl::Status ParseParts(const json& parts, const std::string& where, v1::ChatMessage* message) {
  for (const json& part : parts) {
    const bool typed = part.is_object() && part.contains("type") && part["type"].is_string();
    const std::string type = typed ? part["type"].get<std::string>() : "";
    if (type == "text" && part.contains("text") && part["text"].is_string()) {
      message->add_parts()->set_text(part["text"].get<std::string>());
    } else if (type == "image_url" || type == "image") {
      message->add_parts()->mutable_image();  // which the router refuses by name
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          where, ": a part of \"content\" must be an object {\"type\": \"text\", \"text\": …}"));
    }
  }
  return absl::OkStatus();
}

absl::Status ParseMessage(const json& in, const std::string& where, v1::ChatMessage* out) {
  if (!in.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " must be an object with \"role\" and \"content\""));
  }
  Reader reader(in, where);
  reader.Know(
      {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"});
  const std::string role = reader.Text("role");
  if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
    reader.Complain("role", "system, user, assistant or tool");
  }
  out->set_role(role);
  const bool parts = in.contains("content") && in["content"].is_array();
  if (!parts) out->set_content(reader.Text("content"));
  out->set_name(reader.Text("name"));
  out->set_reasoning(
      reader.Text(reader.Has("reasoning_content") ? "reasoning_content" : "reasoning"));
  out->set_tool_call_id(reader.Text("tool_call_id"));
  if (!reader.status().ok()) return reader.status();
  if (parts) {
    if (absl::Status status = ParseParts(in["content"], where, out); !status.ok()) return status;
  }
  return reader.Has("tool_calls") ? ParseToolCalls(in["tool_calls"], where, out) : absl::OkStatus();
}

// As CLI::Range, but not-a-number is outside.
CLI::Validator Between(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& given) -> std::string {
        double value = 0;
        if (CLI::detail::lexical_cast(given, value) && value >= low && value <= high) return "";
        return absl::StrCat("takes a number from ", low, " to ", high, ", not '", given, "'");
      },
      absl::StrCat("FLOAT in [", low, " - ", high, "]"), "between");
}

bool ReadLogitBias(const std::string& text, uint32_t* id, float* bias) {
  const std::vector<std::string> parts = absl::StrSplit(text, '=');
  return parts.size() == 2 && absl::SimpleAtoi(parts[0], id) && absl::SimpleAtof(parts[1], bias) &&
         *bias >= -kLargestLogitBias && *bias <= kLargestLogitBias;
}

CLI::Validator LogitBias() {
  return CLI::Validator(
      [](std::string& given) -> std::string {
        uint32_t id = 0;
        float bias = 0;
        if (ReadLogitBias(given, &id, &bias)) return "";
        return absl::StrCat("takes a token id, '=' and a number from ", -kLargestLogitBias, " to ",
                            kLargestLogitBias, ", not '", given, "'");
      },
      "ID=BIAS", "logit bias");
}

}  // namespace

void RequestFlags::AddTo(FlagParser* flags, CLI::App* command) {
  flags->Add("max-tokens", &max_tokens_, "most tokens to generate", command)
      ->check(CLI::Range(1, 1 << 30));
  flags->Add("temperature", &temperature_, "0: always the likeliest token", command)
      ->check(Between(0, 100));
  flags->Add("top-p", &top_p_, "keep the likeliest tokens up to this probability", command)
      ->check(Between(0, 1));
  flags->Add("top-k", &top_k_, "keep this many likeliest tokens; 0: all", command);
  flags
      ->Add("min-p", &min_p_, "keep tokens at least so many times as likely as the likeliest",
            command)
      ->check(Between(0, 1));
  flags
      ->Add("repetition-penalty", &repetition_penalty_,
            "divide logits of tokens of prompt and reply by this; 1: off", command)
      ->check(Between(1e-6, 1e6));
  flags
      ->Add("frequency-penalty", &frequency_penalty_,
            "take this off a token's logit for each occurrence in the reply", command)
      ->check(Between(-2, 2));
  flags
      ->Add("presence-penalty", &presence_penalty_,
            "take this off the logits of tokens that the reply has", command)
      ->check(Between(-2, 2));
  command
      ->add_option("--logit-bias", logit_bias_,
                   "ID=BIAS: add BIAS, -100 to 100, to a token's logit; may be given several times")
      ->envname("COPPICE_LOGIT_BIAS")
      ->check(LogitBias())
      ->allow_extra_args(false);
  flags->Add("min-tokens", &min_tokens_, "least tokens to generate", command);
  seed_option_ = command->add_option("--seed", seed_, "same seed, same tokens (default: drawn)")
                     ->envname("COPPICE_SEED");
  command->add_option("--stop", stop_, "end before this text; may be given several times")
      ->envname("COPPICE_STOP")
      ->allow_extra_args(false);
  command->add_option("--stop-token-id", stop_ids_, "end at this token; may be given several times")
      ->envname("COPPICE_STOP_TOKEN_ID")
      ->allow_extra_args(false);
  flags->AddSwitch("ignore-eos", &ignore_eos_, "generate on past the end of sequence", command);
  logprobs_option_ = command
                         ->add_option("--logprobs", logprobs_,
                                      "log-probability of each token and of so many alternatives")
                         ->envname("COPPICE_LOGPROBS")
                         ->check(CLI::Range(0, kMaxLogProbs));
  flags->AddChoice("speculation", &speculation_, {"off", "chain", "tree", "auto"},
                   "how rounds are drafted; auto: the cost model decides (default: the router's)",
                   command);
  tree_nodes_option_ =
      flags->Add("tree-nodes", &tree_nodes_, "nodes of a draft tree, the root counted", command)
          ->check(CLI::Range(1, 64));
  flags->Add("priority", &priority_, "higher goes first", command);
}

v1::GenerateRequest RequestFlags::Request() const {
  v1::GenerateRequest request;
  request.set_max_tokens(max_tokens_);
  request.set_temperature(static_cast<float>(temperature_));
  request.set_top_p(static_cast<float>(top_p_));
  request.set_top_k(top_k_);
  if (min_p_ != 0) request.set_min_p(static_cast<float>(min_p_));
  if (repetition_penalty_ != 1) {
    request.set_repetition_penalty(static_cast<float>(repetition_penalty_));
  }
  if (frequency_penalty_ != 0) {
    request.set_frequency_penalty(static_cast<float>(frequency_penalty_));
  }
  if (presence_penalty_ != 0) request.set_presence_penalty(static_cast<float>(presence_penalty_));
  for (const std::string& text : logit_bias_) {
    uint32_t id = 0;
    float bias = 0;
    if (!ReadLogitBias(text, &id, &bias)) continue;  // the flag's check has seen to that
    v1::LogitBias* entry = request.add_logit_bias();
    entry->set_token(id);
    entry->set_bias(bias);
  }
  request.set_min_tokens(min_tokens_);
  if (seed_option_->count() > 0) request.set_seed(seed_);
  for (const std::string& stop : stop_) request.add_stop(stop);
  for (const uint32_t id : stop_ids_) request.add_stop_token_ids(id);
  request.set_ignore_eos(ignore_eos_);
  if (logprobs_option_->count() > 0) request.set_logprobs(logprobs_);
  if (tree_nodes_option_->count() > 0) request.set_tree_nodes(tree_nodes_);
  request.set_priority(priority_);
  if (!speculation_.empty()) {
    request.set_speculation(speculation_ == "off"     ? v1::SPECULATION_OFF
                            : speculation_ == "chain" ? v1::SPECULATION_CHAIN
                            : speculation_ == "tree"  ? v1::SPECULATION_TREE
                                                      : v1::SPECULATION_AUTO);
  }
  return request;
}

absl::StatusOr<v1::Chat> ParseChat(const std::string& text, const std::string& what) {
  const json in = json::parse(text, nullptr, false);
  if (in.is_discarded()) return absl::InvalidArgumentError(what + " is not JSON");
  const bool bare = in.is_array();
  if (!bare && !(in.is_object() && in.contains("messages") && in["messages"].is_array())) {
    return absl::InvalidArgumentError(
        what + " must be an array of messages, or an object with \"messages\"");
  }
  v1::Chat chat;
  if (!bare) {
    Reader reader(in, what);
    reader.Know({"messages", "tools", "thinking", "preserve_thinking"});
    if (reader.Has("tools")) {
      // With the keys in the caller's order, in which some releases declare tools.
      chat.set_tools_json(nlohmann::ordered_json::parse(text)["tools"].dump());
    }
    if (reader.Has("thinking")) chat.set_thinking(reader.Flag("thinking"));
    if (reader.Has("preserve_thinking")) {
      chat.set_preserve_thinking(reader.Flag("preserve_thinking"));
    }
    if (!reader.status().ok()) return reader.status();
  }
  const json& messages = bare ? in : in["messages"];
  if (messages.empty()) return absl::InvalidArgumentError(what + " has no messages");
  for (size_t i = 0; i < messages.size(); ++i) {
    const absl::Status status =
        ParseMessage(messages[i], absl::StrCat(what, ", message ", i + 1), chat.add_messages());
    if (!status.ok()) return status;
  }
  return chat;
}

}  // namespace coppice::cli
