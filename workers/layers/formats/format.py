"""Weight formats: a format owns a linear layer's parameters and computes the layer's products with them.

    product    y = x Wᵀ + b
    gated      silu(first half of y) · second half of y
    split_k    y, only to be passed to a norm's `add`: S partial sums over K, [S, T, out], where that is faster
    normed     y of norm(residual + x), and residual + x
    behind_silu    split_k of silu(first half of x) · second half, for formats that fuse just that
    shrinking, normed_shrinking    product or split_k, and product of a norm, beside the first half of an adapter

A format implements `product`, and those of the others that it can fuse; the base class makes them of `product`. An adapter or a
sum over ranks around a format offers the same products (layers/linear.py). Callers do not ask which format a layer has.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from quire.workers.layers import ops
from quire.workers.layers.adapter import Adapter
from quire.workers.layers.module import WeightOwner, fill_cut
from quire.workers.layers.norm import Norm
from quire.workers.loading.quantized.packed_weight import NOT_QUANTIZED
from quire.workers.loading.quantized.packing import Packing
from quire.workers.shard import RowShard, Shard, cut


class Format:
    """x [T, in] -> y [T, out] in several ways, each made of `product` unless there is a faster one."""

    splits_in_float = True  # whether the partial sums of `split_k`, where it leaves some, are float32

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x Wᵀ + b, in `out` [T, out] if it is given."""
        raise NotImplementedError

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half of y) · second half of y: [T, out / 2]."""
        return ops.silu_mul(self.product(x))

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        """y [T, out], or its partial sums [S, T, out] as in kernels/elementwise/norm; `RMSNorm.add` takes both."""
        return self.product(x)

    def fuses_silu(self, rows: int) -> bool:
        """Whether `behind_silu` is faster, for so many rows, than a `gated` product in front."""
        return False

    def behind_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`split_k` of silu(gate) · up; gate_up [T, 2 in] = gate|up."""
        return self.split_k(ops.silu_mul(gate_up))

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y of norm(residual + x), gated if is_gated; residual + x). x None: no addition. The residual may change in place."""
        h = norm(residual) if x is None else norm.add(x, residual)
        return self.gated(h) if is_gated else self.product(h), residual

    def shrinking(
        self, x: torch.Tensor, adapter: Adapter, out: torch.Tensor | None = None, *, splits_k: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """(`product`, or `split_k` if splits_k; what `adapter.expand` needs of the same x)."""
        h = adapter.shrink(x)
        return self.split_k(x) if splits_k else self.product(x, out), h

    def normed_shrinking(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, adapter: Adapter
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """(`product` of norm(residual + x), what `adapter.expand` needs, residual + x); as `normed`."""
        normed = norm(residual) if x is None else norm.add(x, residual)
        return *self.shrinking(normed, adapter), residual


class WeightShard(NamedTuple):
    """The part of the checkpoint's layers that one weight of this rank holds, [rows, columns]."""

    columns: Shard  # of the input
    rows: Mapping[str, RowShard]  # of the output, by the names of the checkpoint's layers, in the order of y
    adds_bias: bool = True  # False on all ranks but the first if results are summed over ranks
    packings: Mapping[str, Packing] = NOT_QUANTIZED  # for the layers that the checkpoint holds quantized

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.size for part in self.rows.values()), self.columns.size

    def of(self, layers: list[str]) -> "WeightShard":
        """The part of some of its layers."""
        rows = {layer: self.rows[layer] for layer in layers}
        packings = {layer: self.packings[layer] for layer in layers if layer in self.packings}
        return self._replace(rows=rows, packings=packings)


def fill_shard(parameter: torch.Tensor, shard: WeightShard, limit: float, generator: torch.Generator) -> None:
    """Fill a weight [rows, columns] or bias [rows] with dummy values, uniform on ±limit.

    A rank's values are cut out of those that a single rank would have, so a model is the same on any number of ranks.
    """
    rows, columns = shard.rows.values(), shard.columns
    if all(isinstance(part, Shard) and part.is_whole for part in (*rows, columns)):
        parameter.uniform_(-limit, limit, generator=generator)  # without a second copy
        return
    fulls = [part.full for part in rows]

    def ours(whole: torch.Tensor) -> torch.Tensor:
        pieces = torch.cat([cut(layer, part) for layer, part in zip(whole.split(fulls), rows, strict=True)])
        return pieces if pieces.dim() == 1 else pieces[:, columns.slice]

    fill_cut(parameter, (sum(fulls), columns.full)[: parameter.dim()], ours, limit, generator)


class WeightFormat(WeightOwner, Format):
    """A weight in memory. It is made with (shard, has_bias, dtype, device, tied_to).

    `tied_to` is another owner's weight [out, in] to share, None to own one. A format's name ends in `.<layer>.format`: the
    checkpoint's layers are the siblings of that layer, also for a format within a format.
    """

    not_computed: Mapping[str, str] = MappingProxyType({})  # layer -> why no kernel computes with it as it is stored

    def wrapped(self) -> Format:
        """The format that the layer uses: this one, or one around it."""
        return self


def checkpoint_prefix(name: str) -> str:
    """The prefix of the checkpoint's layers, by a format's own name in the model: "" or "…self_attn."."""
    words = name.split(".")
    return "".join(f"{word}." for word in words[: words.index("format") - 1])
