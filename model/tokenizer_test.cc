#include "model/tokenizer.h"

#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/test_files.h"
#include "nlohmann/json.hpp"

namespace coppice {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Lt;

constexpr char kDemo[] = "models/demo";

std::vector<std::string> Pieces(std::string_view text) {
  const auto pieces = PreTokenize(text);
  EXPECT_TRUE(pieces.ok()) << pieces.status();
  return std::vector<std::string>(pieces->begin(), pieces->end());
}

TEST(PreTokenize, CutsAsKimiDoes) {
  EXPECT_THAT(Pieces("“Hello,” 世界世世世界世界——I'm ChatGPT. CAN'T wait 'til 2026.世界世界"),
              ElementsAre("“Hello", ",”", " ", "世界世世世界世界", "——", "I'm", " Chat", "GPT", ".",
                          " CAN'T", " wait", " '", "til", " ", "202", "6", ".", "世界世界"));
  EXPECT_THAT(Pieces("中文ABC中文"), ElementsAre("中文", "ABC", "中文"));
  EXPECT_THAT(Pieces("hello世界abc"), ElementsAre("hello", "世界", "abc"));
  EXPECT_THAT(Pieces("a  b   c\n\n  d \t"),
              ElementsAre("a", " ", " b", "  ", " c", "\n\n", " ", " d", " \t"));
  EXPECT_THAT(Pieces("12345678 9"), ElementsAre("123", "456", "78", " ", "9"));
  EXPECT_THAT(Pieces("x=foo_bar(1,2);\r\n\r\n  return"),
              ElementsAre("x", "=foo", "_bar", "(", "1", ",", "2", ");\r\n\r\n", " ", " return"));
  EXPECT_THAT(Pieces("你好，world！ こんにちは"),
              ElementsAre("你好", "，world", "！", " こんにちは"));
  EXPECT_THAT(Pieces("〇々〆 〇一"), ElementsAre("〇々", "〆", " ", "〇一"));
  EXPECT_THAT(Pieces("中文、中文。"), ElementsAre("中文", "、", "中文", "。"));
  EXPECT_THAT(Pieces("\n \n a"), ElementsAre("\n \n", " a"));
  // Contractions in any case, the long s included; ideographic marks are Han; U+180E is not white
  // space.
  EXPECT_THAT(Pieces("it'ſ WE'LL"), ElementsAre("it'ſ", " WE'LL"));
  EXPECT_THAT(Pieces(" \u180e"), ElementsAre(" \u180e"));
  EXPECT_THAT(Pieces("\u3000\u3000x"), ElementsAre("\u3000", "\u3000x"));
  EXPECT_THAT(Pieces(""), ElementsAre());
}

TEST(PreTokenize, LosesNoByte) {
  std::mt19937 random(3);
  const std::vector<std::string> alphabet = {"a",      "B",          "1",      " ", "\n",     "\t",
                                             "世",     "、",         "\u0301", "'", "s",      "é",
                                             "\u180e", "\U0001F642", "\x1c",   "ǅ", "\u302a", "\0"};
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = random() % 20; i > 0; --i) text += alphabet[random() % alphabet.size()];
    std::string joined;
    for (const std::string& piece : Pieces(text)) {
      EXPECT_FALSE(piece.empty());
      joined += piece;
    }
    ASSERT_EQ(joined, text);
  }
}

