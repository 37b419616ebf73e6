"""Sweeps of a tuning table's part for products of many rows, by cuBLAS: the library, batches over K, and slow sizes of steps.

Measured at the sizes that steps are padded to; a result at a size holds down to the size below. If choices are within NOISE of
each other, the present one stays.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from bench import MIN_CALLS, Bench
from msgspec.structs import replace
from sweep_linear import EPS, with_linear
from workload import Product, Workload

from quire.kernels.elementwise import norm
from quire.kernels.linear import blas, split_linear
from quire.kernels.tuning.table import ANY, BF16, Ranges, StepTuning, Tuning, padded_sizes

NOISE = 0.01
SLOWER = 0.03  # than the next larger size: such a size is left out
PARTS = (1, 2, 4)
MAX_BATCHED_ROWS = 512


def step_sizes(step: StepTuning, least: int, most: int) -> list[int]:
    """Sizes that decode and mixed steps are padded to, from least to most, including those left out as slow; of large ones,
    some.
    """
    sizes = {*padded_sizes(step.decode_sizes, min(most, 1024) + 1), *padded_sizes(step.mixed_sizes, most + 1)}
    return sorted(size for size in sizes if least <= size <= most and (size <= 2048 or size % 2048 == 0))


def sweep_libraries(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """Rows at which cuBLASLt is faster over a wide layer, and sizes that take longer than the next larger one."""
    part, step = table.linear[BF16], table.step
    products = [p for p in workload.large.products if p.name != "head"]
    weights = [[bench.random(p.n, p.k) for _ in range(bench.copies(p.n * p.k * 2))] for p in products]
    measured: dict[int, dict[str, float]] = {}
    for rows in step_sizes(step, split_linear.MIN_ROWS, workload.most_tokens):
        if bench.is_late():
            bench.unmeasured.append(f"cublaslt_rows, slow_sizes from {rows} rows")
            break
        measured[rows] = {name: _layer_micros(bench, products, weights, rows, name) for name in ("cublas", "cublaslt")}
    if not measured:
        return table
    faster = [(rows, 1 if _is_lt_faster(times, part.cublaslt_rows, rows) else 0) for rows, times in measured.items()]
    ranges: Ranges = tuple((first, last) for first, last, _ in _ranges(faster, split_linear.MIN_ROWS))
    if ranges and ranges[-1][1] >= step_sizes(step, 0, workload.most_tokens)[-1]:
        ranges = (*ranges[:-1], (ranges[-1][0], ANY))
    slow = slow_sizes({rows: min(times.values()) for rows, times in measured.items()}, split_linear.MAX_ROWS)
    bench.log(f"  cublaslt_rows {ranges}, slow_sizes {slow}")
    table = replace(table, step=replace(step, slow_sizes=slow))
    return with_linear(table, replace(part, cublaslt_rows=ranges))


def _calls(rows: int) -> int:
    """Calls of a graph: with many rows one takes long by itself."""
    return max(2, min(MIN_CALLS, 4096 // rows))


def slow_sizes(times: dict[int, float], above: int) -> tuple[int, ...]:
    """Sizes of more than `above` rows that take longer than the next larger one, by their µs."""
    sizes = sorted(times)
    return tuple(
        size for size, larger in itertools.pairwise(sizes) if size > above and times[size] > times[larger] * (1 + SLOWER)
    )


def _is_lt_faster(times: dict[str, float], present: Ranges, rows: int) -> bool:
    ratio = times["cublaslt"] / times["cublas"]
    if not abs(ratio - 1) >= NOISE:  # nor if neither library has a time
        return any(first <= rows <= last for first, last in present)
    return ratio < 1


def _layer_micros(
    bench: Bench, products: Sequence[Product], weights: Sequence[Sequence[torch.Tensor]], rows: int, library: str
) -> float:
    """µs of a layer's products by a library; infinite if it does not support them."""
    total = 0.0
    try:
        blas.prefer(library)
        for product, copies in zip(products, weights, strict=True):
            x, out = bench.random(rows, product.k), bench.random(rows, product.n)
            total += bench.micros([functools.partial(torch.mm, x, w.t(), out=out) for w in copies], _calls(rows))
    except RuntimeError as error:
        bench.failed.append(f"{library} of {rows} rows: {str(error)[:100]}")
        return float("inf")
    return total


def sweep_batched(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """Rows at which equal ranges of K as a batch are faster, together with the next norm, which adds them up."""
    split = table.linear[BF16].split
    sizes = step_sizes(table.step, split_linear.MAX_ROWS + 1, min(MAX_BATCHED_ROWS, workload.most_tokens))
    found = {}
    for name, model in (("batched_small", workload.small), ("batched_large", workload.large)):
        products = [p for p in model.products if p.split_k]
        weights = [[bench.random(p.n, p.k) for _ in range(bench.copies(p.n * p.k * 2))] for p in products]
        present: tuple[tuple[int, int, int], ...] = getattr(split, name)
        best = []
        for rows in sizes:
            if bench.is_late():
                bench.unmeasured.append(f"{name} from {rows} rows")
                break
            now = next((parts for first, last, parts in present if first <= rows <= last), 1)
            best.append((rows, _best_parts(bench, products, weights, rows, now)))
        found[name] = _ranges(best, split_linear.MAX_ROWS + 1) if len(best) == len(sizes) else present
        bench.log(f"  {name} {found[name]}")
    return with_linear(table, replace(table.linear[BF16], split=replace(split, **found)))


def _best_parts(
    bench: Bench, products: Sequence[Product], weights: Sequence[Sequence[torch.Tensor]], rows: int, present: int
) -> int:
    """The number of splits that is fastest over these products; 0 for 1, as ranges have it."""
    times = {parts: _parts_micros(bench, products, weights, rows, parts) for parts in PARTS}
    best = min(times, key=times.__getitem__)
    if times[best] > times[present] * (1 - NOISE):
        best = present
    return 0 if best == 1 else best


def _parts_micros(
    bench: Bench, products: Sequence[Product], weights: Sequence[Sequence[torch.Tensor]], rows: int, parts: int
) -> float:
    total = 0.0
    for product, copies in zip(products, weights, strict=True):
        x, residual, scale = bench.random(rows, product.k), bench.random(rows, product.n), bench.random(product.n)

        def call(
            w: torch.Tensor, x: torch.Tensor = x, residual: torch.Tensor = residual, scale: torch.Tensor = scale
        ) -> torch.Tensor:
            y = blas.batched_split_k(x, w, parts) if parts > 1 else blas.blas_linear(x, w)
            return norm.add_rms_norm(y, residual, scale, EPS)

        try:
            total += bench.micros([functools.partial(call, w) for w in copies], _calls(rows))
        except (RuntimeError, TypeError) as error:
            bench.failed.append(f"{rows} rows in {parts} parts: {str(error)[:100]}")
            return float("inf")
    return total


def _ranges(found: Sequence[tuple[int, int]], first: int) -> tuple[tuple[int, int, int], ...]:
    """(first row, last row, value) of adjacent sizes with equal values; value 0 is left out."""
    ranges: list[tuple[int, int, int]] = []
    for rows, value in found:
        if value and ranges and ranges[-1][1:] == (first - 1, value):
            ranges[-1] = (ranges[-1][0], rows, value)
        elif value:
            ranges.append((first, rows, value))
        first = rows + 1
    return tuple(ranges)
