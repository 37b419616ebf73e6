"""BLOOM: ALiBi instead of rotation, a LayerNorm after the embedding, LayerNorms and products with biases, q, k and v
interleaved by head in one tensor, an ungated MLP with tanh-approximated GELU. x += attention(norm(x)); x += mlp(norm(x)).
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.alibi import alibi_slopes
from quire.workers.models.blocks import MLP, Names, SelfAttention
from quire.workers.models.config import AlibiConfig, LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, number, read_attention, size, uniform_windows, words
from quire.workers.models.fused import by_group
from quire.workers.models.spellings import only, renamed
from quire.workers.models.step_context import StepContext

FIELDS = words(
    "layer_norm_epsilon apply_residual_connection_post_layernorm slow_but_exact masked_softmax_fusion skip_bias_add",
    "skip_bias_add_qkv attention_softmax_in_fp32 bias_dropout_fusion offset_alibi seq_length n_inner",
)
RENAMED = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
NAMES = CheckpointNames(
    prefixes=(
        ("transformer.", ""),  # a prefix in some checkpoints
        ("word_embeddings_layernorm.", "model.embed_norm."),
        ("word_embeddings.", "model.embed_tokens."),
        ("ln_f.", "model.norm."),
        ("h.", "model.layers."),
    )
)


class BloomBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        inner, qkv, names = spec.intermediate_size, by_group("query_key_value"), Names("self_attention", "dense")
        self.input_layernorm = make_norm(*norm)
        self.self_attention = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=True, o_bias=True, qkv=qkv, names=names
        )
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = MLP(hidden_size, inner, place, "dense_h_to_4h", "dense_4h_to_h", activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attention(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def plain_fields(fields: Json) -> Json:
    """Positions have no limit; `seq_length` is the length that the model was trained with."""
    found = renamed(fields, RENAMED, {"tie_word_embeddings": True})
    if type(found.get("hidden_size")) is int:
        found.setdefault("intermediate_size", 4 * found["hidden_size"])
    return {"max_position_embeddings": fields.get("seq_length") or 2048, **found}


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "bloom", apply_residual_connection_post_layernorm=False, n_inner=4 * size(fields, "hidden_size"))
    attention = read_attention(fields)
    alibi = AlibiConfig(slopes=alibi_slopes(attention.num_heads))
    layer = LayerSpec(
        attention=msgspec.structs.replace(attention, rope=None, alibi=alibi),
        intermediate_size=size(fields, "intermediate_size"),
        activation="gelu_tanh",
    )
    return (layer,) * len(uniform_windows(fields, "bloom", 0))


def read_model(fields: Json) -> ModelSpec:
    norm = NormSpec(type="layer", has_bias=True, eps=number(fields, "layer_norm_epsilon", 1e-5))
    return ModelSpec(norm=norm, embedding_norm=norm)


FAMILY = Family("bloom", FIELDS, read_layers, BloomBlock, read_model, plain_fields, NAMES)
