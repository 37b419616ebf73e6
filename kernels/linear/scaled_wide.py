"""Products of scaled 8-bit operands of many rows for Hopper: 65 to 512, where cuBLAS's tiles do not fill the GPU,
and of int8 all, for which cuBLAS gives int32 sums that are still to be scaled.

Operands, scales, results and parts as in `scaled_hopper`; scales of W are of rows, or of squares of 128 in which a tile's
pieces lie (`fp8.widens`). Tiles and parts are chosen for the GPU's SMs (`choose`); the kernel is `scaled_wide_kernel`'s.
"""

import itertools
from typing import NamedTuple

import torch
import triton

from quire.kernels.linear.scaled import BLOCK, MAX_BUCKET, Scaled, bucket, check, is_exact
from quire.kernels.linear.scaled_wide_kernel import STRIPE, wide_kernel
from quire.kernels.triton_support import tma
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, launch_options
from quire.kernels.tuning.current import cached

PIECE = 128  # rows of W of a wgmma, at most
SHARED_BYTES = 224 * 1024  # of an SM, for rings
FEW_TILES = ((64, 128), (64, 256))  # rows of x, of W
SMALL_TILES, LARGE_TILES = ((128, 64), (128, 128)), ((128, 256), (256, 128))
MAX_REGISTERS = 65536 // (3 * 128) // 8 * 8  # a thread, before they are shared out: three warpgroups fill an SM
MAX_STAGES = 8
MIN_STEPS = 4  # of a part of K
# For choices alone, of H100 and H200 alike: bytes a clock of an SM's ring, of L2 and of memory for each of all SMs; clocks of
# the tensor cores for 64 x 128 x 128, and where products have to wait for each other; of a tile's begin and end. Of fp8, bytes
# into the ring that cost a clock more: sustained, its products are bounded by power (LOG.md), which small tiles' copies take.
SM_BYTES, L2_BYTES, MEMORY_BYTES, PRODUCT, ALONE, AROUND = 62.0, 62.0, 16.0, 340, 350, 4000
POWER_BYTES = 300.0


class Config(NamedTuple):
    block_m: int  # rows of x of a tile: 64, 128 or 256
    block_n: int  # rows of W of a tile, 64 to 256; block_m * block_n is 64 x 128 to 128 x 256: sums are registers
    stages: int
    programs: int  # at most
    parts: int = 1  # splits of K


def piece_of(config: Config) -> int:
    """Rows of W of a wgmma."""
    return min(config.block_n if config.block_m > STRIPE.value else config.block_n // 2, PIECE)


def k_blocks(k: int, config: Config, exact: bool) -> tuple[int, int]:
    """Blocks of a part of K, beyond which are zeros; and of how many one is added while the next is under way.

    1: there are not the registers for two. More of float32 would be more registers, too.
    """
    blocks = triton.cdiv(k, BLOCK * config.parts)
    if not exact and config.block_m * config.block_n > 128 * 128:
        return blocks, 1
    at_once = 8 if exact and blocks % 8 == 0 else 4
    return triton.cdiv(blocks, at_once) * at_once, at_once


def stage_bytes(block_m: int, block_n: int) -> int:
    """Of a stage of the ring."""
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

    by_block: W's scales are of blocks; exact: as `scaled.is_exact` says.
    """
    return _choose(bucket(rows), n, k, sms, is_gated, split_k, by_block, exact)


@cached
def _choose(rows: int, n: int, k: int, sms: int, is_gated: bool, split_k: bool, by_block: bool, exact: bool) -> Config:
    found = configs(rows, k, sms, split_k=split_k, by_block=by_block)
    return min(found, key=lambda config: cycles(config, rows, n, k, sms, is_gated=is_gated, by_block=by_block, exact=exact))


def configs(rows: int, k: int, sms: int, *, split_k: bool, by_block: bool = False) -> list[Config]:
    """What there is to choose from; the ring is as deep as fits.

    Of blocks of scales only tiles whose sums are half of the registers: of larger ones the compiler spills. Of prompts' rows no
    parts: they have tiles enough.
    """
    found, split_k = [], split_k and rows <= MAX_BUCKET
    shapes: tuple[tuple[int, int], ...]
    if rows <= STRIPE.value:
        shapes = FEW_TILES
    elif by_block:
        shapes = SMALL_TILES
    else:  # of prompts, small tiles wait for L2; of equals the first is chosen: 256 x 128 was faster, with fp8 at 256 rows
        shapes = LARGE_TILES if rows > 2 * MAX_BUCKET else SMALL_TILES + LARGE_TILES[::-1]
    for (block_m, block_n), parts in itertools.product(shapes, (1, 2, 4, 8) if split_k else (1,)):
        if block_m < 2 * rows and (parts == 1 or k >= parts * MIN_STEPS * BLOCK):
            stages = min(SHARED_BYTES // stage_bytes(block_m, block_n), MAX_STAGES)
            found.append(Config(block_m, block_n, stages, sms, parts))
    return found


def cycles(
    config: Config, rows: int, n: int, k: int, sms: int, *, is_gated: bool, by_block: bool = False, exact: bool = False
) -> float:
    """About how many clocks of the GPU a product takes: reckoned, from what a block of K needs of each unit."""
    block_m, block_n, _, programs, parts = config
    row_tiles, columns = triton.cdiv(rows, block_m), 2 * n if is_gated else n
    items = row_tiles * triton.cdiv(columns, block_n) * parts
    busy = min(items, programs)
    steps, at_once = k_blocks(k, config, exact)
    product = block_m * block_n / (STRIPE.value * PIECE) * (PRODUCT if at_once > 1 else ALONE)
    copied = stage_bytes(block_m, block_n) * max(busy / sms / L2_BYTES, 1 / SM_BYTES)
    streamed = block_n * BLOCK * busy / min(row_tiles, programs) / sms / MEMORY_BYTES
    step = max(product, copied, streamed)
    limited = 0.0 if exact or by_block else stage_bytes(block_m, block_n) / POWER_BYTES  # of those neither was measured
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
    """Run the kernel, for what `fp8.widens` says, of any number of rows; out [M, N], or parts if config has several.

    Raises ValueError as `check`, and for scales that it does not take.
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
