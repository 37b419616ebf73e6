"""Where a model is cut into pipeline stages: what stands for modules of other stages, and how hidden states come in and go out.

A stage begins with the hidden states that it has received (`StageInput`, in the embedding's place), skips the layers of other
stages (`MissingLayer`), and ends with the last sublayer's output added to the residual stream (`StageOutput`, in the final
norm's place): that alone goes on, so the next stage's first norm has nothing to add. In and out go through one buffer on the
device, which decoder.py's modules, graphs and the pipeline (workers/pipeline.py) all know. A whole model has none of this.
"""

import torch

from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm


class StageBuffer:
    """Hidden states on their way through a stage: [most tokens, H], once whoever runs the model has allocated them."""

    hidden: torch.Tensor


class MissingLayer(Module):
    """In the place of a module that another stage has, with its tensors. As a layer it changes nothing."""

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: object, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return x, residual


class StageInput(Module):
    """ids [T] -> hidden states [T, H] that the stage before has left."""

    def __init__(self, stage_buffer: StageBuffer) -> None:
        super().__init__()
        self._buffer = stage_buffer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._buffer.hidden[: len(ids)]


class StageOutput(MissingLayer):
    """Leaves hidden states for the next stage. norm: a model's, whose `add` says how outputs are added, and of no other use."""

    _norm: Norm

    def __init__(self, norm: Norm, stage_buffer: StageBuffer) -> None:
        super().__init__()
        for parameter in norm.parameters():
            parameter.fill_(1.0)
        self.__dict__["_norm"] = norm  # past nn.Module: nothing is loaded into it
        self._buffer = stage_buffer

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream with x, [T, H]."""
        if x is not None:
            self._norm.add(x, residual)
        hidden = self._buffer.hidden[: len(residual)]
        if hidden.data_ptr() != residual.data_ptr():
            hidden.copy_(residual)
        return hidden
