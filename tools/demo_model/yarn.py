"""Rotary positions with YaRN scaling, as DeepSeek-V3, Kimi K2 and their DFlash drafters use them."""

import math

import torch


def inverse_frequencies(width, theta, scaling):
    """The width / 2 rotation speeds (radians per position), fp32."""
    index = torch.arange(0, width, 2, dtype=torch.float32)
    original = 1.0 / theta ** (index / width)

    def pair_with_turns(turns):
        """The (fractional) pair that makes `turns` full turns over the original context."""
        length = scaling["original_max_position_embeddings"]
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_with_turns(scaling["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return original * (1 - ramp) + original / scaling["factor"] * ramp


def tables(width, theta, scaling, positions, device):
    """(cos, sin), each [positions, width / 2] fp32."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(width, theta, scaling))
    return angles.cos().to(device), angles.sin().to(device)


def magnitude(scaling):
    """YaRN's attention factor m; softmax scales are multiplied by m squared."""
    return 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0


def rotate_pairs(x, cos, sin):
    """Rotates neighbours (2i, 2i + 1). The result is stored halves apart; queries and keys alike, so scores are those
    of the interleaved layout."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


def rotate_halves(x, cos, sin):
    """Rotates (i, i + width / 2)."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
