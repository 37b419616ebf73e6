"""Experts with 4-bit weights (`four_bits_weight`): chooses the kernels for a number of rows.

The formula is `experts_reference`'s on the dequantized weights, which are rounded to x's type (mxfp4's are exact in bfloat16).
One row or few: a product for each pair of row and expert, on mma if it is supported (`four_bits_row`), else on plain cores
(`four_bits_pairs`); more: tiles of one expert's rows on tensor cores (`four_bits_tiles`, on a Hopper `four_bits_wide`). Weights
are read in 4 bits, once for a pair or a tile. float32 has one kernel and one configuration, so that a row's result is the same
to the last bit in any batch.
"""

import torch

from quire.kernels.experts import four_bits_pairs, four_bits_tiles, grouped
from quire.kernels.experts.experts_reference import Act, Gelu
from quire.kernels.experts.four_bits_pairs import PAIRS, Pairs
from quire.kernels.experts.four_bits_tiles import Tiles
from quire.kernels.experts.four_bits_weight import FourBitWeights
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN
from quire.kernels.tuning.configs import RowConfig, WideConfig
from quire.kernels.tuning.current import cached, current

PAIR_ROWS = 2  # up to which a product a pair is used
EXACT = Tiles(16, 32, 32, 4, 2)


@cached
def choose(rows: int, top_k: int, num_experts: int, itemsize: int = 2, on_mma: bool = False) -> RowConfig | Pairs | Tiles:
    """The configuration for x [rows, H], k of E experts a row; on_mma: `four_bits_row` can compute them."""
    if itemsize == 4:
        return EXACT
    if on_mma and rows <= current().experts.four_bits_row.max_rows:
        return current().experts.four_bits_row
    if rows <= PAIR_ROWS:
        return PAIRS
    per_expert = rows * top_k / num_experts
    tile = next(config.rows for limit, config in current().experts.tiles if per_expert <= limit)
    if tile <= 32:
        return Tiles(tile, 32, 64, 4, 4)
    return Tiles(tile, 32, 64, 4, 3) if tile == 64 else Tiles(tile, 64, 128, 8, 3)


@cached
def choose_wide(rows: int, top_k: int, num_experts: int) -> WideConfig | None:
    """The configuration of `four_bits_wide`, on a Hopper; None: that of `choose` is as fast."""
    few = max(PAIR_ROWS, current().experts.four_bits_row.max_rows)
    return None if rows <= few else grouped.rule(current().experts.wide_four_bits, rows * top_k / num_experts)


def _supports_wide(x: torch.Tensor, w: FourBitWeights) -> bool:
    """mxfp4 needs bfloat16, as its exponents hold all mxfp4 numbers."""
    dtypes = (torch.bfloat16,) if w.gate_up.is_mx else (torch.bfloat16, torch.float16)
    return w.gate_up.is_mx == w.down.is_mx and grouped.supports(x, w.gate_up.words, w.down.words, dtypes, w.down.inputs)


def _can_use_mma(x: torch.Tensor, w: FourBitWeights) -> bool:
    """Whether `four_bits_row` can compute these: bfloat16, 16-byte aligned rows, a known GPU and Triton."""
    fits = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and w.gate_up.inputs % 8 == w.down.inputs % 8 == 0
    return x.dtype == torch.bfloat16 and fits and hopper.available(x.device)


def experts(
    x: torch.Tensor,
    w: FourBitWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    *,
    pdl: int = PLAIN,
    config: RowConfig | Pairs | Tiles | WideConfig | None = None,
) -> torch.Tensor:
    """[T, H] of x [T, H], with experts ids [T, k]; arguments as checked by `experts.experts`."""
    config = config or _configuration(x, w, act, ids.shape[1])
    if isinstance(config, RowConfig):
        from quire.kernels.experts import four_bits_row

        return four_bits_row.experts(x, w, ids, weights, act, shared, config, pdl=pdl)
    if isinstance(config, WideConfig):
        from quire.kernels.experts import four_bits_wide  # imports Gluon, which other GPUs' Triton may not have

        return four_bits_wide.experts(x, w, ids, weights, act, shared, config, pdl=pdl)
    if isinstance(config, Pairs):
        return four_bits_pairs.experts(x, w, ids, weights, act, shared, config, pdl=pdl)
    return four_bits_tiles.experts(x, w, ids, weights, act, shared, config, pdl=pdl)


def _configuration(x: torch.Tensor, w: FourBitWeights, act: Act, top_k: int) -> RowConfig | Pairs | Tiles | WideConfig:
    num_experts = len(w.gate_up.words)
    if not isinstance(act, Gelu) and _supports_wide(x, w) and (config := choose_wide(len(x), top_k, num_experts)):
        return config
    return choose(len(x), top_k, num_experts, x.element_size(), _can_use_mma(x, w))
