"""Linear layers on the CPU with weights that no packed product takes: some outputs at a time become floats and are multiplied.

A weight stays as the checkpoint has it: int8 or fp8 (e4m3) in groups of any shape, 4-bit codes of a table (nf4, fp4, mxfp4),
or bfloat16 and float16 as they are. `rows` gives exact float32 values, so y = x Wᵀ is that of the dequantized weight, and a
chunk of CHUNK values never leaves the caches. Measured on one core of a Zen 5, W [4096, 4096] and one row, in ms: int8 1.7,
16 bits 1.8, fp8 4, codes 5, and 1.9 a float32 weight in memory. With 16 rows the product takes 4 ms in all of them.

Weights of 8 bits without groups, inputs as they are, go through torch's `_weight_int8pack_mm`: bfloat16 inputs, sums in
float32, 0.6 ms for one row and 3.2 for 16. It beats the other way up to FEW_ROWS.
"""

from typing import NamedTuple, Protocol

import torch
from torch.nn import functional as F

CHUNK = 1 << 19  # values: 2 MB of float32
FEW_ROWS = 16
INT8_STEP = 16  # the operator reads so many inputs at once
_FP8_SIGN_AND_VALUE = -0x4001  # of e4m3 in a float16's bits, behind a shift by 7: the sign was extended into another bit
_FP8_EXPONENT = 256.0  # 2 to the difference of both types' biases


class Held(Protocol):
    """A weight [N, K] in memory. It has `outputs`, N."""

    @property
    def outputs(self) -> int: ...

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """float32 [stop - start, K]: the values of some outputs."""
        ...


class Grouped8(NamedTuple):
    """q int8, uint8 or e4m3 [N, K]; scales float32 [⌈N / height⌉, ⌈K / width⌉], zeros float32 alike or none.

    w = (q - z) s; column k multiplies input order[k], and places is order's inverse.
    """

    q: torch.Tensor
    scales: torch.Tensor
    height: int
    width: int
    zeros: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        return len(self.q)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        q, k, width = self.q[start:stop], self.q.shape[1], self.width
        w = _from_e4m3(q) if q.dtype == torch.float8_e4m3fn else q.float()
        if k % width:
            w = F.pad(w, (0, -k % width))
        grouped = w.unflatten(1, (-1, min(width, w.shape[1])))
        if self.zeros is not None:
            grouped -= _of_rows(self.zeros, start, stop, self.height)
        grouped *= _of_rows(self.scales, start, stop, self.height)
        w = w[:, :k]
        return w if self.places is None else w.index_select(1, self.places)


def _of_rows(grid: torch.Tensor, start: int, stop: int, height: int) -> torch.Tensor:
    """[stop - start, G, 1] of [⌈N / height⌉, G]; a single row stands for all."""
    if len(grid) == 1:
        return grid[:, :, None]
    if height == 1:
        return grid[start:stop, :, None]
    return grid.index_select(0, torch.arange(start, stop) // height)[:, :, None]


def _from_e4m3(q: torch.Tensor) -> torch.Tensor:
    """e4m3's bits within a float16's are its value / 256. torch's conversion takes 14 times as long; NaN becomes ±480."""
    bits = q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_FP8_SIGN_AND_VALUE)
    return bits.view(torch.float16).float().mul_(_FP8_EXPONENT)


class Codes4(NamedTuple):
    """octets uint8 [N, K / 2] of two codes; pairs int64 [256], the two float32 values of each; scales float32 or bfloat16
    [N, K / width], the latter for powers of two.
    """

    octets: torch.Tensor
    pairs: torch.Tensor
    scales: torch.Tensor

    @property
    def outputs(self) -> int:
        return len(self.octets)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        octets = self.octets[start:stop]
        w = self.pairs.index_select(0, octets.flatten().int()).view(torch.float32).view(len(octets), -1)
        scales = self.scales[start:stop].float()
        grouped = w.unflatten(1, (scales.shape[1], -1))
        grouped *= scales[:, :, None]
        return w


def pairs_of(table: torch.Tensor, *, high_first: bool) -> torch.Tensor:
    """The values of all octets, as `Codes4` has them, of a table [16]."""
    octets = torch.arange(256)
    both = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return torch.stack([table.float()[codes] for codes in both], -1).contiguous().view(torch.int64).flatten()


class Short(NamedTuple):
    """values bfloat16 or float16 [N, K]."""

    values: torch.Tensor

    @property
    def outputs(self) -> int:
        return len(self.values)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.values[start:stop].float()


def _plain(x: torch.Tensor, w: torch.Tensor, is_quick: bool) -> torch.Tensor:
    """x wᵀ: by oneDNN, which for float32 on an AMD machine takes half the time of MKL."""
    return torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "") if is_quick else F.linear(x, w)


def held_linear(x: torch.Tensor, weight: Held, is_quick: bool) -> torch.Tensor:
    """x [T, K] -> x Wᵀ [T, N] in x's dtype; summed in float32 if x is, and with values rounded to bfloat16 if x is of it.

    is_quick: oneDNN's operators are there for x's dtype (`linear_cpu.can_pack`).
    """
    y = x.new_empty(len(x), weight.outputs)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for start in range(0, weight.outputs, step):
        stop = min(start + step, weight.outputs)
        y[:, start:stop] = _plain(x, weight.rows(start, stop).to(x.dtype), is_quick)
    return y


class Int8Rows(NamedTuple):
    """q int8 [N, K], scales float32 [N]."""

    q: torch.Tensor
    scales: torch.Tensor

    @property
    def outputs(self) -> int:
        return len(self.q)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.q[start:stop].float().mul_(self.scales[start:stop, None])


def can_multiply_int8(inputs: int) -> bool:
    """Whether `int8_linear` takes weights with so many inputs on this machine."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_vectors and inputs % INT8_STEP == 0 and hasattr(torch.ops.aten, "_weight_int8pack_mm")


def int8_linear(x: torch.Tensor, weight: Int8Rows, is_quick: bool) -> torch.Tensor:
    """x [T, K] -> x Wᵀ [T, N] in x's dtype. Scales stay in float32: they multiply the operator's results."""
    if len(x) > FEW_ROWS:
        return held_linear(x, weight, is_quick)
    ones = torch.ones(len(weight.q), dtype=torch.bfloat16)
    y = torch.ops.aten._weight_int8pack_mm(x.bfloat16().contiguous(), weight.q, ones)
    return (y.float() * weight.scales).to(x.dtype)
