"""Quantizes activations to 8 bits for the next product: within RMSNorm, within SiLU times up, or in a kernel of its own.

    q = cast(y / s),  s = max |y| / largest       per token, or per 128 of its values; largest: e4m3 448, int8 127
    rms_norm_quantize      y = norm(x), or residual += x and y its norm        as `norm`
    silu_mul_quantize      y = silu(gate) * up                                 as `activation`
    quantize               y = x

y is rounded to the activations' dtype first, so q equals a quantization of the stored y. Scales are per token (or per 128
values of one), so a result never depends on the rest of the batch. A static scale (the checkpoint's input_scale) replaces s,
and values beyond its range saturate. int8 rounds halves to even; zeros have s = 1. A row fits into a program's registers.
Reference: `quantize_reference`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.elementwise.norm import num_splits, sum_of_splits
from quire.kernels.linear.scaled import BLOCK, Scaled
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
MAX_WIDTH = 65536  # of a row
MAX_WARPS = 16
WARP_ELEMENTS = 512
PROGRAMS = 128  # about as many as a GPU has SMs
MIN_SLICE = 1024


def quantize_reference(
    y: torch.Tensor, dtype: torch.dtype, *, by_block: bool = False, static_scale: torch.Tensor | None = None
) -> Scaled:
    """In plain torch: y [M, K] in 8 bits, with a scale per token or per group of 128."""
    rows, width = y.shape
    largest, wide = LARGEST[dtype], y.float()
    size = BLOCK if by_block else width
    if static_scale is None:
        padded = torch.nn.functional.pad(wide, (0, -width % size)).view(rows, -1, size)
        amax = padded.abs().amax(-1)
        scales = amax / torch.full_like(amax, largest)  # torch on a GPU divides by a Python number with its reciprocal
        scales = torch.where(scales > 0, scales, 1.0)
    else:
        scales = static_scale.float().reshape(1, 1).expand(rows, -(-width // size)).contiguous()
    q = (wide / scales.repeat_interleave(size, 1)[:, :width]).clamp(-largest, largest)
    return Scaled((q if dtype.is_floating_point else q.round()).to(dtype), scales)


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    return tl.where(largest > 0, tl.div_rn(largest, tl.zeros_like(largest) + LARGEST), 1.0)


@triton.jit
def _quotient(y, scale, STATIC: tl.constexpr):
    """y / scale [PIECES, 1], rounded as a division is; by the scale's reciprocal if nothing can be too small or too large.

    A division per element would take a third of the instructions of `quantize`. One correction turns the product with the
    reciprocal into the quotient: equal to numpy's division, for 42 million numbers. A static scale may have any value.
    """
    spread = tl.broadcast_to(scale, y.shape)
    if STATIC:
        return tl.div_rn(y, spread)
    least = tl.min(tl.min(scale, 1), 0)
    if least > 2.0**-60:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), y.shape)
        q = y * inverse
        q = tl.fma(tl.fma(-q, spread, y), inverse, q)
    else:
        q = tl.div_rn(y, spread)
    return q


@triton.jit
def cast(y, scale, LARGEST: tl.constexpr, dtype: tl.constexpr, STATIC: tl.constexpr):
    """y [PIECES, SIZE] / scale [PIECES] in 8 bits."""
    q = tl.clamp(_quotient(y, scale[:, None], STATIC), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        q = (q + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: a sum with it ends in the integer, halves to even
    return q.to(dtype)


@triton.jit
def _store_quantized(
    y, q_ptr, s_ptr, static_ptr, cols, mask, first,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Store y, a row's columns `cols` (from `first` on), float32 and 0 where masked, as q and a scale for each SIZE values."""
    PART: tl.constexpr = min(SIZE, y.shape[0])
    PIECES: tl.constexpr = y.shape[0] // PART
    pieces = y.reshape(PIECES, PART)
    if STATIC:
        scale = tl.zeros([PIECES], tl.float32) + tl.load(static_ptr)
    else:
        scale = scale_of(tl.max(tl.abs(pieces), 1), LARGEST)
    q = cast(pieces, scale, LARGEST, q_ptr.dtype.element_ty, STATIC)
    piece = tl.arange(0, PIECES)
    tl.store(s_ptr + piece, scale, first + piece * SIZE < WIDTH)
    tl.store(q_ptr + cols, q.reshape(y.shape[0]), mask)


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, q_ptr, s_ptr, static_ptr, x_stride, residual_stride, q_stride, part_stride, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr, STATIC: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask, other=0.0)
    wait_for_previous(PDL)
    x = sum_of_splits(x_ptr, row, cols, mask, x_stride, part_stride, PARTS)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask, other=0.0)
        x = x.to(residual.dtype)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * residual_stride + cols, x, mask)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(x.dtype).to(tl.float32)
    y = (normed * weight.to(tl.float32)).to(x.dtype).to(tl.float32)
    at = s_ptr + row * ((H + SIZE - 1) // SIZE)
    _store_quantized(y, q_ptr + row * q_stride, at, static_ptr, cols, mask, 0, H, SIZE, LARGEST, STATIC)


@triton.jit
def _rows(x_ptr, cols, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """y of these columns, float32, 0 beyond the row."""
    mask = cols < WIDTH
    y = tl.load(x_ptr + cols, mask, other=0.0)
    if GATED:
        dtype: tl.constexpr = y.dtype
        y = gated(y, tl.load(x_ptr + WIDTH + cols, mask, other=0.0), dtype).to(dtype)
    return y.to(tl.float32)


@triton.jit
def _rows_kernel(
    x_ptr, q_ptr, s_ptr, static_ptr, x_stride, q_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr,
    STATIC: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, i): columns from i * SLICE. If a row has one scale, each of its programs finds the largest value itself."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SLICE
    wait_for_previous(PDL)
    x_ptr += row * x_stride
    cols = first + tl.arange(0, SLICE)
    if SIZE <= SLICE or STATIC:
        y = _rows(x_ptr, cols, WIDTH, GATED)
        scales: tl.constexpr = (WIDTH + SIZE - 1) // SIZE
        at = s_ptr + row * scales + first // SIZE
        _store_quantized(y, q_ptr + row * q_stride, at, static_ptr, cols, cols < WIDTH, first, WIDTH, SIZE, LARGEST, STATIC)
    else:
        largest = tl.max(tl.abs(_rows(x_ptr, tl.arange(0, BLOCK), WIDTH, GATED)), 0)
        scale = scale_of(largest, LARGEST)
        y = _rows(x_ptr, cols, WIDTH, GATED).reshape(1, SLICE)
        q = cast(y, tl.full([1], 0.0, tl.float32) + scale, LARGEST, q_ptr.dtype.element_ty, STATIC)
        if first == 0:
            tl.store(s_ptr + row, scale)
        tl.store(q_ptr + row * q_stride + cols, q.reshape(SLICE), cols < WIDTH)


def _cut(width: int, by_block: bool) -> tuple[int, int, int]:
    """Elements of a program, elements of a scale, and warps."""
    block = max(triton.next_power_of_2(width), BLOCK)
    return block, BLOCK if by_block else block, min(max(block // WARP_ELEMENTS, 1), MAX_WARPS)


def _new(rows: int, width: int, dtype: torch.dtype, by_block: bool, device: torch.device) -> Scaled:
    if dtype not in LARGEST or width > MAX_WIDTH:
        raise ValueError(f"quantize: rows of {width} to {dtype} are not computed: at most {MAX_WIDTH} to {list(LARGEST)}")
    scales = torch.empty(rows, triton.cdiv(width, BLOCK) if by_block else 1, dtype=torch.float32, device=device)
    return Scaled(torch.empty(rows, width, dtype=dtype, device=device), scales)


def rms_norm_quantize(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    by_block: bool = False,
    static_scale: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> Scaled:
    """The norm of residual + x [T, H] in 8 bits; the sum is written to the residual in place. x None: the residual's norm.

    x may be partial sums, as for `add_rms_norm`. Raises ValueError if shapes do not fit.
    """
    rows, width = residual.shape
    split_k = x is not None and x.dim() == 3
    added = residual if x is None else x[0] if split_k else x
    if added.shape != residual.shape or weight.shape != (width,) or weight.dtype != residual.dtype:
        raise ValueError(f"rms_norm_quantize: {added.shape}, {residual.shape}, {weight.shape} do not fit")
    if (not split_k and added.dtype != residual.dtype) or not added.stride(1) == residual.stride(1) == 1:
        raise ValueError("rms_norm_quantize: x needs the residual's dtype, unless it is in parts, and both unit stride")
    out = _new(rows, width, dtype, by_block, residual.device)
    block, size, warps = _cut(width, by_block)
    if rows <= PROGRAMS:  # each program has an SM to itself: at one row 16 warps take 1.97 us for two partial sums, 8 take 2.21
        warps = min(2 * warps, MAX_WARPS)
    parts, part_stride = (num_splits(x), x.stride(0)) if x is not None and split_k else (1, 0)
    if rows:
        _norm_kernel[(rows,)](
            added, residual, weight, out.data, out.scales, out.scales if static_scale is None else static_scale,
            added.stride(0), residual.stride(0), width, part_stride, eps, width, block, size, LARGEST[dtype],
            static_scale is not None, x is not None, parts, pdl, num_warps=warps, **launch_options(pdl),
        )  # fmt: skip
    return out


def _slice(rows: int, block: int) -> int:
    """Columns of a program. Few rows are cut so that each SM has a program: a single one takes 6 us for 14,336 columns."""
    parts = max(1, PROGRAMS // triton.next_power_of_2(rows))
    return min(block, max(MIN_SLICE, triton.next_power_of_2(triton.cdiv(block, parts))))


def _quantize_rows(
    x: torch.Tensor, width: int, dtype: torch.dtype, by_block: bool, static_scale: torch.Tensor | None, pdl: int
) -> Scaled:
    rows = len(x)
    out = _new(rows, width, dtype, by_block, x.device)
    block, size, warps = _cut(width, by_block)
    if x.stride(1) != 1:
        raise ValueError("quantize: x needs unit stride in the last dimension")
    if rows:
        columns = _slice(rows, block)
        needs_all = size == block and static_scale is None
        warps = warps if needs_all else min(max(columns // WARP_ELEMENTS, 1), MAX_WARPS)
        _rows_kernel[(rows, triton.cdiv(width, columns))](
            x, out.data, out.scales, out.scales if static_scale is None else static_scale, x.stride(0), width,
            width, block, columns, size, LARGEST[dtype], static_scale is not None, x.shape[1] != width, pdl,
            num_warps=warps, **launch_options(pdl),
        )  # fmt: skip
    return out


def silu_mul_quantize(
    gate_up: torch.Tensor,
    dtype: torch.dtype,
    *,
    by_block: bool = False,
    static_scale: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> Scaled:
    """silu(gate) * up of gate_up [T, 2 I], in 8 bits [T, I]."""
    return _quantize_rows(gate_up, gate_up.shape[1] // 2, dtype, by_block, static_scale, pdl)


def quantize(
    x: torch.Tensor, dtype: torch.dtype, *, by_block: bool = False, static_scale: torch.Tensor | None = None, pdl: int = PLAIN
) -> Scaled:
    """x [T, K] in 8 bits, for tensors that no other kernel of ours quantizes."""
    return _quantize_rows(x, x.shape[1], dtype, by_block, static_scale, pdl)
