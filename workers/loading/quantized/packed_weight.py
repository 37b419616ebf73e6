"""PackedWeight: a quantized layer's tensors, gathered as the checkpoint packs them, then dequantized or unpacked at once.

A weight format owns one for each of its quantized layers. The formats of dense.py and packed_cpu.py dequantize it: on a CPU,
and on a GPU if no kernel takes it as it is. The reader of a layer's last tensor does that on its own thread and stream, beside
the other readers. The formats of quantized.py, which keep the weight quantized, get it unpacked, as a `QuantizedWeight`.
Tensors are taken whole, then this rank's shard is cut out of their values: groups and words do not end where shards do.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType

import torch

from quire.workers.loading.quantized.packing import Packing, QuantizedWeight, ScaledPacking, Tensors, TensorSpec, joined
from quire.workers.loading.quantized.packing_codes import FourBitPacking, MxFp4Packing, RowInt8Packing
from quire.workers.loading.quantized.packing_floats import FloatsPacking
from quire.workers.loading.quantized.packing_words import AwqPacking, GptqPacking, PackQuantizedPacking
from quire.workers.loading.quantized.schemes import (
    Awq,
    FourBitCodes,
    Gptq,
    MxFp4,
    PackQuantized,
    QuantizationScheme,
    Scaled,
)
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, WeightsError
from quire.workers.shard import RowShard, Shard, cut


def packing_of(scheme: QuantizationScheme, layer: str, n: int, k: int) -> Packing:
    """The packing of a layer [n, k] of this name. Raises QuantizationError if the scheme cannot hold it."""
    match scheme:
        case Gptq():
            return GptqPacking(scheme, layer, n, k)
        case Awq():
            return AwqPacking(scheme, layer, n, k)
        case PackQuantized() | Scaled() if scheme.from_floats:
            return FloatsPacking(scheme, n, k)
        case PackQuantized():
            return PackQuantizedPacking(scheme, layer, n, k)
        case Scaled():
            return ScaledPacking(scheme, n, k)
        case FourBitCodes():
            return FourBitPacking(scheme, n, k)
        case MxFp4():
            return MxFp4Packing(scheme, layer, n, k)
        case _:
            return RowInt8Packing(n, k)


NOT_QUANTIZED: MappingProxyType[str, Packing] = MappingProxyType({})


class PackedWeight:
    """The tensors of one layer; `rows` and `columns` are this rank's. read: the slices to read of each tensor; () is all."""

    input_scale: float | None = None  # numbers, not tensors: a captured product must not wait for the device
    input_zero_point: float | None = None

    def __init__(self, packing: Packing, rows: RowShard, columns: Shard, device: torch.device, read: tuple[slice, ...] = ()):
        self.packing, self.activations = packing, packing.activations
        self._read = read
        self._rows, self._columns, self._device = rows, columns, device
        self._pieces: dict[str, list[torch.Tensor]] = {}
        self._not_finite: list[str] = []  # names of tensors

    @property
    def slices(self) -> tuple[slice, slice]:
        """This rank's rows and columns; the rows must be one range."""
        assert isinstance(self._rows, Shard)
        return self._rows.slice, self._columns.slice

    def loaders(self, layer: str, has_bias: bool, then: Callable[[], None] | None = None) -> Iterator[tuple[str, WeightLoader]]:
        """Loaders of the layer's tensors. A reader calls `then` when they are all there.

        If the model has no bias, the checkpoint may have one of zeros: old packers write it.
        """
        for name, spec in self.packing.tensor_specs().items():
            yield f"{layer}.{name}", self._loader(layer, name, spec, then)
        if not has_bias:
            bias = TensorSpec(((self._rows.full,),), FLOATS, is_optional=True)
            yield f"{layer}.bias", self._loader(layer, "bias", bias, then)

    def _loader(self, layer: str, name: str, spec: TensorSpec, then: Callable[[], None] | None) -> WeightLoader:
        first, *others = spec.shapes
        return WeightLoader(
            first,
            self._read,
            spec.dtypes,
            partial(self.take, name),
            or_shapes=tuple(others),
            is_optional=spec.is_optional,
            instead=tuple(f"{layer}.{other}" for other in spec.instead),
            then=then,
        )

    def take(self, name: str, piece: torch.Tensor, row: int = 0) -> None:
        """Append a piece to the tensor of this name.

        On a CPU the piece stays in the mapped file, which is open until the readers are done. Scales are checked here, while
        they are on the host: a scale that is not finite would silently make every result wrong.
        """
        if name != "weight" and piece.is_floating_point() and not _are_finite(piece):
            self._not_finite.append(name)
        self._pieces.setdefault(name, []).append(piece.to(self._device))

    def dequantize_into(self, weight: torch.Tensor, layer: str) -> None:
        """Write this rank's shard to weight [rows, columns] and release the tensors. Raises WeightsError, like `taken`."""
        tensors = self.taken(layer)
        try:
            self._dequantize_into(tensors, weight)
        except (ValueError, RuntimeError) as error:  # from indices and sizes in the tensors' values
            raise WeightsError(f"{layer} cannot be dequantized: {error}") from None

    def _dequantize_into(self, tensors: Tensors, weight: torch.Tensor) -> None:
        if isinstance(self._rows, Shard):
            return self.packing.dequantize_into(tensors, weight, self._rows.slice, self._columns.slice)
        whole = weight.new_empty(self._rows.full, weight.shape[1])
        self.packing.dequantize_into(tensors, whole, slice(0, self._rows.full), self._columns.slice)
        weight.copy_(cut(whole, self._rows))

    def chunks(self, layer: str) -> Iterator[QuantizedWeight]:
        """This rank's shard, some outputs at a time, if the packing has a spec; releases the tensors.

        Raises WeightsError, like `taken`.
        """
        tensors = self.taken(layer)
        try:
            if isinstance(self._rows, Shard):
                yield from self.packing.chunks(tensors, self._rows.slice, self._columns.slice)
            else:
                yield self._joined(list(self.packing.chunks(tensors, slice(0, self._rows.full), self._columns.slice)))
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"{layer} cannot be unpacked: {error}") from None

    def _joined(self, pieces: list[QuantizedWeight]) -> QuantizedWeight:
        """This rank's rows, cut out of the whole layer (`pieces`): ranges may be many and small, so all is unpacked once."""
        assert not isinstance(self._rows, Shard)
        whole = joined(pieces)
        columns = slice(0, whole.q.shape[1])
        return joined([whole.shard(slice(*range_), columns) for range_ in self._rows.ranges])

    def taken(self, layer: str) -> Tensors:
        """Hand over the whole layer's tensors (the caller owns them), usable on the current stream; keep the input scales here.

        Raises WeightsError for a bias that the model does not have, and for scales that are not finite or not positive.
        """
        if any(piece.any() for piece in self._pieces.pop("bias", [])):
            raise WeightsError(f"{layer} has a bias in the checkpoint, but not in the model that config.json describes")
        if self._device.type == "cuda":  # pieces came on several streams: keep their memory until this stream is done
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
    """By the sum, which is twenty times as fast as element by element, and overflows only near float32's limit."""
    values = scales.to(torch.float32) if scales.dtype == torch.float8_e8m0fnu else scales
    return bool(values.sum(dtype=torch.float32).isfinite())


def _scalar(tensor: torch.Tensor | None) -> float | None:
    return None if tensor is None else float(tensor.item())
