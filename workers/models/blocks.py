"""The modules that families build their blocks from: attention with its projections, and the MLP, gated or not.

A module gets the residual stream and the norm before it, since addition, norm and the first product may be one kernel; it
returns its output, not yet added, and the residual. If a block norms once for several modules, their `of` takes the normed
input. The family decides about order and norms. What a module needs of the step is in the `StepContext`; rotary embedding, KV
write and attention itself are one callable there (`attend`). No shape or branch depends on values, so forward can be captured.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.layers import ops
from quire.workers.layers.kv_scales import KVScales
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module, WeightOwner, fill_cut, new_parameter
from quire.workers.layers.norm import Norm, RMSNorm, UnweightedRMSNorm
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.models.config import AttentionSpec, ValueHeads
from quire.workers.models.fused import HeadRows, RowsByName, RowsOf, pair, separate
from quire.workers.models.step_context import StepContext
from quire.workers.shard import Shard, whole


class Sinks(WeightOwner):
    """A learned logit for each query head of this rank. The checkpoint names the tensor itself, without `.weight`."""

    def __init__(self, heads: Shard, place: Placement):
        super().__init__()
        self._heads = heads
        self.weight = new_parameter((heads.size,), place.dtype, place.device)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield name, copied(self.weight, (self._heads,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        fill_cut(self.weight, (self._heads.full,), lambda whole: whole[self._heads.slice], limit, generator)


class Names(NamedTuple):
    """Names of attention's modules in the checkpoint."""

    attention: str = "self_attn"
    o_proj: str = "o_proj"


LLAMA = Names()


def of_heads(spec: AttentionSpec) -> type[RMSNorm]:
    """The norm of each head of q and k."""
    return RMSNorm if spec.has_qk_weights else UnweightedRMSNorm


