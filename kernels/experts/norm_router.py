"""One row's residual addition, RMSNorm, router and choice of experts in one kernel: a launch less in every layer of a step.

    s = residual + x;   h = norm_weight * cast(s / sqrt(mean(s^2) + eps));   ids, weights = router(h)

x, residual [1, K] (x may be none: s = residual), W [E, K], norm_weight [K]; bfloat16 or float16 (float32 in tests), rounded
where `norm` does; what it chooses is to the last bit what `routing.router` chooses for this h. Every program computes the norm
anew beside its few logits, as `norm_linear` does; the first also writes s and h, s to a buffer of its own, for the others still
read the residual. A program is one warp: the choice is three reductions an expert, each a barrier between several. s and h are
sums and products of 16 bits, two at a time, which are float32's, rounded: that has more than twice the digits. Moves W once.
"""

import threading

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.norm import WEIGHS, weighed
from quire.kernels.elementwise.norm_reference import Weighs
from quire.kernels.experts.routing import (
    ROUTER_COLUMNS,
    check_products,
    choice_arguments,
    done_counts,
    expert_numbers,
    router_block,
    store_and_choose,
)
from quire.kernels.experts.routing_reference import Counting, Routing
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, prefetch, wait_for_previous
from quire.kernels.tuning.current import current

MAX_K = 4096  # which a warp holds


@triton.jit
def _weighed(normed, weight, WEIGHS: tl.constexpr):
    """`weighed`, rounded to the weight's dtype; a product of two of 16 bits is rounded once either way."""
    if WEIGHS == 1:
        return normed.to(weight.dtype) * weight
    else:
        return weighed(normed, weight.to(tl.float32), weight.dtype, WEIGHS).to(weight.dtype)


@triton.jit(
    do_not_specialize=["first", "held"],
    do_not_specialize_on_alignment=["num_rows_ptr"],
)
def _norm_router_kernel(
    logits_ptr, bias_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, first, held, scale, eps,
    x_ptr, residual_ptr, norm_ptr, w_ptr, sum_ptr, h_ptr, done_ptr, norm_eps,
    E: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE_2: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_2: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, IS_SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr, IS_NORMALIZED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    COUNTS: tl.constexpr, PDL: tl.constexpr,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """Program (0, p): BLOCK_E logits."""
    row = tl.program_id(0).to(tl.int64)
    is_first = tl.program_id(1) == 0
    n = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    w_at = w_ptr + n[:, None] * K + k[None, :]
    w = ()
    for start in tl.static_range(0, K, BLOCK_K):  # all of it before the wait
        w = w + (tl.load(w_at + start, (n < E)[:, None] & (start + k < K)[None, :], other=0.0),)  # type: ignore[assignment]
    norm = (tl.load(norm_ptr + k, k < K, other=0.0),)
    if PDL > 0:  # there are no registers for more of it
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            prefetch(norm_ptr + tl.minimum(start + 64 * tl.arange(0, BLOCK_K // 64), K - 1))
    e, g, valid = expert_numbers(E, GROUPS, GROUPS_2, SIZE_2)
    bias = tl.zeros([GROUPS_2, SIZE_2], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + e, valid, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    sums = ()
    square = 0.0
    for start in tl.static_range(0, K, BLOCK_K):
        s = tl.load(residual_ptr + start + k, start + k < K, other=0.0)
        if ADD:
            s += tl.load(x_ptr + start + k, start + k < K, other=0.0)
            if is_first:
                tl.store(sum_ptr + start + k, s, start + k < K)
        sums = sums + (s,)  # type: ignore[assignment]
        square += tl.sum(s.to(tl.float32) * s.to(tl.float32), 0)
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        norm = norm + (tl.load(norm_ptr + start + k, start + k < K, other=0.0),)  # type: ignore[assignment]
    factor = tl.rsqrt(square / K + norm_eps)
    acc = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        s = sums[start // BLOCK_K]
        h = _weighed(s.to(tl.float32) * factor, norm[start // BLOCK_K], WEIGHS)
        if is_first:  # type: ignore[unreachable]
            tl.store(h_ptr + start + k, h, start + k < K)
        acc += w[start // BLOCK_K].to(tl.float32) * h.to(tl.float32)[None, :]
    store_and_choose(
        tl.sum(acc, 1), n, done_ptr, bias, logits_ptr, correction_ptr, ids_ptr, weights_ptr, counts_ptr, num_rows_ptr, row,
        e, g, valid, first, held, scale, eps,
        E, GROUPS, TOP_K, TOP_K_2, TOP_GROUPS, GROUP_TOP, IS_SIGMOID, BY_LOGITS, IS_NORMALIZED, HAS_CORRECTION, COUNTS,
    )  # fmt: skip


def supports(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm_router` is there for these, in the stead of a norm and a router's one launch."""
    rows, k = residual.shape
    is_one = rows == 1 <= current().experts.router_rows and k <= MAX_K and residual.dtype.itemsize == 2
    has_units = residual.stride(1) == 1 and (x is None or (x.shape == residual.shape and x.stride(1) == 1))
    return is_one and has_units and weight.dtype == residual.dtype and weight.is_contiguous()


def norm_router(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    *,
    held: tuple[int, int] | None = None,
    counting: Counting | None = None,
    weighs: Weighs = "rounded",
    pdl: int = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h, residual + x, ids, weights) of one row, as `routing.router` of h; the residual itself stays as it was.

    weighs: how the norm's weight is applied, as `norm` has it.

    Raises ValueError for shapes, strides or dtypes that do not fit.
    """
    n, k = weight.shape
    added = residual if x is None else x
    check_products(residual, weight)
    fits = added.shape == residual.shape == (1, k) and norm_weight.shape == (k,) and n == routing.num_experts and k <= MAX_K
    if not fits or not added.stride(1) == norm_weight.stride(0) == 1:
        raise ValueError(
            f"norm_router: {added.shape}, residual {residual.shape}, {norm_weight.shape}, {weight.shape} do not fit together"
            f" or {routing.num_experts} experts"
        )
    if not added.dtype == norm_weight.dtype == weight.dtype:
        raise ValueError(f"norm_router: {added.dtype}, {norm_weight.dtype} and {weight.dtype} need to be one dtype")
    choice = choice_arguments(residual.new_empty(1, n, dtype=torch.float32), routing, bias, correction, held, counting)
    total = residual if x is None else torch.empty_like(residual)
    h, done = torch.empty_like(residual), done_counts(residual.device, threading.get_ident())
    block_k = router_block(k)
    columns = ROUTER_COLUMNS if k <= block_k else 1  # a warp has 255 registers a thread
    _norm_router_kernel[(1, triton.cdiv(n, columns))](
        *choice.tensors, *choice.numbers, added, residual, norm_weight, weight, total, h, done, norm_eps, *choice.constants,
        pdl, k, columns, block_k, x is not None, WEIGHS[weighs], num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return h, total, *choice.result
