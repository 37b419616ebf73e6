"""The width of a product's tiles that gives all programs equal work."""

import triton

from quire.kernels.tuning.current import cached

LEAST_WIDTH = 16
TILE_COST = 2  # columns: the fixed cost of a tile


@cached
def even_width(columns: int, most: int, programs: int, multiple: int = 1) -> int:
    """Columns of a tile, at most `most` and a `multiple`, that give the busiest program the least work.

    A product ends when the last program has done its tiles: 448 of 32 columns on 132 programs take as long as 528 would.
    """
    widths = [width for width in range(LEAST_WIDTH, most + 1) if columns % width == width % multiple == 0]
    rounds = {width: triton.cdiv(columns // width, programs) for width in widths}
    return min(widths, key=lambda width: (rounds[width] * (width + TILE_COST), -width), default=most)
