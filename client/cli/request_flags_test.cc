#include "client/cli/request_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace coppice::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RequestFlagsTest : public ::testing::Test {
 protected:
  RequestFlagsTest() : parser_("coppice", "test") {
    CLI::App* command = parser_.AddCommand("generate", "");
    command->add_option("PROMPT", prompt_, "");
    flags_.AddTo(&parser_, command);
  }
  std::optional<int> Parse(std::vector<const char*> args) {
    args.insert(args.begin(), {"coppice", "generate"});
    testing::internal::CaptureStderr();
    const auto code = parser_.Parse(static_cast<int>(args.size()), args.data());
    err_ = testing::internal::GetCapturedStderr();
    return code;
  }
  std::string prompt_, err_;
  FlagParser parser_;
  RequestFlags flags_;
};

TEST_F(RequestFlagsTest, Defaults) {
  ASSERT_EQ(Parse({"hi"}), std::nullopt) << err_;
  const v1::GenerateRequest request = flags_.Request();
  EXPECT_EQ(request.max_tokens(), 256u);
  EXPECT_EQ(request.temperature(), 0.0f);
  EXPECT_FALSE(request.has_seed());
  EXPECT_FALSE(request.has_logprobs());
  EXPECT_FALSE(request.has_tree_nodes());
  EXPECT_EQ(request.speculation(), v1::SPECULATION_UNSPECIFIED);  // the router's default
}

TEST_F(RequestFlagsTest, EveryFlagReachesTheRequest) {
  ASSERT_EQ(Parse({"--max-tokens",
                   "64",
                   "--temperature",
                   "0.8",
                   "--top-p",
                   "0.9",
                   "--top-k",
                   "40",
                   "--min-p",
                   "0.05",
                   "--repetition-penalty",
                   "1.1",
                   "--frequency-penalty",
                   "-0.5",
                   "--presence-penalty",
                   "0.25",
                   "--logit-bias",
                   "7=-100",
                   "--logit-bias",
                   "9=2.5",
                   "--min-tokens",
                   "3",
                   "--seed",
                   "0",
                   "--stop",
                   "END",
                   "--stop",
                   "two words",
                   "--stop-token-id",
                   "7",
                   "--ignore-eos",
                   "--logprobs",
                   "0",
                   "--speculation",
                   "tree",
                   "--tree-nodes",
                   "33",
                   "--priority",
                   "-2",
                   "hi there"}),
            std::nullopt)
      << err_;
  EXPECT_EQ(prompt_, "hi there");
  const v1::GenerateRequest request = flags_.Request();
  EXPECT_EQ(request.max_tokens(), 64u);
  EXPECT_FLOAT_EQ(request.temperature(), 0.8f);
  EXPECT_FLOAT_EQ(request.top_p(), 0.9f);
  EXPECT_EQ(request.top_k(), 40u);
  EXPECT_FLOAT_EQ(request.min_p(), 0.05f);
  EXPECT_FLOAT_EQ(request.repetition_penalty(), 1.1f);
  EXPECT_FLOAT_EQ(request.frequency_penalty(), -0.5f);
  EXPECT_FLOAT_EQ(request.presence_penalty(), 0.25f);
  ASSERT_EQ(request.logit_bias_size(), 2);
  EXPECT_EQ(request.logit_bias(0).token(), 7u);
  EXPECT_FLOAT_EQ(request.logit_bias(0).bias(), -100);
  EXPECT_FLOAT_EQ(request.logit_bias(1).bias(), 2.5f);
  EXPECT_EQ(request.min_tokens(), 3u);
  EXPECT_TRUE(request.has_seed());
  EXPECT_EQ(request.seed(), 0u);
  EXPECT_THAT(request.stop(), ElementsAre("END", "two words"));
  EXPECT_THAT(request.stop_token_ids(), ElementsAre(7));
  EXPECT_TRUE(request.ignore_eos());
  EXPECT_TRUE(request.has_logprobs());
  EXPECT_EQ(request.speculation(), v1::SPECULATION_TREE);
  EXPECT_EQ(request.tree_nodes(), 33u);
  EXPECT_EQ(request.priority(), -2);
}

TEST_F(RequestFlagsTest, ARepeatableFlagTakesOneValueEachTime) {
  ASSERT_EQ(Parse({"--stop", "END", "hi"}), std::nullopt) << err_;
  EXPECT_EQ(prompt_, "hi");
  EXPECT_THAT(flags_.Request().stop(), ElementsAre("END"));
}

