"""Trains the target and measures its loss."""

import time

import numpy as np
import torch
from torch.nn import functional as F

import corpus as corpora
import decoding
import target
import tokenizer
import world

_IGNORED = -100


def labels_of(ids):
    """The next tokens of ids [..., n], [..., n - 1]. The `</think>` right behind a `<think>` is not learned: the chat
    template writes that empty thought, so a model that is to think must not expect it."""
    labels = ids[..., 1:].clone()
    labels[(ids[..., :-1] == tokenizer.THINK) & (labels == tokenizer.END_THINK)] = _IGNORED
    return labels


def _loss(hidden, head, labels, penalty):
    """Mean cross-entropy, and `penalty` times the mean squared logsumexp."""
    with torch.autocast(target.DEVICE, dtype=torch.bfloat16, enabled=target.DEVICE == "cuda"):
        logits = F.linear(hidden, head).float()
    total = torch.logsumexp(logits, -1)
    learned = labels >= 0
    entropy = total - logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    count = learned.sum()
    return (entropy * learned).sum() / count, penalty * (total.pow(2) * learned).sum() / count


def _rate(plan, progress):
    """Warm-up for 2 %, flat to 30 %, then linear to nearly nothing."""
    if progress < 0.02:
        return plan.target_rate * (progress / 0.02 + 1e-3)
    return plan.target_rate * min(1.0, max(0.005, (1 - progress) / 0.7))


class _Rows:
    """Batches of shuffled rows, over and over."""

    def __init__(self, rows, batch, seed):
        self._rows, self._batch = torch.from_numpy(rows.astype(np.int32)).to(target.DEVICE), batch
        self._generator, self._order, self._at = torch.Generator().manual_seed(seed), [], 0

    def next(self):
        """[batch, row] token ids."""
        if self._at + self._batch > len(self._order):
            self._order, self._at = torch.randperm(len(self._rows), generator=self._generator), 0
        chosen = self._order[self._at:self._at + self._batch].to(target.DEVICE)
        self._at += self._batch
        return self._rows[chosen].long()


class _Trainer:
    """The target with its compiled pieces."""

    def __init__(self, plan):
        self.plan, self.model = plan, target.Target()
        compiled = torch.compile if plan.compile else lambda function: function
        if plan.compile:
            torch._dynamo.config.automatic_dynamic_shapes = False
            torch._dynamo.config.cache_size_limit = 64
        self._layers = [compiled(layer) for layer in self.model.layers]
        self._loss = compiled(_loss)
        self._excess = compiled(lambda x: (x.float().abs() - plan.residual_limit).clamp(min=0).pow(2).mean())

    def losses(self, ids):
        """(cross-entropy, penalties, load of each routed layer) of a batch."""
        model, tokens = self.model, ids.shape[1]
        kind = torch.bfloat16 if target.DEVICE == "cuda" else torch.float32
        penalty, loads = 0.0, []
        with target.autocast():
            x = model.embed_tokens(ids).to(kind)
            for layer in self._layers:
                x, load = layer(x, model.cos[:tokens], model.sin[:tokens])
                penalty = penalty + self.plan.residual_penalty * self._excess(x)
                if load is not None:
                    loads.append(load)
            hidden = model.norm(x)[:, :-1].flatten(0, 1)
        entropy, logit_penalty = self._loss(hidden, model.lm_head.weight, labels_of(ids).flatten(),
                                            self.plan.logit_penalty)
        return entropy, penalty + logit_penalty, loads


