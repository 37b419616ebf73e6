"""The base of formats that keep a weight quantized, as kernels take it, on a GPU; and formats side by side in one Linear.

The reader that brings a layer's last tensor makes the kernel's weight of it, one chunk of outputs after another, and then reads
on: the device holds the final weights and the layers that a few readers work on. At the end, layers of one Linear are stacked
into one weight; if their inputs must be treated differently (another order, another static scale), they are a weight each.
Dummy values are quantized, too, drawn and packed the same way. int4.py, w8a16.py and scaled.py have the formats;
chosen_format.py chooses.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from quire.workers.layers import ops
from quire.workers.layers.formats.format import WeightFormat, WeightShard, checkpoint_prefix
from quire.workers.layers.module import new_parameter
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing import QuantizedSpec, QuantizedWeight, row_chunks
from quire.workers.loading.weight_loader import WeightLoader, WeightsError, copied_rows

DRAWN_AT_ONCE = 1 << 26  # elements of a dummy weight
LARGEST = {"uint4": 8.0, "uint8": 128.0, "int8": 127.0, "fp8": 448.0}  # about the greatest value that a scale multiplies
ONE_STEP = 1.0  # static scale of inputs, with dummy weights

W = TypeVar("W")


class QuantizedFormat(WeightFormat, Generic[W]):
    """Owns weights W, which are named tuples, and a bias; the subclass makes them and multiplies.

    All layers of the shard are quantized, with specs that the subclass takes.
    """

    bias: nn.Parameter | None

    def __init__(self, shard: WeightShard, has_bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.shard, self.dtype, self.device = shard, dtype, device
        self.bias = new_parameter(shard.shape[:1], dtype, device) if has_bias else None
        self.packed_layers = {
            layer: PackedWeight(shard.packings[layer], rows, shard.columns, device) for layer, rows in shard.rows.items()
        }
        self._made: dict[str, W] = {}  # finished layers, until all are there
        self.weights: list[tuple[W, torch.Tensor | None]] = []  # each with its slice of the bias, in the order of y

    # ------------------------------------------------------------------------------------------------- the subclass's
    def _weight_of(self, quantized: QuantizedWeight, packed: PackedWeight) -> W:
        """The weight of some of a layer's outputs; it may share memory with `quantized`. Raises ValueError if there is none."""
        raise NotImplementedError

    def _stacked(self, above: W, below: W) -> W | None:
        """Both as one weight; None if their inputs are treated differently."""
        raise NotImplementedError

    def _outputs(self, weight: W) -> int:
        raise NotImplementedError

    def _multiplied(
        self, x: torch.Tensor, weight: W, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """y of one of the weights, gated if is_gated, in `out` if it is given."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- products
    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(self.weights) == 1:
            weight, bias = self.weights[0]
            return self._multiplied(x, weight, bias, out, False)
        return torch.cat([self._multiplied(x, weight, bias, None, False) for weight, bias in self.weights], -1, out=out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.weights) == 1:
            weight, bias = self.weights[0]
            return self._multiplied(x, weight, bias, None, True)
        return super().gated(x)

    # -------------------------------------------------------------------------------------------------------- loading
    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        prefix, start = checkpoint_prefix(name), 0
        for layer, rows in self.shard.rows.items():
            then = partial(self._load, layer, f"{prefix}{layer}")
            yield from self.packed_layers[layer].loaders(f"{prefix}{layer}", self.bias is not None, then)
            if self.bias is not None:
                yield f"{prefix}{layer}.bias", copied_rows(self.bias[start : start + rows.size], rows, None)
            start += rows.size

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        """Draw random codes, and scales that make values about uniform on ±limit."""
        if self.bias is not None:
            self.bias.uniform_(-limit, limit, generator=generator)
        for layer in self.shard.rows:
            self._make(layer, self._dummy(layer, limit, generator))

    def finish(self) -> None:
        self._join()
        if self.bias is not None and not self.shard.adds_bias:
            self.bias.zero_()

    def _load(self, layer: str, name: str) -> None:
        """Make a layer's weight when all its tensors are there, on a reader's thread and stream. name: the checkpoint's."""
        try:
            self._make(layer, self.packed_layers[layer].chunks(name))
        except WeightsError:
            raise
        except ValueError as error:
            raise WeightsError(f"{name}: {error}") from None

    def _make(self, layer: str, chunks: Iterator[QuantizedWeight]) -> None:
        weight: W | None = None
        for quantized in chunks:
            below = self._weight_of(quantized, self.packed_layers[layer])
            weight = below if weight is None else self._stacked(weight, below)
            assert weight is not None, "outputs of one layer have the same inputs"
        assert weight is not None, "a layer has outputs"
        self._made[layer] = weight

    def _join(self) -> None:
        """Stack layers with the same inputs, once all are there. On the main thread."""
        joined: list[W] = []
        for layer in self.shard.rows:
            weight = self._made.pop(layer)
            _use_here(weight)
            both = self._stacked(joined[-1], weight) if joined else None
            joined[-1:] = [both] if both is not None else [*joined[-1:], weight]
        start = 0
        for i, weight in enumerate(joined):
            stop = start + self._outputs(weight)
            self.weights.append((self._owned(weight, i), None if self.bias is None else self.bias[start:stop]))
            start = stop

    def _owned(self, weight: Any, i: int) -> Any:
        """The same weight, with parameters of this format for tensors."""
        owned = {
            field: nn.Parameter(value, requires_grad=False)
            for field, value in weight._asdict().items()
            if isinstance(value, torch.Tensor)
        }
        for field, parameter in owned.items():
            self.register_parameter(f"{field}{i}", parameter)
        return weight._replace(**owned)

    def _dummy(self, layer: str, limit: float, generator: torch.Generator) -> Iterator[QuantizedWeight]:
        spec, activations = self._spec(layer), self.packed_layers[layer].activations
        if activations is not None and activations.is_static:
            self.packed_layers[layer].input_scale = ONE_STEP
        n, k = self.shard.rows[layer].size, self.shard.columns.size
        is_packed = spec.values == "uint4"  # the drawn values are packed, so they are drawn in chunks
        for part in row_chunks(n, k, self.device) if is_packed else [slice(0, n)]:
            yield drawn(spec, (part.stop - part.start, k), limit, generator, self.device)

    def _spec(self, layer: str) -> QuantizedSpec:
        spec = self.shard.packings[layer].spec
        assert spec is not None, "what has no integers is dequantized"
        return spec


def _use_here(weight: Any) -> None:
    """Tensors came on a reader's stream: their memory must not be reused there before the current stream is done with them."""
    for tensor in weight:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def drawn(
    spec: QuantizedSpec, shape: tuple[int, int], limit: float, generator: torch.Generator, device: torch.device
) -> QuantizedWeight:
    """A random weight [N, K] of this spec; only a chunk of it at a time is held in another dtype."""
    n, k = shape
    grid = (-(-n // spec.block[0]), -(-k // spec.block[1]))
    largest, dtypes = LARGEST[spec.values], {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    q = torch.empty(shape, dtype=dtypes.get(spec.values, torch.uint8), device=device)
    if spec.values == "fp8":
        for part in q.split(max(1, DRAWN_AT_ONCE // k)):
            part.copy_(torch.empty(part.shape, device=device).uniform_(-largest, largest, generator=generator))
    elif spec.values == "int8":
        q.random_(-127, 128, generator=generator)
    else:
        q.random_(0, round(2 * largest), generator=generator)
    zeros = torch.full(grid, round(largest), dtype=torch.int32, device=device) if q.dtype == torch.uint8 else None
    scales = torch.full(grid, limit / largest, dtype=torch.bfloat16, device=device).float()  # of 16 bits, as in checkpoints
    return QuantizedWeight(q, scales, spec.block, zeros)


class SideBySide(WeightFormat):
    """Layers of one Linear in different formats: each is a product, and the results are concatenated.

    The formats are children, which own all parameters.
    """

    def __init__(self, formats: list[WeightFormat]):
        super().__init__()
        self.formats = nn.ModuleList(formats)
        self.outer = [one.wrapped() for one in formats]

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([outer.product(x) for outer in self.outer], -1, out=out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_mul(self.product(x))

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        return iter(())
