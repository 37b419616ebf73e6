"""Products of one row with 4-bit weights in groups of 128 for Hopper (Gluon): integers on the tensor cores, so that bytes bind.

Operands and results as in `int4_hopper`. At the memory's full rate an SM has 3.4 issue slots a weight. A mask makes four bytes
q of a word of 8 weights, and another, with a flip of the highest bits, four bytes 16 (q - 8): two instructions, where 16-bit
numbers take seven. x is converted to integers, too, of three digits of 8 bits (`int4_digits`), which take three of mma's eight
columns, where a row of 16-bit numbers takes one and leaves seven idle. Sums of a group are exact.

A program has one tile of W's rows, its scales and zero points in shared memory before the row is ready, a ring of W's words,
and the digits of the row, which it computes itself. Zero points need sums of x: (q - z) x in a group is q x less z times the
sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from quire.kernels.elementwise import activation
from quire.kernels.linear.int4_digits import DIGITS, plus, store_row
from quire.kernels.linear.int4_operands import rows_of_warps
from quire.kernels.linear.int4_weight import BLOCK, BLOCK_WORDS, Int4Weight
from quire.kernels.triton_support import dependent_launch, hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached

BYTES_OF_BLOCK = gl.constexpr(BLOCK // 2)  # of a row of W in a group
COLUMNS = gl.constexpr(8)  # of mma
LITTLE = 1 << 23  # elements of W
MAX_K = 14336  # of a row that a program holds beside two stages
MAX_PARTS = 4
MIN_PART = 1024  # of a split of K
MIN_STAGES = 2

_copy = tma.copy
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    warps: int  # of a program: a tile is 16 rows of W for each
    blocks: int  # groups of 128 of K in a stage
    stages: int
    parts: int = 1  # splits of K, a program each
    split: int = 1  # ranges of a split, two only if not gated


@gluon.constexpr_function
def _scales_of_warps(warps: int, far: int) -> list[list[int]]:
    return [[far << i] for i in range(warps.bit_length() - 1)]


@gluon.jit
def _load_weights(
    w_desc, buffer, ready, stage, tile, at, N, far, BYTES: gl.constexpr, TILE: gl.constexpr, TWO: gl.constexpr
):  # fmt: skip
    """Start the copy of a stage: TILE of W's rows, or half as many, and below those the rows N further down, at K + `far`."""
    mbarrier.expect(ready.index(stage), BYTES)
    if TWO:
        HALF: gl.constexpr = TILE // 2
        _copy(w_desc, [tile * HALF, at], ready.index(stage), buffer.index(stage).slice(0, HALF))
        _copy(w_desc, [N + tile * HALF, at + far], ready.index(stage), buffer.index(stage).slice(HALF, HALF))
    else:
        _copy(w_desc, [tile * TILE, at], ready.index(stage), buffer.index(stage))


@gluon.jit
def _scales_of(s_ptr, z_ptr, row, total, live, block, limit, ZEROS: gl.constexpr):
    """Scales and zero points of rows of W [1, n] and groups [k, 1]."""
    mask = live & (block < limit)
    scales = gl.load(s_ptr + block * total + row, mask, other=0.0)
    return scales, gl.load(z_ptr + block * total + row, mask, other=0) if ZEROS else 8


@gluon.jit
def _packed(scales, ZEROS: gl.constexpr):
    """Float32 bits of scales, which end in zeros, since scales have 16 bits, with the zero points in these."""
    bits = scales[0].to(gl.float32).to(gl.int32, bitcast=True)
    return bits | (scales[1].to(gl.int32) if ZEROS else scales[1])


