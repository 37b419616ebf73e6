"""A quantized layer of the checkpoint on its way into a format: kept as it comes, then dequantized or unpacked at once.

Dequantized it is on a CPU, and on a GPU where no kernel takes it as it is: the formats of dense.py and packed_cpu.py. The
reader that brings a layer's last tensor does that, on its own thread and stream, side by side with the others. Unpacked, as
`Integers`, it goes to the formats that keep it (quantized.py). All own one `StoredLayer` for each of their quantized layers.
Tensors are taken whole, and this rank's part is cut out of what they hold: groups and words end where ranks do not.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from quire.workers.layers.row_ranges import Rows, cut
from quire.workers.loading.quantized.layouts import Integers, Layout, ScaledLayout, Stored, Tensors, joined
from quire.workers.loading.quantized.layouts_codes import FourBitLayout, MxFp4Layout, RowInt8Layout
from quire.workers.loading.quantized.layouts_floats import FloatsLayout
from quire.workers.loading.quantized.layouts_packed import AwqLayout, GptqLayout, PackQuantizedLayout
from quire.workers.loading.quantized.schemes import Activations, Awq, FourBitCodes, Gptq, MxFp4, PackQuantized, Scaled, Scheme
from quire.workers.loading.target import FLOATS, Target, WeightsError
from quire.workers.parallel import Part


def layout_of(scheme: Scheme, layer: str, n: int, k: int) -> Layout:
    """The layout of a layer [n, k] by this name. Raises QuantizationError if the scheme cannot hold it."""
    match scheme:
        case Gptq():
            return GptqLayout(scheme, layer, n, k)
        case Awq():
            return AwqLayout(scheme, layer, n, k)
        case PackQuantized() | Scaled() if scheme.from_floats:
            return FloatsLayout(scheme, n, k)
        case PackQuantized():
            return PackQuantizedLayout(scheme, layer, n, k)
        case Scaled():
            return ScaledLayout(scheme, n, k)
        case FourBitCodes():
            return FourBitLayout(scheme, n, k)
        case MxFp4():
            return MxFp4Layout(scheme, layer, n, k)
        case _:
            return RowInt8Layout(n, k)


class Source(NamedTuple):
    """How the checkpoint holds a layer that is quantized."""

    layout: Layout
    activations: Activations | None


NOT_QUANTIZED: MappingProxyType[str, Source] = MappingProxyType({})


def source_of(scheme: Scheme, layer: str, n: int, k: int) -> Source:
    activations = scheme.activations if isinstance(scheme, PackQuantized | Scaled) else None
    return Source(layout_of(scheme, layer, n, k), activations)


class StoredLayer:
    """The tensors of one layer, of which `rows` and `columns` are this rank's, and `part` is what it reads of each."""

    input_scale: float | None = None  # numbers, not tensors: a product that is captured may not wait for the device
    input_zero_point: float | None = None

    def __init__(self, source: Source, rows: Rows, columns: Part, device: torch.device, part: tuple[slice, ...] = ()):
        self.layout, self.activations = source
        self._part = part
        self._rows, self._columns, self._device = rows, columns, device
        self._pieces: dict[str, list[torch.Tensor]] = {}
        self._not_finite: list[str] = []  # tensors

    @property
    def slices(self) -> tuple[slice, slice]:
        """This rank's rows and columns, of a layer whose rows are in one piece."""
        assert isinstance(self._rows, Part)
        return self._rows.slice, self._columns.slice

    def targets(self, layer: str, has_bias: bool, then: Callable[[], None] | None = None) -> Iterator[tuple[str, Target]]:
        """`then` is called by a reader when the layer's tensors are all there.

        A bias that the model has not may be there all the same, full of zeros, as old packers write it.
        """
        for name, stored in self.layout.stored().items():
            yield f"{layer}.{name}", self._target(layer, name, stored, then)
        if not has_bias:
            bias = Stored(((self._rows.full,),), FLOATS, is_optional=True)
            yield f"{layer}.bias", self._target(layer, "bias", bias, then)

    def _target(self, layer: str, name: str, stored: Stored, then: Callable[[], None] | None) -> Target:
        first, *others = stored.shapes
        return Target(
            first,
            self._part,
            stored.dtypes,
            partial(self.take, name),
            or_shapes=tuple(others),
            is_optional=stored.is_optional,
            instead=tuple(f"{layer}.{other}" for other in stored.instead),
            then=then,
        )

    def take(self, name: str, piece: torch.Tensor, row: int = 0) -> None:
        """A piece of the tensor of this name, behind those before it.

        On a CPU the piece stays in the mapped file, which is open until the readers are done. Scales are looked at here, where
        no device has to be waited for: one that is no number would make every answer wrong, and say nothing.
        """
        if name != "weight" and piece.is_floating_point() and not _are_finite(piece):
            self._not_finite.append(name)
        self._pieces.setdefault(name, []).append(piece.to(self._device))

    def dequantize_into(self, weight: torch.Tensor, layer: str) -> None:
        """This rank's part into weight [rows, columns]; the tensors are released. Raises WeightsError, as `taken`."""
        tensors = self.taken(layer)
        try:
            self._dequantize_into(tensors, weight)
        except (ValueError, RuntimeError) as error:  # of indices and sizes that a tensor's values give
            raise WeightsError(f"{layer} cannot be dequantized: {error}") from None

    def _dequantize_into(self, tensors: Tensors, weight: torch.Tensor) -> None:
        if isinstance(self._rows, Part):
            return self.layout.dequantize_into(tensors, weight, self._rows.slice, self._columns.slice)
        whole = weight.new_empty(self._rows.full, weight.shape[1])
        self.layout.dequantize_into(tensors, whole, slice(0, self._rows.full), self._columns.slice)
        weight.copy_(cut(whole, self._rows))

    def chunks(self, layer: str) -> Iterator[Integers]:
        """This rank's part of a layer whose layout has a form, some outputs at a time, and the tensors are released.

        Raises WeightsError, as `taken`.
        """
        tensors = self.taken(layer)
        try:
            if isinstance(self._rows, Part):
                yield from self.layout.chunks(tensors, self._rows.slice, self._columns.slice)
            else:
                yield self._joined(list(self.layout.chunks(tensors, slice(0, self._rows.full), self._columns.slice)))
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"{layer} cannot be unpacked: {error}") from None

    def _joined(self, pieces: list[Integers]) -> Integers:
        """Our rows of pieces that are the whole layer's: they may be many and small, so what is unpacked is so once."""
        assert not isinstance(self._rows, Part)
        whole = joined(pieces)
        columns = slice(0, whole.q.shape[1])
        return joined([whole.part(slice(*range_), columns) for range_ in self._rows.ranges])

    def taken(self, layer: str) -> Tensors:
        """The whole layer's tensors, for the current stream, and nobody's any more; scales of inputs are kept here.

        Raises WeightsError for a bias that the model has not, and for scales that are none.
        """
        if any(piece.any() for piece in self._pieces.pop("bias", [])):
            raise WeightsError(f"{layer} has a bias in the checkpoint, but not in the model that config.json describes")
        if self._device.type == "cuda":  # pieces came on several streams, and their memory may not go back before we are done
            for piece in (piece for pieces in self._pieces.values() for piece in pieces):
                piece.record_stream(torch.cuda.current_stream(self._device))
        tensors: Tensors = {name: p[0] if len(p) == 1 else torch.cat(p) for name, p in self._pieces.items()}
        self._pieces = {}
        self.input_scale = _scalar(tensors.get("input_scale", tensors.get("activation_scale")))
        if self.input_scale is not None and not 0 < self.input_scale < math.inf:
            raise WeightsError(f"{layer} has an input_scale of {self.input_scale:g}: a positive number is expected")
        if self._not_finite:
            raise WeightsError(
                f"{layer}.{self._not_finite[0]} has values that are infinite or no numbers: quantize the layer again, or leave "
                "it as it is"
            )
        self.input_zero_point = _scalar(tensors.get("input_zero_point"))
        return tensors


def _are_finite(scales: torch.Tensor) -> bool:
    """By their sum, which is twenty times as fast as to ask each of them, and infinite if two are near float32's limit."""
    values = scales.to(torch.float32) if scales.dtype == torch.float8_e8m0fnu else scales
    return bool(values.sum(dtype=torch.float32).isfinite())


def _scalar(tensor: torch.Tensor | None) -> float | None:
    return None if tensor is None else float(tensor.item())
