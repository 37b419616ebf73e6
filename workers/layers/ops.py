"""The functions that layers are made of, dispatched by where the tensor lives: our Triton kernels on CUDA, torch on the CPU.

Triton is imported when the first CUDA tensor is met, so a CPU worker never imports it. No function here synchronises with
the device or branches on data: a forward pass made of them can be captured in a CUDA graph.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.elementwise import activation_cpu, norm_cpu
from quire.workers.parallel import Partial


class _Kernels(NamedTuple):
    activation: ModuleType
    dependent_launch: ModuleType
    embedding: ModuleType
    linear: ModuleType
    norm: ModuleType
    norm_linear: ModuleType
    split_linear: ModuleType


@functools.cache
def _kernels() -> _Kernels:
    from quire.kernels.elementwise import activation, embedding, norm
    from quire.kernels.linear import linear, norm_linear, split_linear
    from quire.kernels.triton_support import dependent_launch

    return _Kernels(activation, dependent_launch, embedding, linear, norm, norm_linear, split_linear)


def _launch_mode(x: torch.Tensor) -> int:
    return _kernels().dependent_launch.mode_for(len(x))


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of weight [vocab, H] by ids int32 [T] -> [T, H]."""
    return _kernels().embedding.embedding(ids, weight) if ids.is_cuda else F.embedding(ids, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32; x [T, H], weight [H]."""
    if x.is_cuda:
        return _kernels().norm.rms_norm(x, weight, eps, pdl=_launch_mode(x))
    return norm_cpu.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor | Partial, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns the norm of the new residual. x, residual [T, H]; x may be parts of `linear_in_parts`,
    or a Partial, whose sum over the ranks is added."""
    if isinstance(x, Partial):
        return x.exchange.add_rms_norm(x.x, residual, weight, eps)
    if x.dim() == 3:
        return _kernels().norm.add_rms_norm(x, residual, weight, eps, pdl=_kernels().dependent_launch.late())
    if x.is_cuda:
        return _kernels().norm.add_rms_norm(x, residual, weight, eps, pdl=_launch_mode(x))
    return norm_cpu.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of gate_up [T, 2I] = gate|up, giving [T, I]."""
    if gate_up.is_cuda:
        return _kernels().activation.silu_mul(gate_up, pdl=_launch_mode(gate_up))
    return activation_cpu.silu_mul(gate_up)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + bias; x [T, in], weight [out, in], bias [out]. On CUDA few rows go to our kernels, many to cuBLAS (it decides).

    `out` [T, out] takes the result.
    """
    if x.is_cuda:
        return _kernels().linear.skinny_linear(x, weight, bias, out, pdl=_launch_mode(x))
    y = F.linear(x, weight, bias)
    return y if out is None else out.copy_(y)


def splits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_in_parts` is there for these and faster than `linear`: some rows, few columns, on CUDA."""
    return x.is_cuda and _kernels().split_linear.pays(x, weight)


def linear_in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [S, T, out]: what `linear` gives is their sum, which `add_rms_norm` forms on the way."""
    return _kernels().split_linear.split_linear(x, weight, bias, dependents=_kernels().dependent_launch.supported())


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) · up of gate|up = x Wᵀ + bias; x [T, in], weight [2I, in] -> [T, I]. One kernel for few rows on CUDA."""
    if x.is_cuda:
        return _kernels().linear.skinny_gated(x, weight, bias, pdl=_launch_mode(x))
    return silu_mul(F.linear(x, weight, bias))


def fuses_norm(residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm_linear` is there for these and faster than its parts: one row, a small weight, on CUDA."""
    return residual.is_cuda and _kernels().norm_linear.pays(residual, weight)


def norm_linear(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(linear(norm(residual + x)), residual + x), the first gated if so asked; the residual itself stays as it was."""
    mode = _launch_mode(residual)
    return _kernels().norm_linear.norm_linear(x, residual, norm_weight, eps, weight, bias, is_gated=is_gated, pdl=mode)
