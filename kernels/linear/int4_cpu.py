"""Linear layers on the CPU with weights of 4 bits, or of 8 as two planes of 4, in groups of inputs: y = x Wᵀ.

    w = (q - 8) s + c,      c = (8 - z) s,      s and c bfloat16, one of each for a group of 32, 64, 128 or 256 inputs

The products are torch's `_weight_int4pack_mm_for_cpu`, which reads bfloat16 inputs, adds up in float32 and rounds y to
bfloat16. Its layout is [N / 64, K, 32] bytes on a machine with AVX-512: the low nibble is output i of the block, the high one
output i + 32. It is another one elsewhere, so `_is_known_layout` tries it out. Other groups are stored with columns between
them that multiply zeros. Measured on one core of a Zen 5, W [4096, 4096], in ms, beside float32 in oneDNN's layout
(linear_cpu.py):

    rows             1      8      16      32      64     256
    float32        1.9    2.7     3.7     5.9    10.3    35.4
    4 bits         0.4    1.6     3.2     6.4    12.7    50.3

A row's result does not depend on the rows beside it. From MANY_ROWS on, a machine whose vector units multiply bfloat16
unpacks a block at a time to bfloat16 instead, and multiplies that: the sums are the same, but w is rounded, too.
"""

import functools
from typing import NamedTuple

import torch
from torch.nn import functional as F

GROUPS = (256, 128, 64, 32)  # the groups of torch's operator
BLOCK = 64  # outputs that lie together; N is padded to a multiple
MIDDLE = 8
MANY_ROWS = 80
_OPERATORS = ("_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")


class Plane(NamedTuple):
    """Four bits of each value. words uint8 [N', K' / 2], opaque; table bfloat16 [K' / group, N', 2], s and c."""

    words: torch.Tensor
    table: torch.Tensor


class PackedInt4(NamedTuple):
    """A weight [outputs, K]. N' and K' are padded sizes; columns int32 [K']: each column's input, K for a zero; None: k."""

    words: torch.Tensor
    table: torch.Tensor
    group: int
    outputs: int
    columns: torch.Tensor | None = None
    low_words: torch.Tensor | None = None  # the lower plane of 8 bits
    low_table: torch.Tensor | None = None

    @property
    def planes(self) -> list[Plane]:
        high = Plane(self.words, self.table)
        return [high] if self.low_words is None or self.low_table is None else [high, Plane(self.low_words, self.low_table)]


