"""Sweeps of a tuning table's part for products: our own kernels for few rows, and when they pay.

Each takes a bench, a workload and a table, and returns the table with its results. `sweep_cublas.py` has the products of more
rows. A product is measured as in a step: in a dependent launch if the GPU supports that, and with the next norm if that adds up
its partial sums.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from bench import Bench, Call
from msgspec.structs import replace
from workload import Model, Product, Workload

from quire.kernels.elementwise import norm
from quire.kernels.linear import linear, norm_linear, split_linear
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import EARLY, LATE, PLAIN, supported
from quire.kernels.tuning.configs import SkinnyConfig, SplitConfig
from quire.kernels.tuning.current import using
from quire.kernels.tuning.table import BF16, LinearTuning, SkinnyRule, StreamTuning, Tuning

SKINNY_ROWS = (1, 2, 4, 8, 16)
STREAM_ROWS = (16, 64)
MAX_CASES = 3  # of a rule
EPS = 1e-6


def with_linear(table: Tuning, part: LinearTuning) -> Tuning:
    """The table with another part for 16-bit products."""
    return replace(table, linear={**table.linear, BF16: part})


def sweep_skinny(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The configuration of each rule that applies to some product of the workload, one by one."""
    rules = list(table.linear[BF16].skinny)
    met = _met_by_rule(bench, workload, table)
    for number, cases in met.items():
        rule = rules[number]
        timed = [_skinny_case(bench, product, rows) for product, rows in cases[:MAX_CASES]]
        candidates = _skinny_candidates(rule, cases)
        rules[number] = replace(rule, config=bench.fastest(f"skinny rule {number}", rule.config, candidates, timed))
    return with_linear(table, replace(table.linear[BF16], skinny=tuple(rules)))


def _met_by_rule(bench: Bench, workload: Workload, table: Tuning) -> dict[int, list[tuple[Product, int]]]:
    """(product, rows) by the number of the rule that applies to them; those that go to `linear_hopper` are left out."""
    part = table.linear[BF16]
    found: dict[int, list[tuple[Product, int]]] = {}
    products = dict.fromkeys([*workload.large.products, *workload.small.products])
    for product, rows in itertools.product(products, SKINNY_ROWS):
        if not (hopper.available(bench.device) and _is_streamed(part.stream, product, rows)):
            shape = (rows, product.columns, product.k, product.is_gated)
            number = next(number for number, rule in enumerate(part.skinny) if rule.fits(*shape))
            found.setdefault(number, []).append((product, rows))
    return found


def _is_streamed(stream: StreamTuning, product: Product, rows: int) -> bool:
    if not 2 <= rows <= stream.max_rows:
        return False
    few = stream.min_parts_columns if rows <= linear.MAX_VECTOR_ROWS else 1
    return product.n >= (few if product.split_k else stream.min_columns)


def _skinny_candidates(rule: SkinnyRule, cases: Sequence[tuple[Product, int]]) -> list[SkinnyConfig]:
    """Twice and half of each size of the present configuration, one or two at a time."""
    c, found = rule.config, []
    most_rows = max(rows for _product, rows in cases)
    for n, k, warps in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        block_n, block_k, num_warps = c.block_n * n // 2, c.block_k * k // 2, c.num_warps * warps // 2
        if (n, k, warps).count(2) == 0 or not 1 <= num_warps <= 8 or block_n < 1 or block_k < 16:
            continue
        elements = block_n * block_k // num_warps  # of a warp: its accumulators
        if block_n >= 8 and block_k >= 32 if c.dot else 256 <= elements <= (1024 if most_rows > 2 else 2048):
            found += [replace(c, block_n=block_n, block_k=block_k, num_warps=num_warps)]
    if c.dot:
        found += [replace(c, num_stages=stages) for stages in (2, 3, 4, 5) if stages != c.num_stages]
    return found[:12]


def _skinny_case(bench: Bench, product: Product, rows: int) -> Callable[[SkinnyConfig], list[Call]]:
    weights, x, out = _operands(bench, product, rows)
    pdl = (EARLY if rows == 1 else LATE) if supported() and bench.device.type == "cuda" else PLAIN

    def call(config: SkinnyConfig, w: torch.Tensor) -> torch.Tensor:
        linear.launch_skinny(x, w, None, out, linear.fit(config, product.k), is_gated=product.is_gated, pdl=pdl)
        return out

    return lambda config: [functools.partial(call, config, w) for w in weights]


