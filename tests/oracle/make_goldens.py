"""Writes small random models in the formats of Kimi K2's releases and what transformers computes from them.  See README.md."""

import argparse
import math
import os
import shutil

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from checkpoint import quantize_fp8, quantize_int4, round_bf16, write_json, write_sharded
from dflash_reference import DFlash

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "goldens", "models")

COMMON = {
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "first_k_dense_replace": 1,
    "bos_token_id": 250, "eos_token_id": 251, "pad_token_id": 255, "vocab_size": 256, "hidden_size": 64,
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128, "max_position_embeddings": 262144,
}


def yarn(factor, beta_fast, beta_slow):
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, "beta_fast": beta_fast,
            "beta_slow": beta_slow, "mscale": 1.0, "mscale_all_dim": 1.0}


MODELS = {
    "int4": dict(num_hidden_layers=3, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=64,
                 rope_scaling=yarn(64.0, 32.0, 1.0), bias=(0.0, 0.5), form="int4", wrapped=True, long=4200),
    "bf16": dict(num_hidden_layers=2, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=32,
                 n_group=4, topk_group=2, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512,
                 qk_rope_head_dim=64, rope_scaling=yarn(32.0, 1.0, 1.0), max_position_embeddings=131072,
                 rms_norm_eps=1e-6, norm_topk_prob=False, n_shared_experts=2, bias=(0.3, 0.1), form="bf16",
                 wrapped=False),
    "experts384": dict(num_hidden_layers=2, n_routed_experts=384, num_experts_per_tok=8, moe_intermediate_size=32,
                       rope_scaling=yarn(64.0, 32.0, 1.0), rms_norm_eps=1e-3, bias=(-1.5, 0.5), form="int4",
                       wrapped=True),
    # Sizes that no block of 128 divides.
    "instruct": dict(num_hidden_layers=2, hidden_size=136, n_routed_experts=6, num_experts_per_tok=2,
                     moe_intermediate_size=136, intermediate_size=200, q_lora_rank=48,
                     rope_scaling=yarn(32.0, 1.0, 1.0), max_position_embeddings=131072, rms_norm_eps=1e-6,
                     bias=(0.0, 0.5), form="fp8", wrapped=False, model_type="kimi_k2"),
    "thinking": dict(num_hidden_layers=2, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64,
                     rope_scaling=yarn(64.0, 1.0, 1.0), bias=(0.0, 0.5), form="int4", wrapped=False,
                     model_type="kimi_k2", shape_dtype=torch.int64),
    "mixed": dict(num_hidden_layers=3, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=64,
                  rope_scaling=yarn(64.0, 32.0, 1.0), bias=(0.0, 0.5), form="mixed", wrapped=False,
                  model_type="kimi_k2"),
}

# The weights of another model under other settings: what only the configuration changes.
VARIANTS = {
    "instruct_0905": ("instruct", dict(rope_scaling=yarn(64.0, 1.0, 1.0), max_position_embeddings=262144)),
    # transformers' reading of the epsilon of q_a_layernorm and kv_a_layernorm.
    "experts384_eps": ("experts384", dict(lora_norm_eps=1e-6)),
}

INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                    "dynamic": False, "actorder": None, "observer": "minmax"}}},
}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

# What the configuration announces; "mixed" announces one thing and holds all of them.
QUANTIZATION = {"bf16": None, "int4": INT4, "fp8": FP8, "mixed": INT4}


def form_of(key, form):
    """How a tensor of a checkpoint of `form` is stored."""
    linear = key.endswith("_proj.weight") or key.endswith("_proj_with_mqa.weight")
    if form == "fp8":
        return "fp8" if linear else "bf16"
    if form == "int4":
        return "int4" if ".mlp.experts." in key else "bf16"
    if form == "mixed":
        # Expert e of either layer in a form of its own; attention of layer 1 alone in FP8, half of it.
        if ".mlp.experts." in key:
            return ("int4", "bf16", "fp8")[int(key.split(".experts.")[1].split(".")[0]) % 3]
        if "layers.1." in key and ("q_b_proj" in key or "kv_b_proj" in key or "q_a_proj" in key):
            return "fp8"
        return "int4" if linear and "shared_experts" in key else "bf16"
    return "bf16"


def random_weight(name, shape, generator):
    """Large enough that attention is uneven, routing decided and logits spread; rounded to bf16."""
    x = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return round_bf16(1 + 0.2 * x)
    if "embed_tokens" in name:
        return round_bf16(x)
    gain = 3.0 if "lm_head" in name else 1.5
    return round_bf16(x * gain / shape[-1] ** 0.5)


