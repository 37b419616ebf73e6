"""The tiny model for training: a Llama in plain PyTorch, with a checkpoint's names of weights.

Used by train_tiny.py. workers/models/ serves the checkpoint; the two share no code, so each tests the other.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_rows import LONG, LOSS_BIT
from torch import nn


@dataclass(frozen=True)
class TinyConfig:
    """The sizes, with config.json's names."""

    vocab_size: int = 2816
    hidden_size: int = 256
    intermediate_size: int = 448
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = LONG
    rms_norm_eps: float = 1e-5


class Norm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape.hidden_size)), shape.rms_norm_eps

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj, self.o_proj = nn.Linear(shape.hidden_size, q, bias=False), nn.Linear(q, shape.hidden_size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(shape.hidden_size, kv, bias=False) for _ in range(2))

    def forward(self, x, cos, sin, mask):
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, cos, sin):
    """Rotary embedding of [batch, heads, length, head_dim], in halves (arXiv:2104.09864, as in Llama's checkpoints)."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        sizes = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(*sizes, bias=False), nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape), Norm(shape)
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Tiny(nn.Module):
    """rows [batch, length] of int16 -> mean loss over the tokens marked with LOSS_BIT."""

    def __init__(self, shape, bos):
        super().__init__()
        self.bos = bos
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)
        inverse = 10000.0 ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        self.register_buffer("inverse_frequency", inverse, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.04 / math.sqrt(2 * shape.num_hidden_layers) if deep else 0.04)

    def forward(self, rows):
        ids = (rows & (LOSS_BIT - 1)).long()
        index = torch.arange(ids.shape[1], device=ids.device)
        start = torch.where(ids == self.bos, index, 0).cummax(1).values  # begin of a token's document
        angle = (index - start).float()[..., None] * self.inverse_frequency
        angle = torch.cat((angle, angle), -1)[:, None]
        cos, sin = angle.cos(), angle.sin()
        mask = ((start[:, :, None] == start[:, None]) & (index[:, None] >= index))[:, None]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)[:, :-1]
        target = torch.where((rows & LOSS_BIT) > 0, ids, -100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)