class SelfAttention(Module):
    """The projections around attention; q, k and v are one matrix product. Heads are split over the ranks.

    qkv: how the checkpoint stores the three. values: their heads, if these are smaller than the keys' (only for separate
    tensors). make_qk_norm: makes a norm, other than the spec's, over the queries or keys of a rank's heads; it changes x
    [T, H D] in place. v_norm_eps: epsilon of a weightless RMSNorm of each head's values. feeds_add_norm: the output
    is only ever passed to `Norm.add`, so it may be left as split-K partial sums. is_gated: `qkv` gives gate|q|k|v, and
    each head's output is multiplied by the sigmoid of its gate.
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
        qkv: RowsOf = separate,
        names: Names = LLAMA,
        make_qk_norm: Callable[[Shard, Placement], Norm] | None = None,
        v_norm_eps: float | None = None,
        values: ValueHeads | None = None,
        feeds_add_norm: bool = True,
        is_gated: bool = False,
    ):
        super().__init__()
        self.layer, place = layer, place.at(names.attention)
        heads, kv_heads = place.parallel.split(spec.num_heads), place.parallel.kv_heads(spec.num_kv_heads)
        hidden, rows = whole(hidden_size), qkv(HeadRows(heads, kv_heads, spec.head_dim))
        if values is not None:
            rows = {**rows, "v_proj": kv_heads.times(values.head_dim)}
        self.qkv_proj = Linear(hidden, rows, qkv_bias, place)
        self.o_proj = Linear(heads.times(values.head_dim if values else spec.head_dim), {names.o_proj: hidden}, o_bias, place)
        if spec.qk_norm_eps is not None:
            make, norm = of_heads(spec), (spec.head_dim, spec.qk_norm_eps, place.dtype, place.device)
            self.q_norm: Norm = make(*norm, weighs=spec.qk_norm_weighs)
            if spec.shares is None:
                self.k_norm: Norm = make(*norm, weighs=spec.qk_norm_weighs)
        elif make_qk_norm is not None:
            self.q_norm, self.k_norm = make_qk_norm(heads, place), make_qk_norm(kv_heads, place)
        if spec.has_sinks:
            self.sinks = Sinks(heads, place)
        if v_norm_eps is not None:
            self.v_norm = UnweightedRMSNorm(spec.head_dim, v_norm_eps, place.dtype, place.device)
        self.kv_scales = KVScales() if spec.cache_dtype is not None and spec.shares is None else None
        self.has_qk_norm, self.has_sinks = spec.qk_norm_eps is not None, spec.has_sinks
        self._norms_all = make_qk_norm is not None and not self.has_qk_norm
        self._q_end, self._k_end = heads.size * spec.head_dim, (heads.size + kv_heads.size) * spec.head_dim
        self._values, self._head_dim, self._is_gated = values, spec.head_dim, is_gated
        self._feeds_add_norm, self._shares, self._norms_values = feeds_add_norm, spec.shares is not None, v_norm_eps is not None

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
        context: StepContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual). With logits_indices, both only for these tokens; the cache gets keys and values of all."""
        qkv, residual = self.qkv_proj.normed(x, residual, norm)
        heads, residual = self.heads(qkv, residual, context, logits_indices)
        return self.output(heads), residual

    def heads(
        self,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        context: StepContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As forward, between qkv_proj and o_proj: qkv [T, N] -> [T, Hq D]."""
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        return self._attended(qkv, context, logits_indices), residual

    def of(self, h: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None) -> torch.Tensor:
        """The output for normed h [T, H]; with logits_indices, only for these tokens."""
        return self.output(self._attended(self.qkv_proj(h), context, logits_indices))

    def _attended(self, qkv: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None) -> torch.Tensor:
        if self._is_gated:
            gate, qkv = qkv[:, : self._q_end], qkv[:, self._q_end :]
        if self._values is not None:
            qkv = self._padded(qkv, self._values)
        q_norm = self.q_norm.weight if self.has_qk_norm else None
        k_norm = q_norm if self._shares or q_norm is None else self.k_norm.weight
        if self._norms_values:
            v = qkv[:, self._k_end :].unflatten(1, (-1, self.v_norm.weight.shape[0]))
            ops.rms_norm(v, self.v_norm.weight, self.v_norm.eps, v)
        if self._norms_all:
            self.q_norm(qkv[:, : self._q_end])
            self.k_norm(qkv[:, self._q_end : self._k_end])
        if self.has_sinks:
            out = context.attend(self.layer, qkv, q_norm, k_norm, self.sinks.weight)
        else:
            out = context.attend(self.layer, qkv, q_norm, k_norm)
        if self._values is not None:
            out = out.unflatten(1, (-1, self._head_dim))[..., : self._values.head_dim].flatten(1)
        if self._is_gated:
            out = ops.times_sigmoid(out, gate)
        return out if logits_indices is None else out.index_select(0, logits_indices)

    def _padded(self, qkv: torch.Tensor, values: ValueHeads) -> torch.Tensor:
        """q, k and v, with the values multiplied by their scale and as many elements in their heads as in the keys'."""
        v = qkv[:, self._k_end :].unflatten(1, (-1, values.head_dim)) * values.scale
        padded = functional.pad(v, (0, self._head_dim - values.head_dim))
        return torch.cat([qkv[:, : self._k_end], padded.flatten(1)], 1)

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """The output projection of heads [T, Hq D]."""
        return self.o_proj.split_k(heads) if self._feeds_add_norm else self.o_proj(heads)


class GatedMLP(Module):
    """down(activation(gate(x)) · up(x)); gate and up are one matrix product. name: in the block and in the checkpoint.

    gate_up: how the checkpoint stores the two. feeds_add_norm: see SelfAttention.
    down_bias: of the last product; None: as the others.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        place: Placement,
        *,
        name: str = "mlp",
        has_bias: bool = False,
        activation: Activation = "silu",
        gate_up: Callable[[Shard], RowsByName] = pair,
        feeds_add_norm: bool = True,
        down_bias: bool | None = None,
    ):
        super().__init__()
        place = place.at(name)
        hidden, inner = whole(hidden_size), place.parallel.split(intermediate_size)
        self.gate_up_proj = Linear(hidden, gate_up(inner), has_bias, place)
        self.down_proj = Linear(inner, {"down_proj": hidden}, has_bias if down_bias is None else down_bias, place)
        self._activation, self.is_silu, self._feeds_add_norm = activation, activation == "silu", feeds_add_norm

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_silu and self._feeds_add_norm and self.down_proj.fuses_silu(len(residual)):
            gate_up, residual = self.gate_up_proj.normed(x, residual, norm)
            return self.down_proj.behind_silu(gate_up), residual
        h, residual = self.gate_up_proj.normed(x, residual, norm, self.is_silu)
        if not self.is_silu:
            h = ops.activate_mul(h, self._activation)
        return self.down_proj.split_k(h) if self._feeds_add_norm else self.down_proj(h), residual

    def of(self, h: torch.Tensor) -> torch.Tensor:
        """The output for normed h [T, H]."""
        h = self.gate_up_proj.gated(h) if self.is_silu else ops.activate_mul(self.gate_up_proj(h), self._activation)
        return self.down_proj(h)


class MLP(Module):
    """down(activation(up(x))). up, down: names of the two layers in the checkpoint; name: in the block and there."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        place: Placement,
        up: str,
        down: str,
        *,
        has_bias: bool = True,
        activation: Activation,
        name: str = "mlp",
    ):
        super().__init__()
        place = place.at(name)
        hidden, inner = whole(hidden_size), place.parallel.split(intermediate_size)
        self.up_proj = Linear(hidden, {up: inner}, has_bias, place)
        self.down_proj = Linear(inner, {down: hidden}, has_bias, place)
        self._activation = activation

    def forward(self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = self.up_proj.normed(x, residual, norm)
        return self.down_proj.split_k(ops.activate(h, self._activation)), residual

    def of(self, h: torch.Tensor) -> torch.Tensor:
        """The output for normed h [T, H]."""
        return self.down_proj(ops.activate(self.up_proj(h), self._activation))


class PreNormBlock(Module):
    """x += self_attn(input_layernorm(x)); x += mlp(post_attention_layernorm(x)), and nothing else: fusion.py relies on it."""

    input_layernorm: Norm
    self_attn: SelfAttention
    post_attention_layernorm: Norm
    mlp: GatedMLP


def parallel_residual(
    attention: SelfAttention,
    mlp: GatedMLP | MLP,
    norm: Norm,
    mlp_norm: Norm | None,
    x: torch.Tensor | None,
    residual: torch.Tensor,
    context: StepContext,
    logits_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block in which both modules have the same input: (attention(norm(x)) + mlp(mlp_norm(x)), the residual).

    mlp_norm None: both get the output of `norm`. The attention must have been made with feeds_add_norm=False.
    """
    h = norm(residual) if x is None else norm.add(x, residual)
    out = attention.of(h, context, logits_indices)
    if logits_indices is not None:
        h, residual = h.index_select(0, logits_indices), residual.index_select(0, logits_indices)
    return out.add_(mlp.of(h if mlp_norm is None else mlp_norm(residual))), residual
