"""Products of scaled 8-bit operands of many rows for Hopper: 65 to 512, where cuBLAS's tiles do not fill the GPU, and all
numbers of rows of int8, for which cuBLAS returns int32 sums that must still be scaled.

Operands, scales, results and partial sums as in `scaled_hopper`; scales of W are per row, or per 2-D group (128 x 128) that
holds whole pieces of a tile (`fp8.widens`). Tiles and splits are chosen for the GPU's SMs (`choose`).

A program is a producer warp, which has TMA copy rows of x and of W into a ring of stages of 128 of K, and two warpgroups. Each
has every other stripe of 64 rows of x, and pieces of up to 128 rows of W, which both read; with one stripe, every other piece.
wgmma multiplies them from shared memory. A stage's product is summed by itself and then added in float32, while the next one is
computed if there are registers for two, else while the other warpgroup's is. int8 without group scales is summed in int32 over
all of K. W's rows are the tensor core's columns: gate and up meet in a thread, and a 2-D group is one number for a piece. No
register that an asynchronous wgmma reads is ever computed.
"""

import itertools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.elementwise import activation
from quire.kernels.linear.scaled import BLOCK, MAX_BUCKET, Scaled, bucket, check, is_exact
from quire.kernels.triton_support import dependent_launch, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached

PIECE = 128  # rows of W in a wgmma, at most
SHARED_BYTES = 224 * 1024  # of an SM, for rings
FEW_TILES = ((64, 128), (64, 256))  # rows of x, of W
SMALL_TILES, LARGE_TILES = ((128, 64), (128, 128)), ((128, 256), (256, 128))
MAX_REGISTERS = 65536 // (3 * 128) // 8 * 8  # a thread, before redistribution: three warpgroups fill an SM
MAX_STAGES = 8
MIN_STEPS = 4  # of a split of K
# Estimates for choices only, for H100 and H200 alike: bytes a clock of an SM's ring, of L2 and of memory for each of all SMs;
# clocks of the tensor cores for 64 x 128 x 128, and if products wait for each other; of a tile's begin and end. For fp8, bytes
# into the ring that cost one more clock: its sustained products are bounded by power (LOG.md), also used by small tiles'
# copies.
SM_BYTES, L2_BYTES, MEMORY_BYTES, PRODUCT, ALONE, AROUND = 62.0, 62.0, 16.0, 340, 350, 4000
POWER_BYTES = 300.0

STRIPE = gl.constexpr(64)  # rows of x in a wgmma
BLOCK_K = gl.constexpr(BLOCK)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

_copy = tma.copy
_copy_tile = tma.copy_tile
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    block_m: int  # rows of x in a tile: 64, 128 or 256
    block_n: int  # rows of W in a tile, 64 to 256; block_m * block_n is 64 x 128 to 128 x 256: sums are registers
    stages: int
    programs: int  # at most
    parts: int = 1  # splits of K


