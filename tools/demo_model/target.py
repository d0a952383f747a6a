"""The target: a small DeepSeek-V3 model (MLA attention, routed experts), written for training and batched decoding."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import settings
import yarn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def autocast():
    """bf16 matrix products on a GPU; nothing on a CPU."""
    return torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda")


def attend(query, key, value, scale, mask=None, causal=False):
    """softmax(query key^T * scale) value over [batch, heads, tokens, width]; `mask` is True where a key is seen."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1).to(value.dtype) @ value


def linear(inputs, outputs):
    """A product without bias; Kimi's models have none."""
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """RMSNorm with fp32 statistics."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.epsilon)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (y * self.weight.float()).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; a correction bias takes part in the choice only."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["n_routed_experts"], config["hidden_size"]))
        self.register_buffer("e_score_correction_bias", torch.zeros(config["n_routed_experts"]))
        self.chosen, self.scale = config["num_experts_per_tok"], config["routed_scaling_factor"]

    def forward(self, x):
        """Rows x [n, width] -> (weights [n, experts], 0 where not chosen; how often each expert was chosen)."""
        with torch.autocast(DEVICE, enabled=False):
            scores = torch.sigmoid(x.float() @ self.weight.float().t())
            chosen = (scores.detach() + self.e_score_correction_bias.float()).topk(self.chosen, -1).indices
            weights = scores.gather(-1, chosen)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
            load = torch.zeros_like(scores).scatter(-1, chosen, 1.0).sum(0)
            return torch.zeros_like(scores).scatter(-1, chosen, weights), load


class Experts(nn.Module):
    """Routed experts and a shared one. Every expert is computed for every row, which suits a GPU at this size; the
    routing weight, 0 for experts not chosen, scales the inner activations."""

    def __init__(self, config):
        super().__init__()
        experts, inner, width = config["n_routed_experts"], config["moe_intermediate_size"], config["hidden_size"]
        self.gate = Router(config)
        self.experts_gate = nn.Parameter(torch.empty(experts, inner, width))
        self.experts_up = nn.Parameter(torch.empty(experts, inner, width))
        self.experts_down = nn.Parameter(torch.empty(experts, inner, width))  # transposed: [experts, in, out]
        self.shared_experts = Mlp(width, inner * config["n_shared_experts"])

    def forward(self, x):
        """x [batch, tokens, width] -> (y of the same shape, load of the experts)."""
        rows = x.flatten(0, 1)
        weights, load = self.gate(rows)
        inner = F.silu(F.linear(rows, self.experts_gate.flatten(0, 1))) * F.linear(rows, self.experts_up.flatten(0, 1))
        inner = inner.unflatten(-1, weights.shape[-1:] + (-1,)) * weights.to(inner.dtype).unsqueeze(-1)
        routed = F.linear(inner.flatten(1), self.experts_down.flatten(0, 1).t())
        return (routed + self.shared_experts(rows)).view(x.shape), load


class Attention(nn.Module):
    """Multi-head latent attention, in the expanded form."""

    def __init__(self, config):
        super().__init__()
        width, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.latent = config["num_attention_heads"], config["kv_lora_rank"]
        self.nope, self.rope, self.value = (
            config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        self.q_a_proj = linear(width, config["q_lora_rank"])
        self.q_a_layernorm = Norm(config["q_lora_rank"], epsilon)
        self.q_b_proj = linear(config["q_lora_rank"], self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(width, self.latent + self.rope)
        self.kv_a_layernorm = Norm(self.latent, epsilon)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, width)
        self.scale = (self.nope + self.rope) ** -0.5 * yarn.magnitude(config["rope_scaling"]) ** 2

    def _split(self, x, width):
        return x.unflatten(-1, (self.heads, width)).transpose(1, 2)

    def forward(self, x, cos, sin, cache=None):
        """Causal attention over x [batch, tokens, width]; with `cache` (a Cache's layer and the position) x holds one
        new token of each row, and the tokens before it are in the cache."""
        batch, tokens, _ = x.shape
        query = self._split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), self.nope + self.rope)
        query_nope, query_rope = query.split([self.nope, self.rope], -1)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        expanded = self._split(self.kv_b_proj(self.kv_a_layernorm(latent)), self.nope + self.value)
        key_nope, value = expanded.split([self.nope, self.value], -1)
        key_rope = yarn.rotate_pairs(key_rope, cos, sin).unsqueeze(1).expand(batch, self.heads, tokens, self.rope)
        query = torch.cat([query_nope, yarn.rotate_pairs(query_rope, cos, sin)], -1)
        key = torch.cat([key_nope, key_rope], -1)
        if cache is None:
            # Fused attention wants one width for keys and values.
            value = F.pad(value, (0, key.shape[-1] - self.value))
            out = attend(query, key, value, self.scale, causal=True)[..., :self.value]
        else:
            keys, values, position = cache
            keys[:, :, position], values[:, :, position] = key[:, :, 0], value[:, :, 0]
            scores = (query @ keys[:, :, :position + 1].transpose(-1, -2)).float() * self.scale
            out = torch.softmax(scores, -1).to(value.dtype) @ values[:, :, :position + 1]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config, number):
        super().__init__()
        self.input_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.routed = number >= config["first_k_dense_replace"]
        self.mlp = Experts(config) if self.routed else Mlp(config["hidden_size"], config["intermediate_size"])

    def forward(self, x, cos, sin, cache=None):
        """(residual stream after the layer, load of the experts or None)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache).to(x.dtype)
        y, load = self.post_attention_layernorm(x), None
        if self.routed:
            y, load = self.mlp(y)
        else:
            y = self.mlp(y)
        return x + y.to(x.dtype), load


