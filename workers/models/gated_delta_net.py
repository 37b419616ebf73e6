"""Gated DeltaNet: a layer that keeps a state for each value head in place of keys and values. It replaces blocks.SelfAttention.

    q|k|v, z, b, a = projections of h;   q|k|v = silu(causal convolution of q|k|v)
    out = W_o (norm(the gated delta rule of q, k, v, a, b) · silu(z))         kernels/recurrent/delta_reference.py

The state of a sequence is the convolution's last inputs and a matrix [K, V] for each value head. Heads are split over the
ranks; a key head serves consecutive value heads, and ranks that share a key head both compute it.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.rows import Rows
from quire.workers.layers import recurrent_ops
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import WeightOwner, fill_cut, new_parameter
from quire.workers.layers.norm import Norm, RMSNorm
from quire.workers.loading.weight_loader import WeightLoader, copied, copied_rows
from quire.workers.models.config import RecurrentSpec, StateTensor
from quire.workers.models.fused import RowsByName
from quire.workers.models.recurrent_layer import RecurrentLayer
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import RowRanges, RowShard, Shard, cut, whole


class DeltaNetSpec(RecurrentSpec, frozen=True, kw_only=True):
    """Sizes of a layer. A key head serves num_value_heads / num_key_heads consecutive value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int  # tokens that the convolution sees

    def tensors(self, parallel: Parallel) -> tuple[StateTensor, ...]:
        heads = DeltaRows(self, parallel).heads
        matrix = (heads.num_values, heads.key_dim, heads.value_dim)
        return StateTensor((self.window - 1, heads.channels), is_recurrent=False), StateTensor(matrix, is_recurrent=True)

    def kept_sizes(self, parallel: Parallel) -> tuple[int, ...]:
        return kept_of_delta(DeltaRows(self, parallel).heads)

    def misfit(self, size: int) -> str | None:
        if self.num_value_heads % size:
            return f"{self.num_value_heads} value heads of linear attention"
        if self.num_key_heads % size and size % self.num_key_heads:
            return f"{self.num_key_heads} key heads of linear attention"
        return None


def kept_of_delta(heads: DeltaHeads) -> tuple[int, ...]:
    """q|k|v before the convolution, and behind it; b|a."""
    return heads.channels, heads.channels, heads.num_values + heads.num_decays


