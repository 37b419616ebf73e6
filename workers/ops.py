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

DEPENDENT_ROWS = 1  # up to so many rows kernels are launched as programmatic dependents: each begins in the tail of the last


class _Kernels(NamedTuple):
    activation: ModuleType
    embedding: ModuleType
    linear: ModuleType
    norm: ModuleType


@functools.cache
def _kernels() -> _Kernels:
    from quire.kernels import activation, embedding, linear, norm

    return _Kernels(activation, embedding, linear, norm)


def launches_dependent(rows: int) -> bool:
    """Whether the kernels of a step of so many rows are launched as programmatic dependents."""
    return rows <= DEPENDENT_ROWS


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of weight [vocab, H] by ids int32 [T] -> [T, H]."""
    return _kernels().embedding.embedding(ids, weight) if ids.is_cuda else F.embedding(ids, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32; x [T, H], weight [H]."""
    if x.is_cuda:
        return _kernels().norm.rms_norm(x, weight, eps, pdl=launches_dependent(len(x)))
    return norm_cpu.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns the norm of the new residual. x, residual [T, H]."""
    if x.is_cuda:
        return _kernels().norm.add_rms_norm(x, residual, weight, eps, pdl=launches_dependent(len(x)))
    return norm_cpu.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of gate_up [T, 2I] = gate|up, giving [T, I]."""
    if gate_up.is_cuda:
        return _kernels().activation.silu_mul(gate_up, pdl=launches_dependent(len(gate_up)))
    return activation_torch.silu_mul(gate_up)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + bias; x [T, in], weight [out, in], bias [out]. On CUDA few rows go to our kernel, many to cuBLAS (it decides).

    `out` [T, out], on CUDA only, takes the result.
    """
    if x.is_cuda:
        return _kernels().linear.skinny_linear(x, weight, bias, out, pdl=launches_dependent(len(x)))
    return F.linear(x, weight, bias)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) · up of gate|up = x Wᵀ + bias; x [T, in], weight [2I, in] -> [T, I]. One kernel for few rows on CUDA."""
    if x.is_cuda:
        return _kernels().linear.skinny_gated(x, weight, bias, pdl=launches_dependent(len(x)))
    return silu_mul(F.linear(x, weight, bias))
