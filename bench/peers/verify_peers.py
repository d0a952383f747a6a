#!/usr/bin/env python3
"""Other engines' attention on the verify kernel's shapes, and ours beside it, on one GPU in one process.

    pip install --no-deps --target PEERS sglang==0.5.23 vllm==0.33.0     # read for the run, never part of this repository
    python3 bench/peers/verify_peers.py --peers PEERS --library .../libcoppice_mla_verify.so [--record RECORD.json]

What runs:
  sglang_extend   SGLang's Triton extend_attention_fwd with a custom mask: what its tree verify runs.  The tree, exactly.
  sglang_decode   SGLang's Triton decode_attention_fwd, each node a request of its own whose token list is the prefix and the
                  node's ancestors.  The tree, exactly; the cache is read once a node.  Best of splits × block × stages.
  vllm_decode     vLLM's Triton MLA decode, likewise with a block table (page 1) per node.  Best of its split counts.
  flashinfer_*    FlashInfer's MLA wrapper (page 64), where flashinfer can be imported, and
  flashmla        FlashMLA's dense decode (page 64), where flash_mla can be imported.  They take no mask, so the nodes are
                  verified as a chain, and, where SGLang is there, as context + tail (SGLang's extend) + merge, which is the
                  tree exactly.  The rows say which.

Only the Triton sources of SGLang and vLLM are imported; what they ask of the rest of their packages (platform queries) is
answered here.  Every result is compared with the formula in fp64.  Times are per layer: a CUDA graph of layers whose caches
exceed four times the L2 together, median of 50 replays, exactly as for ours.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
import types

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEADS, SCALE = 8, 2.5 / 24
MERGED = "tree: context + tail + merge"


def time_layers(layers, run, before=None):
    """Median µs of one layer of a graph of `layers`."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if before is not None:
            before()
        for i in range(layers):
            run(i)
    times = []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for i in range(53):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / layers)
    return statistics.median(times)


