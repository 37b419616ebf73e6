"""Experts with 8-bit weights and 8-bit inputs (`scaled_weight`), fp8 or int8: chooses the kernels for a number of rows.

The formula is `experts_reference`'s on the dequantized weights; x and h are rounded to 8 bits, with a scale per token or per
128 of its values, never over the batch, or with a static one: each by a launch of `linear/quantize`. Few rows: a product for
each pair of row and expert (`scaled_pairs`, on mma `scaled_row`); more: tiles of one expert's rows on tensor cores
(`scaled_tiles`). float32, for tests, has one configuration for all numbers of rows.
"""

import torch

from quire.kernels.experts import scaled_pairs, scaled_tiles, tiles
from quire.kernels.experts.align import align
from quire.kernels.experts.experts_reference import Act, SwiGLU
from quire.kernels.experts.scaled_pairs import Pairs
from quire.kernels.experts.scaled_tiles import Tiles
from quire.kernels.experts.scaled_weight import ScaledExperts, ScaledWeights
from quire.kernels.linear import quantize
from quire.kernels.linear.scaled import Scaled
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN
from quire.kernels.tuning.configs import RowConfig
from quire.kernels.tuning.current import cached, current

PAIRS, EXACT = Pairs(2, 4, 1024, 2), Tiles(16, 32, 32, 4, 2)


@cached
def choose(rows: int, top_k: int, num_experts: int, itemsize: int = 2, on_mma: bool = False) -> RowConfig | Pairs | Tiles:
    """The configuration for x [rows, H], k of E experts a row: limits of rows as for 16 bits, the rest estimated.

    on_mma: `scaled_row` can compute them.
    """
    tuning = current().experts
    if itemsize == 4:
        return EXACT
    if on_mma and rows <= tuning.scaled_row.max_rows:
        return tuning.scaled_row
    if rows <= tuning.pair_rows:
        return PAIRS
    per_expert = rows * top_k / num_experts
    tile = next(config.rows for limit, config in tuning.tiles if per_expert <= limit)
    if tile <= 32:
        return Tiles(tile, 32, 64, 4, 4)
    return Tiles(tile, 64, 128, 4, 4) if tile == 64 else Tiles(tile, 64, 128, 8, 3)


def _can_use_mma(x: torch.Tensor, w: ScaledWeights) -> bool:
    """Whether `scaled_row` can compute these: K in units of 64, a known GPU and Triton."""
    return w.gate_up.shape[2] % 64 == w.down.shape[2] % 64 == 0 and hopper.available(x.device)


def _quantized(x: torch.Tensor, w: ScaledExperts, pdl: int) -> Scaled:
    """x [T, K] as the inputs of these weights."""
    return quantize.quantize(x, w.data.dtype, by_block=w.by_block, static_scale=w.input_scale, pdl=pdl)


def _of_few_rows(
    x: torch.Tensor,
    w: ScaledWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    config: RowConfig,
    pdl: int,
) -> torch.Tensor:
    from quire.kernels.experts import scaled_row

    late = min(pdl, LATE)
    quantized = _quantized(x, w.gate_up, pdl)
    if config.gate_up_warps and isinstance(act, SwiGLU):
        h = scaled_row.gate_up(quantized, w, ids, act, config, x.dtype, pdl=late)
    else:
        h = scaled_pairs.gate_up(quantized, w, ids, act, PAIRS, x.dtype, pdl=late)
    h8 = _quantized(h, w.down, late)  # not EARLY: the next kernel reads ids before it waits
    return scaled_row.down(h8, w, ids, weights, shared, config, x.dtype, pdl=late)


def experts(
    x: torch.Tensor,
    w: ScaledWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    *,
    pdl: int = PLAIN,
    config: RowConfig | Pairs | Tiles | None = None,
) -> torch.Tensor:
    """[T, H] of x [T, H], with experts ids [T, k]; arguments as checked by `experts.experts`."""
    (num_experts, _, _), top_k, dtype = w.gate_up.shape, ids.shape[1], x.dtype
    config = config or choose(len(x), top_k, num_experts, x.element_size(), _can_use_mma(x, w))
    if isinstance(config, RowConfig):
        return _of_few_rows(x, w, ids, weights, act, shared, config, pdl)
    quantized = _quantized(x, w.gate_up, pdl)
    if isinstance(config, Pairs):
        h = scaled_pairs.gate_up(quantized, w, ids, act, config, dtype, pdl=pdl)
        h8 = _quantized(h, w.down, pdl)
        return scaled_pairs.down(h8, w, ids, weights, shared, config, dtype, pdl=pdl)
    at = align(ids, num_experts, config.rows, pdl=pdl)
    h = scaled_tiles.gate_up(quantized, w, act, at, top_k, config, dtype, pdl=pdl)
    h8 = _quantized(h, w.down, pdl)
    y = scaled_tiles.down(h8, w, weights, at, config, dtype, pdl=pdl)
    return tiles.add_up(y, ids, shared, pdl=pdl)
