#!/usr/bin/env python3
"""What a request's sampling options leave of a row of logits, by transformers' processors where it has one and by vLLM's
formula where it has none (frequency and presence penalty), in vLLM's order.

  sampling_oracle.py OUT.json        remakes tests/goldens/sampling.json
"""
import json
import pathlib
import sys

import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

VOCAB = 48
STOPS = [3, 17]


def rules(logits, case):
    """The logits after min_tokens, logit_bias and the penalties."""
    prompt, completion = case["prompt"], case["completion"]
    context = torch.tensor([prompt + completion])
    row = logits[None].clone()
    if case.get("min_tokens"):
        row = MinNewTokensLengthLogitsProcessor(len(prompt), case["min_tokens"], STOPS)(context, row)
    if case.get("logit_bias"):
        row = SequenceBiasLogitsProcessor([[[i], b] for i, b in case["logit_bias"]])(context, row)
    if "repetition_penalty" in case:
        row = RepetitionPenaltyLogitsProcessor(case["repetition_penalty"])(context, row)
    counts = torch.bincount(torch.tensor(completion, dtype=torch.int64), minlength=VOCAB)[None]
    row = row - case.get("frequency_penalty", 0.0) * counts
    row = row - case.get("presence_penalty", 0.0) * (counts > 0)
    return row[0]


def law(row, case):
    """The distribution that a token is drawn from."""
    row = row[None]
    temperature = case.get("temperature", 0.0)
    if temperature == 0:
        return torch.nn.functional.one_hot(row.argmax(-1), VOCAB)[0].double()
    row = TemperatureLogitsWarper(temperature)(None, row)
    if case.get("min_p"):
        row = MinPLogitsWarper(case["min_p"])(None, row)
    if case.get("top_k"):
        row = TopKLogitsWarper(case["top_k"])(None, row)
    if case.get("top_p", 1.0) < 1:
        row = TopPLogitsWarper(case["top_p"])(None, row)
    return row.double().softmax(-1)[0]


OPTIONS = {
    "min_tokens": 9, "logit_bias": [[5, 4.0], [17, 3.0], [20, -100.0], [7, 1.5]], "repetition_penalty": 1.7,
    "frequency_penalty": 0.6, "presence_penalty": 1.1, "temperature": 0.8, "min_p": 0.08, "top_k": 9, "top_p": 0.7,
}


def main():
    generator = torch.Generator().manual_seed(5)
    chosen = [[], *[[name] for name in OPTIONS]]
    names = list(OPTIONS)
    for _ in range(30):
        take = torch.rand(len(names), generator=generator) < 0.5
        chosen.append([name for name, taken in zip(names, take) if taken])
    cases = []
    for options in chosen:
        for negative in (False, True):
            case = {name: OPTIONS[name] for name in options}
            if negative:  # what the options do the other way round
                for name, value in (("repetition_penalty", 0.6), ("frequency_penalty", -0.4), ("presence_penalty", -0.9),
                                    ("min_tokens", 3), ("temperature", 1.4)):
                    if name in case:
                        case[name] = value
            if {"min_p", "top_k", "top_p"} & set(options) and "temperature" not in case:
                case["temperature"] = 1.0
            case["prompt"] = torch.randint(0, VOCAB, (6,), generator=generator).tolist()
            case["completion"] = torch.randint(0, 12, (7,), generator=generator).tolist()
            logits = 2 * torch.randn(VOCAB, generator=generator)
            changed = rules(logits, case)
            finite = [None if value == -float("inf") else round(value, 6) for value in changed.double().tolist()]
            cases.append({**case, "logits": [float(x) for x in logits], "changed": finite,
                          "law": [round(p, 9) for p in law(changed, case).tolist()]})
    out = pathlib.Path(sys.argv[1])
    out.write_text(json.dumps({"stops": STOPS, "cases": cases}, separators=(",", ":")).replace('{"', '\n{"') + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
