"""The operands and the tiling of `scaled_block`: without Gluon, so that any Triton version can import it."""

from typing import NamedTuple

import torch
import triton

from quire.kernels.linear.scaled import BLOCK, Scaled
from quire.kernels.linear.tiles import even_width
from quire.kernels.triton_support import hopper
from quire.kernels.tuning.current import cached

ROWS = 8  # of x that wgmma takes, together in shared memory: the first is the row, the others are unused
OTHER_SHARED_BYTES = 6 * 1024  # besides the ring and the row: scales and barriers
TILE = 64  # rows of W
MAX_STAGES = 12
MIN_STAGES = 3
MAX_ROW = 76 * 128  # elements of a split of down's row, for which shared memory has room beside a ring
BUSY = 0.85  # fraction of the programs that have a unit
MUCH_BUSIER = 1.25
LEAST_BUSY = 0.8
LARGE = 1 << 23  # weights
LEAST_OF_PARTS = 40


class Config(NamedTuple):
    tile: int  # rows of W
    blocks: int  # groups of 128 along K in a stage: 2 or 4
    stages: int  # of the ring
    programs: int
    o_parts: int  # splits of K
    down_parts: int
    o_width: int = TILE  # columns of its tiles
    down_width: int = TILE
    varies: bool = False  # whether the width of tiles of gate, up, q, k and v varies


class Weight(NamedTuple):
    """The weight of a product, and the static scale of its inputs, float32 [1], if they have one."""

    scaled: Scaled
    input_scale: torch.Tensor | None = None


class Block(NamedTuple):
    """The part of a decoder block behind attention: o_proj, the norm's weight [H] and its eps, gate and up, down."""

    o: Weight
    gate_up: Weight
    down: Weight
    norm: torch.Tensor
    eps: float
    by_block: bool  # whether dynamic scales of inputs are per group of 128


class Next(NamedTuple):
    """The next block's q, k and v [N, H], their bias [N] or none, and the norm before them."""

    qkv: Weight
    bias: torch.Tensor | None
    norm: torch.Tensor
    eps: float


class Sizes(NamedTuple):
    """The tiling of one product."""

    tiles: int  # of its output
    parts: int  # splits of K
    steps: int  # stages of a split
    blocks: int  # groups of 128 in all of K
    width: int  # columns of a tile


def row_blocks(hidden: int, attended: int, inner: int, down_parts: int, warps: int) -> int:
    """Groups of 128 of a row that are in shared memory at once, rounded up to whole tuples of `row.store_row`."""
    return triton.cdiv(max(hidden, attended, inner // down_parts) // BLOCK, warps) * warps


def tile_width(columns: int, most: int, config: Config) -> int:
    """Columns of a tile, `most` at most."""
    return even_width(columns, most, config.programs) if config.varies else most


def _busy(units: int, programs: int) -> float:
    """The fraction of programs that have a unit, averaged over as many rounds as the units need."""
    return units / (triton.cdiv(units, programs) * programs)


def _parts(tiles: int, steps: int, programs: int, least: int = 1) -> int | None:
    """Number of splits of K (`steps` stages): the fewest that keep most programs busy, or the busiest; None: none fit."""
    found = [parts for parts in (1, 2, 4, 8) if steps % parts == 0 and parts >= least and (parts < 8 or tiles * 8 <= programs)]
    enough = [parts for parts in found if _busy(tiles * parts, programs) >= BUSY]
    return enough[0] if enough else max(found, key=lambda parts: _busy(tiles * parts, programs), default=None)


def _split(hidden: int, k_steps: int, programs: int, varies: bool, least: int = 1) -> tuple[float, int, int] | None:
    """(how busy programs are, width, splits) of o or down: the widest tile that keeps most busy, or the busiest."""
    found = []
    for width in range(TILE, LEAST_OF_PARTS - 1 if varies else TILE - 1, -1):
        if hidden % width == 0 and (parts := _parts(hidden // width, k_steps, programs, least)) is not None:
            found.append((_busy(hidden // width * parts, programs), width, parts))
    enough = [split for split in found if split[0] >= BUSY]
    return enough[0] if enough else max(found, default=None)


def _config(hidden: int, attended: int, inner: int, sms: int, blocks: int, varies: bool) -> tuple[float, Config] | None:
    """As `fitting`, for stages of `blocks` groups."""
    if any(k % (BLOCK * blocks) for k in (hidden, attended, inner)):
        return None
    stage = BLOCK * blocks
    programs = min(sms, max(inner // (TILE // 2), hidden // TILE))
    o = _split(hidden, attended // stage, programs, varies)
    down = _split(hidden, inner // stage, programs, varies, triton.cdiv(inner, MAX_ROW))
    if o is None or down is None:
        return None
    row_bytes = row_blocks(hidden, attended, inner, down[2], TILE // 8) * ROWS * BLOCK
    stages = min((hopper.SHARED_BYTES - OTHER_SHARED_BYTES - row_bytes) // (TILE * stage), MAX_STAGES)
    config = Config(TILE, blocks, stages, programs, o[2], down[2], o[1], down[1], varies)
    return (min(o[0], down[0]), config) if stages >= MIN_STAGES else None


@cached
def fitting(hidden: int, attended: int, inner: int, sms: int, in_squares: bool = False) -> tuple[float, Config] | None:
    """How busy programs are with o or down, and the configuration for a block of these sizes on so many SMs; None: none fits.

    Long stages cost less work per byte; short ones divide more evenly among programs, which pays if there are many bytes. So do
    tiles of other widths than TILE, which need that there are no 2-D scale groups (in_squares): one would end within a tile.
    """
    configs = [_config(hidden, attended, inner, sms, blocks, not in_squares) for blocks in (4, 2)]
    found = [config for config in configs if config is not None]
    if not found:
        return None
    return found[-1] if found[-1][0] > MUCH_BUSIER * found[0][0] else found[0]


def choose(hidden: int, attended: int, inner: int, sms: int, in_squares: bool = False) -> Config | None:
    """The configuration of `fitting`, if it pays: not if it leaves many programs idle; and for small blocks products that
    quantize their inputs to 8 bits themselves (`scaled_fused`) are faster.
    """
    found = None if hidden * inner < LARGE else fitting(hidden, attended, inner, sms, in_squares)
    return found[1] if found is not None and found[0] >= LEAST_BUSY else None


def new_state(device: torch.device) -> torch.Tensor:
    """The counter by which the programs of a launch meet; for consecutive launches, all with the same Config.programs."""
    return torch.zeros(1, dtype=torch.int64, device=device)
