"""The middle of an MLP: an activation, gated or alone.

    gated    out[t, i] = cast(act(gate_up[t, i])) * gate_up[t, I + i]        gate_up [T, 2 * I] = gate | up, out [T, I]
    alone    out[t, i] = act(x[t, i])                                        x, out [T, I]

act: silu(x) = x / (1 + exp(-x)), gelu exact (by erf), by tanh, or quick, x / (1 + exp(-1.702 x)), relu(x)^2, relu, sigmoid,
tanh. Inputs have unit stride in their last dimension and any row stride; float32, float16 or bfloat16. Moves 3 * T * I elements
(alone 2 * T * I). act is computed in float32 and rounded before the product, as torch does. `perm` int32 [I]: column i of the
result is column perm[i], for a product with a weight of permuted inputs; `gather` only permutes. See `activation_cpu`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation_cpu import ACTIVATIONS, Activation
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import cached, current

NUMBERS: dict[Activation, int] = {name: number for number, name in enumerate(ACTIVATIONS)}  # as the kernel's constants
NONE = tl.constexpr(-1)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in float32; both are rounded to dtype first, in case they are float32 sums."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """act(x) of float32 x."""
    if ACTIVATION == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:  # 1 + tanh(u) = 2 / (1 + exp(-2 u)); where exp would overflow, the result is 0 anyway
        return x / (1.0 + tl.exp(tl.minimum(-1.5957691216057308 * (x + 0.044715 * x * x * x), 80.0)))
    elif ACTIVATION == 3:
        return tl.where(x > 0.0, x * x, 0.0)
    elif ACTIVATION == 4:
        return tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == 5:
        return x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == 6:
        return 1.0 / (1.0 + tl.exp(-x))
    elif ACTIVATION == 7:
        return 2.0 / (1.0 + tl.exp(tl.minimum(-2.0 * x, 80.0))) - 1.0
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def _activation_kernel(
    x_ptr, perm_ptr, out_ptr, x_stride, out_stride, width, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    PERM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    of = cols
    if PERM:
        of = tl.load(perm_ptr + cols, mask, other=0)
    wait_for_previous(PDL)
    y = tl.load(x_ptr + row * x_stride + of, mask, other=0.0)
    if ACTIVATION != NONE:
        y = _activate(y.to(tl.float32), ACTIVATION).to(y.dtype)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + width + of, mask, other=0.0)
        y = (y.to(tl.float32) * up.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + row * out_stride + cols, y, mask)


class Config(NamedTuple):
    block: int  # elements of a program
    num_warps: int


@cached
def choose(width: int) -> Config:
    """The configuration for rows of `width` results."""
    tuning = current().elementwise
    block = min(triton.next_power_of_2(width), tuning.silu_block)
    return Config(block, max(block // tuning.silu_warp_elements, 1))


def _launch(
    x: torch.Tensor,
    out: torch.Tensor | None,
    activation: Activation | None,
    is_gated: bool,
    pdl: int,
    config: Config | None = None,
    perm: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
    out = x.new_empty((rows, width)) if out is None else out
    if x.dim() != 2 or x.shape[1] != (2 * width if is_gated else width) or out.shape != (rows, width):
        raise ValueError(f"{activation}: shapes {x.shape}, {out.shape} do not fit")
    if perm is not None and (perm.shape != (width,) or perm.dtype != torch.int32):
        raise ValueError(f"{activation}: an order {perm.shape} of {perm.dtype} does not fit {width} columns")
    if x.dtype != out.dtype or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"{activation}: out must have the input's dtype, and both unit stride in the last dimension")
    if rows == 0:
        return out
    block, num_warps = config or choose(width)
    which = NONE.value if activation is None else NUMBERS[activation]
    _activation_kernel[(rows, triton.cdiv(width, block))](
        x, perm, out, x.stride(0), out.stride(0), width, which, is_gated, block, perm is not None, pdl,
        num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def activate_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, *, activation: Activation, pdl: int = PLAIN
) -> torch.Tensor:
    """act(gate) * up of gate_up [T, 2 * I] = gate | up; [T, I]."""
    return _launch(gate_up, out, activation, True, pdl)


def activate(x: torch.Tensor, out: torch.Tensor | None = None, *, activation: Activation, pdl: int = PLAIN) -> torch.Tensor:
    """act(x) of x [T, I]; `out` may be x itself."""
    return _launch(x, out, activation, False, pdl)


def silu_mul(
    gate_up: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    perm: torch.Tensor | None = None,
    pdl: int = PLAIN,
    config: Config | None = None,
) -> torch.Tensor:
    """silu(gate) * up, as activate_mul; column i of the result is column perm[i]. `config` is for tuning."""
    return _launch(gate_up, out, "silu", True, pdl, config, perm)


def gather(x: torch.Tensor, perm: torch.Tensor, *, pdl: int = PLAIN) -> torch.Tensor:
    """x [T, I] permuted: column i of the result is column perm[i]."""
    return _launch(x, None, None, False, pdl, perm=perm)


@triton.jit
def _sigmoid_kernel(
    x_ptr, gate_ptr, x_stride, gate_stride, width, ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0)
    if ONE:
        gate = tl.load(gate_ptr + row * gate_stride)
    else:
        gate = tl.load(gate_ptr + row * gate_stride + cols, mask, other=0.0)
    weight = tl.sigmoid(gate.to(tl.float32)).to(x.dtype)  # rounded, as torch's sigmoid is
    tl.store(x_ptr + row * x_stride + cols, (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype), mask)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor, *, pdl: int = PLAIN) -> torch.Tensor:
    """x *= sigmoid(gate) in place, and x; x [T, I], gate [T, I], or [T, 1] for a number a row. Rows may lie apart."""
    rows, width = x.shape
    if gate.shape not in ((rows, width), (rows, 1)) or gate.dtype != x.dtype or x.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError(f"times_sigmoid: x {x.shape} of {x.dtype} and gate {gate.shape} of {gate.dtype} do not fit")
    if rows:
        block, num_warps = choose(width)
        _sigmoid_kernel[(rows, triton.cdiv(width, block))](
            x, gate, x.stride(0), gate.stride(0), width, gate.shape[1] == 1, block, pdl,
            num_warps=num_warps, **launch_options(pdl),
        )  # fmt: skip
    return x
