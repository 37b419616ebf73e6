"""The modules that families make their blocks of: attention with its projections, and the gated MLP.

A module gets the residual stream and the norm before it, for addition, norm and the first product may be one kernel; it returns
its output, not yet added, and the residual. Order and norms are the family's business. Rotary embedding, KV write and attention
itself come as one callable (`Attend`), for they need the cache and the step's metadata. Nothing here depends on data: forward
can be captured in a graph.
"""

from typing import Protocol

import torch

from quire.workers.layers.kv_scales import KVScales
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.config import AttentionSpec
from quire.workers.parallel import whole


class Attend(Protocol):
    """Attention of `layer`: qkv [T, (Hq + 2 Hkv) D] = q|k|v -> [T, Hq D], keys and values written to the cache.

    Norm weights [D] are those of QK-norm (applied to each head before the rotation), None where the model has none.
    """

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor: ...


class SelfAttention(Module):
    """The projections around attention; q, k and v are one matrix product. Ranks have heads of their own.

    In a block, and so in the checkpoint, it is `self_attn`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        layer: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ):
        super().__init__()
        self.layer, place = layer, place.at("self_attn")
        heads, kv_heads = place.parallel.split(spec.num_heads), place.parallel.kv_heads(spec.num_kv_heads)
        q, kv, hidden = heads.times(spec.head_dim), kv_heads.times(spec.head_dim), whole(hidden_size)
        self.qkv_proj = Linear(hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, qkv_bias, place)
        self.o_proj = Linear(q, {"o_proj": hidden}, o_bias, place)
        if spec.qk_norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps, place.dtype, place.device)
            self.k_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps, place.dtype, place.device)
        self.kv_scales = KVScales() if spec.cache_dtype is not None else None
        self.has_qk_norm = spec.qk_norm_eps is not None

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        norm: RMSNorm,
        attend: Attend,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With logits_indices, of these tokens only: keys and values are there for all, the rest is computed for some."""
        q_norm, k_norm = (self.q_norm.weight, self.k_norm.weight) if self.has_qk_norm else (None, None)
        qkv, residual = self.qkv_proj.normed(x, residual, norm)
        out = attend(self.layer, qkv, q_norm, k_norm)
        if logits_indices is not None:
            out, residual = out.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return self.o_proj.in_parts(out), residual


class GatedMLP(Module):
    """down(silu(gate(x)) · up(x)); gate and up are one matrix product. In a block, and in the checkpoint, it is `mlp`."""

    def __init__(self, hidden_size: int, intermediate_size: int, place: Placement, *, has_bias: bool = False):
        super().__init__()
        place = place.at("mlp")
        hidden, inner = whole(hidden_size), place.parallel.split(intermediate_size)
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, has_bias, place)
        self.down_proj = Linear(inner, {"down_proj": hidden}, has_bias, place)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = self.gate_up_proj.normed(x, residual, norm, True)
        return self.down_proj.in_parts(h), residual
