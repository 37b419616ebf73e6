"""Packing: how a checkpoint packs one layer's weight into tensors, and how they are unpacked; a class for each scheme.

Packed integers are unpacked into one canonical form, `QuantizedWeight`, which kernels may keep as it is. On a CPU, and where no
kernel takes it, the weight is dequantized from it once, in float32, some rows at a time. A packing knows no files, no ranks and
no models: it is given a layer's name and size, says which tensors it wants, and gets them whole, on the device where they go.
packing_words.py, packing_codes.py, packing_experts.py and packing_floats.py have the others. Called by packed_weight.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from quire.workers.loading.quantized.schemes import Activations, QuantizationError, Scaled

Tensors = dict[str, torch.Tensor]
SCALES = ("F32", "F16", "BF16")
E8M0_NAN = 255
ANY = -1  # any length
ALL = slice(None)
# elements per chunk: 4 MB of float32 stay in a CPU's caches; on a GPU, launches are few and temporaries small
CPU_STRETCH, GPU_STRETCH = 1 << 20, 1 << 24


class TensorSpec(NamedTuple):
    """A checkpoint tensor that a packing expects. `shapes` are alternatives; `instead` names tensors that may replace it."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False
    instead: tuple[str, ...] = ()


class QuantizedWeight(NamedTuple):
    """An unpacked weight: w[n, order[k]] = (q[n, k] - zeros[n, k // g]) * scales[n, k // g].

    q uint8 (4 or 8 bits, unpacked), int8 or float8_e4m3fn [N, K]; scales float [N or N's groups, ⌈K / g⌉], for groups of
    `block` (outputs, inputs); zeros like the scales, int32, None: 0; order int64 [K], the input that column k of q multiplies,
    None: k itself. The last group of either dimension may be ragged.
    """

    q: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def shard(self, rows: slice, columns: slice) -> "QuantizedWeight":
        """The weight of some outputs and inputs. Raises ValueError if inputs are cut within a group, or are out of order."""
        n, k = self.q.shape
        if (rows.start, rows.stop, columns.start, columns.stop) == (0, n, 0, k):
            return self
        height, width = self.block
        is_cut = (columns.start, columns.stop) != (0, k)
        if is_cut and (self.order is not None or (width < k and columns.start % width)):
            raise ValueError(f"inputs are split among ranks within groups of {width}, or across an order of theirs")
        grid = [t.expand(-(-n // height), -1) for t in (self.scales, self.zeros) if t is not None]
        if height > 1 and rows.start % height:  # rows begin within a group, so each gets a scale
            grid, height = [t.repeat_interleave(height, 0)[:n] for t in grid], 1
        across = slice(columns.start // width, -(-columns.stop // width))
        grid = [t[rows.start // height : -(-rows.stop // height), across] for t in grid]
        zeros = None if self.zeros is None else grid[1]
        return QuantizedWeight(self.q[rows, columns], grid[0], (height, width), zeros, self.order)

    def by_rows(self) -> "QuantizedWeight":
        """The same weight with scales for each output."""
        n, (height, width), full = len(self.q), self.block, self.with_all_scales()
        scales, zeros = (t if t is None else t.repeat_interleave(height, 0)[:n] for t in (full.scales, full.zeros))
        assert scales is not None
        return self._replace(scales=scales, zeros=zeros, block=(1, width))

    def with_all_scales(self) -> "QuantizedWeight":
        """The same weight with a row of scales for each group of outputs; otherwise one row may stand for all."""
        blocks = -(-len(self.q) // self.block[0])
        return self._replace(
            scales=self.scales.expand(blocks, -1), zeros=None if self.zeros is None else self.zeros.expand(blocks, -1)
        )

    def dequantize_into(self, out: torch.Tensor, rows: slice = ALL, columns: slice = ALL) -> None:
        """Write these rows and columns, in the order of the inputs, to `out` of any float dtype. Computed in float32."""
        start, stop, _ = rows.indices(len(self.q))
        for part in row_chunks(stop - start, self.q.shape[1], self.q.device):
            w = self._rows(start + part.start, start + part.stop)
            if self.order is not None:
                w = torch.empty_like(w).index_copy_(1, self.order, w)
            out[part] = w[:, columns]

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        """float32 [stop - start, K] with q's order of columns: q - zeros is exact, and the product rounds once."""
        k, (rows, columns) = self.q.shape[1], self.block
        first = start // rows
        blocks = slice(first, -(-stop // rows))
        w = self.q[start:stop].to(torch.float32)
        if k % columns:  # the last group is short
            w = F.pad(w, (0, -k % columns))
        w = w.view(stop - start, -1, columns)
        scales, zeros = self.scales[blocks].float(), None if self.zeros is None else self.zeros[blocks].float()
        if rows > 1 and len(scales) > 1:
            block = torch.arange(start, stop, device=w.device) // rows - first
            scales, zeros = scales[block], None if zeros is None else zeros[block]
        if zeros is not None:
            w -= zeros[:, :, None]
        w *= scales[:, :, None]
        return w.view(stop - start, -1)[:, :k]


def joined(pieces: list[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights of one layer's outputs, with a scale for each output if a group would end up in two of them."""
    if len(pieces) == 1:
        return pieces[0]
    pieces, (height, width) = [piece.with_all_scales() for piece in pieces], pieces[0].block
    if any(piece.block[0] != height for piece in pieces) or any(len(piece.q) % height for piece in pieces[:-1]):
        pieces, height = [piece.by_rows() for piece in pieces], 1
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return QuantizedWeight(
        torch.cat([piece.q for piece in pieces]),
        torch.cat([piece.scales for piece in pieces]),
        (height, width),
        torch.cat(zeros) if zeros else None,
        pieces[0].order,
    )


class QuantizedSpec(NamedTuple):
    """The form of a packing's `QuantizedWeight`, known before a byte is read, to choose a kernel by."""

    values: Literal["uint4", "uint8", "int8", "fp8"]  # of q
    block: tuple[int, int]  # outputs and inputs of a scale
    has_zeros: bool = False  # other than the middle of unsigned values, or 0 of signed ones
    has_order: bool = False  # the config says that inputs may be out of order


class Packing(Protocol):
    """How one layer is packed. `spec` None: there is no `QuantizedWeight`; the layer can only be dequantized."""

    @property
    def spec(self) -> QuantizedSpec | None: ...

    @property
    def activations(self) -> Activations | None: ...

    def chunks(self, tensors: Tensors, rows: slice, columns: slice) -> Iterator[QuantizedWeight]:
        """These outputs and inputs of a packing with a spec, some outputs at a time if unpacking takes memory.

        Tensors and results may share memory. Raises ValueError for values that contradict each other.
        """
        ...

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The tensors that it expects, by their names after the layer's."""
        ...

    def dequantize_into(self, tensors: Tensors, out: torch.Tensor, rows: slice, columns: slice) -> None:
        """Write these rows and columns of the weight to `out`, on the tensors' device, in any float dtype; computed in float32.

        Raises ValueError for values that contradict each other.
        """
        ...


def row_chunks(n: int, k: int, device: torch.device) -> Iterator[slice]:
    """Slices of the rows of [n, k], of some million elements each."""
    rows = max(1, (CPU_STRETCH if device.type == "cpu" else GPU_STRETCH) // k)
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def num_groups(n: int, size: int) -> int:
    """The number of groups of `size` in n, the last of which may be short; size 0: one."""
    return -(-n // size) if size else 1


class IntegerPacking(ABC):
    """A packing that can be unpacked into a `QuantizedWeight`."""

    activations: Activations | None = None

    @abstractmethod
    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        """The weight, on the tensors' device. Raises ValueError for values that contradict each other."""

    def chunks(self, tensors: Tensors, rows: slice, columns: slice) -> Iterator[QuantizedWeight]:
        yield self.unpacked(tensors).shard(rows, columns)

    def dequantize_into(self, tensors: Tensors, out: torch.Tensor, rows: slice, columns: slice) -> None:
        self.unpacked(tensors).dequantize_into(out, rows, columns)


class ScaledPacking(IntegerPacking):
    """int8 or e4m3 elements with scales of 2-D groups; compressed-tensors' zero points have the weight's dtype."""

    def __init__(self, scheme: Scaled, n: int, k: int):
        self.scheme, self.activations, self.n, self.k = scheme, scheme.activations, n, k
        rows, columns = scheme.block
        self.spec = QuantizedSpec(scheme.dtype, (rows or n, columns or k), not scheme.is_symmetric)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        s, (rows, columns) = self.scheme, self.scheme.block
        grid = (num_groups(self.n, rows), num_groups(self.k, columns))
        shapes: set[tuple[int, ...]] = {grid, grid[:1]} if grid[1] == 1 else {grid}
        if grid == (1, 1) and (rows, columns) == (0, 0):
            shapes |= {()}
        if rows > 1 and columns > 1:
            shapes |= {(grid[0], 1, grid[1], 1)}  # ModelOpt's
        scale_dtypes = (*SCALES, "F8_E8M0", *(("U8",) if s.dtype == "fp8" else ()))
        found = {"weight": TensorSpec(((self.n, self.k),), ("F8_E4M3",) if s.dtype == "fp8" else ("I8",))}
        for i, name in enumerate(s.scale_names):
            others = tuple(x for x in s.scale_names if x != name)
            found[name] = TensorSpec(tuple(shapes), scale_dtypes, is_optional=i > 0, instead=others)
        if s.dtype == "int8":  # old packers wrote zeros for symmetric weights, too
            found["weight_zero_point"] = TensorSpec(tuple(shapes), ("I8", "I32", "I64"), is_optional=s.is_symmetric)
        return found | input_tensors(s.activations)

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        rows, columns = self.scheme.block
        grid = (num_groups(self.n, rows), num_groups(self.k, columns))
        scales = _as_floats(next(tensors[name] for name in self.scheme.scale_names if name in tensors)).reshape(grid)
        zeros = tensors["weight_zero_point"].reshape(grid).to(torch.int32) if "weight_zero_point" in tensors else None
        return QuantizedWeight(tensors["weight"], scales, self.spec.block, zeros)


def _as_floats(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32. Bytes are exponents (e8m0), as in transformers. Raises ValueError for a NaN among them."""
    if scales.dtype != torch.uint8:
        return scales.to(torch.float32)
    if (scales == E8M0_NAN).any():
        raise ValueError("a scale of exponents (e8m0) is NaN (255)")
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def input_tensors(activations: Activations | None) -> dict[str, TensorSpec]:
    """The tensors of static input scales and zero points; none for dynamic ones."""
    if activations is None or not activations.is_static:
        return {}
    one = ((), (1,), (1, 1))
    zero = TensorSpec(one, ("I8", "I32", "I64"), is_optional=activations.is_symmetric)
    scales = {  # compressed-tensors' and AutoFP8's name, and transformers'
        "input_scale": TensorSpec(one, SCALES, instead=("activation_scale",)),
        "activation_scale": TensorSpec(one, SCALES, is_optional=True),
    }
    return scales | ({"input_zero_point": zero} if activations.dtype == "int8" else {})


def refuse_groups(layer: str, k: int, size: int, format_name: str) -> QuantizationError:
    """The error for a layer with inputs that are not a whole number of groups."""
    fitting = [str(n) for n in (128, 64, 32, 16, 8) if k % n == 0]
    sizes = " or ".join(fitting[:3]) if fitting else "-1"
    return refuse(layer, f"has {k} inputs, group_size is {size}", f"{format_name} needs whole groups, here of {sizes}")


def refuse(layer: str, what: str, instead: str) -> QuantizationError:
    """The error of a packing for a layer that it cannot hold."""
    return QuantizationError(f"quantization_config: {layer} {what}: {instead}")
