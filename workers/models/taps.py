"""Taps: hidden states of a model, kept for a drafter that reads them: the residual stream that enters some of its layers
(EAGLE-3), or what all layers leave, before or behind the final norm (MTP).

A tapped layer begins as the first layer of a pipeline stage does: what the layer before left to be added is added first
(stage_boundary.py), so that the stream is whole. A model that is tapped behind its last layer runs that layer for all tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.workers.layers.norm import Norm, make_norm
from quire.workers.layers.unadded import Unadded
from quire.workers.models.config import ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Partial


class Tapped:
    """A block that keeps the stream that enters it. out: [most tokens, H], a part of the taps' buffer."""

    def __init__(self, block: Callable[..., tuple[Any, torch.Tensor]], norm: Norm, out: torch.Tensor):
        self._block, self._norm, self._out = block, norm, out

    def __call__(self, x: Any, residual: torch.Tensor, *rest: object) -> tuple[Any, torch.Tensor]:
        if isinstance(x, torch.Tensor | Partial | Unadded):  # else there is nothing to add, or fusion.py's kernel has added it
            self._norm.add(x, residual)  # type: ignore[arg-type]  # a norm's `add` looks at it
            x = None
        self._out[: len(residual)].copy_(residual)
        return self._block(x, residual, *rest)


def tap(model: LanguageModel, layers: Sequence[int], max_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Tap the inputs of these layers; returns the buffer that each forward fills: [max_tokens, number of layers * H].

    Raises ModelConfigError for a model that cannot be tapped, and for layers that it has not.
    """
    if not isinstance(model, CausalLM) or model.config.model.per_layer is not None:
        raise ModelConfigError(
            "this model's layers cannot be tapped: eagle3 needs a family of Quire's own without layer inputs"
        )
    decoder, config = model.model, model.config
    if missing := [i for i in layers if not 0 <= i < len(config.layers)]:
        raise ModelConfigError(
            f"it reads the input of layer {missing[0]}, and the model has layers 0 to {len(config.layers) - 1}"
        )
    size, device = config.hidden_size, next(model.parameters()).device
    buffer = torch.zeros(max_tokens, len(layers) * size, dtype=dtype, device=device)
    norm = make_norm(config.model.norm, size, dtype, device)
    for parameter in norm.parameters():
        parameter.fill_(1.0)
    for place, layer in enumerate(layers):
        decoder.blocks[layer] = Tapped(decoder.blocks[layer], norm, buffer[:, place * size : (place + 1) * size])
    return buffer


class TappedEnd:
    """The last block and the final norm in one: hidden states of all tokens are kept, and those of logits_indices go on."""

    def __init__(self, block: Callable[..., tuple[Any, torch.Tensor]], norm: Norm, out: torch.Tensor, *, before_norm: bool):
        self._block, self._norm, self._out, self._before_norm = block, norm, out, before_norm
        self._chosen: torch.Tensor | None = None

    def __call__(
        self, x: Any, residual: torch.Tensor, context: object, logits_indices: torch.Tensor | None, *inputs: object
    ) -> tuple[Any, torch.Tensor]:
        self._chosen = logits_indices
        return self._block(x, residual, context, None, *inputs)

    def add(self, x: Any, residual: torch.Tensor) -> torch.Tensor:
        """The final norm of the tokens that logits are wanted of."""
        hidden = self._norm(residual) if x is None else self._norm.add(x, residual)
        self._out[: len(hidden)].copy_(residual if self._before_norm else hidden)
        chosen, self._chosen = self._chosen, None  # without the block, in LanguageModel.short, none are chosen
        return hidden if chosen is None else hidden.index_select(0, chosen)


def tap_end(model: LanguageModel, max_tokens: int, dtype: torch.dtype, *, before_norm: bool) -> torch.Tensor:
    """Tap what the layers leave, [max_tokens, H]. Raises ModelConfigError for a model that cannot be tapped."""
    if not isinstance(model, CausalLM) or not isinstance(norm := model.model.norm, Norm):
        raise ModelConfigError("this model's hidden states cannot be read: mtp needs a family of Quire's own in one stage")
    decoder = model.model
    buffer = torch.zeros(max_tokens, model.config.hidden_size, dtype=dtype, device=next(model.parameters()).device)
    end = TappedEnd(decoder.blocks[-1], norm, buffer, before_norm=before_norm)
    decoder.blocks[-1] = end
    decoder.__dict__["end"] = end  # past nn.Module: the norm is still the child that is loaded
    return buffer
