"""A layer's tensors in a checkpoint and the weight that they stand for: one class for each scheme of schemes.py.

Integer layouts are brought into one canonical form, `Integers`, which kernels may keep as it is. On a CPU, and where no kernel
takes it, a weight is dequantized from it once, in float32. A layout knows no files, no ranks and no models: it is given a
layer's name and size, says which tensors it wants, and is handed them whole. layouts_packed.py and layouts_codes.py have the
others. Called by stored.py.
"""

from typing import NamedTuple, Protocol

import torch

from quire.workers.layers.formats.schemes import Activations, QuantizationError, Scaled

Tensors = dict[str, torch.Tensor]
SCALES = ("F32", "F16", "BF16")
ANY = -1  # a length that the tensor itself says


class Stored(NamedTuple):
    """One tensor of a layer. `shapes` are alternatives; `instead` are names that may take its place."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False
    instead: tuple[str, ...] = ()


class Integers(NamedTuple):
    """The canonical form: w[n, order[k]] = (q[n, k] - zeros[n, k // g]) * scales[n, k // g].

    q uint8 (4 or 8 bits, unpacked), int8 or float8_e4m3fn [N, K]; scales float [N or N blocks, ⌈K / g⌉], whose blocks are
    `block` outputs by inputs; zeros like the scales, int32, None: 0; order int64 [K], the input that column k of q multiplies,
    None: k itself. The last block of either dimension may be ragged.
    """

    q: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K] with columns in the inputs' own order. Zeros are subtracted as integers, then one product."""
        n, k = self.q.shape
        rows, columns = self.block
        w = torch.empty(n, k, dtype=torch.float32, device=self.q.device).copy_(self.q)
        if n % rows == 0 and k % columns == 0:
            self._scale(w.view(n // rows, rows, k // columns, columns))
        else:  # the last block is short
            whole = w.new_zeros(-(-n // rows) * rows, -(-k // columns) * columns)
            whole[:n, :k] = w
            self._scale(whole.view(-1, rows, whole.shape[1] // columns, columns))
            w = whole[:n, :k]
        if self.order is None:
            return w
        return torch.empty_like(w).index_copy_(1, self.order, w)

    def _scale(self, w: torch.Tensor) -> None:
        """In place, w [row blocks, rows, column blocks, columns]."""
        if self.zeros is not None:
            w -= self.zeros.to(torch.float32)[:, None, :, None]
        w *= self.scales.to(torch.float32)[:, None, :, None]


class Layout(Protocol):
    """How one layer is stored."""

    def stored(self) -> dict[str, Stored]:
        """Its tensors by the last part of their names."""
        ...

    def dequantized(self, tensors: Tensors) -> torch.Tensor:
        """float32 [N, K] on the tensors' device."""
        ...


def parts(n: int, size: int) -> int:
    """Blocks of `size` in n, 0: one."""
    return -(-n // size) if size else 1


class ScaledLayout:
    """int8 or e4m3 with scales of blocks; compressed-tensors' zero points are of the weight's own dtype."""

    def __init__(self, scheme: Scaled, n: int, k: int):
        self.scheme, self.n, self.k = scheme, n, k

    def stored(self) -> dict[str, Stored]:
        s, (rows, columns) = self.scheme, self.scheme.block
        grid = (parts(self.n, rows), parts(self.k, columns))
        shapes: set[tuple[int, ...]] = {grid, grid[:1]} if grid[1] == 1 else {grid}
        if grid == (1, 1) and (rows, columns) == (0, 0):
            shapes |= {()}
        scale_dtypes = (*SCALES, "F8_E8M0")
        found = {"weight": Stored(((self.n, self.k),), ("F8_E4M3",) if s.dtype == "fp8" else ("I8",))}
        for i, name in enumerate(s.scale_names):
            others = tuple(x for x in s.scale_names if x != name)
            found[name] = Stored(tuple(shapes), scale_dtypes, is_optional=i > 0, instead=others)
        if s.dtype == "int8":  # old packers wrote zeros for symmetric weights, too
            found["weight_zero_point"] = Stored(tuple(shapes), ("I8", "I32", "I64"), is_optional=s.is_symmetric)
        return found | input_tensors(s.activations)

    def unpacked(self, tensors: Tensors) -> Integers:
        rows, columns = self.scheme.block
        grid = (parts(self.n, rows), parts(self.k, columns))
        scales = next(tensors[name] for name in self.scheme.scale_names if name in tensors).reshape(grid)
        zeros = tensors["weight_zero_point"].reshape(grid).to(torch.int32) if "weight_zero_point" in tensors else None
        return Integers(tensors["weight"], scales.to(torch.float32), (rows or self.n, columns or self.k), zeros)

    def dequantized(self, tensors: Tensors) -> torch.Tensor:
        return self.unpacked(tensors).dequantized()


def input_tensors(activations: Activations | None) -> dict[str, Stored]:
    """Of inputs with a scale of the checkpoint."""
    if activations is None or not activations.is_static:
        return {}
    one = ((), (1,), (1, 1))
    zero = Stored(one, ("I8", "I32", "I64"), is_optional=activations.is_symmetric)
    return {"input_scale": Stored(one, SCALES)} | ({"input_zero_point": zero} if activations.dtype == "int8" else {})


def refuse(layer: str, what: str, instead: str) -> QuantizationError:
    """What a layout raises for a layer that it cannot hold."""
    return QuantizationError(f"quantization_config: {layer} {what}: {instead}")
