"""The LM head of a quantized model on a CPU: it stays in 16 bits, and its products are float32's.

FBGEMM's float16 (kernels/linear/float16_cpu.py) takes each run of rows as it comes from the file, so there is no second copy.
A head that is tied to the embedding is a copy, like a float32 one (packed_cpu.py). Where FBGEMM is missing, or values are too
large for float16, some outputs at a time are turned into float32 (kernels/linear/blocks_cpu.py), and a tied head is the
embedding itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.linear.blocks_cpu import Short, held_linear
from quire.kernels.linear.float16_cpu import can_pack_float16, fits_float16, float16_linear, pack_float16
from quire.kernels.linear.linear_cpu import can_pack
from quire.workers.layers.formats.dense import shared_rows
from quire.workers.layers.formats.format import WeightFormat, WeightShard, checkpoint_prefix, fill_shard
from quire.workers.layers.formats.packed_cpu import padded_rows
from quire.workers.layers.module import new_parameter
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, copied_rows
from quire.workers.shard import Shard

PIECE = 1 << 25  # values packed at once, from float32


class ShortCpu(WeightFormat):
    """A weight in `table_dtype` for activations of float32: pieces of consecutive outputs, each FBGEMM's or a tensor."""

    def __init__(
        self, shard: WeightShard, has_bias: bool, table_dtype: torch.dtype, device: torch.device, tied_to: nn.Parameter | None
    ):
        super().__init__()
        [(self._layer, rows)] = shard.rows.items()
        assert isinstance(rows, Shard), "of a head"
        self.shard, self._rows, self._dtype = shard, rows, table_dtype
        self.is_tied = tied_to is not None
        self._shared = None if tied_to is None else shared_rows(tied_to, shard)
        self.bias = new_parameter(shard.shape[:1], torch.float32, device) if has_bias else None
        self._pieces: list[Any] = []
        self.opaque_bytes = shard.shape[0] * shard.shape[1] * table_dtype.itemsize

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        parts = [_by_blocks(x, one) if isinstance(one, torch.Tensor) else float16_linear(x, one) for one in self._pieces]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.bias is not None:
            y += self.bias
        return y if out is None else out.copy_(y)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        layer = f"{checkpoint_prefix(name)}{self._layer}"
        if not self.is_tied:
            shape, parts = (self._rows.full, self.shard.columns.full), (self._rows.slice, self.shard.columns.slice)
            yield f"{layer}.weight", WeightLoader(shape, parts, FLOATS, lambda piece, row: self._take(piece))
        if self.bias is not None:
            yield f"{layer}.bias", copied_rows(self.bias, self._rows, None)

    def _take(self, rows: torch.Tensor) -> None:
        """Append the next outputs."""
        if can_pack_float16() and fits_float16(rows):
            self._pieces.append(pack_float16(rows))
        else:
            self._pieces.append(rows.to(self._dtype, copy=True))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        if not self.is_tied:
            weight = torch.empty(self.shard.shape, dtype=self._dtype)
            fill_shard(weight, self.shard, limit, generator)
            self._take_all(weight)
        if self.bias is not None:
            fill_shard(self.bias, self.shard, limit, generator)

    def _take_all(self, weight: torch.Tensor) -> None:
        for part in weight.split(max(1, PIECE // weight.shape[1])):
            self._take(part)

    def finish(self) -> None:
        if self._shared is not None and can_pack_float16() and fits_float16(self._shared):
            self._take_all(self._shared)
        elif self._shared is not None:
            self._pieces, self.opaque_bytes = [self._shared], 0
        if self.bias is not None and not self.shard.adds_bias:
            self.bias.zero_()


def _by_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    is_quick, rows = can_pack(x[:0]), len(x)
    if is_quick and (padded := padded_rows(rows)) > rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    return held_linear(x, Short(weight), is_quick)[:rows]


def short_format(table_dtype: torch.dtype) -> Callable[..., WeightFormat]:
    """Makes a head in `table_dtype`; it is called as `WeightFormat` says."""

    def make(
        shard: WeightShard, has_bias: bool, dtype: torch.dtype, device: torch.device, tied_to: nn.Parameter | None = None
    ) -> WeightFormat:
        return ShortCpu(shard, has_bias, table_dtype, device, tied_to)

    return make
