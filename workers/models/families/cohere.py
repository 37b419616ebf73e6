"""Cohere's Command R (generation 1) and Command R7B, Command A (2): parallel attention and MLP, x += attention(h) + mlp(h) with
h = norm(x), a LayerNorm without bias; rotation of neighboring elements; scaled logits. Command R+ has a LayerNorm of each head
of q and k, with its own weight. In generation 2 three of four layers have a sliding window; the fourth has full attention
without rotation.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.models.blocks import GatedMLP, SelfAttention, parallel_residual
from quire.workers.models.config import LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import (
    Json,
    flag,
    number,
    read_attention,
    size,
    sliding_window,
    uniform_windows,
    with_windows,
    words,
)
from quire.workers.models.qk_norms import layer_norm_of_each_head
from quire.workers.models.spellings import ACTIVATIONS, activation, only, windows_but_every
from quire.workers.models.step_context import StepContext

FIELDS = words("layer_norm_eps logit_scale attention_bias use_qk_norm model_max_length")
FIELDS_2 = FIELDS | words(
    "sliding_window_pattern _sliding_window_pattern layer_switch position_embedding_type rotary_pct",
    "order_of_interleaved_layers use_gated_activation use_parallel_block use_parallel_embedding",
    "use_embedding_sharing cache_implementation use_embedding_scaling",
)


class CohereBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm, bias = config.hidden_size, config.model.norm, spec.attention_bias
        qk_norm = layer_norm_of_each_head(spec.attention.head_dim, norm.eps) if spec.norms_qk else None
        self.input_layernorm = make_norm(norm, hidden_size, place.dtype, place.device)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, make_qk_norm=qk_norm, feeds_add_norm=False
        )
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return parallel_residual(self.self_attn, self.mlp, self.input_layernorm, None, x, residual, context, logits_indices)


def _layer(fields: Json) -> LayerSpec:
    attention = read_attention(fields)
    assert attention.rope is not None
    rope = msgspec.structs.replace(attention.rope, interleaved=True)
    return LayerSpec(
        attention=msgspec.structs.replace(attention, rope=rope),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
        activation=activation(fields),
        norms_qk=flag(fields, "use_qk_norm"),
        is_parallel=True,
        has_mlp_norm=False,
    )


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    return (_layer(fields),) * len(uniform_windows(fields, "cohere", 0))


def read_layers_2(fields: Json) -> tuple[LayerSpec, ...]:
    only(
        fields, "cohere2", use_gated_activation=True, use_parallel_block=True, rotary_pct=1.0, use_qk_norm=False,
        position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first",
    )  # fmt: skip
    layer, replace = _layer(fields), msgspec.structs.replace
    every = size(fields, "sliding_window_pattern", 4)  # transformers ignores _sliding_window_pattern
    attentions = with_windows(layer.attention, windows_but_every(fields, sliding_window(fields), every))
    return tuple(replace(layer, attention=a if a.window else replace(a, rope=None)) for a in attentions)


def plain_fields(fields: Json) -> Json:
    return {"tie_word_embeddings": True, "rope_theta": 500000.0, **fields}


def plain_fields_2(fields: Json) -> Json:
    return {"tie_word_embeddings": True, "rope_theta": 10000.0, **fields}


def read_model(fields: Json) -> ModelSpec:
    norm = NormSpec(type="layer", eps=number(fields, "layer_norm_eps", 1e-5))
    return ModelSpec(norm=norm, logit_scale=number(fields, "logit_scale", 0.0625))


_ANY = frozenset(ACTIVATIONS)
COHERE = Family("cohere", FIELDS, read_layers, CohereBlock, read_model, plain_fields, activations=_ANY)
COHERE2 = Family("cohere2", FIELDS_2, read_layers_2, CohereBlock, read_model, plain_fields_2, activations=_ANY)
