"""Products of 4-bit weights with 1 to 64 rows for Hopper (Gluon): `linear_hopper`'s ring, and mma on numbers made in registers.

Operands and results as in `int4`, 16-bit; split-K partial sums as in `split_linear`: float32 [S, M, N], summing to y.

A stage of the ring is the words of a tile of W and the rows of x, some chunks of 128 of K of each. W's words are loaded where a
thread needs them, so that a shift and a mask make two numbers of a product's operands. Up to 16 rows use mma, on 128 + q, and
the excess is subtracted from the sums; more compute q - z and use wgmma, with x from shared memory and W from registers. It is
waited for before anything else is computed, since an asynchronous product reads its registers, which ptxas may reuse too early.
A group is summed by itself and multiplied by its scales in float32; scales are loaded a stage ahead. If gated, a thread has a
row of the gate and the same row of up: rows 8 apart in the product's tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.elementwise import activation
from quire.kernels.linear.int4_operands import (
    BLOCK_K,
    MAGIC,
    WORDS,
    halves,
    joined,
    less_zeros,
    load_words,
    numbers,
    rows_of,
    scales_of,
    scales_of_block,
)
from quire.kernels.linear.int4_weight import BLOCK, BLOCK_WORDS, Int4Weight
from quire.kernels.triton_support import dependent_launch, hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached

FEW = gl.constexpr(16)  # rows of x up to which mma is used; more use wgmma
MAX_ROWS = hopper.MAX_ROWS
SHARED_BYTES = 220 * 1024  # of an SM, for rings
TILE_ROWS = 64  # rows of W: with 128, half as many programs wait for one another, and twice as long
MIN_PART = 512  # of a split of K
LONG_PART = 1024  # for stages of four chunks
MAX_PARTS = 8
MAX_STAGES = 12  # the first copies are unrolled

_copy = tma.copy
_copy_tile = tma.copy_tile
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    warps: int  # of a program, beyond 16 rows 4 or 8; a tile is 16 rows of W for each
    blocks: int  # chunks of 128 of K in a stage
    stages: int
    programs: int  # at most, of all splits together
    parts: int = 1  # splits of K


@gluon.jit
def _as_operand(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Pairs [TILE, 16] as mma's first operand [TILE, 32], without a move."""
    low, high = halves(pairs, dtype)
    both = gl.join(low, high).reshape([low.shape[0], 2 * low.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _add_few(
    acc, words, x, scales, zeros, magic, FIRST: gl.constexpr,
    SCALES: gl.constexpr, ZEROS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """acc [TILE, BLOCK_M] plus a chunk's products, by mma; x [BLOCK_M, 128] in shared memory, scales and zeros from FIRST on.

    bfloat16 multiplies 128 + q, and the excess, (128 + z) times the sum of x, is subtracted from each group: eight more mma of
    ones for 32 differences less. Sums alternate between two accumulators: one mma waits for the other some 30 clocks.
    """
    dtype: gl.constexpr = x.dtype
    LESS: gl.constexpr = dtype == gl.bfloat16
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    ones = gl.full([acc.shape[0], 32], 1.0, dtype, w_layout)
    none = gl.zeros(acc.shape, gl.float32, layout)
    sums = (none, none)
    x_sums = (none, none)
    for t in gl.static_range(4):
        few = x.slice(32 * t, 32, dim=1).permute((1, 0)).load(x_layout)
        if LESS:
            pairs = numbers(words, magic, t)
            x_sums = (x_sums[1], mma_v2(ones, few, x_sums[0]))
        else:
            pairs = less_zeros(words, magic, zeros[FIRST + t * SCALES // 4], t, dtype, ZEROS)
        sums = (sums[1], mma_v2(_as_operand(pairs, dtype, w_layout), few, sums[0]))
        if (t + 1) * SCALES % 4 == 0:
            total = sums[0] + sums[1]
            if LESS and ZEROS:
                bits = (zeros[FIRST + t * SCALES // 4].to(gl.int32) << 16) | 0x43000000
                total -= (x_sums[0] + x_sums[1]) * bits.to(gl.float32, bitcast=True)[:, None]  # 128 + z
            elif LESS:
                total -= (x_sums[0] + x_sums[1]) * 136.0
            acc += total * scales[FIRST + t * SCALES // 4].to(gl.float32)[:, None]
            sums = (none, none)
            x_sums = (none, none)
    return acc


@gluon.jit
def _add_many(
    acc, words, x, scales, zeros, magic, FIRST: gl.constexpr,
    SCALES: gl.constexpr, ZEROS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As `_add_few` by wgmma, which reads x from shared memory and W's numbers from registers: each is waited for at once."""
    dtype: gl.constexpr = x.dtype
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    SPAN: gl.constexpr = 4 // SCALES  # stretches of a group
    pairs = (
        halves(less_zeros(words, magic, zeros[FIRST], 0, dtype, ZEROS), dtype),
        halves(less_zeros(words, magic, zeros[FIRST + SCALES // 4], 1, dtype, ZEROS), dtype),
        halves(less_zeros(words, magic, zeros[FIRST + SCALES // 2], 2, dtype, ZEROS), dtype),
        halves(less_zeros(words, magic, zeros[FIRST + 3 * SCALES // 4], 3, dtype, ZEROS), dtype),
    )
    for i in gl.static_range(SCALES):
        operand = joined(pairs, i, SPAN, w_layout)
        x_part = x.slice(i * 32 * SPAN, 32 * SPAN, dim=1).permute((1, 0))
        sums = warpgroup_mma(operand, x_part, gl.zeros(acc.shape, gl.float32, layout), use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        acc += sums * scales[FIRST + i].to(gl.float32)[:, None]
    return acc


@gluon.jit(do_not_specialize=["M", "part_stride", "magic"])
def _kernel(
    x_desc, w_desc, s_ptr, z_ptr, bias_ptr, out_ptr, M, N, out_stride, part_stride, magic,
    K_BLOCKS: gl.constexpr, GROUP: gl.constexpr, K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (p, s): tiles p, p + programs, ... of the output, split s of K, which is K_STEPS stages long."""
    TILE: gl.constexpr = 16 * WARPS  # rows of W
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE  # output columns of a tile
    BYTES: gl.constexpr = (TILE * WORDS * 4 + BLOCK_M * BLOCK_K * 2) * BLOCKS
    SCALES: gl.constexpr = scales_of_block(GROUP)
    w_buffer = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS * BLOCKS], w_desc.layout)
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K * BLOCKS], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    part = gl.program_id(1)
    first_block = part * (K_STEPS * BLOCKS)
    tiles = gl.cdiv(N, WIDTH)
    steps = gl.cdiv(tiles - program, programs) * K_STEPS
    for i in gl.static_range(STAGES):
        if i < steps:
            word = (first_block + i % K_STEPS * BLOCKS) * WORDS
            mbarrier.expect(ready.index(i), BYTES)
            tile = program + i // K_STEPS * programs
            _copy_tile(w_desc, w_buffer.index(i), ready.index(i), tile, word, N, TILE, GATED)
    MANY: gl.constexpr = BLOCK_M > FEW
    layout: gl.constexpr = gl.NVMMADistributedLayout([3 if MANY else 2, 0], [WARPS, 1], [16, BLOCK_M, 16] if MANY else [16, 8])
    total = N * 2 if GATED else N  # rows of W
    w_rows: gl.constexpr = gl.SliceLayout(1, layout)
    rows, live = rows_of(program, N, w_rows, TILE, GATED)
    scales, zeros = scales_of(s_ptr, z_ptr, rows, total, live, first_block, K_BLOCKS, BLOCKS, GROUP, ZEROS)
    _wait_for_previous(PDL)
    for i in gl.static_range(STAGES):
        if i < steps:
            _copy(x_desc, [0, (first_block + i % K_STEPS * BLOCKS) * BLOCK_K], ready.index(i), x_buffer.index(i))

    step = 0
    for tile in range(program, tiles, programs):
        acc = gl.zeros([TILE, BLOCK_M], gl.float32, layout)
        for _ in range(K_STEPS):
            # Loaded a stage ahead, and before the barrier: after it the compiler would delay the loads until their use.
            rows, live = rows_of(program + (step + 1) // K_STEPS * programs, N, w_rows, TILE, GATED)
            block = first_block + (step + 1) % K_STEPS * BLOCKS
            ahead_scales, ahead_zeros = scales_of(s_ptr, z_ptr, rows, total, live, block, K_BLOCKS, BLOCKS, GROUP, ZEROS)
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            for i in gl.static_range(BLOCKS):
                words = load_words(w_buffer.index(stage), i, WARPS, GATED)
                x = x_buffer.index(stage).slice(i * BLOCK_K, BLOCK_K, dim=1)
                if MANY:
                    acc = _add_many(acc, words, x, scales, zeros, magic, i * SCALES, SCALES, ZEROS, layout)
                else:
                    acc = _add_few(acc, words, x, scales, zeros, magic, i * SCALES, SCALES, ZEROS, layout)
            scales, zeros = ahead_scales, ahead_zeros
            tl.debug_barrier()  # all warps have read the stage
            ahead = step + STAGES
            if ahead < steps:
                block = first_block + ahead % K_STEPS * BLOCKS
                ahead_tile = program + ahead // K_STEPS * programs
                mbarrier.expect(ready.index(stage), BYTES)
                _copy_tile(w_desc, w_buffer.index(stage), ready.index(stage), ahead_tile, block * WORDS, N, TILE, GATED)
                _copy(x_desc, [0, block * BLOCK_K], ready.index(stage), x_buffer.index(stage))
            step += 1

        if BIAS:
            rows, live = rows_of(tile, N, w_rows, TILE, GATED)
            acc += gl.load(bias_ptr + rows, live & (part == 0), other=0.0).to(gl.float32)[:, None]
        values = acc
        if GATED:
            gate, up = gl.split(acc.reshape([WARPS, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
            values = _gated(gate, up, out_ptr.dtype.element_ty).reshape([WIDTH, BLOCK_M])
        out_layout: gl.constexpr = values.type.layout
        columns = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, out_layout))
        lines = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
        start = out_ptr + part.to(gl.int64) * part_stride
        mask = (columns < N)[:, None] & (lines < M)[None, :]
        result = values.to(out_ptr.dtype.element_ty)
        gl.store(start + lines.to(gl.int64)[None, :] * out_stride + columns[:, None], result, mask)


def block_rows(rows: int) -> int:
    """Rows that x is padded to: mma takes 8."""
    return max(8, triton.next_power_of_2(rows))


def supports(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel can compute this product: 16-bit, 1 to 64 rows, aligned as TMA needs it; K whole chunks or padded."""
    if not 1 <= len(x) <= MAX_ROWS or x.dtype not in MAGIC or not hopper.available(x.device):
        return False
    return hopper.can_copy(x) and hopper.can_copy(weight.words)


@cached
def choose(rows: int, n: int, k: int, sms: int, *, is_gated: bool = False, split_k: bool = False) -> Config:
    """The configuration for n output columns on so many SMs: the fastest for Llama-3.1-8B's products at 1, 16 and 64 rows.

    Up to 16 rows a program mostly waits for single instructions: as many an SM as there are tiles for, up to four.
    """
    block_m, tiles = block_rows(rows), triton.cdiv(n, TILE_ROWS // 2 if is_gated else TILE_ROWS)
    parts = 1
    while split_k and parts < MAX_PARTS and tiles * parts * 2 <= sms * 2 and k >= parts * 2 * MIN_PART:
        parts *= 2
    is_few, are_many = block_m <= FEW.value, tiles * parts > sms * 2
    sharing = 4 if is_few and are_many else 2
    blocks = 4 if is_few and not are_many and k >= parts * LONG_PART else 2
    steps = triton.cdiv(k, BLOCK * blocks * parts) * triton.cdiv(tiles * parts, sms * sharing)
    fitting = SHARED_BYTES // sharing // ((TILE_ROWS * BLOCK // 2 + block_m * BLOCK * 2) * blocks)
    return Config(TILE_ROWS // 16, blocks, min(fitting, MAX_STAGES, steps), sms * sharing, parts)


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
    if k != weight.inputs or columns != (2 * n if is_gated else n) or out.shape != shape or not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"int4_hopper: x {x.shape}, weight [{columns}, {weight.inputs}], out {out.shape} do not fit")
    if x.dtype not in MAGIC or out.dtype != dtype or out.stride(-1) != 1 or (is_gated and config.parts > 1):
        raise ValueError(f"int4_hopper: {x.dtype} to {out.dtype} is not for this kernel")
    mode = LATE if pdl else PLAIN  # EARLY is for small programs
    tile, block_m, words = 16 * config.warps, block_rows(rows), weight.words.shape[1]
    width = tile // 2 if is_gated else tile
    programs = min(triton.cdiv(n, width), max(config.programs // config.parts, 1))
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _kernel[(programs, config.parts)](
        tma.lines(x, rows, k, x.stride(0), (block_m, BLOCK * config.blocks)),
        tma.lines(weight.words, columns, words, weight.words.stride(0), (width, BLOCK_WORDS * config.blocks)),
        weight.scales, zeros, weight.scales if bias is None else bias, out, rows, n, out.stride(-2),
        out.stride(0) if config.parts > 1 else 0, MAGIC[x.dtype], words // BLOCK_WORDS, weight.group,
        triton.cdiv(words, BLOCK_WORDS * config.blocks * config.parts), block_m, config.warps, config.blocks, config.stages,
        weight.zeros is not None, bias is not None, is_gated, mode, num_warps=config.warps, **launch_options(mode),
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
