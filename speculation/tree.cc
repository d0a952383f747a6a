#include "speculation/tree.h"

#include "absl/strings/str_cat.h"

namespace coppice::speculation {

DraftTree RootOnly(int32_t root_token) {
  DraftTree tree;
  tree.token = {root_token};
  tree.parent = {-1};
  tree.depth = {0};
  return tree;
}

absl::Status Validate(const DraftTree& tree) {
  const size_t nodes = tree.token.size();
  if (tree.parent.size() != nodes || tree.depth.size() != nodes) {
    return absl::InvalidArgumentError(absl::StrCat("a draft tree needs as many parents (",
                                                   tree.parent.size(), ") and depths (",
                                                   tree.depth.size(), ") as tokens (", nodes, ")"));
  }
  if (nodes < 1 || nodes > static_cast<size_t>(kMaxNodes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a draft tree has 1 to ", kMaxNodes, " nodes, the root included; this one has ", nodes));
  }
  if (tree.parent[0] != -1 || tree.depth[0] != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("node 0 is the root: its parent is -1 and its depth 0, not ", tree.parent[0],
                     " and ", tree.depth[0]));
  }
  for (int i = 1; i < static_cast<int>(nodes); ++i) {
    const int32_t parent = tree.parent[i];
    if (parent < 0 || parent >= i) {
      return absl::InvalidArgumentError(absl::StrCat("node ", i, "'s parent is ", parent,
                                                     "; parents precede their children (0 to ",
                                                     i - 1, ")"));
    }
    if (tree.depth[i] != tree.depth[parent] + 1) {
      return absl::InvalidArgumentError(absl::StrCat("node ", i, "'s depth is ", tree.depth[i],
                                                     "; its parent's is ", tree.depth[parent]));
    }
    for (int j = 1; j < i; ++j) {
      if (tree.parent[j] == parent && tree.token[j] == tree.token[i]) {
        return absl::InvalidArgumentError(absl::StrCat("nodes ", j, " and ", i,
                                                       " are siblings (of ", parent,
                                                       ") with the same token ", tree.token[i]));
      }
    }
  }
  return absl::OkStatus();
}

std::vector<uint64_t> AncestorWords(const DraftTree& tree) {
  const int nodes = tree.nodes();
  std::vector<uint64_t> words(nodes);
  for (int i = 0; i < nodes; ++i) {
    const int32_t parent = tree.parent[i];
    words[i] = (parent < 0 ? 0 : words[parent]) | uint64_t{1} << i;
  }
  return words;
}

WalkResult Walk(const DraftTree& tree, absl::FunctionRef<int32_t(int node)> choose,
                absl::FunctionRef<bool(int32_t token, int drawn)> stop) {
  WalkResult result;
  const int nodes = tree.nodes();
  int node = 0;
  while (true) {
    result.path.push_back(node);
    const int32_t token = choose(node);
    result.tokens.push_back(token);
    if (stop(token, static_cast<int>(result.tokens.size()))) break;
    int child = node + 1;
    while (child < nodes && (tree.parent[child] != node || tree.token[child] != token)) ++child;
    if (child == nodes) break;
    node = child;
  }
  return result;
}

}  // namespace coppice::speculation
