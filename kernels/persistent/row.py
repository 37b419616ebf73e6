"""One row between products of a launch, which every program computes for itself (Gluon): the sum of a product's splits, its
norm, and the row in 8 bits in shared memory, for `ring.product`. Values equal those of the separate kernels (`quantize`,
`norm`) to the bit, except for the order of a norm's sum.

A row is a tuple of chunks, float32 [WARPS, 128] each: each warp holds a group of 128 of every chunk.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire.kernels.persistent.ring import ATOM


@gluon.jit
def scale_of(largest, LARGEST: gl.constexpr):
    return gl.where(largest > 0, gl.div_rn(largest, largest * 0 + LARGEST), 1.0)


@gluon.jit
def _cast(y, scale, LARGEST: gl.constexpr, dtype: gl.constexpr, STATIC: gl.constexpr):
    """y [WARPS, 128] / scale in 8 bits."""
    if STATIC:
        q = gl.div_rn(y, gl.zeros_like(y) + scale)  # y may be infinite, and saturates
    else:
        up = gl.where(scale < 2.0**-60, 2.0**64, 1.0)  # exact; and the reciprocal is then finite
        scale = scale * up
        y = y * up
        inverse = gl.div_rn(scale * 0 + 1.0, scale)
        q = y * inverse
        q = gl.fma(gl.fma(-q, y * 0 + scale, y), y * 0 + inverse, q)
    q = gl.where(q > LARGEST, LARGEST, gl.where(q < -LARGEST, -LARGEST, q))  # NaN stays
    if dtype == gl.int8:
        q = (q + 12582912.0).to(gl.int32, bitcast=True)  # as `quantize.cast`
    return q.to(dtype)


@gluon.jit
def store_row(
    row, buffers, scale, LARGEST: gl.constexpr, STATIC: gl.constexpr, BY_BLOCK: gl.constexpr, KEEP: gl.constexpr,
    WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Quantize a row to shared memory, by `scale` or, with BY_BLOCK, each group by its own. KEEP: store the scales, too."""
    x_buffer, xs_buffer, _scale_buffer = buffers
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    for i in gl.static_range(len(row)):
        scales = gl.zeros([WARPS], gl.float32, gl.SliceLayout(1, layout)) + scale
        if BY_BLOCK and not STATIC:
            scales = scale_of(gl.max(gl.abs(row[i]), 1), LARGEST)
        q = _cast(row[i], scales[:, None], LARGEST, x_buffer.dtype, STATIC)
        at = x_buffer.index(i * WARPS)._reinterpret(x_buffer.dtype, [WARPS, ATOM * 128], flat)
        at.slice(0, 128, dim=1).store(q)
        if KEEP:
            xs_buffer.index(i * WARPS)._reinterpret(gl.float32, [WARPS], line).store(scales)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def largest_of(row):
    """The largest |y| of a row."""
    most = gl.abs(row[0])
    for i in gl.static_range(1, len(row)):
        most = gl.maximum(most, gl.abs(row[i]))
    return gl.max(gl.max(most, 1), 0)


@gluon.jit
def _columns(i, WARPS: gl.constexpr, layout: gl.constexpr):
    """Columns of chunk i of a row."""
    block = gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))[:, None]
    return (i * WARPS + block) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def load_row(ptr, WIDTH: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr):
    """WIDTH elements, which other programs of the launch may have stored."""
    row = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range((WIDTH + WARPS * 128 - 1) // (WARPS * 128)):
        column = _columns(i, WARPS, layout)
        x = gl.load(ptr + column, column < WIDTH, other=0.0, cache_modifier=".cg")
        row = row + (x.to(gl.float32),)  # type: ignore[assignment]
    return row


@gluon.jit
def load_norm(
    residual_ptr, norm_ptr, ws_ptr, WIDTH: gl.constexpr, EXACT: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr
):
    """A norm's operands besides the sums: tuples of chunks of the residual, of its weight, and of the scales of exact sums."""
    residuals = ()  # type: tuple[gl.tensor, ...]
    weights = ()  # type: tuple[gl.tensor, ...]
    scales = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range((WIDTH + WARPS * 128 - 1) // (WARPS * 128)):
        column = _columns(i, WARPS, layout)
        residual = gl.load(residual_ptr + column, column < WIDTH, other=0.0, cache_modifier=".cg")
        residuals = residuals + (residual,)  # type: ignore[assignment]
        weights = weights + (gl.load(norm_ptr + column, column < WIDTH, other=0.0),)  # type: ignore[assignment]
        if EXACT:
            scales = scales + (gl.load(ws_ptr + column, column < WIDTH, other=0.0),)  # type: ignore[assignment]
    return residuals, weights, scales


@gluon.jit
def norm_row(
    sums_ptr, x_scale, loaded, total_ptr, eps,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, EXACT: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The norm of residual + the sum of a product's splits [PARTS, WIDTH], rounded as if stored; that sum goes to `total`.

    EXACT: the partial sums are int32, to be multiplied by x_scale and by the columns' scales.
    """
    residuals, weights, scales = loaded
    dtype: gl.constexpr = total_ptr.dtype.element_ty
    parts = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(len(residuals)):
        column = _columns(i, WARPS, layout)
        for part in gl.static_range(PARTS):
            at = sums_ptr + part * WIDTH + column
            parts = parts + (gl.load(at, column < WIDTH, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
    totals = ()  # type: tuple[gl.tensor, ...]
    squares = gl.zeros([WARPS, 128], gl.float32, layout)
    for i in gl.static_range(len(residuals)):
        column = _columns(i, WARPS, layout)
        x = parts[i * PARTS]
        for part in gl.static_range(1, PARTS):
            x += parts[i * PARTS + part]
        if EXACT:
            x = x.to(gl.float32) * x_scale * scales[i]
        total = (x.to(dtype).to(gl.float32) + residuals[i].to(gl.float32)).to(dtype)
        gl.store(total_ptr + column, total, (column < WIDTH) & (gl.program_id(0) == 0))
        totals = totals + (total.to(gl.float32),)  # type: ignore[assignment]
        squares += total.to(gl.float32) * total.to(gl.float32)
    root = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / WIDTH + eps)
    row = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(len(totals)):
        normed = (totals[i] * root).to(dtype).to(gl.float32)
        row = row + ((normed * weights[i].to(gl.float32)).to(dtype).to(gl.float32),)  # type: ignore[assignment]
    return row


@gluon.jit
def store_scales(
    buffers, ws_ptr, square, up_square, x_block, first_block,
    BLOCKS: gl.constexpr, W_BLOCKS: gl.constexpr, UP: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store the factors of a tile's groups of K: x's scales times those of W's 2-D groups; up's are UP further on."""
    _x_buffer, xs_buffer, scale_buffer = buffers
    # pairs, as x_block is even: one number a thread would be read by ldmatrix, for which x_block must be a multiple of four
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    i = gl.arange(0, UP, layout=layout)
    xs = xs_buffer.index(x_block)._reinterpret(gl.float32, [UP], line).load(layout)
    ws = gl.load(ws_ptr + square * W_BLOCKS + first_block + i, i < BLOCKS, other=0.0)
    if GATED:
        us = gl.load(ws_ptr + up_square * W_BLOCKS + first_block + i, i < BLOCKS, other=0.0)
        scale_buffer.index(UP)._reinterpret(gl.float32, [UP], line).store(us * xs)
    scale_buffer.index(0)._reinterpret(gl.float32, [UP], line).store(ws * xs)
    tl.debug_barrier()
