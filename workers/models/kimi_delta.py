"""Kimi Delta Attention: a Gated DeltaNet with one decay for each channel of a key. It replaces blocks.SelfAttention.

    q|k|v, f, g, b = projections of h;   q|k|v = silu(causal convolution of q|k|v)
    a = W_fb f, z = W_gb g;      out = W_o (norm(the delta rule of q, k, v, a, b) · sigmoid(z))

The rule is in kernels/recurrent/delta_reference.py.

f and g have the size of one head. The state of a sequence is the convolution's last inputs and a matrix [K, K] for each head.
Heads are split over the ranks; every rank computes f and g.
"""

from collections.abc import Iterator

import torch

from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.workers.layers import recurrent_ops
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import WeightOwner, fill_cut, new_parameter
from quire.workers.layers.norm import Norm, RMSNorm
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.models.config import RecurrentSpec, StateTensor
from quire.workers.models.gated_delta_net import Convolution, apply_kept_to_delta, kept_of_delta, states_and_rows
from quire.workers.models.recurrent_layer import RecurrentLayer
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import RowRanges, Shard, whole


class KimiDeltaSpec(RecurrentSpec, frozen=True, kw_only=True):
    """Sizes of a layer."""

    num_heads: int
    head_dim: int  # of queries, keys and values
    window: int  # tokens that the convolution sees

    def heads(self, parallel: Parallel) -> DeltaHeads:
        """Those of this rank."""
        own = parallel.split(self.num_heads).size
        return DeltaHeads(own, own, self.head_dim, self.head_dim, by_channel=True)

    def tensors(self, parallel: Parallel) -> tuple[StateTensor, ...]:
        heads = self.heads(parallel)
        matrix = (heads.num_values, heads.key_dim, heads.value_dim)
        return StateTensor((self.window - 1, heads.channels), is_recurrent=False), StateTensor(matrix, is_recurrent=True)

    def kept_sizes(self, parallel: Parallel) -> tuple[int, ...]:
        return kept_of_delta(self.heads(parallel))

    def misfit(self, size: int) -> str | None:
        return f"{self.num_heads} heads of linear attention" if self.num_heads % size else None


class Decays(WeightOwner):
    """A number of each head, A_log, and one of each channel, dt_bias: tensors beside this module in the checkpoint; float32."""

    def __init__(self, heads: Shard, head_dim: int, place: Placement):
        super().__init__()
        self._heads, self._channels = heads, heads.times(head_dim)
        self.A_log = new_parameter((heads.size,), torch.float32, place.device)
        self.dt_bias = new_parameter((self._channels.size,), torch.float32, place.device)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        beside, one = name.rpartition(".")[0], whole(1)
        yield f"{beside}.A_log", copied(self.A_log.view(1, 1, -1, 1), (one, one, self._heads, one))
        yield f"{beside}.dt_bias", copied(self.dt_bias, (self._channels,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        fill_cut(self.A_log, (self._heads.full,), lambda x: x[self._heads.slice], limit, generator)
        fill_cut(self.dt_bias, (self._channels.full,), lambda x: x[self._channels.slice], limit, generator)


class KimiDelta(RecurrentLayer):
    """`self_attn` in a block and in the checkpoint, with the interface of blocks.SelfAttention.

    Without quantization all projections of h are one product. A quantized checkpoint may have the small ones as floats, so
    there they are a product of their own.
    """

    def __init__(self, spec: KimiDeltaSpec, hidden_size: int, place: Placement, layer: int, *, eps: float):
        super().__init__()
        self._layer, place, hidden = layer, place.at("self_attn"), whole(hidden_size)
        heads = place.parallel.split(spec.num_heads)
        channels, low = heads.times(spec.head_dim), whole(spec.head_dim)
        self._heads = spec.heads(place.parallel)
        large = {"q_proj": channels, "k_proj": channels, "v_proj": channels}
        small = {"f_a_proj": low, "g_a_proj": low, "b_proj": heads}
        self._is_joined = place.quantization is None
        self.in_proj = Linear(hidden, {**large, **small} if self._is_joined else large, False, place)
        if not self._is_joined:
            self.in_proj_small = Linear(hidden, small, False, place)
        all_channels = RowRanges.of(
            3 * channels.full, [(at * channels.full + channels.start, at * channels.full + channels.stop) for at in range(3)]
        )
        parts = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), channels)
        self.conv1d = Convolution(all_channels, spec.window, False, place, parts)
        self.f_b_proj = Linear(low, {"f_b_proj": channels}, False, place)
        self.g_b_proj = Linear(low, {"g_b_proj": channels}, False, place)
        self.decays = Decays(heads, spec.head_dim, place)
        self.o_norm = RMSNorm(spec.head_dim, eps, place.dtype, place.device)
        self.o_proj = Linear(channels, {"o_proj": hidden}, False, place)

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
            small = y[:, self._heads.channels :]
        else:
            h = norm(residual) if x is None else norm.add(x, residual)
            y, small = self.in_proj(h), self.in_proj_small(h)
        out = self._recurred(y[:, : self._heads.channels], small, context)
        if logits_indices is not None:
            out, residual = out.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return self.o_proj.split_k(out), residual

    def _recurred(self, qkv: torch.Tensor, small: torch.Tensor, context: StepContext) -> torch.Tensor:
        """qkv [T, 3 H K], small [T, 2 K + H] = f|g|b -> [T, H K]"""
        low = self._heads.key_dim
        f, g, b = small[:, :low].contiguous(), small[:, low : 2 * low].contiguous(), small[:, 2 * low :]
        (tails, matrices), rows = states_and_rows(context, self._layer)
        inputs = DeltaInputs(self.conv1d(qkv, tails, rows), self.g_b_proj(g), b, self.f_b_proj(f))
        return recurrent_ops.gated_delta(inputs, self._weights(), self._heads, matrices, rows)

    def apply_kept(self, context: StepContext) -> None:
        apply_kept_to_delta(self.conv1d, self._weights(), self._heads, context, self._layer)

    def _weights(self) -> DeltaWeights:
        return DeltaWeights(self.decays.A_log, self.decays.dt_bias, self.o_norm.weight, self.o_norm.eps)
