"""Acceptance of the pair on held-out prompts: the target writes, the drafter drafts everywhere, rounds are counted."""

import numpy as np
import torch

import corpus as corpora
import decoding
import drafter as drafters
import settings
import speculation
import target
import world

METHODS = [("chain", 0)] + [("tree %d" % (budget + 1), budget) for budget in settings.TREE_BUDGETS]


@torch.no_grad()
def drafts(model, drafter, sequences, starts):
    """Per sequence, the blocks drafted behind each position from starts[i] to the last but one: (ids, log-probs), both
    [positions, block - 1, CANDIDATES]."""
    width, count = max(map(len, sequences)), max(len(s) - 1 - first for s, first in zip(sequences, starts))
    ids, _ = decoding.pool([list(sequence) for sequence in sequences])
    anchors = torch.tensor([[min(first + i, len(s) - 2) for i in range(count)] for s, first in zip(sequences, starts)],
                           device=target.DEVICE)
    kind = model.lm_head.weight.dtype
    _, taps = model(ids[:, :width], taps=settings.DRAFTER["target_layer_ids"])
    with torch.autocast(target.DEVICE, dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
        hidden = drafter(taps, anchors, drafters.embed_blocks(model, ids.gather(1, anchors), drafter.block))
        log_probs = torch.log_softmax(model.logits(hidden[:, :, 1:].to(kind)), -1)
    best, ids = log_probs.topk(settings.CANDIDATES, -1)
    best, ids = best.cpu().numpy(), ids.cpu().numpy()
    return [(ids[i, :len(s) - 1 - first], best[i, :len(s) - 1 - first])
            for i, (s, first) in enumerate(zip(sequences, starts))]


def _play(job):
    """Rounds of one sequence with every method; how often the drafter's first choice was right, by block offset."""
    sequence, first, ids, log_probs = job
    blocks = list(zip(ids.tolist(), log_probs.tolist()))
    counts = {name: speculation.rounds(sequence, first, lambda p: blocks[p - first], budget, name.split()[0])
              for name, budget in METHODS}
    right = np.zeros((2, ids.shape[1]))
    for position in range(first, len(sequence) - 1):
        truth = np.array(sequence[position + 1:position + 1 + ids.shape[1]])
        right[0, :len(truth)] += ids[position - first, :len(truth), 0] == truth
        right[1, :len(truth)] += 1
    return counts, right


def _summary(played, tokens):
    out = {"tokens": int(sum(tokens))}
    for name, _ in METHODS:
        out[name] = round(sum(tokens) / max(1, sum(len(counts[name]) for counts, _ in played)), 3)
    right = sum(right for _, right in played)
    out["right_by_offset"] = [round(float(value), 3) for value in right[0] / np.maximum(right[1], 1)]
    accepted = np.array([found for counts, _ in played for found in counts["chain"]])
    out["accepted_by_position"] = [round(float((accepted >= k).mean()), 3) for k in range(1, len(right[0]) + 1)]
    return out


def acceptance(model, drafter, prompts, new, temperature, seed):
    """{category or "all": tokens per round of each method, ...} for prompts as (category, ids)."""
    sequences = decoding.complete(model, [ids for _, ids in prompts], new, temperature, seed)
    starts = [len(ids) for _, ids in prompts]
    order = sorted((i for i in range(len(prompts)) if len(sequences[i]) - 1 > starts[i]),
                   key=lambda i: len(sequences[i]))
    jobs, categories = [], []
    batch = max(1, 16384 // max(len(sequences[i]) for i in order))
    for at in range(0, len(order), min(batch, 16)):
        part = order[at:at + min(batch, 16)]
        blocks = drafts(model, drafter, [sequences[i] for i in part], [starts[i] for i in part])
        jobs += [(sequences[i], starts[i]) + block for i, block in zip(part, blocks)]
        categories += [prompts[i][0] for i in part]
    played = corpora.in_parallel(_play, jobs)
    tokens = [len(sequence) - 1 - first for sequence, first, _, _ in jobs]
    out = {}
    for number, name in list(enumerate(world.NAMES)) + [(None, "all")]:
        chosen = [i for i in range(len(jobs)) if number is None or categories[i] == number]
        if chosen:
            out[name] = _summary([played[i] for i in chosen], [tokens[i] for i in chosen])
    return out


@torch.no_grad()
def near_ties(model, prompts, new):
    """Shares of greedily written tokens whose best two logits are less than 0.05, 0.1 and 0.5 apart; fp32 model."""
    sequences, gaps = decoding.complete(model, [ids for _, ids in prompts], new), []
    for (_, ids), sequence in zip(prompts, sequences):
        logits = model.logits(model(torch.tensor([sequence[:-1]], device=target.DEVICE))[0, len(ids) - 1:])
        best = logits.topk(2, -1).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
    return {str(edge): round(float((np.array(gaps) < edge).mean()), 5) for edge in (0.05, 0.1, 0.5)}


def behind_long_context(corpus, prompts, length, seed):
    """The prompts with about `length` tokens of other held-out documents before them."""
    random, out = np.random.RandomState(seed), []
    for category, ids in prompts:
        before = []
        while len(before) < length:
            before += corpus.document(random.randint(len(corpus))).tolist()
        out.append((category, before + ids))
    return out


def evaluate(plan, model, drafter, held_out):
    """Acceptance at every temperature of settings.TEMPERATURES, and greedily behind a long context."""
    prompts = corpora.prompts_by_category(held_out, plan.eval_prompts, seed=11)
    out = {"T=%g" % temperature: acceptance(model, drafter, prompts, plan.eval_tokens, temperature, 5)
           for temperature in settings.TEMPERATURES}
    few = corpora.prompts_by_category(held_out, plan.eval_long_prompts, seed=12)
    few = behind_long_context(held_out, few, plan.eval_long_context, 13)
    out["T=0 behind %d tokens" % plan.eval_long_context] = acceptance(model, drafter, few, plan.eval_tokens, 0.0, 5)
    for name, table in out.items():
        print(name, {method: table["all"][method] for method, _ in METHODS}, table["all"]["right_by_offset"], flush=True)
    return out