class Problem:
    """A random tree over a random context, in page-1 slots; pages of 64 are runs of slots."""

    def __init__(self, nodes, context, chain=False, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.nodes, self.context = nodes, context
        self.length = context + nodes
        self.entries = (self.length + 63) // 64
        slots = self.entries * 64
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.caches_count = min(64, max(1, math.ceil(4 * l2 / (self.length * 1152))))
        self.layers = max(self.caches_count, 61 if context <= 16384 else 20)
        device = torch.Generator(device="cuda").manual_seed(seed)
        self.caches = [((torch.rand(slots, 576, device="cuda", generator=device) - 0.5) * 3.4641).bfloat16()
                       for _ in range(self.caches_count)]
        self.query = ((torch.rand(nodes, HEADS, 576, device="cuda", generator=device) - 0.5) * 3.4641).bfloat16()
        self.table64 = torch.randperm(self.entries, generator=generator).int().cuda()
        self.slots = torch.randperm(slots, generator=generator)[: self.length].int().cuda()  # page 1
        parents = [-1] + [i - 1 if chain else int(torch.randint(i, (1,), generator=generator)) for i in range(1, nodes)]
        self.words = []
        for i, parent in enumerate(parents):
            self.words.append((self.words[parent] if parent >= 0 else 0) | 1 << i)
        self.visible = torch.tensor([[w >> j & 1 for j in range(nodes)] for w in self.words], dtype=torch.bool)

    def cache(self, layer):
        return self.caches[layer % self.caches_count]

    def reference(self, page):
        """fp64 output [nodes, heads, 512] of cache 0."""
        positions = torch.arange(self.length, device="cuda")
        slots = self.slots.long() if page == 1 else self.table64[positions // 64].long() * 64 + positions % 64
        rows = self.caches[0][slots].double()
        scores = torch.einsum("nhd,td->nht", self.query.double(), rows) * SCALE
        scores[:, :, self.context:].masked_fill_(~self.visible.cuda()[:, None, :], float("-inf"))
        return torch.softmax(scores, dim=-1) @ rows[:, :512]


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


# ---------------------------------------------------------------------------------------------------------------------
# Ours.


def ours(library, problem, page, instance=0):
    sys.path.insert(0, str(ROOT / "kernels" / "cuda"))
    import mla_verify

    n = problem.nodes
    plan = mla_verify.MlaVerify(library).plan(batch=1, nodes=n, heads=HEADS, page_size=page, softmax_scale=SCALE,
                                              instance=instance)
    table = (problem.slots if page == 1 else problem.table64).view(1, -1).contiguous()
    words = torch.tensor([w - (1 << 64) if w >> 63 else w for w in problem.words], device="cuda").view(1, n)
    contexts = torch.tensor([problem.context], dtype=torch.int32, device="cuda")
    counts = torch.tensor([n], dtype=torch.int32, device="cuda")
    output = torch.empty(1, n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(1, n, HEADS, device="cuda")
    bound = [plan.bind(problem.query.view(1, n, HEADS, 576), cache.view(-1, page, 576), table, contexts, counts, words,
                       output, lse) for cache in problem.caches]
    plan.schedule(bound[0])
    plan.run(bound[0])
    error = relative_error(output[0], problem.reference(page))
    us = time_layers(problem.layers, lambda i: plan.run(bound[i % len(bound)]), lambda: plan.schedule(bound[0]))
    return us, error


# ---------------------------------------------------------------------------------------------------------------------
# Peers.


def module(name, **members):
    m = types.ModuleType(name)
    m.__dict__.update(members)
    m.__path__ = []
    sys.modules[name] = m


def import_sglang(site):
    """SGLang's two Triton files, without the package around them."""
    class Environment:
        def __getattr__(self, name):
            return types.SimpleNamespace(get=lambda: False)

    base = pathlib.Path(site) / "sglang" / "kernels"
    for name in ("sglang", "sglang.srt"):
        module(name)
    for name, path in (("sglang.kernels", base), ("sglang.kernels.ops", base / "ops"),
                       ("sglang.kernels.ops.attention", base / "ops" / "attention")):
        module(name)
        sys.modules[name].__path__ = [str(path)]
    module("sglang.srt.environ", envs=Environment())
    module("sglang.srt.utils", is_hip=lambda: False, is_cuda=lambda: True, is_gfx95_supported=lambda: False,
           is_gfx1250_supported=lambda: False,
           get_device_core_count=lambda i=0: torch.cuda.get_device_properties(i).multi_processor_count)
    import sglang.kernels.ops.attention.decode_attention as decode
    import sglang.kernels.ops.attention.extend_attention as extend
    return decode, extend


def import_vllm(site):
    import triton
    import triton.language as tl

    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        module(name)
    module("vllm.v1.attention.ops")
    sys.modules["vllm.v1.attention.ops"].__path__ = [str(pathlib.Path(site) / "vllm" / "v1" / "attention" / "ops")]
    module("vllm.platforms", current_platform=types.SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True))
    module("vllm.triton_utils", tl=tl, triton=triton)
    import vllm.v1.attention.ops.triton_decode_attention as decode
    return decode


class Tuned:
    """A Triton kernel whose launches get other block sizes and stages than its wrapper passes."""

    def __init__(self, kernel):
        self.kernel, self.overrides = kernel, {}

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*args, **{**kwargs, **self.overrides})


def sglang_extend(extend, problem):
    n, context = problem.nodes, problem.context
    own = problem.slots[context:].long()
    out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    qo = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    kv = torch.tensor([0, context], dtype=torch.int32, device="cuda")
    mask = torch.ones(n, context + n, dtype=torch.bool, device="cuda")
    mask[:, context:] = problem.visible.cuda()
    mask = mask.flatten()
    mask_indptr = torch.tensor([0, mask.numel()], dtype=torch.int64, device="cuda")
    indices = problem.slots[:context].contiguous()
    tails = [cache[own].view(n, 1, 576).contiguous() for cache in problem.caches]
    values = [tail[..., :512].contiguous() for tail in tails]

    def run(i):
        cache = problem.cache(i).view(-1, 1, 576)
        c = i % problem.caches_count
        extend.extend_attention_fwd(problem.query, tails[c], values[c], out, cache, cache[..., :512], qo, kv, indices, mask,
                                    True, mask_indptr, n, 1.0, 1.0, sm_scale=SCALE)

    run(0)
    error = relative_error(out, problem.reference(1))
    return time_layers(max(2, problem.caches_count), run), error, {}


def node_rows(problem):
    """Each node's visible slots."""
    rows = []
    for i in range(problem.nodes):
        keep = torch.cat([torch.ones(problem.context, dtype=torch.bool), problem.visible[i]])
        rows.append(problem.slots[keep.cuda()])
    return rows


def sglang_decode(decode, problem, quick):
    n = problem.nodes
    rows = node_rows(problem)
    indptr = torch.tensor([0] + [len(r) for r in rows], device="cuda").cumsum(0).int()
    indices = torch.cat(rows).contiguous()
    out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    want = problem.reference(1)
    if not isinstance(decode._fwd_grouped_kernel_stage1, Tuned):
        decode._fwd_grouped_kernel_stage1 = Tuned(decode._fwd_grouped_kernel_stage1)
    tuned = decode._fwd_grouped_kernel_stage1
    best = (math.inf, math.nan, {})
    blocks = ((32, 2), (64, 1)) if quick else ((32, 2), (32, 1), (16, 2), (64, 1), (64, 2))
    for block, stages in blocks:
        for splits in (8, 16, 32, 64, 128):
            logits = torch.empty(n, HEADS, splits, 512, device="cuda")
            lse = torch.empty(n, HEADS, splits, device="cuda")
            counts = torch.full((n,), splits, dtype=torch.int32, device="cuda")
            tuned.overrides = {"BLOCK_N": block, "num_stages": stages}

            def run(i):
                cache = problem.cache(i).view(-1, 1, 576)
                decode.decode_attention_fwd(problem.query, cache, cache[..., :512], out, indptr, indices, logits, lse, counts,
                                            splits, SCALE, 1.0, 1.0, has_mla=True)
            try:
                run(0)
                error = relative_error(out, want)
                us = time_layers(max(2, problem.caches_count), run)
            except Exception as e:  # a configuration that does not fit is no failure of the peer
                print(f"    sglang_decode block {block} stages {stages}: {str(e).splitlines()[0][:100]}", flush=True)
                break
            if us < best[0]:
                best = (us, error, {"splits": splits, "block": block, "stages": stages})
    return best


def vllm_decode(decode, problem):
    n = problem.nodes
    rows = node_rows(problem)
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32, device="cuda")
    table = torch.zeros(n, max(len(r) for r in rows), dtype=torch.int32, device="cuda")
    for i, r in enumerate(rows):
        table[i, : len(r)] = r
    out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(n, HEADS, device="cuda")
    one = torch.tensor(1.0, device="cuda")
    want = problem.reference(1)
    best = (math.inf, math.nan, {})
    for splits in (4, 8, 16, 32, 64, 128):
        logits = torch.empty(n, HEADS, splits, 513, device="cuda")

        def run(i):
            cache = problem.cache(i).view(-1, 1, 1, 576)
            decode.decode_attention_fwd(problem.query, cache, cache[..., :512], out, lse, table, lengths, logits, splits,
                                        SCALE, 1, k_scale=one, v_scale=one, is_mla=True)
        run(0)
        error = relative_error(out, want)
        us = time_layers(max(2, problem.caches_count), run)
        if us < best[0]:
            best = (us, error, {"splits": splits})
    return best