@functools.cache
def can_pack() -> bool:
    """Whether this torch has the operators, with vector instructions for them; without those they take ten times as long."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and all(
        hasattr(torch.ops.aten, name) for name in _OPERATORS
    )


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 ones: by instructions of their own."""
    tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(test is not None and test() for test in tests) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def _is_known_layout() -> bool:
    """Whether the operator packs as this module says."""
    q = torch.arange(BLOCK * 32, dtype=torch.int32).view(BLOCK, 32) * 7 % 16
    return torch.equal(
        _codes(torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1).view(1, 32, BLOCK // 2))[0], q.t().byte()
    )


def _codes(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, K, 32] -> uint8 [blocks, K, 64], a code each."""
    return torch.cat((octets & 15, octets >> 4), -1)


def places(k: int, width: int) -> tuple[int, torch.Tensor | None]:
    """(the operator's group, the column of W at each of K' columns, k where there is none; None: all are in order)."""
    width = min(width, k)
    padded = -(-width // 32) * 32
    group = next(size for size in GROUPS if padded % size == 0)
    if padded == width and k % width == 0:
        return group, None
    column = torch.arange(-(-k // width) * padded)
    source = column // padded * width + column % padded
    return group, torch.where((column % padded < width) & (source < k), source, k)


def pack(
    q: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, width: int, order: torch.Tensor | None = None
) -> PackedInt4:
    """q uint8 [N, K] of 4 bits; zeros, scales [N, ⌈K / width⌉]; column i multiplies input order[i]. zeros None: 0."""
    rounded = scales.bfloat16().float()
    offset = MIDDLE * rounded if zeros is None else (MIDDLE - zeros) * rounded
    (plane,), group, columns = _packed([q], [(rounded, offset)], width, order)
    return PackedInt4(*plane, group, len(q), columns)


def pack8(
    q: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, width: int, order: torch.Tensor | None = None
) -> PackedInt4:
    """Like `pack`, of 8 bits: the upper nibble's plane has 16 times the scale, and all of the zero point but 8."""
    rounded = scales.bfloat16().float()
    offset = (136 if zeros is None else 136 - zeros) * rounded
    tables = [(16 * rounded, offset), (rounded, torch.zeros_like(rounded))]
    planes, group, columns = _packed([q >> 4, q & 15], tables, width, order)
    return PackedInt4(*planes[0], group, len(q), columns, *planes[1])


def _packed(
    codes: list[torch.Tensor], tables: list[tuple[torch.Tensor, torch.Tensor]], width: int, order: torch.Tensor | None
) -> tuple[list[Plane], int, torch.Tensor | None]:
    k = codes[0].shape[1]
    group, columns = places(k, width)
    width = min(width, k)
    repeats = -(-width // 32) * 32 // group
    planes = [
        Plane(
            _words(q, columns),
            torch.stack([_padded_rows(t.repeat_interleave(repeats, 1)).t().bfloat16() for t in table], -1).contiguous(),
        )
        for q, table in zip(codes, tables, strict=True)
    ]
    if order is None:
        return planes, group, None if columns is None else columns.int()
    inputs = order if columns is None else torch.cat((order, order.new_tensor([k])))[columns]
    return planes, group, inputs.int()


def _padded_rows(t: torch.Tensor) -> torch.Tensor:
    return F.pad(t, (0, 0, 0, -len(t) % BLOCK))


def _words(q: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """The operator's packing. In the known layout torch's plain functions take a sixth of the operator's time."""
    n, k = q.shape[0], q.shape[1] if columns is None else len(columns)
    words = torch.empty(-(-n // BLOCK) * BLOCK, k // 2, dtype=torch.uint8)
    for block, start in enumerate(range(0, n, BLOCK)):
        part = q[start : start + BLOCK]
        if columns is not None:
            part = F.pad(part, (0, 1)).index_select(1, columns)
        part = _padded_rows(part)
        if _is_known_layout():
            low, high = part.split(BLOCK // 2)
            words.view(-1, k, BLOCK // 2)[block] = (low | high << 4).t()
        else:
            words[start : start + BLOCK] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.int(), 1)
    return words


def stacked(weights: list[PackedInt4]) -> PackedInt4 | None:
    """The weights as one, of all their outputs; None if a block ends within one of them, or if their inputs differ."""
    first = weights[0]
    if any(weight.outputs % BLOCK for weight in weights[:-1]) or any(not _are_alike(first, weight) for weight in weights[1:]):
        return None
    planes = [
        Plane(torch.cat([p.words for p in plane]), torch.cat([p.table for p in plane], 1))
        for plane in zip(*(weight.planes for weight in weights), strict=True)
    ]
    low = planes[1] if len(planes) > 1 else (None, None)
    return PackedInt4(*planes[0], first.group, sum(weight.outputs for weight in weights), first.columns, *low)


def _are_alike(one: PackedInt4, other: PackedInt4) -> bool:
    if one.group != other.group or len(one.planes) != len(other.planes) or one.words.shape[1] != other.words.shape[1]:
        return False
    if one.columns is None or other.columns is None:
        return one.columns is other.columns
    return torch.equal(one.columns, other.columns)


def int4_linear(x: torch.Tensor, weight: PackedInt4) -> torch.Tensor:
    """x [T, K] -> x Wᵀ [T, N] in x's dtype, float32 or bfloat16."""
    h = x.bfloat16()
    if weight.columns is not None:
        h = F.pad(h, (0, 1)).index_select(1, weight.columns)
    h = h.contiguous()
    if len(h) >= MANY_ROWS and multiplies_bfloat16() and _is_known_layout():
        parts = [_unpacked_product(h, plane, weight.group) for plane in weight.planes]
    else:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        parts = [product(h, plane.words, weight.group, plane.table) for plane in weight.planes]
    y = parts[0] if len(parts) == 1 else parts[0].float().add_(parts[1])
    return y[:, : weight.outputs].to(x.dtype)


def _unpacked_product(h: torch.Tensor, plane: Plane, group: int) -> torch.Tensor:
    k = h.shape[1]
    y = h.new_empty(len(h), len(plane.words))
    scale, offset = (part.unflatten(1, (-1, BLOCK)).transpose(0, 1).contiguous() for part in plane.table.float().unbind(-1))
    offset -= MIDDLE * scale
    codes, w = torch.empty(k, BLOCK), torch.empty(k // group, group, BLOCK)
    for block, octets in enumerate(plane.words.view(-1, k, BLOCK // 2)):
        codes.copy_(_codes(octets))
        torch.addcmul(offset[block, :, None], codes.view_as(w), scale[block, :, None], out=w)
        y[:, block * BLOCK : (block + 1) * BLOCK] = h @ w.view(k, BLOCK).bfloat16()
    return y
