"""A tuning table whose choices do not depend on the number of rows, so that every sum has one order: for `--deterministic`.

`fixed_order` makes it of a GPU's table. Where a kernel has several ways to sum, the table names one for all rows; where the
choice is not the table's (products, split keys, split K of the router, ties among the best logits), the launchers look at
`Tuning.fixed_order`. Numbers that only say how fast something is, such as sizes of tiles that share an order, may still vary.
"""

from msgspec.structs import replace

from quire.kernels.tuning.configs import TileConfig, TilesConfig
from quire.kernels.tuning.table import ANY, ExchangeTuning, Tuning

# Both with wgmma, which sums over K in one order, on tiles of at least 64 rows.
_FEW = TilesConfig(64, True, TileConfig(64, 64, 4, 4), TileConfig(128, 64, 4, 4))
_MANY = TilesConfig(128, False, TileConfig(64, 64, 8, 3), TileConfig(128, 64, 8, 3))
_ROPE_TILE = 1024


def fixed_order(table: Tuning) -> Tuning:
    """The table with one order of every sum. It keeps what only decides speed."""
    experts = replace(
        table.experts,
        pair_rows=0,
        tiles=((48.0, _FEW), (float(ANY), _MANY)),
        wide=(),
        row=replace(table.experts.row, max_rows=0),
        router_rows=0,
    )
    return replace(
        table,
        fixed_order=True,
        linear={weights: replace(tuning, norm_linear_weight=0) for weights, tuning in table.linear.items()},
        attention=replace(table.attention, prefill_hopper=(), rope_tiles=((ANY, _ROPE_TILE),)),
        experts=experts,
        step=replace(table.step, early_rows=0),
        # One-shot sums come in the order of the ranks, for any number of rows.
        exchange=ExchangeTuning(rows=tuple((ranks, max(one, two), 0) for ranks, one, two in table.exchange.rows)),
    )
