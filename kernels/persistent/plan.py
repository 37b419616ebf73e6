"""What `scaled_block` computes, and how it is cut: without Gluon, so that any Triton can import it."""

from typing import NamedTuple

import torch
import triton

from quire.kernels.linear.scaled import BLOCK, Scaled
from quire.kernels.triton_support import hopper
from quire.kernels.tuning.current import cached

ROWS = 8  # of x that wgmma takes, and that lie together in shared memory: the first is the row, and others mean nothing
OTHER_SHARED_BYTES = 6 * 1024  # than the ring's and the row's: scales and barriers
TILE = 64  # rows of W
MAX_STAGES = 12
MIN_STAGES = 3
MAX_ROW = 120 * 128  # numbers of a row that shared memory has room for beside a ring
BUSY = 0.85  # programs that have something to do, of all
MUCH_BUSIER = 1.25
LEAST_BUSY = 0.8
LARGE = 1 << 23  # weights


class Config(NamedTuple):
    tile: int  # rows of W
    blocks: int  # of 128 of K in a stage: 2 or 4
    stages: int  # of the ring
    programs: int
    o_parts: int  # splits of K
    down_parts: int


class Weight(NamedTuple):
    """Of a product, and the static scale of its inputs, float32 [1], if they have one."""

    scaled: Scaled
    input_scale: torch.Tensor | None = None


class Block(NamedTuple):
    """What follows attention: o_proj, the norm's weight [H] and its eps, gate and up, down."""

    o: Weight
    gate_up: Weight
    down: Weight
    norm: torch.Tensor
    eps: float
    by_block: bool  # whether dynamic scales of inputs are of 128 numbers each


class Next(NamedTuple):
    """The next block's q, k and v [N, H], their bias [N] or none, and the norm before them."""

    qkv: Weight
    bias: torch.Tensor | None
    norm: torch.Tensor
    eps: float


class Sizes(NamedTuple):
    """Of one product."""

    tiles: int  # of its output
    parts: int  # splits of K
    steps: int  # stages of a part
    blocks: int  # of 128 of all of K


def row_blocks(hidden: int, attended: int, inner: int, down_parts: int, warps: int) -> int:
    """Blocks of 128 of a row that lie in shared memory at once, in whole tuples of `row.store_row`."""
    return triton.cdiv(max(hidden, attended, inner // down_parts) // BLOCK, warps) * warps


def _busy(units: int, programs: int) -> float:
    """The part of the programs that has a unit, on average over as many rounds as units need."""
    return units / (triton.cdiv(units, programs) * programs)


def _parts(tiles: int, steps: int, programs: int, least: int = 1) -> int | None:
    """Splits of K, of so many stages: as few as keep most programs busy, or those that keep the most; None: none fit."""
    found = [parts for parts in (1, 2, 4, 8) if steps % parts == 0 and parts >= least and (parts < 8 or tiles * 8 <= programs)]
    enough = [parts for parts in found if _busy(tiles * parts, programs) >= BUSY]
    return enough[0] if enough else max(found, key=lambda parts: _busy(tiles * parts, programs), default=None)


def _config(hidden: int, attended: int, inner: int, sms: int, blocks: int) -> Config | None:
    if hidden % TILE or inner % BLOCK or any(k % (BLOCK * blocks) for k in (hidden, attended, inner)):
        return None
    tiles, stage = hidden // TILE, BLOCK * blocks
    programs = min(sms, max(inner // (TILE // 2), tiles))
    o_parts = _parts(tiles, attended // stage, programs)
    down_parts = _parts(tiles, inner // stage, programs, triton.cdiv(inner, MAX_ROW))
    if o_parts is None or down_parts is None:
        return None
    row_bytes = row_blocks(hidden, attended, inner, down_parts, TILE // 8) * ROWS * BLOCK
    stages = min((hopper.SHARED_BYTES - OTHER_SHARED_BYTES - row_bytes) // (TILE * stage), MAX_STAGES)
    return Config(TILE, blocks, stages, programs, o_parts, down_parts) if stages >= MIN_STAGES else None


@cached
def choose(hidden: int, attended: int, inner: int, sms: int) -> Config | None:
    """The configuration for a block of these sizes on so many SMs; None: the kernel does not take them.

    Long stages have less to do a byte; short ones can be shared out more evenly, which pays where there are many bytes.
    """
    found = [config for blocks in (4, 2) if (config := _config(hidden, attended, inner, sms, blocks)) is not None]
    if not found or hidden * inner < LARGE:
        return found[0] if found else None

    def busy(config: Config) -> float:
        tiles = hidden // TILE
        return min(_busy(tiles * parts, config.programs) for parts in (config.o_parts, config.down_parts))

    best = found[-1] if busy(found[-1]) > MUCH_BUSIER * busy(found[0]) else found[0]
    return best if busy(best) >= LEAST_BUSY else None


def new_state(device: torch.device) -> torch.Tensor:
    """What the programs of a launch meet by; for launches one after the other, all of one Config.programs."""
    return torch.zeros(1, dtype=torch.int64, device=device)
