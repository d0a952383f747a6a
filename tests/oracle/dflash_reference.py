"""A DFlash drafter in plain PyTorch, fp32, one sequence, no cache: the reference for model/dflash.

Every layer's keys and values are those of the context tokens, made from the target's projected features, followed by
those of the block (the anchor and its masks).  The block sees the whole context and the whole block.
"""

import math

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def yarn_inv_freq(dim, theta, factor, original, beta_fast, beta_slow):
    def pair_of(rotations):
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    i = torch.arange(dim // 2, dtype=torch.float64)
    ramp = torch.clamp((i - low) / (high - low), 0, 1)
    plain = theta ** (-2 * i / dim)
    return (plain / factor * ramp + plain * (1 - ramp)).to(torch.float32)


def rotate(x, positions, inv_freq, amplitude):
    """Half-split rotation of x [tokens, heads, dim]."""
    angle = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    cos, sin = (torch.cos(angle) * amplitude)[:, None, :], (torch.sin(angle) * amplitude)[:, None, :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class DFlash:
    def __init__(self, config, weights, embedding, lm_head):
        self.c = config
        self.w = weights
        self.embedding = embedding
        self.lm_head = lm_head
        rope = config["rope_scaling"]
        self.inv_freq = yarn_inv_freq(
            config["head_dim"], config["rope_theta"], rope["factor"],
            rope["original_max_position_embeddings"], rope["beta_fast"], rope["beta_slow"])
        mscale = lambda m: 0.1 * m * math.log(rope["factor"]) + 1
        self.amplitude = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])

    def features(self, taps):
        """taps [tokens, number of taps * hidden] -> [tokens, hidden]."""
        return rms_norm(taps @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.c["rms_norm_eps"])

    def draft(self, anchor, position, features, first):
        """Logits [block - 1, vocab] for the block at `position`, given features of positions first, first + 1, …"""
        c, w = self.c, self.w
        block, dim, eps = c["block_size"], c["head_dim"], c["rms_norm_eps"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        ids = torch.tensor([anchor] + [c["dflash_config"]["mask_token_id"]] * (block - 1))
        where = torch.arange(position, position + block)
        where_context = torch.arange(first, first + features.shape[0])
        h = self.embedding[ids]
        for layer in range(c["num_hidden_layers"]):
            p = f"layers.{layer}."
            attention = p + "self_attn."
            u = rms_norm(h, w[p + "input_layernorm.weight"], eps)
            source = torch.cat((features, u))
            q = (u @ w[attention + "q_proj.weight"].T).view(block, heads, dim)
            k = (source @ w[attention + "k_proj.weight"].T).view(-1, kv_heads, dim)
            v = (source @ w[attention + "v_proj.weight"].T).view(-1, kv_heads, dim)
            q = rotate(rms_norm(q, w[attention + "q_norm.weight"], eps), where, self.inv_freq, self.amplitude)
            k = rotate(rms_norm(k, w[attention + "k_norm.weight"], eps), torch.cat((where_context, where)),
                       self.inv_freq, self.amplitude)
            k = k.repeat_interleave(heads // kv_heads, dim=1)
            v = v.repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
            o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(block, heads * dim)
            h = h + o @ w[attention + "o_proj.weight"].T
            u = rms_norm(h, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = u @ w[p + "mlp.gate_proj.weight"].T, u @ w[p + "mlp.up_proj.weight"].T
            h = h + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return rms_norm(h, w["norm.weight"], eps)[1:] @ self.lm_head.T
