"""SiLU times up: the middle of a gated MLP.

    out[t, i] = cast(silu(gate_up[t, i])) * gate_up[t, I + i],   silu(x) = x / (1 + exp(-x))

gate_up [T, 2 * I] with unit stride in its last dimension and any row stride, out [T, I]; float32, float16 or bfloat16.
Moves 3 * T * I elements. SiLU in float32, rounded before the product, as torch does. Reference: `activation_cpu`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import cached, current


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in float32, of values or of sums in float32, which are rounded to dtype first."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    x_ptr, out_ptr, x_stride, out_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    wait_for_previous(PDL)
    gate = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + width + cols, mask, other=0.0)
    dtype: tl.constexpr = gate.dtype
    tl.store(out_ptr + row * out_stride + cols, gated(gate, up, dtype).to(dtype), mask)


class Config(NamedTuple):
    block: int  # elements of a program
    num_warps: int


@cached
def choose(width: int) -> Config:
    """The configuration for rows of `width` results."""
    tuning = current().elementwise
    block = min(triton.next_power_of_2(width), tuning.silu_block)
    return Config(block, max(block // tuning.silu_warp_elements, 1))


def silu_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, *, pdl: int = PLAIN, config: Config | None = None
) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] = gate | up; [T, I]. `config` is for tuning."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width)) if out is None else out
    if gate_up.dim() != 2 or gate_up.shape[1] != 2 * width or out.shape != (rows, width):
        raise ValueError(f"silu_mul: shapes {gate_up.shape}, {out.shape} do not fit")
    if gate_up.dtype != out.dtype or gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("silu_mul: out must have the input's dtype, and both unit stride in the last dimension")
    if rows == 0:
        return out
    block, num_warps = config or choose(width)
    _silu_mul_kernel[(rows, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(0), out.stride(0), width, block, pdl, num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out
