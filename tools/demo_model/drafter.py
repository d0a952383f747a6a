"""The DFlash drafter: fills a block of masks in one pass, with the target's features as context."""

import math

import torch
from torch import nn

import settings
import target
import tokenizer
import yarn


class Attention(nn.Module):
    """Grouped-query attention of a block over the context's features and itself."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.groups, self.width = (
            config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        hidden = config["hidden_size"]
        self.q_proj = target.linear(hidden, self.heads * self.width)
        self.k_proj = target.linear(hidden, self.groups * self.width)
        self.v_proj = target.linear(hidden, self.groups * self.width)
        self.o_proj = target.linear(self.heads * self.width, hidden)
        self.q_norm = target.Norm(self.width, config["rms_norm_eps"])
        self.k_norm = target.Norm(self.width, config["rms_norm_eps"])

    def _split(self, x, heads):
        return x.unflatten(-1, (heads, self.width)).transpose(1, 2)

    def forward(self, x, features, block_rope, context_rope, mask):
        """x [batch, block tokens, hidden], features [batch, context, hidden]; `mask` [batch, 1, block tokens, context +
        block tokens] is True where a key is seen. Keys and values of both go through the same projections."""
        query = yarn.rotate_halves(self.q_norm(self._split(self.q_proj(x), self.heads)), *block_rope)
        keys = torch.cat([yarn.rotate_halves(self.k_norm(self._split(self.k_proj(source), self.groups)), *rope)
                          for source, rope in ((features, context_rope), (x, block_rope))], 2)
        values = torch.cat([self._split(self.v_proj(source), self.groups) for source in (features, x)], 2)
        repeat = self.heads // self.groups
        out = target.attend(query.to(values.dtype), keys.to(values.dtype).repeat_interleave(repeat, 1),
                            values.repeat_interleave(repeat, 1), self.width ** -0.5, mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One pre-norm layer; the features enter attention only."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = target.Norm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = target.Norm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = target.Mlp(config["hidden_size"], config["intermediate_size"])

    def forward(self, x, *context):
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The whole drafter; embedding and head are the target's."""

    def __init__(self):
        super().__init__()
        config = settings.DRAFTER
        hidden, self.block = config["hidden_size"], config["block_size"]
        self.fc = target.linear(len(config["target_layer_ids"]) * hidden, hidden)
        self.hidden_norm = target.Norm(hidden, config["rms_norm_eps"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = target.Norm(hidden, config["rms_norm_eps"])
        self.cos, self.sin = yarn.tables(config["head_dim"], config["rope_theta"], settings.TARGET["rope_scaling"],
                                         config["max_position_embeddings"] + self.block, target.DEVICE)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deviation = 0.5 / math.sqrt(parameter.shape[-1])
                if "o_proj" in name or "down_proj" in name:
                    deviation /= math.sqrt(2 * len(self.layers))
                nn.init.normal_(parameter, 0.0, deviation)
        self.to(target.DEVICE)

    def forward(self, taps, anchors, blocks):
        """taps [batch, context, F * hidden] of positions 0..; anchors [batch, n], the blocks' first positions; blocks
        [batch, n, block, hidden], embedded. A block sees the positions before its anchor, and itself.
        Returns [batch, n, block, hidden], ready for the target's head; row 0 of a block is of no use."""
        batch, count = anchors.shape
        context, tokens = taps.shape[1], count * self.block
        features = self.hidden_norm(self.fc(taps))
        offsets = torch.arange(self.block, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
        block_rope = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        context_rope = self.cos[:context], self.sin[:context]
        before = torch.arange(context, device=anchors.device) < anchors.unsqueeze(-1)
        before = before.unsqueeze(2).expand(batch, count, self.block, context).reshape(batch, 1, tokens, context)
        of_block = torch.arange(tokens, device=anchors.device) // self.block
        own = (of_block.unsqueeze(0) == of_block.unsqueeze(1)).expand(batch, 1, tokens, tokens)
        mask = torch.cat([before, own], -1)
        x = blocks.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, features, block_rope, context_rope, mask)
        return self.norm(x).unflatten(1, (count, self.block))


def embed_blocks(model, first, block):
    """Token ids `first` [batch, n] -> embedded blocks [batch, n, block, hidden]: the token, then masks."""
    ids = torch.full(first.shape + (block,), tokenizer.MASK, dtype=torch.long, device=first.device)
    ids[..., 0] = first
    return model.embed_tokens(ids)
