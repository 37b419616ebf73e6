"""A ring of weights in shared memory that several products of one launch share, and how programs of a launch wait for each
other (Gluon, for Hopper): the building blocks of `scaled_block`.

A program has units of every product (a tile of its output and a split of K) and goes through them in order. One warp copies
their weights, as far ahead as the ring holds them: past the end of a product, too, while the other warps wait.

RING: (TILE rows of W in a unit, BLOCKS groups of 128 of K in a stage, STAGES, PROGRAMS). SIZES: five numbers a product, as
`plan.Sizes`. Its units may have fewer rows than TILE, so that all programs have equal work: in shared memory zeros lie below
them, which take no memory traffic.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.persistent.plan import ROWS
from quire.kernels.triton_support import tma

ATOM = gl.constexpr(ROWS)

_copy = tma.copy


@gluon.jit
def meet(state_ptr, PROGRAMS: gl.constexpr):
    """Wait until all programs of the launch are here; then each sees what all had stored. state: int64, the count of arrivals.

    A program that waits longer than any launch takes traps: the process loses the device and ends, instead of hanging.
    """
    tl.debug_barrier()
    come = gl.atomic_add(state_ptr, 1, sem="release", scope="gpu")
    awaited = (come // PROGRAMS + 1) * PROGRAMS
    # one thread polls: if all did, they would slow down the programs that still arrive
    ASM: gl.constexpr = """{
        .reg .pred again;
        .reg .b32 thread;
        .reg .pred late;
        .reg .b64 now, begin, time;
        mov.u32 thread, %tid.x;
        setp.ne.b32 again, thread, 0;
        @again bra done;
        mov.u64 begin, %globaltimer;
        wait: ld.acquire.gpu.global.b64 now, [$1];
        mov.u64 time, %globaltimer;
        sub.u64 time, time, begin;
        setp.gt.u64 late, time, 30000000000;
        @late trap;
        setp.lt.s64 again, now, $2;
        @again bra wait;
        done: mov.b32 $0, thread;
    }"""
    gl.inline_asm_elementwise(ASM, "=r,l,l", [state_ptr, awaited], dtype=gl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@gluon.jit
def produce(descs, ring, SIZES: gl.constexpr, RING: gl.constexpr, GATED: gl.constexpr):
    """One warp: the copies of this program's weights, product after product; GATED is the number of the gated product."""
    step = gl.program_id(0) * 0
    for i in gl.static_range(len(descs)):
        step = _copy_product(descs[i], ring, step, SIZES, i, RING, i == GATED)