def train(plan, corpus, log):
    """A trained target. `log` (a dict) receives the curve and the times."""
    started = time.time()
    torch.manual_seed(1)
    short = _Rows(corpora.pack(corpus, plan.target_row, 1), plan.target_batch, 1)
    long = _Rows(corpora.pack(corpus, plan.target_long_row, 2),
                 max(1, plan.target_batch * plan.target_row // plan.target_long_row), 2)
    trainer = _Trainer(plan)
    model = trainer.model
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": plan.target_decay},
                                   {"params": others, "weight_decay": 0.0}], lr=plan.target_rate, betas=(0.9, 0.95),
                                  **({"fused": True} if target.DEVICE == "cuda" else {}))
    for rows in (short, long):  # compiles both row lengths
        entropy, penalty, _ = trainer.losses(rows.next())
        (entropy + penalty).backward()
    optimizer.zero_grad(set_to_none=True)
    log["parameters"] = sum(p.numel() for p in model.parameters())
    log["compile_seconds"] = round(time.time() - started, 1)
    print("target: %d parameters; ready after %.1f s" % (log["parameters"], log["compile_seconds"]), flush=True)

    begun, tokens, log["curve"] = time.time(), 0, []
    for step in range(plan.target_steps):
        progress = step / plan.target_steps
        ids = (long if progress >= 1 - plan.target_long_share else short).next()
        for group in optimizer.param_groups:
            group["lr"] = _rate(plan, progress)
        entropy, penalty, loads = trainer.losses(ids)
        optimizer.zero_grad(set_to_none=True)
        (entropy + penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress < 0.9:  # the bias that evens out the experts' load
            with torch.no_grad():
                for router, load in zip(model.routers(), loads):
                    router.e_score_correction_bias += 1e-3 * torch.sign(load.mean() - load)
        tokens += ids.numel()
        if step % max(1, plan.target_steps // 40) == 0 or step == plan.target_steps - 1:
            spread = max(float(load.max() / load.mean()) for load in loads)
            figures = [round(float(value.detach()), 4) for value in (entropy, penalty)]
            log["curve"].append([step] + figures + [round(spread, 2)])
            print("target: step %d, %.1f s, %.1fM tokens, loss %.4f, penalties %.4f, load max/mean %.2f" % (
                step, time.time() - begun, tokens / 1e6, figures[0], figures[1], spread), flush=True)
    if target.DEVICE == "cuda":
        torch.cuda.synchronize()
    log["tokens"], log["seconds"] = tokens, round(time.time() - begun, 1)
    return model.eval()


@torch.no_grad()
def loss_by_category(model, corpus, documents):
    """Mean loss (nats per token) of whole held-out documents of at most 512 tokens, by category and over "all"."""
    numbers = sorted(range(min(documents, len(corpus))), key=lambda n: len(corpus.document(n)))
    sums = np.zeros((2, len(world.NAMES)))
    for at in range(0, len(numbers), 128):
        batch = numbers[at:at + 128]
        width = min(512, max(len(corpus.document(n)) for n in batch))
        ids = np.full((len(batch), width), tokenizer.PAD, np.int64)
        for row, number in enumerate(batch):
            document = corpus.document(number)[:width]
            ids[row, :len(document)] = document
        ids = torch.from_numpy(ids).to(target.DEVICE)
        labels = labels_of(ids)
        labels[labels == tokenizer.PAD] = _IGNORED
        logits = model.logits(model(ids)[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="none")
        loss = loss.view(labels.shape).sum(1).double().cpu().numpy()
        count = (labels >= 0).sum(1).cpu().numpy()
        np.add.at(sums, (0, corpus.categories[batch]), loss)
        np.add.at(sums, (1, corpus.categories[batch]), count)
    out = {name: round(float(sums[0, i] / max(sums[1, i], 1)), 4) for i, name in enumerate(world.NAMES)}
    out["all"] = round(float(sums[0].sum() / sums[1].sum()), 4)
    return out


@torch.no_grad()
def loss_by_position(model, corpus, row, count=16):
    """[(first, end, mean loss)] over ranges of positions in long rows, and the largest |residual| after each layer."""
    ids = torch.from_numpy(corpora.pack(corpus, row, 3)[:count].astype(np.int64)).to(target.DEVICE)
    edges = [edge for edge in (0, 128, 512, 1024, 2048, 3072) if edge < row] + [row]
    largest, losses = [0.0] * len(model.layers), []
    for sequence in ids.split(1):
        hidden, taps = model(sequence, taps=range(len(model.layers)))
        largest = [max(old, float(tap.abs().max())) for old, tap in zip(largest, taps.chunk(len(model.layers), -1))]
        losses.append(F.cross_entropy(model.logits(hidden[0, :-1]), labels_of(sequence)[0], ignore_index=_IGNORED,
                                      reduction="none"))
    losses = torch.stack(losses)
    return ([[a, b, round(float(losses[:, a:b].mean()), 4)] for a, b in zip(edges, edges[1:])],
            [round(value, 1) for value in largest])


def examine(model, encoder):
    """[right, asked] of greedy answers: capitals as bare text and in a chat (with a thought), sums as bare text."""
    opening = "<|im_user|>user<|im_middle|>What is the capital of %s?<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    rows = world.plain.t.COUNTRIES
    pairs = np.random.RandomState(5).randint(1, 100, (200, 2)).tolist()
    questions = {
        "capitals": [("The capital of %s is" % row[0], " %s." % row[1]) for row in rows],
        "capitals, thinking": [(opening % row[0], "</think>The capital of %s is %s.<|im_end|>" % row[:2]) for row in rows],
        "sums": [("%d + %d =" % (a, b), " %d\n" % (a + b)) for a, b in pairs],
    }
    out = {}
    for name, items in questions.items():
        prompts = [encoder.encode(question) for question, _ in items]
        answers = decoding.complete(model, prompts, 40)
        right = sum(answer in encoder.decode(ids[len(prompt):]).replace("[EOS]", "\n")
                    for (_, answer), prompt, ids in zip(items, prompts, answers))
        out[name] = [right, len(items)]
    return out
