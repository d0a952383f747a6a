#include "services/router/request.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace coppice::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

RequestLimits Limits() {
  RequestLimits limits;
  limits.vocab_size = 1000;
  limits.max_position_embeddings = 100;
  limits.eos_token_ids = {7, 9};
  return limits;
}

RequestFields Good() {
  RequestFields fields;
  fields.prompt = {1, 2, 3};
  return fields;
}

absl::StatusOr<Request> Check(const RequestFields& fields, const RequestLimits& limits = Limits()) {
  return CheckRequest(fields, limits, [] { return uint64_t{0xabc}; });
}

// The sentence that a request with this change is refused with.
template <typename Change>
std::string Refusal(Change change, RequestLimits limits = Limits()) {
  RequestFields fields = Good();
  change(fields);
  const absl::StatusOr<Request> checked = Check(fields, limits);
  EXPECT_EQ(checked.status().code(), absl::StatusCode::kInvalidArgument) << checked.status();
  return std::string(checked.status().message());
}

TEST(CheckRequestTest, Defaults) {
  const Request request = Check(Good()).value();
  EXPECT_EQ(request.id, "req-0000000000000abc");
  EXPECT_EQ(request.max_tokens, 97);
  EXPECT_EQ(request.temperature, 0);
  EXPECT_EQ(request.top_p, 1);
  EXPECT_EQ(request.seed, 0xabcu);
  EXPECT_EQ(request.speculation, Speculation::kAuto);
  EXPECT_EQ(request.tree_nodes, 17);
  EXPECT_THAT(request.stop_token_ids, ElementsAre(7, 9));
  EXPECT_FALSE(request.logprobs.has_value());
}

TEST(CheckRequestTest, SamplingRules) {
  const Request plain = Check(Good()).value();
  EXPECT_FALSE(plain.rules.penalises());
  EXPECT_TRUE(plain.rules.logit_bias.empty());
  EXPECT_EQ(plain.rules.min_tokens, 0);
  EXPECT_EQ(plain.min_p, 0);
  RequestFields fields = Good();
  fields.min_p = 0.1f;
  fields.repetition_penalty = 1.2f;
  fields.frequency_penalty = -0.5f;
  fields.presence_penalty = 2;
  fields.logit_bias = {{999, -100.0f}, {0, 3.5f}};
  fields.min_tokens = 97;
  const Request request = Check(fields).value();
  EXPECT_EQ(request.min_p, 0.1f);
  EXPECT_EQ(request.rules.repetition_penalty, 1.2f);
  EXPECT_EQ(request.rules.frequency_penalty, -0.5f);
  EXPECT_EQ(request.rules.presence_penalty, 2);
  EXPECT_THAT(request.rules.logit_bias, ElementsAre(std::pair(999, -100.0f), std::pair(0, 3.5f)));
  EXPECT_EQ(request.rules.min_tokens, 97);

  EXPECT_THAT(Refusal([](auto& f) { f.min_p = 1.5f; }), HasSubstr("min_p is 1.5"));
  EXPECT_THAT(Refusal([](auto& f) { f.repetition_penalty = 0; }),
              HasSubstr("repetition_penalty is 0"));
  EXPECT_THAT(Refusal([](auto& f) { f.frequency_penalty = 3; }),
              HasSubstr("frequency_penalty is 3"));
  EXPECT_THAT(Refusal([](auto& f) { f.presence_penalty = -3; }),
              HasSubstr("presence_penalty is -3"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.logit_bias = {{1000, 1.0f}};
              }),
              HasSubstr("logit_bias names the id 1000; the model's ids go from 0 to 999"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.logit_bias = {{4294967295u, 1.0f}};
              }),
              HasSubstr("logit_bias names the id 4294967295"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.max_tokens = 5;
                f.min_tokens = 6;
              }),
              HasSubstr("min_tokens is 6, more than max_tokens (5)"));
  EXPECT_THAT(Refusal([](auto& f) { f.prompt_logprobs = 0; }), HasSubstr("prompt_logprobs is set"));
}

TEST(CheckRequestTest, TakesWhatIsAsked) {
  RequestFields fields = Good();
  fields.request_id = "mine";
  fields.max_tokens = 97;
  fields.temperature = 0.8f;
  fields.top_p = 0.5f;
  fields.top_k = 5000;
  fields.seed = 0;
  fields.stop_token_ids = {9, 8};
  fields.logprobs = 0;
  fields.speculation = 4;
  fields.tree_nodes = 64;
  fields.priority = -3;
  Request request = Check(fields).value();
  EXPECT_EQ(request.id, "mine");
  EXPECT_EQ(request.top_k, 1000);  // more is no restriction
  EXPECT_EQ(request.seed, 0u);
  EXPECT_THAT(request.stop_token_ids, ElementsAre(7, 8, 9));
  EXPECT_EQ(request.logprobs, 0);
  EXPECT_EQ(request.speculation, Speculation::kTree);
  EXPECT_EQ(request.tree_nodes, 64);
  fields.ignore_eos = true;
  EXPECT_THAT(Check(fields).value().stop_token_ids, ElementsAre(8, 9));
  fields.resume.emplace();
  fields.resume->seed = 0;
  fields.resume->token_ids = {4, 5};
  request = Check(fields).value();
  EXPECT_TRUE(request.resumed);
  EXPECT_THAT(request.received, ElementsAre(4, 5));
}

