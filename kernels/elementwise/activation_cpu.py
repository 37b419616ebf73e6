"""Activations in plain torch: the CPU path and the oracle of `activation`, with the same signatures."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch.nn import functional as F

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "relu", "quick_gelu", "sigmoid", "tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": _relu2,
    "relu": F.relu,
    "quick_gelu": _quick_gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def activate(x: torch.Tensor, out: torch.Tensor | None = None, *, activation: Activation) -> torch.Tensor:
    """act(x) of x [T, I]; `out` may be x itself."""
    y = _FUNCTIONS[activation](x)
    return y if out is None else out.copy_(y)


def activate_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, activation: Activation) -> torch.Tensor:
    """act(gate) * up of gate_up [T, 2 * I] = gate | up; [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    y = _FUNCTIONS[activation](gate).mul_(up)  # in place: at 512 rows a new result's pages cost ten times the product
    return y if out is None else out.copy_(y)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] = gate | up; [T, I]."""
    return activate_mul(gate_up, out, activation="silu")
