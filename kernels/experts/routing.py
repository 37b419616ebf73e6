"""The router of a layer of experts: its logits, and which experts a token goes to.

    router_logits   float32 [S, T, E], partial sums over K of x @ W^T      x [T, H], W [E, H]
    route           ids int32 [T, k], weights float32 [T, k]               of these logits + bias, see `routing_reference`
    router          both; for few rows in one launch, where a row's last program to finish chooses

Logits are never rounded to 16 bits: of nearly equal experts the same one is chosen for the same token in any batch. W has few
rows, so K is split into S ranges, and `route` adds up the partial sums; in float32, and with
`--deterministic`, S depends on K alone. Moves W once for 16
(64) rows. `route` has one program a row: k times the greatest value, and the first among equals. NaN loses against all numbers,
and no id is ever beyond the last expert. Reference: `routing_reference`.
"""

import functools
import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts.routing_reference import Counting, Routing
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import current

FEW_ROWS = 64  # up to which tiles have 16 rows
MAX_PARTS = 16
FIXED_PARTS = 4  # where sums have one order: in float32, and with `--deterministic`
ENOUGH_PROGRAMS = 512
MAX_ROWS_AT_ONCE = 64  # limit of rows for logits and choice in one launch
ROUTER_COLUMNS = 2  # of a program of that launch
LOSES = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["T", "part_blocks"])
def _logits_kernel(
    x_ptr, w_ptr, out_ptr, x_stride, T, E, part_blocks,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FIRST_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    first = part * part_blocks * BLOCK_K  # in this order: else loads are of single numbers, as 16 bytes may not divide
    end = tl.minimum(first + part_blocks * BLOCK_K, K)
    k = tl.arange(0, BLOCK_K)
    even: tl.constexpr = K % BLOCK_K == 0  # then all tiles are whole: loads that are masked in K would not be pipelined
    w_at = w_ptr + n[None, :] * K + k[:, None]
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    inside, real = (n < E)[None, :], (m < T)[:, None]
    if FIRST_W:  # before the wait: for few rows this is usually all of a program's W
        w = tl.load(w_at + first, inside & (first + k < K)[:, None], other=0.0)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        if FIRST_W:
            if start > first:
                w = tl.load(w_at + start, inside & (start + k < K)[:, None], other=0.0)
            x = tl.load(x_at + start, real & (start + k < K)[None, :], other=0.0)
        elif even:
            w = tl.load(w_at + start, inside, other=0.0)
            x = tl.load(x_at + start, real, other=0.0)
        else:
            w = tl.load(w_at + start, inside & (start + k < K)[:, None], other=0.0)
            x = tl.load(x_at + start, real & (start + k < K)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out = out_ptr + (part.to(tl.int64) * T + m)[:, None] * E + n[None, :]
    tl.store(out, acc, (m < T)[:, None] & (n < E)[None, :])


@triton.jit
def _best(choice, e, E: tl.constexpr):
    """The number of the first greatest value. Compared as integers in the same order: a warp finds their maximum at once."""
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    greatest = tl.max(tl.max(keys, 1), 0)
    return tl.min(tl.min(tl.where(keys == greatest, e, E), 1), 0)


@triton.jit
def _of_best_groups(choice, e, g, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, E: tl.constexpr):
    """choice with -inf for experts outside the best groups; choice [groups, experts of one], g [groups]."""
    rank = tl.max(choice, 1)
    rest = choice
    for _ in tl.static_range(1, GROUP_TOP):
        first = tl.min(tl.where(rest == tl.max(rest, 1)[:, None], e, E), 1)
        rest = tl.where(e == first[:, None], LOSES, rest)
        rank += tl.max(rest, 1)
    rank = tl.where(g < GROUPS, rank, float("-inf"))
    is_best = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(is_best, float("-inf"), rank)
        is_best = is_best | (g == tl.min(tl.where(left == tl.max(left, 0), g, GROUPS), 0))
    return tl.where(is_best[:, None], choice, float("-inf"))


@triton.jit
def _choose(
    logits, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, row, e, g, valid, first, held, scale, eps,
    E: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_2: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, IS_SIGMOID: tl.constexpr, BY_LOGITS: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Store a row's experts and their weights; logits [groups, experts of one], e: the experts' numbers."""
    logits = tl.where(logits == logits, tl.minimum(tl.maximum(logits, LOSES), -LOSES), LOSES)
    logits = tl.where(valid, logits, float("-inf"))
    if IS_SIGMOID:
        small = tl.exp(-tl.abs(logits))
        scores = tl.where(logits >= 0, 1.0, small) / (1.0 + small)
    else:
        exps = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = exps / tl.sum(tl.sum(exps, 1), 0)
    choice = logits if BY_LOGITS else scores
    if HAS_CORRECTION:
        choice += tl.load(correction_ptr + e, valid, other=0.0)
    choice = tl.where(choice == choice, choice, LOSES)
    choice = tl.where(valid, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        choice = _of_best_groups(choice, e, g, GROUPS, TOP_GROUPS, GROUP_TOP, E)
    lane = tl.arange(0, TOP_K_2)
    ids = tl.zeros([TOP_K_2], tl.int32)
    weights = tl.zeros([TOP_K_2], tl.int32)
    for i in tl.static_range(TOP_K):
        best = _best(choice, e, E)
        is_it = e == best
        # scores are 0 or above: their bits sort as they do
        weight = tl.max(tl.max(tl.where(is_it, scores.to(tl.int32, bitcast=True), 0), 1), 0)
        ids = tl.where(lane == i, best, ids)
        weights = tl.where(lane == i, weight, weights)
        choice = tl.where(is_it, float("-inf"), choice)
    weights = weights.to(tl.float32, bitcast=True)
    if IS_NORMALIZED:
        weights = weights / (tl.sum(weights, 0) + eps)
    weights = weights * scale
    ids = tl.minimum(ids, E - 1)
    if COUNTS:  # integers: the sum is the same in any order
        is_real = row < tl.load(num_rows_ptr)
        tl.atomic_add(counts_ptr + ids, tl.full([TOP_K_2], 1, tl.int32), (lane < TOP_K) & is_real, sem="relaxed")
    ids = tl.where((ids >= first) & (ids < first + held), ids - first, held)
    tl.store(ids_ptr + row * TOP_K + lane, ids, lane < TOP_K)
    tl.store(weights_ptr + row * TOP_K + lane, weights, lane < TOP_K)


@triton.jit
def _numbers(E: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE_2: tl.constexpr):
    """(experts' numbers [groups, experts of one], groups' numbers, whether an expert has this place)."""
    size: tl.constexpr = E // GROUPS
    g, j = tl.arange(0, GROUPS_2), tl.arange(0, SIZE_2)
    valid = (g < GROUPS)[:, None] & (j < size)[None, :]
    return tl.where(valid, g[:, None] * size + j[None, :], E), g, valid


@triton.jit(
    do_not_specialize=["parts", "part_stride", "first", "held"],
    do_not_specialize_on_alignment=["num_rows_ptr"],  # a slice of a step's buffers
)
def _route_kernel(
    logits_ptr, bias_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, first, held, scale, eps,
    parts, part_stride,
    E: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE_2: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_2: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, IS_SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr, IS_NORMALIZED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e, g, valid = _numbers(E, GROUPS, GROUPS_2, SIZE_2)
    logits = tl.zeros([GROUPS_2, SIZE_2], tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + e, valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    for part in range(parts):
        logits += tl.load(logits_ptr + part * part_stride + row * E + e, valid, other=0.0)
    _choose(
        logits, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, row, e, g, valid, first, held, scale, eps,
        E, GROUPS, TOP_K, TOP_K_2, TOP_GROUPS, GROUP_TOP, IS_SIGMOID, BY_LOGITS, IS_NORMALIZED, HAS_CORRECTION, COUNTS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["first", "held"],
    do_not_specialize_on_alignment=["num_rows_ptr"],
)
def _router_kernel(
    logits_ptr, bias_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, first, held, scale, eps,
    x_ptr, w_ptr, done_ptr, x_stride,
    E: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE_2: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_2: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, IS_SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr, IS_NORMALIZED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    COUNTS: tl.constexpr, PDL: tl.constexpr,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (r, p): BLOCK_E logits of row r. A row's last program to finish chooses among all of its logits."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    w_at = w_ptr + n[:, None] * K + k[None, :]
    w = tl.load(w_at, (n < E)[:, None] & (k < K)[None, :], other=0.0)  # before the wait: most of W
    e, g, valid = _numbers(E, GROUPS, GROUPS_2, SIZE_2)
    bias = tl.zeros([GROUPS_2, SIZE_2], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + e, valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            w = tl.load(w_at + start, (n < E)[:, None] & (start + k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + row * x_stride + start + k, start + k < K, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(logits_ptr + row * E + n, tl.sum(acc, 1), n < E)
    tl.debug_barrier()  # so that the release below covers the stores of all threads
    before = tl.atomic_add(done_ptr + row, 1, sem="acq_rel")
    if before == tl.num_programs(1) - 1:
        tl.store(done_ptr + row, 0)
        logits = bias + tl.load(logits_ptr + row * E + e, valid, other=0.0, cache_modifier=".cg")
        _choose(
            logits, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, row, e, g, valid, first, held, scale, eps,
            E, GROUPS, TOP_K, TOP_K_2, TOP_GROUPS, GROUP_TOP, IS_SIGMOID, BY_LOGITS, IS_NORMALIZED, HAS_CORRECTION, COUNTS,
        )  # fmt: skip


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    fits = weight.shape[1] == x.shape[1] and x.dtype == weight.dtype
    if not fits or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"router_logits: x {x.shape} {x.dtype} and weight {weight.shape} {weight.dtype} do not fit")


def router_logits(x: torch.Tensor, weight: torch.Tensor, *, pdl: int = PLAIN) -> torch.Tensor:
    """float32 [S, T, E]; x [T, H] and weight [E, H] of one dtype, unit stride in the last dimension."""
    _check(x, weight)
    (rows, k), n = x.shape, weight.shape[0]
    exact = x.dtype == torch.float32
    is_fixed = current().fixed_order
    block_m = 16 if exact or is_fixed or rows <= FEW_ROWS else 64
    block_n, block_k = (32, 32) if exact else (32, 128) if block_m == 16 else (64, 64)
    tiles = triton.cdiv(rows, block_m), triton.cdiv(n, block_n)
    parts = FIXED_PARTS if exact or is_fixed else max(1, min(MAX_PARTS, ENOUGH_PROGRAMS // (tiles[0] * tiles[1])))
    part_blocks = triton.cdiv(triton.cdiv(k, parts), block_k)
    parts = triton.cdiv(k, part_blocks * block_k)
    out = torch.empty(parts, rows, n, dtype=torch.float32, device=x.device)
    if rows:
        _logits_kernel[(*tiles, parts)](
            x, weight, out, x.stride(0), rows, n, part_blocks, k, block_m, block_n, block_k, block_m == 16, pdl,
            num_warps=4, num_stages=3, **launch_options(pdl),
        )  # fmt: skip
    return out


class _Choice(NamedTuple):
    """Arguments of both kernels that choose: the first, and constants; and the output tensors."""

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[float, ...]
    constants: tuple[int, ...]

    @property
    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensors[3], self.tensors[4]


def _choice(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    held: tuple[int, int] | None,
    counting: Counting | None,
) -> _Choice:
    rows, n = logits.shape[-2:]
    top_k, device = routing.top_k, logits.device
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    # all experts are one group if groups do not matter
    groups = routing.num_groups if routing.top_groups < routing.num_groups else 1
    counts, num_rows = (ids, ids) if counting is None else counting
    given = logits if bias is None else bias, logits if correction is None else correction
    constants = (
        n, groups, triton.next_power_of_2(groups), triton.next_power_of_2(n // groups), top_k, triton.next_power_of_2(top_k),
        min(routing.top_groups, groups), routing.group_top, routing.scores == "sigmoid", routing.by_logits,
        routing.is_normalized, bias is not None, correction is not None, counting is not None,
    )  # fmt: skip
    numbers = (*(held or (0, n)), routing.scale, routing.eps)
    return _Choice((logits, *given, ids, weights, counts, num_rows), numbers, constants)


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    *,
    held: tuple[int, int] | None = None,
    counting: Counting | None = None,
    pdl: int = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32 [T, top_k], weights float32 [T, top_k]) of logits float32 [S, T, E]; bias [E], correction float32 [E].

    held: the first expert on this rank, and their number: ids count from the first, and that number means any other expert.
    """
    parts, rows, n = logits.shape
    if n != routing.num_experts or not logits.is_contiguous():
        raise ValueError(f"route: logits of shape {tuple(logits.shape)} are not those of {routing.num_experts} experts")
    choice = _choice(logits, routing, bias, correction, held, counting)
    if rows:
        _route_kernel[(rows,)](
            *choice.tensors, *choice.numbers, parts, rows * n, *choice.constants, pdl, num_warps=1, **launch_options(pdl)
        )
    return choice.result


@functools.cache
def _done(device: torch.device, thread: int) -> torch.Tensor:
    """Number of finished programs of each row: 0 between launches; a thread has one launch at a time on a device."""
    return torch.zeros(MAX_ROWS_AT_ONCE, dtype=torch.int32, device=device)


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    *,
    held: tuple[int, int] | None = None,
    counting: Counting | None = None,
    pdl: int = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of the `router_logits` of x [T, H], in one launch for few rows; weight [E, H]."""
    (rows, k), n = x.shape, len(weight)
    done = _done(x.device, threading.get_ident())  # for any number of rows, so that it exists before a graph is captured
    if not 0 < rows <= min(current().experts.router_rows, MAX_ROWS_AT_ONCE) or x.dtype == torch.float32:
        return route(router_logits(x, weight, pdl=pdl), routing, bias, correction, held=held, counting=counting, pdl=pdl)
    _check(x, weight)
    if n != routing.num_experts:
        raise ValueError(f"router: weight {weight.shape} is not that of {routing.num_experts} experts")
    choice = _choice(x.new_empty(rows, n, dtype=torch.float32), routing, bias, correction, held, counting)
    block_k = min(2048, triton.next_power_of_2(k))
    _router_kernel[(rows, triton.cdiv(n, ROUTER_COLUMNS))](
        *choice.tensors, *choice.numbers, x, weight, done, x.stride(0), *choice.constants, pdl,
        k, ROUTER_COLUMNS, block_k, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return choice.result