def piece_of(config: Config) -> int:
    """Rows of W in a wgmma."""
    return min(config.block_n if config.block_m > STRIPE.value else config.block_n // 2, PIECE)


def k_blocks(k: int, config: Config, exact: bool) -> tuple[int, int]:
    """(groups of 128 in a split of K, beyond which are zeros; of how many one is added while the next is computed).

    1: there are no registers for two. More float32 sums would take more registers, too.
    """
    blocks = triton.cdiv(k, BLOCK * config.parts)
    if not exact and config.block_m * config.block_n > 128 * 128:
        return blocks, 1
    at_once = 8 if exact and blocks % 8 == 0 else 4
    return triton.cdiv(blocks, at_once) * at_once, at_once


def stage_bytes(block_m: int, block_n: int) -> int:
    """Bytes of a stage of the ring."""
    return (block_m + block_n) * BLOCK


def choose(
    rows: int,
    n: int,
    k: int,
    sms: int,
    *,
    is_gated: bool = False,
    split_k: bool = False,
    by_block: bool = False,
    exact: bool = False,
) -> Config:
    """The configuration for n output columns on so many SMs: that of least `cycles`.

    by_block: W has 2-D scale groups; exact: `scaled.is_exact`.
    """
    return _choose(bucket(rows), n, k, sms, is_gated, split_k, by_block, exact)


@cached
def _choose(rows: int, n: int, k: int, sms: int, is_gated: bool, split_k: bool, by_block: bool, exact: bool) -> Config:
    found = configs(rows, k, sms, split_k=split_k, by_block=by_block)
    return min(found, key=lambda config: cycles(config, rows, n, k, sms, is_gated=is_gated, by_block=by_block, exact=exact))


def configs(rows: int, k: int, sms: int, *, split_k: bool, by_block: bool = False) -> list[Config]:
    """The candidates; the ring is as deep as fits.

    With scale groups only tiles with sums in half of the registers: with larger ones the compiler spills. With prompts' rows
    K is not split: there are enough tiles.
    """
    found, split_k = [], split_k and rows <= MAX_BUCKET
    shapes: tuple[tuple[int, int], ...]
    if rows <= STRIPE.value:
        shapes = FEW_TILES
    elif by_block:
        shapes = SMALL_TILES
    else:  # for prompts, small tiles wait for L2; of equals the first is chosen: 256 x 128 was faster, with fp8 at 256 rows
        shapes = LARGE_TILES if rows > 2 * MAX_BUCKET else SMALL_TILES + LARGE_TILES[::-1]
    for (block_m, block_n), parts in itertools.product(shapes, (1, 2, 4, 8) if split_k else (1,)):
        if block_m < 2 * rows and (parts == 1 or k >= parts * MIN_STEPS * BLOCK):
            stages = min(SHARED_BYTES // stage_bytes(block_m, block_n), MAX_STAGES)
            found.append(Config(block_m, block_n, stages, sms, parts))
    return found


def cycles(
    config: Config, rows: int, n: int, k: int, sms: int, *, is_gated: bool, by_block: bool = False, exact: bool = False
) -> float:
    """Approximate clocks of the GPU for a product: estimated from the work of each unit on a group of K."""
    block_m, block_n, _, programs, parts = config
    row_tiles, columns = triton.cdiv(rows, block_m), 2 * n if is_gated else n
    items = row_tiles * triton.cdiv(columns, block_n) * parts
    busy = min(items, programs)
    steps, at_once = k_blocks(k, config, exact)
    product = block_m * block_n / (STRIPE.value * PIECE) * (PRODUCT if at_once > 1 else ALONE)
    copied = stage_bytes(block_m, block_n) * max(busy / sms / L2_BYTES, 1 / SM_BYTES)
    streamed = block_n * BLOCK * busy / min(row_tiles, programs) / sms / MEMORY_BYTES
    step = max(product, copied, streamed)
    limited = 0.0 if exact or by_block else stage_bytes(block_m, block_n) / POWER_BYTES  # neither of those was measured
    moved = 24 * parts * rows * n / sms / SM_BYTES if parts > 1 else 0.0  # float32, written, read and added up by a norm
    stored = block_m * block_n / 16
    return triton.cdiv(items, programs) * (steps * (step + limited) + stored) + AROUND + moved


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
    """Run the kernel, for operands that satisfy `fp8.widens`, any number of rows; out [M, N], or partial sums.

    Raises ValueError as `check`, and for scales that it does not support.
    """
    check(x, weight, bias, out, is_gated)
    (rows, k), n, split_k = x.data.shape, out.shape[-1], config.parts > 1
    if split_k and (is_gated or not out.is_contiguous() or len(out) != config.parts + 2 * (out.dtype == torch.int32)):
        raise ValueError(f"scaled_wide: {config.parts} parts in {out.shape} of {out.dtype} are not for this kernel")
    if out.dtype == torch.int32 and not (split_k and bias is None and is_exact(x, weight) and rows <= n):
        raise ValueError("scaled_wide: bare sums are of int8 with a scale a token and a row, without bias")
    blocks, piece = weight.scales.shape[1], piece_of(config)
    width = piece // 2 if is_gated else piece
    if weight.rows != (BLOCK if blocks > 1 else 1) or (blocks > 1 and is_gated and n % width):
        raise ValueError(f"scaled_wide: scales {weight.scales.shape} of {weight.rows} rows are not for this kernel")
    mode = LATE if pdl else PLAIN  # EARLY is for small programs
    row_tiles = triton.cdiv(rows, config.block_m)
    items = row_tiles * triton.cdiv(n, config.block_n // piece * width) * config.parts
    wide_kernel[(min(items, config.programs),)](
        tma.lines(x.data, rows, k, x.data.stride(0), (STRIPE.value, BLOCK)), x.scales,
        tma.lines(weight.data, len(weight.data), k, weight.data.stride(0), (width, BLOCK)), weight.scales,
        weight.scales if bias is None else bias, out, rows, n, out.stride(-2), out.stride(0) if split_k else 0,
        row_tiles, items, triton.cdiv(k, BLOCK), x.scales.shape[1], blocks,
        *k_blocks(k, config, is_exact(x, weight)), config.block_m, piece, config.block_n // piece, config.stages, config.parts,
        bias is not None, is_gated, mode,
        num_warps=4, maxnreg=MAX_REGISTERS, **launch_options(mode),
    )  # fmt: skip


@gluon.jit
def _place(item, row_tiles, tiles):
    """(row tile, tile of W, split) of an item: consecutive items have the same rows of W, so memory is read once."""
    return item % row_tiles, item // row_tiles % tiles, item // row_tiles // tiles


@gluon.jit
def _load_weights(
    w_desc, buffer, full, stage, tile, k, N, BYTES: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Start the copy of a tile of W; a piece is ROWS of its rows, or half as many of the gate's with up's below."""
    mbarrier.expect(full.index(stage), BYTES)
    for j in gl.static_range(PIECES):
        at = buffer.index(stage * PIECES + j)
        _copy_tile(w_desc, at, full.index(stage), tile * PIECES + j, k, N, ROWS, GATED)


@gluon.jit
def _load_x(x_desc, buffer, full, stage, row_tile, k, X_STRIPES: gl.constexpr):
    for i in gl.static_range(X_STRIPES):
        _copy(x_desc, [(row_tile * X_STRIPES + i) * STRIPE, k], full.index(stage), buffer.index(stage * X_STRIPES + i))


@gluon.jit
def _produce(
    descs, shared, N, row_tiles, tiles, items, K_STEPS: gl.constexpr, X_STRIPES: gl.constexpr, ROWS: gl.constexpr,
    PIECES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp. `full` completes when a stage's copies have arrived, `empty` when both warpgroups have read it."""
    x_desc, w_desc = descs
    x_buffer, w_buffer, full, empty = shared
    BYTES: gl.constexpr = (X_STRIPES * STRIPE + PIECES * ROWS) * BLOCK_K
    EARLY: gl.constexpr = STAGES if STAGES < K_STEPS else K_STEPS  # stages of the first tile: their weights need not wait
    program = gl.program_id(0)
    _, tile, part = _place(program, row_tiles, tiles)
    for step in range(EARLY):
        k = (part * K_STEPS + step) * BLOCK_K
        _load_weights(w_desc, w_buffer, full, step, tile, k, N, BYTES, ROWS, PIECES, GATED)
    _wait_for_previous(PDL)
    step = 0
    for item in range(program, items, gl.num_programs(0)):
        row_tile, tile, part = _place(item, row_tiles, tiles)  # once a tile: a division takes as long as a group's product
        for k_step in range(K_STEPS):
            k = (part * K_STEPS + k_step) * BLOCK_K
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            if step >= EARLY:
                _load_weights(w_desc, w_buffer, full, stage, tile, k, N, BYTES, ROWS, PIECES, GATED)
            _load_x(x_desc, x_buffer, full, stage, row_tile, k, X_STRIPES)
            step += 1


@gluon.jit
def _halves(values, HALF: gl.constexpr):
    """Gate's columns and up's; a thread has both."""
    return gl.split(values.reshape([STRIPE, 2, HALF]).permute((0, 2, 1)))


@gluon.jit
def _lines(row_tile, stripe, X_STRIPES: gl.constexpr, layout: gl.constexpr):
    """Rows of x of a tile's stripe."""
    return (row_tile * X_STRIPES + stripe) * STRIPE + gl.arange(0, STRIPE, layout=gl.SliceLayout(1, layout))


@gluon.jit
def _scales_of_block(
    x_scales, w_scales, row_tile, tile, block, M, N, WARPGROUP: gl.constexpr, LIMIT: gl.constexpr, X_STRIPES: gl.constexpr,
    PIECES: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scales of a group of K for a warpgroup, tuples: x's [STRIPE] for each stripe; the gate's and up's 2-D groups', a
    piece.
    """
    xs_ptr, X_BLOCKS = x_scales
    ws_ptr, W_BLOCKS = w_scales
    xs = ()
    ws = ()
    for i in gl.static_range(max(X_STRIPES // 2, 1)):
        lines = _lines(row_tile, 2 * i + WARPGROUP if X_STRIPES > 1 else 0, X_STRIPES, layout)
        at = xs_ptr + lines * X_BLOCKS + (block if X_BLOCKS > 1 else 0)
        xs = xs + (gl.load(at, (lines < M) & (block < LIMIT), other=0.0),)  # type: ignore[assignment]
    for j in gl.static_range(PIECES if X_STRIPES > 1 else PIECES // 2):
        column = (tile * PIECES + (j if X_STRIPES > 1 else 2 * j + WARPGROUP)) * WIDTH
        is_there = (column < N) & (block < LIMIT)
        first = gl.load(ws_ptr + column // BLOCK_K * W_BLOCKS + block, is_there, other=0.0)
        second = gl.load(ws_ptr + (N + column) // BLOCK_K * W_BLOCKS + block, is_there, other=0.0) if GATED else first
        ws = ws + ((first, second),)  # type: ignore[assignment]
    return xs, ws


@gluon.jit
def _add_scaled(acc, sums, xs, ws, HALF: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr):
    """acc [STRIPE, ROWS] plus a group's sums times its scales."""
    scale = (xs * ws[0])[:, None]
    if GATED:
        is_up = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, layout)) >= HALF
        scale = gl.where(is_up[None, :], (xs * ws[1])[:, None], scale)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums.to(gl.float32), scale, acc], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _add(acc, sums):
    """acc + sums, here and now: the compiler would delay several groups' sums to the last, and lack registers."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [acc, sums.to(gl.float32)], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _operands(x_buffer, w_buffer, stage, c, WARPGROUP: gl.constexpr, X_STRIPES: gl.constexpr, PIECES: gl.constexpr):
    """(x's stripe, W's piece) of a warpgroup's product c within a stage."""
    STRIPES: gl.constexpr = max(X_STRIPES // 2, 1)
    stripe = c % STRIPES * 2 + WARPGROUP if X_STRIPES > 1 else 0
    piece = c // STRIPES if X_STRIPES > 1 else c * 2 + WARPGROUP
    return x_buffer.index(stage * X_STRIPES + stripe), w_buffer.index(stage * PIECES + piece).permute((1, 0))


@gluon.jit
def _add_exact(
    shared, accs, step, WARPGROUP: gl.constexpr, X_STRIPES: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """accs plus the products of BLOCKS groups of K, in int32; a group's are computed while the next one's begin."""
    x_buffer, w_buffer, full, empty = shared
    COUNT: gl.constexpr = X_STRIPES * PIECES // 2
    for u in gl.static_range(BLOCKS):
        stage = (step + u) % STAGES
        mbarrier.wait(full.index(stage), (step + u) // STAGES & 1)
        added = ()  # type: tuple[gl.tensor, ...]
        for c in gl.static_range(COUNT):
            x, w = _operands(x_buffer, w_buffer, stage, c, WARPGROUP, X_STRIPES, PIECES)
            added = added + (warpgroup_mma(x, w, accs[c], is_async=True),)
        if COUNT == 1:
            accs = (warpgroup_mma_wait(1, deps=[added[0]]),)
        else:
            accs = warpgroup_mma_wait(COUNT, deps=[added[0], added[1]])
        if u > 0:
            mbarrier.arrive(empty.index((step + u - 1) % STAGES), count=1)
    if COUNT == 1:
        accs = (warpgroup_mma_wait(0, deps=[accs[0]]),)
    else:
        accs = warpgroup_mma_wait(0, deps=[accs[0], accs[1]])
    mbarrier.arrive(empty.index((step + BLOCKS - 1) % STAGES), count=1)
    return accs


@gluon.jit
def _add_products(
    shared, x_scales, w_scales, accs, step, row_tile, tile, first_block, M, N, WARPGROUP: gl.constexpr, K_BLOCKS: gl.constexpr,
    X_STRIPES: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    SQUARES: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """accs plus the products of BLOCKS groups of K, each summed by itself, and added while the next is computed."""
    x_buffer, w_buffer, full, empty = shared
    STRIPES: gl.constexpr = max(X_STRIPES // 2, 1)
    COUNT: gl.constexpr = X_STRIPES * PIECES // 2
    TASKS: gl.constexpr = BLOCKS * COUNT
    BEHIND: gl.constexpr = 1 if BLOCKS > 1 else 0
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    nothing = gl.zeros([STRIPE, ROWS], gl.int32 if x_buffer.dtype == gl.int8 else gl.float32, layout)
    sums = ()  # type: tuple[gl.tensor, ...]
    scales = ()  # type: tuple[tuple, ...]
    for t in gl.static_range(TASKS + BEHIND):
        if t < TASKS:
            stage = (step + t // COUNT) % STAGES
            if t % COUNT == 0:
                if SQUARES:  # before the barrier: after it the compiler would delay them until they are needed
                    scales = scales + (
                        _scales_of_block(
                            x_scales, w_scales, row_tile, tile, first_block + t // COUNT, M, N, WARPGROUP, K_BLOCKS,
                            X_STRIPES, PIECES, WIDTH, GATED, layout,
                        ),
                    )  # fmt: skip
                mbarrier.wait(full.index(stage), (step + t // COUNT) // STAGES & 1)
            x, w = _operands(x_buffer, w_buffer, stage, t % COUNT, WARPGROUP, X_STRIPES, PIECES)
            sums = sums + (warpgroup_mma(x, w, nothing, use_acc=False, is_async=True),)
        if t >= BEHIND:
            done = warpgroup_mma_wait(BEHIND if t < TASKS else 0, deps=[sums[t - BEHIND]])
            if (t - BEHIND) % COUNT == COUNT - 1:
                mbarrier.arrive(empty.index((step + (t - BEHIND) // COUNT) % STAGES), count=1)
            acc = accs[(t - BEHIND) % COUNT]
            if SQUARES:
                xs, ws = scales[(t - BEHIND) // COUNT]
                of_piece = ws[(t - BEHIND) % COUNT // STRIPES]
                acc = _add_scaled(acc, done, xs[(t - BEHIND) % STRIPES], of_piece, ROWS // 2, GATED, layout)
            else:
                acc = _add(acc, done)
            if COUNT == 1:
                accs = (acc,)
            elif (t - BEHIND) % COUNT == 0:
                accs = (acc, accs[1])
            else:
                accs = (accs[0], acc)
    return accs


@gluon.jit
def _store(
    acc, x_scales, w_scales, output, lines, piece, part, M, N, ROWS: gl.constexpr, PARTS: gl.constexpr, SQUARES: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store a stripe's results of a piece. Each thread stores its own values."""
    bias_ptr, out_ptr, out_stride, part_stride = output
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    BARE: gl.constexpr = out_ptr.dtype.element_ty == gl.int32  # sums, for a norm to add up and to scale
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    column = piece * WIDTH + i % WIDTH
    rows = column + i // WIDTH * N
    live = column < N
    values = acc if BARE else acc.to(gl.float32)
    if not SQUARES:
        xs = gl.load(x_scales[0] + lines, lines < M, other=0.0)
        ws = gl.load(w_scales[0] + rows, live, other=0.0)
        if BARE:
            scales_at = out_ptr + gl.to_tensor(PARTS).to(gl.int64) * part_stride
            gl.store(scales_at + rows, ws.to(gl.int32, bitcast=True), live & (part == 0))
            gl.store(scales_at + part_stride + lines, xs.to(gl.int32, bitcast=True), (lines < M) & (piece + part == 0))
        else:
            values = values * xs[:, None] * ws[None, :]
    if BIAS:
        values += gl.load(bias_ptr + rows, live & (part == 0), other=0.0).to(gl.float32)[None, :]
    if GATED:
        gate, up = _halves(values, WIDTH)
        values = _gated(gate, up, out_ptr.dtype.element_ty)
    out_layout: gl.constexpr = values.type.layout
    lines = gl.convert_layout(lines, gl.SliceLayout(1, out_layout))
    columns = piece * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, out_layout))
    at = out_ptr + part.to(gl.int64) * part_stride + lines.to(gl.int64)[:, None] * out_stride + columns[None, :]
    gl.store(at, values.to(out_ptr.dtype.element_ty), (lines < M)[:, None] & (columns < N)[None, :])


@gluon.jit
def _consume(
    shared, x_scales, w_scales, output, M, N, row_tiles, tiles, items, WARPGROUP: gl.constexpr, K_BLOCKS: gl.constexpr,
    K_STEPS: gl.constexpr, BLOCKS: gl.constexpr, X_STRIPES: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, SQUARES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0 or 1: the even or the odd stripes of each tile's rows of x; with one stripe the even or odd pieces of W."""
    INT: gl.constexpr = shared[0].dtype == gl.int8
    DEEP: gl.constexpr = INT and not SQUARES
    STRIPES: gl.constexpr = max(X_STRIPES // 2, 1)  # of this warpgroup
    COUNT: gl.constexpr = X_STRIPES * PIECES // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    _wait_for_previous(PDL)  # for x's scales
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row_tile, tile, part = _place(item, row_tiles, tiles)
        accs = ()
        for _ in gl.static_range(COUNT):
            accs = accs + (gl.zeros([STRIPE, ROWS], gl.int32 if DEEP else gl.float32, layout),)  # type: ignore[assignment]
        for k_step in range(0, K_STEPS, BLOCKS):
            if DEEP:
                accs = _add_exact(shared, accs, step, WARPGROUP, X_STRIPES, PIECES, STAGES, BLOCKS)
            else:
                accs = _add_products(
                    shared, x_scales, w_scales, accs, step, row_tile, tile, part * K_STEPS + k_step, M, N, WARPGROUP, K_BLOCKS,
                    X_STRIPES, ROWS, PIECES, STAGES, BLOCKS, SQUARES, GATED, layout,
                )  # fmt: skip
            step += BLOCKS
        for c in gl.static_range(COUNT):
            lines = _lines(row_tile, c % STRIPES * 2 + WARPGROUP if X_STRIPES > 1 else 0, X_STRIPES, layout)
            piece = tile * PIECES + (c // STRIPES if X_STRIPES > 1 else c * 2 + WARPGROUP)
            _store(accs[c], x_scales, w_scales, output, lines, piece, part, M, N, ROWS, PARTS, SQUARES, BIAS, GATED, layout)


@gluon.jit(do_not_specialize=["M", "row_tiles", "items"])
def wide_kernel(
    x_desc, xs_ptr, w_desc, ws_ptr, bias_ptr, out_ptr, M, N, out_stride, part_stride, row_tiles, items,
    K_BLOCKS: gl.constexpr, X_BLOCKS: gl.constexpr, W_BLOCKS: gl.constexpr, K_STEPS: gl.constexpr, BLOCKS: gl.constexpr,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program p: items p, p + programs, ... of row tiles x tiles of W x splits of K, which are K_STEPS groups long."""
    X_STRIPES: gl.constexpr = BLOCK_M // STRIPE
    SQUARES: gl.constexpr = W_BLOCKS > 1
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES * X_STRIPES, STRIPE, BLOCK_K], x_desc.layout)
    w_buffer = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PIECES, ROWS, BLOCK_K], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles = gl.cdiv(N, PIECES * (ROWS // 2 if GATED else ROWS))
    shared = (x_buffer, w_buffer, full, empty)
    x_scales = (xs_ptr, X_BLOCKS)
    w_scales = (ws_ptr, W_BLOCKS)
    output = (bias_ptr, out_ptr, out_stride, part_stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    shared, x_scales, w_scales, output, M, N, row_tiles, tiles, items, 0, K_BLOCKS, K_STEPS, BLOCKS, X_STRIPES,
                    ROWS, PIECES, STAGES, PARTS, SQUARES, BIAS, GATED, PDL,
                ),
            ),
            (
                _consume,
                (
                    shared, x_scales, w_scales, output, M, N, row_tiles, tiles, items, 1, K_BLOCKS, K_STEPS, BLOCKS, X_STRIPES,
                    ROWS, PIECES, STAGES, PARTS, SQUARES, BIAS, GATED, PDL,
                ),
            ),
            (
                _produce,
                (
                    (x_desc, w_desc), shared, N, row_tiles, tiles, items, K_STEPS, X_STRIPES, ROWS, PIECES, STAGES, GATED,
                    PDL,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
