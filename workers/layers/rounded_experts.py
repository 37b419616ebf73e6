"""Experts with quantized inputs, on a CPU: experts_reference's formula, with inputs rounded before each product.

Inputs are rounded like a Linear's (formats/activations.py). Gate, up and down of each expert may have their own static
scales; if gate's and up's are equal, they are one product. Called by experts.py, and kept_experts.py for the sum; a GPU's
kernels quantize inputs themselves.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.experts.experts_reference import Act, Weights, activate, is_gated
from quire.workers.layers.formats.activations import rounded_for, rounds_alike
from quire.workers.loading.quantized.packed_weight import PackedWeight


class ExpertInputs(NamedTuple):
    """How the inputs of an expert's layers are rounded; None: not at all, for a plain layer, or a gate that is not there."""

    gate: PackedWeight | None
    up: PackedWeight | None
    down: PackedWeight | None


def experts_of_rounded_inputs(
    x: torch.Tensor,
    w: Weights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    act: Act,
    shared: torch.Tensor | None,
    inputs: Sequence[ExpertInputs],
) -> torch.Tensor:
    """As `experts_reference.experts`, [T, H]. inputs: one for each of this rank's experts; a greater id is another rank's."""

    def one(h: torch.Tensor, expert: int) -> torch.Tensor:
        return _expert(h, w, expert, act, inputs[expert])

    return experts_in_turn(x, len(inputs), ids, weights, shared, one)


def experts_in_turn(
    x: torch.Tensor,
    num_experts: int,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    one: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum [T, H] of `one(rows, expert)`, for each of `num_experts` that has rows, with `shared` first."""
    top_k = ids.shape[1]
    parts = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    flat, order = ids.flatten().sort(stable=True)
    found, counts = flat.unique_consecutive(return_counts=True)
    for expert, pairs in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        if expert < num_experts:
            y = one(x.index_select(0, pairs // top_k), expert)
            parts.view(-1, x.shape[1])[pairs] = y.float() * weights.flatten()[pairs, None]
    out = parts[:, 0] if shared is None else parts[:, 0].add_(shared)
    for j in range(1, top_k):
        out += parts[:, j]
    return out.to(x.dtype)


def _expert(x: torch.Tensor, w: Weights, expert: int, act: Act, inputs: ExpertInputs) -> torch.Tensor:
    bias, down_bias = (None if b is None else b[expert] for b in (w.gate_up_bias, w.down_bias))
    gated = is_gated(act)
    gate_up = F.linear(rounded_for(x, inputs.gate if gated else inputs.up), w.gate_up[expert], bias)
    if gated and not rounds_alike(inputs.gate, inputs.up):
        up = F.linear(rounded_for(x, inputs.up), w.gate_up[expert], bias).chunk(2, -1)[1]
        gate_up = torch.cat((gate_up.chunk(2, -1)[0], up), -1)
    return F.linear(rounded_for(activate(gate_up, act), inputs.down), w.down[expert], down_bias)
