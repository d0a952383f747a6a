#include "client/cli/json_shapes.h"

#include <gtest/gtest.h>

#include <limits>

namespace coppice::cli {
namespace {

using nlohmann::json;

Completion Example() {
  Completion c;
  c.request_id = "r1";
  c.seed = 18446744073709551615u;
  c.token_ids = {5, 6, 7};
  c.text = "Paris.";
  c.ttft_ms = 10;
  c.total_ms = 30;
  c.final.set_finish_reason(v1::FINISH_STOP);
  c.final.set_stop_matched(".");
  c.final.mutable_usage()->set_prompt_tokens(9);
  c.final.mutable_usage()->set_completion_tokens(3);
  c.final.mutable_speculation()->set_rounds(2);
  c.final.mutable_speculation()->set_drafted(16);
  c.final.mutable_speculation()->set_accepted(1);
  c.final.mutable_speculation()->set_acceptance_length(1.5f);
  c.final.mutable_timing()->set_ttft_ms(8.5);
  c.final.mutable_timing()->set_itl_ms(2.5);
  c.final.mutable_timing()->set_total_ms(20);
  return c;
}

TEST(CompletionJsonTest, HasTheDocumentedShape) {
  const json out = CompletionJson(Example());
  EXPECT_EQ(out, json::parse(R"({
    "text": "Paris.", "token_ids": [5, 6, 7], "finish_reason": "stop", "stop_matched": ".",
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 0},
    "speculation": {"rounds": 2, "drafted": 16, "accepted": 1, "acceptance_length": 1.5},
    "timing": {"ttft_ms": 8.5, "itl_ms": 2.5, "total_ms": 20.0, "queue_ms": 0.0},
    "seed": 18446744073709551615, "request_id": "r1", "resumes": 0})"));
}

TEST(CompletionJsonTest, AResumedStreamIsTimedFromHere) {
  Completion c = Example();
  c.resumes = 1;
  const json out = CompletionJson(c);
  EXPECT_EQ(out["timing"]["ttft_ms"], 10.0);
  EXPECT_EQ(out["timing"]["itl_ms"], 10.0);
  EXPECT_EQ(out["timing"]["total_ms"], 30.0);
}

TEST(CompletionJsonTest, LogProbsAsShortNumbersAndNullWhereThereIsNone) {
  Completion c = Example();
  v1::PositionLogProbs position;
  position.mutable_chosen()->set_token(5);
  position.mutable_chosen()->set_log_prob(-0.123456789f);
  position.add_top()->set_token(8);
  position.mutable_top(0)->set_log_prob(-std::numeric_limits<float>::infinity());
  c.logprobs = {position};
  EXPECT_EQ(CompletionJson(c)["logprobs"].dump(),
            R"([{"token":5,"log_prob":-0.12345679,"top":[{"token":8,"log_prob":null}]}])");
}

TEST(FinishReasonNameTest, EveryReason) {
  EXPECT_EQ(FinishReasonName(v1::FINISH_STOP), "stop");
  EXPECT_EQ(FinishReasonName(v1::FINISH_LENGTH), "length");
  EXPECT_EQ(FinishReasonName(v1::FINISH_CANCELLED), "cancelled");
  EXPECT_EQ(FinishReasonName(v1::FINISH_DEADLINE), "deadline");
}

TEST(StateJsonTest, HasEveryPart) {
  v1::ClusterState state;
  state.mutable_router()->set_ready(true);
  state.mutable_router()->set_epoch(255);
  auto* verifier = state.add_verifiers();
  verifier->set_address("127.0.0.1:1");
  verifier->mutable_info()->mutable_pool()->set_free_pages(7);
  auto* cost = verifier->mutable_info()->add_cost();
  cost->set_rows(9);
  cost->set_microseconds(1.1f);
  auto* drafter = state.add_drafters();
  drafter->set_speculating(true);
  state.mutable_speculation()->set_acceptance_length(3.5);
  ClusterRecord record;
  record.processes = {{"router", "127.0.0.1:2", 44, "r.log"}};
  const json out = StateJson(state, record);
  EXPECT_EQ(out["router"]["ready"], true);
  EXPECT_EQ(out["router"]["epoch"], "00000000000000ff");
  EXPECT_EQ(out["verifiers"][0]["address"], "127.0.0.1:1");
  EXPECT_EQ(out["verifiers"][0]["pool"]["free_pages"], 7);
  EXPECT_EQ(out["verifiers"][0]["cost"], json::parse(R"([{"rows": 9, "us": 1.1}])"));
  EXPECT_EQ(out["drafters"][0]["speculating"], true);
  EXPECT_EQ(out["speculation"]["acceptance_length"], 3.5);
  EXPECT_EQ(
      out["processes"],
      json::parse(R"([{"role": "router", "address": "127.0.0.1:2", "pid": 44, "log": "r.log"}])"));
}

}  // namespace
}  // namespace coppice::cli
