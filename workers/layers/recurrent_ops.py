"""The functions that recurrent layers are made of, dispatched by the tensor's device as those of ops.py: kernels/recurrent."""

import functools
from types import ModuleType

import torch

from quire.kernels.recurrent import convolution_cpu, delta_cpu, mamba_cpu
from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.kernels.recurrent.rows import Rows


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    from quire.kernels.recurrent import convolution, delta, mamba  # imports Triton, which a CPU may not have

    return convolution, delta, mamba


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
    module = _kernels()[0] if x.is_cuda else convolution_cpu
    return module.causal_convolution(x, weight, bias, tails, rows, gates)


def gated_delta(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Gated DeltaNet behind its convolution, with the gated norm: [T, Hv V]. states [N, Hv, K, V] are read and written."""
    module = _kernels()[1] if states.is_cuda else delta_cpu
    return module.gated_delta(inputs, weights, heads, states, rows)


def mamba(inputs: MambaInputs, weights: MambaWeights, heads: MambaHeads, states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Mamba 2 behind its convolution, with the gated norm: [T, H P]. states [N, H, N, P] are read and written."""
    module = _kernels()[2] if states.is_cuda else mamba_cpu
    return module.mamba(inputs, weights, heads, states, rows)
