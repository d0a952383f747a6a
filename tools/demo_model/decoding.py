"""Batched decoding with the target: one token of every row per step, prompts fed token by token."""

import numpy as np
import torch

import target
import tokenizer


def pool(prompts):
    """Prompts (lists of ids) as (ids [count, longest], lengths [count]) on the device."""
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, :len(prompt)] = prompt
    return (torch.from_numpy(ids).to(target.DEVICE),
            torch.tensor([len(prompt) for prompt in prompts], device=target.DEVICE))


def _draw(logits, temperatures, generator):
    """argmax(logits / T + Gumbel noise), plain argmax at T = 0."""
    greedy = logits.argmax(-1)
    if not bool((temperatures > 0).any()):
        return greedy
    uniform = torch.rand(logits.shape, device=logits.device, generator=generator).clamp_(1e-9, 1 - 1e-7)
    noisy = logits / temperatures.clamp(min=1e-3).unsqueeze(-1) - torch.log(-torch.log(uniform))
    return torch.where(temperatures > 0, noisy.argmax(-1), greedy)


@torch.no_grad()
def roll_out(model, prompts, rows, length, temperatures, limit, seed):
    """Fills `rows` rows of `length` tokens: each row answers one prompt after the other ([EOS] between them), up to a
    stop token or `limit` new tokens. Returns (ids, mask of the tokens that the model made), both [rows, length]."""
    ids, lengths = pool([[tokenizer.EOS] + list(prompt) for prompt in prompts])
    lanes = torch.arange(rows, device=target.DEVICE)
    number, place = lanes % len(prompts), torch.ones_like(lanes)  # the first [EOS] is left out
    made = torch.zeros_like(lanes)
    cache, generator = model.new_cache(rows, length), torch.Generator(device=target.DEVICE).manual_seed(seed)
    out = torch.empty(rows, length, dtype=torch.long, device=target.DEVICE)
    mask = torch.zeros(rows, length, dtype=torch.bool, device=target.DEVICE)
    sampled = torch.zeros_like(lanes)
    for step in range(length):
        forced = place < lengths[number]
        token = torch.where(forced, ids[number, place.clamp(max=ids.shape[1] - 1)], sampled)
        out[:, step], mask[:, step] = token, ~forced
        made = torch.where(forced, 0, made + 1)
        ended = ~forced & ((token == tokenizer.EOS) | (token == tokenizer.END_OF_TURN) | (made >= limit))
        number = torch.where(ended, (number + rows) % len(prompts), number)
        place = torch.where(ended, (token == tokenizer.EOS).long(), place + 1)
        hidden = model(token.unsqueeze(1), cache=cache, position=step)
        sampled = _draw(model.logits(hidden)[:, 0], temperatures, generator)
    return out, mask


@torch.no_grad()
def complete(model, prompts, new, temperatures=0.0, seed=0, ignore_stops=False):
    """Each prompt with up to `new` tokens after it, through the stop token, as lists of ids. A prompt's temperature
    may be its own (list)."""
    ids, lengths = pool(prompts)
    rows, length = len(prompts), min(int(lengths.max()) + new, model.config["max_position_embeddings"])
    if not isinstance(temperatures, list):
        temperatures = [temperatures] * rows
    temperatures = torch.tensor(temperatures, device=target.DEVICE, dtype=torch.float32)
    cache, generator = model.new_cache(rows, length), torch.Generator(device=target.DEVICE).manual_seed(seed)
    out = torch.zeros(rows, length, dtype=torch.long, device=target.DEVICE)
    sampled = torch.zeros(rows, dtype=torch.long, device=target.DEVICE)
    for step in range(length):
        forced = step < lengths
        out[:, step] = torch.where(forced, ids[:, min(step, ids.shape[1] - 1)], sampled)
        hidden = model(out[:, step:step + 1], cache=cache, position=step)
        sampled = _draw(model.logits(hidden)[:, 0], temperatures, generator)
    result = []
    for prompt, row in zip(prompts, out.tolist()):
        row = row[:len(prompt) + new]
        stops = [at for at in range(len(prompt), len(row)) if row[at] in (tokenizer.EOS, tokenizer.END_OF_TURN)]
        result.append(row if ignore_stops or not stops else row[:stops[0] + 1])
    return result