TEST_F(RequestFlagsTest, ImpossibleValuesAreUsageErrors) {
  EXPECT_EQ(Parse({"hi", "--temperature", "-1"}), 2);
  EXPECT_THAT(err_, HasSubstr("--temperature"));
  EXPECT_EQ(Parse({"hi", "--temperature", "nan"}), 2);
  EXPECT_THAT(err_, HasSubstr("--temperature takes a number from 0 to 100, not 'nan'"));
  EXPECT_EQ(Parse({"hi", "--temperature", "hot"}), 2);
  EXPECT_EQ(Parse({"hi", "--top-p", "1.5"}), 2);
  EXPECT_EQ(Parse({"hi", "--tree-nodes", "65"}), 2);
  EXPECT_EQ(Parse({"hi", "--tree-nodes", "0"}), 2);
  EXPECT_EQ(Parse({"hi", "--logprobs", "21"}), 2);
  EXPECT_EQ(Parse({"hi", "--min-p", "1.5"}), 2);
  EXPECT_EQ(Parse({"hi", "--repetition-penalty", "0"}), 2);
  EXPECT_EQ(Parse({"hi", "--frequency-penalty", "2.5"}), 2);
  for (const char* bias : {"7", "7=", "7=x", "x=1", "7=101", "7=1=2", "-1=2"}) {
    EXPECT_EQ(Parse({"hi", "--logit-bias", bias}), 2) << bias;
    EXPECT_THAT(err_, HasSubstr("--logit-bias takes a token id, '=' and a number")) << bias;
  }
  EXPECT_EQ(Parse({"hi", "--max-tokens", "0"}), 2);
  EXPECT_EQ(Parse({"hi", "--max-tokens", "many"}), 2);
  EXPECT_EQ(Parse({"hi", "--speculation", "forest"}), 2);
  EXPECT_THAT(err_, HasSubstr("--speculation takes off, chain, tree or auto, not 'forest'"));
  EXPECT_EQ(Parse({"hi", "--frob"}), 2);
  EXPECT_THAT(err_, HasSubstr("unknown flag --frob"));
}

TEST(ParseChatTest, AnArrayOfMessages) {
  const auto chat = ParseChat(
      R"([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])", "f");
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_EQ(chat->messages_size(), 2);
  EXPECT_EQ(chat->messages(0).role(), "system");
  EXPECT_EQ(chat->messages(1).content(), "hi");
  EXPECT_FALSE(chat->has_thinking());
}

TEST(ParseChatTest, AnObjectWithToolsAndThinking) {
  const auto chat = ParseChat(R"({"thinking": false, "preserve_thinking": true,
    "tools": [{"type": "function", "function": {}, "a": 1}],
    "messages": [
      {"role": "user", "content": "hi"},
      {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls":
        [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
      {"role": "tool", "tool_call_id": "functions.f:0", "content": "42"}]})",
                              "f");
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_TRUE(chat->has_thinking());
  EXPECT_FALSE(chat->thinking());
  EXPECT_TRUE(chat->preserve_thinking());
  EXPECT_EQ(chat->tools_json(), R"([{"type":"function","function":{},"a":1}])");
  EXPECT_EQ(chat->messages(1).reasoning(), "hm");
  EXPECT_EQ(chat->messages(1).tool_calls(0).name(), "f");
  EXPECT_EQ(chat->messages(1).tool_calls(0).arguments(), "{}");
  EXPECT_EQ(chat->messages(2).tool_call_id(), "functions.f:0");
}

TEST(ParseChatTest, ListsOfParts) {
  const auto chat = ParseChat(R"([{"role": "user", "content": [{"type": "text", "text": "a"},
      {"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": "x"}}]},
      {"role": "assistant", "content": []}])",
                              "f");
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_EQ(chat->messages(0).parts_size(), 3);
  EXPECT_EQ(chat->messages(0).parts(0).text(), "a");
  EXPECT_TRUE(chat->messages(0).parts(1).has_text());
  EXPECT_TRUE(chat->messages(0).parts(2).has_image());  // which the router refuses by name
  EXPECT_EQ(chat->messages(1).parts_size(), 0);
}

TEST(ParseChatTest, MistakesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "chat.json is not JSON"},
      {"{", "not JSON"},
      {"3", "array of messages"},
      {"{}", "\"messages\""},
      {"[]", "no messages"},
      {"[3]", "message 1 must be an object"},
      {R"([{"role": "user", "content": "a"}, {"role": "king", "content": "b"}])",
       "message 2: \"role\" must be system"},
      {R"([{"content": "a"}])", "\"role\""},
      {R"([{"role": "user", "content": 3}])", "\"content\" must be a string"},
      {R"([{"role": "user", "content": ["a"]}])", "a part of \"content\" must be an object"},
      {R"([{"role": "user", "content": [{"type": "text"}]}])", "a part of \"content\""},
      {R"([{"role": "user", "content": [{"type": "audio"}]}])", "a part of \"content\""},
      {R"([{"role": "user", "text": "a"}])", "unknown key \"text\""},
      {R"({"messages": [{"role": "user"}], "thinking": "yes"})",
       "\"thinking\" must be true or false"},
      {R"([{"role": "assistant", "tool_calls": 3}])", "\"tool_calls\" must be an array"},
      {R"([{"role": "assistant", "tool_calls": [3]}])", "tool call must be an object"},
  };
  for (const auto& [text, complaint] : cases) {
    const auto chat = ParseChat(text, "chat.json");
    EXPECT_EQ(chat.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(chat.status().message()), HasSubstr(complaint)) << text;
  }
}

}  // namespace
}  // namespace coppice::cli
