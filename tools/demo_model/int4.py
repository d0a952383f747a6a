"""Symmetric INT4 with one bf16 scale per 32 weights, packed as compressed-tensors' "pack-quantized" has it."""

import torch

import settings


def quantize(weight):
    """[..., out, in] -> (int8 codes in -7..7 of the same shape, bf16 scales [..., out, in / 32]).

    Scales are rounded up to five significant bits: code * scale is then exact in bf16, so that engines which round
    the product to bf16 and engines which keep it in fp32 run the same model."""
    groups = weight.float().unflatten(-1, (-1, settings.GROUP_SIZE))
    mantissa, exponent = torch.frexp((groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-8))
    scale = torch.ldexp(torch.ceil(mantissa * 32) / 32, exponent)
    codes = torch.round(groups / scale).clamp(-7, 7).to(torch.int8)
    return codes.reshape(weight.shape), scale.squeeze(-1).to(torch.bfloat16)


def dequantize(codes, scales):
    """The weights that codes and scales stand for, fp32."""
    groups = codes.unflatten(-1, (-1, settings.GROUP_SIZE)).float() * scales.float().unsqueeze(-1)
    return groups.reshape(codes.shape)


def pack(codes):
    """int8 codes [out, in] -> int32 [out, in / 8]: code + 8 as a nibble, the first input in the lowest bits."""
    nibbles = (codes.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=codes.device))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words):
    """The inverse of pack."""
    nibbles = (words.to(torch.int64).unsqueeze(-1) >> (4 * torch.arange(8, device=words.device))) & 15
    return (nibbles - 8).to(torch.int8).flatten(-2)
