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
                  verified as a chain, and the rows say so.

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
    one = torch.tensor(1.0)
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


def flashinfer_chain(problem, backend):
    import flashinfer.mla

    n = problem.nodes
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    qo = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    kv = torch.tensor([0, problem.entries], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([problem.length], dtype=torch.int32, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, qo_indptr=qo.clone(),
                                                           kv_indptr=kv.clone(), kv_indices=problem.table64.clone(),
                                                           kv_len_arr=lengths.clone(), backend=backend)
    wrapper.plan(qo, kv, problem.table64, lengths, HEADS, 512, 64, 64, True, SCALE, torch.bfloat16, torch.bfloat16)
    q_latent, q_rope = problem.query[..., :512].contiguous(), problem.query[..., 512:].contiguous()
    parts = [(c.view(-1, 64, 576)[..., :512].contiguous(), c.view(-1, 64, 576)[..., 512:].contiguous())
             for c in problem.caches]
    out = torch.empty(n, HEADS, 512, dtype=torch.bfloat16, device="cuda")

    def run(i):
        wrapper.run(q_latent, q_rope, *parts[i % len(parts)], out=out)

    run(0)
    error = relative_error(out, problem.reference(64))
    return time_layers(problem.layers, run), error, {"backend": backend}


def flashmla_chain(problem):
    import flash_mla

    n = problem.nodes
    query = problem.query.view(1, n, HEADS, 576)
    table = problem.table64.view(1, -1).contiguous()
    lengths = torch.tensor([problem.length], dtype=torch.int32, device="cuda")
    metadata = [None]

    def plan():  # its schedule is computed by the first layer that sees a new one, and shared by the others
        metadata[0] = flash_mla.get_mla_metadata()[0]

    def run(i):
        return flash_mla.flash_mla_with_kvcache(query, problem.cache(i).view(-1, 64, 1, 576), table, lengths, 512, metadata[0],
                                                None, softmax_scale=SCALE, causal=True)

    plan()
    error = relative_error(run(0)[0][0], problem.reference(64))
    return time_layers(problem.layers, run, plan), error, {}


def version(site, package):
    for path in pathlib.Path(site).glob(f"{package}-*.dist-info"):
        return re.match(rf"{package}-(.*)\.dist-info", path.name).group(1)
    return "unknown"


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
    peers = []
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

    if options.flashmla:
        import flash_mla
        versions["flash_mla"] = getattr(flash_mla, "__version__", "unknown")
        peers.append(("flashmla", "chain", flashmla_chain))

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
        print(f"{peer or 'coppice':16s} n {nodes:2d} ctx {context:6d} page {page:2d} {tree:26s} {us:9.2f} us  "
              f"error {error:.1e}  {more or ''}", flush=True)
        return us

    for nodes in options.nodes:
        for context in options.contexts:
            problem, chain = Problem(nodes, context), Problem(nodes, context, chain=True)
            mine = {page: add(nodes, context, page, "tree", *ours(options.library, problem, page)) for page in (1, 64)}
            for name, tree, run in peers:
                page = 64 if tree == "chain" else 1
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

    if options.record:
        path = pathlib.Path(options.record)
        record = json.loads(path.read_text())
        record["versions"] |= versions
        record["rows"] += rows
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"added {len(rows)} rows to {path}")


if __name__ == "__main__":
    main()
