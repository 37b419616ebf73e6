"""The plain weight [out, in] and bias [out], in the activations' dtype, and the format that computes with them as they are."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from quire.workers.layers import ops
from quire.workers.layers.adapter import Adapter
from quire.workers.layers.formats.activations import RoundedInputs
from quire.workers.layers.formats.format import Format, WeightFormat, WeightShard, checkpoint_prefix, fill_shard
from quire.workers.layers.module import new_parameter
from quire.workers.layers.norm import Norm
from quire.workers.layers.unadded import Unadded, settled
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.weight_loader import WeightLoader, copied_rows
from quire.workers.shard import Shard


class Unquantized(WeightFormat):
    """Owns weight and bias as plain values, whatever the checkpoint has. The subclass has the products."""

    weight: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        shard: WeightShard,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: nn.Parameter | None = None,
    ):
        super().__init__()
        self.shard = shard
        self.is_tied = tied_to is not None
        self.weight = new_parameter(shard.shape, dtype, device) if tied_to is None else shared_rows(tied_to, shard)
        self.bias = new_parameter(shard.shape[:1], dtype, device) if has_bias else None
        self.packed_layers = {
            layer: PackedWeight(packing, shard.rows[layer], shard.columns, device) for layer, packing in shard.packings.items()
        }

    def wrapped(self) -> Format:
        if not any(layer.activations for layer in self.packed_layers.values()):
            return self
        return RoundedInputs(self, [(rows.size, self.packed_layers.get(layer)) for layer, rows in self.shard.rows.items()])

    @property
    def _owned(self) -> torch.Tensor | None:
        return None if self.is_tied else self.weight

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        """Each layer of the checkpoint is copied to its rows of the fused weight and bias, unless it is quantized."""
        prefix, start, weight = checkpoint_prefix(name), 0, self._owned
        for layer, rows in self.shard.rows.items():
            stop = start + rows.size
            if layer in self.packed_layers:
                assert weight is not None, "what is tied is not quantized"
                then = partial(self.packed_layers[layer].dequantize_into, weight[start:stop], f"{prefix}{layer}")
                yield from self.packed_layers[layer].loaders(f"{prefix}{layer}", self.bias is not None, then)
            elif weight is not None:
                yield f"{prefix}{layer}.weight", copied_rows(weight[start:stop], rows, self.shard.columns)
            if self.bias is not None:
                yield f"{prefix}{layer}.bias", copied_rows(self.bias[start:stop], rows, None)
            start = stop

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        for parameter in (self._owned, self.bias):
            if parameter is not None:
                fill_shard(parameter, self.shard, limit, generator)

    def finish(self) -> None:
        """Keep the bias on one rank only if results are summed over ranks. All ranks have loaded it, or drawn it alike."""
        if self.bias is not None and not self.shard.adds_bias:
            self.bias.zero_()


def shared_rows(weight: nn.Parameter, shard: WeightShard) -> torch.Tensor:
    """The rows of another owner's weight that a shard of one layer holds."""
    [rows] = shard.rows.values()
    assert isinstance(rows, Shard), "of a table of tokens"
    return weight if rows.is_whole else weight[rows.slice]


class Dense(Unquantized):
    """Products by our kernels on CUDA, fused where that is faster; by torch elsewhere."""

    weight: torch.Tensor

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias, out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gated_linear(x, self.weight, self.bias)

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        if ops.splits(x, self.weight):
            return ops.linear_split_k(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias)

    def _fuses(self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm) -> bool:
        is_split_k = x is not None and x.dim() == 3  # a quantized product may be partial sums for one row, too
        return norm.is_plain and not is_split_k and ops.fuses_norm(residual, self.weight)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fuses(x, residual, norm):
            return ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, is_gated)
        return super().normed(x, residual, norm, is_gated)

    def shrinking(
        self, x: torch.Tensor, adapter: Adapter, out: torch.Tensor | None = None, *, splits_k: bool = False
    ) -> tuple[torch.Tensor, Any]:
        shrink = adapter.beside(x)
        both = shrink and ops.shrinking_linear(x, self.weight, self.bias, out, shrink, splits_k)
        return both or super().shrinking(x, adapter, out, splits_k=splits_k)

    def normed_shrinking(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, adapter: Adapter
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        shrink = adapter.beside(residual)
        bare = x.x if isinstance(x, Unadded) else x
        if shrink is None or shrink.a.dtype != residual.dtype or not self._fuses(bare, residual, norm):
            return super().normed_shrinking(x, residual, norm, adapter)
        x = None if x is None else settled(x)  # each of the kernel's programs would have to add it to the whole row
        h = shrink.new_h(1)
        y, total = ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, shrink=shrink, h=h)
        return y, h, total
