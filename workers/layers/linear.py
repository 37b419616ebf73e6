"""Linear: one product with one of the checkpoint's layers or with several side by side; the LM head is one, too.

A Linear keeps its weight in a format (formats/), which owns the parameters and computes. Around the format there may be an
adapter (LoRA), then a sum over ranks. If there is neither, which is known when the layer is made, the layer's products are the
format's own methods, so an empty adapter slot costs nothing.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from quire.kernels.linear.linear_cpu import can_pack
from quire.workers.layers.adapter import Adapter, Switch
from quire.workers.layers.formats.chosen_cpu import kept_format
from quire.workers.layers.formats.dense import Dense
from quire.workers.layers.formats.format import Format, WeightFormat, WeightShard
from quire.workers.layers.formats.packed_cpu import PackedCpu
from quire.workers.layers.formats.short_cpu import short_format
from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm
from quire.workers.layers.unadded import Unadded, settled
from quire.workers.loading.quantized.packed_weight import packing_of
from quire.workers.loading.quantized.packing import Packing
from quire.workers.loading.quantized.schemes import Quantization, QuantizationError
from quire.workers.parallel import Parallel, Partial
from quire.workers.shard import RowShard, Shard


class Placement(NamedTuple):
    """Where a layer is made: the dtype of activations, the ranks and device, and its place in the checkpoint."""

    dtype: torch.dtype
    parallel: Parallel
    quantization: Quantization | None = None
    prefix: str = ""  # of names in the checkpoint: "", "model.layers.3.", "model.layers.3.mlp."
    table_dtype: torch.dtype | None = None  # of an embedding and a head of fewer bits than activations; None: like these
    is_table: bool = False  # whether this is the place of the head

    @property
    def device(self) -> torch.device:
        return self.parallel.device

    def at(self, name: str) -> "Placement":
        """The placement within the child of this name."""
        return self._replace(prefix=f"{self.prefix}{name}.")

    def of_head(self) -> "Placement":
        return self._replace(is_table=self.table_dtype is not None)

    def of_router(self) -> "Placement":
        """For a router, which few packers quantize: it is plain unless the checkpoint's files say that it is not."""
        knows = self.quantization is not None and self.quantization.holds is not None
        return self if knows else self._replace(quantization=None)

    def packings(self, inputs: Shard, outputs: Mapping[str, RowShard], is_tied: bool = False) -> dict[str, Packing]:
        """The packings of those of a Linear's layers that are quantized. Raises QuantizationError.

        A tied layer that the files do not hold is not quantized, whatever the rules say: packers seldom list such a head.
        """
        if self.quantization is None:
            return {}
        holds = self.quantization.holds if is_tied else None
        held = [layer for layer in outputs if holds is None or holds(f"{self.prefix}{layer}")]
        schemes = {layer: self.quantization.scheme_of(f"{self.prefix}{layer}") for layer in held}
        return {
            layer: packing_of(scheme, f"{self.prefix}{layer}", outputs[layer].full, inputs.full)
            for layer, scheme in schemes.items()
            if scheme is not None
        }


class Normed(Protocol):
    """`Format.normed`, as a layer's attribute."""

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Linear(Module):
    """y = x Wᵀ + b, x [T, in] -> y [T, out], in the ways of `Format`.

    `inputs` is this rank's shard of the input dimension; `outputs` are its shards of the checkpoint's layers by name, in the
    order of y: {"q_proj": ..., "k_proj": ..., "v_proj": ...}. If the input is split, y is summed over the ranks, unless
    `is_partial`: then y is a part of a sum that the caller makes.
    """

    outer: Format
    gated: Callable[[torch.Tensor], torch.Tensor]
    split_k: Callable[[torch.Tensor], torch.Tensor]
    behind_silu: Callable[[torch.Tensor], torch.Tensor]
    normed: Normed

    def __init__(
        self,
        inputs: Shard,
        outputs: Mapping[str, RowShard],
        has_bias: bool,
        place: Placement,
        *,
        tied_to: nn.Parameter | None = None,
        is_partial: bool = False,
    ):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self._parallel = place.parallel
        self._sums = not inputs.is_whole and not is_partial
        packings = place.packings(inputs, outputs, tied_to is not None)
        if tied_to is not None and packings:
            raise QuantizationError(
                f"quantization_config: {', '.join(packings)} is quantized, but tied to the embedding, which is not: "
                "set tie_word_embeddings to false"
            )
        adds_bias = (inputs.is_whole and not is_partial) or place.parallel.rank == 0
        shard = WeightShard(inputs, outputs, adds_bias, packings)
        choose = (
            short_format(place.table_dtype) if place.is_table and place.table_dtype and not packings else choose_format(place)
        )
        self.format = choose(shard, has_bias, place.dtype, place.device, tied_to)
        self.set_adapter(None)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.outer.product(x, out)

    @property
    def bare_format(self) -> WeightFormat | None:
        """The format, if its own methods are the layer's products: neither an adapter nor a sum over ranks is around it.

        An adapter that only some steps have does not count: those steps do not use what is made of the format."""
        outer = self.outer.plain if isinstance(self.outer, AdaptedSometimes) else self.outer
        return self.format if outer is self.format else None

    def set_adapter(self, adapter: Adapter | None, switch: Switch | None = None) -> None:
        """Fill or empty the adapter slot, before the first step, since blocks keep what they make of their layers' products.

        switch: says of each step whether it has the adapter; None: all have. Without an adapter, it says whether other layers
        have theirs. A sum over ranks includes their shards of the adapter's product.
        """
        outer = self.format.wrapped()
        if adapter is not None:
            can_defer = switch is not None and not self._sums and self._parallel.norm_exchange is None
            adapted = Adapted(outer, adapter, can_defer=can_defer)
            outer = adapted if switch is None else AdaptedSometimes(outer, adapted, switch)
        elif switch is not None:
            outer = AdaptedSometimes(outer, BehindAdapted(outer), switch)
        if self._sums:
            outer = Summed(outer, self._parallel)
        if self._parallel.norm_exchange is not None:
            outer = BehindSums(outer)
        methods = {name: getattr(outer, name) for name in ("gated", "split_k", "behind_silu", "normed")}
        self.__dict__.update(outer=outer, **methods)  # past nn.Module, which would take a format for a second child

    def fuses_silu(self, rows: int) -> bool:
        """Whether to call `behind_silu` for so many rows, with gate|up."""
        return self.outer.fuses_silu(rows)


