"""4-bit experts for many rows on Hopper (Gluon): `linear/int4_wide` over tiles of one expert's rows.

    gate_up   h[p] = act(x[row of p] @ gate_up[e]^T + b)       p: place in the order of `align`; without a gate, up's rows alone
    down      y[pair of p] = weights[pair] (h[p] @ down[e]^T + b')

Operands as in `four_bits_tiles`, x bfloat16 (integers: float16, too). A program is a producer warp, which has TMA copy words of
W and rows of x (`grouped`) into a ring of stages of some chunks of 128 of K, and two warpgroups with some stripes of 64 rows of
W each; rows of W are wgmma's first operand, so an expert with few rows costs few columns. Numbers are computed in registers,
once for a tile of rows: mxfp4's are exact, integers rounded to x's type. wgmma is waited for before anything else is computed,
since it reads those registers (which ptxas may reuse too early). Small tiles run as two programs an SM, which hide each other's
waits; for large ones the two warpgroups take turns at the tensor cores, as in `int4_wide`. Scales come through L2, into which
the producer prefetches them. Each sum has a fixed order, and nothing is atomic.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.experts import grouped, grouped_hopper, tiles
from quire.kernels.experts.experts_reference import Act, Relu2
from quire.kernels.experts.four_bits_operands import mx_operand, prefetch_scales, scales_of_stage
from quire.kernels.experts.four_bits_weight import FourBits, FourBitWeights
from quire.kernels.experts.grouped import Work
from quire.kernels.experts.grouped_hopper import place_of, relu2, store, swiglu, wait_for_previous
from quire.kernels.experts.swiglu import constants
from quire.kernels.linear.int4_operands import BLOCK_K, MAGIC, WORDS, int_operand, load_words, rows_of, scales_of_block
from quire.kernels.linear.int4_weight import BLOCK, BLOCK_WORDS
from quire.kernels.triton_support import hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.configs import WideConfig, WideTile

STRIPE = grouped_hopper.STRIPE
TURNS = gl.constexpr(128)  # rows of a tile from which warpgroups take turns
HALVED = gl.constexpr(64)  # tiles of so many rows cost half if at most half are used; other sizes would save little

_copy = tma.copy


@gluon.jit
def _produce(
    descs, shared, places_ptr, weight, N, columns, slots, k_blocks, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCKS: gl.constexpr, STRIPES: gl.constexpr, STAGES: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp. `full` completes when a stage's copies have arrived, `empty` when both warpgroups have read it."""
    x_desc, w_desc = descs
    x_buffer, w_buffer, full, empty, _turns = shared
    BYTES: gl.constexpr = (BLOCK_M * BLOCK_K * 2 + 2 * STRIPES * STRIPE * WORDS * 4) * BLOCKS
    HALF: gl.constexpr = STRIPE // 2
    total = N * 2 if GATED else N  # rows of an expert
    wait_for_previous(PDL)
    count = gl.load(places_ptr + 3 * slots)
    step = 0
    for item in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        place, tile = place_of(item, count, columns, slots)
        expert = gl.load(places_ptr + place)
        begin = gl.load(places_ptr + slots + place)
        first = expert * total
        for block in range(0, k_blocks, BLOCKS):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            for i in gl.static_range(2 * STRIPES):
                stripe = tile * (2 * STRIPES) + i
                at = w_buffer.index(stage * (2 * STRIPES) + i)
                if GATED:
                    _copy(w_desc, [first + stripe * HALF, block * WORDS], full.index(stage), at.slice(0, HALF))
                    _copy(w_desc, [first + N + stripe * HALF, block * WORDS], full.index(stage), at.slice(HALF, HALF))
                else:
                    _copy(w_desc, [first + stripe * STRIPE, block * WORDS], full.index(stage), at)
            _copy(x_desc, [begin, block * BLOCK_K], full.index(stage), x_buffer.index(stage))
            prefetch_scales(
                weight, expert.to(gl.int64), tile, block, N, total, k_blocks, GROUP, BLOCKS, STRIPES, MX, ZEROS, GATED
            )  # fmt: skip
            step += 1


