"""A linear layer that leaves split-K partial sums for the next norm to add up: a kernel less if launches are the cost.

    parts[s] = x[:, K_s] @ W[:, K_s]^T    (+ bias in part 0)          x [M, K], W [N, K], parts float32 [S, M, N]

Products with few output columns (o_proj, down_proj) have too few tiles to fill the GPU unless K is split, and a kernel that
sums the parts, as in cuBLAS, takes a third of a small product's time. K_s are equal ranges; the division into programs depends
on the shape alone. 17 to 64 rows of small weights go to a kernel of our own (on a Hopper to `linear_hopper`, 2 to 64 rows of
any weight), more rows to a batched product of cuBLAS. Moves W once. `norm.add_rms_norm` takes the parts as its x.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.linear import blas, linear
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, mode_for
from quire.kernels.tuning.configs import SplitConfig
from quire.kernels.tuning.current import cached, current, linear_tuning

MIN_ROWS = linear.MAX_ROWS + 1
MAX_ROWS = 64  # of our own kernel
MIN_K = 256  # a batch's ranges of K are divided from multiples of this


@triton.jit(do_not_specialize=["M"])
def _split_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, x_stride, w_stride, M, N,
    K: tl.constexpr, K_PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    first = part * K_PART
    k = first + tl.arange(0, BLOCK_K)
    end = tl.minimum(first + K_PART, K)
    x_at = x_ptr + m[:, None] * x_stride
    w_at = w_ptr + n.to(tl.int64)[None, :] * w_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K_PART, BLOCK_K):
        inside = start + k < end
        x = tl.load(x_at + (start + k)[None, :], (m < M)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + (start + k)[:, None], inside[:, None] & (n < N)[None, :], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # it is launched plainly itself; the norm may start near its end
    if BIAS:
        bias = tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
        acc += tl.where(part == 0, bias, 0.0)[None, :]
    out = out_ptr + (part * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc, (m < M)[:, None] & (n < N)[None, :])


@cached
def batched_splits(rows: int, n: int, k: int) -> int:
    """Splits of K to compute as a batch, 0 if one product is as fast, by the tuning table."""
    tuning = linear_tuning().split
    if n > tuning.max_columns or k % MIN_K or rows <= MAX_ROWS:
        return 0
    ranges = tuning.batched_small if _is_small(n, k) else tuning.batched_large
    return next((splits for first, last, splits in ranges if first <= rows <= last), 0)


def _is_small(n: int, k: int) -> bool:
    tuning = linear_tuning().split
    return n <= tuning.small_columns and n * k <= tuning.small_weight


def kernel_specialization(rows: int) -> tuple[int, int, int]:
    """A value that is equal for numbers of rows if they run the same kernels for a split product and its norm."""
    tuning = linear_tuning().split
    small, large = (batched_splits(rows, columns, MIN_K) for columns in (tuning.small_columns, tuning.max_columns))
    few = max(MAX_ROWS, hopper.MAX_ROWS) + 1
    return hopper.block_rows(min(rows, few)), small, large


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether partial sums for the norm are faster than the product."""
    (rows, k), n = x.shape, weight.shape[0]
    if current().fixed_order:
        return False
    if linear.streams(x, weight, split_k=True):
        from quire.kernels.linear import linear_hopper

        return linear_hopper.num_splits(x, weight) > 1
    few = MIN_ROWS <= rows <= MAX_ROWS and _is_small(n, k)
    dense = x.stride(1) == weight.stride(1) == 1
    return x.dtype.itemsize == 2 and dense and (few or (batched_splits(rows, n, k) > 0 and x.is_contiguous()))


def split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: SplitConfig | None = None,
    *,
    dependents: bool,
) -> torch.Tensor:
    """The partial sums, float32 [S, M, N]; dependents: the next kernel is launched dependently (and Hopper's is itself).

    1 to 64 rows of a float dtype; more if `batched_splits` says so, of a 16-bit dtype. Raises ValueError for others. `config`
    is for tests and tuning of our portable kernel.
    """
    (rows, k), (n, columns) = x.shape, weight.shape
    batches = batched_splits(rows, n, k) if rows > MAX_ROWS else 0
    if columns != k or not (1 <= rows <= MAX_ROWS or batches) or (bias is not None and bias.shape != (n,)):
        raise ValueError(f"split_linear: x {x.shape}, weight {weight.shape} do not fit, or too many rows")
    if x.dtype != weight.dtype or not x.stride(1) == weight.stride(1) == 1:
        raise ValueError("split_linear: x and weight need one dtype, and unit stride in the last dimension")
    if batches:
        parts = blas.batched_split_k(x, weight, batches)
        if bias is not None:
            parts[0] += bias
        return parts
    if config is None and linear.streams(x, weight, split_k=True):
        from quire.kernels.linear import linear_hopper

        if linear_hopper.num_splits(x, weight) > 1:
            return linear_hopper.linear_split_k(x, weight, bias, pdl=mode_for(rows) if dependents else PLAIN)
    config = config or linear_tuning().split.config
    part = triton.cdiv(triton.cdiv(k, config.splits), config.block_k) * config.block_k
    splits = triton.cdiv(k, part)
    out = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    _split_kernel[(triton.cdiv(n, config.block_n), splits)](
        x, weight, x if bias is None else bias, out, x.stride(0), weight.stride(0), rows, n,
        k, part, hopper.block_rows(rows), config.block_n, config.block_k, bias is not None, dependents,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