@gluon.jit
def _copy_product(desc, ring, step, SIZES: gl.constexpr, P: gl.constexpr, RING: gl.constexpr, GATED: gl.constexpr):
    TILES: gl.constexpr = SIZES[5 * P]
    STEPS: gl.constexpr = SIZES[5 * P + 2]
    TILE: gl.constexpr = RING[0]
    BLOCKS: gl.constexpr = RING[1]
    BOXES: gl.constexpr = 2 if GATED else 1  # per group: the gate's rows, and up's below them
    ROWS: gl.constexpr = TILE // BOXES
    buffer, full, empty = ring
    for unit in range(gl.program_id(0), TILES * SIZES[5 * P + 1], RING[3]):
        first = unit // TILES * (STEPS * BLOCKS * 128)
        for k_step in range(STEPS):
            stage = step % RING[2]
            mbarrier.wait(empty.index(stage), (step // RING[2] & 1) ^ 1)
            mbarrier.expect(full.index(stage), TILE * BLOCKS * 128)
            for i in gl.static_range(BLOCKS * BOXES):
                box = buffer.index((stage * BLOCKS * BOXES + i) * (2 // BOXES))
                tile = unit % TILES + i % BOXES * TILES
                k = first + (k_step * BLOCKS + i // BOXES) * 128
                if SIZES[5 * P + 4] == ROWS:
                    lines = box._reinterpret(desc.dtype, [ROWS, 128], desc.layout)
                    _copy(desc, [tile * ROWS, k], full.index(stage), lines)
                else:
                    lines = box._reinterpret(desc.dtype, [1, ROWS, 128], desc.layout)
                    _copy(desc, [tile, 0, k], full.index(stage), lines)
            step += 1
    return step


@gluon.jit
def _pairs(x_buffer, w_buffer, acc, x_block, stage, PAIRS: gl.constexpr, EXACT: gl.constexpr, layout: gl.constexpr):
    """Sums of a stage's pairs of groups, a tuple of one for each pair; EXACT: all are added to acc, a tuple of one."""
    rows: gl.constexpr = acc.shape[0]
    sum_dtype: gl.constexpr = gl.int32 if x_buffer.dtype == gl.int8 else gl.float32
    sums = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(PAIRS):
        x = x_buffer.index(x_block + 2 * i)._reinterpret(x_buffer.dtype, [2 * ATOM, 128], x_buffer.layout).permute((1, 0))
        w = w_buffer.index(4 * (stage * PAIRS + i))._reinterpret(w_buffer.dtype, [rows, 128], w_buffer.layout)
        if EXACT:
            acc = warpgroup_mma(w, x, acc, is_async=True)
        else:
            zeros = gl.zeros(acc.shape, sum_dtype, layout)
            sums = sums + (warpgroup_mma(w, x, zeros, use_acc=False, is_async=True),)  # type: ignore[assignment]
    if EXACT:
        sums = (warpgroup_mma_wait(0, deps=[acc]),)
    elif PAIRS == 1:
        sums = (warpgroup_mma_wait(0, deps=[sums[0]]),)
    else:
        sums = warpgroup_mma_wait(0, deps=[sums[0], sums[1]])
    return sums


@gluon.jit
def _scale_of_rows(scales, first, is_odd, is_up, UP: gl.constexpr, GATED: gl.constexpr):
    """Scales [2 TILE, 1] of W's rows for a pair of groups: first the even group's, then the odd's; if GATED, up's at UP."""
    even = scales[first][:, None]
    odd = scales[first + 1][:, None]
    if GATED:
        even = gl.where(is_up, scales[UP + first][:, None], even)
        odd = gl.where(is_up, scales[UP + first + 1][:, None], odd)
    return gl.where(is_odd, odd, even)


@gluon.jit
def product(
    ring, x_buffer, scale_buffer, step, x_block,
    STEPS: gl.constexpr, RING: gl.constexpr, UP: gl.constexpr, GATED: gl.constexpr, EXACT: gl.constexpr,
    out_layout: gl.constexpr,
):  # fmt: skip
    """(sums [TILE] over a split of K, of x from x_block on; the next step). EXACT: int32.

    UP > 0: sums of groups are multiplied by scale_buffer: [UP] for the tile's rows, or for the gate's, and [UP] for up's. A
    pair of groups is multiplied at once: W's second lies below its first, x's is eight columns further on.
    """
    TILE: gl.constexpr = RING[0]
    BLOCKS: gl.constexpr = RING[1]
    WARPS: gl.constexpr = TILE // 8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * ATOM, 32])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    w_buffer, full, empty = ring
    line = gl.arange(0, 2 * TILE, layout=row)[:, None]
    is_odd = line >= TILE
    is_up = line % TILE >= TILE // 2
    acc = gl.zeros([2 * TILE, 2 * ATOM], gl.int32 if EXACT else gl.float32, layout)
    for k_step in range(STEPS):
        stage = step % RING[2]
        scales = ()  # type: tuple[gl.tensor, ...]
        if UP > 0:
            for i in gl.static_range(BLOCKS * (2 if GATED else 1)):
                at = i % BLOCKS + i // BLOCKS * UP
                scales = scales + (scale_buffer.index(k_step * BLOCKS + at).load(row),)  # type: ignore[assignment]
        mbarrier.wait(full.index(stage), step // RING[2] & 1)
        sums = _pairs(x_buffer, w_buffer, acc, x_block + k_step * BLOCKS, stage, BLOCKS // 2, EXACT, layout)
        tl.debug_barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage), count=1)
        if EXACT:
            acc = sums[0]
        else:
            for i in gl.static_range(BLOCKS // 2):
                part = sums[i].to(gl.float32)
                if UP > 0:
                    part *= _scale_of_rows(scales, 2 * i, is_odd, is_up, BLOCKS, GATED)
                acc += part
        step += 1
    column = gl.arange(0, 2 * ATOM, layout=gl.SliceLayout(0, layout))[None, :]
    halves = gl.sum(gl.where(column == gl.where(is_odd, ATOM, 0), acc, 0), 1)
    return gl.convert_layout(gl.sum(halves.reshape([2, TILE]), 0), out_layout), step
