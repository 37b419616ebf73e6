"""The functions that recurrent layers are made of, dispatched by the tensor's device as those of ops.py: kernels/recurrent."""

import functools
from types import ModuleType
from typing import NamedTuple

import torch

from quire.kernels.recurrent import convolution_cpu, delta_cpu, mamba_cpu
from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.kernels.recurrent.rows import Rows


class _Kernels(NamedTuple):
    convolution: ModuleType
    delta: ModuleType
    mamba: ModuleType
    dependent_launch: ModuleType


@functools.cache
def _kernels() -> _Kernels:
    from quire.kernels.recurrent import convolution, delta, mamba  # imports Triton, which a CPU may not have
    from quire.kernels.triton_support import dependent_launch

    return _Kernels(convolution, delta, mamba, dependent_launch)


def _launch_mode(x: torch.Tensor) -> int:
    """Never PLAIN where the GPU can do otherwise: a kernel's states are on their way while the one before it ends."""
    return _kernels().dependent_launch.mode_for_split_k(len(x))  # type: ignore[no-any-return]


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: Rows,
    gates: Gates | None = None,
) -> torch.Tensor:
    """silu of a convolution over the last W inputs of each channel: x [T, C], weight [W, C], bias [C] -> [T, C].

    With gates, after · the convolution of before · x. tails [N, W - 1, C]: the inputs before the next token of each state;
    those of the step's rows are read and written.
    """
    if x.is_cuda:
        return _kernels().convolution.causal_convolution(x, weight, bias, tails, rows, gates, pdl=_launch_mode(x))  # type: ignore[no-any-return]
    return convolution_cpu.causal_convolution(x, weight, bias, tails, rows, gates)


def gated_delta(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Gated DeltaNet behind its convolution, with the gated norm: [T, Hv V]. states [N, Hv, K, V] are read and written."""
    if states.is_cuda:
        return _kernels().delta.gated_delta(inputs, weights, heads, states, rows, pdl=_launch_mode(inputs.qkv))  # type: ignore[no-any-return]
    return delta_cpu.gated_delta(inputs, weights, heads, states, rows)


def mamba(inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Mamba 2 behind its convolution, with the gated norm: [T, H P]. states [N, H, N, P] are read and written."""
    if states.is_cuda:
        return _kernels().mamba.mamba(inputs, weights, heads, states, rows, pdl=_launch_mode(inputs.xbc))  # type: ignore[no-any-return]
    return mamba_cpu.mamba(inputs, weights, heads, states, rows)