// The scanner that goes before the pattern, on texts mostly of ASCII: every pair and triple of
// characters that it tells apart, and random ones.
TEST(PreTokenize, TheScannerCutsAsThePatternDoes) {
  const auto same = [](const std::string& text) {
    const auto scanned = PreTokenize(text);
    const auto matched = PreTokenize(text, /*pattern_only=*/true);
    ASSERT_TRUE(scanned.ok() && matched.ok());
    ASSERT_EQ(*scanned, *matched) << testing::PrintToString(text);
  };
  const std::vector<std::string> kinds = {
      "a", "B",      "7",  " ",      "\t",     "\n", "\r", "'",    "s",      "T",      "r",
      "e", "V",      "l",  "L",      "m",      "D",  ".",  "\x01", "\x1c",   "\x7f",   "\v",
      "é", "\u0301", "世", "\u3000", "\u00a0", "ſ",  "٣",  "—",    "\u0085", "\u212a", "ǅ"};
  for (const std::string& a : kinds) {
    for (const std::string& b : kinds) {
      for (const std::string& c : kinds) same(a + b + c);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    std::string text;
    // The first 22 are ASCII.
    const size_t among = random() % 3 == 0 ? kinds.size() : 22;
    for (size_t n = random() % 24; n > 0; --n) text += kinds[random() % among];
    same(text);
  }
}

TEST(PreTokenize, RefusesInvalidUtf8) {
  EXPECT_EQ(PreTokenize("ab\xff").status().message(), "the text is not valid UTF-8 at byte 2");
}

std::vector<std::string> SingleBytes() {
  std::vector<std::string> ranks;
  for (int byte = 0; byte < 256; ++byte) ranks.emplace_back(1, static_cast<char>(byte));
  return ranks;
}

// Single bytes and some merges, chosen so that order and ties matter.
std::unique_ptr<Tokenizer> Small() {
  std::vector<std::string> ranks = SingleBytes();
  for (const char* token : {"bc", "ab", "abc", "aa", "aaaa", "世", " a", "aaa"})
    ranks.push_back(token);
  auto tokenizer = Tokenizer::Create(ranks,
                                     {{264, "[EOS]"},
                                      {265, "<|im_end|>"},
                                      {266, "<think>"},
                                      {267, "</think>"},
                                      {268, "<|im_user|>"},
                                      {269, "<|tool_call_begin|>"}},
                                     272, "test");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(Tokenizer, MergesByRank) {
  const auto tokenizer = Small();
  EXPECT_THAT(*tokenizer->Encode("abc"), ElementsAre(258));        // the whole piece is a token
  EXPECT_THAT(*tokenizer->Encode("abcd"), ElementsAre(258, 'd'));  // a|bc, then a+bc
  EXPECT_THAT(*tokenizer->Encode("aab"), ElementsAre('a', 257));   // "ab" ranks before "aa"
  EXPECT_THAT(*tokenizer->Encode("aaaaaaa"), ElementsAre(260, 263));
  EXPECT_THAT(*tokenizer->Encode("世"), ElementsAre(261));
  EXPECT_THAT(*tokenizer->Encode("界"), ElementsAre(0xE7, 0x95, 0x8C));
  EXPECT_THAT(*tokenizer->Encode(""), ElementsAre());
}

// tiktoken's definition, word for word.
std::vector<int32_t> MergeNaively(const std::map<std::string, int32_t>& ranks,
                                  const std::string& piece) {
  std::vector<std::string> parts;
  if (ranks.count(piece)) return {ranks.at(piece)};
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    int best = -1;
    int32_t best_rank = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = ranks.find(parts[i] + parts[i + 1]);
      if (it != ranks.end() && (best < 0 || it->second < best_rank)) {
        best = static_cast<int>(i);
        best_rank = it->second;
      }
    }
    if (best < 0) break;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + best + 1);
  }
  std::vector<int32_t> ids;
  for (const std::string& part : parts) ids.push_back(ranks.at(part));
  return ids;
}

