"""Linear layers with one order of every sum, whatever the number of rows: for `--deterministic`.

    y = x @ W^T + bias        x [M, K], W [N, K], bias [N] or none, y [M, N]; float32, float16 or bfloat16, rounded once

Every element of y is one chain: the bias, then products over K, from its first element to its last, in one accumulator in
float32. K is never split. With 16 bits a program has at least 64 rows, so that a Hopper always computes with wgmma, in units of
16 elements of K: the numbers of rows and columns of a program, and how much of K it loads at once, change its speed and not one
bit of its results. With float32 there is one configuration. So a row's result depends on that row and on W alone.

Bytes: W once for 64 rows (128 if there are more than 64), x once for each band of columns, from L2.
Reference: torch.nn.functional.linear. `linear` calls this if the table in force says so.
"""

import bisect
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import current

BAND = 8  # tiles of rows that share columns of W in L2


class FixedConfig(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


EXACT = FixedConfig(16, 32, 32, 4, 2)  # float32: without tensor cores
FEW_ROWS, FEW_COLUMNS = FixedConfig(64, 64, 128, 4, 3), FixedConfig(64, 32, 128, 4, 5)
MANY_ROWS = (FixedConfig(128, 64, 64, 8, 4), FixedConfig(128, 128, 64, 8, 4), FixedConfig(128, 256, 64, 8, 3))


@triton.jit(do_not_specialize=["M"])
def _fixed_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    w_stride,
    out_stride,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    band = pid // (BAND * columns)
    size = tl.minimum(tl.cdiv(M, BLOCK_M) - band * BAND, BAND)
    inside = pid - band * BAND * columns
    m = (band * BAND + inside % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = inside // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    even: tl.constexpr = K % BLOCK_K == 0  # loads that are masked in K are not pipelined
    real = (m < M)[:, None]  # rows beyond M cost no traffic: read as copies of the last row, they would all wait for its lines
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BIAS:  # first: behind the loop Triton would add it before or after the products, whether K takes one turn or several
        acc += tl.load(bias_ptr + tl.minimum(n, N - 1)).to(tl.float32)[None, :]
    wait_for_previous(PDL)
    for start in range(0, K, BLOCK_K):
        if even:
            x = tl.load(x_at + start, real, other=0.0)
            w = tl.load(w_at + start)
        else:
            x = tl.load(x_at + start, real & (k < K - start)[None, :], other=0.0)
            w = tl.load(w_at + start, (k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


LIMITS = (64, 256, 1024)  # of rows: beyond the last, tiles are the largest


def choose(rows: int, n: int, itemsize: int, programs: int) -> FixedConfig:
    """The configuration for x [rows, K] @ W^T [K, n]; programs: enough to fill the GPU."""
    if itemsize == 4:
        return EXACT
    size = bisect.bisect_left(LIMITS, rows)
    if size == 0:
        return FEW_COLUMNS if n < FEW_ROWS.block_n * programs else FEW_ROWS
    return MANY_ROWS[size - 1]


def kernel_specialization(rows: int) -> int | None:
    """A value that is equal for numbers of rows if they run the same compiled kernels; None: other kernels run."""
    return bisect.bisect_left(LIMITS, rows) if current().fixed_order else None


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: FixedConfig | None = None,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x @ weight^T + bias, in `out` [M, N] if it is given; unit stride in the last dimension. `config` is for tests."""
    (rows, k), n = x.shape, weight.shape[0]
    out = x.new_empty(rows, n) if out is None else out
    if weight.shape[1] != k or out.shape != (rows, n) or (bias is not None and bias.shape != (n,)):
        raise ValueError(f"fixed_linear: x {x.shape}, weight {weight.shape}, out {out.shape} do not fit")
    if not x.dtype == weight.dtype == out.dtype or not x.stride(1) == weight.stride(1) == out.stride(1) == 1:
        raise ValueError("fixed_linear: x, weight and out need one dtype, and unit stride in the last dimension")
    if rows:
        config = config or choose(rows, n, x.element_size(), hopper.num_sms(x.device))
        grid = (triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n),)
        _fixed_kernel[grid](
            x,
            weight,
            x if bias is None else bias,
            out,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            rows,
            n,
            k,
            *config[:3],
            BAND,
            bias is not None,
            pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **launch_options(pdl),
        )
    return out
