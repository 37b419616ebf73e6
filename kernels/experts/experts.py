"""A layer's experts on a GPU: chooses the kernels for a number of rows: `pairs`, `tiles` or, on a Hopper, `wide`.

The formula is `experts_reference`'s. All launches depend on shapes alone, so a step with experts can be captured. The tuning
table decides by rows, and by rows an expert gets on average. float32 has one kernel and one configuration, so that a row's
result is the same to the last bit in any batch. 4-bit and 8-bit weights have kernels of their own (`four_bits`, `scaled`).
"""

from collections.abc import Hashable
from typing import Any

import torch

from quire.kernels.experts import align, four_bits, grouped, pairs, routing, scaled, tiles
from quire.kernels.experts.experts_reference import Act, Gelu, Weights, is_gated
from quire.kernels.experts.four_bits_weight import FourBitWeights
from quire.kernels.experts.scaled_weight import ScaledWeights
from quire.kernels.triton_support.dependent_launch import PLAIN
from quire.kernels.tuning.configs import PairConfig, RowConfig, TilesConfig, WideConfig
from quire.kernels.tuning.current import cached, current


@cached
def choose(
    rows: int, top_k: int, num_experts: int, itemsize: int = 2, on_mma: bool = False
) -> RowConfig | PairConfig | TilesConfig:
    """The configuration for x [rows, H], k of E experts a row; on_mma: `pairs_row` can compute them."""
    tuning = current().experts
    if itemsize == 4:
        return tuning.exact
    if on_mma and rows <= tuning.row.max_rows:
        return tuning.row
    if rows <= tuning.pair_rows:
        return tuning.pair
    per_expert = rows * top_k / num_experts
    return next(config for limit, config in tuning.tiles if per_expert <= limit)


@cached
def choose_wide(rows: int, top_k: int, num_experts: int) -> WideConfig | None:
    """The configuration of `wide`, for 16 bits on a Hopper; None: that of `choose` is as fast."""
    tuning = current().experts
    return None if rows <= tuning.pair_rows else grouped.rule(tuning.wide, rows * top_k / num_experts)


def kernel_specialization(rows: int, top_k: int, num_experts: int) -> Hashable:
    """A value that is equal for numbers of rows if their steps run the same compiled kernels."""
    wide, four_bits_wide = choose_wide(rows, top_k, num_experts), four_bits.choose_wide(rows, top_k, num_experts)
    return (
        choose(rows, top_k, num_experts),
        wide,
        four_bits.choose(rows, top_k, num_experts),
        four_bits_wide,
        grouped.ids_at_once(rows * top_k) if wide or four_bits_wide else None,
        rows <= current().experts.row.max_rows,
        rows <= current().experts.four_bits_row.max_rows,
        rows <= current().experts.scaled_row.max_rows,
        rows <= current().experts.router_rows,
        scaled.choose(rows, top_k, num_experts),
        rows * top_k > align.LARGE,
        rows > routing.FEW_ROWS,
    )


def experts(
    x: torch.Tensor,
    w: Weights | FourBitWeights | ScaledWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None = None,
    *,
    num_routed: int = 0,
    pdl: int = PLAIN,
    config: Any = None,
) -> torch.Tensor:
    """[T, H] of x [T, H] and its experts, ids int32 [T, k] with weights float32 [T, k]; `shared` [T, H] is added.

    num_routed: with expert parallelism, the number of all experts, of which w holds E; ids index these, and id E means an
    expert on another rank. 0: w holds all experts. Quantized weights always hold all.

    `config`, for the weights' kernels, is for tests and tuning.
    """
    _check(x, w, act, ids, weights)
    if len(x) == 0:
        return torch.empty_like(x)
    if num_routed and not isinstance(w, Weights):
        raise ValueError("experts: some of all experts need weights in floats")
    if isinstance(w, FourBitWeights):
        return four_bits.experts(x, w, ids, weights, act, shared, config=config, pdl=pdl)
    if isinstance(w, ScaledWeights):
        return scaled.experts(x, w, ids, weights, act, shared, config=config, pdl=pdl)
    if not x.dtype == w.gate_up.dtype == w.down.dtype:
        raise ValueError(f"experts: x {x.dtype} and weights {w.gate_up.dtype}, {w.down.dtype} need one dtype")
    if not (w.gate_up.is_contiguous() and w.down.is_contiguous()):
        raise ValueError("experts: weights must be contiguous")
    config, are_some = config or configuration(x, w, act, ids.shape[1], num_routed or len(w.down)), num_routed > 0
    if isinstance(config, RowConfig):
        from quire.kernels.experts import pairs_row

        return pairs_row.experts(x, w, ids, weights, act, shared, config, are_some=are_some, pdl=pdl)
    if isinstance(config, WideConfig):
        from quire.kernels.experts import wide  # imports Gluon, which other GPUs' Triton may not have

        return wide.experts(x, w, ids, weights, act, shared, config, are_some=are_some, pdl=pdl)
    if isinstance(config, PairConfig):
        return pairs.experts(x, w, ids, weights, act, shared, config, are_some=are_some, pdl=pdl)
    return tiles.experts(x, w, ids, weights, act, shared, config, are_some=are_some, pdl=pdl)


def configuration(
    x: torch.Tensor, w: Weights, act: Act, top_k: int, num_experts: int
) -> RowConfig | PairConfig | TilesConfig | WideConfig:
    """The configuration for x [rows, H], k of E experts a row, on x's device."""
    config = None if isinstance(act, Gelu) else choose_wide(len(x), top_k, num_experts)
    if config and grouped.supports(x, w.gate_up, w.down, (torch.bfloat16, torch.float16), w.down.shape[2]):
        return config
    return choose(len(x), top_k, num_experts, x.element_size(), pairs.can_use_mma(x, w.down.shape[2]))


def _check(
    x: torch.Tensor, w: Weights | FourBitWeights | ScaledWeights, act: Act, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    (rows, hidden), (num_experts, height, k) = x.shape, w.gate_up.shape
    inner = height // 2 if is_gated(act) else height
    if k != hidden or w.down.shape != (num_experts, hidden, inner) or ids.shape != weights.shape or len(ids) != rows:
        raise ValueError(f"experts: x {x.shape}, weights {w.gate_up.shape}, {w.down.shape}, ids {ids.shape} do not fit")
    if x.stride(1) != 1 or not ids.is_contiguous() or not weights.is_contiguous():
        raise ValueError("experts: rows of x need unit stride, ids and their weights must be contiguous")
