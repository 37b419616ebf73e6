"""Mixtures of experts of transformers' models: recognized ones run on our kernels, others as transformers computes them.

A mixture is recognized by its gate's output for random values, not by its name. Routing stays the model's own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.kernels.experts.experts_reference import SwiGLU, Weights, activate
from quire.workers.layers import ops
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.loading.weight_loader import FLOATS, WeightLoader

TRIAL = 16  # elements of a gate


class StackedExperts(WeightOwner):
    """The weights of all experts in our kernels' layout; the child `stacked` of transformers' module."""

    def __init__(self, module: Any, act: SwiGLU, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._act, self._is_transposed, self._is_interleaved = act, module.is_transposed, not module.is_concatenated
        shapes = {name: p.shape for name, p in module._parameters.items()}
        experts, down = shapes["down_proj"][0], shapes["down_proj"][1:]
        hidden, inner = reversed(down) if self._is_transposed else down
        self.gate_up = new_parameter((experts, 2 * inner, hidden), dtype, device)
        self.down = new_parameter((experts, hidden, inner), dtype, device)
        self.gate_up_bias = new_parameter((experts, 2 * inner), dtype, device) if module.has_bias else None
        self.down_bias = new_parameter((experts, hidden), dtype, device) if module.has_bias else None

    def __call__(self, module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        stacked = Weights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return ops.experts(x.contiguous(), stacked, ids.int(), weights.float(), self._act, None)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        prefix = name.removesuffix("stacked")
        for own, tensor in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            shape = tuple(tensor.shape)
            stored = (shape[0], shape[2], shape[1]) if self._is_transposed else shape
            yield (
                prefix + own,
                WeightLoader(stored, (), FLOATS, self._writer(tensor, own == "gate_up_proj", self._is_transposed)),
            )
        for own, bias in (("gate_up_proj_bias", self.gate_up_bias), ("down_proj_bias", self.down_bias)):
            if bias is not None:
                yield (
                    prefix + own,
                    WeightLoader(tuple(bias.shape), (), FLOATS, self._writer(bias, own.startswith("gate"), False)),
                )

    def _writer(self, tensor: torch.Tensor, is_pair: bool, is_transposed: bool) -> Callable[[torch.Tensor, int], None]:
        def write(piece: torch.Tensor, row: int) -> None:
            piece = piece.to(tensor.device)
            if is_transposed:
                piece = piece.transpose(1, 2)
            if is_pair and self._is_interleaved:
                piece = torch.cat((piece[:, ::2], piece[:, 1::2]), 1)
            tensor[row : row + len(piece)].copy_(piece)

        return write


def recognised(module: Any) -> SwiGLU | None:
    """The function of the mixture's gate; None if our kernels do not have it."""
    names = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
    if not module.has_gate or module.has_post_expert_norm or set(module._parameters) != names:
        return None
    candidates = [SwiGLU()]
    if isinstance(limit := getattr(module, "limit", None), (int, float)):
        alpha = getattr(module, "alpha", 1.0)
        candidates.append(SwiGLU(limit=float(limit), alpha=float(alpha), offset=1.0))
        candidates.append(SwiGLU(limit=float(limit)))
    x = 8 * torch.randn(64, 2 * TRIAL, generator=torch.Generator().manual_seed(0))
    theirs = module._apply_gate(x)
    gate_up = x if module.is_concatenated else torch.cat((x[:, ::2], x[:, 1::2]), 1)
    for act in candidates:
        if theirs.shape == (64, TRIAL) and torch.allclose(theirs, activate(gate_up, act), rtol=1e-5, atol=1e-6):
            return act
    return None


def transformers_own(module: Any, device: torch.device) -> Callable[..., torch.Tensor]:
    """transformers' computation of a mixture; on a GPU the one that does not depend on data."""
    if device.type == "cuda":
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"]  # type: ignore[no-any-return]
    forward = type(module).forward
    return getattr(forward, "__wrapped__")  # type: ignore[no-any-return]  # noqa: B009
