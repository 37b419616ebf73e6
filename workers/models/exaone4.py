"""EXAONE 4: norms after the sublayers, x += norm(attention(x)); x += norm(mlp(x)), and an RMSNorm of each head of q and k. The
32B's layers see a window and rotate, but for every fourth, which sees everything and does not rotate; where there is no window,
all rotate.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NoNorm, NormSpec, make_norm
from quire.workers.models.blocks import Attend, GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, number, read_attention, size, sliding_window, windows_by_type
from quire.workers.models.spellings import ACTIVATIONS, activation

FIELDS = frozenset({"sliding_window_pattern", "attn_reorder_and_upcast"})


class Exaone4Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.no_norm = NoNorm()
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, is_added=False)
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation, is_added=False)
        self.post_feedforward_layernorm = make_norm(*norm)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.no_norm, attend, logits_indices)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp(x, residual, self.no_norm)
        return self.post_feedforward_layernorm(x), residual


def _windows(fields: Json, window: int) -> tuple[int, ...]:
    """By layer_types, or by sliding_window_pattern: a number, of which multiples see everything, or letters, L and G."""
    num_layers, pattern = size(fields, "num_hidden_layers"), fields.get("sliding_window_pattern", 4)
    if (by_type := windows_by_type(fields, window)) is not None:
        return by_type
    if not window or pattern is None:
        return (0,) * num_layers
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        sees = [pattern[i % len(pattern)] == "L" and i < num_layers - 1 for i in range(num_layers)]
        return tuple(window if local else 0 for local in sees)
    if type(pattern) is not int or pattern < 1:
        raise ModelConfigError(f"config.json: sliding_window_pattern must be a number or like LLLG, not {pattern!r:.40}")
    return tuple(window if (i + 1) % pattern else 0 for i in range(num_layers))


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    window, replace = sliding_window(fields), msgspec.structs.replace
    eps = number(fields, "rms_norm_eps", 1e-5)
    attention = replace(read_attention(fields), qk_norm_eps=eps)
    return tuple(
        LayerSpec(
            attention=replace(attention, window=own, rope=attention.rope if own or not window else None),
            intermediate_size=size(fields, "intermediate_size"),
            activation=activation(fields),
        )
        for own in _windows(fields, window)
    )


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=number(fields, "rms_norm_eps", 1e-5)))


FAMILY = Family("exaone4", FIELDS, read_layers, Exaone4Block, read_model, activations=frozenset(ACTIVATIONS))