def _operands(bench: Bench, product: Product, rows: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(W in copies to take turns, x, output)"""
    n, k = product.n, product.k
    weights = [bench.random(n, k) / k**0.5 for _ in range(bench.copies(n * k * 2))]
    return weights, bench.random(rows, k), bench.random(rows, product.columns)


def sweep_stream(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """How `linear_hopper` tiles its products; on a Hopper only."""
    if not hopper.available(bench.device):
        return table
    models = (workload.large, workload.small)
    part = table.linear[BF16]
    stream = part.stream
    all_products = [p for model in models for p in model.products if _is_streamed(stream, p, 16)]
    sizes = [(64, 1), (64, 2), (128, 1), (128, 2)]
    stream = _fastest_stream(
        bench, table, "stream tiles", stream, [replace(stream, block_k=k, sharing=s) for k, s in sizes], all_products
    )
    gated = [p for p in all_products if p.is_gated]
    stream = _fastest_stream(bench, table, "stream gated", stream, [replace(stream, gated_sharing=s) for s in (1, 2, 3)], gated)
    for number, (limit, most) in enumerate(stream.max_parts):
        options = []
        for parts in (most // 2, most * 2):
            changed = [*stream.max_parts]
            changed[number] = (limit, parts)
            options.append(replace(stream, max_parts=tuple(changed)))
        split_k = [p for p in all_products if p.split_k]
        stream = _fastest_stream(bench, table, f"stream parts to {limit} rows", stream, options, split_k, (min(limit, 64),))
    return with_linear(table, replace(part, stream=stream))


def _fastest_stream(
    bench: Bench,
    table: Tuning,
    name: str,
    present: StreamTuning,
    candidates: Sequence[StreamTuning],
    products: Sequence[Product],
    rows: Sequence[int] = STREAM_ROWS,
) -> StreamTuning:
    cases = [_stream_case(bench, table, product, r) for product, r in itertools.product(products, rows)]
    return bench.fastest(name, present, candidates, cases)


def _stream_case(bench: Bench, table: Tuning, product: Product, rows: int) -> Callable[[StreamTuning], list[Call]]:
    from quire.kernels.linear import linear_hopper as kernel

    weights, x, out = _operands(bench, product, rows)
    residual, scale = torch.zeros_like(out), bench.random(product.columns)

    def call(config: kernel.Config, w: torch.Tensor) -> torch.Tensor:
        if not product.split_k:
            kernel.launch(x, w, None, out, config, is_gated=product.is_gated, pdl=LATE)
            return out
        parts = out
        if config.parts > 1:
            parts = torch.empty(config.parts, rows, product.n, dtype=torch.float32, device=bench.device)
        kernel.launch(x, w, None, parts, config, pdl=LATE)
        return norm.add_rms_norm(parts, residual, scale, EPS, pdl=LATE)  # the residual grows: only a first result counts

    def calls(stream: StreamTuning) -> list[Call]:
        residual.zero_()
        with using(with_linear(table, replace(table.linear[BF16], stream=stream))):
            shape = (rows, product.columns, product.k, bench.num_sms)
            config = kernel.choose(*shape, is_gated=product.is_gated, split_k=product.split_k)
        return [functools.partial(call, config, w) for w in weights]

    return calls


def sweep_split(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The kernel for 17 to 64 rows of small weights, if `linear_hopper` does not compute those."""
    if hopper.available(bench.device):
        return table
    part = table.linear[BF16]
    products = [p for p in workload.small.products if p.split_k]
    cases = [_split_case(bench, product, min(rows, workload.most_tokens)) for product in products for rows in (32, 64)]
    candidates = [
        SplitConfig(splits, block_n, block_k, 4, stages)
        for splits, block_n in ((2, 16), (2, 32), (4, 16), (4, 32), (8, 32), (8, 64))
        for block_k, stages in ((64, 4), (128, 3), (128, 4))
    ]
    config = bench.fastest("split", part.split.config, candidates, cases)
    return with_linear(table, replace(part, split=replace(part.split, config=config)))


def _split_case(bench: Bench, product: Product, rows: int) -> Callable[[SplitConfig], list[Call]]:
    weights, x, out = _operands(bench, product, rows)
    residual, scale = torch.zeros_like(out), bench.random(product.n)
    pdl = LATE if supported() and bench.device.type == "cuda" else PLAIN

    def call(config: SplitConfig, w: torch.Tensor) -> torch.Tensor:
        parts = split_linear.split_linear(x, w, None, config, dependents=pdl != PLAIN)
        return norm.add_rms_norm(parts, residual, scale, EPS, pdl=pdl)

    def calls(config: SplitConfig) -> list[Call]:
        residual.zero_()
        return [functools.partial(call, config, w) for w in weights]

    return calls


def sweep_norm_linear(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The tiles of one row's norm and product in one kernel, and the weight up to which that pays."""
    part = table.linear[BF16]
    models = (workload.small, workload.middle, workload.large)
    after_norm = [(m, p) for m in models for p in m.products if p.name in ("qkv", "gate_up") and p.k <= norm_linear.MAX_K]
    tiles = []
    low = 0
    for limit, block_n, warps in part.norm_linear_tiles:
        products = [p for _, p in after_norm if low < p.k <= limit]
        low = limit
        cases = [_fused_case(bench, p) for p in products]
        options = [(limit, n, w) for n, w in itertools.product((1, 2, 4), (2, 4, 8))]
        present = (limit, block_n, warps)
        tiles.append(bench.fastest(f"norm_linear to K {limit}", present, options, cases) if cases else present)
    part = replace(part, norm_linear_tiles=tuple(tiles))
    table = with_linear(table, part)
    return with_linear(table, replace(part, norm_linear_weight=_largest_fused(bench, table, after_norm)))


def _fused_case(bench: Bench, product: Product) -> Callable[[tuple[int, int, int]], list[Call]]:
    weights, x, _out = _operands(bench, product, 1)
    scale = bench.random(product.k)
    pdl = EARLY if supported() and bench.device.type == "cuda" else PLAIN

    def calls(tile: tuple[int, int, int]) -> list[Call]:
        block_n, warps = tile[1:]

        def call(w: torch.Tensor) -> torch.Tensor:
            cut = (block_n, warps)
            return norm_linear.norm_linear(None, x, scale, EPS, w, None, is_gated=product.is_gated, pdl=pdl, config=cut)[0]

        return [functools.partial(call, w) for w in weights]

    return calls


def _largest_fused(bench: Bench, table: Tuning, products: Sequence[tuple[Model, Product]]) -> int:
    """Elements of the largest weight up to which one kernel is faster than two; the present limit if it decides the same."""
    present = table.linear[BF16].norm_linear_weight
    largest = 0
    for product in sorted({p for _, p in products}, key=lambda p: p.n * p.k):
        if bench.is_late():
            bench.unmeasured.append("norm_linear_weight")
            return present
        if not _fused_pays(bench, table, product):
            break
        largest = product.n * product.k
    weights = {p.n * p.k for _, p in products}
    agrees = all((weight <= largest) == (weight <= present) for weight in weights)
    bench.log(f"  norm_linear_weight: pays up to {largest}, now {present}")
    return present if agrees else largest


def _fused_pays(bench: Bench, table: Tuning, product: Product) -> bool:
    weights, x, out = _operands(bench, product, 1)
    scale, h = bench.random(product.k), torch.empty_like(x)
    pdl = EARLY if supported() and bench.device.type == "cuda" else PLAIN
    with using(table):
        config = linear.choose(1, product.columns, product.k, product.is_gated)

    def separate(w: torch.Tensor) -> torch.Tensor:
        norm.rms_norm(x, scale, EPS, h, pdl=pdl)
        linear.launch_skinny(h, w, None, out, config, is_gated=product.is_gated, pdl=pdl)
        return out

    def fused(w: torch.Tensor) -> torch.Tensor:
        return norm_linear.norm_linear(None, x, scale, EPS, w, None, is_gated=product.is_gated, pdl=pdl)[0]

    with using(table):
        times = [bench.micros([functools.partial(call, w) for w in weights]) for call in (separate, fused)]
    return times[1] < times[0]
