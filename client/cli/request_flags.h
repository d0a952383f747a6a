// The flags that shape a generation, shared by `generate` and `chat`.
#ifndef COPPICE_CLIENT_CLI_REQUEST_FLAGS_H_
#define COPPICE_CLIENT_CLI_REQUEST_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coppice/v1/inference.pb.h"
#include "services/common/flags.h"

namespace coppice::cli {

class RequestFlags {
 public:
  void AddTo(FlagParser* flags, CLI::App* command);
  // Everything but the prompt.  Call after parsing.
  v1::GenerateRequest Request() const;

 private:
  uint32_t max_tokens_ = 256;
  double temperature_ = 0;
  double top_p_ = 1;
  uint32_t top_k_ = 0;
  double min_p_ = 0;
  double repetition_penalty_ = 1;
  double frequency_penalty_ = 0;
  double presence_penalty_ = 0;
  std::vector<std::string> logit_bias_;  // ID=BIAS
  uint32_t min_tokens_ = 0;
  uint64_t seed_ = 0;
  std::vector<std::string> stop_;
  std::vector<uint32_t> stop_ids_;
  bool ignore_eos_ = false;
  uint32_t logprobs_ = 0;
  std::string speculation_;  // empty: as the router's --speculation says
  uint32_t tree_nodes_ = 17;
  int32_t priority_ = 0;
  CLI::Option* seed_option_ = nullptr;
  CLI::Option* logprobs_option_ = nullptr;
  CLI::Option* tree_nodes_option_ = nullptr;
};

// A conversation from JSON text: an array of messages {role, content, name?, reasoning?,
// tool_calls?, tool_call_id?}, content being text or a list of parts {type, text}, or an object
// {messages, tools?, thinking?, preserve_thinking?}. `what` names the text in errors.
absl::StatusOr<v1::Chat> ParseChat(const std::string& text, const std::string& what);

}  // namespace coppice::cli

#endif  // COPPICE_CLIENT_CLI_REQUEST_FLAGS_H_