TEST(Tokenizer, MergesLongPiecesLikeShortOnes) {
  std::mt19937 random(11);
  for (int round = 0; round < 30; ++round) {
    std::vector<std::string> tokens = SingleBytes();
    std::set<std::string> known(tokens.begin(), tokens.end());
    // Over three letters, so that pairs recur; not every token is made of tokens.
    while (tokens.size() < 340) {
      std::string token;
      for (int i = 2 + random() % 4; i > 0; --i) token += static_cast<char>('a' + random() % 3);
      if (known.insert(token).second) tokens.push_back(token);
    }
    std::map<std::string, int32_t> ranks;
    for (size_t i = 0; i < tokens.size(); ++i) ranks[tokens[i]] = static_cast<int32_t>(i);
    const auto tokenizer = Tokenizer::Create(tokens, {}, 340, "test");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (const size_t length : {2, 5, 30, 95, 96, 97, 200, 700}) {
      std::string piece;
      while (piece.size() < length) piece += static_cast<char>('a' + random() % 3);
      EXPECT_EQ(*(*tokenizer)->Encode(piece), MergeNaively(ranks, piece)) << piece;
    }
  }
}

TEST(Tokenizer, OrdinaryTextNeverBecomesSpecial) {
  const auto tokenizer = Small();
  const std::string text = "[EOS]<|im_end|><think>x</think><|reserved_token_271|>";
  const auto ids = tokenizer->Encode(text);
  ASSERT_TRUE(ids.ok());
  EXPECT_THAT(*ids, Each(Lt(tokenizer->num_base())));
  EXPECT_EQ(*tokenizer->Decode(*ids), text);
  EXPECT_THAT(*tokenizer->EncodeWithSpecial(text), ElementsAre(264, 265, 266, 'x', 267, 271));
  EXPECT_THAT(*tokenizer->EncodeWithSpecial("<|im_end<|im_end|>"),
              ElementsAre('<', '|', 'i', 'm', '_', 'e', 'n', 'd', 265));
}