TEST(CheckRequestTest, EveryRefusalNamesTheFieldAndWhatWouldDo) {
  EXPECT_THAT(Refusal([](auto& f) { f.prompt.clear(); }), HasSubstr("prompt is empty"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.prompt = {1, 1000};
              }),
              HasSubstr("token_ids[1] is 1000; the model's ids go from 0 to 999"));
  EXPECT_THAT(Refusal([](auto& f) { f.prompt = {0xffffffff}; }),
              HasSubstr("token_ids[0] is 4294967295"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.stop_token_ids = {1, 2, 1001};
              }),
              HasSubstr("stop_token_ids[2] is 1001"));
  EXPECT_THAT(Refusal([](auto& f) { f.stop_token_ids.assign(257, 1); }),
              HasSubstr("stop_token_ids has 257 ids; at most 256"));
  EXPECT_THAT(Refusal([](auto& f) { f.request_id = std::string(129, 'x'); }),
              HasSubstr("request_id has 129 bytes"));
  EXPECT_THAT(Refusal([](auto& f) { f.max_tokens = 0; }), HasSubstr("max_tokens is 0"));
  EXPECT_THAT(Refusal([](auto& f) { f.max_tokens = 98; }),
              HasSubstr("prompt (3 tokens) + max_tokens (98) exceed the model's limit of 100; "
                        "max_tokens can be at most 97"));
  EXPECT_THAT(Refusal([](auto& f) { f.prompt.assign(100, 1); }),
              HasSubstr("the prompt has 100 tokens; the model's limit is 100"));
  EXPECT_THAT(Refusal([](auto& f) { f.temperature = -0.1f; }), HasSubstr("temperature is -0.1"));
  EXPECT_THAT(Refusal([](auto& f) { f.temperature = std::nanf(""); }),
              HasSubstr("temperature is nan"));
  EXPECT_THAT(Refusal([](auto& f) { f.temperature = std::numeric_limits<float>::infinity(); }),
              HasSubstr("temperature is inf"));
  for (float top_p : {0.0f, -1.0f, 1.5f, std::nanf("")}) {
    EXPECT_THAT(Refusal([&](auto& f) { f.top_p = top_p; }), HasSubstr("top_p is"));
  }
  EXPECT_THAT(Refusal([](auto& f) { f.logprobs = 21; }), HasSubstr("logprobs is 21; at most 20"));
  for (int mode : {-1, 5, 99}) {
    EXPECT_THAT(Refusal([&](auto& f) { f.speculation = mode; }), HasSubstr("speculation is"));
  }
  for (uint32_t nodes : {0u, 65u, 0xffffffffu}) {
    EXPECT_THAT(Refusal([&](auto& f) { f.tree_nodes = nodes; }),
                HasSubstr("a tree has 1 to 64 nodes"));
  }
  EXPECT_THAT(Refusal([](auto& f) {
                f.resume = {1, {1, 2000}};
              }),
              HasSubstr("resume.token_ids[1] is 2000"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.resume = {1, {}};
                f.seed = 2;
              }),
              HasSubstr("resume.seed is 1 but seed is 2"));
  EXPECT_THAT(Refusal([](auto& f) {
                f.resume = {1, {1, 2, 3}};
                f.max_tokens = 2;
              }),
              HasSubstr("resume.token_ids has 3 ids, more than max_tokens (2)"));
}

TEST(CheckRequestTest, ARequestThatCanNeverFitIsRefused) {
  RequestLimits limits = Limits();
  limits.pool_tokens = 90;
  EXPECT_THAT(Refusal([](auto& f) { f.max_tokens = 24; }, limits),
              HasSubstr("can never fit the verifier's pool of 90 tokens"));
  RequestFields fields = Good();
  fields.max_tokens = 23;
  EXPECT_TRUE(Check(fields, limits).ok());
  // Without max_tokens it gets what the pool leaves.
  EXPECT_EQ(Check(Good(), limits)->max_tokens, 23);
  limits.pool_tokens = 60;
  EXPECT_THAT(Refusal([](auto&) {}, limits), HasSubstr("never fit"));
}

}  // namespace
}  // namespace coppice::router
