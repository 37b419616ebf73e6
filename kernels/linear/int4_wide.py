"""Products of 4-bit weights with many rows for Hopper (Gluon): W's numbers are computed in registers, once for a tile of rows.

Operands and results as in `int4`, 16-bit; split-K partial sums as in `split_linear`: float32 [S, M, N], summing to y. (q - z)
s is rounded to x's type, as in `int4.dequantize`: so the sums are cuBLAS's on the dequantized weight, in another order.

A program is a producer warp, which has TMA copy words of W and rows of x into a ring of stages of 128 of K, and two warpgroups
with some stripes of 64 rows of W each; both read the same rows of x. A warpgroup computes numbers, and wgmma multiplies them
with x from shared memory; it is waited for before anything else is computed, since it reads those registers (which ptxas may
reuse too early). Meanwhile the other warpgroup computes its numbers: they take turns at the tensor cores, which would otherwise
serve both at once and then neither (2,540 clocks for 128 x 256, of which the product takes 2,048).
"""

import itertools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.elementwise import activation
from quire.kernels.linear.int4_operands import (
    BLOCK_K,
    MAGIC,
    WORDS,
    int_operand,
    load_words,
    rows_of,
    scales_of,
    scales_of_block,
)
from quire.kernels.linear.int4_weight import BLOCK, BLOCK_WORDS, Int4Weight
from quire.kernels.triton_support import dependent_launch, hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached, current

STRIPE = gl.constexpr(64)  # rows of W in a wgmma
SHARED_BYTES = 224 * 1024  # of an SM, for rings
MAX_REGISTERS = 65536 // (3 * 128) // 8 * 8  # a thread, before redistribution: three warpgroups fill an SM
MAX_SUMS = 256  # rows of x x stripes of a warpgroup: its sums are in registers
MAX_STAGES = 8
MIN_STEPS = 4  # of a split of K
# Estimates for choices only, for H100 and H200 alike: bytes a clock of an SM's ring, of L2 and of memory for each of all SMs;
# clocks of a warpgroup for a stripe's numbers, of a turn at the tensor cores, and of a tile's begin and end.
SM_BYTES, L2_BYTES, MEMORY_BYTES, MAKING, TURN, AROUND = 50.0, 34.0, 16.0, 500, 90, 3500
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

_copy = tma.copy
_copy_tile = tma.copy_tile
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    block_m: int  # rows of x in a tile, a power of two from 16 to 256
    stripes: int  # of W, for each warpgroup; stripes * block_m is at most 256: their sums are registers
    stages: int
    programs: int  # at most
    parts: int = 1  # splits of K


@gluon.jit
def _place(item, row_tiles, tiles):
    """(row tile, tile of W, split) of an item: consecutive items have the same rows of W, so memory is read once."""
    return item % row_tiles, item // row_tiles % tiles, item // row_tiles // tiles


