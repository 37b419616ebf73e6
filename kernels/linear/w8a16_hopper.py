"""Products of 8-bit weights with 1 to 64 16-bit rows for Hopper (Gluon): `linear_hopper`'s ring, with numbers made in
registers.

Operands and results as in `w8a16`; split-K partial sums as in `split_linear`: float32 [S, M, N], summing to y.

A stage of the ring is a tile of W and the rows of x, some chunks of 128 of K of each. W's bytes are loaded in the order of the
product's first operand, and become 16-bit numbers in a few integer instructions: an int8 as a difference from 2^23 + 128, an
e4m3 by its bits in a bfloat16's places, times 2^120. Up to 16 rows use mma, which is synchronous; more use wgmma, with x from
shared memory and W from registers. It is waited for before anything else is computed, since an asynchronous product reads its
registers, which ptxas may reuse too early. A group is summed by itself and multiplied by its scales in float32; scales are
loaded a chunk ahead. If gated, a thread has a row of the gate and the same row of up: rows 8 apart in the tile.
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
from quire.kernels.linear.int4_operands import rows_of
from quire.kernels.linear.scaled import BLOCK
from quire.kernels.linear.w8a16_weight import Weight8
from quire.kernels.triton_support import dependent_launch, hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached

BLOCK_K = gl.constexpr(BLOCK)
FEW = gl.constexpr(16)  # rows of x up to which mma is used; more use wgmma
MAX_ROWS = hopper.MAX_ROWS
SHARED_BYTES = 220 * 1024  # of an SM, for rings
MIN_STEPS = 4  # of a split of K
MAX_PARTS = 8
MAX_STAGES = 12  # the first copies are unrolled

# Four bytes, int8, to bfloat16: each with 128 added is the low byte of 2^23 in float32.
_FROM_INT8 = gl.constexpr("""{
.reg .b32 u, a, b, c, d;
xor.b32 u, $2, 0x80808080;
prmt.b32 a, u, 0x4B000000, 0x7550;
prmt.b32 b, u, 0x4B000000, 0x7551;
prmt.b32 c, u, 0x4B000000, 0x7552;
prmt.b32 d, u, 0x4B000000, 0x7553;
sub.rn.f32 a, a, 0f4B000080;
sub.rn.f32 b, b, 0f4B000080;
sub.rn.f32 c, c, 0f4B000080;
sub.rn.f32 d, d, 0f4B000080;
cvt.rn.bf16x2.f32 $0, b, a;
cvt.rn.bf16x2.f32 $1, d, c;
}""")
# Four bytes, e4m3, to bfloat16: exponent and mantissa in its places are 2^-120 of the number, subnormals too.
_FROM_E4M3 = gl.constexpr("""{
.reg .b32 a, b, s, t, p;
mov.b32 p, 0x7B807B80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 4;
shr.u32 t, b, 4;
and.b32 s, s, 0x07F007F0;
and.b32 t, t, 0x07F007F0;
lop3.b32 s, a, 0x80008000, s, 0xEA;
lop3.b32 t, b, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $0, s, p;
mul.rn.bf16x2 $1, t, p;
}""")

_copy = tma.copy
_copy_tile = tma.copy_tile
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    warps: int  # of a program: 4 or 8; a tile is 16 rows of W for each
    blocks: int  # chunks of 128 of K in a stage
    stages: int
    programs: int  # at most, of all splits together
    parts: int = 1  # splits of K


@gluon.jit
def _numbers(w, zero, dtype: gl.constexpr, ZEROS: gl.constexpr):
    """q - z as dtype, exactly."""
    if ZEROS:
        bits = (w.to(gl.int32) & 0xFF) ^ 0x4B000080
        numbers = (bits.to(gl.float32, bitcast=True) - 8388736.0 - zero).to(dtype)
    elif dtype != gl.bfloat16:
        numbers = w.to(dtype)
    elif w.dtype == gl.int8:
        numbers = gl.inline_asm_elementwise(_FROM_INT8, "=r,=r,r", [w], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = gl.inline_asm_elementwise(_FROM_E4M3, "=r,=r,r", [w], dtype=gl.bfloat16, is_pure=True, pack=4)
    return numbers


@gluon.jit
def _load_numbers(
    buffer, start: gl.constexpr, zero, dtype: gl.constexpr, layout: gl.constexpr,
    SPAN: gl.constexpr, WARPS: gl.constexpr, K_WIDTH: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """W's numbers [TILE, SPAN], k from `start` on, as first operand; gated: 8 rows of the gate and 8 of up alternate."""
    near: gl.constexpr = 8 if not GATED else 8 * WARPS  # from a thread's first row to its second
    far: gl.constexpr = 16 if not GATED else 8  # from warp to warp
    warps: gl.constexpr = [[far, 0], [far * 2, 0]] if WARPS == 4 else [[far, 0], [far * 2, 0], [far * 4, 0]]
    first: gl.constexpr = [[0, 1], [0, 2], [near, 0], [0, 16]] if K_WIDTH == 4 else [[0, 1], [near, 0], [0, 8], [0, 16]]
    more: gl.constexpr = [[0, 32], [0, 64]] if SPAN == 128 else [[0, 32]] if SPAN == 64 else []
    lanes: gl.constexpr = [[0, K_WIDTH], [0, 2 * K_WIDTH], [1, 0], [2, 0], [4, 0]]
    loaded: gl.constexpr = gl.DistributedLinearLayout(first + more, lanes, warps, [], [16 * WARPS, SPAN])
    w = buffer.slice(start, SPAN, dim=1).load(loaded)
    spread = 0.0
    if ZEROS:
        # zero points of the rows in the order of the product's tile
        spread = gl.convert_layout(zero, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    if GATED:
        w = w.reshape([2, WARPS, 8, SPAN]).permute((1, 0, 2, 3)).reshape([16 * WARPS, SPAN])
    w = gl.convert_layout(w, layout, assert_trivial=True)
    return _numbers(w, spread, dtype, ZEROS)


@gluon.jit
def _add_block(
    acc, w, x, scales, zeros, start: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    WARPS: gl.constexpr, MANY: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """acc [TILE, BLOCK_M] plus the products of a chunk of K, from `start` on in a stage's w and x."""
    SPAN: gl.constexpr = BLOCK_K // SCALES
    K_WIDTH: gl.constexpr = 2 if MANY else 4
    dtype: gl.constexpr = x.dtype
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, K_WIDTH)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, layout, K_WIDTH)
    for i in gl.static_range(SCALES):
        numbers = _load_numbers(w, start + i * SPAN, zeros[i], dtype, w_layout, SPAN, WARPS, K_WIDTH, ZEROS, GATED)
        some = x.slice(start + i * SPAN, SPAN, dim=1).permute((1, 0))
        sums = acc if GROUPS == 1 else gl.zeros(acc.shape, gl.float32, layout)
        if MANY:
            sums = warpgroup_mma(numbers, some, sums, use_acc=GROUPS == 1, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
        else:
            sums = mma_v2(numbers, some.load(x_layout), sums)
        acc = sums if GROUPS == 1 else acc + sums * scales[i].to(gl.float32)[:, None]
    return acc


@gluon.jit
def _scales(
    s_ptr, z_ptr, at, live, block, SCALES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr
):  # fmt: skip
    """Scales and zeros of a chunk of K, tuples of SCALES of [TILE]; 0 behind the last group."""
    scales = ()
    zeros = ()
    for i in gl.static_range(SCALES):
        group = (block * BLOCK_K + i * (BLOCK_K // SCALES)) // GROUP if GROUPS > 1 else 0
        mask = live & (group < GROUPS)
        scales = scales + (gl.load(s_ptr + at + group, mask, other=0.0) if GROUPS > 1 else 0,)  # type: ignore[assignment]
        zeros = zeros + (gl.load(z_ptr + at + group, mask, other=0).to(gl.float32) if ZEROS else 0,)  # type: ignore[assignment]
    return scales, zeros


@gluon.jit(do_not_specialize=["M"])
def _kernel(
    x_desc, w_desc, s_ptr, z_ptr, bias_ptr, out_ptr, M, N, out_stride,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (p, s): tiles p, p + programs, ... of the output, split s of K, which is K_STEPS stages long."""
    TILE: gl.constexpr = 16 * WARPS  # rows of W
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE  # output columns of a tile
    BYTES: gl.constexpr = (TILE + BLOCK_M * 2) * BLOCK_K * BLOCKS
    SCALES: gl.constexpr = 1 if GROUP >= BLOCK_K else BLOCK_K // GROUP  # of a chunk
    w_buffer = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE, BLOCK_K * BLOCKS], w_desc.layout)
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
            k = (first_block + i % K_STEPS * BLOCKS) * BLOCK_K
            mbarrier.expect(ready.index(i), BYTES)
            tile = program + i // K_STEPS * programs
            _copy_tile(w_desc, w_buffer.index(i), ready.index(i), tile, k, N, TILE, GATED)
    _wait_for_previous(PDL)
    for i in gl.static_range(STAGES):
        if i < steps:
            _copy(x_desc, [0, (first_block + i % K_STEPS * BLOCKS) * BLOCK_K], ready.index(i), x_buffer.index(i))

    MANY: gl.constexpr = BLOCK_M > FEW
    layout: gl.constexpr = gl.NVMMADistributedLayout([3 if MANY else 2, 0], [WARPS, 1], [16, BLOCK_M, 16] if MANY else [16, 8])
    step = 0
    for tile in range(program, tiles, programs):
        rows, live = rows_of(tile, N, gl.SliceLayout(1, layout), TILE, GATED)
        at = rows.to(gl.int64) * GROUPS
        acc = gl.zeros([TILE, BLOCK_M], gl.float32, layout)
        scales, zeros = _scales(s_ptr, z_ptr, at, live, first_block, SCALES, GROUP, GROUPS, ZEROS)
        for k_step in range(K_STEPS):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            for i in gl.static_range(BLOCKS):
                block = first_block + k_step * BLOCKS + i
                next_scales, next_zeros = _scales(s_ptr, z_ptr, at, live, block + 1, SCALES, GROUP, GROUPS, ZEROS)
                acc = _add_block(
                    acc, w_buffer.index(stage), x_buffer.index(stage), scales, zeros, i * BLOCK_K,
                    SCALES, GROUPS, ZEROS, WARPS, MANY, GATED, layout,
                )  # fmt: skip
                scales, zeros = next_scales, next_zeros
            tl.debug_barrier()  # all warps have read the stage
            ahead = step + STAGES
            if ahead < steps:
                k = (first_block + ahead % K_STEPS * BLOCKS) * BLOCK_K
                ahead_tile = program + ahead // K_STEPS * programs
                mbarrier.expect(ready.index(stage), BYTES)
                _copy_tile(w_desc, w_buffer.index(stage), ready.index(stage), ahead_tile, k, N, TILE, GATED)
                _copy(x_desc, [0, k], ready.index(stage), x_buffer.index(stage))
            step += 1

        if GROUPS == 1:
            acc *= gl.load(s_ptr + rows, live, other=0.0).to(gl.float32)[:, None]
        if BIAS:
            acc += gl.load(bias_ptr + rows, live & (part == 0), other=0.0).to(gl.float32)[:, None]
        values = acc
        if GATED:
            gate, up = gl.split(acc.reshape([WARPS, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
            values = _gated(gate, up, out_ptr.dtype.element_ty).reshape([WIDTH, BLOCK_M])
        out_layout: gl.constexpr = values.type.layout
        columns = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, out_layout))
        lines = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
        start = out_ptr + part.to(gl.int64) * M * out_stride
        mask = (columns < N)[:, None] & (lines < M)[None, :]
        result = values.to(out_ptr.dtype.element_ty)
        gl.store(start + lines.to(gl.int64)[None, :] * out_stride + columns[:, None], result, mask)


def block_rows(rows: int) -> int:
    """Rows that x is padded to: mma takes 8."""
    return max(8, triton.next_power_of_2(rows))


def supports(x: torch.Tensor, weight: Weight8) -> bool:
    """Whether the kernel can compute this product: 16-bit, 1 to 64 rows, aligned as TMA needs it."""
    if not 1 <= len(x) <= MAX_ROWS or x.dtype.itemsize != 2 or not hopper.available(x.device):
        return False
    return hopper.can_copy(x) and hopper.can_copy(weight.data)


@cached
def choose(rows: int, n: int, k: int, sms: int, *, is_gated: bool = False, split_k: bool = False) -> Config:
    """The configuration for n output columns on so many SMs: the best, or nearly, for an 8B's layers at 1, 16 and 64 rows."""
    block_m = block_rows(rows)
    warps, blocks, sharing = 4, 2 if block_m <= 32 else 1, 3 if block_m > 32 and not split_k else 2
    width = 16 * warps // (2 if is_gated else 1)
    tiles = triton.cdiv(n, width)
    stage = BLOCK * blocks
    parts = 1
    while split_k and parts < MAX_PARTS and tiles * parts * 2 <= sms * sharing and k >= parts * 2 * MIN_STEPS * stage:
        parts *= 2
    steps = triton.cdiv(k, stage * parts) * triton.cdiv(tiles * parts, sms * sharing)
    return Config(warps, blocks, min(max_stages(rows, warps, blocks, sharing), steps), sms * sharing, parts)


def max_stages(rows: int, warps: int, blocks: int, sharing: int) -> int:
    """Stages that fit into a program's share of an SM."""
    return min(SHARED_BYTES // sharing // ((16 * warps + block_rows(rows) * 2) * BLOCK * blocks), MAX_STAGES)


def launch(
    x: torch.Tensor,
    weight: Weight8,
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
    if weight.data.shape != (2 * n if is_gated else n, k) or out.shape != shape or not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"w8a16_hopper: x {x.shape}, weight {weight.data.shape}, out {out.shape} do not fit")
    if x.dtype.itemsize != 2 or out.dtype != dtype or out.stride(-1) != 1 or (is_gated and config.parts > 1):
        raise ValueError(f"w8a16_hopper: {x.dtype} to {out.dtype} is not for this kernel")
    if config.parts > 1 and not out.is_contiguous():
        raise ValueError("w8a16_hopper: parts need to be contiguous")
    mode = LATE if pdl else PLAIN  # EARLY is for small programs
    tile, block_m = 16 * config.warps, block_rows(rows)
    width = tile // 2 if is_gated else tile
    programs = min(triton.cdiv(n, width), max(config.programs // config.parts, 1))
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _kernel[(programs, config.parts)](
        tma.lines(x, rows, k, x.stride(0), (block_m, BLOCK * config.blocks)),
        tma.lines(weight.data, columns, k, weight.data.stride(0), (width, BLOCK * config.blocks)),
        weight.scales, zeros, weight.scales if bias is None else bias, out, rows, n, out.stride(-2),
        weight.group, weight.scales.shape[1], triton.cdiv(k, BLOCK * config.blocks * config.parts), block_m, config.warps,
        config.blocks, config.stages, weight.zeros is not None, bias is not None, is_gated, mode,
        num_warps=config.warps, **launch_options(mode),
    )  # fmt: skip


def linear(
    x: torch.Tensor, weight: Weight8, bias: torch.Tensor | None, out: torch.Tensor | None, *, is_gated: bool, pdl: int
) -> torch.Tensor:
    """x @ W^T + bias, gated if is_gated; in `out` if given."""
    rows, n = len(x), weight.outputs // 2 if is_gated else weight.outputs
    out = x.new_empty((rows, n)) if out is None else out
    config = choose(rows, n, x.shape[1], hopper.num_sms(x.device), is_gated=is_gated)
    launch(x, weight, bias, out, config, is_gated=is_gated, pdl=pdl)
    return out


def linear_split_k(x: torch.Tensor, weight: Weight8, bias: torch.Tensor | None, *, pdl: int) -> torch.Tensor:
    """As `linear`, or its partial sums over K, float32 [S, M, N], if one product has too few tiles for the GPU."""
    config = choose(len(x), weight.outputs, x.shape[1], hopper.num_sms(x.device), split_k=True)
    if config.parts == 1:
        return linear(x, weight, bias, None, is_gated=False, pdl=pdl)
    out = torch.empty(config.parts, len(x), weight.outputs, dtype=torch.float32, device=x.device)
    launch(x, weight, bias, out, config, pdl=pdl)
    return out
