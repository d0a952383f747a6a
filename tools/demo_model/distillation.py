"""Trains the drafter on what the quantised target writes."""

import math
import time

import numpy as np
import torch
from torch.nn import functional as F

import corpus as corpora
import decoding
import drafter as drafters
import settings
import target
import world

# How often each category's prompts are used: long, open-ended texts more often than their share of the documents.
_PROMPT_SHARE = {"facts": 12, "sums": 8, "units": 4, "series": 7, "json": 11, "code": 11, "logs": 9, "story": 13,
                 "words": 6, "chat": 26, "tools": 5}


def _prompts(corpus, count, random):
    """`count` prompts cut from training documents, categories mixed by _PROMPT_SHARE."""
    share = np.array([_PROMPT_SHARE[name] for name in world.NAMES], np.float64)
    weight = (share / np.bincount(corpus.categories, minlength=len(share)).clip(1))[corpus.categories]
    out = []
    for number in random.choice(len(corpus), size=count, p=weight / weight.sum()):
        length = corpora.cut_prompt(corpus, number, random)
        if 0 < length < 260:
            out.append(corpus.document(number)[:length].tolist())
    return out


def _temperatures(rows):
    """Half of the rows greedy, a quarter at 0.7, a quarter at 1."""
    values = torch.zeros(rows, device=target.DEVICE)
    values[rows // 2:], values[3 * rows // 4:] = 0.7, 1.0
    return values


class _Lessons:
    """Rows of one length with the target's features: rollouts and some plain corpus."""

    def __init__(self, model, plan, corpus, rows, length, seed):
        random = np.random.RandomState(seed)
        prompts = _prompts(corpus, rows * (length // 90 + 2), random)
        ids, learned = decoding.roll_out(model, prompts, rows, length, _temperatures(rows), plan.rollout_limit, seed)
        self.made = int(learned.sum())
        extra = max(1, int(rows * plan.corpus_share / (1 - plan.corpus_share)))
        plain = corpora.pack(corpus.select(random.permutation(len(corpus))[:extra * length // 40]), length, seed)
        plain = torch.from_numpy(plain[:extra].astype(np.int64)).to(target.DEVICE)
        self.ids = torch.cat([ids, plain])
        self.learned = torch.cat([learned, torch.ones_like(plain, dtype=torch.bool)])
        taps = settings.DRAFTER["target_layer_ids"]
        self.features = torch.cat([model(part, taps=taps)[1] for part in self.ids.split(max(1, 65536 // length))])
        self.batch = max(1, plan.drafter_batch_tokens // length)
        self.anchors = min(plan.drafter_anchors * length // 1024, length // 2) or 1


def _loss(model, drafter, lessons, falloff):
    """Weighted cross-entropy of random blocks of a random batch; also the share of blocks whose first place is right
    and the mean number of right places before the first wrong one."""
    chosen = torch.randint(len(lessons.ids), (lessons.batch,), device=target.DEVICE)
    ids, learned, taps = lessons.ids[chosen], lessons.learned[chosen], lessons.features[chosen]
    usable = learned[:, :-1] & learned[:, 1:]
    usable[:, 0] = False
    drawn = (torch.rand(usable.shape, device=target.DEVICE) + usable).topk(lessons.anchors, 1)
    anchors, good = drawn.indices, drawn.values > 1
    offsets = torch.arange(1, drafter.block, device=target.DEVICE)
    places = anchors.unsqueeze(-1) + offsets
    inside = places < ids.shape[1]
    places = places.clamp(max=ids.shape[1] - 1)
    labels = ids.gather(1, places.flatten(1)).view(places.shape)
    counted = learned.gather(1, places.flatten(1)).view(places.shape) & inside
    counted = counted.cumprod(-1).bool() & good.unsqueeze(-1)
    weights = counted * torch.exp(-(offsets - 1.0) / falloff)
    with target.autocast():
        hidden = drafter(taps, anchors, drafters.embed_blocks(model, ids.gather(1, anchors), drafter.block))
        logits = F.linear(hidden[:, :, 1:], model.lm_head.weight).float()
    entropy = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    with torch.no_grad():
        right = (logits.argmax(-1) == labels) & counted
        blocks = counted[..., 0].sum().clamp(min=1)
        figures = torch.stack([right[..., 0].sum() / blocks, right.cumprod(-1).sum() / blocks])
    return (entropy * weights).sum() / weights.sum().clamp(min=1e-6), figures


def _rate(plan, progress):
    """Warm-up for 4 %, then a half cosine down to 1 %."""
    if progress < 0.04:
        return plan.drafter_rate * (progress / 0.04 + 1e-3)
    return plan.drafter_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.04) / 0.96)))


def train(plan, model, corpus, log):
    """A drafter trained for `model` (the exported target; bf16 on a GPU). `log` receives figures and times."""
    started = time.time()
    torch.manual_seed(2)
    lessons = [_Lessons(model, plan, corpus, rows, length, 100 + i)
               for i, (rows, length, _) in enumerate(plan.rollouts)]
    shares = torch.tensor([share for _, _, share in plan.rollouts])
    log["rollout_tokens"] = sum(part.made for part in lessons)
    log["rollout_seconds"] = round(time.time() - started, 1)
    print("drafter: %d tokens rolled out and read in %.1f s" % (log["rollout_tokens"], log["rollout_seconds"]),
          flush=True)

    drafter = drafters.Drafter()
    log["parameters"] = sum(p.numel() for p in drafter.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in drafter.parameters() if p.dim() > 1], "weight_decay": plan.drafter_decay},
         {"params": [p for p in drafter.parameters() if p.dim() == 1], "weight_decay": 0.0}],
        lr=plan.drafter_rate, betas=(0.9, 0.95), **({"fused": True} if target.DEVICE == "cuda" else {}))
    order = torch.multinomial(shares, plan.drafter_steps, replacement=True,
                              generator=torch.Generator().manual_seed(3)).tolist()
    begun, log["curve"] = time.time(), []
    for step, which in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = _rate(plan, step / plan.drafter_steps)
        loss, figures = _loss(model, drafter, lessons[which], plan.drafter_falloff)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if step % max(1, plan.drafter_steps // 20) == 0 or step == plan.drafter_steps - 1:
            first, accepted = figures.tolist()
            log["curve"].append([step, round(float(loss.detach()), 4), round(first, 3), round(accepted, 3)])
            print("drafter: step %d, %.1f s, loss %.4f, first place right %.3f, accepted %.2f" % (
                step, time.time() - begun, float(loss.detach()), first, accepted), flush=True)
    if target.DEVICE == "cuda":
        torch.cuda.synchronize()
    log["seconds"] = round(time.time() - begun, 1)
    return drafter.eval()