def inv_freq(text):
    """transformers' YaRN frequencies, in fp32 and in its order of operations, but from correctly rounded powers.

    torch's vectorised pow is off by one unit in the last place now and then, which at position 131,071 is an angle of
    0.004: enough to hide a real fault, and different from machine to machine.
    """
    rope, dim, base, one = text["rope_scaling"], text["qk_rope_head_dim"], text["rope_theta"], np.float32(1)

    def pair_of(rotations):
        return dim * math.log(rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(rope["beta_fast"])), 0), min(math.ceil(pair_of(rope["beta_slow"])), dim - 1)
    high += 0.001 if low == high else 0
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    wavelength = np.power(base, exponent.astype(np.float64)).astype(np.float32)
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = one - np.clip(ramp, np.float32(0), one)
    return torch.from_numpy(one / (np.float32(rope["factor"]) * wavelength) * (one - keep) + one / wavelength * keep)


def build(name, spec, seed):
    """Returns (transformers model, checkpoint tensors without prefix, text config)."""
    spec = dict(spec)
    (mean, deviation), form = spec.pop("bias"), spec.pop("form")
    spec.pop("wrapped"), spec.pop("long", None), spec.pop("model_type", None)
    shape_dtype, lora_norm_eps = spec.pop("shape_dtype", torch.int32), spec.pop("lora_norm_eps", None)
    text = {**COMMON, **spec}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(rope_interleave=True, attn_implementation="eager", **text)).eval()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            assert norm.variance_epsilon == 1e-6
            norm.variance_epsilon = lora_norm_eps or text["rms_norm_eps"]
    rotary, frequencies = model.model.rotary_emb, inv_freq(text)
    assert (frequencies / rotary.inv_freq - 1).abs().max() < 2.5e-7
    rotary.inv_freq.copy_(frequencies)
    generator = torch.Generator().manual_seed(seed)
    tensors, state = {}, model.state_dict()
    for key in sorted(state):
        if key.endswith("e_score_correction_bias"):
            value = mean + deviation * torch.randn(state[key].shape, generator=generator)
            tensors[key] = value
        elif form_of(key, form) == "int4":
            packed, scales, value = quantize_int4(random_weight(key, state[key].shape, generator))
            base = key.removesuffix("weight")
            tensors[base + "weight_packed"] = packed
            tensors[base + "weight_scale"] = scales
            tensors[base + "weight_shape"] = torch.tensor(value.shape, dtype=shape_dtype)
        elif form_of(key, form) == "fp8":
            codes, scales, value = quantize_fp8(random_weight(key, state[key].shape, generator))
            tensors[key] = codes
            tensors[key + "_scale_inv"] = scales
        else:
            value = random_weight(key, state[key].shape, generator)
            tensors[key] = value.to(torch.bfloat16)
        state[key].copy_(value)
    model.load_state_dict(state)
    if form == "fp8":  # as the release has it: of the wrong length, and unused
        for layer in range(text["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.zeros(56, dtype=torch.bfloat16)
    if QUANTIZATION[form]:
        text["quantization_config"] = QUANTIZATION[form]
    return model, tensors, text


def flat_config(text, model_type):
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": model_type, "dtype": "bfloat16", **text}


def write_model(directory, tensors, text, wrapped, model_type):
    if not wrapped:
        config = flat_config(text, model_type)
    else:
        tensors = {"language_model." + name: value for name, value in tensors.items()}
        tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
        tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
        config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
                  "bos_token_id": text["bos_token_id"], "eos_token_id": text["eos_token_id"],
                  "pad_token_id": text["pad_token_id"], "tie_word_embeddings": False, "dtype": "bfloat16",
                  "text_config": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **text},
                  "vision_config": None}
    write_json(os.path.join(directory, "config.json"), config)
    write_sharded(directory, tensors, 2)


@torch.no_grad()
def run(model, ids, positions):
    """Returns residual streams [layers, n, hidden], routing [moe layers, n, k] twice, logits [n, vocab]."""
    hidden, chosen, weights, hooks = [], [], [], []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(
            lambda _, __, out: hidden.append((out[0] if isinstance(out, tuple) else out).view(len(ids), -1))))
        if not hasattr(layer.mlp, "gate"):
            continue

        def routed(gate, args, out):
            x = args[0].view(-1, args[0].shape[-1])
            choice = (x @ gate.weight.T).sigmoid() + gate.e_score_correction_bias
            order = choice.gather(1, out[0]).argsort(-1, descending=True)
            chosen.append(out[0].gather(1, order).to(torch.int32))
            weights.append(out[1].gather(1, order))

        hooks.append(layer.mlp.gate.register_forward_hook(routed))
    n = len(ids)
    # An explicit mask: transformers would take jumps of position for borders between packed sequences.
    mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
    logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return torch.stack(hidden), torch.stack(chosen), torch.stack(weights), logits