TEST(Tokenizer, JoinsOrdinaryPieces) {
  const auto tokenizer = Small();
  EXPECT_THAT(*tokenizer->EncodePieces({{"a", false}, {"b", false}, {"c", false}}),
              ElementsAre(258));
  EXPECT_THAT(*tokenizer->EncodePieces(
                  {{"a", false}, {"<|im_end|>", true}, {"bc", false}, {"<|im_end|>", false}}),
              ElementsAre('a', 265, 256, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>'));
  EXPECT_EQ(tokenizer->EncodePieces({{"<|nothing|>", true}}).status().message(),
            "the vocabulary has no special token named <|nothing|>");
  EXPECT_EQ(tokenizer->EncodePieces({}).value().size(), 0u);
}

TEST(Tokenizer, RefusesInvalidUtf8) {
  const auto tokenizer = Small();
  for (const auto& status : {tokenizer->Encode("abc\xE4\xB8").status(),
                             tokenizer->EncodeWithSpecial("abc\xE4\xB8").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "the text is not valid UTF-8 at byte 3");
  }
}

TEST(Tokenizer, KnowsItsSpecialTokens) {
  const auto tokenizer = Small();
  EXPECT_EQ(tokenizer->num_base(), 264);
  EXPECT_EQ(tokenizer->vocab_size(), 272);
  EXPECT_EQ(tokenizer->IdOf("<|im_end|>"), 265);
  EXPECT_EQ(tokenizer->IdOf("<|reserved_token_270|>"), 270);
  EXPECT_EQ(tokenizer->IdOf("abc"), std::nullopt);
  EXPECT_FALSE(tokenizer->IsSpecial(263));
  EXPECT_TRUE(tokenizer->IsSpecial(264));
  EXPECT_TRUE(tokenizer->IsSpecial(271));
  EXPECT_FALSE(tokenizer->IsSpecial(272));
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
  for (const int id : {264, 265, 268, 270, 271}) EXPECT_TRUE(tokenizer->IsControl(id)) << id;
  for (const int id : {-1, 0, 263, 266, 267, 269, 272})
    EXPECT_FALSE(tokenizer->IsControl(id)) << id;
  EXPECT_EQ(tokenizer->TokenBytes(258), "abc");
  EXPECT_EQ(tokenizer->TokenBytes(270), "<|reserved_token_270|>");
  EXPECT_EQ(tokenizer->TokenBytes(272), "");
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(*tokenizer->Decode({258, 267}), "abc</think>");
  EXPECT_EQ(tokenizer->Decode({258, 272}).status().message(),
            "token id 272 at position 1 is out of range; the vocabulary has ids 0 to 271");
  EXPECT_EQ(tokenizer->Decode({-1}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, HoldsAVocabularyOfKimisSize) {
  std::vector<std::string> ranks = SingleBytes();
  for (int i = 0; ranks.size() < 163584; ++i) {
    ranks.push_back({static_cast<char>(i >> 16), static_cast<char>(i >> 8), static_cast<char>(i)});
  }
  // As config and tokenizer_config.json have them; the gaps between them are reserved ids, so names
  // cannot be numbered one after another.
  const std::map<int32_t, std::string> named = {{163584, "[BOS]"},
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
                                                {163602, "<|media_begin|>"},
                                                {163603, "<|media_content|>"},
                                                {163604, "<|media_end|>"},
                                                {163605, "<|media_pad|>"},
                                                {163606, "<think>"},
                                                {163607, "</think>"},
                                                {163838, "[UNK]"},
                                                {163839, "[PAD]"}};
  const auto tokenizer = Tokenizer::Create(ranks, named, 163840, "kimi");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const auto& [id, name] : named) {
    EXPECT_EQ((*tokenizer)->IdOf(name), id);
    EXPECT_EQ(*(*tokenizer)->EncodeWithSpecial(name), std::vector<int32_t>{id});
    // Ordinary text spells it and is never it.
    EXPECT_EQ((*tokenizer)->Encode(name)->size(), name.size());
  }
  for (const int32_t id : {163589, 163592, 163600, 163608, 163837}) {
    EXPECT_EQ((*tokenizer)->TokenBytes(id), absl::StrCat("<|reserved_token_", id, "|>"));
  }
  EXPECT_EQ((*tokenizer)->IdOf("</think>"), 163607);
  EXPECT_EQ((*tokenizer)->IdOf("[PAD]"), 163839);
  EXPECT_EQ((*tokenizer)->IdOf("<|reserved_token_163608|>"), 163608);
  for (int32_t id = 0; id < 163840; ++id) ASSERT_TRUE((*tokenizer)->Decode({id}).ok()) << id;
}

TEST(Tokenizer, CutsLongTexts) {
  std::vector<std::string> ranks = SingleBytes();
  ranks.push_back("aa");
  ranks.push_back("  ");
  const auto tokenizer = *Tokenizer::Create(ranks, {{258, "<|im_end|>"}}, 259, "test");
  const std::string run(25'000, 'a');
  // Two characters that would be one token lie on either side of a cut.
  const auto uncut = *tokenizer->Encode(run);
  EXPECT_EQ(uncut.size(), 12'500u);
  const auto cut = *tokenizer->Encode("a" + run);
  EXPECT_EQ(cut.size(), 12'501u);
  EXPECT_EQ(cut[12'500], 'a');
  // A slice ends after 400,000 characters, and runs begin anew with it.
  std::string words;
  while (words.size() < 399'999) words += "b ";
  words.resize(399'999);
  const auto sliced = *tokenizer->Encode(words + "aa");
  EXPECT_THAT(std::vector<int32_t>(sliced.end() - 2, sliced.end()), ElementsAre('a', 'a'));
  words.pop_back();
  const auto whole = *tokenizer->Encode(words + "aa");
  EXPECT_EQ(whole.back(), 256);
  // Special tokens count toward a slice's characters: the cut lies where the whole prompt would be
  // cut.
  const auto prompt = *tokenizer->EncodePieces(
      {{words.substr(0, 399'989), false}, {"<|im_end|>", true}, {"aa", false}});
  EXPECT_THAT(std::vector<int32_t>(prompt.end() - 3, prompt.end()), ElementsAre(258, 'a', 'a'));
}

TEST(TokenizerCreate, AWrongVocabSizeCostsNoMemory) {
  EXPECT_THAT(std::string(Tokenizer::Create(SingleBytes(), {}, 1 << 24, "t").status().message()),
              HasSubstr("leaves 16776960 ids for special tokens"));
}

TEST(TokenizerCreate, SaysWhatIsWrong) {
  const auto message = [](std::vector<std::string> ranks,
                          const std::map<int32_t, std::string>& added, int vocab_size) {
    return std::string(
        Tokenizer::Create(std::move(ranks), added, vocab_size, "here").status().message());
  };
  EXPECT_EQ(message(SingleBytes(), {}, 255),
            "here has 256 tokens, more than the model's vocab_size, 255");
  EXPECT_EQ(message(SingleBytes(), {{255, "[EOS]"}}, 260),
            "here: the added token [EOS] has id 255; expected an id from 256 (after the last rank) "
            "to 259 (vocab_size - 1)");
  EXPECT_THAT(message(SingleBytes(), {{260, "[EOS]"}}, 260), HasSubstr("[EOS] has id 260"));
  EXPECT_EQ(message(SingleBytes(), {{256, ""}}, 260),
            "here: the added token with id 256 has no content");
  EXPECT_EQ(message(SingleBytes(), {{256, "x"}, {258, "x"}}, 260),
            "here: ids 256 and 258 have the same name");
  EXPECT_EQ(message(SingleBytes(), {{256, "<|reserved_token_258|>"}}, 260),
            "here: ids 256 and 258 have the same name");
  std::vector<std::string> ranks = SingleBytes();
  ranks[7] = "x";
  EXPECT_EQ(message(ranks, {}, 256), "here: ids 7 and 120 have the same bytes");
  ranks[7] = "xyz";
  EXPECT_EQ(message(ranks, {}, 256),
            "here: no token is the single byte 7; a byte-level vocabulary has all 256");
  ranks[7] = "";
  EXPECT_EQ(message(ranks, {}, 256), "here: the token with rank 7 is empty");
}

class TokenizerLoad : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int byte = 0; byte < 256; ++byte) {
      static constexpr char kDigits[] =
          "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
      vocabulary_ += kDigits[byte >> 2];
      vocabulary_ += kDigits[(byte & 3) << 4];
      vocabulary_ += "== " + std::to_string(byte) + "\n";
    }
    dir_.Write("tiktoken.model", vocabulary_);
    dir_.Write("tokenizer_config.json",
               R"({"added_tokens_decoder":{"256":{"content":"[EOS]","special":true}}})");
  }
  std::string Message() {
    return std::string(Tokenizer::Load(dir_.path(), 258).status().message());
  }

  TempDir dir_;
  std::string vocabulary_;
};

TEST_F(TokenizerLoad, ReadsBothFiles) {
  const auto tokenizer = Tokenizer::Load(dir_.path(), 258);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(*(*tokenizer)->EncodeWithSpecial("a\n[EOS]"), ElementsAre('a', '\n', 256));
  EXPECT_EQ((*tokenizer)->TokenBytes(257), "<|reserved_token_257|>");
}

TEST_F(TokenizerLoad, NamesTheLine) {
  const struct {
    std::string extra;
    const char* message;
  } cases[] = {
      {"YWI= x\n",
       "tiktoken.model, line 257: expected a token's bytes in base64, a space and its rank"},
      {"YWI=\n", "line 257: expected a token's bytes"},
      {"***= 256\n", "line 257: expected a token's bytes"},
      {"YWI= -1\n", "line 257: expected a token's bytes"},
      {"YWI= 255\n", "line 257: expected a rank that no earlier line has"},
      {"YWI= 257\n", "tiktoken.model: no line has rank 256, but ranks go up to 257"},
      {"YWI= 4000000000\n", "line 257: expected ranks without gaps from 0"},
  };
  for (const auto& [extra, message] : cases) {
    dir_.Write("tiktoken.model", vocabulary_ + extra);
    EXPECT_THAT(Message(), HasSubstr(message)) << extra;
  }
  dir_.Write("tiktoken.model", "");
  EXPECT_THAT(Message(), HasSubstr("tiktoken.model has no tokens"));
}

TEST_F(TokenizerLoad, NamesTheKey) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"{}", "has no added_tokens_decoder"},
      {"[]", "not a JSON object"},
      {R"({"added_tokens_decoder":{"x":{"content":"a"}}})", "has the entry \"x\""},
      {R"({"added_tokens_decoder":{"256":{}}})", "has the entry \"256\""},
      {R"({"added_tokens_decoder":{"256":{"content":1}}})", "has the entry \"256\""},
      {R"({"added_tokens_decoder":{"256":{"content":"a"},"0256":{"content":"b"}}})",
       "names id 256 twice"},
      {R"({"added_tokens_decoder":{"300":{"content":"a"}}})", "the added token a has id 300"},
  };
  for (const auto& [text, message] : cases) {
    dir_.Write("tokenizer_config.json", text);
    EXPECT_THAT(Message(), AllOf(HasSubstr(dir_.path()), HasSubstr(message))) << text;
  }
}

TEST_F(TokenizerLoad, NamesTheMissingFile) {
  std::filesystem::remove(dir_.File("tokenizer_config.json"));
  EXPECT_THAT(Message(), HasSubstr("tokenizer_config.json does not exist"));
  std::filesystem::remove(dir_.File("tiktoken.model"));
  EXPECT_THAT(Message(), HasSubstr("tiktoken.model does not exist"));
  EXPECT_EQ(Tokenizer::Load(dir_.path(), 258).status().code(), absl::StatusCode::kNotFound);
}

// ---- Against PyPI tiktoken

std::unique_ptr<Tokenizer> Demo(int vocab_size) {
  auto tokenizer = Tokenizer::Load(kDemo, vocab_size);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

TEST(TokenizerGolden, EncodesAsTiktokenDid) {
  SCOPED_TRACE(
      "where models/demo has a new vocabulary, remake the golden: tests/oracle/tokenizer_oracle.py "
      "golden models/demo tests/goldens/tokenizer/demo.json");
  const json golden = json::parse(ReadTestFile("tests/goldens/tokenizer/demo.json"));
  const auto tokenizer = Demo(golden["vocab_size"].get<int>());
  ASSERT_NE(tokenizer, nullptr);
  for (const json& item : golden["texts"]) {
    const std::string text = item["text"].get<std::string>();
    const auto ids = item["ids"].get<std::vector<int32_t>>();
    EXPECT_THAT(*tokenizer->Encode(text), ElementsAreArray(ids)) << text;
    EXPECT_THAT(*tokenizer->EncodeWithSpecial(text),
                ElementsAreArray(item["ids_special"].get<std::vector<int32_t>>()))
        << text;
    EXPECT_EQ(*tokenizer->Decode(ids), text);
  }
  for (const json& item : golden["long"]) {
    std::string text;
    for (const json& part : item["parts"]) {
      for (int i = part[1].get<int>(); i > 0; --i) text += part[0].get<std::string>();
    }
    const auto ids = tokenizer->Encode(text);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(ids->size(), item["count"].get<size_t>()) << item["parts"];
    uint64_t fingerprint = 0;
    for (const int32_t id : *ids)
      fingerprint = fingerprint * 1'000'003 + static_cast<uint64_t>(id) + 1;
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(fingerprint));
    EXPECT_EQ(digits, item["fingerprint"].get<std::string>()) << item["parts"];
    EXPECT_EQ(*tokenizer->Decode(*ids), text);
  }
}

TEST(TokenizerGolden, DecodesEveryDemoId) {
  const json golden = json::parse(ReadTestFile("tests/goldens/tokenizer/demo.json"));
  const auto tokenizer = Demo(golden["vocab_size"].get<int>());
  ASSERT_NE(tokenizer, nullptr);
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    EXPECT_FALSE(tokenizer->TokenBytes(id).empty()) << id;
  }
}

}  // namespace
}  // namespace coppice
