"""Linear layers of 2 to 64 rows for Hopper (Gluon): weights stream through shared memory by TMA, ahead of everything else.

    y = x @ W^T + bias        gated: y = silu(g) * u of g | u = x @ W^T + bias        split K: as in `split_linear`

x [M, K], W [N, K] (gated: [2 N, K]), y [M, N], bfloat16 or float16; partial sums float32 [S, M, N]. Accumulated in float32,
rounded where `linear` rounds; the order of summation depends on shape and GPU alone. Moves W once: 2 N K bytes.

A program keeps a ring of tiles of W in flight, as many as shared memory holds, whatever the arithmetic does; in a dependent
launch their copies start before it waits for the previous kernel, of which it needs only x. So the memory is busy while small
kernels run. wgmma multiplies 64 rows of W with x^T, padded to BLOCK_M columns: with x as the first operand most of its rows
would be idle. Programs take tiles of the output in turn, without a pause between one and the next.

h = A x of LoRA adapters (`tables.Shrink`) is computed beside y: the rows of A of all adapter slots are tiles behind those of W,
and a row's own are stored. That reads adapters which no row has, so it is for few slots (`shrinks`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.elementwise import activation
from quire.kernels.lora.tables import RANK_STEP, Shrink
from quire.kernels.triton_support import dependent_launch, tma
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options
from quire.kernels.triton_support.hopper import block_rows, can_copy, num_sms
from quire.kernels.tuning.current import cached, linear_tuning

TILE = gl.constexpr(64)  # rows of W that a wgmma takes
SHARED_BYTES = 224 * 1024  # of an SM, for rings
MIN_PART = 256  # of a split of K
SHARE = 8  # adapters beside W have at most one row for so many of W's
MAX_WASTE = 8 << 20  # bytes of adapters that are read though no row can have them: what a launch costs

_copy = tma.copy
_copy_tile = tma.copy_tile
_gated = gluon.jit(activation.gated.fn)
_wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


class Config(NamedTuple):
    block_k: int
    stages: int  # tiles in the ring
    programs: int  # at most, of all splits together
    parts: int = 1  # splits of K


@gluon.jit
def _copy_any(
    w_desc, a_desc, buffer, ready, tile, k, N, w_tiles, ROWS: gl.constexpr, GATED: gl.constexpr, PIECES: gl.constexpr
):
    """Start the copy of a tile of W, or of adapters behind them."""
    if PIECES == 0:  # noqa: SIM114 - known when it is compiled
        _copy_tile(w_desc, buffer, ready, tile, k, N, ROWS, GATED)
    elif tile < w_tiles:
        _copy_tile(w_desc, buffer, ready, tile, k, N, ROWS, GATED)
    else:
        _copy(a_desc, [(tile - w_tiles) * ROWS, k], ready, buffer)


@gluon.jit
def _store_h(
    h_ptr, ids, ranks, values, first, rows, M, A_ROWS, part, PIECES: gl.constexpr, R: gl.constexpr, RANK_STEP: gl.constexpr
):
    """Store the values [TILE, BLOCK_M] of adapters' rows from `first` on that are of the rows' own adapters."""
    n = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, values.type.layout))
    own = gl.load(ids + rows, rows < M, other=-1)
    rank = gl.load(ranks + n // R, n < A_ROWS, other=0)
    padded = (rank + RANK_STEP - 1) // RANK_STEP * RANK_STEP
    mask = (n // (PIECES * R))[:, None] == own[None, :]
    mask &= (n % R < padded)[:, None] & (rows < M)[None, :]
    values = gl.where((n % R < rank)[:, None], values, 0.0)  # what an adapter does not have may be anything
    at = h_ptr + part.to(gl.int64) * M * (PIECES * R)
    gl.store(at + rows.to(gl.int64)[None, :] * (PIECES * R) + (n % (PIECES * R))[:, None], values, mask)


@gluon.jit(do_not_specialize=["M", "part_stride", "A_ROWS"])
def _kernel(
    x_desc, w_desc, bias_ptr, out_ptr, a_desc, ranks, ids, h_ptr, M, N, out_stride, part_stride, A_ROWS,
    K_STEPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
    PIECES: gl.constexpr, R: gl.constexpr, RANK_STEP: gl.constexpr,
):  # fmt: skip
    """Program (p, s): tiles p, p + programs, ... of the output, split s of K, which is K_STEPS * BLOCK_K long.

    PIECES: of adapters, which have A_ROWS rows; 0: there are none.
    """
    BYTES: gl.constexpr = (TILE + BLOCK_M) * BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE  # output columns of a tile
    w_buffer = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE, BLOCK_K], w_desc.layout)
    x_buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    part = gl.program_id(1)
    first_k = part * (K_STEPS * BLOCK_K)
    w_tiles = gl.cdiv(N, WIDTH)
    tiles = w_tiles
    if PIECES > 0:
        tiles += gl.cdiv(A_ROWS, TILE)
    steps = gl.cdiv(tiles - program, programs) * K_STEPS
    for i in gl.static_range(STAGES):
        if i < steps:
            tile = program + i // K_STEPS * programs
            mbarrier.expect(ready.index(i), BYTES)
            k = first_k + i % K_STEPS * BLOCK_K
            _copy_any(w_desc, a_desc, w_buffer.index(i), ready.index(i), tile, k, N, w_tiles, TILE, GATED, PIECES)
    _wait_for_previous(PDL)
    for i in gl.static_range(STAGES):
        if i < steps:
            _copy(x_desc, [0, first_k + i % K_STEPS * BLOCK_K], ready.index(i), x_buffer.index(i))

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    step = 0
    for tile in range(program, tiles, programs):
        acc = gl.zeros([TILE, BLOCK_M], gl.float32, layout)
        for _ in range(K_STEPS):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            acc = warpgroup_mma(w_buffer.index(stage), x_buffer.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            tl.debug_barrier()  # all four warps have read the stage
            ahead = step + STAGES
            if ahead < steps:
                k = first_k + ahead % K_STEPS * BLOCK_K
                ahead_tile = program + ahead // K_STEPS * programs
                mbarrier.expect(ready.index(stage), BYTES)
                at = w_buffer.index(stage)
                _copy_any(w_desc, a_desc, at, ready.index(stage), ahead_tile, k, N, w_tiles, TILE, GATED, PIECES)
                _copy(x_desc, [0, k], ready.index(stage), x_buffer.index(stage))
            step += 1

        if GATED:
            # A thread needs gate and up of the same columns.
            pairs: gl.constexpr = gl.BlockedLayout([1, BLOCK_M // 4, 2], [32, 1, 1], [1, 4, 1], [2, 1, 0])
            both = gl.convert_layout(acc.reshape([2, WIDTH, BLOCK_M]).permute((1, 2, 0)), pairs)
            values, up = gl.split(both)
        else:
            values = acc
        out_layout: gl.constexpr = values.type.layout
        columns = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, out_layout))
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
        if BIAS:
            live = (columns < N) & (part == 0)
            values += gl.load(bias_ptr + columns, live, other=0.0).to(gl.float32)[:, None]
            if GATED:
                up += gl.load(bias_ptr + N + columns, live, other=0.0).to(gl.float32)[:, None]
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        if GATED:
            values = _gated(values, up, dtype)
        out = out_ptr + part.to(gl.int64) * part_stride
        mask = (columns < N)[:, None] & (rows < M)[None, :]  # none of the tiles behind W's
        gl.store(out + rows.to(gl.int64)[None, :] * out_stride + columns[:, None], values.to(dtype), mask)
        if PIECES > 0:  # noqa: SIM102 - known when it is compiled
            if tile >= w_tiles:
                first = (tile - w_tiles) * TILE
                _store_h(h_ptr, ids, ranks, values, first, rows, M, A_ROWS, part, PIECES, R, RANK_STEP)


@cached
def choose(rows: int, n: int, k: int, sms: int, *, is_gated: bool = False, split_k: bool = False) -> Config:
    """The configuration for n output columns on so many SMs, by the tuning table.

    K is split if split_k, if there are tiles for half of the SMs or fewer, and into splits of at least MIN_PART.
    """
    tuning = linear_tuning().stream
    block_k, sharing = tuning.block_k, tuning.gated_sharing if is_gated else tuning.sharing
    tiles = triton.cdiv(n, TILE.value // 2 if is_gated else TILE.value)
    parts = 1
    max_parts = next((most for limit, most in tuning.max_parts if rows <= limit), tuning.max_parts[-1][1])
    while split_k and parts < max_parts and tiles * parts * 2 <= sms and k >= parts * 2 * MIN_PART:
        parts *= 2
    programs = sms * sharing
    steps = triton.cdiv(k, block_k * parts) * triton.cdiv(tiles * parts, programs)
    return Config(block_k, min(max_stages(rows, block_k, sharing, is_gated), steps), programs, parts)


def max_stages(rows: int, block_k: int, sharing: int, is_gated: bool) -> int:
    """Stages that fit into a program's share of an SM; at most 16, since the first of each are unrolled."""
    exchange = TILE.value * block_rows(rows) * 4 if is_gated else 0
    return min((SHARED_BYTES // sharing - exchange) // ((TILE.value + block_rows(rows)) * block_k * 2), 16)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    shrink: Shrink | None = None,
    h: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel, for 1 to 64 rows aligned as TMA needs it; out [M, N], or float32 [S, M, N] if config has S > 1 parts.

    shrink: adapters, not beside a gated product; h of `Shrink.new_h` gets A x. Raises ValueError if shapes or types do not fit.
    """
    (rows, k), n = x.shape, out.shape[-1]
    columns = 2 * n if is_gated else n
    shape = (rows, n) if config.parts == 1 else (config.parts, rows, n)
    dtype = x.dtype if config.parts == 1 else torch.float32
    if weight.shape != (columns, k) or out.shape != shape or (bias is not None and bias.shape != (columns,)):
        raise ValueError(f"linear_hopper: x {x.shape}, weight {weight.shape}, out {out.shape} do not fit")
    if x.dtype != weight.dtype or out.dtype != dtype or out.stride(-1) != 1 or (is_gated and config.parts > 1):
        raise ValueError(f"linear_hopper: {x.dtype} times {weight.dtype} to {out.dtype} is not for this kernel")
    if shrink is not None and (is_gated or h is None or shrink.a.dtype != x.dtype or shrink.a.shape[3] != k):
        raise ValueError(f"linear_hopper: adapters {shrink.a.shape} of {shrink.a.dtype} do not fit")
    block_m, width = block_rows(rows), TILE.value // 2 if is_gated else TILE.value
    tiles, adapter, of_a = triton.cdiv(n, width), list[object]([None] * 4), [0, 0]
    if shrink is not None:
        tiles += triton.cdiv(shrink.rows, TILE.value)
        lines = tma.lines(shrink.a, shrink.rows, k, k, (TILE.value, config.block_k))
        adapter, of_a = [lines, shrink.ranks, shrink.ids, h], list(shrink.a.shape[1:3])
    _kernel[(min(tiles, max(config.programs // config.parts, 1)), config.parts)](
        tma.lines(x, rows, k, x.stride(0), (block_m, config.block_k)),
        tma.lines(weight, columns, k, weight.stride(0), (width, config.block_k)),
        x if bias is None else bias, out, *adapter, rows, n, out.stride(-2), out.stride(0) if config.parts > 1 else 0,
        shrink.rows if shrink else 0,
        triton.cdiv(k, config.block_k * config.parts), block_m, config.block_k, config.stages, bias is not None, is_gated, pdl,
        *of_a, RANK_STEP, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, *, is_gated: bool, pdl: int
) -> torch.Tensor:
    """x @ weight^T + bias, gated if is_gated; in `out` if given."""
    (rows, k), n = x.shape, weight.shape[0] // 2 if is_gated else weight.shape[0]
    out = x.new_empty((rows, n)) if out is None else out
    launch(x, weight, bias, out, choose(rows, n, k, num_sms(x.device), is_gated=is_gated), is_gated=is_gated, pdl=pdl)
    return out


def _choose_split_k(x: torch.Tensor, weight: torch.Tensor) -> Config:
    n, k = weight.shape
    return choose(len(x), n, k, num_sms(x.device), split_k=True)


def num_splits(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Splits over K of `linear_split_k`; 1 if the product has enough tiles by itself."""
    return _choose_split_k(x, weight).parts


def linear_split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, pdl: int) -> torch.Tensor:
    """Float32 [S, M, N], partial sums over K of x @ weight^T + bias, S = `num_splits` > 1."""
    config = _choose_split_k(x, weight)
    out = torch.empty(config.parts, len(x), len(weight), dtype=torch.float32, device=x.device)
    launch(x, weight, bias, out, config, pdl=pdl)
    return out


def shrinks(rows: int, n: int, shrink: Shrink) -> bool:
    """Whether A of all adapter slots is little enough beside a W of n rows, and aligned as TMA needs it."""
    slots, inputs = shrink.a.shape[0], shrink.a.shape[3]
    waste = max(slots - rows, 0) * shrink.width * inputs * shrink.a.element_size()
    return shrink.rows * SHARE <= n and waste <= MAX_WASTE and can_copy(shrink.a.flatten(0, 2))


def shrinking_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    shrink: Shrink,
    *,
    split_k: bool,
    pdl: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(`linear`, or `linear_split_k` if split_k, h or its partial sums); None: `shrinks` says no, or K is not to be split."""
    (rows, k), n = x.shape, len(weight)
    config = choose(rows, n, k, num_sms(x.device), split_k=split_k)
    if not shrinks(rows, n, shrink) or (split_k and config.parts == 1):
        return None
    if split_k:
        out = torch.empty(config.parts, rows, n, dtype=torch.float32, device=x.device)
    elif out is None:
        out = x.new_empty((rows, n))
    h = shrink.new_h(rows, config.parts)
    launch(x, weight, bias, out, config, shrink=shrink, h=h, pdl=pdl)
    return out, h