class Adapted(Format):
    """A format's products plus an adapter's, the first half of which needs the input alone: the format computes it beside its
    product (`Format.shrinking`), or it is launched before.

    What may be left as partial sums still is, and the adapter adds to one of them, or if `can_defer` the norm behind the layer
    adds (`Unadded`): all layers of the model must know of it.
    """

    def __init__(self, inner: Format, adapter: Adapter, *, can_defer: bool = False):
        self._inner, self._adapter, self._can_defer = inner, adapter, can_defer

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y, h = self._inner.shrinking(x, self._adapter, out)
        y = self._adapter.expand(h, y)
        return y if out is None or y is out else out.copy_(y)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        y, h = self._inner.shrinking(x, self._adapter)
        return self._adapter.expand_gated(h, y)

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        if not self._inner.splits_in_float:
            return self.product(x)
        y, h = self._inner.shrinking(x, self._adapter, splits_k=True)
        term = self._adapter.term(h, len(x)) if self._can_defer else None
        if term is not None:
            return cast(torch.Tensor, Unadded(y, term, self._adapter.expand))  # only a norm's `add` looks at it
        self._adapter.expand(h, y if y.dim() == 2 else y[0])
        return y

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, h, residual = self._inner.normed_shrinking(x, residual, norm, self._adapter)
        return (self._adapter.expand_gated if is_gated else self._adapter.expand)(h, y), residual


class BehindAdapted(Format):
    """A format without an adapter, in a step in which the layer before it may have left its own to be added."""

    def __init__(self, inner: Format):
        self._inner = inner
        same = {name: getattr(inner, name) for name in ("product", "gated", "split_k", "fuses_silu", "behind_silu")}
        self.__dict__.update(same)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.normed(None if x is None else settled(x), residual, norm, is_gated)


class AdaptedSometimes(Format):
    """`plain` in steps without adapters, `adapted` in others. A captured step keeps the one that it was captured with."""

    def __init__(self, plain: Format, adapted: Adapted | BehindAdapted, switch: Switch):
        self.plain, self._adapted, self._switch = plain, adapted, switch

    @property
    def _now(self) -> Format:
        return self._adapted if self._switch.is_active else self.plain

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._now.product(x, out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._now.gated(x)

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        return self._now.split_k(x)

    def fuses_silu(self, rows: int) -> bool:
        return self._now.fuses_silu(rows)

    def behind_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._now.behind_silu(gate_up)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._now.normed(x, residual, norm, is_gated)


class Summed(Format):
    """A format's products, summed over the ranks."""

    def __init__(self, inner: Format, parallel: Parallel):
        self._inner, self._parallel = inner, parallel

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = self._parallel.all_reduce(self._inner.product(x))
        return y if out is None else out.copy_(y)

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        exchange = self._parallel.norm_exchange
        if exchange is None:
            return self.product(x)
        return cast(torch.Tensor, Partial(self._inner.split_k(x), exchange))  # only a norm's `add` looks at it


class BehindSums(Format):
    """A format behind a norm that may have to form a sum over the ranks first, which no kernel of a product can."""

    def __init__(self, inner: Format):
        self._inner = inner
        self.__dict__.update(product=inner.product, gated=inner.gated, split_k=inner.split_k)

    def normed(
        self, x: torch.Tensor | Partial | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(x, Partial):
            return super().normed(cast(torch.Tensor, x), residual, norm, is_gated)
        return self._inner.normed(x, residual, norm, is_gated)


def choose_format(place: Placement) -> Callable[..., WeightFormat]:
    """The class of a model's weight formats, for its dtype and device; it is called as `WeightFormat` says."""
    if place.quantization is not None and place.device.type == "cuda":
        from quire.workers.layers.formats.chosen_format import quantized_format  # imports Triton, which a CPU may not have

        return quantized_format
    if place.quantization is not None and place.device.type == "cpu":
        return kept_format
    is_packed = place.device.type == "cpu" and can_pack(torch.empty(0, dtype=place.dtype, device=place.device))
    return PackedCpu if is_packed else Dense
