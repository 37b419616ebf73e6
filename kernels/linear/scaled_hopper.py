"""Products of scaled 8-bit operands of 1 to 64 rows for Hopper (Gluon): `linear_hopper`'s ring, and scales.

Operands, scales and results as in `scaled`; split-K partial sums as in `split_linear`: float32 [S, M, N], summing to y. int8
with a scale a token and a row is exact even if split: int32 [S + 2, M, N], S sums, then float32 bits of the factors of their
total: ws at the beginning of the next, xs at that of the last (`norm.sum_of_splits`).

A stage of the ring is TILE rows of W and the rows of x, some groups of 128 of K of each. wgmma multiplies both from shared
memory, with x as first operand: it takes 64 rows, of which those beyond BLOCK_M are whatever follows in shared memory, and give
rows of a result that are never read. So tiles of W may be small, which gives every SM its share of it, gate and up meet in one
thread, and a group's scales are a number a row. A group is summed by itself, and added in float32 with its scales: so few bits
of Hopper's fp8 sums are lost. int8 without group scales is summed in int32 over all of K. Group scales are loaded two stages
ahead, since they come from L2. No register that an asynchronous wgmma reads is ever computed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.elementwise import activation
from quire.kernels.linear.scaled import BLOCK, Scaled, check, is_exact
from quire.kernels.linear.tiles import even_width
from quire.kernels.triton_support import dependent_launch, hopper, tma
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options
from quire.kernels.tuning.current import cached

ROWS = gl.constexpr(64)  # of x in a wgmma
BLOCK_K = gl.constexpr(BLOCK)
MAX_ROWS = hopper.MAX_ROWS
SHARED_BYTES = 224 * 1024  # of an SM, for rings
MIN_STEPS = 2  # of a split of K
MAX_PARTS = 8
MANY_ROWS, MOST_COLUMNS = 32, 64  # with more rows tiles have up to so many columns, or as many of gate and of up
MAX_STAGES = 12  # the first copies are unrolled

_copy = tma.copy
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    tile: int  # rows of W: 16 to 128, a power of two
    blocks: int  # groups of 128 of K in a stage
    stages: int  # of the ring
    programs: int  # at most, of all splits together
    parts: int = 1  # splits of K
    width: int = 0  # columns of a tile if fewer than TILE, or TILE / 2 gated; N is a multiple of it; 0: as many as that


@gluon.jit
def _load_weights(
    w_desc, buffer, ready, stage, tile, k, N, BYTES: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr,
    BLOCKS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Start the copy of a stage of W: TILE of its rows, or half as many of the gate's with up's below; zeros below WIDTH."""
    BOXES: gl.constexpr = 2 if GATED else 1  # a group
    ROWS: gl.constexpr = TILE // BOXES
    mbarrier.expect(ready.index(stage), BYTES)
    for i in gl.static_range(BLOCKS * BOXES):
        box = buffer.index((stage * BLOCKS * BOXES + i) * (2 // BOXES))
        at = k + i // BOXES * BLOCK_K
        if WIDTH == ROWS:
            lines = box._reinterpret(w_desc.dtype, [ROWS, BLOCK_K], w_desc.layout)
            _copy(w_desc, [tile * ROWS + i % BOXES * N, at], ready.index(stage), lines)
        else:
            lines = box._reinterpret(w_desc.dtype, [1, ROWS, BLOCK_K], w_desc.layout)
            _copy(w_desc, [tile + i % BOXES * (N // WIDTH), 0, at], ready.index(stage), lines)


@gluon.jit
def _load_x(x_desc, buffer, ready, stage, k, BLOCKS: gl.constexpr):
    for i in gl.static_range(BLOCKS):
        _copy(x_desc, [0, k + i * BLOCK_K], ready.index(stage), buffer.index(stage * BLOCKS + i))


@gluon.jit
def _rows_of(tile, N, layout: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr):
    """Rows of W in a tile, and whether they exist: [TILE]."""
    i = gl.arange(0, TILE, layout=layout)
    ROWS: gl.constexpr = TILE // 2 if GATED else TILE
    column = tile * WIDTH + i % ROWS
    return column + i // ROWS * N, (i % ROWS < WIDTH) & (column < N)


@gluon.jit
def _scales(
    xs_ptr, xs_at, x_live, ws_ptr, ws_at, w_live, first, LIMIT: gl.constexpr, X_BLOCKS: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Scales of BLOCKS groups of K from `first` on, tuples: x's [ROWS], and W's as from `_of_weight`."""
    xs = ()
    ws = ()
    for i in gl.static_range(BLOCKS):
        block = first + i
        is_there = block < LIMIT
        xs = xs + (gl.load(xs_ptr + xs_at + (block if X_BLOCKS > 1 else 0), x_live & is_there, other=0.0),)  # type: ignore
        ws = ws + (_of_weight(ws_ptr, ws_at, w_live, block, is_there),)  # type: ignore[assignment]
    return xs, ws


@gluon.jit
def _of_weight(ws_ptr, ws_at, w_live, block, is_there):
    """W's scales at a group of K: [TILE], or the number of the 2-D group that a tile lies in; and of up's."""
    first = gl.load(ws_ptr + ws_at[0] + block, w_live & is_there, other=0.0)
    second = gl.load(ws_ptr + ws_at[1] + block, w_live & is_there, other=0.0) if len(ws_at) > 1 else first
    return first, second


@gluon.jit
def _add_scaled(acc, sums, xs, ws, SQUARES: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr):
    """acc [ROWS, TILE] plus a group's sums times its scales."""
    if not SQUARES:
        scale = xs[:, None] * ws[0][None, :]
    elif GATED:
        TILE: gl.constexpr = acc.shape[1]
        is_up = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout)) >= TILE // 2
        scale = gl.where(is_up[None, :], (xs * ws[1])[:, None], (xs * ws[0])[:, None])
    else:
        scale = (xs * ws[0])[:, None]
    return acc + sums.to(gl.float32) * scale


@gluon.jit
def _products(x_buffer, w_buffer, acc, stage, BLOCKS: gl.constexpr, DEEP: gl.constexpr, layout: gl.constexpr):
    """Sums of a stage's groups, each by itself, a tuple; DEEP: all are added to acc, a tuple of one."""
    rows: gl.constexpr = [ROWS, BLOCK_K]
    sums = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(BLOCKS):
        x = x_buffer.index(stage * BLOCKS + i)._reinterpret(x_buffer.dtype, rows, x_buffer.layout)
        tile = w_buffer.index(2 * (stage * BLOCKS + i))
        w = tile._reinterpret(w_buffer.dtype, [2 * w_buffer.shape[1], BLOCK_K], w_buffer.layout).permute((1, 0))
        if DEEP:
            acc = warpgroup_mma(x, w, acc, is_async=True)
        else:
            zeros = gl.zeros(acc.shape, gl.int32 if x_buffer.dtype == gl.int8 else gl.float32, layout)
            sums = sums + (warpgroup_mma(x, w, zeros, use_acc=False, is_async=True),)
    if DEEP:
        sums = (warpgroup_mma_wait(0, deps=[acc]),)
    elif BLOCKS == 1:
        sums = (warpgroup_mma_wait(0, deps=[sums[0]]),)
    elif BLOCKS == 2:
        sums = warpgroup_mma_wait(0, deps=[sums[0], sums[1]])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums[0], sums[1], sums[2], sums[3]])
    return sums


@gluon.jit(do_not_specialize=["M"])
def _kernel(
    x_desc, xs_ptr, w_desc, ws_ptr, bias_ptr, out_ptr, M, N, out_stride,
    K_BLOCKS: gl.constexpr, X_BLOCKS: gl.constexpr, W_BLOCKS: gl.constexpr, W_ROWS: gl.constexpr, SQUARES: gl.constexpr,
    K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (p, s): tiles p, p + programs, ... of the output, split s of K, which is K_STEPS stages long."""
    BYTES: gl.constexpr = (TILE + BLOCK_M) * BLOCK_K * BLOCKS
    COLUMNS: gl.constexpr = TILE // 2 if GATED else TILE  # of a tile; WIDTH of them are the output's
    INT: gl.constexpr = w_desc.dtype == gl.int8
    BARE: gl.constexpr = out_ptr.dtype.element_ty == gl.int32  # sums, for a norm to add up and to scale
    DEEP: gl.constexpr = INT and W_BLOCKS == 1
    # behind the last stage's rows of x there is room up to 64
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BLOCKS + ROWS // BLOCK_M - 1, BLOCK_M, BLOCK_K], x_desc.layout)
    w_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    w_buffer = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS * 2, TILE // 2, BLOCK_K], w_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    part = gl.program_id(1)
    first_block = part * (K_STEPS * BLOCKS)
    first_k = first_block * BLOCK_K
    tiles = gl.cdiv(N, WIDTH)
    steps = gl.cdiv(tiles - program, programs) * K_STEPS
    for i in gl.static_range(STAGES):
        if i < steps:
            k = first_k + i % K_STEPS * BLOCKS * BLOCK_K
            _load_weights(
                w_desc, w_buffer, ready, i, program + i // K_STEPS * programs, k, N, BYTES, TILE, WIDTH, BLOCKS, GATED
            )
    _wait_for_previous(PDL)
    for i in gl.static_range(STAGES):
        if i < steps:
            _load_x(x_desc, x_buffer, ready, i, first_k + i % K_STEPS * BLOCKS * BLOCK_K, BLOCKS)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    x_live = m < M
    step = 0
    for tile in range(program, tiles, programs):
        rows, w_live = _rows_of(tile, N, gl.SliceLayout(0, layout), TILE, WIDTH, GATED)
        ws_at = rows // W_ROWS * W_BLOCKS
        xs_at = m * X_BLOCKS
        if SQUARES and GATED:
            at = (tile * WIDTH // W_ROWS * W_BLOCKS, (N + tile * WIDTH) // W_ROWS * W_BLOCKS)
        elif SQUARES:
            at = (tile * WIDTH // W_ROWS * W_BLOCKS,)  # type: ignore[assignment]
        else:
            at = (ws_at,)  # type: ignore[assignment]
        are_there = True if SQUARES else w_live
        acc = gl.zeros([ROWS, TILE], gl.int32 if DEEP else gl.float32, layout)
        if W_BLOCKS > 1:
            xs, ws = _scales(xs_ptr, xs_at, x_live, ws_ptr, at, are_there, first_block, K_BLOCKS, X_BLOCKS, BLOCKS)
            xs1, ws1 = _scales(xs_ptr, xs_at, x_live, ws_ptr, at, are_there, first_block + BLOCKS, K_BLOCKS, X_BLOCKS, BLOCKS)
        else:  # loaded here, since it comes from memory, and after the loop nothing is left to hide that
            xs = gl.load(xs_ptr + m, x_live, other=0.0)
            ws = gl.load(ws_ptr + ws_at, w_live, other=0.0)
        for k_step in range(K_STEPS):
            if W_BLOCKS > 1:
                block = first_block + (k_step + 2) * BLOCKS
                xs2, ws2 = _scales(xs_ptr, xs_at, x_live, ws_ptr, at, are_there, block, K_BLOCKS, X_BLOCKS, BLOCKS)
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            sums = _products(x_buffer, w_buffer, acc, stage, BLOCKS, DEEP, layout)
            tl.debug_barrier()  # all four warps have read the stage
            ahead = step + STAGES
            if ahead < steps:
                k = first_k + ahead % K_STEPS * BLOCKS * BLOCK_K
                ahead_tile = program + ahead // K_STEPS * programs
                _load_weights(w_desc, w_buffer, ready, stage, ahead_tile, k, N, BYTES, TILE, WIDTH, BLOCKS, GATED)
                _load_x(x_desc, x_buffer, ready, stage, k, BLOCKS)
            if DEEP:
                acc = sums[0]
            else:
                for i in gl.static_range(BLOCKS):
                    if W_BLOCKS > 1:
                        acc = _add_scaled(acc, sums[i], xs[i], ws[i], SQUARES, GATED, layout)
                    else:
                        acc += sums[i].to(gl.float32)
            if W_BLOCKS > 1:
                xs, ws, xs1, ws1 = xs1, ws1, xs2, ws2
            step += 1

        values = acc if BARE else acc.to(gl.float32)
        if W_BLOCKS == 1:
            if BARE:
                scales_at = out_ptr + gl.num_programs(1).to(gl.int64) * M * out_stride
                gl.store(scales_at + rows, ws.to(gl.int32, bitcast=True), w_live & (part == 0))
                gl.store(scales_at + M * out_stride + m, xs.to(gl.int32, bitcast=True), x_live & (program + part == 0))
            else:
                values = values * xs[:, None] * ws[None, :]
        if BIAS:
            values += gl.load(bias_ptr + rows, w_live & (part == 0), other=0.0).to(gl.float32)[None, :]
        if GATED:
            gate, up = gl.split(values.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
            values = _gated(gate, up, out_ptr.dtype.element_ty)
        out_layout: gl.constexpr = values.type.layout
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, out_layout))
        columns = tile * WIDTH + column
        lines = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
        at_out = out_ptr + part.to(gl.int64) * M * out_stride
        mask = ((column < WIDTH) & (columns < N))[None, :] & (lines < M)[:, None]
        result = values.to(out_ptr.dtype.element_ty)
        gl.store(at_out + lines.to(gl.int64)[:, None] * out_stride + columns[None, :], result, mask)


def block_rows(rows: int) -> int:
    """Rows that x is padded to in shared memory: TMA swizzles lines in eights."""
    return max(8, triton.next_power_of_2(rows))


def max_stages(rows: int, tile: int, blocks: int, sharing: int) -> int:
    """Stages that fit into a program's share of an SM."""
    block_m = block_rows(rows)
    room = SHARED_BYTES // sharing - (ROWS.value - block_m) * BLOCK - 1024
    return min(room // ((tile + block_m) * BLOCK * blocks), MAX_STAGES)


@cached
def choose(
    rows: int, n: int, k: int, sms: int, *, is_gated: bool = False, split_k: bool = False, varies: bool = False
) -> Config:
    """The configuration for n output columns on so many SMs: the best, or nearly, for an 8B's layers at 1, 16 and 64 rows.

    varies: whether a tile's columns may be other than a power of two, which is not possible with 2-D scale groups.

    If tiles are few, small ones have an SM each, or two, with long stages; with split K, where each split costs the next norm
    more, tiles are larger, since each reads all of x. If tiles are many, one program loads while another finishes its own; with
    many rows most of what they read is x, so an SM has one program, of larger tiles of equal width.
    """
    width = 32 if is_gated else 64
    tiles, parts, blocks = triton.cdiv(n, width), 1, 4 if k >= 4096 else 2
    while split_k and parts < MAX_PARTS and tiles * parts * 2 <= sms and k >= parts * 2 * MIN_STEPS * blocks * BLOCK:
        parts *= 2
    tile, sharing = 64, 1
    if tiles > sms:
        blocks, sharing = 2, 2
    elif parts == 1 and not is_gated:
        tile, tiles = 32, triton.cdiv(n, 32)
        sharing = 2 if tiles > sms else 1
    even = 0
    if varies and sharing == 2 and rows > MANY_ROWS:
        tile, sharing, blocks = (2 * MOST_COLUMNS, 1, 2) if is_gated else (MOST_COLUMNS, 1, 4 if k >= 4096 else 2)
        even = even_width(n, MOST_COLUMNS, sms, multiple=4)  # four numbers are stored at once
        tiles = triton.cdiv(n, even)
    steps = triton.cdiv(k, BLOCK * blocks * parts) * triton.cdiv(tiles * parts, sms * sharing)
    stages = min(max_stages(rows, tile, blocks, sharing), steps)
    return Config(tile, blocks, stages, sms * sharing, parts, even % MOST_COLUMNS)


def launch(
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel, for 1 to 64 rows; out [M, N], or partial sums if config has parts. Raises ValueError as `check`."""
    check(x, weight, bias, out, is_gated)
    (rows, k), n, split_k = x.data.shape, out.shape[-1], config.parts > 1
    if rows > MAX_ROWS or (split_k and (is_gated or out.shape[0] != config.parts + 2 * (out.dtype == torch.int32))):
        raise ValueError(f"scaled_hopper: {rows} rows to {out.shape} of {out.dtype} are not for this kernel")
    if split_k and not out.is_contiguous():
        raise ValueError("scaled_hopper: parts need to be contiguous")
    if out.dtype == torch.int32 and not (split_k and bias is None and is_exact(x, weight) and rows <= n):
        raise ValueError("scaled_hopper: bare sums are of int8 with a scale a token and a row, without bias")
    block_m, most = block_rows(rows), config.tile // 2 if is_gated else config.tile
    width = config.width or most
    if width > most or (width < most and n % width):
        raise ValueError(f"scaled_hopper: tiles of {width} columns do not make {n}, or are more than {most}")
    programs = min(triton.cdiv(n, width), max(config.programs // config.parts, 1))
    in_squares = weight.rows == BLOCK and BLOCK % width == 0 and (not is_gated or n % width == 0)
    whole = tma.lines(weight.data, len(weight.data), k, weight.data.stride(0), (width, BLOCK)) if width == most else None
    _kernel[(programs, config.parts)](
        tma.lines(x.data, rows, k, x.data.stride(0), (block_m, BLOCK)), x.scales,
        whole or tma.tiles(weight.data, width, most), weight.scales,
        weight.scales if bias is None else bias, out, rows, n, out.stride(-2),
        triton.cdiv(k, BLOCK), x.scales.shape[1], weight.scales.shape[1], weight.rows, in_squares,
        triton.cdiv(k, BLOCK * config.blocks * config.parts), block_m, config.tile, width, config.blocks, config.stages,
        bias is not None, is_gated, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
