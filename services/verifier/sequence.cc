#include "services/verifier/sequence.h"

#include "absl/strings/str_cat.h"

namespace coppice::verifier {
namespace {

absl::Status CheckTokens(const char* what, const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    // Ids are unsigned on the wire.
    const uint32_t id = static_cast<uint32_t>(tokens[i]);
    if (static_cast<int64_t>(id) >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, " ", i, " is id ", id, ", which is not below the vocabulary's size, ", vocab_size));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAdmit(const Admit& admit, const Limits& limits) {
  if (admit.tokens.empty()) {
    return absl::InvalidArgumentError("the prompt is empty; at least one token is needed");
  }
  if (absl::Status s = CheckTokens("prompt token", admit.tokens, limits.vocab_size); !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckTokens("stop token", admit.stop_token_ids, limits.vocab_size);
      !s.ok()) {
    return s;
  }
  if (absl::Status s = Validate(admit.sampling, limits.vocab_size); !s.ok()) return s;
  if (admit.generated < 0 || admit.generated >= static_cast<int64_t>(admit.tokens.size())) {
    return absl::InvalidArgumentError(absl::StrCat("generated is ", admit.generated, " of ",
                                                   admit.tokens.size(),
                                                   " tokens; at least one belongs to the prompt"));
  }
  const int64_t prompt = static_cast<int64_t>(admit.tokens.size());
  if (admit.max_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens is ", admit.max_tokens, "; at least 1 is needed"));
  }
  if (prompt + admit.max_tokens > limits.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt (", prompt, " tokens) and max_tokens (", admit.max_tokens,
                     ") together are ", prompt + admit.max_tokens, ", more than the model's ",
                     limits.max_position_embeddings, " positions"));
  }
  if (admit.logprobs && (*admit.logprobs < 0 || *admit.logprobs > kMaxLogProbs)) {
    return absl::InvalidArgumentError(
        absl::StrCat("logprobs is ", *admit.logprobs, "; it can be 0 to ", kMaxLogProbs));
  }
  // The last token never gets a slot.
  const int64_t needed = PagesFor(prompt + admit.max_tokens - 1, limits.page_size);
  if (needed > limits.pages) {
    return absl::ResourceExhaustedError(
        absl::StrCat("prompt and max_tokens need ", needed, " pages of ", limits.page_size,
                     " tokens, and the whole pool has ", limits.pages,
                     "; shorten the request or start the verifier with more --pool-tokens"));
  }
  return absl::OkStatus();
}

absl::StatusOr<speculation::DraftTree> CheckWork(const Work& work, const Sequence& sequence,
                                                 const Limits& limits) {
  if (work.prefill > 0 && !work.tokens.empty()) {
    return absl::InvalidArgumentError("work is either prefill or a draft tree, not both");
  }
  if (sequence.ended) {
    return absl::InvalidArgumentError("the sequence has ended and takes no more work; release it");
  }
  if (work.prefill > 0) {
    if (work.prefill > sequence.prompt_left()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prefill of ", work.prefill, " tokens from position ", work.base_len,
                       " passes the end of the ", sequence.admit.tokens.size(), " admitted ones"));
    }
    return speculation::DraftTree{};
  }
  if (work.tokens.empty()) {
    return absl::InvalidArgumentError("work is empty: neither prefill nor a draft tree");
  }
  if (sequence.pending < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a draft tree came before the prefill's end: ", sequence.prompt_left(),
                     " admitted tokens are still to be prefilled"));
  }
  if (absl::Status s = CheckTokens("draft token", work.tokens, limits.vocab_size); !s.ok()) {
    return s;
  }
  speculation::DraftTree tree;
  tree.token = work.tokens;
  tree.parent = work.parents;
  tree.depth.resize(tree.token.size());
  // Depths follow from parents; a parent out of order is left for Validate to name.
  for (size_t i = 1; i < tree.depth.size() && i < tree.parent.size(); ++i) {
    const int32_t parent = tree.parent[i];
    if (parent >= 0 && parent < static_cast<int32_t>(i)) tree.depth[i] = tree.depth[parent] + 1;
  }
  if (absl::Status s = speculation::Validate(tree); !s.ok()) return s;
  if (tree.token[0] != sequence.pending) {
    return absl::InvalidArgumentError(absl::StrCat("the tree's root is token ", tree.token[0],
                                                   ", but the pending token at position ",
                                                   sequence.committed, " is ", sequence.pending));
  }
  for (int i = 0; i < tree.nodes(); ++i) {
    if (sequence.committed + tree.depth[i] >= limits.max_position_embeddings) {
      return absl::InvalidArgumentError(
          absl::StrCat("node ", i, " stands at position ", sequence.committed + tree.depth[i],
                       ", beyond the model's ", limits.max_position_embeddings, " positions"));
    }
  }
  return tree;
}

}  // namespace coppice::verifier
