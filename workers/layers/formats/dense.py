"""The plain weight: [out, in] and bias [out] in the dtype of the activations, and the format that computes with it as it is."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from quire.workers.layers import ops
from quire.workers.layers.formats.activations import RoundedInputs
from quire.workers.layers.formats.format import Format, Partition, Products, checkpoint_prefix, fill_part
from quire.workers.layers.module import new_parameter
from quire.workers.layers.norm import Norm
from quire.workers.layers.row_ranges import copied_rows
from quire.workers.loading.quantized.stored import StoredLayer
from quire.workers.loading.target import Target
from quire.workers.parallel import Part


class Unquantized(Format):
    """Owns weight and bias as plain values, whatever the checkpoint has; products are the subclass's."""

    weight: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        partition: Partition,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: nn.Parameter | None = None,
    ):
        super().__init__()
        self.partition = partition
        self.is_tied = tied_to is not None
        self.weight = new_parameter(partition.shape, dtype, device) if tied_to is None else shared_rows(tied_to, partition)
        self.bias = new_parameter(partition.shape[:1], dtype, device) if has_bias else None
        self.stored = {
            layer: StoredLayer(source, partition.rows[layer], partition.columns, device)
            for layer, source in partition.sources.items()
        }

    def products(self) -> Products:
        if not any(layer.activations for layer in self.stored.values()):
            return self
        return RoundedInputs(self, [(rows.size, self.stored.get(layer)) for layer, rows in self.partition.rows.items()])

    @property
    def _owned(self) -> torch.Tensor | None:
        return None if self.is_tied else self.weight

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """Each of the checkpoint's layers goes straight to its rows of the fused weight and bias, unless it is quantized."""
        prefix, start, weight = checkpoint_prefix(name), 0, self._owned
        for layer, rows in self.partition.rows.items():
            stop = start + rows.size
            if layer in self.stored:
                assert weight is not None, "what is tied is not quantized"
                then = partial(self.stored[layer].dequantize_into, weight[start:stop], f"{prefix}{layer}")
                yield from self.stored[layer].targets(f"{prefix}{layer}", self.bias is not None, then)
            elif weight is not None:
                yield f"{prefix}{layer}.weight", copied_rows(weight[start:stop], rows, self.partition.columns)
            if self.bias is not None:
                yield f"{prefix}{layer}.bias", copied_rows(self.bias[start:stop], rows, None)
            start = stop

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        for parameter in (self._owned, self.bias):
            if parameter is not None:
                fill_part(parameter, self.partition, limit, generator)

    def finish(self) -> None:
        """All ranks load a bias, and dummy values are drawn alike on all; of ranks whose results are summed one adds it."""
        if self.bias is not None and not self.partition.adds_bias:
            self.bias.zero_()


def shared_rows(weight: nn.Parameter, partition: Partition) -> torch.Tensor:
    """The rows of another owner's weight that a partition of one part holds."""
    [rows] = partition.rows.values()
    assert isinstance(rows, Part), "of a table of tokens"
    return weight if rows.is_whole else weight[rows.slice]


class Dense(Unquantized):
    """Products by our kernels on CUDA, fused where that pays; by torch elsewhere."""

    weight: torch.Tensor

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias, out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gated_linear(x, self.weight, self.bias)

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        if ops.splits(x, self.weight):
            return ops.linear_split_k(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_split_k = x is not None and x.dim() == 3  # of a quantized product, which may be in parts at one row, too
        if norm.is_plain and not is_split_k and ops.fuses_norm(residual, self.weight):
            return ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, is_gated)
        return super().normed(x, residual, norm, is_gated)
