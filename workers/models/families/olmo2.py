"""OLMo 2 and OLMo 3: norms after the sublayers, x += norm(attention(x)); x += norm(mlp(x)), and an RMSNorm over all heads of q,
and of k, before the rotation. Weights of norms are applied in float32. In OLMo 3 every fourth layer has full attention, with
its own rotary scaling, and the others have a sliding window.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NoNorm, NormSpec, make_norm
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.gemma3 import by_layer_type
from quire.workers.models.fields import (
    Json,
    flag,
    number,
    read_attention,
    size,
    sliding_window,
    uniform_windows,
    with_windows,
)
from quire.workers.models.qk_norms import over_all_heads
from quire.workers.models.spellings import ACTIVATIONS, activation, windows_but_every
from quire.workers.models.step_context import StepContext

OLMO3_THETA = 500000.0


class OlmoBlock(Module):
    """Norms after the sublayers. q and k are normed over all their heads, or each head by itself if the attention's spec says
    so (exaone4.py)."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias, rms = spec.attention_bias, config.model.norm
        self.no_norm = NoNorm()
        self.self_attn = SelfAttention(
            spec.attention,
            hidden_size,
            place,
            layer,
            qkv_bias=bias,
            o_bias=bias,
            make_qk_norm=over_all_heads(spec.attention.head_dim, rms.eps, rms.weighs),
            feeds_add_norm=False,
        )
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation, feeds_add_norm=False)
        self.post_feedforward_layernorm = make_norm(*norm)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.no_norm, context, logits_indices)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp(x, residual, self.no_norm)
        return self.post_feedforward_layernorm(x), residual


def _layers(fields: Json, windows: tuple[int, ...], attention_fields: Json) -> list[LayerSpec]:
    attention = read_attention(attention_fields)
    inner, bias, act = size(fields, "intermediate_size"), flag(fields, "attention_bias"), activation(fields)
    return [
        LayerSpec(attention=a, intermediate_size=inner, attention_bias=bias, activation=act)
        for a in with_windows(attention, windows)
    ]


def read_layers_2(fields: Json) -> tuple[LayerSpec, ...]:
    return tuple(_layers(fields, uniform_windows(fields, "olmo2", 0), fields))


def read_layers_3(fields: Json) -> tuple[LayerSpec, ...]:
    plain = {name: value for name, value in fields.items() if name not in ("rope_scaling", "rope_parameters")}
    layers = _layers(fields, windows_but_every(fields, sliding_window(fields), 4), plain)
    ropes = by_layer_type(fields, layers[0].attention.head_dim, {"rope_theta": OLMO3_THETA}, OLMO3_THETA)
    replace = msgspec.structs.replace
    return tuple(replace(layer, attention=replace(layer.attention, rope=ropes[layer.attention.window > 0])) for layer in layers)


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=number(fields, "rms_norm_eps", 1e-5), weighs="wide"))


OLMO2 = Family("olmo2", frozenset({"attention_bias"}), read_layers_2, OlmoBlock, read_model, activations=frozenset(ACTIVATIONS))
OLMO3 = Family("olmo3", frozenset({"attention_bias"}), read_layers_3, OlmoBlock, read_model, activations=frozenset(ACTIVATIONS))
