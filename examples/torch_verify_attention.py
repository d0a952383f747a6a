#!/usr/bin/env python3
"""The verify-attention kernel as an engine's attention backend would use it: on torch tensors, inside a captured CUDA graph.

Two requests draft trees against a paged latent cache; one graph of a whole step (schedule, then every layer) is captured
once and replayed at other lengths and other trees, and each result is compared with the same attention in plain torch.

    python3 examples/torch_verify_attention.py [--library build/release/kernels/cuda/libcoppice_mla_verify.so]

Needs torch with CUDA and a GPU of sm_90 or sm_120.
"""

import argparse
import pathlib
import random
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "kernels" / "cuda"))
import mla_verify  # noqa: E402

BATCH, NODES, HEADS, PAGE, LAYERS, LONGEST = 2, 9, 8, 64, 4, 20000
SCALE = 192**-0.5  # what MLA scales by: the width of an expanded key, 128 + 64


def random_tree(nodes):
    """One word per node: bit j set where node j is the node itself or an ancestor."""
    words = [1]
    for i in range(1, nodes):
        words.append(words[random.randrange(i)] | 1 << i)
    return [w - (1 << 64) if w >> 63 else w for w in words]  # torch has no unsigned 64-bit tensors


def torch_attention(query, cache, table, context, words):
    """The same attention of one request in fp32: every visible row gathered, one softmax."""
    nodes = len(words)
    positions = torch.arange(context + nodes, device="cuda")
    rows = cache[table[positions // PAGE].long(), positions % PAGE].float()  # [positions, 576]
    scores = torch.einsum("nhd,td->nht", query[:nodes].float(), rows) * SCALE
    for i, word in enumerate(words):
        for j in range(nodes):
            if not word >> j & 1:
                scores[i, :, context + j] = float("-inf")
    return torch.softmax(scores, dim=-1) @ rows[:, :512]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default=str(ROOT / "build/release/kernels/cuda/libcoppice_mla_verify.so"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    torch.backends.cuda.matmul.allow_tf32 = False
    random.seed(1)
    torch.manual_seed(1)

    # Static tensors: a graph remembers addresses, so an engine allocates these once per captured shape.
    entries = (LONGEST + NODES + PAGE - 1) // PAGE
    pages = BATCH * entries + 1
    table = (torch.randperm(pages - 1, device="cuda")[: BATCH * entries] + 1).int().view(BATCH, entries).contiguous()
    caches = [torch.randn(pages, PAGE, 576, device="cuda").bfloat16() for _ in range(LAYERS)]
    queries = [torch.randn(BATCH, NODES, HEADS, 576, device="cuda").bfloat16() for _ in range(LAYERS)]
    outputs = [torch.empty(BATCH, NODES, HEADS, 512, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    lse = torch.empty(BATCH, NODES, HEADS, device="cuda")
    contexts = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
    counts = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
    words = torch.zeros(BATCH, NODES, dtype=torch.int64, device="cuda")

    plan = mla_verify.MlaVerify(options.library).plan(
        batch=BATCH, nodes=NODES, heads=HEADS, page_size=PAGE, softmax_scale=SCALE)
    bound = [plan.bind(queries[i], caches[i], table, contexts, counts, words, outputs[i], lse) for i in range(LAYERS)]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captured at lengths of zero, right at every other
        plan.schedule(bound[0])
        for tensors in bound:
            plan.run(tensors)

    worst = 0.0
    for step_contexts, step_nodes in (((17, 4000), (9, 9)), ((20000, 0), (9, 1)), ((12345, 63), (4, 0))):
        trees = [random_tree(NODES) for _ in range(BATCH)]
        contexts.copy_(torch.tensor(step_contexts, dtype=torch.int32))
        counts.copy_(torch.tensor(step_nodes, dtype=torch.int32))
        words.copy_(torch.tensor(trees))
        plan.check(bound[0], pages)  # what the kernels trust; an engine calls it in tests only
        graph.replay()
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            for b in range(BATCH):
                n = step_nodes[b]
                if n == 0:
                    continue
                want = torch_attention(queries[layer][b], caches[layer], table[b], step_contexts[b], trees[b][:n])
                got = outputs[layer][b, :n].float()
                worst = max(worst, ((got - want).norm() / want.norm()).item())
        print(f"contexts {step_contexts} nodes {step_nodes}: relative error so far at most {worst:.1e}")
    if not worst < 3e-3:
        sys.exit(f"the kernel and torch disagree: {worst}")
    print("the captured step agrees with torch at every length")


if __name__ == "__main__":
    main()
