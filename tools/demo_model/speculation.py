"""Draft trees over a drafted block, and the rounds of tree speculation played out on known tokens.

DDTree (arXiv 2604.12989) takes the most probable prefixes of independent distributions, best first. Here the argmax
spine comes first and the rest of the budget grows best-first, so that a tree never accepts less than the chain."""

import heapq


def grow(log_probs, budget):
    """The tree of `budget` nodes below the root. log_probs[d][r] is the log-probability of the r-th best token at
    depth d + 1. Returns nodes in the order added, as (parent, depth, rank); node 0 is the root (-1, 0, -1).
    Equal scores: the smaller depth, then the smaller rank, then the one offered first."""
    nodes, frontier, offered = [(-1, 0, -1)], [], 0

    def offer(parent, depth, rank, base):
        nonlocal offered
        if depth <= len(log_probs) and rank < len(log_probs[depth - 1]):
            heapq.heappush(frontier, (-(base + log_probs[depth - 1][rank]), depth, rank, offered, parent, base))
            offered += 1

    base = 0.0
    for depth in range(1, min(budget, len(log_probs)) + 1):
        nodes.append((depth - 1, depth, 0))
        offer(depth - 1, depth, 1, base)
        base += log_probs[depth - 1][0]
    while frontier and len(nodes) <= budget:
        score, depth, rank, _, parent, base = heapq.heappop(frontier)
        nodes.append((parent, depth, rank))
        offer(parent, depth, rank + 1, base)
        offer(len(nodes) - 1, depth + 1, 0, -score)
    return nodes


def accepted(nodes, candidates, truth):
    """How many tokens of `truth` (the target's next tokens) a walk from the root finds; candidates[d][r] are ids."""
    children = {(parent, candidates[depth - 1][rank]): node
                for node, (parent, depth, rank) in enumerate(nodes) if depth}
    node, found = 0, 0
    for token in truth:
        node = children.get((node, token))
        if node is None:
            break
        found += 1
    return found


def rounds(tokens, first, draft, budget, shape):
    """Plays speculation on known tokens: tokens[first] is the token that prefill gave. `draft(p)` is the block drafted
    behind position p as (candidates, log_probs). Returns the drafted tokens committed in each round; a round commits
    one more, but for the last one, which is cut at the end of `tokens`. `shape` is "chain" or "tree"."""
    position, out = first, []
    while position < len(tokens) - 1:
        candidates, log_probs = draft(position)
        nodes = grow(log_probs, len(log_probs) if shape == "chain" else budget)
        found = accepted(nodes, candidates, tokens[position + 1:position + 1 + len(candidates)])
        out.append(found)
        position += found + 1
    return out
