#include "services/router/detokenizer.h"

#include <map>
#include <memory>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/utf8.h"

namespace coppice::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kEos = 300;
constexpr int kImEnd = 301;
constexpr int kThink = 302;
constexpr int kEndThink = 303;
constexpr int kToolCall = 304;
constexpr int kReserved = 305;
constexpr int kVocab = 306;

// Ids 0 … 255 are bytes; then some tokens of several bytes, which begin and end inside characters.
const Tokenizer& TestTokenizer() {
  static const Tokenizer* const tokenizer = [] {
    std::vector<std::string> ranks;
    for (int byte = 0; byte < 256; ++byte) ranks.emplace_back(1, static_cast<char>(byte));
    for (const char* token : {"ab", "abab", "STOP", "\xE4\xB8", "\x96\xE7\x95", "hello", " world",
                              "\n\n", "\xF0\x9F", "\x98\x82!"}) {
      ranks.push_back(token);
    }
    while (ranks.size() < kEos) ranks.push_back("filler" + std::to_string(ranks.size()));
    return Tokenizer::Create(ranks,
                             {{kEos, "[EOS]"},
                              {kImEnd, "<|im_end|>"},
                              {kThink, "<think>"},
                              {kEndThink, "</think>"},
                              {kToolCall, "<|tool_call_begin|>"}},
                             kVocab, "test")
        .value()
        .release();
  }();
  return *tokenizer;
}

Detokenizer Make(std::vector<std::string> stops = {}) {
  auto detokenizer = Detokenizer::Create(&TestTokenizer(), std::move(stops));
  EXPECT_TRUE(detokenizer.ok()) << detokenizer.status();
  return *std::move(detokenizer);
}

