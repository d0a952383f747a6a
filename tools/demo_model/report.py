"""Writes the README of models/demo from the figures of a run."""

import os
import textwrap

import settings
import world

_TEXT = """# The demo pair

A target of Kimi K2.6's architecture and file format, small enough for a laptop, and a DFlash drafter for it. Both were
trained from scratch on a synthetic world (`tools/demo_model`), so that the whole system can be run, tested and shown
without a GPU and without a download. **Do not expect knowledge or reasoning from it**: see "What it can say".

| file | bytes | content |
|---|---|---|
{files}

The target has {parameters:,} parameters: hidden {hidden_size}, {num_hidden_layers} layers (the first dense,
{intermediate_size} wide), {num_attention_heads} heads, q_lora {q_lora_rank}, kv_lora {kv_lora_rank}, head dimensions
{qk_nope_head_dim} + {qk_rope_head_dim} (keys) and {v_head_dim} (values), {n_routed_experts} experts of
{moe_intermediate_size}, {num_experts_per_tok} chosen, {n_shared_experts} shared; vocabulary {vocab_size}; YaRN x4 on
1024, so 4096 positions. Routed experts are INT4 (groups of 32), the router's correction bias is fp32, the rest is bf16.
Scales have five significant bits, so code x scale is exact in bf16: engines that round the dequantised weight and
engines that do not run the same model.

The drafter has {drafter_parameters:,} parameters: 3 layers, 8 query and 2 key/value heads of 128, block of 8 (7 tokens
drafted), features from the outputs of target layers 0, 1 and 2, mask token `[UNK]`.

## Figures

Held-out loss in nats per token (INT4 weights, bf16 activations; before INT4: {loss_before} over all):

{losses}

By position in packed rows: {positions}. Largest |residual| after each layer: {residual}. Of greedily written tokens,
{ties_005:.2%} have their best two logits less than 0.05 apart, {ties_01:.2%} less than 0.1, {ties_05:.2%} less than 0.5.

Tokens per round (accepted drafts and the bonus token; prefill not counted), held-out prompts, up to {eval_tokens} new
tokens, {eval_prompts} prompts per category. A tree of n nodes has n - 1 below the root; its argmax spine comes first,
the rest grows best-first. Short answers keep the figure down: their last round is cut at the stop token.

{acceptance}

Share of chain rounds that accept at least k drafts:

{positions_accepted}

transformers' DeepseekV3ForCausalLM in fp32 agrees within {difference:.1e} (largest logit {logit:.1f}).

## What it can say

It knows about 120 countries (capital, continent, language, currency), small sums, unit conversions, number series,
dates, JSON records, log lines, about twenty tiny Python functions, short stories in one mould, words in twelve languages,
and how to chat and call a tool in Kimi's turn layout, with or without a short thought. Asked about anything else it says
that it does not know, or answers from its world. It cannot follow instructions outside its patterns, use what was said
earlier, or reason. Right greedy answers: {exam}. `prompts.jsonl` holds held-out prompts of every category: `category`,
`prompt` (text in which special tokens are meant as such), and for conversations `chat`, the arguments of
`chat_template.jinja` that give that prompt (`messages`, `thinking`, `tools`).

{samples}

## How it was made

`python3 tools/demo_model/make.py OUT` on one {device} took {minutes:.1f} minutes: {tokens:.0f} M tokens for the target
in {target_seconds:.0f} s, {rollout_tokens:.1f} M tokens rolled out by the quantised target, {drafter_steps} steps for
the drafter in {drafter_seconds:.0f} s. Python {python}, torch {torch}, transformers {transformers}, tiktoken {tiktoken}.
Seeds and step counts are fixed, but training on a GPU does not repeat to the bit; the files here are the authority.
"""


def _table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


_CONTENT = {
    "config.json": "`KimiK25ForConditionalGeneration` with `text_config`, no vision tower",
    "model.safetensors.index.json": "which shard holds which tensor",
    "tiktoken.model": "4032 byte-pair ranks; 64 special ids follow, in Kimi's order",
    "tokenizer_config.json": "names of the special ids",
    "chat_template.jinja": "Kimi K2.6's turn layout",
    "generation_config.json": "stop ids",
    "prompts.jsonl": "held-out prompts",
    "drafter/config.json": "`DFlashDraftModel`",
    "drafter/model.safetensors": "the drafter, bf16",
}


def _files(folder):
    names = [os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names]
    return "\n".join("| %s | %s | %s |" % (name, format(os.path.getsize(os.path.join(folder, name)), ","),
                                           _CONTENT.get(name, "target weights, names prefixed `language_model.`"))
                     for name in sorted(names) if name != "README.md")


def _acceptance(tables):
    methods = [key for key in next(iter(tables.values()))["all"] if key.startswith(("chain", "tree"))]
    parts = []
    for name, table in tables.items():
        rows = [["**%s**" % key if key == "all" else key, table[key]["tokens"]]
                + ["%.2f" % table[key][method] for method in methods]
                for key in world.NAMES + ("all",) if key in table]
        parts.append(_table([name, "tokens"] + methods, rows))
    return "\n\n".join(parts)


def write(log, folder, path):
    """Writes the README for the files in `folder` from the run's log."""
    plan, last = settings.PLANS[log["plan"]], list(log["stages"].values())[-1]
    losses, acceptance = log["target"]["loss"], log["acceptance"]
    depths = range(1, settings.DRAFTER["block_size"])
    text = _TEXT.format(
        files=_files(folder), parameters=log["target"].get("parameters", 0),
        drafter_parameters=log["drafter"]["parameters"],
        loss_before=log["target"].get("loss_before_int4", {}).get("all", "not measured"),
        losses=_table(list(losses), [["%.3f" % value for value in losses.values()]]),
        positions=", ".join("%d-%d %.3f" % tuple(part) for part in log["target"]["loss_by_position"]),
        residual=", ".join("%g" % value for value in log["target"]["largest_residual"]),
        eval_tokens=plan.eval_tokens, eval_prompts=plan.eval_prompts, acceptance=_acceptance(acceptance),
        positions_accepted=_table(["k"] + [str(k) for k in depths],
                                  [[name] + ["%.2f" % share for share in table["all"]["accepted_by_position"]]
                                   for name, table in acceptance.items()]),
        difference=log["transformers"]["max_abs_difference"], logit=log["transformers"]["max_abs_logit"],
        samples=_table(["prompt", "greedy continuation"],
                       [["`%s`" % part.replace("\n", "\\n").replace("|", "\\|").replace("`", "'") for part in pair]
                        for pair in log["samples"]]),
        ties_005=log["near_ties"]["0.05"], ties_01=log["near_ties"]["0.1"], ties_05=log["near_ties"]["0.5"],
        exam=", ".join("%s %d of %d" % (name, *counts) for name, counts in log["exam"].items()),
        minutes=last / 60, tokens=log["target"].get("tokens", 0) / 1e6,
        target_seconds=log["target"].get("seconds", 0), rollout_tokens=log["drafter"]["rollout_tokens"] / 1e6,
        drafter_steps=plan.drafter_steps, drafter_seconds=log["drafter"]["seconds"],
        **log["versions"], **{key: value for key, value in settings.TARGET.items() if not isinstance(value, dict)})
    blocks = [block if block.startswith(("|", "#")) else
              textwrap.fill(" ".join(block.split()), 120, break_long_words=False, break_on_hyphens=False)
              for block in text.strip().split("\n\n")]
    with open(path, "w") as file:
        file.write("\n\n".join(blocks) + "\n")