def flashinfer_attention(problem, backend, length, causal):
    """run(layer) -> output [nodes, heads, 512], natural log-sum-exp [nodes, heads] over the first `length` positions."""
    import flashinfer.mla

    n, pages = problem.nodes, (length + 63) // 64
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    qo = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    kv = torch.tensor([0, pages], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    table = problem.table64[:pages].contiguous()
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, qo_indptr=qo.clone(),
                                                           kv_indptr=kv.clone(), kv_indices=table.clone(),
                                                           kv_len_arr=lengths.clone(), backend=backend)
    wrapper.plan(qo, kv, table, lengths, HEADS, 512, 64, 64, causal, SCALE, torch.bfloat16, torch.bfloat16)
    q_latent, q_rope = problem.query[..., :512].contiguous(), problem.query[..., 512:].contiguous()
    parts = [(c.view(-1, 64, 576)[..., :512].contiguous(), c.view(-1, 64, 576)[..., 512:].contiguous())
             for c in problem.caches]
    out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(n, HEADS, device="cuda")
    return lambda i: wrapper.run(q_latent, q_rope, *parts[i % len(parts)], out=out, lse=lse, return_lse=True,
                                 return_lse_base_on_e=True)


def flashinfer_chain(problem, backend):
    run = flashinfer_attention(problem, backend, problem.length, True)
    error = relative_error(run(0)[0], problem.reference(64))
    return time_layers(problem.layers, run), error, {}


