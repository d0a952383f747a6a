"""Writes Hugging Face checkpoints the way Kimi K2 ships: bf16, FP8 blocks, INT4 pack-quantized experts, an index over
shards."""

import json
import os

import torch
from safetensors.torch import save_file

GROUP = 32   # inputs per scale of INT4
BLOCK = 128  # rows and columns per scale of FP8


def round_bf16(x):
    return x.to(torch.bfloat16).to(torch.float32)


def quantize_int4(weight):
    """Returns (packed int32 [out, in / 8], scales bf16 [out, in / 32], the weight they stand for)."""
    out, inputs = weight.shape
    groups = weight.reshape(out, inputs // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    scale = scales.to(torch.float32).unsqueeze(-1)
    codes = torch.clamp(torch.round(groups / scale), -8, 7)
    value = round_bf16(codes * scale).reshape(out, inputs)
    nibbles = (codes.reshape(out, inputs // 8, 8) + 8).to(torch.int64)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words, scales, value


def quantize_fp8(weight):
    """Returns (float8_e4m3fn [out, in], scales fp32 [ceil(out / 128), ceil(in / 128)], the weight they stand for)."""
    out, inputs = weight.shape
    scales = torch.zeros(-(-out // BLOCK), -(-inputs // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[i * BLOCK:(i + 1) * BLOCK, j * BLOCK:(j + 1) * BLOCK].abs().max() / 448
    scale = scales.repeat_interleave(BLOCK, 0)[:out].repeat_interleave(BLOCK, 1)[:, :inputs]
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, scales, round_bf16(codes.to(torch.float32) * scale)


def write_sharded(directory, tensors, shards):
    """Splits tensors, in order of name, into `shards` files of about equal size under one index."""
    names = sorted(tensors)
    total = sum(tensors[n].numel() * tensors[n].element_size() for n in names)
    parts, done = [{} for _ in range(shards)], 0
    for name in names:
        parts[min(shards - 1, done * shards // total)][name] = tensors[name].contiguous()
        done += tensors[name].numel() * tensors[name].element_size()
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, os.path.join(directory, file), metadata={"format": "pt"})
        weight_map.update({name: file for name in part})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(os.path.join(directory, "model.safetensors.index.json"), index)


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
