#!/usr/bin/env python3
"""Makes the demo pair: tokenizer, target, drafter, prompts, goldens and a report of it all.

    python3 tools/demo_model/make.py OUT [--plan full|smoke|toy] [--target DIR]

OUT/model gets what models/demo holds, OUT/goldens what tests/goldens/demo holds, OUT/report.json the figures. With
--target an exported target (and its tokenizer) is taken over instead of trained.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import time

import torch

import checkpoint
import corpus as corpora
import decoding
import distillation
import evaluation
import goldens
import prompts
import report
import settings
import target
import tokenizer
import training

_TEMPLATE = os.path.join(os.path.dirname(__file__), "../../models/demo/chat_template.jinja")
_TURN = "<|im_user|>user<|im_middle|>%s<|im_end|><|im_assistant|>assistant<|im_middle|>"
SAMPLES = (
    "The capital of France is", "The currency of Japan is the", "17 + 25 =", "3 hours is", "Count by 7 from 3:\n",
    "def factorial(n):\n", "Once upon a time there was a", "English - French\nhello -", "问：法国的首都是哪里？\n答：",
    _TURN % "What is the capital of Poland?" + "<think></think>", _TURN % "What is 23 + 48?" + "<think>",
    _TURN % "Tell me a story about Alice and a lantern." + "<think>", _TURN % "Who are you?" + "<think></think>",
    _TURN % "Write a Python function gcd that returns the greatest common divisor of a and b." + "<think></think>",
    _TURN % "Can you explain love?" + "<think>",
)


def _versions():
    names = {"python": platform.python_version(), "torch": torch.__version__}
    for module in ("transformers", "tiktoken", "safetensors", "numpy"):
        try:
            names[module] = __import__(module).__version__
        except ImportError:
            names[module] = None
    names["device"] = torch.cuda.get_device_name() if target.DEVICE == "cuda" else platform.processor() or "CPU"
    return names


def _samples(model, encoder):
    sequences = decoding.complete(model, [encoder.encode(text) for text in SAMPLES], 64)
    out = [[text, encoder.decode(ids[len(encoder.encode(text)):])] for text, ids in zip(SAMPLES, sequences)]
    for text, answer in out:
        print("sample: %r -> %r" % (text, answer), flush=True)
    return out


def main():
    """Runs all stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to write to")
    parser.add_argument("--plan", choices=sorted(settings.PLANS), default="full")
    parser.add_argument("--target", help="exported target to take over")
    arguments = parser.parse_args()
    plan, started = settings.PLANS[arguments.plan], time.time()
    folder, golden = os.path.join(arguments.out, "model"), os.path.join(arguments.out, "goldens")
    os.makedirs(folder, exist_ok=True)
    log = {"plan": arguments.plan, "stages": {}, "target": {}, "drafter": {}}

    def finished(stage):
        log["stages"][stage] = round(time.time() - started, 1)
        print("== %s: %.1f s" % (stage, time.time() - started), flush=True)
        with open(os.path.join(arguments.out, "report.json"), "w") as file:
            json.dump(log, file, indent=1, ensure_ascii=False)

    # The processes of the corpus are started before CUDA is.
    if arguments.target:
        for name in os.listdir(arguments.target):
            if os.path.isfile(os.path.join(arguments.target, name)):
                shutil.copy(os.path.join(arguments.target, name), folder)
    else:
        corpora.train_tokenizer(folder, plan.tokenizer_characters, plan.shards)
    training_corpus, held_out = corpora.build(folder, plan.corpus_characters, plan.shards)
    encoder = tokenizer.Tokenizer(folder)
    shutil.copy(_TEMPLATE, folder)
    log["versions"] = _versions()
    log["corpus"] = {"documents": len(training_corpus), "tokens": len(training_corpus.ids),
                     "held_out_documents": len(held_out), "held_out_tokens": len(held_out.ids)}
    print(log["versions"], log["corpus"], flush=True)
    finished("corpus")

    if target.DEVICE == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    if not arguments.target:
        trained = training.train(plan, training_corpus, log["target"])
        checkpoint.write_target(trained, folder)
        log["target"]["loss_before_int4"] = training.loss_by_category(
            trained.to_bfloat16() if target.DEVICE == "cuda" else trained, held_out, plan.loss_documents)
        del trained
        finished("target")

    model = checkpoint.read_target(folder)
    model = model.to_bfloat16() if target.DEVICE == "cuda" else model
    log["target"]["loss"] = training.loss_by_category(model, held_out, plan.loss_documents)
    log["target"]["loss_by_position"], log["target"]["largest_residual"] = training.loss_by_position(
        model, held_out, plan.target_long_row)
    print("target:", log["target"]["loss"], log["target"]["loss_by_position"], log["target"]["largest_residual"])
    log["exam"] = training.examine(model, encoder)
    print("exam:", log["exam"], flush=True)
    log["samples"] = _samples(model, encoder)
    finished("target measured")

    trained = distillation.train(plan, model, training_corpus, log["drafter"])
    checkpoint.write_drafter(trained, os.path.join(folder, "drafter"))
    finished("drafter")
    log["acceptance"] = evaluation.evaluate(plan, model, trained, held_out)
    finished("acceptance")
    entries = prompts.publish(plan, model, encoder, held_out, _TEMPLATE, os.path.join(folder, "prompts.jsonl"))
    finished("prompts")
    model = checkpoint.read_target(folder)  # in fp32 from here on
    log["transformers"] = goldens.write(plan, model, trained, encoder, entries, folder, golden)
    log["near_ties"] = evaluation.near_ties(
        model, corpora.prompts_by_category(held_out, max(1, plan.eval_prompts // 4), seed=14), plan.eval_tokens)
    print("near ties:", log["near_ties"], flush=True)
    finished("goldens")
    report.write(log, folder, os.path.join(folder, "README.md"))
    subprocess.run(["ls", "-lR", arguments.out], check=True)


if __name__ == "__main__":
    main()
