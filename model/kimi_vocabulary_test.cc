// Known ids of Kimi's own vocabulary, which is not part of this repository.
#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer.h"

namespace coppice {
namespace {

using ::testing::Contains;

// The ids that Kimi's own vocabulary gives, where a directory of a release is at hand.
TEST(KimiVocabulary, KnownIds) {
  const char* dir = std::getenv("COPPICE_KIMI_TOKENIZER");
  if (dir == nullptr) {
    GTEST_SKIP() << "NOT COMPARED WITH KIMI'S VOCABULARY: name a directory with its tiktoken.model "
                    "and tokenizer_config.json in COPPICE_KIMI_TOKENIZER";
  }
  const auto loaded = Tokenizer::Load(dir, 163840);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Tokenizer& kimi = **loaded;
  EXPECT_EQ(kimi.num_base(), 163584);
  const struct {
    int32_t id;
    const char* text;
  } ordinary[] = {{14062, "system"},
                  {2482, "user"},
                  {3900, "You"},
                  {554, " are"},
                  {261, " a"},
                  {13205, " helpful"},
                  {26626, " assistant"},
                  {19180, "Hello"},
                  {1686, "“"},
                  {4963, ",”"},
                  {220, " "},
                  {2243, "世界"},
                  {123421, "世世"},
                  {35086, "——"},
                  {17172, "I'm"},
                  {29338, " Chat"},
                  {111021, "GPT"},
                  {13, "."},
                  {32330, " CAN"},
                  {64833, "'T"},
                  {5161, " wait"},
                  {542, " '"}};
  for (const auto& token : ordinary) {
    EXPECT_EQ(kimi.TokenBytes(token.id), token.text) << token.id;
  }
  EXPECT_THAT(*kimi.Encode("Hello, You are a helpful assistant"), Contains(19180));
  // Named in every release; those of media and thinking from K2.5 on.
  const std::pair<int32_t, const char*> special[] = {{163584, "[BOS]"},
                                                     {163585, "[EOS]"},
                                                     {163586, "<|im_end|>"},
                                                     {163587, "<|im_user|>"},
                                                     {163588, "<|im_assistant|>"},
                                                     {163590, "<|start_header_id|>"},
                                                     {163591, "<|end_header_id|>"},
                                                     {163593, "[EOT]"},
                                                     {163594, "<|im_system|>"},
                                                     {163595, "<|tool_calls_section_begin|>"},
                                                     {163596, "<|tool_calls_section_end|>"},
                                                     {163597, "<|tool_call_begin|>"},
                                                     {163598, "<|tool_call_argument_begin|>"},
                                                     {163599, "<|tool_call_end|>"},
                                                     {163601, "<|im_middle|>"},
                                                     {163838, "[UNK]"},
                                                     {163839, "[PAD]"}};
  for (const auto& [id, name] : special) {
    EXPECT_EQ(kimi.IdOf(name), id);
    EXPECT_EQ(*kimi.EncodeWithSpecial(name), std::vector<int32_t>{id});
    EXPECT_GT(kimi.Encode(name)->size(), 1u);
  }
  if (kimi.IdOf("</think>").has_value()) {
    EXPECT_EQ(kimi.IdOf("</think>"), 163607);
  }
  for (int32_t id = 0; id < kimi.vocab_size(); ++id) ASSERT_NE(kimi.TokenBytes(id), "") << id;
}

}  // namespace
}  // namespace coppice