std::vector<int32_t> Bytes(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

TEST(Detokenizer, EmitsWholeCharacters) {
  Detokenizer detokenizer = Make();
  EXPECT_EQ(detokenizer.Feed('a').text, "a");
  EXPECT_EQ(detokenizer.Feed(259).text, "");    // two of 世's three bytes
  EXPECT_EQ(detokenizer.Feed(260).text, "世");  // its last one and two of 界's
  EXPECT_EQ(detokenizer.Feed(0x8C).text, "界");
  EXPECT_EQ(detokenizer.Feed(264).text, "");
  EXPECT_EQ(detokenizer.Feed(265).text, "\U0001F602!");
  EXPECT_EQ(detokenizer.Flush(), "");
}

TEST(Detokenizer, ReplacesAnUnfinishedCharacterOnlyAtTheEnd) {
  Detokenizer detokenizer = Make();
  EXPECT_EQ(detokenizer.Feed(Bytes("x\xF0\x9F\x98")).text, "x");
  EXPECT_EQ(detokenizer.Flush(), "\uFFFD");
  EXPECT_EQ(detokenizer.Flush(), "");
}

TEST(Detokenizer, ReplacesBytesThatCanBelongToNoCharacter) {
  Detokenizer detokenizer = Make();
  EXPECT_EQ(detokenizer.Feed(Bytes("a\x80z")).text, "a\uFFFDz");
  EXPECT_EQ(detokenizer.Feed(Bytes("\xE4\xB8")).text, "");
  EXPECT_EQ(detokenizer.Feed('q').text, "\uFFFDq");
}

TEST(Detokenizer, HidesControlTokensAndShowsMarkers) {
  Detokenizer detokenizer = Make();
  const auto output =
      detokenizer.Feed({kThink, 261, kEndThink, kReserved, kToolCall, 'x', kImEnd, kEos});
  EXPECT_EQ(output.text, "<think>hello</think><|tool_call_begin|>x");
  EXPECT_EQ(output.consumed, 8u);
  EXPECT_FALSE(output.stopped);
  EXPECT_EQ(detokenizer.Feed({-1, kVocab, 1 << 30}).text, "");
}

TEST(Detokenizer, HoldsAPrefixOfAStopString) {
  Detokenizer detokenizer = Make({"STOP"});
  EXPECT_EQ(detokenizer.Feed(Bytes("xS")).text, "x");
  EXPECT_EQ(detokenizer.Feed('T').text, "");
  EXPECT_EQ(detokenizer.Feed('S').text, "ST");
  EXPECT_EQ(detokenizer.Feed(Bytes("TO")).text, "");
  EXPECT_EQ(detokenizer.Feed('x').text, "STOx");
  EXPECT_EQ(detokenizer.Feed(Bytes("ST")).text, "");
  EXPECT_EQ(detokenizer.Flush(), "ST");
}

TEST(Detokenizer, StopsInsideAChunkAndCountsTokens) {
  Detokenizer detokenizer = Make({"STOP"});
  const auto output = detokenizer.Feed({261, 258, 262, 263});
  EXPECT_EQ(output.text, "hello");
  EXPECT_EQ(output.consumed, 2u);
  EXPECT_TRUE(output.stopped);
  EXPECT_EQ(output.stop_string, "STOP");
  EXPECT_TRUE(detokenizer.stopped());
  const auto after = detokenizer.Feed(261);
  EXPECT_EQ(after.text, "");
  EXPECT_EQ(after.consumed, 0u);
  EXPECT_EQ(detokenizer.Flush(), "");
}

TEST(Detokenizer, StopsInsideAToken) {
  Detokenizer detokenizer = Make({"el"});
  const auto output = detokenizer.Feed({'>', 261, 262});
  EXPECT_EQ(output.text, ">h");
  EXPECT_EQ(output.consumed, 2u);
}

TEST(Detokenizer, StopsAcrossControlTokensAndMarkers) {
  Detokenizer detokenizer = Make({"</think>", "ab"});
  EXPECT_EQ(detokenizer.Feed({'a', kImEnd}).text, "");
  EXPECT_TRUE(detokenizer.Feed('b').stopped);
  Detokenizer other = Make({"</think>"});
  const auto output = other.Feed({'x', kEndThink, 'y'});
  EXPECT_EQ(output.text, "x");
  EXPECT_EQ(output.consumed, 2u);
}

TEST(Detokenizer, TakesTheFirstStopStringToEndAndTheLongestOfThese) {
  EXPECT_EQ(Make({"ab", "abc"}).Feed(Bytes("xabc")).stop_string, "ab");
  const auto output = Make({"bc", "abc"}).Feed(Bytes("xabc"));
  EXPECT_EQ(output.stop_string, "abc");
  EXPECT_EQ(output.text, "x");
  EXPECT_EQ(Make({"abc", "bc"}).Feed(Bytes("xabc")).stop_string, "abc");
}

TEST(Detokenizer, FindsAStopStringBehindAFalseStart) {
  EXPECT_EQ(Make({"aab"}).Feed(Bytes("aaab")).text, "a");
  EXPECT_EQ(Make({"abac"}).Feed(Bytes("ababac")).text, "ab");
}

TEST(Detokenizer, StopStringsOfManyBytesPerCharacter) {
  Detokenizer detokenizer = Make({"世界"});
  EXPECT_EQ(detokenizer.Feed(Bytes("x世")).text, "x");
  EXPECT_EQ(detokenizer.Feed(Bytes("世")).text, "世");
  EXPECT_TRUE(detokenizer.Feed(Bytes("界")).stopped);
}

TEST(Detokenizer, TheFirstTokensCompleteNoStopString) {
  for (const size_t min_tokens : {0, 3, 4, 5, 7, 9}) {
    // One by one and all at once.
    for (const size_t step : {1, 100}) {
      Detokenizer detokenizer = Detokenizer::Create(&TestTokenizer(), {"abab"}, min_tokens).value();
      const std::vector<int32_t> ids = Bytes("xababab!");
      std::string text;
      size_t consumed = 0;
      for (size_t i = 0; i < ids.size() && !detokenizer.stopped(); i += step) {
        const auto output =
            detokenizer.Feed(absl::MakeConstSpan(ids).subspan(i, std::min(step, ids.size() - i)));
        text += output.text;
        consumed += output.consumed;
      }
      text += detokenizer.Flush();
      // "abab" ends at tokens 5 and 7.
      const size_t end = min_tokens < 5 ? 5 : min_tokens < 7 ? 7 : ids.size();
      EXPECT_EQ(consumed, end) << min_tokens;
      EXPECT_EQ(text, end == 5 ? "x" : end == 7 ? "xab" : "xababab!") << min_tokens;
      EXPECT_EQ(detokenizer.stopped(), end != ids.size());
    }
  }
}

TEST(Detokenizer, CanBeMoved) {
  Detokenizer first = Make({"STOP", "END"});
  first.Feed(Bytes("xEN"));
  Detokenizer second = std::move(first);
  const auto output = second.Feed('D');
  EXPECT_TRUE(output.stopped);
  EXPECT_EQ(output.stop_string, "END");
}

TEST(DetokenizerCreate, RefusesBadStopStrings) {
  const auto message = [](std::vector<std::string> stops) {
    const absl::Status status = Detokenizer::Create(&TestTokenizer(), std::move(stops)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(message({"a", ""}), "stop string 1 is empty");
  EXPECT_EQ(message({"\xE4\xB8"}), "stop string 0 is not valid UTF-8");
  EXPECT_EQ(message({std::string(1025, 'x')}),
            "stop string 0 is 1025 bytes long; at most 1024 are allowed");
  EXPECT_EQ(message(std::vector<std::string>(17, "x")),
            "there are 17 stop strings; at most 16 are allowed");
  EXPECT_TRUE(
      Detokenizer::Create(&TestTokenizer(), std::vector<std::string>(16, std::string(1024, 'x')))
          .ok());
}

// ---- Properties

std::string Replaced(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const Utf8Char c = DecodeUtf8(bytes);
    text += c.kind == Utf8Char::kValid ? std::string(bytes.substr(0, c.length)) : "\uFFFD";
    bytes.remove_prefix(c.length);
  }
  return text;
}

struct Reply {
  std::string text;
  size_t consumed = 0;
  std::string stop_string;
};

// From the whole sequence at once, by search.
Reply Expected(const std::vector<int32_t>& ids, const std::vector<std::string>& stops) {
  std::string bytes;
  Reply reply;
  for (const int32_t id : ids) {
    ++reply.consumed;
    if (TestTokenizer().IsControl(id)) continue;
    const size_t before = bytes.size();
    bytes += TestTokenizer().TokenBytes(id);
    for (size_t end = before + 1; end <= bytes.size(); ++end) {
      for (const std::string& stop : stops) {
        if (end >= stop.size() && bytes.compare(end - stop.size(), stop.size(), stop) == 0 &&
            stop.size() > reply.stop_string.size()) {
          reply.stop_string = stop;
        }
      }
      if (!reply.stop_string.empty()) {
        reply.text = Replaced(std::string_view(bytes).substr(0, end - reply.stop_string.size()));
        return reply;
      }
    }
  }
  reply.text = Replaced(bytes);
  return reply;
}

class DetokenizerProperty : public ::testing::TestWithParam<int> {};

TEST_P(DetokenizerProperty, GroupingChangesNothing) {
  std::mt19937 random(GetParam());
  const std::vector<std::string> fragments = {"a",  "b",  "ab", "aab",        "S",       "STOP",
                                              "世", "界", "\n", "\U0001F602", "</think>"};
  for (int round = 0; round < 400; ++round) {
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) {
      do {
        stop += fragments[random() % fragments.size()];
      } while (random() % 2 == 0);
    }
    std::vector<int32_t> ids;
    for (int i = random() % 60; i > 0; --i) {
      switch (random() % 6) {
        case 0:
          ids.push_back(256 + random() % 10);
          break;
        case 1:
          ids.push_back(kEos + random() % 6);
          break;
        case 2:
          ids.push_back(random() % 256);
          break;
        default:
          for (const int32_t id : Bytes(fragments[random() % fragments.size()])) ids.push_back(id);
      }
    }
    const Reply expected = Expected(ids, stops);

    for (const size_t chunk : {size_t{1}, size_t{3}, ids.size() + 1, size_t{0}}) {
      Detokenizer detokenizer = Make(stops);
      Reply reply;
      for (size_t i = 0; i < ids.size() && !detokenizer.stopped();) {
        const size_t n = std::min(ids.size() - i, chunk == 0 ? 1 + random() % 7 : chunk);
        const auto output = detokenizer.Feed(absl::MakeConstSpan(ids).subspan(i, n));
        EXPECT_EQ(FindInvalidUtf8(output.text), std::string::npos);
        EXPECT_EQ(output.stopped, detokenizer.stopped());
        EXPECT_EQ(output.consumed == n || output.stopped, true);
        reply.text += output.text;
        reply.consumed += output.consumed;
        reply.stop_string = output.stop_string;
        // Whatever was sent stays part of the reply, however it goes on.
        ASSERT_EQ(expected.text.compare(0, reply.text.size(), reply.text), 0);
        i += n;
      }
      reply.text += detokenizer.Flush();
      ASSERT_EQ(reply.text, expected.text);
      ASSERT_EQ(reply.consumed, expected.consumed);
      ASSERT_EQ(reply.stop_string, expected.stop_string);
    }
  }
}

TEST_P(DetokenizerProperty, HoldsBackNoMoreThanItMust) {
  // After each byte, what is held back is the shortest tail that is an unfinished character or
  // begins with a proper prefix of a stop string.
  std::mt19937 random(GetParam());
  const std::vector<std::string> stops = {"abab", "bb世", "\n\n\n"};
  for (int round = 0; round < 200; ++round) {
    Detokenizer detokenizer = Make(stops);
    std::string bytes;
    std::string sent;
    const std::string letters = "aab\n";
    while (bytes.size() < 50) {
      const std::string more =
          random() % 8 == 0 ? "世" : std::string(1, letters[random() % letters.size()]);
      for (const char byte : more) {
        bytes += byte;
        const auto output = detokenizer.Feed(static_cast<unsigned char>(byte));
        sent += output.text;
        if (output.stopped) break;
        size_t hold = 0;
        for (const std::string& stop : stops) {
          for (size_t n = 1; n < stop.size() && n <= bytes.size(); ++n) {
            if (bytes.compare(bytes.size() - n, n, stop, 0, n) == 0) hold = std::max(hold, n);
          }
        }
        size_t safe = bytes.size() - hold;
        while (safe > 0 &&
               FindInvalidUtf8(std::string_view(bytes).substr(0, safe)) != std::string::npos)
          --safe;
        ASSERT_EQ(sent, bytes.substr(0, safe));
      }
      if (detokenizer.stopped()) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DetokenizerProperty, ::testing::Range(1, 6));

TEST(Detokenizer, LongHeldTailsStayCheap) {
  // A text that always ends in the longest possible prefix: quadratic work would take minutes here.
  const std::string stop = std::string(1023, 'a') + "b";
  Detokenizer detokenizer = Make({stop});
  const std::vector<int32_t> ids(2'000'000, 'a');
  size_t sent = 0;
  for (size_t i = 0; i < ids.size(); i += 4)
    sent += detokenizer.Feed(absl::MakeConstSpan(ids).subspan(i, 4)).text.size();
  EXPECT_EQ(sent, 2'000'000u - 1023);
  EXPECT_EQ(detokenizer.Flush().size(), 1023u);
}

}  // namespace
}  // namespace coppice::router
