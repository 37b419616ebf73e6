"""Experts with LoRA adapters on a GPU: pairs of token and expert by adapter, and an expert's products one by one.

    pairs          adapter slot * E + expert of each pair, -1: none; grouped like tokens (schedule.py)
    pair_product   y[p] = W[expert of p] x[p] + b, in the tiles of kernels/experts/tiles.py
    add_up         the sum over a token's experts

Between the two products of an expert its adapter adds (products.py), so nothing is fused. All launches depend on shapes alone.
`lora_reference` has the same functions.
"""

import torch

from quire.kernels.experts import tiles
from quire.kernels.experts.align import align
from quire.kernels.experts.experts_reference import Weights
from quire.kernels.lora.schedule import group
from quire.kernels.lora.tables import LoraSchedule
from quire.kernels.tuning.configs import TilesConfig
from quire.kernels.tuning.current import current


def schedule_pairs(
    adapters: torch.Tensor, ids: torch.Tensor, num_adapters: int, num_experts: int, arrived: torch.Tensor
) -> LoraSchedule:
    """The schedule of pairs, in its row 0; adapters int32 [T] of each token, ids int32 [T, k] of this rank's E experts.

    arrived: of the step's schedule."""
    pairs = torch.where((adapters[:, None] >= 0) & (ids < num_experts), adapters[:, None] * num_experts + ids, -1).flatten()
    into = LoraSchedule.allocate(len(pairs), num_adapters * num_experts, ids.device, arrived)
    into.ids[0] = pairs
    group(into, len(pairs), num_adapters * num_experts)
    return into


def pair_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """y [P, N] of x [P, K], w [E, N, K] and ids int32 [P]; rows of pairs with the id E are not written."""
    config = _config(len(x), len(w), x.element_size())
    at = align(ids[:, None], len(w), config.rows)
    rows = x.index_select(0, at.order.clamp(0, len(x) - 1))  # places of other ranks' pairs were not written
    ones = torch.ones(len(x), dtype=torch.float32, device=x.device)
    return tiles.down(rows, Weights(w, w, None, bias), ones, at, config)


def _config(pairs: int, num_experts: int, itemsize: int) -> TilesConfig:
    tuning = current().experts
    if itemsize == 4:
        return tuning.exact
    few, many = tuning.tiles[0], tuning.tiles[-1]  # two of them, both of which are compiled at the start
    return few[1] if pairs / num_experts <= few[0] else many[1]


def add_up(y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, ids: torch.Tensor, held: int) -> torch.Tensor:
    """[T, H] of y [T k, H]; ids int32 [T, k]; held: the number of experts of this rank if it has some of all, else 0."""
    return tiles.add_up((y.float() * weights.flatten()[:, None]).to(y.dtype), ids, shared, held=held)
