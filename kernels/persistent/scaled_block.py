"""One row's way from attention to the next layer's attention in one persistent kernel for Hopper (Gluon), with scaled 8-bit
weights: o_proj, norm, gate and up, down, the next layer's norm, and its q, k and v.

    r1 = r + x Wo^T;   h = silu(g) * u, g | u = norm(r1) Wgu^T;   r2 = r1 + h Wd^T;   y = norm'(r2) Wqkv^T + b

At the end of the model there is no next layer: the result is h Wd^T as split-K partial sums, for a norm's `add`, and r1.

As separate launches, products of one row leave memory idle between them: a program's ring (`scaled_hopper`) is empty when it
begins, and the steps in between (norms, scales of 8-bit inputs) need all of a row. Here one program an SM has one ring for all
products (`ring.py`), which fills while programs wait for each other, three times a launch. Every program computes the steps in
between for itself (`row.py`), from the sums that all have stored.

Operands, scales and results as in `scaled`; partial sums float32 [S, 1, H], or int32 as in `scaled_hopper`. At most one program
an SM, so all of them run at once, as they must.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.elementwise import activation
from quire.kernels.linear.quantize import LARGEST
from quire.kernels.linear.scaled import BLOCK
from quire.kernels.persistent import plan
from quire.kernels.persistent.plan import Block, Config, Next, Sizes, row_blocks
from quire.kernels.persistent.ring import ATOM, meet, produce, product
from quire.kernels.persistent.row import largest_of, load_norm, load_row, norm_row, scale_of, store_row, store_scales
from quire.kernels.triton_support import dependent_launch, tma
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options

GATE_UP = gl.constexpr(1)  # number of the product
PRODUCER_REGISTERS = gl.constexpr(24)

_gated = gluon.jit(activation.gated.fn)
_prefetch = gluon.jit(dependent_launch.prefetch.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


# ---------------------------------------------------------------------------------------------------------- the kernel
# SCALES: (whether W's are 2-D groups', whether x's are groups', the largest 8-bit number, room for a split's group scales).
@gluon.jit
def _unit(
    ring, buffers, ws_ptr, step, unit, x_block, UP_ROWS: gl.constexpr,
    SIZES: gl.constexpr, P: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(sums [TILE] of a tile and a split of product P; scales of W's rows, if it has them; the next step).

    x_block: the split's first group in shared memory. UP_ROWS: rows of the gate, after which up's begin.
    """
    TILES: gl.constexpr = SIZES[5 * P]
    WIDTH: gl.constexpr = SIZES[5 * P + 4]
    GATED: gl.constexpr = UP_ROWS > 0
    TILE: gl.constexpr = RING[0]
    ROWS: gl.constexpr = TILE // 2 if GATED else TILE
    BLOCKS: gl.constexpr = SIZES[5 * P + 2] * RING[1]
    EXACT: gl.constexpr = buffers[0].dtype == gl.int8 and not SCALES[0]
    UP: gl.constexpr = SCALES[3] if SCALES[0] else 0
    at = unit % TILES * WIDTH
    i = gl.arange(0, TILE, layout=layout)
    scales = i
    if SCALES[0]:  # then tiles have TILE rows
        first = unit // TILES * BLOCKS
        store_scales(
            buffers, ws_ptr, at // 128, (UP_ROWS + at) // 128, x_block, first, BLOCKS, SIZES[5 * P + 3], UP, GATED, TILE // 8
        )
    else:  # loaded here, ahead of their use, since they come from memory
        row = i % ROWS
        scales = gl.load(ws_ptr + at + row + i // ROWS * UP_ROWS, row < WIDTH, other=0.0)
    sums, step = product(ring, buffers[0], buffers[2], step, x_block, SIZES[5 * P + 2], RING, UP, GATED, EXACT, layout)
    return sums, scales, step


@gluon.jit
def _input_scale(row, static_ptr, STATIC: gl.constexpr, SCALES: gl.constexpr):
    x_scale = gl.to_tensor(1.0)
    if STATIC:
        x_scale = gl.load(static_ptr)
    elif not SCALES[1]:
        x_scale = scale_of(largest_of(row), SCALES[2])
    return x_scale


@gluon.jit
def _in_parts(
    ring, buffers, ws_ptr, x_scale, sums_ptr, h_ptr, step, H: gl.constexpr, STATIC: gl.constexpr,
    SIZES: gl.constexpr, P: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, row_layout: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """o_proj, with its row in shared memory, or down, for which each split of h is loaded there: stores the sums [PARTS, H]."""
    WARPS: gl.constexpr = RING[0] // 8
    WIDTH: gl.constexpr = SIZES[5 * P + 2] * RING[1] * 128  # of a split
    EXACT: gl.constexpr = buffers[0].dtype == gl.int8 and not SCALES[0]
    for unit in range(gl.program_id(0), SIZES[5 * P] * SIZES[5 * P + 1], RING[3]):
        part = unit // SIZES[5 * P]
        x_block = part * (WIDTH // 128)
        if P == 2:
            h = load_row(h_ptr + part * WIDTH, WIDTH, WARPS, row_layout)
            store_row(h, buffers, x_scale, SCALES[2], STATIC, SCALES[1], SCALES[0], WARPS, row_layout)
            x_block = 0
        sums, scales, step = _unit(ring, buffers, ws_ptr, step, unit, x_block, 0, SIZES, P, RING, SCALES, layout)
        row = gl.arange(0, RING[0], layout=layout)
        if not (SCALES[0] or EXACT):
            sums = sums * x_scale * scales
        gl.store(sums_ptr + part * H + unit % SIZES[5 * P] * SIZES[5 * P + 4] + row, sums, row < SIZES[5 * P + 4])
    return step


@gluon.jit
def _gate_up(
    ring, buffers, ws_ptr, x_scale, h_ptr, step,
    SIZES: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store h; returns (the largest |h| of this program, the next step)."""
    HALF: gl.constexpr = RING[0] // 2
    pairs: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [RING[0] // 8, 1], [1, 0])
    h_layout: gl.constexpr = gl.SliceLayout(1, pairs)
    dtype: gl.constexpr = h_ptr.dtype.element_ty
    most = gl.zeros([HALF], gl.float32, h_layout)
    row = gl.arange(0, HALF, layout=h_layout)
    for tile in range(gl.program_id(0), SIZES[5], RING[3]):
        sums, scales, step = _unit(ring, buffers, ws_ptr, step, tile, 0, SIZES[5] * SIZES[9], SIZES, 1, RING, SCALES, layout)
        sums = sums.to(gl.float32)
        if not SCALES[0]:
            sums = sums * x_scale * scales
        gate, up = gl.split(gl.convert_layout(sums.reshape([2, HALF]).permute((1, 0)), pairs))
        h = _gated(gate, up, dtype).to(dtype)
        gl.store(h_ptr + tile * SIZES[9] + row, h, row < SIZES[9])
        most = gl.maximum(most, gl.abs(h.to(gl.float32)))
    return gl.max(most, 0), step


@gluon.jit
def _qkv(
    ring, buffers, ws_ptr, x_scale, bias_ptr, qkv_ptr, step,
    SIZES: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, RING[0], layout=layout)
    for tile in range(gl.program_id(0), SIZES[15], RING[3]):
        sums, scales, step = _unit(ring, buffers, ws_ptr, step, tile, 0, 0, SIZES, 3, RING, SCALES, layout)
        at = tile * SIZES[19] + row
        values = sums.to(gl.float32)
        if not SCALES[0]:
            values = values * x_scale * scales
        if BIAS:
            values += gl.load(bias_ptr + at, row < SIZES[19], other=0.0).to(gl.float32)
        gl.store(qkv_ptr + at, values.to(qkv_ptr.dtype.element_ty), row < SIZES[19])


@gluon.jit
def _ask_for_constants(
    scales, norms, SIZES: gl.constexpr, H: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, layout: gl.constexpr
):
    """Prefetch scales of W's rows and norms' weights into L2, before the ring's copies queue for memory."""
    i = gl.arange(0, RING[0], layout=layout)
    HALF: gl.constexpr = RING[0] // 2
    for p in gl.static_range(len(scales)):
        if not SCALES[0]:
            for unit in range(gl.program_id(0), SIZES[5 * p] * SIZES[5 * p + 1], RING[3]):
                at = scales[p] + unit % SIZES[5 * p] * SIZES[5 * p + 4]
                if p == 1:
                    at += gl.minimum(i % HALF, SIZES[9] - 1) + i // HALF * (SIZES[5] * SIZES[9])
                else:
                    at += gl.minimum(i, SIZES[5 * p + 4] - 1)
                _prefetch(at)
    for n in gl.static_range(len(norms)):
        _prefetch(norms[n] + i % (H // 64) * 64)


@gluon.jit
def _consume(
    ring, buffers, inputs, scales, statics, norms, epsilons, scratch, outputs, state_ptr,
    SIZES: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, STATIC: gl.constexpr, BIAS: gl.constexpr,
    MANY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The products, and the steps between them. STATIC: for each product, whether its inputs' scale is static."""
    x_ptr, residual_ptr, bias_ptr = inputs
    sums_ptr, total_ptr, h_ptr, largest_ptr = scratch
    parts_ptr, last_ptr, qkv_ptr = outputs
    WARPS: gl.constexpr = RING[0] // 8
    H: gl.constexpr = SIZES[0] * SIZES[4]
    EXACT: gl.constexpr = buffers[0].dtype == gl.int8 and not SCALES[0]
    row_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    program = gl.program_id(0)
    _ask_for_constants(scales, norms, SIZES, H, RING, SCALES, layout)
    _wait_for_previous(PDL)

    row = load_row(x_ptr, SIZES[3] * 128, WARPS, row_layout)
    x_scale = _input_scale(row, statics[0], STATIC[0], SCALES)
    store_row(row, buffers, x_scale, SCALES[2], STATIC[0], SCALES[1], SCALES[0], WARPS, row_layout)
    loaded = load_norm(residual_ptr, norms[0], scales[0], H, EXACT, WARPS, row_layout)
    step = _in_parts(
        ring, buffers, scales[0], x_scale, sums_ptr, h_ptr, program * 0, H, STATIC[0], SIZES, 0, RING, SCALES, row_layout,
        layout,
    )  # fmt: skip
    meet(state_ptr, RING[3])

    normed = norm_row(sums_ptr, x_scale, loaded, total_ptr, epsilons[0], H, SIZES[1], EXACT, WARPS, row_layout)
    x_scale = _input_scale(normed, statics[1], STATIC[1], SCALES)
    store_row(normed, buffers, x_scale, SCALES[2], STATIC[1], SCALES[1], SCALES[0], WARPS, row_layout)
    largest, step = _gate_up(ring, buffers, scales[1], x_scale, h_ptr, step, SIZES, RING, SCALES, layout)
    gl.store(largest_ptr + program, largest)
    meet(state_ptr, RING[3])

    if STATIC[2]:
        x_scale = gl.load(statics[2])
    elif not SCALES[1]:
        i = gl.arange(0, MANY, layout=layout)
        x_scale = scale_of(gl.max(gl.load(largest_ptr + i, i < RING[3], other=0.0, cache_modifier=".cg"), 0), SCALES[2])
    if len(SIZES) == 20:
        again = load_norm(total_ptr, norms[1], scales[2], H, EXACT, WARPS, row_layout)
    step = _in_parts(
        ring, buffers, scales[2], x_scale, parts_ptr, h_ptr, step, H, STATIC[2], SIZES, 2, RING, SCALES, row_layout, layout
    )
    if len(SIZES) == 20:
        meet(state_ptr, RING[3])
        final = norm_row(parts_ptr, x_scale, again, last_ptr, epsilons[1], H, SIZES[11], EXACT, WARPS, row_layout)
        x_scale = _input_scale(final, statics[3], STATIC[3], SCALES)
        store_row(final, buffers, x_scale, SCALES[2], STATIC[3], SCALES[1], SCALES[0], WARPS, row_layout)
        _qkv(ring, buffers, scales[3], x_scale, bias_ptr, qkv_ptr, step, SIZES, RING, SCALES, BIAS, layout)
    elif EXACT:  # the scales by which the next norm multiplies the partial sums
        row = gl.arange(0, RING[0], layout=layout)
        for tile in range(program, SIZES[10], RING[3]):
            at = tile * SIZES[14] + row
            ws = gl.load(scales[2] + at, row < SIZES[14], other=0.0)
            gl.store(parts_ptr + SIZES[11] * H + at, ws.to(gl.int32, bitcast=True), row < SIZES[14])
        gl.store(parts_ptr + (SIZES[11] + 1) * H, x_scale.to(gl.int32, bitcast=True), program == 0)


@gluon.jit
def _kernel(
    x_ptr, residual_ptr, bias_ptr, o_desc, gate_up_desc, down_desc, qkv_desc, os_ptr, gs_ptr, ds_ptr, qs_ptr,
    o_static, gate_up_static, down_static, qkv_static, norm_ptr, next_norm_ptr, eps, next_eps,
    sums_ptr, total_ptr, h_ptr, largest_ptr, parts_ptr, last_ptr, qkv_ptr, state_ptr,
    SIZES: gl.constexpr, RING: gl.constexpr, SCALES: gl.constexpr, STATIC: gl.constexpr, BIAS: gl.constexpr,
    X_BLOCKS: gl.constexpr, MANY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """SIZES are of three products, or of four with the next layer's qkv."""
    inputs = (x_ptr, residual_ptr, bias_ptr)
    descs = (o_desc, gate_up_desc, down_desc)
    scales = (os_ptr, gs_ptr, ds_ptr)
    statics = (o_static, gate_up_static, down_static, qkv_static)
    norms = (norm_ptr,)
    if len(SIZES) == 20:
        descs = descs + (qkv_desc,)  # type: ignore[assignment]
        scales = scales + (qs_ptr,)  # type: ignore[assignment]
        norms = norms + (next_norm_ptr,)  # type: ignore[assignment]
    epsilons = (eps, next_eps)
    scratch = (sums_ptr, total_ptr, h_ptr, largest_ptr)
    outputs = (parts_ptr, last_ptr, qkv_ptr)
    dtype: gl.constexpr = o_desc.dtype
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGES: gl.constexpr = RING[2]
    x_buffer = gl.allocate_shared_memory(dtype, [X_BLOCKS, ATOM, 128], gl.NVMMASharedLayout(128, 8, rank=2))
    w_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    w_buffer = gl.allocate_shared_memory(dtype, [RING[2] * RING[1] * 2, RING[0] // 2, 128], w_layout)
    xs_buffer = gl.allocate_shared_memory(gl.float32, [X_BLOCKS + SCALES[3] if SCALES[0] else 1, 1], line)
    scale_buffer = gl.allocate_shared_memory(gl.float32, [2 * SCALES[3] if SCALES[0] else 1, 1], line)
    full = gl.allocate_shared_memory(gl.int64, [RING[2], 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING[2], 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    ring = (w_buffer, full, empty)
    buffers = (x_buffer, xs_buffer, scale_buffer)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    ring, buffers, inputs, scales, statics, norms, epsilons, scratch, outputs, state_ptr, SIZES, RING, SCALES,
                    STATIC, BIAS, MANY, PDL,
                ),
            ),
            (produce, (descs, ring, SIZES, RING, GATE_UP)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the launch
def _sizes(block: Block, after: Next | None, config: Config) -> tuple[Sizes, ...]:
    (hidden, attended), inner = block.o.scaled.data.shape, block.down.scaled.data.shape[1]
    tile, stage, o, down = config.tile, BLOCK * config.blocks, config.o_width, config.down_width
    gated = plan.tile_width(inner, tile // 2, config)
    found = [
        Sizes(hidden // o, config.o_parts, attended // (stage * config.o_parts), attended // BLOCK, o),
        Sizes(inner // gated, 1, hidden // stage, hidden // BLOCK, gated),
        Sizes(hidden // down, config.down_parts, inner // (stage * config.down_parts), inner // BLOCK, down),
    ]
    if after is not None:
        outputs = len(after.qkv.scaled.data)
        width = plan.tile_width(outputs, tile, config)
        found.append(Sizes(outputs // width, 1, hidden // stage, hidden // BLOCK, width))
    return tuple(found)


def _tiles(w: torch.Tensor, width: int, rows: int) -> TensorDescriptor:
    """Descriptor of W, to be copied in boxes of `rows` lines, in tiles of `width`."""
    n, k = w.shape
    return tma.lines(w, n, k, w.stride(0), (rows, BLOCK)) if width == rows else tma.tiles(w, width, rows)


class Result(NamedTuple):
    residual: torch.Tensor  # [1, H]: r2 if there is a next layer, else r1, without the partial sums
    parts: torch.Tensor  # of down, for a norm's `add`: [S, 1, H] partial sums
    qkv: torch.Tensor | None  # the next layer's: [1, N]


def launch(
    x: torch.Tensor, residual: torch.Tensor, block: Block, after: Next | None, state: torch.Tensor, config: Config,
    *, pdl: int = PLAIN,
) -> Result:  # fmt: skip
    """x [1, K], a row of attention's output, and the residual [1, H], which is not modified."""
    (hidden, attended), inner = block.o.scaled.data.shape, block.down.scaled.data.shape[1]
    products = [block.o, block.gate_up, block.down, *([] if after is None else [after.qkv])]
    dtype, in_squares = block.o.scaled.data.dtype, block.o.scaled.rows == BLOCK
    exact, warps = dtype == torch.int8 and not in_squares, config.tile // 8
    sizes = _sizes(block, after, config)

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    of_sums = torch.int32 if exact else torch.float32
    scratch = (new(config.o_parts, hidden, dtype=of_sums), new(1, hidden, dtype=x.dtype), new(inner, dtype=x.dtype))
    largest = new(config.programs, dtype=torch.float32)
    parts = new(config.down_parts + 2 * exact, 1, hidden, dtype=of_sums)
    last = scratch[1] if after is None else torch.empty_like(residual)
    qkv = None if after is None else new(1, len(after.qkv.scaled.data), dtype=x.dtype)
    last_of = [*products, products[0]][:4]  # if there is no next layer, any product
    widths = [size.width for size in (*sizes, sizes[0])]
    descs = [
        _tiles(w.data, width, config.tile // (2 if i == 1 else 1))
        for i, ((w, _), width) in enumerate(zip(last_of, widths, strict=False))
    ]
    norm, eps, bias = (block.norm, block.eps, None) if after is None else (after.norm, after.eps, after.bias)
    room = triton.next_power_of_2(max(size.steps for size in sizes) * config.blocks)
    _kernel[(config.programs,)](
        x, residual, x if bias is None else bias, *descs, *(p.scaled.scales for p in last_of),
        *(largest if p.input_scale is None else p.input_scale for p in last_of), block.norm, norm, block.eps, eps,
        *scratch, largest, parts, last, parts if qkv is None else qkv, state, tuple(n for size in sizes for n in size),
        (config.tile, config.blocks, config.stages, config.programs), (in_squares, block.by_block, LARGEST[dtype], room),
        tuple(p.input_scale is not None for p in products), bias is not None,
        row_blocks(hidden, attended, inner, config.down_parts, warps), triton.next_power_of_2(config.programs), pdl,
        num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return Result(last, parts, qkv)
