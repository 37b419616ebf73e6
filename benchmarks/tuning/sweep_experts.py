"""Sweeps of a tuning table's part for experts: tiles of few and of many rows, and when pairs pay.

Rules are measured with the rows that an expert gets on average, a product at a time; the router's choice is random, as in a
model with evenly loaded experts.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from bench import Bench, Call
from msgspec.structs import replace
from workload import Mixture, Workload

from quire.kernels.experts import align, experts, tiles
from quire.kernels.experts.experts_reference import SwiGLU, Weights
from quire.kernels.triton_support.dependent_launch import EARLY, LATE, PLAIN, supported
from quire.kernels.tuning.configs import PairConfig, TileConfig, TilesConfig
from quire.kernels.tuning.table import Tuning

MOST_ROWS = 128.0  # an expert gets on average if a rule has no limit
PAIR_ROWS = (1, 2, 4, 8)


class _Layer(NamedTuple):
    """Operands of a mixture's layer, weights in copies to take turns."""

    x: torch.Tensor
    weights: list[Weights]
    ids: torch.Tensor
    scale: torch.Tensor


def sweep_experts(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The pairs' configuration and the rows up to which they pay, then each rule's two products."""
    found = _sweep_pairs(bench, workload.mixtures, table)
    rules = list(found.experts.tiles)
    for number, (limit, config) in enumerate(rules):
        per_expert = min(limit * 0.75, MOST_ROWS)
        layers = [_layer(bench, m, max(1, round(per_expert * m.experts / m.top_k))) for m in workload.mixtures]
        for product, case in (("gate_up", _gate_up_case), ("down", _down_case)):
            name = f"experts {product}, tiles of {config.rows}"
            candidates = [replace(config, **{product: c}) for c in _candidates(getattr(config, product), config.rows)]
            config = bench.fastest(name, config, candidates, [case(layer, bench) for layer in layers])
        rules[number] = limit, config
    return replace(found, experts=replace(found.experts, tiles=tuple(rules)))


def _candidates(config: TileConfig, rows: int) -> list[TileConfig]:
    found = []
    for block_n, block_k, stages in itertools.product((32, 64, 128), (64, 128), (3, 4, 5)):
        shared = stages * block_k * (2 * block_n + rows) * 2
        warps = 8 if rows * block_n > 64 * 64 else 4
        if shared <= 200_000 and rows * block_n <= 128 * 128:
            found.append(TileConfig(block_n, block_k, warps, stages))
    return [each for each in found if each != config]


def _sweep_pairs(bench: Bench, mixtures: Sequence[Mixture], table: Tuning) -> Tuning:
    part = table.experts
    layers = [_layer(bench, mixture, 1) for mixture in mixtures]
    candidates = [
        PairConfig(gate_up_n, down_n, block_k, warps)
        for gate_up_n, down_n in ((1, 2), (2, 2), (2, 4), (4, 4), (4, 8))
        for block_k, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8))
    ]
    pair = bench.fastest("experts of one row", part.pair, candidates, [_whole_case(layer, bench) for layer in layers])
    best = 1
    for rows in PAIR_ROWS[1:]:
        several = [_layer(bench, mixture, rows) for mixture in mixtures]
        cases = [_whole_case(layer, bench) for layer in several]
        present: PairConfig | TilesConfig = part.tiles[0][1]
        if bench.fastest(f"experts of {rows} rows", present, [pair], cases) == present:
            break
        best = rows
    return replace(table, experts=replace(part, pair=pair, pair_rows=best))


def _layer(bench: Bench, mixture: Mixture, rows: int) -> _Layer:
    hidden, inner, num_experts, top_k = mixture
    each = 3 * num_experts * hidden * inner * 2
    copies = min(bench.copies(each), 4)
    weights = [
        Weights(
            bench.random(num_experts, 2 * inner, hidden) / hidden**0.5, bench.random(num_experts, hidden, inner) / inner**0.5
        )
        for _ in range(copies)
    ]
    ids = torch.rand(rows, num_experts, device=bench.device).topk(top_k, 1).indices.int()
    return _Layer(bench.random(rows, hidden), weights, ids, torch.rand(rows, top_k, device=bench.device))


def _mode(bench: Bench, rows: int) -> int:
    if bench.device.type != "cuda" or not supported() or rows > 64:
        return PLAIN
    return EARLY if rows == 1 else LATE


def _whole_case(layer: _Layer, bench: Bench) -> Callable[[PairConfig | TilesConfig], list[Call]]:
    pdl = _mode(bench, len(layer.x))

    def call(config: PairConfig | TilesConfig, w: Weights) -> torch.Tensor:
        return experts.experts(layer.x, w, layer.ids, layer.scale, SwiGLU(), config=config, pdl=pdl)

    return lambda config: [functools.partial(call, config, w) for w in layer.weights]


def _gate_up_case(layer: _Layer, bench: Bench) -> Callable[[TilesConfig], list[Call]]:
    pdl = _mode(bench, len(layer.x))

    def call(config: TilesConfig, at: align.Alignment, w: Weights) -> torch.Tensor:
        return tiles.gate_up(layer.x, w, SwiGLU(), at, layer.ids.shape[1], config, pdl=pdl)

    def calls(config: TilesConfig) -> list[Call]:
        at = align.align(layer.ids, len(layer.weights[0].down), config.rows)
        return [functools.partial(call, config, at, w) for w in layer.weights]

    return calls


def _down_case(layer: _Layer, bench: Bench) -> Callable[[TilesConfig], list[Call]]:
    pdl = _mode(bench, len(layer.x))
    h = bench.random(layer.ids.numel(), layer.weights[0].down.shape[2])

    def call(config: TilesConfig, at: align.Alignment, w: Weights) -> torch.Tensor:
        return tiles.down(h, w, layer.scale, at, config, pdl=pdl)

    def calls(config: TilesConfig) -> list[Call]:
        at = align.align(layer.ids, len(layer.weights[0].down), config.rows)
        return [functools.partial(call, config, at, w) for w in layer.weights]

    return calls
