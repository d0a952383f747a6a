#include "services/router/session.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/router/fake_peers.h"

namespace coppice::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Request Make(const std::string& prompt) {
  Request request;
  request.id = "r";
  request.prompt.assign(prompt.begin(), prompt.end());
  request.max_tokens = 10;
  request.seed = 5;
  request.stop_token_ids = {kFakeEos};
  return request;
}

std::unique_ptr<Session> MakeSession(Request request, TimePoint now = {}) {
  return Session::Create(1, std::move(request), FakeTokenizer(), nullptr, now).value();
}

std::vector<int32_t> Ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  return ids;
}

TEST(SessionTest, TextAndIdsGoInStep) {
  FakeClock clock;
  auto session = MakeSession(Make("p"), clock.Now());
  clock.Advance(std::chrono::milliseconds(100));
  Delta first = session->Take(Ids("ab"), {}, FinishReason::kNone, *FakeTokenizer(), clock.Now());
  EXPECT_EQ(first.token_offset, 0);
  EXPECT_EQ(first.text, "ab");
  EXPECT_EQ(first.seed, 5u);
  EXPECT_FALSE(first.final.has_value());
  clock.Advance(std::chrono::milliseconds(30));
  session->CountRound(8, 2, 3);
  session->CountRound(8, 0, 1);
  Delta last = session->Take(Ids("\xC3"), {}, FinishReason::kLength, *FakeTokenizer(), clock.Now());
  EXPECT_EQ(last.token_offset, 2);
  EXPECT_EQ(last.text, "\xEF\xBF\xBD");  // half a character, at the end
  EXPECT_FALSE(last.seed.has_value());
  ASSERT_TRUE(last.final.has_value());
  EXPECT_EQ(last.final->finish_reason, FinishReason::kLength);
  EXPECT_EQ(last.final->completion_tokens, 3);
  EXPECT_EQ(last.final->prompt_tokens, 1);
  EXPECT_EQ(last.final->rounds, 2);
  EXPECT_EQ(last.final->drafted, 16);
  EXPECT_EQ(last.final->accepted, 2);
  EXPECT_DOUBLE_EQ(last.final->acceptance_length, 2.0);
  EXPECT_DOUBLE_EQ(last.final->ttft_ms, 100);
  EXPECT_DOUBLE_EQ(last.final->itl_ms, 15);
  EXPECT_DOUBLE_EQ(last.final->total_ms, 130);
}

TEST(SessionTest, AStopStringCutsInsideAChunk) {
  Request request = Make("p");
  request.stop = {"bc"};
  request.logprobs = 0;
  auto session = MakeSession(request);
  Delta delta = session->Take(Ids("ab"), std::vector<PositionScores>(2), FinishReason::kNone,
                              *FakeTokenizer(), {});
  EXPECT_EQ(delta.text, "a");  // "b" may begin the stop string
  EXPECT_THAT(delta.token_ids, ElementsAre('a', 'b'));
  delta = session->Take(Ids("cde"), std::vector<PositionScores>(3), FinishReason::kNone,
                        *FakeTokenizer(), {});
  EXPECT_EQ(delta.text, "");
  EXPECT_THAT(delta.token_ids, ElementsAre('c'));
  EXPECT_EQ(delta.logprobs.size(), 1u);
  ASSERT_TRUE(delta.final.has_value());
  EXPECT_EQ(delta.final->finish_reason, FinishReason::kStop);
  EXPECT_EQ(delta.final->stop_matched, "bc");
  EXPECT_EQ(delta.final->completion_tokens, 3);
}

