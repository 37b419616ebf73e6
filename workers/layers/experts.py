"""A layer's experts and their router: the owners of all experts' stacked weights, and of the weights that choose among them.

The checkpoint has a tensor for each expert, or one for all. Both become gate_up [E, 2 I, H] and down [E, H, I] in the dtype of
the activations; experts without a gate have up alone, [E, I, H]. Quantized experts stay quantized on a GPU if a kernel computes
with them (formats/experts.py); otherwise they are dequantized while loading. A rank holds a shard of each expert's intermediate
dimension, or whole experts (--enable-expert-parallel), and results are summed over the ranks. Every rank has the whole router,
and all choose alike. Arithmetic is in ops.py; models/moe.py makes families' mixtures of these.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from quire.kernels.experts.experts_reference import Act, Weights, is_gated
from quire.kernels.experts.routing_reference import Counting, Routing
from quire.workers.layers import ops
from quire.workers.layers.adapter import Adapter, ExpertsAdapter, ExpertsPlace, Switch
from quire.workers.layers.formats.activations import rounded_for
from quire.workers.layers.formats.experts import ExpertRows, QuantizedExperts, Sizes, capability_of, choose
from quire.workers.layers.kept_experts import KeptExperts, kinds_on_cpu
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import WeightOwner, fill_cut, new_parameter
from quire.workers.layers.rounded_experts import ExpertInputs, experts_in_turn, experts_of_rounded_inputs
from quire.workers.layers.stacked_experts import Names, StackedFloats
from quire.workers.loading.quantized.packed_weight import PackedWeight, packing_of
from quire.workers.loading.quantized.packing_experts import StackedMxFp4Packing, halves
from quire.workers.loading.quantized.packing_floats import FloatsPacking
from quire.workers.loading.quantized.schemes import MxFp4, PackQuantized, QuantizationError, QuantizationScheme, Scaled
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, copied
from quire.workers.shard import Shard, whole


class Router(WeightOwner):
    """h [T, H] -> the experts of each row and their weights. correction: the name of its tensor, beside the router's.

    If whole experts are distributed over ranks, ids are numbers among this rank's E experts, and E is an expert of another
    rank. On a CPU the weight is float32: logits are never rounded to 16 bits (kernels/experts/routing.py).
    """

    def __init__(
        self,
        layer: str,
        routing: Routing,
        hidden_size: int,
        place: Placement,
        *,
        has_bias: bool = False,
        correction: str | None = None,
    ):
        """layer: the router's own name within `place`."""
        super().__init__()
        self.routing, self._correction_name = routing, correction
        experts, dtype = routing.num_experts, torch.float32 if place.device.type == "cpu" else place.dtype
        self._packed = _packed_router(layer, whole(experts), whole(hidden_size), place)
        self.weight = new_parameter((experts, hidden_size), dtype, place.device)
        self.bias = new_parameter((experts,), dtype, place.device) if has_bias else None
        self.correction = new_parameter((experts,), torch.float32, place.device) if correction else None
        own, self._load = place.parallel.experts(experts), place.parallel.expert_load
        self._held = None if own.is_whole else (own.start, own.size)
        self._counts = self._load.new(experts) if self._load is not None else None
        self._adapter: Adapter | None = None

    def set_adapter(self, adapter: Adapter, switch: Switch) -> None:
        """As for a Linear: it adds to the logits in steps in which the switch is on."""
        self._adapter, self._switch = adapter, switch

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int32 [T, k], weights float32 [T, k])"""
        is_adapted = self._adapter is not None and self._switch.is_active
        adapter = partial(self._adapter.apply, h) if self._adapter is not None and is_adapted else None
        if self._packed is not None:
            h = rounded_for(h, self._packed)
        counting = None
        if self._load is not None and self._counts is not None:
            counting = Counting(self._counts, self._load.real_rows(len(h)))
        return ops.route(h, self.weight, self.bias, self.correction, self.routing, self._held, counting, adapter)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        experts, hidden_size = map(whole, self.weight.shape)
        if self._packed is None:
            yield f"{name}.weight", copied(self.weight, (experts, hidden_size))
        else:
            then = partial(self._packed.dequantize_into, self.weight, name)
            yield from self._packed.loaders(name, self.bias is not None, then)
        if self.bias is not None:
            yield f"{name}.bias", copied(self.bias, (experts,))
        if self.correction is not None:
            yield f"{name.rpartition('.')[0]}.{self._correction_name}", copied(self.correction, (experts,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        super().fill_dummy(limit, generator)
        if self.correction is not None:
            self.correction.zero_()


def _packed_router(layer: str, experts: Shard, hidden_size: Shard, place: Placement) -> PackedWeight | None:
    """A router's packed weight if the checkpoint's files hold it quantized: some packers treat it as any linear layer."""
    packing = place.of_router().packings(hidden_size, {layer: experts}).get(layer)
    return None if packing is None else PackedWeight(packing, experts, hidden_size, place.device)


def _lie_apart(place: Placement, names: Names) -> bool:
    """Whether a quantized checkpoint has tensors of each expert; packers write them so for any family."""
    holds = None if place.quantization is None else place.quantization.holds
    return holds is not None and holds(f"{place.prefix}0.{names.side_by_side[0]}")


class Experts(WeightOwner):
    """h [T, H], its experts and their weights -> this rank's share of their sum [T, H], plus `shared` [T, H] if given."""

    def __init__(
        self,
        experts: Shard,
        hidden_size: int,
        inner: Shard,
        place: Placement,
        *,
        act: Act,
        names: Names,
        has_bias: bool = False,
    ):
        super().__init__()
        assert is_gated(act) == bool(names.gate)
        self._act, self._names, self._experts, self._inner = act, names, experts, inner
        self._num_routed = 0 if experts.is_whole else experts.full
        self._adds_bias = inner.is_whole or place.parallel.rank == 0
        dtype, device = place.dtype, place.device
        num_experts, parts = experts.size, len(names.side_by_side)
        self._dtype = dtype
        self._device, self._sizes = device, Sizes(experts.full, hidden_size, inner, parts)
        self._are_stacked = names.are_stacked and not _lie_apart(place, names)
        self._packed = self._quantized(place)
        self._inputs = self._rounded_inputs()
        self._kept, self.not_computed = self._keeps()
        if self._kept is None:
            self.gate_up = new_parameter((num_experts, parts * inner.size, hidden_size), dtype, device)
            self.down = new_parameter((num_experts, hidden_size, inner.size), dtype, device)
        self.gate_up_bias = new_parameter((num_experts, parts * inner.size), dtype, device) if has_bias else None
        self.down_bias = new_parameter((num_experts, hidden_size), dtype, device) if has_bias else None
        self._adapter: ExpertsAdapter | None = None
        self.takes_pairs = False  # h has a row for each of a token's experts

    @property
    def place(self) -> ExpertsPlace:
        """All that an adapter must know of them."""
        lacks = "experts that get tokens as they are" if self.takes_pairs else ""
        lacks = "experts without quantized weights" if self._kept is not None or self._inputs else lacks
        return ExpertsPlace(self._experts, self._sizes.hidden, self._inner, self._names, lacks)

    def set_adapter(self, adapter: ExpertsAdapter, switch: Switch) -> None:
        """As for a Linear: it computes the experts in steps in which the switch is on."""
        self._adapter, self._switch = adapter, switch

    def forward(
        self, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._adapter is not None and self._switch.is_active:
            return self._adapter.experts(h, self.weights, ids, weights, self._act, shared, self._num_routed)
        if isinstance(self._kept, KeptExperts):
            return experts_in_turn(h, self._experts.size, ids, weights, shared, self._one_kept)
        if self._inputs:
            return experts_of_rounded_inputs(h, self.weights, ids, weights, self._act, shared, self._inputs)
        return ops.experts(h, self.weights, ids, weights, self._act, shared, self._num_routed)

    def _one_kept(self, h: torch.Tensor, expert: int) -> torch.Tensor:
        assert isinstance(self._kept, KeptExperts)
        inputs = self._inputs[expert] if self._inputs else None
        return self._kept.expert(h, expert, self._act, inputs, (self.gate_up_bias, self.down_bias))

    @property
    def weights(self) -> Any:
        if self._kept is not None:
            return self._kept.weights(self.gate_up_bias, self.down_bias)
        return Weights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)

    def _quantized(self, place: Placement) -> dict[str, PackedWeight]:
        """The layers that the checkpoint has quantized, all or some, by their names after our own. Raises QuantizationError."""
        if place.quantization is None:
            return {}
        hidden_size, names = whole(self._sizes.hidden), self._names
        if self._are_stacked:
            first = f"{place.prefix}{names.stacked[0]}"
            if (scheme := place.quantization.scheme_of(first)) is None:
                return {}
            if not (isinstance(scheme, PackQuantized | Scaled) and scheme.from_floats):
                return self._stacked_mxfp4(scheme, first)
        kinds = [(kind, self._inner, hidden_size) for kind in names.side_by_side]
        kinds.append((names.down, hidden_size, self._inner))
        found = {}
        for expert in range(self._sizes.experts):
            for kind, rows, columns in kinds:
                layer = f"{place.prefix}{expert}.{kind}"
                if (scheme := place.quantization.scheme_of(layer)) is not None:
                    packing = packing_of(scheme, layer, rows.full, columns.full)
                    found[f"{expert}.{kind}"] = PackedWeight(packing, rows, columns, self._device)
        return found

    def _stacked_mxfp4(self, scheme: QuantizationScheme, layer: str) -> dict[str, PackedWeight]:
        if not isinstance(scheme, MxFp4):
            raise QuantizationError(f"quantization_config: {layer} holds all experts: only mxfp4 is supported there")
        experts, hidden_size, inner, _ = self._sizes
        interleaved = self._names.are_interleaved
        gate_up = StackedMxFp4Packing(
            "gate_up_proj", experts, 2 * inner.full, hidden_size, parts=2, are_interleaved=interleaved
        )
        down = StackedMxFp4Packing("down_proj", experts, hidden_size, inner.full)
        own = (self._experts.slice,)
        return {
            "gate_up_proj": PackedWeight(gate_up, inner, whole(hidden_size), self._device, own),
            "down_proj": PackedWeight(down, whole(hidden_size), inner, self._device, own),
        }

    def _rounded_inputs(self) -> list[ExpertInputs]:
        """How inputs of this rank's experts are rounded, on a CPU; empty if none are."""
        if self._device.type != "cpu" or not any(packed.activations for packed in self._packed.values()):
            return []
        own, names = self._experts, self._names
        kinds = (names.gate, names.up, names.down)
        return [
            ExpertInputs(*(self._packed.get(f"{expert}.{kind}") for kind in kinds)) for expert in range(own.start, own.stop)
        ]

    @property
    def _has_plain(self) -> bool:
        """Whether some layers are plain and others quantized: rules may leave some of an expert's layers out."""
        layers = (len(self._names.side_by_side) + 1) * self._sizes.experts
        return 0 < len(self._packed) < layers and all(layer[0].isdecimal() for layer in self._packed)

    def _keeps(self) -> tuple[QuantizedExperts | None, dict[str, str]]:
        """The module that keeps the weights quantized, on a GPU; or None, and the reason for each dequantized layer."""
        if not self._packed:
            return None, {}
        if (capability := capability_of(self._device)) is None and self._device.type != "cpu":
            return None, {}
        if capability is None:
            return self._keeps_on_cpu()
        is_down = {layer: layer.rpartition(".")[2] in (self._names.down, "down_proj") for layer in self._packed}
        gate_up, down = ([s for layer, s in self._packed.items() if is_down[layer] == kind] for kind in (False, True))
        if not self._experts.is_whole:
            return None, dict.fromkeys(self._packed, "of some of all experts")
        if self._has_plain:
            return None, dict.fromkeys(self._packed, "experts of which some layers are plain")
        found = choose(gate_up, down, self._sizes, capability)
        if isinstance(found, str):
            return None, dict.fromkeys(self._packed, found)
        return found.make(self._sizes, self._dtype, self._device), {}

    def _keeps_on_cpu(self) -> tuple[QuantizedExperts | None, dict[str, str]]:
        if self._has_plain:
            return None, dict.fromkeys(self._packed, "experts of which some layers are plain")
        downs = {layer for layer in self._packed if layer.rpartition(".")[2] in (self._names.down, "down_proj")}
        kinds = kinds_on_cpu(self._packed, self._sizes, downs, self._dtype)
        if isinstance(kinds, str):
            return None, dict.fromkeys(self._packed, kinds)
        kept = KeptExperts(self._sizes, self._experts, self._packed, kinds)
        self.opaque_bytes = kept.expected_bytes
        return kept, {}

    # ------------------------------------------------------------------------------------------------------ loading
    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        if self._packed:
            yield from self._quantized_loaders(name)
        elif self._are_stacked:
            yield from self._stacked_loaders(name)
        else:
            for tensor, loader in self._loaders_of_each(name, self.gate_up, self.down, "weight"):
                kind = self._names.stacked[f".{self._names.down}." in tensor]
                yield tensor, loader._replace(instead=(f"{name}.{kind}",))
            for tensor, loader in self._stacked_loaders(name):
                yield tensor, loader._replace(is_optional=True)
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield from self._bias_loaders(name, self.gate_up_bias, self.down_bias)

    def _bias_loaders(self, name: str, gate_up: torch.Tensor, down: torch.Tensor) -> Iterator[tuple[str, WeightLoader]]:
        if self._names.are_stacked and not self._are_stacked:
            yield from self._loaders_of_each(name, gate_up, down, "bias")
            return
        experts, inner, hidden_size = self._experts, self._inner, whole(self._sizes.hidden)
        height = len(self._names.side_by_side) * inner.full
        yield f"{name}.{self._names.stacked[0]}_bias", self._loader((experts.full, height), self._take_gate_up_bias)
        yield f"{name}.down_proj_bias", copied(down, (experts, hidden_size))

    def _loaders_of_each(
        self, name: str, gate_up: torch.Tensor, down: torch.Tensor, tensor: str
    ) -> Iterator[tuple[str, WeightLoader]]:  # fmt: skip
        """Loaders of weights or biases, for a tensor of each expert's layer."""
        names, inner, hidden_size = self._names, self._inner, whole(self._sizes.hidden)
        for expert in range(self._experts.full):
            own = self._own(expert)
            of_gate_up, of_down = gate_up[own or 0], down[own or 0]
            parts = of_gate_up.split(inner.size)
            for kind, part, sizes in (
                *((kind, part, (inner, hidden_size)) for kind, part in zip(names.side_by_side, parts, strict=True)),
                (names.down, of_down, (hidden_size, inner)),
            ):
                yield f"{name}.{expert}.{kind}.{tensor}", copied(part, sizes[: part.dim()])._replace(is_read=own is not None)

    def _own(self, expert: int) -> int | None:
        """The number on this rank of one of all experts; None: it is another rank's."""
        experts = self._experts
        return expert - experts.start if experts.start <= expert < experts.stop else None

    def _stacked_loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        experts, hidden_size, inner = self._experts.full, self.gate_up.shape[2], self._inner.full
        height = len(self._names.side_by_side) * inner
        gate_up, down = (self._names.stacked_shapes(experts, *sizes) for sizes in ((height, hidden_size), (hidden_size, inner)))
        yield f"{name}.{self._names.stacked[0]}", self._loader(gate_up[0], self._take_gate_up)._replace(or_shapes=gate_up[1:])
        yield f"{name}.down_proj", self._loader(down[0], self._take_down)._replace(or_shapes=down[1:])

    def _quantized_loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        has_bias = self.gate_up_bias is not None
        thens = {layer: self._then(name, layer) for layer in self._packed}
        of_floats = any(isinstance(packed.packing, FloatsPacking) for packed in self._packed.values())
        if of_floats:
            feed = StackedFloats(self._packed, thens, self._names, self._experts, self._sizes)
            for tensor, loader in feed.loaders(name):
                yield tensor, loader._replace(is_optional=not self._names.are_stacked)
        for layer, packed in self._packed.items() if not (of_floats and self._names.are_stacked) else ():
            expert, _, kind = layer.rpartition(".")
            own = self._own(int(expert)) if expert else 0
            stacked = (f"{name}.{self._names.stacked[kind == self._names.down]}",) if of_floats else ()
            where = f"{name}.{layer}" if expert else name
            for tensor, loader in packed.loaders(where, has_bias or not expert, thens[layer]):
                yield tensor, loader._replace(is_read=own is not None, instead=(*loader.instead, *stacked))
        for tensor, loader in self._loaders_of_each(name, self.gate_up, self.down, "weight") if self._has_plain else ():
            if tensor.removeprefix(f"{name}.").removesuffix(".weight") not in self._packed:
                yield tensor, loader

    def _then(self, name: str, layer: str) -> Callable[[], None]:
        """The function to call for a quantized layer when all its tensors are there."""
        (expert, _, kind), packed, size = layer.rpartition("."), self._packed[layer], self._inner.size
        if self._kept is not None:
            return partial(self._kept.put, packed, f"{name}.{layer}", self._place(expert, kind))
        into: torch.Tensor = self.down if kind == self._names.down else self.gate_up
        if expert:
            part = slice(-size, None) if kind == self._names.up else slice(None if kind == self._names.down else size)
            into = into[self._own(int(expert)) or 0, part]
        return partial(packed.dequantize_into, into, f"{name}.{layer}" if expert else name)

    def _place(self, expert: str, kind: str) -> ExpertRows:
        """The rows where a quantized layer is kept; expert "": all experts'."""
        size, hidden = self._inner.size, self._sizes.hidden
        experts = slice(int(expert), int(expert) + 1) if expert else slice(0, self._sizes.experts)
        if kind in (self._names.down, "down_proj"):
            return ExpertRows(True, experts, slice(0, hidden))
        parts = self._names.side_by_side
        rows = {part: slice(number * size, (number + 1) * size) for number, part in enumerate(parts)}
        return ExpertRows(False, experts, rows.get(kind, slice(0, len(parts) * size)))

    def _loader(self, shape: tuple[int, ...], write: Callable[[torch.Tensor, int], None]) -> WeightLoader:
        """A loader of a tensor that has a row for each expert. It reads this rank's; `write` cuts their shards."""
        return WeightLoader(shape, (self._experts.slice,), FLOATS, write)

    def _take_gate_up(self, piece: torch.Tensor, row: int) -> None:
        self._put(self.gate_up, self._names.outputs_first(piece.to(self._device), self.gate_up.shape[2]), row)

    def _take_gate_up_bias(self, piece: torch.Tensor, row: int) -> None:
        assert self.gate_up_bias is not None
        self._put(self.gate_up_bias, piece.to(self._device), row)

    def _put(self, into: torch.Tensor, gate_up: torch.Tensor, row: int) -> None:
        """Copy gate and up of some experts, [n, 2 I, ...] in the checkpoint's order, or up alone."""
        size, some = self._inner.size, into[row : row + len(gate_up)]
        parts = halves(gate_up, self._names.are_interleaved) if self._names.gate else (gate_up,)
        for number, half in enumerate(parts):
            some[:, number * size : (number + 1) * size].copy_(half[:, self._inner.slice])

    def _take_down(self, piece: torch.Tensor, row: int) -> None:
        down = self._names.outputs_first(piece.to(self._device), self._inner.full)
        self.down[row : row + len(piece)].copy_(down[:, :, self._inner.slice])

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        if self._kept is not None:
            self._kept.fill_dummy(limit, generator)
            return super().fill_dummy(limit, generator)  # biases
        if self._inner.is_whole and self._experts.is_whole:
            return super().fill_dummy(limit, generator)
        own, experts, hidden, inner = self._experts.slice, self._experts.full, self.down.shape[1], self._inner
        parts = len(self._names.side_by_side)

        def both(whole: torch.Tensor) -> torch.Tensor:
            return torch.cat([part[:, inner.slice] for part in whole[own].chunk(parts, 1)], 1)

        fill_cut(self.gate_up, (experts, parts * inner.full, hidden), both, limit, generator)
        fill_cut(self.down, (experts, hidden, inner.full), lambda whole: whole[own, :, inner.slice], limit, generator)
        if self.gate_up_bias is not None and self.down_bias is not None:
            fill_cut(self.gate_up_bias, (experts, parts * inner.full), both, limit, generator)
            fill_cut(self.down_bias, (experts, hidden), lambda whole: whole[own], limit, generator)
        return None

    def finish(self) -> None:
        """As for a Linear: if results are summed over ranks, only one rank adds the bias."""
        if self._kept is not None:
            self._kept.finish()
            self.opaque_bytes = 0  # parameters, from here on
        if self.down_bias is not None and not self._adds_bias:
            self.down_bias.zero_()
