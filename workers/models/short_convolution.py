"""Gated short convolution: LFM2's layers that keep the last inputs of a convolution in place of keys and values. It replaces
blocks.SelfAttention.

    b, c, x = W_in h;   out = W_out (c · causal convolution of b · x)

The state of a sequence is the convolution's last inputs b · x, and nothing else. Channels are split over the ranks.
"""

import torch

from quire.kernels.recurrent.convolution_reference import Gates
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.norm import Norm
from quire.workers.models.config import RecurrentSpec, StateTensor
from quire.workers.models.gated_delta_net import Convolution, states_and_rows
from quire.workers.models.recurrent_layer import RecurrentLayer
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import RowRanges, whole


class ShortConvolutionSpec(RecurrentSpec, frozen=True, kw_only=True):
    """Sizes of a layer; has_bias: of the convolution and of both projections."""

    channels: int
    window: int  # tokens that the convolution sees
    has_bias: bool = False

    def tensors(self, parallel: Parallel) -> tuple[StateTensor, ...]:
        return (StateTensor((self.window - 1, parallel.split(self.channels).size), is_recurrent=False),)

    def kept_sizes(self, parallel: Parallel) -> tuple[int, ...]:
        return (parallel.split(self.channels).size,)

    def misfit(self, size: int) -> str | None:
        return f"{self.channels} channels of short convolutions" if self.channels % size else None


class ShortConvolution(RecurrentLayer):
    """`conv` in a block and in the checkpoint, with the interface of blocks.SelfAttention."""

    def __init__(self, spec: ShortConvolutionSpec, hidden_size: int, place: Placement, layer: int):
        super().__init__()
        self._layer, place, hidden = layer, place.at("conv"), whole(hidden_size)
        own, full = place.parallel.split(spec.channels), spec.channels
        parts = RowRanges.of(3 * full, [(at + own.start, at + own.stop) for at in (0, full, 2 * full)])
        self.in_proj = Linear(hidden, {"in_proj": parts}, spec.has_bias, place)
        self.conv = Convolution(own, spec.window, spec.has_bias, place)
        self.out_proj = Linear(own, {"out_proj": hidden}, spec.has_bias, place)
        self._channels = own.size

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
        context: StepContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual). With logits_indices, both only for these tokens; the states take all."""
        y, residual = self.in_proj.normed(x, residual, norm)
        before, after, inputs = y.split(self._channels, 1)
        [tails], rows = states_and_rows(context, self._layer)
        out = self.conv(inputs, tails, rows, Gates(before, after))
        if logits_indices is not None:
            out, residual = out.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return self.out_proj.split_k(out), residual

    def apply_kept(self, context: StepContext) -> None:
        [tails], rows = states_and_rows(context, self._layer)
        nothing = self.conv.weight.new_zeros(1, self._channels)
        self.conv(nothing, tails, rows, Gates(nothing, nothing))
