"""16-bit experts for many rows on Hopper (Gluon): as `four_bits_wide` for 4 bits, but with W in shared memory.

    gate_up   h[p] = act(x[row of p] @ gate_up[e]^T + b)       p: place in the order of `align`; without a gate, up's rows alone
    down      y[pair of p] = weights[pair] (h[p] @ down[e]^T + b')

Operands as in `tiles`. A program is a producer warp, which has TMA copy rows of W and of x (`grouped`) into a ring of stages of
some chunks of 64 of K, and two warpgroups with some stripes of 64 rows of W each. W is wgmma's first operand and x the second,
so an expert with few rows costs few columns. If gated, every second stripe holds up's rows for the gate's stripe before it. A
stage's products are waited for when the next stage's have started. Each sum has a fixed order, and nothing is atomic.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.experts import grouped, grouped_hopper, tiles
from quire.kernels.experts.experts_reference import Act, Relu2, Weights
from quire.kernels.experts.grouped import Work
from quire.kernels.experts.grouped_hopper import place_of, relu2, store, swiglu, wait_for_previous
from quire.kernels.experts.swiglu import constants
from quire.kernels.triton_support import hopper, tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.configs import WideConfig, WideTile

STRIPE = grouped_hopper.STRIPE
BLOCK_K = gl.constexpr(64)

_copy = tma.copy


@gluon.jit
def _produce(
    descs, shared, places_ptr, N, columns, slots, k_blocks, BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr,
    STRIPES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp. `full` completes when a stage's copies have arrived, `empty` when both warpgroups have read it."""
    x_desc, w_desc = descs
    x_buffer, w_buffer, full, empty = shared
    BYTES: gl.constexpr = (BLOCK_M + 2 * STRIPES * STRIPE) * BLOCK_K * BLOCKS * 2
    wait_for_previous(PDL)
    count = gl.load(places_ptr + 3 * slots)
    step = 0
    for item in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        place, tile = place_of(item, count, columns, slots)
        expert = gl.load(places_ptr + place)
        begin = gl.load(places_ptr + slots + place)
        first = expert * (N * 2 if GATED else N)
        for block in range(0, k_blocks, BLOCKS):
            stage = step % STAGES
            k = block * BLOCK_K
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            for i in gl.static_range(2 * STRIPES):
                at = w_buffer.index(stage * (2 * STRIPES) + i)
                if GATED:
                    row = first + i % 2 * N + (tile * STRIPES + i // 2) * STRIPE
                    _copy(w_desc, [row, k], full.index(stage), at)
                else:
                    _copy(w_desc, [first + (tile * (2 * STRIPES) + i) * STRIPE, k], full.index(stage), at)
            _copy(x_desc, [begin, k], full.index(stage), x_buffer.index(stage))
            step += 1


@gluon.jit
def _with_bias(acc, bias_ptr, first_column, N, BIAS: gl.constexpr, layout: gl.constexpr):
    """Sums of a stripe, plus the bias, which begins at bias_ptr."""
    if BIAS:
        columns = first_column + gl.arange(0, STRIPE, layout=gl.SliceLayout(1, layout))
        acc = acc + gl.load(bias_ptr + columns, columns < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _finish(
    sums, bias_ptr, output, expert, begin, size, tile, N, WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    STRIPES: gl.constexpr, BIAS: gl.constexpr, PLACED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
    ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The end of a tile for a warpgroup's sums [STRIPE, BLOCK_M]: bias, activation, stores."""
    bias = bias_ptr + expert.to(gl.int64) * (N * 2 if GATED else N)
    if GATED:
        for i in gl.static_range(STRIPES // 2):
            column = ((tile * 2 + WARPGROUP) * (STRIPES // 2) + i) * STRIPE
            gate = _with_bias(sums[2 * i], bias, column, N, BIAS, layout)
            up = _with_bias(sums[2 * i + 1], bias + N, column, N, BIAS, layout)
            values = swiglu(gate, up, output[0].dtype.element_ty, LIMIT, ALPHA, OFFSET, CUBIC)
            store(values, output, begin, size, column, N, PLACED, BLOCK_M, STRIPE)
    else:
        for i in gl.static_range(STRIPES):
            column = ((tile * 2 + WARPGROUP) * STRIPES + i) * STRIPE
            values = _with_bias(sums[i], bias, column, N, BIAS, layout)
            if PLACED:
                values = relu2(values, output[0].dtype.element_ty)
            store(values, output, begin, size, column, N, PLACED, BLOCK_M, STRIPE)


@gluon.jit
def _consume(
    shared, places_ptr, bias_ptr, output, N, columns, slots, k_blocks, WARPGROUP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr, STRIPES: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
    PLACED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr,
    CUBIC: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0 or 1: the first or the second STRIPES stripes of each tile of W."""
    x_buffer, w_buffer, full, empty = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    wait_for_previous(PDL)
    count = gl.load(places_ptr + 3 * slots)
    step = 0
    for item in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        place, tile = place_of(item, count, columns, slots)
        expert = gl.load(places_ptr + place)
        begin = gl.load(places_ptr + slots + place)
        size = gl.load(places_ptr + 2 * slots + place)
        sums = ()
        for _ in gl.static_range(STRIPES):
            sums = sums + (gl.zeros([STRIPE, BLOCK_M], gl.float32, layout),)  # type: ignore[assignment]
        for block in range(0, k_blocks, BLOCKS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = x_buffer.index(stage).permute((1, 0))
            added = ()
            for i in gl.static_range(STRIPES):
                w = w_buffer.index((stage * 2 + WARPGROUP) * STRIPES + i)
                added = added + (warpgroup_mma(w, x, sums[i], is_async=True),)  # type: ignore[assignment]
            sums = _waited(added, STRIPES, STRIPES)  # for the stage before
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0)
            step += 1
        sums = _waited(sums, 0, STRIPES)
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        _finish(
            sums, bias_ptr, output, expert, begin, size, tile, N, WARPGROUP, BLOCK_M, STRIPES, BIAS, PLACED,
            GATED, LIMIT, ALPHA, OFFSET, CUBIC, layout,
        )  # fmt: skip


@gluon.jit
def _waited(sums, pending: gl.constexpr, STRIPES: gl.constexpr):
    """The sums, once no more than `pending` products are in flight."""
    if STRIPES == 1:
        return (warpgroup_mma_wait(pending, deps=[sums[0]]),)
    elif STRIPES == 2:
        return warpgroup_mma_wait(pending, deps=[sums[0], sums[1]])
    else:
        return warpgroup_mma_wait(pending, deps=[sums[0], sums[1], sums[2], sums[3]])


@gluon.jit(do_not_specialize=["columns", "slots", "k_blocks"])
def _kernel(
    x_desc, w_desc, bias_ptr, weights_ptr, out_ptr, places_ptr, order_ptr, N, columns, slots, k_blocks,
    BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr, STRIPES: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, PLACED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    OFFSET: gl.constexpr, CUBIC: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program p: items p, p + programs, ... of places x `columns` tiles of columns."""
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K * BLOCKS], x_desc.layout)
    w_buffer = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 2 * STRIPES, STRIPE, BLOCK_K * BLOCKS], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    shared = (x_buffer, w_buffer, full, empty)
    output = (out_ptr, order_ptr, weights_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    shared, places_ptr, bias_ptr, output, N, columns, slots, k_blocks, 0, BLOCK_M, BLOCKS, STRIPES, STAGES,
                    BIAS, PLACED, GATED, LIMIT, ALPHA, OFFSET, CUBIC, PDL,
                ),
            ),
            (
                _consume,
                (
                    shared, places_ptr, bias_ptr, output, N, columns, slots, k_blocks, 1, BLOCK_M, BLOCKS, STRIPES, STAGES,
                    BIAS, PLACED, GATED, LIMIT, ALPHA, OFFSET, CUBIC, PDL,
                ),
            ),
            (
                _produce,
                (
                    (x_desc, w_desc), shared, places_ptr, N, columns, slots, k_blocks, BLOCK_M, BLOCKS, STRIPES, STAGES,
                    GATED, PDL,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, grouped_hopper.PRODUCER_REGISTERS],
    )  # fmt: skip


def stage_bytes(rows: int, tile: WideTile) -> int:
    """Bytes of a stage of the ring."""
    return (rows + 2 * tile.stripes * STRIPE.value) * BLOCK_K.value * tile.blocks * 2


def _launch(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, act: Act | None, weights: torch.Tensor | None,
    out: torch.Tensor, work: Work, tile: WideTile, pdl: int,
) -> None:  # fmt: skip
    """x [P, K] in order. With act: out [P, N] by places; without: weights float32 and out are by pairs."""
    is_gated, *numbers = constants(act or Relu2())
    n, mode = out.shape[1], LATE if pdl else PLAIN  # EARLY is for small programs
    columns = triton.cdiv(n, (1 if is_gated else 2) * tile.stripes * STRIPE.value)
    most, registers = grouped_hopper.registers(tile.sharing)
    grid = grouped_hopper.programs(work.num_slots, columns, hopper.num_sms(x.device), tile.sharing)
    lines = w.flatten(0, 1)
    _kernel[(grid,)](
        tma.lines(x, x.shape[0], x.shape[1], x.stride(0), (work.tile, BLOCK_K.value * tile.blocks)),
        tma.lines(lines, lines.shape[0], lines.shape[1], lines.stride(0), (STRIPE.value, BLOCK_K.value * tile.blocks)),
        x if bias is None else bias, x if weights is None else weights, out, work.places, work.order,
        n, columns, work.num_slots, triton.cdiv(x.shape[1], BLOCK_K.value), work.tile, tile.blocks, tile.stripes,
        grouped_hopper.stages(tile, stage_bytes(work.tile, tile)), bias is not None, act is not None,
        is_gated, *numbers, registers, mode, num_warps=4, maxnreg=most, **launch_options(mode),
    )  # fmt: skip


def gate_up(rows: torch.Tensor, w: Weights, act: Act, work: Work, config: WideConfig, *, pdl: int = PLAIN) -> torch.Tensor:
    """h [P, I] of rows [P, H], both by places."""
    h = rows.new_empty(len(rows), w.down.shape[2])
    _launch(rows, w.gate_up, w.gate_up_bias, act, None, h, work, config.gate_up, pdl)
    return h


def down(
    h: torch.Tensor, w: Weights, weights: torch.Tensor, work: Work, config: WideConfig, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [P, H] by pairs, of h [P, I] by places."""
    y = h.new_empty(len(h), w.down.shape[1])
    _launch(h, w.down, w.down_bias, None, weights, y, work, config.down, pdl)
    return y


def experts(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: WideConfig,
    *,
    are_some: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """[T, H] of x [T, H], with experts ids [T, k]; requires `grouped.supports`."""
    held = len(w.gate_up) if are_some else 0
    rows, work = grouped.arrange(x, ids, len(w.gate_up), config.rows, pdl=pdl)
    h = gate_up(rows, w, act, work, config, pdl=pdl)
    del rows  # y can use its memory
    y = down(h, w, weights, work, config, pdl=pdl)
    return tiles.add_up(y, ids, shared, held=held, pdl=pdl)
