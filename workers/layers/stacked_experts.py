"""How checkpoints name and stack experts' tensors; and tensors of all experts' floats, which are quantized while loading.

Each expert's slice of such a tensor is given to that expert's layer (`PackedWeight`), which is then unpacked at once, like a
layer that has a tensor of its own: device memory holds a few experts' floats, never all. Called by experts.py.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from quire.workers.layers.formats.experts import Sizes
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing_experts import halves
from quire.workers.loading.weight_loader import FLOATS, WeightLoader
from quire.workers.shard import Shard


class Names(NamedTuple):
    """How a checkpoint names its experts' tensors, and how it stacks them."""

    gate: str = "gate_proj"  # of each expert; tensors of all experts are gate_up_proj and down_proj; "": there is no gate
    up: str = "up_proj"
    down: str = "down_proj"
    are_stacked: bool = False  # always, as [E, in, out] or [E, out, in]; otherwise a stacked tensor is [E, out, in]
    are_interleaved: bool = False  # gate|up: row 2i is gate's, row 2i + 1 is up's

    @property
    def side_by_side(self) -> tuple[str, ...]:
        """The layers that are one product."""
        return (self.gate, self.up) if self.gate else (self.up,)

    @property
    def stacked(self) -> tuple[str, str]:
        """Tensors of all experts: gate's and up's, and down's."""
        return "gate_up_proj" if self.gate else "up_proj", "down_proj"

    def stacked_shapes(self, experts: int, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that a tensor of all experts may have, the published one first."""
        plain, turned = (experts, outputs, inputs), (experts, inputs, outputs)
        return (turned, plain) if self.are_stacked else (plain,)

    def outputs_first(self, stacked: torch.Tensor, inputs: int) -> torch.Tensor:
        """A tensor of some experts as [E, out, in]. A square one is taken as published."""
        is_turned = self.are_stacked and stacked.shape[-2] == inputs
        return stacked.transpose(-2, -1) if is_turned else stacked


class StackedFloats:
    """<name>.gate_up_proj (or .up_proj) and .down_proj for layers "<expert>.<kind>".

    A layer's `then` is called when it has its weight.
    """

    def __init__(
        self,
        layers: Mapping[str, PackedWeight],
        thens: Mapping[str, Callable[[], None]],
        names: Names,
        experts: Shard,
        sizes: Sizes,
    ):
        self._layers, self._thens, self._names, self._experts, self._sizes = layers, thens, names, experts, sizes

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        hidden, inner = self._sizes.hidden, self._sizes.inner
        (first, second), height = self._names.stacked, len(self._names.side_by_side) * inner.full
        shapes = {first: (height, hidden), second: (hidden, inner.full)}
        for kind, (n, k) in shapes.items():
            shape, *others = self._names.stacked_shapes(self._experts.full, n, k)
            take = partial(self._take, kind == "down_proj", k)
            yield f"{name}.{kind}", WeightLoader(shape, (self._experts.slice,), FLOATS, take, tuple(others))

    def _take(self, is_down: bool, inputs: int, piece: torch.Tensor, row: int) -> None:
        """Take some of this rank's experts, from number `row` on."""
        names = self._names
        for expert, one in enumerate(piece, self._experts.start + row):
            weight = names.outputs_first(one, inputs)
            if is_down:
                self._give(f"{expert}.{names.down}", weight)
                continue
            parts = halves(weight[None], names.are_interleaved) if names.gate else (weight[None],)
            for kind, part in zip(names.side_by_side, parts, strict=True):
                self._give(f"{expert}.{kind}", part[0])

    def _give(self, layer: str, weight: torch.Tensor) -> None:
        self._layers[layer].take("weight", weight)
        self._thens[layer]()
