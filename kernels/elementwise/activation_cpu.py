"""SiLU times up in plain torch: the CPU path and the oracle of `activation`, with the same signature."""

import torch


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] = gate | up; [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    y = torch.nn.functional.silu(gate).mul_(up)  # in place: at 512 rows a new result's pages cost ten times the product
    return y if out is None else out.copy_(y)
