"""The plain weight format: weight [out, in] and bias [out] in the dtype of the activations."""

from collections.abc import Iterator

import torch
from torch import nn

from quire.workers.layers import ops
from quire.workers.layers.formats.format import Format, Partition, checkpoint_prefix
from quire.workers.layers.module import new_parameter
from quire.workers.layers.norm import RMSNorm
from quire.workers.loading.target import Target, copied


class Dense(Format):
    """Products by our kernels on CUDA, fused where that pays; by torch elsewhere."""

    weight: torch.Tensor
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

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias, out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gated_linear(x, self.weight, self.bias)

    def in_parts(self, x: torch.Tensor) -> torch.Tensor:
        if ops.splits(x, self.weight):
            return ops.linear_in_parts(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: RMSNorm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if ops.fuses_norm(residual, self.weight):
            return ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, is_gated)
        return super().normed(x, residual, norm, is_gated)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield from dense_targets(name, self.partition, None if self.is_tied else self.weight, self.bias)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        fill_dense(None if self.is_tied else self.weight, self.bias, limit, generator)

    def finish(self) -> None:
        finish_bias(self.partition, self.bias)


def shared_rows(weight: nn.Parameter, partition: Partition) -> torch.Tensor:
    """The rows of another owner's weight that a partition of one part holds."""
    [rows] = partition.rows.values()
    return weight if rows.is_whole else weight[rows.slice]


def dense_targets(
    name: str, partition: Partition, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> Iterator[tuple[str, Target]]:
    """Each of the checkpoint's layers goes straight to its rows of the fused weight and bias."""
    prefix, start = checkpoint_prefix(name), 0
    for layer, rows in partition.rows.items():
        stop = start + rows.size
        if weight is not None:
            yield f"{prefix}{layer}.weight", copied(weight[start:stop], (rows, partition.columns))
        if bias is not None:
            yield f"{prefix}{layer}.bias", copied(bias[start:stop], (rows,))
        start = stop


def fill_dense(weight: torch.Tensor | None, bias: torch.Tensor | None, limit: float, generator: torch.Generator) -> None:
    """Uniform on ±limit."""
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.uniform_(-limit, limit, generator=generator)


def finish_bias(partition: Partition, bias: torch.Tensor | None) -> None:
    """All ranks load a bias, and dummy values are drawn alike on all; of ranks whose results are summed one adds it."""
    if bias is not None and not partition.adds_bias:
        bias.zero_()
