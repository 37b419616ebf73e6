"""Products of int8 weights with int8 activations (w8a8): as `fp8.fp8_linear`, but sums are exact in int32, scaled by the
token's and then the row's scale.

Our kernels compute all rows on a Hopper (`fp8.launch_few`) and few rows elsewhere; beyond the tuning table's limit it is
torch._int_mm, which is as exact, and a pass over its int32 sums. Reference: `scaled.Scaled.dequantized`. 16-bit activations:
`w8a16`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.linear import scaled
from quire.kernels.linear.fp8 import launch_few, split_k, widens
from quire.kernels.linear.scaled import Scaled, is_exact
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

SCALED_AT_ONCE = 1024  # sums of a row


def int_mm_supports(rows: int, n: int, k: int) -> bool:
    """Whether torch._int_mm computes [rows, k] by [k, n] on every GPU."""
    return rows > 16 and n % 8 == 0 and k % 8 == 0


def int8_linear(
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x @ W^T + bias in dtype [M, N]; gated: silu(g) * u of its halves, [M, N / 2]."""
    (rows, k), columns = x.data.shape, len(weight.data)
    is_ours = scaled.is_ours(rows, True, False) or widens(x, weight, is_gated=is_gated)
    if not is_ours and int_mm_supports(rows, columns, k) and is_exact(x, weight):
        sums = torch._int_mm(x.data, weight.data.t())
        return scale(sums, x.scales, weight.scales, bias, dtype=dtype, is_gated=is_gated, pdl=pdl)
    out = torch.empty(rows, columns // 2 if is_gated else columns, dtype=dtype, device=x.data.device)
    launch_few(x, weight, bias, out, is_gated=is_gated, pdl=pdl)
    return out


def int8_linear_split_k(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None = None, *, dtype: torch.dtype, pdl: int = PLAIN
) -> torch.Tensor:
    """As `fp8.fp8_linear_split_k`, for int8."""
    parts = split_k(x, weight, bias, pdl=pdl)
    return int8_linear(x, weight, bias, dtype=dtype, pdl=pdl) if parts is None else parts


@triton.jit
def _scale_kernel(
    sums_ptr, xs_ptr, ws_ptr, bias_ptr, out_ptr, N, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < N
    columns = N * 2 if GATED else N
    wait_for_previous(PDL)
    xs = tl.load(xs_ptr + row)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = _scaled(sums_ptr + row * columns, xs, ws_ptr, bias_ptr, n, live, BIAS)
    if GATED:
        y = gated(y, _scaled(sums_ptr + row * columns, xs, ws_ptr, bias_ptr, n + N, live, BIAS), dtype)
    tl.store(out_ptr + row * N + n, y.to(dtype), live)


@triton.jit
def _scaled(sums_ptr, xs, ws_ptr, bias_ptr, n, live, BIAS: tl.constexpr):
    y = tl.load(sums_ptr + n, live, other=0).to(tl.float32) * xs * tl.load(ws_ptr + n, live, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, live, other=0.0).to(tl.float32)
    return y


def scale(
    sums: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """int32 sums [M, N] times x_scales [M, 1] and w_scales [N, 1], plus bias, in dtype; gated: [M, N / 2]."""
    rows, columns = sums.shape
    n = columns // 2 if is_gated else columns
    if x_scales.shape != (rows, 1) or len(w_scales) != columns or not sums.is_contiguous():
        raise ValueError(f"int8: sums {sums.shape} and scales {x_scales.shape}, {w_scales.shape} do not fit")
    out = torch.empty(rows, n, dtype=dtype, device=sums.device)
    _scale_kernel[(rows, triton.cdiv(n, SCALED_AT_ONCE))](
        sums, x_scales, w_scales, w_scales if bias is None else bias, out, n, SCALED_AT_ONCE,
        bias is not None, is_gated, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out
