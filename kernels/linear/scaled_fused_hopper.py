"""One row's inputs, from 16 bits to 8, and their product with large 8-bit weights in one kernel for Hopper (Gluon): what
`scaled_fused` does, with `scaled_hopper`'s ring of W.

W is under way while every program makes the row anew: loads it, or the norm of residual + x, finds its scales, and puts it into
shared memory as 8 bits. No launch stands between two products then, and the memory is never idle. In shared memory the row is a
matrix, a line each block of 128: wgmma multiplies 64 lines with a block of W, of which one is the block's own. That one's sums
are kept in its line of the accumulator; lines 0 to 7 are added up at the end.

Operands, scales and results as in `scaled_fused`; gated as `scaled`. A weight has scales of its rows, or of squares of 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.elementwise import activation
from quire.kernels.linear.quantize import LARGEST
from quire.kernels.linear.scaled import BLOCK, Scaled
from quire.kernels.triton_support import dependent_launch, hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached

ROWS = gl.constexpr(64)  # lines that a wgmma takes
BLOCK_K = gl.constexpr(BLOCK)
LINES = gl.constexpr(8)  # blocks of x between which shared memory's swizzle repeats
PIECE = gl.constexpr(32)  # blocks of x that are loaded together
MAX_K = 16384  # which a program holds in registers
SHARED_BYTES = 112 * 1024  # of a program: two fit into an SM, so the next product's weights are under way in this one
MAX_STAGES = 12  # the first copies are unrolled

_copy = tma.copy
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    tile: int  # rows of W: 16 to 128, a power of two
    blocks: int  # of 128 of K in a stage: 1, 2, 4
    stages: int  # of the ring
    programs: int  # at most


@gluon.jit
def _load_weights(
    w_desc, buffer, ready, stage, tile, k, N, TILE: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Start the copy of a stage of W: TILE of its rows, or half as many of the gate's with up's below."""
    mbarrier.expect(ready.index(stage), TILE * BLOCK_K * BLOCKS)
    for i in gl.static_range(BLOCKS):
        at = buffer.index(stage * BLOCKS + i)
        if GATED:
            _copy(w_desc, [tile * (TILE // 2), k + i * BLOCK_K], ready.index(stage), at.slice(0, TILE // 2))
            _copy(w_desc, [N + tile * (TILE // 2), k + i * BLOCK_K], ready.index(stage), at.slice(TILE // 2, TILE // 2))
        else:
            _copy(w_desc, [tile * TILE, k + i * BLOCK_K], ready.index(stage), at)


@gluon.jit
def _columns(piece: gl.constexpr, layout: gl.constexpr):
    """Of a piece of the row, [PIECE, 128]."""
    block = piece * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    return block[:, None] * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _total(x_ptr, residual_ptr, sum_ptr, k, mask, ADD: gl.constexpr):
    """residual + x of these columns, which the first program writes."""
    total = gl.load(residual_ptr + k, mask, other=0.0)
    if ADD:
        total = (total.to(gl.float32) + gl.load(x_ptr + k, mask, other=0.0).to(gl.float32)).to(total.dtype)
        gl.store(sum_ptr + k, total, mask & (gl.program_id(0) == 0))
    return total


@gluon.jit
def _cast(y, scale, LARGEST: gl.constexpr, dtype: gl.constexpr):
    """y / scale in 8 bits, as `quantize.cast`; both of one shape, scale of few values.

    The quotient is the rounded one, by the reciprocal and a correction: three instructions, where a division takes a dozen. A
    scale whose reciprocal overflows is of numbers that are 0 beside any others.
    """
    reciprocal = tl.where(scale > 1.2e-38, tl.div_rn(scale * 0.0 + 1.0, scale), 0.0)
    bound = scale * LARGEST
    y = tl.clamp(y, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
    q = y * reciprocal
    q = tl.fma(tl.fma(-q, scale, y), reciprocal, q)
    if dtype == tl.int8:
        q = (q + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: a sum with it ends in the integer, halves to even
    return q.to(dtype)


@gluon.jit
def _make_row(
    x_ptr, residual_ptr, norm_ptr, sum_ptr, static_ptr, eps, x_buffer, s_buffer,
    K: gl.constexpr, PIECES: gl.constexpr, LARGEST: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr,
    STATIC: gl.constexpr, BY_BLOCK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The row in 8 bits to x_buffer, its blocks' scales to s_buffer; returns the row's scale, if it has but one."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    norms = ()  # type: tuple[gl.tensor, ...]
    rows = ()  # type: tuple[gl.tensor, ...]
    squares = 0.0
    for p in gl.static_range(PIECES):
        k = _columns(p, layout)
        norms = norms + (gl.load(norm_ptr + k, k < K, other=0.0) if NORM else 0,)
    _wait_for_previous(PDL)
    for p in gl.static_range(PIECES):
        k = _columns(p, layout)
        if NORM:
            rows = rows + (_total(x_ptr, residual_ptr, sum_ptr, k, k < K, ADD),)
        else:
            rows = rows + (gl.load(x_ptr + k, k < K, other=0.0),)
    if NORM:
        for p in gl.static_range(PIECES):
            wide = rows[p].to(gl.float32)
            squares += gl.sum(gl.sum(wide * wide, 1), 0)
    rms = gl.rsqrt(squares / K + eps) if NORM else 1.0
    values = ()  # type: tuple[gl.tensor, ...]
    largest = 0.0
    for p in gl.static_range(PIECES):
        y = rows[p].to(gl.float32)
        if NORM:
            y = (((y * rms).to(dtype)).to(gl.float32) * norms[p].to(gl.float32)).to(dtype).to(gl.float32)
        values = values + (y,)
        if not (STATIC or BY_BLOCK):
            largest = gl.maximum(largest, gl.max(gl.max(gl.abs(y), 1), 0))
    of_block: gl.constexpr = gl.SliceLayout(1, layout)
    scale = gl.full([PIECE], 1.0, gl.float32, of_block)
    for p in gl.static_range(PIECES):
        if STATIC:
            scale = gl.full([PIECE], 0.0, gl.float32, of_block) + gl.load(static_ptr)
        else:
            most = gl.max(gl.abs(values[p]), 1) if BY_BLOCK else gl.full([PIECE], 0.0, gl.float32, of_block) + largest
            scale = gl.where(most > 0, tl.div_rn(most, gl.full([PIECE], LARGEST, gl.float32, of_block)), 1.0)
        spread = gl.full([PIECE, BLOCK_K], 0.0, gl.float32, layout) + scale[:, None]
        x_buffer.index(p).store(_cast(values[p], spread, LARGEST, x_buffer.dtype))
        s_buffer.index(p).store(scale)
    fence_async_shared()
    tl.debug_barrier()
    return gl.max(scale, 0)


@gluon.jit
def _squares(ws_ptr, at, first, LIMIT: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr):
    """W's scales of BLOCKS blocks of K from `first` on, a tuple of numbers: of the square a tile lies in, and of up's."""
    scales = ()
    for i in gl.static_range(BLOCKS):
        is_there = first + i < LIMIT
        one = gl.load(ws_ptr + at[0] + first + i, is_there, other=0.0)
        two = gl.load(ws_ptr + at[1] + first + i, is_there, other=0.0) if GATED else one
        scales = scales + ((one, two),)  # type: ignore[assignment]
    return scales


@gluon.jit
def _add(acc, sums, own, xs, ws, SCALED: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr):
    """acc [ROWS, TILE] with a block's sums, of the line that is its `own` [ROWS], by its scales."""
    if SCALED:
        scale = gl.where(own, xs * ws[0], 0.0)[:, None]
        if GATED:
            is_up = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout)) >= acc.shape[1] // 2
            scale = gl.where(is_up[None, :], gl.where(own, xs * ws[1], 0.0)[:, None], scale)
        acc += sums.to(gl.float32) * scale
    else:
        acc += gl.where(own[:, None], sums, gl.zeros_like(sums))
    return acc


@gluon.jit
def _stage_sums(
    x_all, w_buffer, line, stage, BLOCKS: gl.constexpr, SUM: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr
):
    """Sums of a stage's blocks, each by itself, a tuple of [ROWS, TILE]; `line` is the eight of x that they are among."""
    x = x_all.index(line)._reinterpret(x_all.dtype, [ROWS, BLOCK_K], x_all.layout)
    sums = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(BLOCKS):
        w = w_buffer.index(stage * BLOCKS + i).permute((1, 0))
        zeros = gl.zeros([ROWS, TILE], SUM, layout)
        sums = sums + (warpgroup_mma(x, w, zeros, use_acc=False, is_async=True),)
    if BLOCKS == 1:
        sums = (warpgroup_mma_wait(0, deps=[sums[0]]),)
    elif BLOCKS == 2:
        sums = warpgroup_mma_wait(0, deps=[sums[0], sums[1]])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums[0], sums[1], sums[2], sums[3]])
    return sums


@gluon.jit
def _kernel(
    x_ptr, residual_ptr, norm_ptr, static_ptr, w_desc, ws_ptr, bias_ptr, sum_ptr, out_ptr, N, eps,
    K: gl.constexpr, W_BLOCKS: gl.constexpr, W_ROWS: gl.constexpr, TILE: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, LARGEST: gl.constexpr, STATIC: gl.constexpr, BY_BLOCK: gl.constexpr, NORM: gl.constexpr,
    ADD: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program p: tiles p, p + programs, ... of the output."""
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE  # output columns of a tile
    INT: gl.constexpr = w_desc.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INT else gl.float32  # as wgmma has it
    SCALED: gl.constexpr = W_BLOCKS > 1
    PIECES: gl.constexpr = (K + PIECE * BLOCK_K - 1) // (PIECE * BLOCK_K)
    K_BLOCKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    K_STEPS: gl.constexpr = (K_BLOCKS + BLOCKS - 1) // BLOCKS
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # two pieces more than there are: 64 lines are read from the last eight on
    x_buffer = gl.allocate_shared_memory(w_desc.dtype, [PIECES + 2, PIECE, BLOCK_K], lines)
    s_buffer = gl.allocate_shared_memory(gl.float32, [PIECES + 2, PIECE], plain)
    w_buffer = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS, TILE, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = gl.cdiv(N, WIDTH)
    steps = gl.cdiv(tiles - program, programs) * K_STEPS
    for i in gl.static_range(STAGES):
        if i < steps:
            k = i % K_STEPS * BLOCKS * BLOCK_K
            _load_weights(w_desc, w_buffer, ready, i, program + i // K_STEPS * programs, k, N, TILE, BLOCKS, GATED)
    x_scale = _make_row(
        x_ptr, residual_ptr, norm_ptr, sum_ptr, static_ptr, eps, x_buffer, s_buffer,
        K, PIECES, LARGEST, NORM, ADD, STATIC, BY_BLOCK, PDL,
    )  # fmt: skip
    x_all = x_buffer._reinterpret(w_desc.dtype, [(PIECES + 2) * PIECE // LINES, LINES, BLOCK_K], lines)
    s_all = s_buffer._reinterpret(gl.float32, [(PIECES + 2) * PIECE // LINES, LINES], plain)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    step = 0
    for tile in range(program, tiles, programs):
        acc = gl.zeros([ROWS, TILE], SUM if not SCALED else gl.float32, layout)
        at = (tile * WIDTH // W_ROWS * W_BLOCKS, (N + tile * WIDTH) // W_ROWS * W_BLOCKS)
        if SCALED:
            ws = _squares(ws_ptr, at, 0, K_BLOCKS, BLOCKS, GATED)
            ws1 = _squares(ws_ptr, at, BLOCKS, K_BLOCKS, BLOCKS, GATED)
        for k_step in range(K_STEPS):
            block = k_step * BLOCKS
            line = block // LINES
            stage = step % STAGES
            xs = 1.0
            if SCALED:
                ws2 = _squares(ws_ptr, at, block + 2 * BLOCKS, K_BLOCKS, BLOCKS, GATED)
                xs = s_all.index(line)._reinterpret(gl.float32, [ROWS], plain).load(gl.SliceLayout(1, layout))
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            sums = _stage_sums(x_all, w_buffer, line, stage, BLOCKS, SUM, TILE, layout)
            tl.debug_barrier()  # all four warps have read the stage
            ahead = step + STAGES
            if ahead < steps:
                k = ahead % K_STEPS * BLOCKS * BLOCK_K
                ahead_tile = program + ahead // K_STEPS * programs
                _load_weights(w_desc, w_buffer, ready, stage, ahead_tile, k, N, TILE, BLOCKS, GATED)
            for i in gl.static_range(BLOCKS):
                own = m == (block + i) % LINES
                acc = _add(acc, sums[i], own, xs, ws[i] if SCALED else 0, SCALED, GATED, layout)
            if SCALED:
                ws, ws1 = ws1, ws2
            step += 1

        values = gl.sum(gl.where((m < LINES)[:, None], acc, gl.zeros_like(acc)), 0).to(gl.float32)
        among = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        rows = tile * WIDTH + among % WIDTH + among // WIDTH * N if GATED else tile * WIDTH + among
        live = tile * WIDTH + among % WIDTH < N
        if not SCALED:
            values = values * x_scale * gl.load(ws_ptr + rows, live, other=0.0)
        if BIAS:
            values += gl.load(bias_ptr + rows, live, other=0.0).to(gl.float32)
        if GATED:
            gate, up = gl.split(values.reshape([2, WIDTH]).permute((1, 0)))
            values = _gated(gate, up, out_ptr.dtype.element_ty)
        columns = tile * WIDTH + gl.arange(0, WIDTH, layout=values.type.layout)
        gl.store(out_ptr + columns, values.to(out_ptr.dtype.element_ty), columns < N)


def takes(rows: int, weight: Scaled, *, is_gated: bool) -> bool:
    """Whether the kernel computes it: one row, a weight laid out as TMA needs it, and squares of which a tile lies in one."""
    n, k = weight.data.shape
    if rows != 1 or k > MAX_K or not hopper.available(weight.data.device) or not hopper.can_copy(weight.data):
        return False
    blocks = weight.scales.shape[1] > 1
    return weight.rows == (BLOCK if blocks else 1) and (not blocks or not is_gated or n // 2 % BLOCK == 0)


def max_stages(k: int, tile: int, blocks: int, sharing: int = 2) -> int:
    """Stages that fit into a program's part of an SM."""
    row = (triton.cdiv(k, PIECE.value * BLOCK) + 2) * PIECE.value * (BLOCK + 4) + 1024
    return min((2 * SHARED_BYTES // sharing - row) // (tile * BLOCK * blocks), MAX_STAGES)


@cached
def choose(n: int, k: int, sms: int, *, is_gated: bool = False) -> Config:
    """The configuration for n output columns on so many SMs: reckoned."""
    tile, blocks = (64, 2) if is_gated or n >= 64 * sms else (32, 4)
    return Config(tile, blocks, max_stages(k, tile, blocks), sms)


def launch(
    x: torch.Tensor | None,
    weight: Scaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    by_block: bool = False,
    static_scale: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    total: torch.Tensor | None = None,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel for what it `takes`; out [1, N], gated [1, N / 2]; `total` [1, K] takes residual + x where both are given.

    Arguments as of `scaled_fused.fused_linear`, whose checks hold here.
    """
    (columns, k), n = weight.data.shape, out.shape[1]
    mode = LATE if pdl else PLAIN  # EARLY is for small programs
    width = config.tile // 2 if is_gated else config.tile
    residual, norm_weight, eps = (x, x, 0.0) if norm is None else norm
    _kernel[(min(triton.cdiv(n, width), config.programs),)](
        residual if x is None else x, residual, norm_weight, out if static_scale is None else static_scale,
        tma.lines(weight.data, columns, k, weight.data.stride(0), (width, BLOCK)), weight.scales,
        weight.scales if bias is None else bias, out if total is None else total, out, n, eps,
        k, weight.scales.shape[1], weight.rows, config.tile, config.blocks, config.stages, LARGEST[weight.data.dtype],
        static_scale is not None, by_block and k > BLOCK, norm is not None, norm is not None and x is not None,
        bias is not None, is_gated, mode, num_warps=4, **launch_options(mode),
    )  # fmt: skip