TEST(SessionTest, AStopTokenSaysNothingButIsNamed) {
  Request request = Make("p");
  request.stop_token_ids = {'x', kFakeEos};
  auto session = MakeSession(request);
  Delta delta = session->Take(Ids("ax"), {}, FinishReason::kStop, *FakeTokenizer(), {});
  EXPECT_EQ(delta.text, "a");
  EXPECT_THAT(delta.token_ids, ElementsAre('a', 'x'));
  ASSERT_TRUE(delta.final.has_value());
  EXPECT_EQ(delta.final->stop_matched, "x");

  session = MakeSession(request);
  delta = session->Take({'a', kFakeEos}, {}, FinishReason::kStop, *FakeTokenizer(), {});
  EXPECT_EQ(delta.final->stop_matched, "[EOS]");
}

// However a stream is cut in two, both halves together say what one stream says.
TEST(SessionTest, AResumedStreamGoesOnExactly) {
  const std::string reply =
      "ab\xC3\xA9"
      "cd\xE2\x82\xAC"
      "ef";
  for (size_t cut = 0; cut <= reply.size(); ++cut) {
    Request request = Make("p");
    request.max_tokens = static_cast<int>(reply.size()) + 1;
    request.stop = {"zz"};
    auto before = MakeSession(request);
    std::string text;
    if (cut > 0) {
      text = before->Take(Ids(reply.substr(0, cut)), {}, FinishReason::kNone, *FakeTokenizer(), {})
                 .text;
    }
    request.resumed = true;
    request.received = Ids(reply.substr(0, cut));
    auto after = MakeSession(request);
    EXPECT_EQ(after->FinishedOnArrival(), FinishReason::kNone);
    EXPECT_EQ(after->remaining(), static_cast<int>(reply.size() + 1 - cut));
    if (cut < reply.size()) {
      const Delta delta =
          after->Take(Ids(reply.substr(cut)), {}, FinishReason::kNone, *FakeTokenizer(), {});
      EXPECT_EQ(delta.token_offset, static_cast<int>(cut));
      EXPECT_EQ(delta.seed, 5u);
      text += delta.text;
    }
    EXPECT_EQ(text, reply) << cut;
  }
}

TEST(SessionTest, AResumedStreamMayHaveEnded) {
  Request request = Make("p");
  request.received = Ids("aaaaaaaaaa");
  EXPECT_EQ(MakeSession(request)->FinishedOnArrival(), FinishReason::kLength);
  request.received = {'a', kFakeEos};
  auto session = MakeSession(request);
  EXPECT_EQ(session->FinishedOnArrival(), FinishReason::kStop);
  const Delta last = session->End(FinishReason::kStop, {});
  EXPECT_EQ(last.token_offset, 2);
  EXPECT_EQ(last.final->stop_matched, "[EOS]");
  EXPECT_EQ(last.final->completion_tokens, 2);
  request.stop = {"bb"};
  request.received = Ids("abb");
  EXPECT_EQ(MakeSession(request)->FinishedOnArrival(), FinishReason::kStop);
  request.received = Ids("abbc");
  EXPECT_THAT(
      std::string(Session::Create(1, request, FakeTokenizer(), nullptr, {}).status().message()),
      HasSubstr("index 2"));
}

TEST(SessionTest, BadStopStringsAreRefused) {
  Request request = Make("p");
  request.stop = {""};
  EXPECT_EQ(Session::Create(1, request, FakeTokenizer(), nullptr, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SessionTest, ReadmissionCarriesTheTokensSoFar) {
  auto session = MakeSession(Make("pq"));
  session->sequence = 77;
  session->Take(Ids("abc"), {}, FinishReason::kNone, *FakeTokenizer(), {});
  const Admit admit = session->MakeAdmit("d:1");
  EXPECT_THAT(admit.tokens, ElementsAre('p', 'q', 'a', 'b', 'c'));
  EXPECT_EQ(admit.max_tokens, 7);
  EXPECT_EQ(admit.seed, 5u);
  EXPECT_EQ(admit.drafter, "d:1");
  session->Requeue();
  EXPECT_EQ(session->sequence, 0u);
  EXPECT_EQ(session->phase, Session::Phase::kQueued);
}

}  // namespace
}  // namespace coppice::router