class Target(nn.Module):
    """The whole model. Parameters carry HuggingFace's names but for the experts, which lie in three tensors a layer."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config = dict(config or settings.TARGET)
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.lm_head = linear(config["hidden_size"], config["vocab_size"])
        self.cos, self.sin = yarn.tables(config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"],
                                         config["max_position_embeddings"], DEVICE)
        self._initialise()
        self.to(DEVICE)

    def _initialise(self):
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            inputs = parameter.shape[-2] if "experts_down" in name else parameter.shape[-1]
            deviation = 0.02 if "embed" in name else 0.5 / math.sqrt(inputs)
            if "o_proj" in name or "down" in name:
                deviation /= math.sqrt(2 * len(self.layers))
            nn.init.normal_(parameter, 0.0, deviation)

    def routers(self):
        """The routers, in layer order."""
        return [layer.mlp.gate for layer in self.layers if layer.routed]

    def to_bfloat16(self):
        """Weights and activations to bf16, routing and its bias left in fp32. Returns self."""
        biases = [router.e_score_correction_bias.clone() for router in self.routers()]
        self.to(torch.bfloat16)
        for router, bias in zip(self.routers(), biases):
            router.e_score_correction_bias = bias
        return self

    def forward(self, ids, taps=None, cache=None, position=0, residual=None):
        """ids [batch, tokens] -> normed hidden states [batch, tokens, width]; with `taps` (layer numbers) also the
        residual streams after those layers, concatenated. `residual` is the residual stream's type (default: as the
        weights)."""
        tokens = ids.shape[1]
        cos, sin = self.cos[position:position + tokens], self.sin[position:position + tokens]
        x = self.embed_tokens(ids)
        x = x if residual is None else x.to(residual)
        tapped = []
        for number, layer in enumerate(self.layers):
            x, _ = layer(x, cos, sin, None if cache is None else cache[number] + (position,))
            if taps is not None and number in taps:
                tapped.append(x)
        hidden = self.norm(x)
        return hidden if taps is None else (hidden, torch.cat(tapped, -1))

    def logits(self, hidden):
        """fp32 logits."""
        return self.lm_head(hidden).float()

    def new_cache(self, rows, length):
        """Room for `length` tokens of `rows` sequences: (keys, values) per layer."""
        attention = self.layers[0].self_attn
        kind = self.lm_head.weight.dtype

        def room(width):
            return torch.empty(rows, attention.heads, length, width, device=DEVICE, dtype=kind)
        return [(room(attention.nope + attention.rope), room(attention.value)) for _ in self.layers]
