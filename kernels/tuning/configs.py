"""How one kernel is tiled for a GPU: tiles, warps, stages. Values only, which a tuning table holds and a JSON file can express.

The kernels' own modules describe the fields; nothing here imports Triton or a kernel.
"""

import msgspec

REGISTERS = 65536  # of an SM, 32-bit


class SkinnyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For `linear`'s kernels for 1 to 16 rows. block_k is reduced to the power of two that holds K."""

    dot: bool  # on tensor cores
    block_n: int  # output columns of a program
    block_k: int
    num_warps: int
    num_stages: int = 1  # of the dot kernel: loads in flight ahead of the arithmetic


class SplitConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For `split_linear`'s own kernel, for 17 to 64 rows of small weights."""

    splits: int  # of K
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class DecodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For decode attention: keys a tile, warps and stages a program, programs an SM; rows of up to whole_tiles stay whole."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    whole_tiles: int = 3

    def ring_bytes(self, line_bytes: int) -> int:
        """Approximate shared memory of a program, if a key and its value take line_bytes."""
        return (self.num_stages - 1) * self.tile * line_bytes + 8192

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs fit; the compiler alone takes 250, for the rare combine."""
        return _max_registers(self.programs_per_sm, self.num_warps)


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For prefill: rows of a query tile (tokens x group), keys of a KV tile, warps and stages a program, programs an SM."""

    query_rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs fit."""
        return _max_registers(self.programs_per_sm, self.num_warps)


class HopperPrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For `prefill_hopper`: keys of a tile, tiles of keys and of values in shared memory, whether consumers take turns at the
    tensor cores, registers of a producer's thread (the consumers have the others).
    """

    tile: int
    stages: int
    ping_pong: bool
    producer_registers: int


class PairConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For experts' kernels for very few rows: output columns of a program of each product, and how K is tiled."""

    gate_up_n: int
    down_n: int
    block_k: int
    num_warps: int


class RowConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For experts' kernels on mma, for at most max_rows rows: warps of a program of each product, and the pieces of weights, 1
    KB a warp, that it loads ahead. max_rows 0: `pairs` computes all products; gate_up_warps 0: it computes gate and up.

    warps: 4 or 8; with 4 bits also 1, and then a program has gate_up_pairs or down_pairs pairs of W's rows.
    """

    max_rows: int
    gate_up_warps: int
    down_warps: int
    ahead: int
    gate_up_pairs: int = 2
    down_pairs: int = 1


class TileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For one of experts' products on tensor cores. Gate and up have block_n columns each."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class TilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For experts' products in tiles of `rows` rows of one expert; streams: each weight is read about once."""

    rows: int
    streams: bool
    gate_up: TileConfig
    down: TileConfig


class WideTile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For one of experts' products on Hopper: stripes of 64 rows of W of each of a program's two warpgroups, chunks of K in a
    stage of its ring (64 in `wide`, 128 in `four_bits_wide`), programs that share an SM.
    """

    stripes: int
    blocks: int
    sharing: int


class WideConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For experts' products on Hopper in tiles of `rows` rows of one expert: 16 to 256, a power of two."""

    rows: int
    gate_up: WideTile
    down: WideTile


def _max_registers(programs: int, num_warps: int) -> int:
    return min(255, REGISTERS // (programs * num_warps * 32) // 8 * 8)
