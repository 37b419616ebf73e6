"""RMSNorm, alone or fused with the residual addition before it.

    rms_norm:      y = weight * cast(x / sqrt(mean(x^2) + eps))           reads x, writes y:               2 * T * H elements
    add_rms_norm:  residual += x (in place); y as above, of the residual  reads x and residual, writes both: 4 * T * H elements

x, residual, out [T, H] with unit stride in H and any row stride; weight [H]; float32, float16 or bfloat16, all of one dtype.
add_rms_norm's x may also be float32 parts [S, T, H], of which it reads all.
One program a row, which fits into registers: H up to 32768. Math in float32; the normalised value is rounded to x's dtype
before the product with the weight, as in transformers' LlamaRMSNorm. `norm_reference` is the reference. `pdl` is a mode of
`dependent_launch`: the weights are loaded before the wait.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import current

MAX_WARPS = 16


@triton.jit(do_not_specialize=["part_stride"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, part_stride, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask, other=0.0)
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * part_stride + row * x_stride + cols, mask, other=0.0)
        x = x.to(residual.dtype)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * residual_stride + cols, x, mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    y = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, y.to(x.dtype), mask)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None, pdl: int
) -> torch.Tensor:
    in_parts, parts, part_stride = False, 1, 0
    if x.dim() == 3 and residual is not None:
        if x.dtype != torch.float32:
            raise TypeError(f"add_rms_norm: parts of x must be float32, not {x.dtype}")
        in_parts, parts, part_stride = True, x.shape[0], x.stride(0)
        out = torch.empty_like(residual) if out is None else out
        x = x[0]
    out = torch.empty_like(x) if out is None else out
    second = x if residual is None else residual
    if x.dim() != 2 or weight.shape != (x.shape[1],) or second.shape != x.shape or out.shape != x.shape:
        raise ValueError(f"rms_norm: shapes {x.shape}, {second.shape}, {weight.shape}, {out.shape} do not fit")
    if not weight.dtype == second.dtype == out.dtype or (not in_parts and x.dtype != weight.dtype):
        raise TypeError(f"rms_norm: dtypes differ: {x.dtype}, {second.dtype}, {weight.dtype}, {out.dtype}")
    if not x.stride(1) == second.stride(1) == out.stride(1) == weight.stride(0) == 1:
        raise ValueError("rms_norm: the last dimension must have stride 1")
    rows, width = x.shape
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // current().elementwise.norm_warp_elements, 1), MAX_WARPS)
    _rms_norm_kernel[(rows,)](
        x, second, weight, out, x.stride(0), second.stride(0), out.stride(0), part_stride, eps,
        width, block, residual is not None, parts, pdl, num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, pdl: int = PLAIN
) -> torch.Tensor:
    """The normalised rows of x, written to `out` if given (which may be x itself)."""
    return _launch(x, None, weight, eps, out, pdl)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """Add x to the residual in place and return the norm of the sum; `out` may be x itself, unless that is in parts.

    x may be float32 [S, T, H], parts whose sum, rounded to the residual's dtype, is added (`split_linear`).
    """
    return _launch(x, residual, weight, eps, out, pdl)