def flashmla_attention(problem, length, causal):
    """(plan(), run(layer) -> output, natural log-sum-exp), as flashinfer_attention."""
    import flash_mla

    n = problem.nodes
    query = problem.query.view(1, n, HEADS, 576)
    table = problem.table64.view(1, -1).contiguous()
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    metadata = [None]

    def plan():  # its schedule is computed by the first layer that sees a new one, and shared by the others
        metadata[0] = flash_mla.get_mla_metadata()[0]

    def run(i):
        out, lse = flash_mla.flash_mla_with_kvcache(query, problem.cache(i).view(-1, 64, 1, 576), table, lengths, 512,
                                                    metadata[0], None, softmax_scale=SCALE, causal=causal)
        return out[0], lse[0].transpose(0, 1)

    plan()
    return plan, run


def flashmla_chain(problem):
    plan, run = flashmla_attention(problem, problem.length, True)
    error = relative_error(run(0)[0], problem.reference(64))
    return time_layers(problem.layers, run, plan), error, {}


def merge_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def merge(a, lse_a, stride_n, stride_h, b, lse_b, out, heads: tl.constexpr):
        """One program a row: two partial results and their natural log-sum-exps into one."""
        row = tl.program_id(0)
        columns = tl.arange(0, 512)
        x = tl.load(lse_a + row // heads * stride_n + row % heads * stride_h)
        y = tl.load(lse_b + row)
        m = tl.maximum(x, y)
        wx, wy = tl.exp(x - m), tl.exp(y - m)
        va = tl.load(a + row * 512 + columns).to(tl.float32)
        vb = tl.load(b + row * 512 + columns).to(tl.float32)
        tl.store(out + row * 512 + columns, ((va * wx + vb * wy) / (wx + wy)).to(tl.bfloat16))

    return merge


def merged_tree(extend, problem, attention):
    """A peer without masks on the context alone, SGLang's extend kernel on the tree's own rows, and a merge: three launches
    a layer (the peer's combine not counted)."""
    plan, prefix = attention
    n, context = problem.nodes, problem.context
    positions = torch.arange(context, problem.length, device="cuda")
    own = problem.table64[positions // 64].long() * 64 + positions % 64
    tails = [cache[own].view(n, 1, 576).contiguous() for cache in problem.caches]
    values = [tail[..., :512].contiguous() for tail in tails]
    tail_out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    tail_lse = torch.empty(n, HEADS, device="cuda")
    out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    qo = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    none = torch.zeros(2, dtype=torch.int32, device="cuda")
    indices = torch.zeros(1, dtype=torch.int32, device="cuda")
    mask = problem.visible.cuda().flatten()
    mask_indptr = torch.tensor([0, mask.numel()], dtype=torch.int64, device="cuda")
    merge = merge_kernel()

    def run(i):
        prefix_out, prefix_lse = prefix(i)
        c = i % problem.caches_count
        cache = problem.cache(i).view(-1, 1, 576)
        extend.extend_attention_fwd(problem.query, tails[c], values[c], tail_out, cache, cache[..., :512], qo, none, indices,
                                    mask, True, mask_indptr, n, 1.0, 1.0, sm_scale=SCALE, lse_extend=tail_lse,
                                    skip_prefix=True)
        merge[(n * HEADS,)](prefix_out, prefix_lse, prefix_lse.stride(0), prefix_lse.stride(1), tail_out, tail_lse, out,
                            HEADS)

    run(0)
    error = relative_error(out, problem.reference(64))
    return time_layers(problem.layers, run, plan), error, {}


def version(site, package):
    for path in pathlib.Path(site).glob(f"{package}-*.dist-info"):
        return re.match(rf"{package}-(.*)\.dist-info", path.name).group(1)
    return "unknown"


def check_targets(rows):
    """What the kernel was built to reach against others, as target rows."""
    ratios = {}  # (peer, nodes, context): least ratio, where a peer ran in more than one way
    for row in rows:
        if "ratio_to_ours" in row:
            key = re.sub("_fa.*", "", row["peer"]), row["nodes"], row["context"]
            ratios[key] = min(row["ratio_to_ours"], ratios.get(key, math.inf))
    targets = []
    for (peer, nodes, context), ratio in ratios.items():
        least = {"sglang_extend": 3.0 if context < 65536 else 10.0, "sglang_decode": 3.0, "flashinfer": 1.0,
                 "flashmla": 1.0}.get(peer)
        if least is None or nodes > 9 or (nodes != 9 and peer != "flashmla"):
            continue
        targets.append({"kind": "target", "what": f"{peer} / ours, {nodes} nodes, {context}", "unit": "", "at_least": least,
                        "figure": ratio, "met": ratio >= least})
    return targets


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default=str(ROOT / "build/release/kernels/cuda/libcoppice_mla_verify.so"))
    parser.add_argument("--peers", help="the folder that sglang and vllm were installed into")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 9, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 65536])
    parser.add_argument("--quick", action="store_true", help="fewer configurations of the tuned peers")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer too (its first call compiles it)")
    parser.add_argument("--flashmla", action="store_true", help="FlashMLA too")
    parser.add_argument("--record", help="a record of bench/verify_kernel: rows and versions are added to it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")

    versions = {"torch": torch.__version__}
    peers, extend = [], None
    if options.peers:
        decode, extend = import_sglang(options.peers)
        vllm = import_vllm(options.peers)
        import triton
        versions |= {"triton": triton.__version__, "sglang": version(options.peers, "sglang"),
                     "vllm": version(options.peers, "vllm")}
        peers += [("sglang_extend", "tree", lambda p: sglang_extend(extend, p)),
                  ("sglang_decode", "tree, a request per node", lambda p: sglang_decode(decode, p, options.quick)),
                  ("vllm_decode", "tree, a request per node", lambda p: vllm_decode(vllm, p))]
    if options.flashinfer:
        import flashinfer.mla
        versions["flashinfer"] = flashinfer.__version__
        for backend in ("fa2", "fa3"):
            peers.append((f"flashinfer_{backend}", "chain", lambda p, b=backend: flashinfer_chain(p, b)))
            if extend:
                peers.append((f"flashinfer_{backend}", MERGED, lambda p, b=backend: merged_tree(
                    extend, p, (None, flashinfer_attention(p, b, p.context, False)))))

    if options.flashmla:
        import flash_mla
        versions["flash_mla"] = getattr(flash_mla, "__version__", "unknown")
        peers.append(("flashmla", "chain", flashmla_chain))
        if extend:
            peers.append(("flashmla", MERGED, lambda p: merged_tree(
                extend, p, flashmla_attention(p, p.context, False))))

    rows = []

    def add(nodes, context, page, tree, us, error, peer=None, more=None):
        row = {"kind": "peer", "nodes": nodes, "context": context, "batch": 1, "page": page, "heads": HEADS,
               "kv_dtype": "bf16", "tree": tree}
        if peer:
            row["peer"] = peer
        row |= more or {}
        row |= {"us": round(us, 3), "gbps": round((context + nodes) * 1152 / us / 1e3, 3),
                "tflops": round(2176 * HEADS * nodes * (context + nodes) / us / 1e6, 3), "relative_error": error}
        rows.append(row)
        print(f"{peer or 'coppice':16s} n {nodes:2d} ctx {context:6d} page {page:2d} {tree:28s} {us:9.2f} us  "
              f"error {error:.1e}  {more or ''}", flush=True)
        return us

    for nodes in options.nodes:
        for context in options.contexts:
            problem, chain = Problem(nodes, context), Problem(nodes, context, chain=True)
            mine = {page: add(nodes, context, page, "tree", *ours(options.library, problem, page)) for page in (1, 64)}
            for name, tree, run in peers:
                page = 64 if tree in ("chain", MERGED) else 1
                try:
                    us, error, more = run(chain if tree == "chain" else problem)
                except Exception as e:
                    message = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
                    print(f"{name}: {message}", flush=True)
                    rows.append({"kind": "peer", "peer": name, "nodes": nodes, "context": context, "error": message})
                    continue
                add(nodes, context, page, tree, us, error, name, more)
                ratio = us / mine[page]
                rows[-1]["ratio_to_ours"] = round(ratio, 3)
                print(f"{'':16s} ours is {ratio:.2f} x faster", flush=True)
            del problem, chain
            torch.cuda.empty_cache()

    targets = check_targets(rows)
    for row in targets:
        print(f"{row['what']:62s} >= {row['at_least']:5.1f}  {row['figure']:8.3f}  {'met' if row['met'] else 'NOT MET'}")
    rows += targets

    if options.record:
        path = pathlib.Path(options.record)
        record = json.loads(path.read_text())
        record["versions"] |= versions
        record["rows"] += rows
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"added {len(rows)} rows to {path}")


if __name__ == "__main__":
    main()