@gluon.jit
def _finish(
    acc, weight, bias_ptr, output, expert, begin, size, stripe, N, BLOCK_M: gl.constexpr, MX: gl.constexpr,
    BIAS: gl.constexpr, PLACED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    OFFSET: gl.constexpr, CUBIC: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The end of a stripe with sums [STRIPE, BLOCK_M]: factors, biases, activation, stores."""
    WIDTH: gl.constexpr = STRIPE // 2 if GATED else STRIPE
    rows, live = rows_of(stripe, N, gl.SliceLayout(1, layout), STRIPE, GATED)
    at = expert.to(gl.int64) * (N * 2 if GATED else N) + rows
    if MX:
        acc = acc * gl.load(weight[2] + at, live, other=0.0)[:, None]
    if BIAS:
        acc = acc + gl.load(bias_ptr + at, live, other=0.0).to(gl.float32)[:, None]
    values = acc
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
        values = swiglu(gate, up, output[0].dtype.element_ty, LIMIT, ALPHA, OFFSET, CUBIC).reshape([WIDTH, BLOCK_M])
    elif PLACED:
        values = relu2(acc, output[0].dtype.element_ty)
    store(values, output, begin, size, stripe * WIDTH, N, PLACED, BLOCK_M, WIDTH)


@gluon.jit
def _tile(
    shared, weight, bias_ptr, output, magic, this, following, begin, size, step, scales, zeros, N, k_blocks,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr,
    STRIPES: gl.constexpr, STAGES: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr,
    PLACED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr,
    CUBIC: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of the tile `this` (expert, tile of W); ROWS of its BLOCK_M rows of x are computed.

    `step`: stages so far; `scales` and `zeros`: those of the first stage. The same are returned for the `following` tile.
    """
    x_buffer, w_buffer, full, empty, turns = shared
    expert, tile = this
    next_expert, next_tile = following
    dtype: gl.constexpr = x_buffer.dtype
    SCALES: gl.constexpr = 1 if MX else scales_of_block(GROUP)
    scales_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    sums = ()
    for _ in gl.static_range(STRIPES):
        sums = sums + (gl.zeros([STRIPE, ROWS], gl.float32, layout),)  # type: ignore[assignment]
    for block in range(0, k_blocks, BLOCKS):
        # Loaded a stage ahead, and before the barrier: after it the compiler would delay the loads until the values are needed.
        ahead_scales, ahead_zeros = scales_of_stage(
            weight, expert, tile, block + BLOCKS, N, k_blocks, WARPGROUP, GROUP, BLOCKS, STRIPES, MX, ZEROS, GATED,
            scales_layout,
        )  # fmt: skip
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        for j in gl.static_range(BLOCKS):
            x = x_buffer.index(stage).slice(0, ROWS).slice(j * BLOCK_K, BLOCK_K, dim=1).permute((1, 0))
            added = ()
            for i in gl.static_range(STRIPES):
                words = load_words(w_buffer.index((stage * 2 + WARPGROUP) * STRIPES + i), j, 4, GATED)
                if MX:
                    operand = mx_operand(words, scales[i * BLOCKS + j], dtype, w_layout)
                else:
                    operand = int_operand(
                        words, magic, scales, zeros, (i * BLOCKS + j) * SCALES, SCALES, dtype, ZEROS, w_layout
                    )  # fmt: skip
                if BLOCK_M >= TURNS:
                    mbarrier.wait(turns.index(WARPGROUP), ((step * BLOCKS + j) * STRIPES + i + WARPGROUP + 1) & 1)
                acc = warpgroup_mma(operand, x, sums[i], is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                if BLOCK_M >= TURNS:
                    mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
                added = added + (acc,)  # type: ignore[assignment]
            sums = added
        mbarrier.arrive(empty.index(stage), count=1)
        scales, zeros = ahead_scales, ahead_zeros
        step += 1
    scales, zeros = scales_of_stage(
        weight, next_expert, next_tile, 0, N, k_blocks, WARPGROUP, GROUP, BLOCKS, STRIPES, MX, ZEROS, GATED, scales_layout
    )  # fmt: skip
    for i in gl.static_range(STRIPES):
        _finish(
            sums[i], weight, bias_ptr, output, expert, begin, size, (tile * 2 + WARPGROUP) * STRIPES + i, N,
            ROWS, MX, BIAS, PLACED, GATED, LIMIT, ALPHA, OFFSET, CUBIC, layout,
        )  # fmt: skip
    return step, scales, zeros


@gluon.jit
def _consume(
    shared, places_ptr, weight, bias_ptr, output, magic, N, columns, slots, k_blocks, WARPGROUP: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr, STRIPES: gl.constexpr, STAGES: gl.constexpr,
    MX: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr, PLACED: gl.constexpr, GATED: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0 or 1: the first or the second STRIPES stripes of each tile of W."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    wait_for_previous(PDL)
    count = gl.load(places_ptr + 3 * slots)
    place, tile = place_of(gl.program_id(0), count, columns, slots)
    expert = gl.load(places_ptr + place)
    step = 0
    scales, zeros = scales_of_stage(
        weight, expert, tile, 0, N, k_blocks, WARPGROUP, GROUP, BLOCKS, STRIPES, MX, ZEROS, GATED, layout
    )  # fmt: skip
    for item in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        next_place, next_tile = place_of(item + gl.num_programs(0), count, columns, slots)
        next_expert = gl.load(places_ptr + next_place)
        begin = gl.load(places_ptr + slots + place)
        size = gl.load(places_ptr + 2 * slots + place)
        this, following = (expert, tile), (next_expert, next_tile)
        if BLOCK_M == HALVED:
            if size <= BLOCK_M // 2:
                step, scales, zeros = _tile(
                    shared, weight, bias_ptr, output, magic, this, following, begin, size, step, scales, zeros, N, k_blocks,
                    WARPGROUP, GROUP, BLOCK_M // 2, BLOCK_M, BLOCKS, STRIPES, STAGES, MX, ZEROS, BIAS, PLACED,
                    GATED, LIMIT, ALPHA, OFFSET, CUBIC,
                )  # fmt: skip
            else:
                step, scales, zeros = _tile(
                    shared, weight, bias_ptr, output, magic, this, following, begin, size, step, scales, zeros, N, k_blocks,
                    WARPGROUP, GROUP, BLOCK_M, BLOCK_M, BLOCKS, STRIPES, STAGES, MX, ZEROS, BIAS, PLACED,
                    GATED, LIMIT, ALPHA, OFFSET, CUBIC,
                )  # fmt: skip
        else:
            step, scales, zeros = _tile(
                shared, weight, bias_ptr, output, magic, this, following, begin, size, step, scales, zeros, N, k_blocks,
                WARPGROUP, GROUP, BLOCK_M, BLOCK_M, BLOCKS, STRIPES, STAGES, MX, ZEROS, BIAS, PLACED,
                GATED, LIMIT, ALPHA, OFFSET, CUBIC,
            )  # fmt: skip
        place, tile, expert = next_place, next_tile, next_expert


@gluon.jit(do_not_specialize=["magic", "columns", "slots", "k_blocks"])
def _kernel(
    x_desc, w_desc, s_ptr, z_ptr, factor_ptr, bias_ptr, weights_ptr, out_ptr, places_ptr, order_ptr, magic, N, columns, slots,
    k_blocks, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr, STRIPES: gl.constexpr,
    STAGES: gl.constexpr, MX: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr, PLACED: gl.constexpr,
    GATED: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program p: items p, p + programs, ... of places x `columns` tiles of columns."""
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K * BLOCKS], x_desc.layout)
    w_buffer = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * STRIPES, STRIPE, WORDS * BLOCKS], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    shared = (x_buffer, w_buffer, full, empty, turns)
    weight = (s_ptr, z_ptr, factor_ptr)
    output = (out_ptr, order_ptr, weights_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    shared, places_ptr, weight, bias_ptr, output, magic, N, columns, slots, k_blocks, 0, GROUP, BLOCK_M, BLOCKS,
                    STRIPES, STAGES, MX, ZEROS, BIAS, PLACED, GATED, LIMIT, ALPHA, OFFSET, CUBIC, PDL,
                ),
            ),
            (
                _consume,
                (
                    shared, places_ptr, weight, bias_ptr, output, magic, N, columns, slots, k_blocks, 1, GROUP, BLOCK_M, BLOCKS,
                    STRIPES, STAGES, MX, ZEROS, BIAS, PLACED, GATED, LIMIT, ALPHA, OFFSET, CUBIC, PDL,
                ),
            ),
            (
                _produce,
                (
                    (x_desc, w_desc), shared, places_ptr, weight, N, columns, slots, k_blocks, GROUP, BLOCK_M, BLOCKS, STRIPES,
                    STAGES, MX, ZEROS, GATED, PDL,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, grouped_hopper.PRODUCER_REGISTERS],
    )  # fmt: skip


def stage_bytes(rows: int, tile: WideTile) -> int:
    """Bytes of a stage of the ring."""
    return (rows * BLOCK * 2 + 2 * tile.stripes * STRIPE.value * BLOCK // 2) * tile.blocks


def _launch(
    x: torch.Tensor, w: FourBits, bias: torch.Tensor | None, act: Act | None, weights: torch.Tensor | None,
    out: torch.Tensor, work: Work, tile: WideTile, pdl: int,
) -> None:  # fmt: skip
    """x [P, K] in order. With act: out [P, N] by places; without: weights float32 and out are by pairs."""
    experts, total, words = w.words.shape
    is_gated, *numbers = constants(act or Relu2())
    n, mode = out.shape[1], LATE if pdl else PLAIN  # EARLY is for small programs
    width = STRIPE.value // 2 if is_gated else STRIPE.value
    columns = triton.cdiv(n, 2 * tile.stripes * width)
    most, registers = grouped_hopper.registers(tile.sharing)
    grid = grouped_hopper.programs(work.num_slots, columns, hopper.num_sms(x.device), tile.sharing)
    _kernel[(grid,)](
        tma.lines(x, x.shape[0], x.shape[1], x.stride(0), (work.tile, BLOCK * tile.blocks)),
        tma.lines(w.words, experts * total, words, words, (width, BLOCK_WORDS * tile.blocks)),
        w.scales, w.scales if w.zeros is None else w.zeros, w.scales if w.factors is None else w.factors,
        x if bias is None else bias, x if weights is None else weights, out, work.places, work.order,
        MAGIC[x.dtype], n, columns, work.num_slots, words // BLOCK_WORDS, w.group, work.tile, tile.blocks, tile.stripes,
        grouped_hopper.stages(tile, stage_bytes(work.tile, tile)), w.is_mx, w.zeros is not None, bias is not None,
        act is not None, is_gated, *numbers, registers, mode, num_warps=4, maxnreg=most, **launch_options(mode),
    )  # fmt: skip


def gate_up(
    rows: torch.Tensor, w: FourBitWeights, act: Act, work: Work, config: WideConfig, *, pdl: int = PLAIN
) -> torch.Tensor:
    """h [P, I] of rows [P, H], both by places."""
    h = rows.new_empty(len(rows), w.down.inputs)
    _launch(rows, w.gate_up, w.gate_up_bias, act, None, h, work, config.gate_up, pdl)
    return h


def down(
    h: torch.Tensor, w: FourBitWeights, weights: torch.Tensor, work: Work, config: WideConfig, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [P, H] by pairs, of h [P, I] by places."""
    y = h.new_empty(len(h), w.gate_up.inputs)
    _launch(h, w.down, w.down_bias, None, weights, y, work, config.down, pdl)
    return y


def experts(
    x: torch.Tensor,
    w: FourBitWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: WideConfig,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], with experts ids [T, k]; requires `grouped.supports`."""
    rows, work = grouped.arrange(x, ids, len(w.gate_up.words), config.rows, pdl=pdl)
    h = gate_up(rows, w, act, work, config, pdl=pdl)
    del rows  # y can use its memory
    return tiles.add_up(down(h, w, weights, work, config, pdl=pdl), ids, shared, pdl=pdl)