@gluon.jit
def _load_weights(
    w_desc, buffer, full, stage, tile, word, N, BYTES: gl.constexpr, STRIPES: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Start the copy of a chunk of W for both warpgroups; a stripe is 64 rows, or 32 of the gate's with 32 of up's below."""
    mbarrier.expect(full.index(stage), BYTES)
    for i in gl.static_range(2 * STRIPES):
        at = buffer.index(stage * (2 * STRIPES) + i)
        _copy_tile(w_desc, at, full.index(stage), tile * (2 * STRIPES) + i, word, N, STRIPE, GATED)


@gluon.jit
def _produce(
    descs, shared, N, row_tiles, tiles, items, K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr, STRIPES: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp. `full` completes when a stage's copies have arrived, `empty` when both warpgroups have read it."""
    x_desc, w_desc = descs
    x_buffer, w_buffer, full, empty, _turns = shared
    BYTES: gl.constexpr = BLOCK_M * BLOCK_K * 2 + 2 * STRIPES * STRIPE * WORDS * 4
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = gl.cdiv(items - program, programs) * K_STEPS
    for step in range(gl.minimum(steps, STAGES)):
        _, tile, part = _place(program + step // K_STEPS * programs, row_tiles, tiles)
        block = part * K_STEPS + step % K_STEPS
        _load_weights(w_desc, w_buffer, full, step, tile, block * WORDS, N, BYTES, STRIPES, GATED)
    _wait_for_previous(PDL)
    for step in range(gl.minimum(steps, STAGES)):
        row_tile, _, part = _place(program + step // K_STEPS * programs, row_tiles, tiles)
        block = part * K_STEPS + step % K_STEPS
        _copy(x_desc, [row_tile * BLOCK_M, block * BLOCK_K], full.index(step), x_buffer.index(step))
    for step in range(STAGES, steps):
        row_tile, tile, part = _place(program + step // K_STEPS * programs, row_tiles, tiles)
        block = part * K_STEPS + step % K_STEPS
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _load_weights(w_desc, w_buffer, full, stage, tile, block * WORDS, N, BYTES, STRIPES, GATED)
        _copy(x_desc, [row_tile * BLOCK_M, block * BLOCK_K], full.index(stage), x_buffer.index(stage))


@gluon.jit
def _store(
    acc, output, stripe, row_tile, part, M, N,
    BLOCK_M: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store a stripe's results. Each thread stores its own values: see the end of attention/prefill_hopper_consumer."""
    bias_ptr, out_ptr, out_stride, part_stride = output
    WIDTH: gl.constexpr = STRIPE // 2 if GATED else STRIPE
    if BIAS:
        rows, live = rows_of(stripe, N, gl.SliceLayout(1, layout), STRIPE, GATED)
        acc += gl.load(bias_ptr + rows, live & (part == 0), other=0.0).to(gl.float32)[:, None]
    values = acc
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
        values = _gated(gate, up, out_ptr.dtype.element_ty).reshape([WIDTH, BLOCK_M])
    out_layout: gl.constexpr = values.type.layout
    columns = stripe * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, out_layout))
    lines = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
    first_line = row_tile * BLOCK_M
    start = out_ptr + part.to(gl.int64) * part_stride + first_line.to(gl.int64) * out_stride
    mask = (columns < N)[:, None] & (lines < M - first_line)[None, :]
    gl.store(start + (lines[None, :] * out_stride + columns[:, None]), values.to(out_ptr.dtype.element_ty), mask)


@gluon.jit
def _scales_of_tile(
    weight, N, tile, block, WARPGROUP: gl.constexpr, K_BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STRIPES: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scales and zeros of a warpgroup's stripes in a chunk of K, tuples; scales are 0 behind the last chunk."""
    s_ptr, z_ptr = weight
    scales = ()
    zeros = ()
    for i in gl.static_range(STRIPES):
        rows, live = rows_of((tile * 2 + WARPGROUP) * STRIPES + i, N, gl.SliceLayout(1, layout), STRIPE, GATED)
        some = scales_of(s_ptr, z_ptr, rows, N * 2 if GATED else N, live, block, K_BLOCKS, 1, GROUP, ZEROS)
        scales, zeros = scales + some[0], zeros + some[1]
    return scales, zeros


@gluon.jit
def _consume(
    shared, weight, output, magic, M, N, row_tiles, tiles, items, WARPGROUP: gl.constexpr,
    K_BLOCKS: gl.constexpr, GROUP: gl.constexpr, K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr,
    STRIPES: gl.constexpr, STAGES: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0 or 1: the first or the second STRIPES stripes of each tile of W."""
    x_buffer, w_buffer, full, empty, turns = shared
    dtype: gl.constexpr = x_buffer.dtype
    SCALES: gl.constexpr = scales_of_block(GROUP)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    programs = gl.num_programs(0)
    row_tile, tile, part = _place(gl.program_id(0), row_tiles, tiles)
    step = 0
    scales, zeros = _scales_of_tile(
        weight, N, tile, part * K_STEPS, WARPGROUP, K_BLOCKS, GROUP, STRIPES, ZEROS, GATED, layout
    )  # fmt: skip
    for item in range(gl.program_id(0), items, programs):
        next_row_tile, next_tile, next_part = _place(item + programs, row_tiles, tiles)
        sums = ()
        for _ in gl.static_range(STRIPES):
            sums = sums + (gl.zeros([STRIPE, BLOCK_M], gl.float32, layout),)  # type: ignore[assignment]
        for k_step in range(K_STEPS):
            # Loaded a chunk ahead, and before the barrier: after it the compiler would delay the loads until their use.
            is_last = k_step == K_STEPS - 1
            block = gl.where(is_last, next_part * K_STEPS, part * K_STEPS + k_step + 1)
            ahead_scales, ahead_zeros = _scales_of_tile(
                weight, N, gl.where(is_last, next_tile, tile), block,
                WARPGROUP, K_BLOCKS, GROUP, STRIPES, ZEROS, GATED, layout,
            )  # fmt: skip
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = x_buffer.index(stage).permute((1, 0))
            added = ()
            for i in gl.static_range(STRIPES):
                words = load_words(w_buffer.index((stage * 2 + WARPGROUP) * STRIPES + i), 0, 4, GATED)
                operand = int_operand(words, magic, scales, zeros, i * SCALES, SCALES, dtype, ZEROS, w_layout)
                turn = step * STRIPES + i
                mbarrier.wait(turns.index(WARPGROUP), (turn + WARPGROUP + 1) & 1)
                acc = warpgroup_mma(operand, x, sums[i], is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
                added = added + (acc,)  # type: ignore[assignment]
            mbarrier.arrive(empty.index(stage), count=1)
            sums, scales, zeros = added, ahead_scales, ahead_zeros
            step += 1
        for i in gl.static_range(STRIPES):
            stripe = (tile * 2 + WARPGROUP) * STRIPES + i
            _store(sums[i], output, stripe, row_tile, part, M, N, BLOCK_M, BIAS, GATED, layout)
        row_tile, tile, part = next_row_tile, next_tile, next_part


@gluon.jit(do_not_specialize=["M", "part_stride", "magic", "row_tiles", "items"])
def _kernel(
    x_desc, w_desc, s_ptr, z_ptr, bias_ptr, out_ptr, M, N, out_stride, part_stride, magic, row_tiles, items,
    K_BLOCKS: gl.constexpr, GROUP: gl.constexpr, K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr,
    STRIPES: gl.constexpr, STAGES: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program p: items p, p + programs, ... of row tiles x tiles of W x splits of K, which are K_STEPS chunks long."""
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_buffer = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * STRIPES, STRIPE, WORDS], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    WIDTH: gl.constexpr = STRIPE * STRIPES if GATED else 2 * STRIPE * STRIPES  # output columns of a tile
    tiles = gl.cdiv(N, WIDTH)
    shared = (x_buffer, w_buffer, full, empty, turns)
    weight = (s_ptr, z_ptr)
    output = (bias_ptr, out_ptr, out_stride, part_stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    shared, weight, output, magic, M, N, row_tiles, tiles, items, 0, K_BLOCKS, GROUP, K_STEPS,
                    BLOCK_M, STRIPES, STAGES, ZEROS, BIAS, GATED,
                ),
            ),
            (
                _consume,
                (
                    shared, weight, output, magic, M, N, row_tiles, tiles, items, 1, K_BLOCKS, GROUP, K_STEPS,
                    BLOCK_M, STRIPES, STAGES, ZEROS, BIAS, GATED,
                ),
            ),
            (
                _produce,
                (
                    (x_desc, w_desc), shared, N, row_tiles, tiles, items, K_STEPS, BLOCK_M, STRIPES, STAGES, GATED, PDL,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def stage_bytes(block_m: int, stripes: int) -> int:
    """Bytes of a stage of the ring."""
    return block_m * BLOCK * 2 + 2 * stripes * STRIPE.value * BLOCK // 2


def supports(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel can compute this product, and fast: 16-bit, aligned as TMA needs it, rows within the table's limit."""
    if not hopper.MAX_ROWS < len(x) <= current().scaled.int4_rows or x.dtype not in MAGIC or not hopper.available(x.device):
        return False
    return hopper.can_copy(x) and hopper.can_copy(weight.words)


def bucket(rows: int) -> int:
    """Numbers of rows that share one configuration: up to 64, and to each multiple of 128."""
    return 64 if rows <= 64 else triton.cdiv(rows, 128) * 128


def choose(rows: int, n: int, k: int, sms: int, *, is_gated: bool = False, split_k: bool = False) -> Config:
    """The configuration for n output columns on so many SMs: that of least `cycles`."""
    return _choose(bucket(rows), n, k, sms, is_gated, split_k)


@cached
def _choose(rows: int, n: int, k: int, sms: int, is_gated: bool, split_k: bool) -> Config:
    return min(configs(rows, k, sms, split_k=split_k), key=lambda config: cycles(config, rows, n, k, sms, is_gated=is_gated))


def configs(rows: int, k: int, sms: int, *, split_k: bool) -> list[Config]:
    """The candidates; the ring is as deep as fits."""
    found = []
    for block_m, stripes, parts in itertools.product((64, 128, 256), (1, 2, 4), (1, 2, 4, 8) if split_k else (1,)):
        is_held = block_m * stripes <= MAX_SUMS and block_m < 2 * rows
        if is_held and (parts == 1 or k >= parts * MIN_STEPS * BLOCK):
            stages = min(SHARED_BYTES // stage_bytes(block_m, stripes), MAX_STAGES)
            found.append(Config(block_m, stripes, stages, sms, parts))
    return found


def cycles(config: Config, rows: int, n: int, k: int, sms: int, *, is_gated: bool) -> float:
    """Approximate clocks of the GPU for a product: estimated from the work of each unit on a chunk of K."""
    block_m, stripes, _, programs, parts = config
    row_tiles, columns = triton.cdiv(rows, block_m), 2 * n if is_gated else n
    items = row_tiles * triton.cdiv(columns, 2 * stripes * STRIPE.value) * parts
    busy = min(items, programs)
    one = block_m * 4  # clocks of the tensor cores, for a stripe
    copied = stage_bytes(block_m, stripes) * max(busy / sms / L2_BYTES, 1 / SM_BYTES)
    streamed = stripes * STRIPE.value * BLOCK * busy / min(row_tiles, programs) / sms / MEMORY_BYTES
    step = max(2 * stripes * (one + TURN), stripes * (one + MAKING), copied, streamed)
    steps = triton.cdiv(k, BLOCK * parts)
    moved = 8 * parts * rows * n / sms / SM_BYTES if parts > 1 else 0.0  # float32, written and read
    return triton.cdiv(items, programs) * (steps * step + AROUND + stripes * one * 2) + moved


def launch(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel, for operands that it `supports`; out [M, N], or float32 [S, M, N] if config has S > 1 parts.

    Raises ValueError if shapes or types do not fit.
    """
    (rows, k), n, columns = x.shape, out.shape[-1], weight.outputs
    shape = (rows, n) if config.parts == 1 else (config.parts, rows, n)
    dtype = x.dtype if config.parts == 1 else torch.float32
    if k != weight.inputs or columns != (2 * n if is_gated else n) or out.shape != shape or rows < 1:
        raise ValueError(f"int4_wide: x {x.shape}, weight [{columns}, {weight.inputs}], out {out.shape} do not fit")
    if x.dtype not in MAGIC or out.dtype != dtype or out.stride(-1) != 1 or (is_gated and config.parts > 1):
        raise ValueError(f"int4_wide: {x.dtype} to {out.dtype} is not for this kernel")
    mode = LATE if pdl else PLAIN  # EARLY is for small programs
    words, width = weight.words.shape[1], STRIPE.value // 2 if is_gated else STRIPE.value
    row_tiles = triton.cdiv(rows, config.block_m)
    items = row_tiles * triton.cdiv(n, 2 * config.stripes * width) * config.parts
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _kernel[(min(items, config.programs),)](
        tma.lines(x, rows, k, x.stride(0), (config.block_m, BLOCK)),
        tma.lines(weight.words, columns, words, weight.words.stride(0), (width, BLOCK_WORDS)),
        weight.scales, zeros, weight.scales if bias is None else bias, out, rows, n, out.stride(-2),
        out.stride(0) if config.parts > 1 else 0, MAGIC[x.dtype], row_tiles, items, words // BLOCK_WORDS, weight.group,
        triton.cdiv(words, BLOCK_WORDS * config.parts), config.block_m, config.stripes, config.stages,
        weight.zeros is not None, bias is not None, is_gated, mode, num_warps=4, maxnreg=MAX_REGISTERS,
        **launch_options(mode),
    )  # fmt: skip


def linear(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor | None, *, is_gated: bool, pdl: int
) -> torch.Tensor:
    """x @ W^T + bias, gated if is_gated; in `out` if given."""
    rows, n = len(x), weight.outputs // 2 if is_gated else weight.outputs
    out = x.new_empty((rows, n)) if out is None else out
    config = choose(rows, n, weight.inputs, hopper.num_sms(x.device), is_gated=is_gated)
    launch(x, weight, bias, out, config, is_gated=is_gated, pdl=pdl)
    return out


def _choose_split_k(x: torch.Tensor, weight: Int4Weight) -> Config:
    return choose(len(x), weight.outputs, weight.inputs, hopper.num_sms(x.device), split_k=True)


def num_splits(x: torch.Tensor, weight: Int4Weight) -> int:
    """Splits over K of `linear_split_k`; 1 if the product has enough tiles by itself."""
    return _choose_split_k(x, weight).parts


def linear_split_k(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, *, pdl: int) -> torch.Tensor:
    """Float32 [S, M, N], partial sums over K of x @ W^T + bias, S = `num_splits` > 1."""
    config = _choose_split_k(x, weight)
    out = torch.empty(config.parts, len(x), weight.outputs, dtype=torch.float32, device=x.device)
    launch(x, weight, bias, out, config, pdl=pdl)
    return out
