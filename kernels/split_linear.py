"""A linear layer whose result is left in parts, for the norm behind it to add up: one kernel less where launches are the cost.

    parts[s] = x[:, K_s] @ W[:, K_s]^T    (+ bias in part 0)          x [M, K], W [N, K], parts float32 [S, M, N]

For 17 to 64 rows of small weights with few output columns (o_proj and down_proj of small models): too few tiles to fill the
GPU unless K is split, and a kernel that sums the parts, as cuBLAS has, takes a third of the product's time. K_s are equal
stretches; which program computes what depends on the shape alone. Moves W once. `norm.add_rms_norm` takes the parts as its x.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels import linear

MIN_ROWS = linear.MAX_ROWS + 1
MAX_ROWS = 64
MAX_COLUMNS = 2048
MAX_WEIGHT = 1 << 23  # elements


class Config(NamedTuple):
    splits: int  # of K
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


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
        tl.extra.cuda.gdc_launch_dependents()  # launched plainly itself; the norm may come near its end
    if BIAS:
        bias = tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
        acc += tl.where(part == 0, bias, 0.0)[None, :]
    out = out_ptr + (part * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc, (m < M)[:, None] & (n < N)[None, :])


CONFIG = Config(4, 32, 128, 4, 4)  # the best of benchmarks/kernels_small.py --only split --tune, at 32 and 64 rows


def row_block(rows: int) -> int:
    """Rows of the kernel's tile."""
    return max(16, triton.next_power_of_2(rows))


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether parts for the norm are faster to be had than the product."""
    n, k = weight.shape
    few = MIN_ROWS <= x.shape[0] <= MAX_ROWS and n <= MAX_COLUMNS and n * k <= MAX_WEIGHT
    return few and x.dtype.itemsize == 2 and x.stride(1) == weight.stride(1) == 1


def split_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, config: Config | None = None, *, dependents: bool
) -> torch.Tensor:
    """The parts, float32 [S, M, N]; 1 to 64 rows of a float dtype. dependents: the next kernel is launched dependently."""
    (rows, k), (n, columns) = x.shape, weight.shape
    if columns != k or not 1 <= rows <= MAX_ROWS or (bias is not None and bias.shape != (n,)):
        raise ValueError(f"split_linear: x {x.shape}, weight {weight.shape} do not fit, or too many rows")
    if x.dtype != weight.dtype or not x.stride(1) == weight.stride(1) == 1:
        raise ValueError("split_linear: x and weight need one dtype, and unit stride in the last dimension")
    config = config or CONFIG
    part = triton.cdiv(triton.cdiv(k, config.splits), config.block_k) * config.block_k
    splits = triton.cdiv(k, part)
    out = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    _split_kernel[(triton.cdiv(n, config.block_n), splits)](
        x, weight, x if bias is None else bias, out, x.stride(0), weight.stride(0), rows, n,
        k, part, row_block(rows), config.block_n, config.block_k, bias is not None, dependents,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
