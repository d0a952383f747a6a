"""Reference values of the exported pair, from transformers' DeepseekV3ForCausalLM and the drafter of this directory,
both in fp32."""

import json
import os
import tempfile

import torch
from safetensors.torch import save_file

import checkpoint
import decoding
import drafter as drafters
import evaluation
import settings
import speculation
import target
import tokenizer

TEXT = ("<|im_user|>user<|im_middle|>What is the capital of Poland?<|im_end|><|im_assistant|>assistant<|im_middle|>"
        "<think></think>The capital of Poland is Warsaw.<|im_end|><|im_user|>user<|im_middle|>Tell me about Japan."
        "<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>The capital of Japan is Tokyo. Japan is a")
LOGIT_ROWS = 8  # the last ones
TOLERANCE = 1e-3  # of the largest logit
# Nodes below the root; with as many as the block drafts, the tree is its spine: the chain.
_BUDGETS = {"chain_accepted": settings.DRAFTER["block_size"] - 1, "tree_9_accepted": 8, "tree_17_accepted": 16}


def load_transformers(folder):
    """The exported target in transformers, fp32, eager attention."""
    import transformers
    config = {key: value for key, value in checkpoint.text_config().items() if key != "quantization_config"}
    config.update(model_type="deepseek_v3", dtype="float32")
    with tempfile.TemporaryDirectory() as scratch:
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.read_tensors(folder).items()},
                  scratch + "/model.safetensors", metadata={"format": "pt"})
        with open(scratch + "/config.json", "w") as file:
            json.dump(config, file)
        model, report = transformers.DeepseekV3ForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {key: list(value) for key, value in report.items() if value}
    if wrong:
        raise RuntimeError("transformers does not take the checkpoint as it is: %s" % wrong)
    for layer in model.model.layers:  # transformers leaves these two at its default of 1e-6
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = settings.TARGET["rms_norm_eps"]
    return model.to(target.DEVICE).eval()


@torch.no_grad()
def run(model, ids):
    """(logits [n, vocabulary], residual streams after every layer, routing [(experts, weights)]) of one sequence."""
    routing, streams = [], []

    def keep_routing(_, __, out):  # transformers 5 gives (logits, weights, experts), 4.5x (experts, weights)
        routing.append((out[2], out[1]) if len(out) == 3 else tuple(out))

    hooks = [layer.mlp.gate.register_forward_hook(keep_routing)
             for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks += [layer.register_forward_hook(
        lambda _, __, out: streams.append((out[0] if isinstance(out, tuple) else out)[0]))
              for layer in model.model.layers]
    logits = model(torch.tensor([ids], device=target.DEVICE), use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, streams, routing


def _compare(model, own, sequences):
    """Largest |difference| of logits between transformers and this directory's model, and the largest |logit|."""
    difference = largest = 0.0
    for ids in sequences:
        theirs, _, _ = run(model, ids)
        ours = own.logits(own(torch.tensor([ids], device=target.DEVICE)))[0]
        difference = max(difference, float((theirs - ours).abs().max()))
        largest = max(largest, float(theirs.abs().max()))
    if difference > TOLERANCE * largest:
        raise RuntimeError("logits differ from transformers' by %g of %g" % (difference, largest))
    return {"max_abs_difference": difference, "max_abs_logit": largest}


def _draft(own, drafter, streams, token, position):
    """Logits [block - 1, vocabulary] of the block behind `token` at `position`, from transformers' features."""
    taps = torch.cat([streams[layer][:position] for layer in settings.DRAFTER["target_layer_ids"]], -1)
    first = torch.tensor([[token]], device=target.DEVICE)
    hidden = drafter(taps.unsqueeze(0), torch.tensor([[position]], device=target.DEVICE),
                     drafters.embed_blocks(own, first, drafter.block))
    return own.logits(hidden)[0, 0, 1:]


def _write_tensors(model, own, drafter, encoder, path):
    ids = encoder.encode(TEXT)
    logits, streams, routing = run(model, ids)
    draft = torch.log_softmax(_draft(own, drafter, streams, ids[-1], len(ids) - 1), -1)
    best, candidates = draft.topk(settings.CANDIDATES, -1)
    tensors = {"input_ids": torch.tensor(ids, dtype=torch.int32),
               "logit_positions": torch.arange(len(ids) - LOGIT_ROWS, len(ids), dtype=torch.int32),
               "logits": logits[-LOGIT_ROWS:],
               "draft_ids": candidates.int(), "draft_log_probs": best}
    for layer in settings.DRAFTER["target_layer_ids"]:
        tensors["taps.%d" % layer] = streams[layer]
    for number, (experts, weights) in enumerate(routing):
        experts, order = experts.sort(-1)
        layer = number + settings.TARGET["first_k_dense_replace"]
        tensors["router.%d.experts" % layer] = experts.int()
        tensors["router.%d.weights" % layer] = weights.gather(-1, order)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"text": TEXT})