class DeltaRows:
    """This rank's heads of a layer, and their rows of the checkpoint's projections."""

    def __init__(self, spec: DeltaNetSpec, parallel: Parallel):
        self.values = parallel.split(spec.num_value_heads)
        self.keys = parallel.kv_heads(spec.num_key_heads)
        self.heads = DeltaHeads(self.keys.size, self.values.size, spec.key_dim, spec.value_dim)

    @property
    def channels(self) -> RowRanges:
        """Rows of q|k|v, all queries first."""
        q, v = self.keys.times(self.heads.key_dim), self.values.times(self.heads.value_dim)
        ranges = ((q.start, q.stop), (q.full + q.start, q.full + q.stop), (2 * q.full + v.start, 2 * q.full + v.stop))
        return RowRanges.of(2 * q.full + v.full, ranges)

    def separate(self) -> tuple[RowsByName, RowsByName]:
        """Qwen3.5's projections: q|k|v and z; b and a."""
        values = self.values
        return {"in_proj_qkv": self.channels, "in_proj_z": values.times(self.heads.value_dim)}, {
            "in_proj_b": values,
            "in_proj_a": values,
        }

    def by_key_head(self) -> tuple[RowsByName, RowsByName]:
        """Qwen3-Next's: for each key head its query, its key, and v and z of its value heads; and b and a of these."""
        group = self.values.full // self.keys.full
        key_dim, value_dim = self.heads.key_dim, self.heads.value_dim
        size = 2 * key_dim + 2 * group * value_dim
        of_keys = [(h * size + at, h * size + at + key_dim) for at in (0, key_dim) for h in self._each(self.keys)]
        of_values = [
            (first, first + value_dim)
            for at in (0, group * value_dim)
            for h in self._each(self.values)
            for first in [h // group * size + 2 * key_dim + at + h % group * value_dim]
        ]
        gates = [
            first for at in (0, group) for h in self._each(self.values) for first in [h // group * 2 * group + at + h % group]
        ]
        full = self.keys.full * size
        return {"in_proj_qkvz": RowRanges.of(full, [*of_keys, *of_values])}, {
            "in_proj_ba": RowRanges.of(2 * self.values.full, [(first, first + 1) for first in gates])
        }

    def _each(self, heads: Shard) -> range:
        return range(heads.start, heads.stop)


def states_and_rows(context: StepContext, layer: int) -> tuple[tuple[torch.Tensor, ...], Rows]:
    """The layer's tensors of all states, and which of them the step's rows read and write."""
    states = context.states
    assert states is not None, "the runner gives states to a model that has recurrent layers"
    rows = Rows(
        context.query_start,
        states.own,
        states.first,
        states.last,
        context.decode_limit,
        context.positions,
        context.num_decode_rows,
        None if states.windows is None else states.windows(layer),
    )
    return states.tensors(layer), rows


def apply_kept_to_delta(
    conv1d: "Convolution", weights: DeltaWeights, heads: DeltaHeads, context: StepContext, layer: int
) -> None:
    """RecurrentLayer.apply_kept of a layer with this convolution and these weights."""
    (tails, matrices), rows = states_and_rows(context, layer)
    conv1d(conv1d.weight.new_zeros(1, heads.channels), tails, rows)
    sizes = heads.channels, heads.value_size, heads.num_values, heads.num_decays
    inputs = DeltaInputs(*(conv1d.weight.new_zeros(1, size) for size in sizes))
    recurrent_ops.gated_delta(inputs, weights, heads, matrices, rows)


ProjectionsOf = Callable[[DeltaRows], tuple[RowsByName, RowsByName]]


class Convolution(WeightOwner):
    """The weight of a causal convolution of each channel, [window, C]; the checkpoint has [C, 1, window].

    parts: names and channels of the tensors that lie side by side in place of one; a convolution of parts has no bias.
    """

    def __init__(
        self,
        channels: RowShard,
        window: int,
        has_bias: bool,
        place: Placement,
        parts: Mapping[str, RowShard] = MappingProxyType({}),
    ):
        super().__init__()
        self._channels, self._parts = channels, parts
        self.weight = new_parameter((window, channels.size), place.dtype, place.device)
        self.bias = new_parameter((channels.size,), place.dtype, place.device) if has_bias else None

    def forward(self, x: torch.Tensor, tails: torch.Tensor, rows: Rows, gates: Gates | None = None) -> torch.Tensor:
        return recurrent_ops.causal_convolution(x, self.weight, self.bias, tails, rows, gates)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        (beside, _, own_name), at, window = name.rpartition("."), 0, len(self.weight)
        for part, rows in (self._parts or {own_name: self._channels}).items():
            own = self.weight.T[at : at + rows.size, None]
            yield f"{beside}.{part}.weight", copied_rows(own, rows, None)._replace(shape=(rows.full, 1, window))
            at += rows.size
        if self.bias is not None:
            yield f"{name}.bias", copied_rows(self.bias, rows, None)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        fill_cut(self.weight.T, (self._channels.full, len(self.weight)), lambda x: cut(x, self._channels), limit, generator)
        if self.bias is not None:
            fill_cut(self.bias, (self._channels.full,), lambda x: cut(x, self._channels), limit, generator)


class HeadTensors(WeightOwner):
    """Tensors of the layer's own in the checkpoint, beside this module, with a number for each head; float32."""

    A_log: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, names: tuple[str, ...], heads: Shard, place: Placement):
        super().__init__()
        self._names, self._heads = names, heads
        for name in names:
            self.register_parameter(name, new_parameter((heads.size,), torch.float32, place.device))

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        for own in self._names:
            yield f"{name.rpartition('.')[0]}.{own}", copied(self.get_parameter(own), (self._heads,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        for own in self._names:
            fill_cut(self.get_parameter(own), (self._heads.full,), lambda x: x[self._heads.slice], limit, generator)


class GatedDeltaNet(RecurrentLayer):
    """`linear_attn` in a block and in the checkpoint, with the interface of blocks.SelfAttention.

    Without quantization all projections are one product. A quantized checkpoint often has b and a as floats, so there they are
    a product of their own.
    """

    def __init__(
        self,
        spec: DeltaNetSpec,
        hidden_size: int,
        place: Placement,
        layer: int,
        *,
        eps: float,
        projections: ProjectionsOf = DeltaRows.separate,
    ):
        super().__init__()
        self._layer, place, hidden = layer, place.at("linear_attn"), whole(hidden_size)
        rows = DeltaRows(spec, place.parallel)
        self._heads, (qkvz, ba) = rows.heads, projections(rows)
        joined = place.quantization is None
        self.in_proj = Linear(hidden, {**qkvz, **ba} if joined else qkvz, False, place)
        if not joined:
            self.in_proj_ba = Linear(hidden, ba, False, place)
        self._is_joined = joined
        self.conv1d = Convolution(rows.channels, spec.window, False, place)
        self.gates = HeadTensors(("A_log", "dt_bias"), rows.values, place)
        self.norm = RMSNorm(spec.value_dim, eps, place.dtype, place.device)
        self.out_proj = Linear(rows.values.times(spec.value_dim), {"out_proj": hidden}, False, place)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
        context: StepContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual). With logits_indices, both only for these tokens; the states take all."""
        if self._is_joined:
            y, residual = self.in_proj.normed(x, residual, norm)
            tail = y[:, self._heads.channels + self._heads.value_size :]
        else:
            h = norm(residual) if x is None else norm.add(x, residual)
            y, tail = self.in_proj(h), self.in_proj_ba(h)
        out = self._recurred(y, tail, context)
        if logits_indices is not None:
            out, residual = out.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return self.out_proj.split_k(out), residual

    def _recurred(self, y: torch.Tensor, ba: torch.Tensor, context: StepContext) -> torch.Tensor:
        """y [T, channels + Hv V, ...] = q|k|v|z, ba [T, 2 Hv] -> [T, Hv V]"""
        heads = self._heads
        (tails, matrices), rows = states_and_rows(context, self._layer)
        qkv = self.conv1d(y[:, : heads.channels], tails, rows)
        z = y[:, heads.channels : heads.channels + heads.value_size]
        inputs = DeltaInputs(qkv, z, ba[:, : heads.num_values], ba[:, heads.num_values :])
        return recurrent_ops.gated_delta(inputs, self._weights(), heads, matrices, rows)

    def apply_kept(self, context: StepContext) -> None:
        apply_kept_to_delta(self.conv1d, self._weights(), self._heads, context, self._layer)

    def _weights(self) -> DeltaWeights:
        return DeltaWeights(self.gates.A_log, self.gates.dt_bias, self.norm.weight, self.norm.eps)
