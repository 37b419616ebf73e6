"""What a stage's model has in the places of modules that other stages have, and where hidden states pass from one to the next.

A stage begins with what it has received (`Received`, in the embedding's place), skips layers that are elsewhere, and ends with
the last sublayer's output added to the residual stream (`HandOver`, in the final norm's place), for that alone goes on: the
next stage's first norm has nothing to add. Between them is one buffer on the device, which decoder.py's modules, graphs and the
pipeline (workers/pipeline.py) all know. A whole model has none of this.
"""

import torch

from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm


class Between:
    """Hidden states on their way through a stage: [most tokens, H], once whoever runs the model has allocated them."""

    hidden: torch.Tensor


class Elsewhere(Module):
    """In the place of a module that another stage has, with its tensors. As a layer it changes nothing."""

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: object, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return x, residual


class Received(Module):
    """ids [T] -> hidden states [T, H] that the stage before has left."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self._between = between

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._between.hidden[: len(ids)]


class HandOver(Elsewhere):
    """Leaves hidden states for the next stage. norm: a model's, whose `add` says how outputs are added, and of no other use."""

    _norm: Norm

    def __init__(self, norm: Norm, between: Between) -> None:
        super().__init__()
        for parameter in norm.parameters():
            parameter.fill_(1.0)
        self.__dict__["_norm"] = norm  # past nn.Module: nothing is loaded into it
        self._between = between

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream with x, [T, H]."""
        if x is not None:
            self._norm.add(x, residual)
        hidden = self._between.hidden[: len(residual)]
        if hidden.data_ptr() != residual.data_ptr():
            hidden.copy_(residual)
        return hidden
