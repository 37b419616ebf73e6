"""Mamba 2: a layer that keeps a state for each head in place of keys and values. It replaces blocks.SelfAttention.

    z|x|B|C|dt = in_proj(h);   x|B|C = silu(causal convolution of x|B|C + its bias)
    out = out_proj(norm(the recurrence of x, B, C, dt · silu(z)))         kernels/recurrent/mamba_reference.py

The state of a sequence is the convolution's last inputs and a matrix [N, P] for each head. Heads are split over the ranks. A
group's B and C serve consecutive heads, and its channels are normed together. If there are fewer groups than ranks, the ranks
of a group all compute its B and C, and the norm sums its squares over them.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.workers.layers import recurrent_ops
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.layers.norm import Norm
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.models.config import RecurrentSpec, StateTensor
from quire.workers.models.gated_delta_net import Convolution, HeadTensors, states_and_rows
from quire.workers.models.recurrent_layer import RecurrentLayer
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import RowRanges, Shard, whole


class MambaSpec(RecurrentSpec, frozen=True, kw_only=True):
    """Sizes of a layer, and what its family leaves out or does otherwise."""

    num_heads: int
    head_dim: int  # P
    num_groups: int  # num_heads is a multiple of it
    state_size: int  # N
    window: int  # tokens that the convolution sees
    has_conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    has_norm: bool = True
    norms_first: bool = False  # the norm comes before the gate
    dt_min: float = 0.0
    dt_max: float = float("inf")
    multipliers: tuple[float, float, float, float, float] | None = None  # of z, x, B, C, dt behind in_proj; None: all are 1

    def tensors(self, parallel: Parallel) -> tuple[StateTensor, ...]:
        heads = MambaRows(self, parallel).heads
        matrix = (heads.num_heads, heads.state_size, heads.head_dim)
        return StateTensor((self.window - 1, heads.channels), is_recurrent=False), StateTensor(matrix, is_recurrent=True)

    def kept_sizes(self, parallel: Parallel) -> tuple[int, ...]:
        """x|B|C before the convolution, and behind it; dt."""
        heads = MambaRows(self, parallel).heads
        return heads.channels, heads.channels, heads.num_heads

    def mlp_width(self, parallel: Parallel) -> int:
        """The outputs of in_proj, the convolution and the recurrence take four times this."""
        heads = MambaRows(self, parallel).heads
        return heads.size + heads.group_size

    def misfit(self, size: int) -> str | None:
        if self.num_heads % size:
            return f"{self.num_heads} heads of Mamba layers"
        if self.num_groups % size and size % self.num_groups:
            return f"{self.num_groups} groups of Mamba layers' heads"
        return None


class MambaRows:
    """This rank's heads of a layer, and their rows of in_proj and of the convolution in the checkpoint."""

    def __init__(self, spec: MambaSpec, parallel: Parallel):
        heads, groups = parallel.split(spec.num_heads), parallel.kv_heads(spec.num_groups)
        self.own = heads
        self.heads = MambaHeads(groups.size, heads.size, spec.state_size, spec.head_dim)
        self.values, self._groups = heads.times(spec.head_dim), groups.times(spec.state_size)

    @property
    def channels(self) -> RowRanges:
        """The rows of x|B|C."""
        values, groups = self.values, self._groups
        return _one_behind_the_other(values, groups, groups)

    @property
    def projected(self) -> RowRanges:
        """The rows of z|x|B|C|dt."""
        values, groups = self.values, self._groups
        return _one_behind_the_other(values, values, groups, groups, self.own)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of z, x, B, C and dt on this rank."""
        values, groups = self.values.size, self._groups.size
        return values, values, groups, groups, self.own.size


def _one_behind_the_other(*parts: Shard) -> RowRanges:
    ranges, at = [], 0
    for part in parts:
        ranges.append((at + part.start, at + part.stop))
        at += part.full
    return RowRanges.of(at, ranges)


class GatedGroupNorm(WeightOwner):
    """The weight of the RMSNorm of each group's channels, and the norm where ranks share a group.

    Where a rank has whole groups, the recurrence's kernel computes the norm (mamba_reference.gated_norm).
    """

    def __init__(self, values: Shard, num_groups: int, eps: float, norms_first: bool, place: Placement):
        super().__init__()
        self.eps, self.group_size, self.norms_first = eps, values.full // num_groups, norms_first
        self.is_shared = values.size < self.group_size
        self._values, self._num_groups, self._parallel = values, num_groups, place.parallel
        self.weight = new_parameter((values.size,), place.dtype, place.device)

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y, z [T, I / ranks] of a part of one group, normed over the whole group."""
        wide, gate = y.float(), functional.silu(z.float())
        if not self.norms_first:
            wide = wide * gate
        squares = wide.new_zeros(len(y), self._num_groups)
        own = self._values.start // self.group_size
        squares[:, own] = wide.square().sum(-1)
        mean = self._parallel.all_reduce(squares)[:, own, None] / self.group_size
        wide = wide * torch.rsqrt(mean + self.eps) * self.weight.float()
        return (wide * gate if self.norms_first else wide).to(y.dtype)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield f"{name}.weight", copied(self.weight, (self._values,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)


class Mamba2(RecurrentLayer):
    """`name` in a block and in the checkpoint, with the interface of blocks.SelfAttention.

    feeds_add_norm: see blocks.SelfAttention.
    """

    def __init__(
        self,
        spec: MambaSpec,
        hidden_size: int,
        place: Placement,
        layer: int,
        *,
        eps: float,
        name: str = "mamba",
        feeds_add_norm: bool = True,
    ):
        super().__init__()
        self._layer, self._spec, place, hidden = layer, spec, place.at(name), whole(hidden_size)
        rows = MambaRows(spec, place.parallel)
        self._heads, self._feeds_add_norm = rows.heads, feeds_add_norm
        self.in_proj = Linear(hidden, {"in_proj": rows.projected}, spec.in_bias, place)
        self.conv1d = Convolution(rows.channels, spec.window, spec.has_conv_bias, place)
        self.per_head = HeadTensors(("A_log", "dt_bias", "D"), rows.own, place)
        self.norm = GatedGroupNorm(rows.values, spec.num_groups, eps, spec.norms_first, place) if spec.has_norm else None
        self.out_proj = Linear(rows.values, {"out_proj": hidden}, spec.out_bias, place)
        self._scales = None
        if spec.multipliers is not None:
            ones, parts = (
                torch.ones(sum(rows.sizes), dtype=place.dtype, device=place.device).split(rows.sizes),
                spec.multipliers,
            )
            self._scales = torch.cat([part * factor for part, factor in zip(ones, parts, strict=True)])

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
        context: StepContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual). With logits_indices, both only for these tokens; the states take all."""
        projected, residual = self.in_proj.normed(x, residual, norm)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        return self._output(projected, context, logits_indices), residual

    def of(self, h: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None) -> torch.Tensor:
        """The output for normed h [T, H]; with logits_indices, only for these tokens."""
        return self._output(self.in_proj(h), context, logits_indices)

    def _output(self, projected: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None) -> torch.Tensor:
        out = self._recurred(projected, context)
        if logits_indices is not None:
            out = out.index_select(0, logits_indices)
        return self.out_proj.split_k(out) if self._feeds_add_norm else self.out_proj(out)

    def _recurred(self, projected: torch.Tensor, context: StepContext) -> torch.Tensor:
        """z|x|B|C|dt [T, ...] -> [T, H P]"""
        heads, norm = self._heads, self.norm
        (tails, matrices), rows = states_and_rows(context, self._layer)
        if self._scales is not None:
            projected = projected * self._scales
        z, xbc, dt = projected.split((heads.size, heads.channels, heads.num_heads), 1)
        xbc = self.conv1d(xbc, tails, rows)
        gate = z if norm is None or not norm.is_shared else None
        y = recurrent_ops.mamba(MambaInputs(xbc, gate, dt), self._weights(), heads, matrices, rows)
        return y if gate is not None or norm is None else norm(y, z)

    def apply_kept(self, context: StepContext) -> None:
        heads, weight = self._heads, self.conv1d.weight
        (tails, matrices), rows = states_and_rows(context, self._layer)
        xbc = self.conv1d(weight.new_zeros(1, heads.channels), tails, rows)
        inputs = MambaInputs(xbc, None, weight.new_zeros(1, heads.num_heads))
        recurrent_ops.mamba(inputs, self._weights(), heads, matrices, rows)

    def _weights(self) -> MambaWeights:
        heads, spec, norm, per_head = self._heads, self._spec, self.norm, self.per_head
        return MambaWeights(
            per_head.A_log,
            per_head.dt_bias,
            per_head.D,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            heads.size if norm is None else norm.group_size,
            spec.norms_first,
            spec.dt_min,
            spec.dt_max,
        )
