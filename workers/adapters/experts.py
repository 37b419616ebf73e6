"""LoraExperts: the adapters of a layer's experts, by adapter slot and expert, and how experts are computed with them.

An adapter has A and B for each expert's gate, up and down: of its own (`experts.3.up_proj`), or cut out of a parameter of all
experts, by PEFT's target_parameters. There A is [E r, in] with the expert slowest, and B [out, r E] with the expert fastest;
gate and up share an A. Which of the parameter's two dimensions PEFT took for `in` depends on its version.
"""

from typing import NamedTuple

import torch

from quire.ipc.adapters import AdapterError, AdapterPart
from quire.kernels.experts.experts_reference import Act, SwiGLU, Weights, activate
from quire.kernels.lora.tables import LoraWeights
from quire.workers.adapters.lora import StepAdapters
from quire.workers.layers import ops
from quire.workers.layers.adapter import ExpertsPlace
from quire.workers.loading.quantized.packing_experts import halves

SWAPPED_BEFORE = (0, 19)  # PEFT took a parameter's second dimension for `in`, now the third unless the layer is transposed


class Reading(NamedTuple):
    """How a parameter of all experts is read: as down's, or gate's and up's. is_swapped: A and B are B and A transposed."""

    is_down: bool
    is_swapped: bool


class LoraExperts:
    """The `ExpertsAdapter` of an Experts. An expert's index in `gate_up` and `down` is slot * E + its number on this rank."""

    def __init__(
        self, place: ExpertsPlace, steps: StepAdapters, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self.place, self._steps = place, steps
        count, inner = steps.num_slots * place.own.size, place.inner.size
        parts = [inner] * len(place.names.side_by_side)
        self.gate_up = LoraWeights.allocate(count, 2 * max_rank, place.hidden, parts, dtype, device)
        self.down = LoraWeights.allocate(count, max_rank, inner, [place.hidden], dtype, device)

    def experts(
        self,
        x: torch.Tensor,
        w: Weights,
        ids: torch.Tensor,
        weights: torch.Tensor,
        act: Act,
        shared: torch.Tensor | None,
        num_routed: int,
    ) -> torch.Tensor:
        """As `ops.experts`."""
        pairs = self._steps.pairs(ids, self.place.own.size)
        rows = x[:, None].expand(-1, ids.shape[1], -1).reshape(-1, x.shape[1])
        inner = self._steps.add_to_pairs(rows, pairs.product(rows, w.gate_up, w.gate_up_bias), self.gate_up, pairs)
        inner = ops.silu_mul(inner) if act == SwiGLU() else activate(inner, act)
        y = self._steps.add_to_pairs(inner, pairs.product(inner, w.down, w.down_bias), self.down, pairs)
        return pairs.add_up(y, weights, shared, num_routed > 0)

    # ------------------------------------------------------------------------------------------------------------- loads
    def kind_of(self, name: str) -> tuple[LoraWeights, int] | None:
        """The weights and the piece of an expert's layer of this name; None if there is none."""
        names = self.place.names
        if name == names.down:
            return self.down, 0
        return (self.gate_up, names.side_by_side.index(name)) if name in names.side_by_side else None

    def reading(self, part: AdapterPart, peft_version: str) -> Reading:
        """How a parameter of all experts is to be read. Raises AdapterError for shapes and ranks that do not fit."""
        (rows, size), (out, _), experts = part.a.shape, part.b.shape, self.place.own.full
        heights = {"gate_up": len(self.place.names.side_by_side) * self.place.inner.full, "down": self.place.hidden}
        widths = {"gate_up": self.place.hidden, "down": self.place.inner.full}
        if rows % experts:
            raise AdapterError(f"{part.a.name} has {rows} rows, which are not a rank for each of {experts} experts")
        found = [Reading(kind == "down", False) for kind in heights if (size, out) == (widths[kind], heights[kind])]
        found += [Reading(kind == "down", True) for kind in heights if (size, out) == (heights[kind], widths[kind])]
        if not found:
            raise AdapterError(f"{part.a.name} has shape {list(part.a.shape)}, which no parameter of the experts needs")
        reading = found[0] if len(found) == 1 else self._by_version(part, found, peft_version)
        if (rank := rows // experts) > (self.down if reading.is_down else self.gate_up).max_rank:
            raise AdapterError(f"{part.a.name} has rank {rank}, which is beyond --max-lora-rank")
        return reading

    def stacked(
        self, reading: Reading, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[LoraWeights, torch.Tensor, list[torch.Tensor]]:
        """(weights, A [E, r, in], B [E, out, r] of each piece) of all experts, from the file's a [E r, in] and b [out, r E]."""
        names, experts = self.place.names, self.place.own.full
        a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        if reading.is_swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        if reading.is_down:
            return self.down, a, [b]
        return self.gate_up, a, list(halves(b, names.are_interleaved)) if names.gate else [b]

    def _by_version(self, part: AdapterPart, found: list[Reading], peft_version: str) -> Reading:
        """The one that is meant of several readings that the shapes allow. Raises AdapterError if that cannot be known."""
        numbers = peft_version.split(".")[:2]
        if len({reading.is_down for reading in found}) > 1 or len(numbers) < 2 or not all(n.isdecimal() for n in numbers):
            raise AdapterError(f"{part.a.name}: its shape does not say which of the experts' parameters it belongs to")
        is_old = (int(numbers[0]), int(numbers[1])) < SWAPPED_BEFORE
        return Reading(found[0].is_down, is_old and not self.place.names.are_stacked)
