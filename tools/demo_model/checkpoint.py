"""Kimi K2.6's checkpoint format and z-lab's drafter format, written and read back."""

import json
import os

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import int4
import settings
import target
import tokenizer

PREFIX = "language_model."
SHARDS = 2


def _write_json(path, value):
    with open(path, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def text_config():
    """The text_config of the target."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **settings.TARGET,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": tokenizer.END_OF_TURN,
        "pad_token_id": tokenizer.PAD,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                       r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                            "group_size": settings.GROUP_SIZE, "actorder": None, "block_structure": None,
                            "dynamic": False, "observer": "minmax", "observer_kwargs": {}},
            }},
        },
    }


def _write_configs(folder):
    _write_json(folder + "/config.json", {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": tokenizer.END_OF_TURN,
        "pad_token_id": tokenizer.PAD,
        "ignore_index": -100,
        "media_placeholder_token_id": tokenizer.NAMED["<|media_pad|>"],
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": text_config(),
        "vision_config": None,
    })
    _write_json(folder + "/generation_config.json", {
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": [tokenizer.END_OF_TURN, tokenizer.EOS],
        "pad_token_id": tokenizer.PAD,
        "max_length": settings.TARGET["max_position_embeddings"],
    })


def full_tensors(model):
    """{HuggingFace name: fp32 tensor} of a Target, the experts one by one."""
    out = {}
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        tensor = tensor.detach().float()
        if ".experts_" in name:
            layer, kind = name.split(".experts_")
            for number, expert in enumerate(tensor):
                out["model.%s.experts.%d.%s_proj.weight" % (layer, number, kind)] = (
                    expert.t() if kind == "down" else expert).contiguous()
        else:
            out[name if name.startswith("lm_head") else "model." + name] = tensor
    return out


def _sharded(tensors):
    """The names of `tensors` in order, split into SHARDS lists of nearly equal bytes."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    shards, written = [[] for _ in range(SHARDS)], 0
    for name, tensor in tensors.items():
        shards[min(SHARDS - 1, written * SHARDS // total)].append(name)
        written += tensor.numel() * tensor.element_size()
    return shards, total


def write_target(model, folder):
    """Writes config.json, generation_config.json, the shards and their index."""
    tensors = {}
    for name, tensor in sorted(full_tensors(model).items()):
        name = PREFIX + name
        if ".mlp.experts." in name:
            codes, scales = int4.quantize(tensor)
            stem = name[:-len("weight")]
            tensors[stem + "weight_packed"] = int4.pack(codes)
            tensors[stem + "weight_scale"] = scales
            tensors[stem + "weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
        else:
            tensors[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
    shards, total = _sharded(tensors)
    where = {}
    for number, names in enumerate(shards):
        file = "model-%05d-of-%05d.safetensors" % (number + 1, SHARDS)
        save_file({name: tensors[name].cpu().contiguous() for name in names}, os.path.join(folder, file),
                  metadata={"format": "pt"})
        where.update({name: file for name in names})
    _write_json(folder + "/model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    _write_configs(folder)


def read_tensors(folder):
    """{HuggingFace name: fp32 tensor} of an exported target: INT4 experts dequantised and rounded to bf16."""
    with open(folder + "/model.safetensors.index.json") as file:
        where = json.load(file)["weight_map"]
    raw = {}
    for file in sorted(set(where.values())):
        with safe_open(os.path.join(folder, file), "pt") as shard:
            for name in shard.keys():
                raw[name[len(PREFIX):]] = shard.get_tensor(name)
    out = {}
    for name, tensor in raw.items():
        if name.endswith("weight_packed"):
            stem = name[:-len("weight_packed")]
            weight = int4.dequantize(int4.unpack(tensor), raw[stem + "weight_scale"])
            if list(weight.shape) != raw[stem + "weight_shape"].tolist():
                raise ValueError("%s: weight_shape disagrees with the packed weights" % stem)
            out[stem + "weight"] = weight.to(torch.bfloat16).float()
        elif not name.endswith(("weight_scale", "weight_shape")):
            out[name] = tensor.float()
    return out


def read_target(folder):
    """The exported target as an fp32 Target in evaluation mode, its parameters frozen."""
    tensors = read_tensors(folder)
    model = target.Target()
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if ".experts_" in name:
                layer, kind = name.split(".experts_")
                for number in range(len(tensor)):
                    expert = tensors["model.%s.experts.%d.%s_proj.weight" % (layer, number, kind)]
                    tensor[number] = expert.t() if kind == "down" else expert
            else:
                tensor.copy_(tensors[name if name.startswith("lm_head") else "model." + name])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def drafter_config():
    """config.json of the drafter."""
    config = dict(settings.DRAFTER)
    taps, block = config.pop("target_layer_ids"), config["block_size"]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **config,
        "vocab_size": settings.VOCABULARY,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": {**settings.TARGET["rope_scaling"], "rope_type": "yarn", "attention_factor": 1.0},
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config["num_hidden_layers"],
        "num_target_layers": settings.TARGET["num_hidden_layers"],
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": tokenizer.END_OF_TURN,
        "pad_token_id": tokenizer.PAD,
        "dtype": "bfloat16",
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": tokenizer.MASK, "block_size": block,
                          "num_target_layers": settings.TARGET["num_hidden_layers"], "causal": False},
    }


def write_drafter(model, folder):
    """Writes the drafter's config.json and model.safetensors; the model's weights become the rounded ones."""
    os.makedirs(folder, exist_ok=True)
    tensors = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder + "/model.safetensors",
              metadata={"format": "pt"})
    _write_json(folder + "/config.json", drafter_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