@gluon.jit
def _add_block(acc, w, x_low, x_high, sums, s, layout: gl.constexpr):
    """acc [TILE, 8] plus a group's products. w [TILE, 64] bytes, an operand; s [TILE] from `_packed`, sums: x's."""
    x_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    column: gl.constexpr = gl.SliceLayout(0, layout)
    low = gl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4)
    ASM: gl.constexpr = "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;"  # (a & b) ^ c
    high = gl.inline_asm_elementwise(ASM, "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    less = sums.index(0)._reinterpret(gl.int32, [8], line).load(column)[None, :]
    more = sums.index(1)._reinterpret(gl.int32, [8], line).load(column)[None, :]
    step = sums.index(2)._reinterpret(gl.int32, [8], line).load(column).to(gl.float32, bitcast=True)[None, :]
    offset = more + (s & 31)[:, None] * less
    upper = mma_v2(high, x_high.permute((1, 0)).load(x_layout), offset)
    lower = mma_v2(low, x_low.permute((1, 0)).load(x_layout), gl.zeros(acc.shape, gl.int32, layout))
    scale = (s & -32).to(gl.float32, bitcast=True)[:, None] * step
    return acc + ((lower << 4) + upper).to(gl.float32) * scale


@gluon.jit
def _kernel(
    x_ptr, w_desc, s_ptr, z_ptr, bias_ptr, out_ptr, N, K,
    K_BLOCKS: gl.constexpr, K_STEPS: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (p, s): tile p of the output, split s of K, which is SPLIT ranges of K_STEPS stages.

    Two ranges are multiplied side by side, by half of the warps each, and share mma's columns.
    """
    TILE: gl.constexpr = 16 * WARPS  # rows of W
    TWO: gl.constexpr = GATED or SPLIT == 2
    WIDTH: gl.constexpr = TILE // 2 if TWO else TILE  # output columns of a tile
    WIDE: gl.constexpr = BYTES_OF_BLOCK * BLOCKS  # bytes of a row in a stage
    BYTES: gl.constexpr = TILE * WIDE
    KB: gl.constexpr = CHUNK * CHUNKS
    pairs_layout: gl.constexpr = gl.BlockedLayout([CHUNK // WARPS, 1], [1, 32], [WARPS, 1], [1, 0])
    entry: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_buffer = gl.allocate_shared_memory(gl.int8, [STAGES, TILE, WIDE], w_desc.layout)
    x_buffer = gl.allocate_shared_memory(gl.int32, [KB * 2 + 1, DIGITS, 16], entry)  # mma reads 8 rows, half of them the next's
    sums_buffer = gl.allocate_shared_memory(gl.int32, [KB, 32], line)
    s_buffer = gl.allocate_shared_memory(gl.int32, [KB // SPLIT, TILE], line)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    tile = gl.program_id(0)
    part = gl.program_id(1)
    STRETCH: gl.constexpr = K_STEPS * BLOCKS
    first_block = part * (SPLIT * STRETCH)
    first = first_block * BYTES_OF_BLOCK
    down = N if GATED else 0
    FAR: gl.constexpr = STRETCH if SPLIT == 2 else 0
    for i in gl.static_range(STAGES):
        _load_weights(w_desc, w_buffer, ready, i, tile, first + i * WIDE, down, FAR * BYTES_OF_BLOCK, BYTES, TILE, TWO)

    # Constants, also before the wait.
    s_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    s_block = first_block + gl.arange(0, KB // SPLIT, layout=gl.SliceLayout(1, s_layout))[:, None]
    column = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, s_layout))[None, :]
    total = N * 2 if GATED else N  # rows of W
    scales = _scales_of(s_ptr, z_ptr, column, total, column < N, s_block, K_BLOCKS, ZEROS)
    if TWO:
        more_scales = _scales_of(s_ptr, z_ptr, column + down, total, column < N, s_block + FAR, K_BLOCKS, ZEROS)
    _wait_for_previous(PDL)
    pairs = ()  # type: tuple[tuple[gl.tensor, gl.tensor], ...]
    for i in gl.static_range(CHUNKS):
        at_line = i * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, pairs_layout))[:, None]
        block = first_block + at_line // SPLIT + at_line % SPLIT * STRETCH
        pair = block * 64 + gl.arange(0, 32, layout=gl.SliceLayout(0, pairs_layout))[None, :]
        first_pair = x_ptr.to(gl.pointer_type(gl.int32)) + pair
        low, high = gl.load(first_pair, pair * 2 < K, other=0), gl.load(first_pair + 32, pair * 2 + 64 < K, other=0)
        pairs = pairs + ((low, high),)  # type: ignore[assignment]
    # Not before the loads of the row.
    all_scales = s_buffer.index(0)._reinterpret(gl.int32, [KB // SPLIT, TILE], plain)
    if TWO:
        all_scales.slice(0, WIDTH, dim=1).store(_packed(scales, ZEROS))
        all_scales.slice(WIDTH, WIDTH, dim=1).store(_packed(more_scales, ZEROS))
    else:
        all_scales.store(_packed(scales, ZEROS))
    for i in gl.static_range(CHUNKS):
        store_row(pairs[i], x_buffer, sums_buffer, i * CHUNK, x_ptr.dtype.element_ty, CHUNK, SPLIT, pairs_layout)
    tl.debug_barrier()

    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    near: gl.constexpr = 8 if not GATED else 8 * WARPS  # from a thread's first row to its second
    far: gl.constexpr = 16 if not GATED else 8  # from warp to warp
    w_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [near, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], rows_of_warps(WARPS, far), [],
        [TILE, BYTES_OF_BLOCK],
    )  # fmt: skip
    rows_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[near]], [[0], [0], [1], [2], [4]], _scales_of_warps(WARPS, far), [], [TILE]
    )
    digits: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    acc = gl.zeros([TILE, COLUMNS], gl.float32, layout)
    for step in range(K_STEPS):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        for i in gl.static_range(BLOCKS):
            w = w_buffer.index(stage).slice(i * BYTES_OF_BLOCK, BYTES_OF_BLOCK, dim=1).load(w_layout)
            s = s_buffer.index(step * BLOCKS + i).load(rows_layout)
            if GATED:
                w = w.reshape([2, WARPS, 8, BYTES_OF_BLOCK]).permute((1, 0, 2, 3)).reshape([TILE, BYTES_OF_BLOCK])
                s = s.reshape([2, WARPS, 8]).permute((1, 0, 2)).reshape([TILE])
            w = gl.convert_layout(w, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
            s = gl.convert_layout(s, gl.SliceLayout(1, layout), assert_trivial=True)
            at = (step * BLOCKS + i) * (2 * SPLIT)
            x_low = x_buffer.index(at)._reinterpret(gl.int8, [COLUMNS, BYTES_OF_BLOCK], digits)
            x_high = x_buffer.index(at + SPLIT)._reinterpret(gl.int8, [COLUMNS, BYTES_OF_BLOCK], digits)
            sums = sums_buffer.index((step * BLOCKS + i) * SPLIT)._reinterpret(gl.int32, [8, 4 * SPLIT], line)
            acc = _add_block(acc, w, x_low, x_high, sums, s, layout)
        tl.debug_barrier()  # all warps have read the stage
        ahead = step + STAGES
        if ahead < K_STEPS:
            at = first + ahead * WIDE
            _load_weights(w_desc, w_buffer, ready, stage, tile, at, down, FAR * BYTES_OF_BLOCK, BYTES, TILE, TWO)

    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    stretch = row // WIDTH if SPLIT == 2 else row * 0
    own = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :] // 4 == stretch[:, None]  # others mean nothing
    values = gl.reduce(gl.where(own, acc, 0.0), 1, plus)
    if SPLIT == 2:
        values = gl.reduce(values.reshape([2, WIDTH]), 0, plus)
        row = gl.arange(0, WIDTH, layout=values.type.layout)
    if BIAS:
        if GATED:
            at_row = tile * WIDTH + row // 16 * 8 + row % 8
            live = at_row < N
            at_row += row // 8 % 2 * N
        else:
            at_row = tile * WIDTH + row
            live = at_row < N
        values += gl.load(bias_ptr + at_row, live & (part == 0), other=0.0).to(gl.float32)
    if GATED:
        gate, up = gl.split(values.reshape([WARPS, 2, 8]).permute((0, 2, 1)))
        values = _gated(gate, up, out_ptr.dtype.element_ty).reshape([WIDTH])
    columns = tile * WIDTH + gl.arange(0, WIDTH, layout=values.type.layout)
    gl.store(out_ptr + part * N + columns, values.to(out_ptr.dtype.element_ty), columns < N)


def supports(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel is for this product: one 16-bit row, a large W, groups of 128, scales of 16 bits, W as TMA needs it.

    For a small W, converting the row to integers costs more than it saves.
    """
    is_one = len(x) == 1 and x.dtype.itemsize == 2 and x.stride(1) == 1 and x.data_ptr() % 4 == 0
    is_fit = weight.group == BLOCK and weight.scales.dtype.itemsize == 2 and weight.outputs * weight.inputs > LITTLE
    return is_one and is_fit and hopper.available(x.device) and hopper.can_copy(weight.words) and weight.inputs <= MAX_K


def shared_bytes(config: Config, k: int) -> int:
    """Approximate shared memory of a program."""
    chunk, chunks = _chunks(config, k)
    tile, lines = 16 * config.warps, chunk * chunks
    return tile * BLOCK // 2 * config.blocks * config.stages + lines * (512 + 128 + 4 * tile // config.split) + 1024


def max_stages(config: Config, k: int, sharing: int) -> int:
    """Stages that fit with so many programs an SM."""
    room = hopper.SHARED_BYTES // sharing - 1024 - shared_bytes(config._replace(stages=0), k)
    return max(1, min(room // (16 * config.warps * BLOCK // 2 * config.blocks), _steps(config, k)))


def _steps(config: Config, k: int) -> int:
    return triton.cdiv(k, BLOCK * config.blocks * config.parts * config.split)


def _chunks(config: Config, k: int) -> tuple[int, int]:
    """Lines of x converted to digits at once, and how often."""
    lines = _steps(config, k) * config.blocks * config.split
    chunk = config.warps * min(4, triton.next_power_of_2(triton.cdiv(lines, config.warps)))
    return chunk, triton.next_power_of_2(triton.cdiv(lines, chunk))


@cached
def choose(n: int, k: int, sms: int, *, is_gated: bool = False, split_k: bool = False) -> Config:
    """The configuration for n output columns on so many SMs, as measured for an 8B's layers on an H200.

    A program's warps share the work on the row, so there are eight; with at most two splits and no gate, each half takes half
    of a split's K. Four groups a stage are faster than two if a program has K for several such stages.
    """
    tiles, parts = triton.cdiv(n, 64), 1
    while split_k and parts < MAX_PARTS and tiles * parts <= sms and k >= parts * 2 * MIN_PART:
        parts *= 2
    config = Config(8, 4 if k >= parts * 2048 else 2, 1, parts, 1 if is_gated or parts > 2 else 2)
    stages = max_stages(config, k, 1 if tiles <= sms else 2)
    return config._replace(stages=stages if stages >= MIN_STAGES else max_stages(config, k, 1))


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
    """Run the kernel, for operands that it `supports`; out [1, N], or float32 [S, 1, N] if config has S > 1 parts.

    Raises ValueError if shapes or types do not fit.
    """
    (rows, k), n, columns = x.shape, out.shape[-1], weight.outputs
    shape = (rows, n) if config.parts == 1 else (config.parts, rows, n)
    dtype = x.dtype if config.parts == 1 else torch.float32
    if k != weight.inputs or columns != (2 * n if is_gated else n) or out.shape != shape or rows != 1:
        raise ValueError(f"int4_row: x {x.shape}, weight [{columns}, {weight.inputs}], out {out.shape} do not fit")
    if out.dtype != dtype or not out.is_contiguous() or (is_gated and config.parts * config.split > 1) or weight.group != BLOCK:
        raise ValueError(f"int4_row: {x.dtype} to {out.dtype}, groups of {weight.group}, are not for this kernel")
    tile, words = 16 * config.warps, weight.words.shape[1]
    width = tile // 2 if is_gated or config.split == 2 else tile
    data = weight.words.view(torch.int8)
    chunk, chunks = _chunks(config, k)
    steps = _steps(config, k)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _kernel[(triton.cdiv(n, width), config.parts)](
        x, tma.lines(data, columns, data.shape[1], data.stride(0), (width, BLOCK // 2 * config.blocks)),
        weight.scales, zeros, weight.scales if bias is None else bias, out, n, k,
        words // BLOCK_WORDS, steps, config.warps, config.blocks, min(config.stages, steps), chunk, chunks, config.split,
        weight.zeros is not None, bias is not None, is_gated, pdl, num_warps=config.warps, **launch_options(pdl),
    )  # fmt: skip


def linear(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, out: torch.Tensor | None, *, is_gated: bool, pdl: int
) -> torch.Tensor:
    """x @ W^T + bias, gated if is_gated; in `out` if given."""
    n = weight.outputs // 2 if is_gated else weight.outputs
    out = x.new_empty((1, n)) if out is None else out
    config = choose(n, weight.inputs, hopper.num_sms(x.device), is_gated=is_gated)
    launch(x, weight, bias, out, config, is_gated=is_gated, pdl=min(pdl, LATE))
    return out


def linear_split_k(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, *, pdl: int) -> torch.Tensor:
    """Float32 [S, 1, N], partial sums over K of x @ W^T + bias; y [1, N] itself if the product has enough programs."""
    config = choose(weight.outputs, weight.inputs, hopper.num_sms(x.device), split_k=True)
    if config.parts == 1:
        return linear(x, weight, bias, None, is_gated=False, pdl=pdl)
    out = torch.empty(config.parts, 1, weight.outputs, dtype=torch.float32, device=x.device)
    launch(x, weight, bias, out, config, pdl=min(pdl, LATE))
    return out
