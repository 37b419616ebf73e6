"""The functions that layers are made of, dispatched by where the tensor lives: our Triton kernels on CUDA, torch on the CPU.

Triton is imported when the first CUDA tensor is met, so a CPU worker never imports it. No function here synchronises with
the device or branches on data: a forward pass made of them can be captured in a CUDA graph.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels import activation_torch, norm_cpu


class _Kernels(NamedTuple):
    activation: ModuleType
    linear: ModuleType
    norm: ModuleType


@functools.cache
def _kernels() -> _Kernels:
    from quire.kernels import activation, linear, norm

    return _Kernels(activation, linear, norm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32; x [T, H], weight [H]."""
    return (_kernels().norm if x.is_cuda else norm_cpu).rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns the norm of the new residual. x, residual [T, H]."""
    return (_kernels().norm if x.is_cuda else norm_cpu).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of gate_up [T, 2I] = gate|up, giving [T, I]."""
    return (_kernels().activation if gate_up.is_cuda else activation_torch).silu_mul(gate_up)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + bias; x [T, in], weight [out, in], bias [out]. On CUDA few rows go to our kernel, many to cuBLAS (it decides).

    `out` [T, out], on CUDA only, takes the result.
    """
    if x.is_cuda:
        return _kernels().linear.skinny_linear(x, weight, bias, out)
    return F.linear(x, weight, bias)
