// Every sampling option through the whole cluster, singly and in random combinations: off, chain
// and trees give the same ids, text, log-probabilities and reason to finish, to the bit.
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/cluster.h"

namespace coppice::testing {
namespace {

using v1::GenerateRequest;

struct Option {
  const char* name;
  void (*set)(GenerateRequest* request);
};

const Option kOptions[] = {
    {"temperature", [](GenerateRequest* r) { r->set_temperature(0.9f); }},
    {"top_k", [](GenerateRequest* r) { r->set_top_k(20); }},
    {"top_p", [](GenerateRequest* r) { r->set_top_p(0.9f); }},
    {"min_p", [](GenerateRequest* r) { r->set_min_p(0.02f); }},
    {"repetition_penalty", [](GenerateRequest* r) { r->set_repetition_penalty(1.2f); }},
    {"frequency_penalty", [](GenerateRequest* r) { r->set_frequency_penalty(0.4f); }},
    {"presence_penalty", [](GenerateRequest* r) { r->set_presence_penalty(-0.3f); }},
    {"logit_bias",
     [](GenerateRequest* r) {
       for (const auto& [token, bias] : {std::pair(32u, -100.f), {40u, 2.f}, {709u, 3.f}}) {
         v1::LogitBias* entry = r->add_logit_bias();
         entry->set_token(token);
         entry->set_bias(bias);
       }
     }},
    {"min_tokens", [](GenerateRequest* r) { r->set_min_tokens(17); }},
    {"ignore_eos", [](GenerateRequest* r) { r->set_ignore_eos(true); }},
    {"stop",
     [](GenerateRequest* r) {
       r->add_stop(". ");
       r->add_stop("\n");
       r->add_stop("e t");
     }},
    {"stop_token_ids",
     [](GenerateRequest* r) {
       for (const uint32_t id : {45u, 58u, 300u}) r->add_stop_token_ids(id);
     }},
    {"logprobs", [](GenerateRequest* r) { r->set_logprobs(20); }},
    {"max_tokens", [](GenerateRequest* r) { r->set_max_tokens(23); }},
};

struct Told {
  Generation generation;
  std::string logprobs;  // serialised
};

Told Ask(const Cluster& cluster, const GenerateRequest& request) {
  Told told;
  told.generation = cluster.Generate(request, 0, [&](const v1::GenerateDelta& delta) {
    for (const v1::PositionLogProbs& position : delta.logprobs()) {
      told.logprobs += position.SerializeAsString() + "\n";
    }
    return true;
  });
  return told;
}

TEST(Options, AreLosslessSinglyAndTogether) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start());
  const std::vector<DemoPrompt> prompts = SpreadPrompts(12);
  constexpr size_t kCount = std::size(kOptions);
  std::vector<std::vector<size_t>> chosen = {{}};
  for (size_t i = 0; i < kCount; ++i) chosen.push_back({i});
  std::mt19937 random(11);
  for (int i = 0; i < 40; ++i) {
    std::vector<size_t>& some = chosen.emplace_back();
    for (size_t j = 0; j < kCount; ++j) {
      if (random() % 2 == 0) some.push_back(j);
    }
  }
  uint64_t accepted = 0;
  std::set<int> reasons;
  size_t next = 0;
  for (const std::vector<size_t>& options : chosen) {
    GenerateRequest request;
    const DemoPrompt& prompt = prompts[next++ % prompts.size()];
    request.mutable_token_ids()->mutable_ids()->Add(prompt.ids.begin(), prompt.ids.end());
    request.set_max_tokens(48);
    request.set_seed(next);
    std::string name = prompt.category + ":";
    for (const size_t i : options) {
      kOptions[i].set(&request);
      name += std::string(" ") + kOptions[i].name;
    }
    SCOPED_TRACE(name);
    request.set_speculation(v1::SPECULATION_OFF);
    const Told off = Ask(cluster, request);
    ASSERT_TRUE(off.generation.status.ok()) << off.generation.status.error_message();
    EXPECT_EQ(off.generation.contract_error, "");
    reasons.insert(off.generation.final.finish_reason());
    for (const uint32_t nodes : {0, 9, 33}) {
      request.set_speculation(nodes == 0 ? v1::SPECULATION_CHAIN : v1::SPECULATION_TREE);
      if (nodes > 0) request.set_tree_nodes(nodes);
      const Told drafted = Ask(cluster, request);
      EXPECT_EQ(drafted.generation.ids, off.generation.ids) << nodes;
      EXPECT_EQ(drafted.generation.text, off.generation.text) << nodes;
      EXPECT_EQ(drafted.logprobs, off.logprobs) << nodes;
      EXPECT_EQ(drafted.generation.final.finish_reason(), off.generation.final.finish_reason());
      EXPECT_EQ(drafted.generation.final.stop_matched(), off.generation.final.stop_matched());
      accepted += drafted.generation.final.speculation().accepted();
    }
    // Resumed in the middle: what was received counts as generated.
    const size_t half = off.generation.ids.size() / 2;
    if (half == 0 || off.generation.ids.size() < 4) continue;
    request.mutable_resume()->set_seed(next);
    for (size_t i = 0; i < half; ++i) {
      request.mutable_resume()->add_token_ids(off.generation.ids[i]);
    }
    const Generation resumed = cluster.Generate(request);
    ASSERT_TRUE(resumed.status.ok()) << resumed.status.error_message();
    EXPECT_EQ(resumed.ids,
              std::vector<uint32_t>(off.generation.ids.begin() + half, off.generation.ids.end()));
  }
  // A grid in which nothing was accepted, or all ended alike, would show little.
  EXPECT_GT(accepted, 500u);
  EXPECT_EQ(reasons, (std::set<int>{v1::FINISH_STOP, v1::FINISH_LENGTH}));
}

}  // namespace
}  // namespace coppice::testing
