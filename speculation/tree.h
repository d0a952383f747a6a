// Draft trees as plain values, and what verification needs of them.
//
// A tree's node 0 is its root: the pending ("bonus") token, known but not yet in the target's
// cache.  Nodes are counted with the root.  A parent always comes before its children, so ancestor
// words can be built, and accepted rows compacted, in one forward pass.  A chain and a root-only
// tree are ordinary trees.
#ifndef COPPICE_SPECULATION_TREE_H_
#define COPPICE_SPECULATION_TREE_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace coppice::speculation {

// One ancestor word holds a whole tree.
inline constexpr int kMaxNodes = 64;

struct DraftTree {
  std::vector<int32_t> token;   // [nodes]
  std::vector<int32_t> parent;  // [nodes]; -1 for the root, else < the node's own index
  std::vector<int32_t> depth;   // [nodes]; 0 for the root

  int nodes() const { return static_cast<int>(token.size()); }
};

// The tree of the pending token alone: a plain decoding step.
DraftTree RootOnly(int32_t root_token);

// INVALID_ARGUMENT, naming the node, unless: 1 … kMaxNodes nodes, parents precede children, depths
// follow from parents, siblings' tokens differ.
absl::Status Validate(const DraftTree& tree);

// words[i] has bit j set iff node j is node i or one of its ancestors.  O(nodes).
std::vector<uint64_t> AncestorWords(const DraftTree& tree);

struct WalkResult {
  std::vector<int32_t> path;  // accepted nodes, root first; strictly increasing, path[r] >= r
  std::vector<int32_t>
      tokens;  // one drawn per visited node: the accepted drafts' tokens, then the bonus
};

// Sample-and-walk: at each visited node the target draws its token; the walk descends to the child
// that carries it and ends where there is none.  Lossless for any way of drawing, because every
// draw is the target's own, given a true prefix.  `choose(node)` is called once per visited node,
// in order.  Stops, before drawing another token, as soon as `choose` returned a token for which
// `stop(token, drawn_so_far)` is true: that token is then last, and the path holds the nodes whose
// cache rows precede it.
WalkResult Walk(const DraftTree& tree, absl::FunctionRef<int32_t(int node)> choose,
                absl::FunctionRef<bool(int32_t token, int drawn)> stop);

}  // namespace coppice::speculation

#endif  // COPPICE_SPECULATION_TREE_H_
