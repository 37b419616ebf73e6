"""Experts' weights that stay in few bits on a CPU: each layer of an expert has a weight of its own, as a Linear has.

Experts that have tokens are computed one after another, each with its rows together. Made and called by experts.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.kernels.experts.experts_reference import Act, activate
from quire.kernels.linear.blocks_cpu import Codes4, Grouped8, Int8Rows
from quire.kernels.linear.int4_cpu import PackedInt4, stacked
from quire.workers.layers.formats.activations import rounded_for, rounds_alike
from quire.workers.layers.formats.chosen_cpu import choose
from quire.workers.layers.formats.experts import ExpertRows, QuantizedExperts, Sizes
from quire.workers.layers.formats.kept_cpu import (
    CODES_GROUP,
    CodesCpu,
    drawn_codes,
    expected_bytes,
    kept_weight,
    made_of,
    multiplied,
    of_codes,
)
from quire.workers.layers.formats.quantized import QuantizedFormat, drawn
from quire.workers.layers.rounded_experts import ExpertInputs
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import Packing, QuantizedSpec
from quire.workers.loading.quantized.packing_experts import StackedMxFp4Packing
from quire.workers.shard import Shard, whole

Kind = type[QuantizedFormat]  # type: ignore[type-arg]
Weight = PackedInt4 | Int8Rows | Grouped8 | Codes4


KINDS = (("gate", "up"), ("down",))  # by whether a tensor is down's; experts may have no gate


class Part(NamedTuple):
    """A layer of an expert, by the expert's number on this rank."""

    expert: int
    kind: str  # gate, up or down; gate_up, if they are one


def kinds_on_cpu(
    packed: Mapping[str, PackedWeight], sizes: Sizes, downs: set[str], dtype: torch.dtype
) -> dict[str, Kind] | str:
    """The formats of experts' layers by name; or the reason why they are dequantized. downs: the names of down's layers."""
    found: dict[str, Kind] = {}
    for layer, one in packed.items():
        columns = sizes.inner if layer in downs else whole(sizes.hidden)
        kind = choose(one.packing.one if isinstance(one.packing, StackedMxFp4Packing) else one.packing, columns, dtype)
        if isinstance(kind, str):
            return kind
        found[layer] = kind
    return found


class KeptExperts(QuantizedExperts):
    """Gate, up and down of this rank's experts, `own`; `kinds` are the layers' formats by their checkpoint's names."""

    def __init__(self, sizes: Sizes, own: Shard, packed: Mapping[str, PackedWeight], kinds: Mapping[str, Kind]):
        super().__init__()
        self._has_gate = sizes.parts == 2
        self.kept = [None, None]  # weights are not stacked
        self._inner, self._hidden, self._own_experts = sizes.inner, whole(sizes.hidden), own
        self._kinds = {id(packed[layer]): kind for layer, kind in kinds.items()}
        self._rounds_inputs = any(one.activations for one in packed.values())
        self._parts: dict[Part, Weight] = {}
        self._layers = _layers_of_an_expert(packed, kinds, self._has_gate)
        self.expected_bytes = own.size * sum(
            expected_bytes(packing, *(part.size for part in self._shards(name == "down")))
            for name, (packing, _) in self._layers.items()
        )

    def _put(self, into: Any, packed: PackedWeight, tensors: dict[str, torch.Tensor], place: ExpertRows) -> None:
        (rows, columns), packing = self._shards(place.is_down), packed.packing
        if isinstance(packing, StackedMxFp4Packing):
            for expert in range(self._own_experts.size):
                for kind, stored in zip(KINDS[place.is_down], packing.stored(tensors, expert), strict=True):
                    self._parts[Part(expert, kind)] = of_codes(stored, rows, columns)
            return
        kind = "down" if place.is_down else "gate" if self._has_gate and place.rows.start == 0 else "up"
        made = kept_weight(self._kinds[id(packed)], packed, tensors, rows, columns)
        self._parts[Part(place.experts.start - self._own_experts.start, kind)] = made

    def _shards(self, is_down: bool) -> tuple[Shard, Shard]:
        """(outputs, inputs) of down, or of gate and of up."""
        return (self._hidden, self._inner) if is_down else (self._inner, self._hidden)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        for expert in range(self._own_experts.size):
            for name, (packing, kind) in self._layers.items():
                rows, columns = self._shards(name == "down")
                self._parts[Part(expert, name)] = _drawn(kind, packing.spec, rows.size, columns.size, limit, generator)

    def finish(self) -> None:
        """Join gate and up where one product takes both; then own the tensors."""
        for expert in range(self._own_experts.size if self._has_gate else 0):
            gate, up = self._parts[Part(expert, "gate")], self._parts[Part(expert, "up")]
            both = stacked([gate, up]) if isinstance(gate, PackedInt4) and isinstance(up, PackedInt4) else None
            if both is not None and not self._rounds_inputs:
                self._parts[Part(expert, "gate_up")] = both
                del self._parts[Part(expert, "gate")], self._parts[Part(expert, "up")]
        for (expert, name), weight in self._parts.items():
            for field, value in weight._asdict().items():
                if isinstance(value, torch.Tensor):
                    self.register_parameter(f"{name}{expert}_{field}", nn.Parameter(value, requires_grad=False))

    def expert(
        self,
        x: torch.Tensor,
        expert: int,
        act: Act,
        inputs: ExpertInputs | None,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """x [rows, H] -> one expert's result [rows, H]."""
        gate, up, down = (None, None, None) if inputs is None else inputs
        both = self._parts.get(Part(expert, "gate_up"))
        if both is not None:
            gate_up = multiplied(x, both)
        elif not self._has_gate:
            gate_up = multiplied(rounded_for(x, up), self._parts[Part(expert, "up")])
        else:
            first = rounded_for(x, gate)
            second = first if rounds_alike(gate, up) else rounded_for(x, up)
            parts = multiplied(first, self._parts[Part(expert, "gate")]), multiplied(second, self._parts[Part(expert, "up")])
            gate_up = torch.cat(parts, -1)
        if biases[0] is not None:
            gate_up += biases[0][expert]
        y = multiplied(rounded_for(activate(gate_up, act), down), self._parts[Part(expert, "down")])
        return y if biases[1] is None else y.add_(biases[1][expert])


def _layers_of_an_expert(
    packed: Mapping[str, PackedWeight], kinds: Mapping[str, Kind], has_gate: bool
) -> dict[str, tuple[Packing, Kind]]:
    """The packing and format of gate, up and down; experts are alike in them."""
    found: list[tuple[Packing, Kind]] = []
    names = (*KINDS[0], *KINDS[1])[not has_gate :]
    for layer in list(packed)[: len(names)]:
        packing = packed[layer].packing
        if isinstance(packing, StackedMxFp4Packing):
            found += [(packing.one, kinds[layer])] * (1 if layer == "down_proj" else 2)
        else:
            found.append((packing, kinds[layer]))
    return dict(zip(names, found, strict=True))


def _drawn(
    kind: Kind, spec: QuantizedSpec | None, outputs: int, inputs: int, limit: float, generator: torch.Generator
) -> Weight:
    if kind is CodesCpu or spec is None:
        return drawn_codes(outputs, inputs, CODES_GROUP, limit, generator)
    return made_of(kind, drawn(spec, (outputs, inputs), limit, generator, torch.device("cpu")))