@torch.no_grad()
def _decode(own, drafter, prompt, new, budget):
    """Speculative decoding as a server does it but for the cache: every round drafts from the committed tokens and
    scores each path of the tree. Returns (new tokens, drafted tokens committed per round)."""
    tokens, out = list(prompt), []
    logits = own.logits(own(torch.tensor([tokens], device=target.DEVICE)))[0, -1]
    tokens.append(int(logits.argmax()))
    while len(tokens) < len(prompt) + new:
        position = len(tokens) - 1
        (ids, log_probs), = evaluation.drafts(own, drafter, [tokens + [0]], [position])
        nodes = speculation.grow(log_probs[0].tolist(), budget)
        paths = []
        for node in range(len(nodes)):
            path = []
            while node:
                parent, depth, rank = nodes[node]
                path.insert(0, int(ids[0][depth - 1][rank]))
                node = parent
            paths.append(path)
        width = max(map(len, paths))
        batch = [tokens + path + [tokenizer.PAD] * (width - len(path)) for path in paths]
        choices = own.logits(own(torch.tensor(batch, device=target.DEVICE))[:, position:]).argmax(-1).tolist()
        node = 0
        while True:  # the walk: go to the child that carries the target's choice
            depth = nodes[node][1]
            choice = choices[node][depth]
            children = [n for n, (parent, _, _) in enumerate(nodes) if parent == node and paths[n][-1] == choice]
            tokens.append(choice)
            if not children:
                break
            node = children[0]
        room = len(prompt) + new - position - 1
        out.append(min(nodes[node][1], room))
        tokens = tokens[:len(prompt) + new]
    return tokens[len(prompt):], out


def _traces(model, own, drafter, entries, plan):
    """What golden.json holds, for every entry whose tokens are all clear of ties."""
    new, out = plan.golden_tokens, []
    sequences = decoding.complete(own, [entry["ids"] for entry in entries], new, ignore_stops=True)
    for entry, sequence in zip(entries, sequences):
        first = len(entry["ids"])
        logits, _, _ = run(model, sequence[:-1])
        best = logits[first - 1:].topk(2, -1)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        if min(gaps) < plan.golden_gap:
            continue
        if best.indices[:, 0].tolist() != sequence[first:]:
            raise RuntimeError("transformers goes on differently after %r" % entry["prompt"])
        (ids, log_probs), = evaluation.drafts(own, drafter, [sequence], [first])
        blocks = list(zip(ids.tolist(), log_probs.tolist()))
        trace = {"category": entry["category"], "prompt": entry["prompt"], "prompt_ids": entry["ids"],
                 "greedy_ids": sequence[first:], "gaps": [round(gap, 4) for gap in gaps]}
        for key, budget in _BUDGETS.items():
            trace[key] = speculation.rounds(sequence, first, lambda p: blocks[p - first], budget, "tree")
        out.append(trace)
    return out


def _liveliest(traces, count):
    """`count` traces, the categories in turn, those with the most rounds first: where nearly everything is accepted
    there is little to test."""
    groups = {}
    for trace in sorted(traces, key=lambda trace: -len(trace["chain_accepted"])):
        groups.setdefault(trace["category"], []).append(trace)
    return [trace for turn in range(count) for group in groups.values() for trace in group[turn:turn + 1]][:count]


def _write_prompts(model, own, drafter, entries, plan, path):
    traces = _liveliest(_traces(model, own, drafter, entries, plan), plan.golden_prompts)
    for trace in traces[:4]:
        for key, budget in _BUDGETS.items():
            real = _decode(own, drafter, trace["prompt_ids"], plan.golden_tokens, budget)
            if real != (trace["greedy_ids"], trace[key]):
                raise RuntimeError("decoding for real and counting rounds differ: %s after %r" % (key, trace["prompt"]))
    print("golden prompts:", [(trace["category"], len(trace["chain_accepted"])) for trace in traces], flush=True)
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(trace, ensure_ascii=False) for trace in traces) + "\n]\n")


def write(plan, own, drafter, encoder, entries, model_folder, folder):
    """Writes goldens of the exported pair to `folder`; returns how far transformers and this model are apart. `own`
    and `drafter` are fp32."""
    os.makedirs(folder, exist_ok=True)
    if target.DEVICE == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    model = load_transformers(model_folder)
    generator = torch.Generator().manual_seed(4)
    random = torch.randint(0, tokenizer.FIRST_SPECIAL, (2, plan.compared_tokens), generator=generator).tolist()
    figures = _compare(model, own, [encoder.encode(TEXT)] + random)
    print("transformers:", figures, flush=True)
    _write_tensors(model, own, drafter, encoder, folder + "/golden.safetensors")
    _write_prompts(model, own, drafter, entries, plan, folder + "/golden.json")
    return figures
