"""The boundaries of pipeline stages: stand-ins for modules of other stages, and how hidden states enter and leave a stage.

A stage begins with the hidden states that it has received (`StageInput`, in the embedding's place), skips the layers of other
stages (`MissingLayer`), and adds the last sublayer's output to the residual stream (`StageOutput`, in the final norm's place).
Only the residual stream goes on, so the next stage's first norm has nothing to add. Input and output use one buffer on the
device, which decoder.py's modules, graphs and the pipeline (workers/pipeline.py) share. A model in one stage has none of this.
"""

import torch

from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm


class StageBuffer:
    """Hidden states at a stage's input and output: [most tokens, H]; the runner allocates them."""

    hidden: torch.Tensor


class MissingLayer(Module):
    """Replaces a module that another stage has, so it has no tensors. Called as a layer, it changes nothing."""

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: object, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return x, residual


class StageInput(Module):
    """ids [T] -> hidden states [T, H] received from the stage before."""

    def __init__(self, stage_buffer: StageBuffer) -> None:
        super().__init__()
        self._buffer = stage_buffer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._buffer.hidden[: len(ids)]


class StageOutput(MissingLayer):
    """Leaves hidden states for the next stage. norm: one of the model's kind, used only for how its `add` adds outputs."""

    _norm: Norm

    def __init__(self, norm: Norm, stage_buffer: StageBuffer) -> None:
        super().__init__()
        for parameter in norm.parameters():
            parameter.fill_(1.0)
        self.__dict__["_norm"] = norm  # not a child of the module: nothing is loaded into it
        self._buffer = stage_buffer

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream plus x, [T, H], in the buffer."""
        if x is not None:
            self._norm.add(x, residual)
        hidden = self._buffer.hidden[: len(residual)]
        if hidden.data_ptr() != residual.data_ptr():
            hidden.copy_(residual)
        return hidden
