"""Gemma 2: sandwich norms, x += norm(attention(norm(x))); x += norm(mlp(norm(x))), all of them RMSNorm by 1 + w in float32.
Every second layer has a sliding window. Scores and logits are capped, the embedding is scaled by the root of the hidden size,
config.json has the scale of attention, and the MLP has tanh-approximated GELU. gemma3.py uses the same block.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import AttentionSpec, LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import (
    Json,
    flag,
    number,
    read_attention,
    rms_norm_eps,
    size,
    sliding_window,
    with_windows,
    words,
)
from quire.workers.models.spellings import ACTIVATIONS, activation, only, renamed, windows_but_every
from quire.workers.models.step_context import StepContext

FIELDS = words(
    "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping attention_bias",
    "use_bidirectional_attention cache_implementation sliding_window_size",
)
GELU = "gelu_pytorch_tanh"
DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": GELU}


class GemmaBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, feeds_add_norm=False
        )
        self.post_attention_layernorm = make_norm(*norm)
        self.pre_feedforward_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation, feeds_add_norm=False)
        self.post_feedforward_layernorm = make_norm(*norm)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp(x, residual, self.pre_feedforward_layernorm)
        return self.post_feedforward_layernorm(x), residual


def plain_fields(fields: Json) -> Json:
    """Configs have two names for the activation; `hidden_activation` counts."""
    found = {name: value for name, value in fields.items() if name != "hidden_act"}
    return renamed({**DEFAULTS, **found}, {"hidden_activation": "hidden_act"}, {})


def read_gemma_attention(fields: Json) -> AttentionSpec:
    only(fields, "gemma", use_bidirectional_attention=False)
    attention = read_attention(fields, default_kv_heads=4)
    return msgspec.structs.replace(
        attention,
        scale=number(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=softcap(fields, "attn_logit_softcapping"),
    )


def softcap(fields: Json, name: str) -> float:
    """The field's value; 0 for null."""
    return 0.0 if fields.get(name) is None else number(fields, name, 0.0)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    attention = read_gemma_attention({"attn_logit_softcapping": 50.0, **fields})
    windows = windows_but_every(fields, sliding_window(fields), 2)
    return gemma_layers(fields, with_windows(attention, windows))


def gemma_layers(fields: Json, attentions: list[AttentionSpec]) -> tuple[LayerSpec, ...]:
    inner, bias, act = size(fields, "intermediate_size"), flag(fields, "attention_bias"), activation(fields, GELU)
    return tuple(LayerSpec(attention=a, intermediate_size=inner, attention_bias=bias, activation=act) for a in attentions)


def read_model(fields: Json) -> ModelSpec:
    return gemma_model({"final_logit_softcapping": 30.0, **fields})


def gemma_model(fields: Json) -> ModelSpec:
    return ModelSpec(
        norm=NormSpec(eps=rms_norm_eps(fields), weighs="plus_one"),
        embedding_scale=size(fields, "hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_softcap=softcap(fields, "final_logit_softcapping"),
    )


FAMILY = Family(
    "gemma2",
    FIELDS,
    read_layers,
    GemmaBlock,
    read_model=read_model,
    plain_fields=plain_fields,
    activations=frozenset(ACTIVATIONS),
)