def make_drafter(directory, target, taps, text, seed):
    """A random drafter for `target` and its goldens; taps: the target's residual streams of the prompt."""
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": text["hidden_size"],
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": text["vocab_size"], "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "rms_norm_eps": 1e-3, "max_position_embeddings": 262144, "rope_theta": 50000.0,
        "rope_scaling": yarn(64.0, 32.0, 1.0), "layer_types": ["full_attention"] * 2, "use_sliding_window": False,
        "tie_word_embeddings": False, "dtype": "bfloat16", "block_size": 8,
        "num_target_layers": text["num_hidden_layers"],
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 254},
    }
    hidden, q, kv, width = text["hidden_size"], 8 * 16, 2 * 16, config["intermediate_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(2):
        p = f"layers.{layer}."
        shapes.update({
            p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (q, hidden), p + "self_attn.k_proj.weight": (kv, hidden),
            p + "self_attn.v_proj.weight": (kv, hidden), p + "self_attn.o_proj.weight": (hidden, q),
            p + "self_attn.q_norm.weight": (16,), p + "self_attn.k_norm.weight": (16,),
            p + "mlp.gate_proj.weight": (width, hidden), p + "mlp.up_proj.weight": (width, hidden),
            p + "mlp.down_proj.weight": (hidden, width)})
    generator = torch.Generator().manual_seed(seed)
    weights = {name: random_weight(name, shapes[name], generator) for name in sorted(shapes)}
    write_json(os.path.join(directory, "config.json"), config)
    save_file({name: value.to(torch.bfloat16) for name, value in weights.items()},
              os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})

    drafter = DFlash(config, weights, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    features = drafter.features(torch.cat([taps[i] for i in config["dflash_config"]["target_layer_ids"]], dim=-1))
    sent = round_bf16(features)  # as they travel
    golden = {"features": features, "features_bf16": sent.to(torch.bfloat16)}
    # (anchor, position, first visible context position): all of the context, part of it, a window, none.
    blocks = [(17, 40, 0), (200, 25, 0), (99, 40, 16), (3, 0, 0)]
    golden["blocks"] = torch.tensor(blocks, dtype=torch.int32)
    golden["logits"] = torch.stack([drafter.draft(anchor, position, sent[first:position], first)
                                    for anchor, position, first in blocks])
    save_file(golden, os.path.join(directory, "golden.safetensors"))


def cases_of(last):
    return {"prompt": (40, torch.arange(40)),
            # One chain whose positions jump to where only YaRN's scaled frequencies are right.
            "far": (48, torch.cat([torch.arange(8), torch.arange(4090, 4106), torch.arange(6000, 6008),
                                   torch.arange(100_000, 100_008), torch.arange(last - 8, last)]))}


def run_cases(model, text, generator):
    """Returns (goldens, the residual streams of the prompt)."""
    golden, taps = {"inv_freq": model.model.rotary_emb.inv_freq}, None
    for case, (n, positions) in cases_of(text["max_position_embeddings"]).items():
        ids = torch.randint(0, text["vocab_size"], (n,), generator=generator)
        hidden, chosen, weights, logits = run(model, ids, positions)
        golden.update({f"{case}.ids": ids.to(torch.int32), f"{case}.positions": positions.to(torch.int32),
                       f"{case}.hidden": hidden, f"{case}.experts": chosen, f"{case}.expert_weights": weights,
                       f"{case}.logits": logits})
        taps = hidden if case == "prompt" else taps
    return golden, taps


def save(directory, golden):
    save_file({key: value.contiguous() for key, value in golden.items()},
              os.path.join(directory, "golden.safetensors"))
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(directory) for f in files)
    print(f"{os.path.basename(directory)}: {size / 1e6:.2f} MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=ROOT, help="directory of the models")
    parser.add_argument("names", nargs="*", help="models to make (default: all)")
    arguments = parser.parse_args()

    def new_directory(name):
        directory = os.path.join(arguments.out, name)
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        return directory

    torch.manual_seed(0)
    for seed, (name, spec) in enumerate(MODELS.items()):
        if arguments.names and name not in arguments.names:
            continue
        directory = new_directory(name)
        model, tensors, text = build(name, spec, seed + 1)
        write_model(directory, tensors, text, spec["wrapped"], spec.get("model_type", "deepseek_v3"))
        generator = torch.Generator().manual_seed(seed + 100)
        golden, taps = run_cases(model, text, generator)
        if name == "int4":
            drafter_dir = os.path.join(directory, "drafter")
            os.makedirs(drafter_dir)
            make_drafter(drafter_dir, model, taps, text, seed + 200)
        if "long" in spec:
            ids = torch.randint(0, text["vocab_size"], (spec["long"],), generator=generator)
            golden["long.ids"] = ids.to(torch.int32)
            golden["long.logits"] = run(model, ids, torch.arange(len(ids)))[3][-4:]
        save(directory, golden)

    # Of a variant only configuration and goldens are written; its weights are those of its model.
    seeds = {name: seed for seed, name in enumerate(MODELS)}
    for name, (base, change) in VARIANTS.items():
        if arguments.names and name not in arguments.names:
            continue
        directory = new_directory(name)
        spec = {**MODELS[base], **change}
        model, _, text = build(base, spec, seeds[base] + 1)
        if not spec["wrapped"]:
            write_json(os.path.join(directory, "config.json"), flat_config(text, spec["model_type"]))
        golden, _ = run_cases(model, text, torch.Generator().manual_seed(seeds[base] + 100))
        save(directory, golden)


if __name__ == "__main__":
    main()
