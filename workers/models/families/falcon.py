"""Falcon: rw (multi-head attention with ALiBi, then the MLP, biases), 7b (one KV head, attention and MLP in parallel after one
norm), 40b and 180b (grouped KV heads, a norm for each of the two), 11B (one norm again). LayerNorms have biases; q, k and v are
one tensor, group by group. ALiBi is rounded to bfloat16 and added before the scores are scaled.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm, NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.alibi import alibi_slopes
from quire.workers.models.blocks import MLP, Names, SelfAttention, parallel_residual
from quire.workers.models.config import AlibiConfig, AttentionSpec, LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, size, uniform_windows, words
from quire.workers.models.fused import by_group
from quire.workers.models.spellings import ACTIVATIONS, activation, only, renamed
from quire.workers.models.step_context import StepContext

FIELDS = words(
    "layer_norm_epsilon num_ln_in_parallel_attn alibi new_decoder_architecture multi_query parallel_attn bias",
    "ff_factor apply_residual_connection_post_layernorm",
)
RENAMED = {
    "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads",
    "num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
}  # fmt: skip
DEFAULTS = {"tie_word_embeddings": True, "max_position_embeddings": 2048, "hidden_act": "gelu"}
NAMES = CheckpointNames(
    prefixes=(
        ("transformer.word_embeddings.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        ("transformer.h.", "model.layers."),
    ),
    ignored=(".rotary_emb.inv_freq", ".rotary.inv_freq"),
)


class FalconBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        self.self_attention = SelfAttention(
            spec.attention,
            hidden_size,
            place,
            layer,
            qkv_bias=bias,
            o_bias=bias,
            qkv=by_group("query_key_value"),
            names=Names("self_attention", "dense"),
            feeds_add_norm=not spec.is_parallel,
        )
        self.mlp = MLP(
            hidden_size,
            spec.intermediate_size,
            place,
            "dense_h_to_4h",
            "dense_4h_to_h",
            has_bias=spec.mlp_bias,
            activation=spec.activation,
        )
        self._is_parallel = spec.is_parallel
        self._make_norms(spec, make_norm(*norm), make_norm(*norm) if spec.has_mlp_norm else None)

    def _make_norms(self, spec: LayerSpec, norm: Norm, mlp_norm: Norm | None) -> None:
        """Add the norms under their names in the checkpoint."""
        first, second = ("ln_attn", "ln_mlp") if spec.is_parallel else ("input_layernorm", "post_attention_layernorm")
        self._norm = "input_layernorm" if mlp_norm is None else first
        self._mlp_norm = None if mlp_norm is None else second
        self.add_module(self._norm, norm)
        if mlp_norm is not None:
            self.add_module(second, mlp_norm)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = getattr(self, self._norm)
        mlp_norm = None if self._mlp_norm is None else getattr(self, self._mlp_norm)
        if self._is_parallel:
            return parallel_residual(self.self_attention, self.mlp, norm, mlp_norm, x, residual, context, logits_indices)
        x, residual = self.self_attention(x, residual, norm, context, logits_indices)
        return self.mlp(x, residual, mlp_norm)


def plain_fields(fields: Json) -> Json:
    """num_kv_heads counts only in the new architecture; the old one has one KV head or, without multi_query, one per head."""
    found = renamed(renamed(fields, {"n_head_kv": "num_kv_heads"}, {}), RENAMED, DEFAULTS)
    if not found.get("new_decoder_architecture"):
        multi_query = found.get("multi_query", True)
        found["num_key_value_heads"] = 1 if multi_query else found.get("num_attention_heads")
    if found.get("intermediate_size") is None and type(found.get("hidden_size")) is int:
        found["intermediate_size"] = 4 * found["hidden_size"]
    return found


def _attention(fields: Json) -> AttentionSpec:
    attention = read_attention(fields)
    if not flag(fields, "alibi"):
        return attention
    alibi = AlibiConfig(slopes=alibi_slopes(attention.num_heads), scale=attention.scale, is_rounded=True)
    return msgspec.structs.replace(attention, rope=None, alibi=alibi)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "falcon", apply_residual_connection_post_layernorm=False)
    is_new, is_parallel = flag(fields, "new_decoder_architecture"), flag(fields, "parallel_attn", True)
    if is_new and not is_parallel:
        raise ModelConfigError("config.json: new_decoder_architecture with parallel_attn false is not supported")
    num_norms = size(fields, "num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms > 2 or (num_norms == 2 and not is_new):
        raise ModelConfigError(f"config.json: num_ln_in_parallel_attn {num_norms} is not supported for this architecture")
    bias = flag(fields, "bias")
    layer = LayerSpec(
        attention=_attention(fields),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=bias,
        mlp_bias=bias,
        activation=activation(fields, "gelu"),
        is_parallel=is_parallel,
        has_mlp_norm=num_norms == 2 or not is_parallel,
    )
    return (layer,) * len(uniform_windows(fields, "falcon", 0))


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(type="layer", has_bias=True, eps=number(fields, "layer_norm_epsilon", 1e-5)))


FAMILY = Family("falcon", FIELDS, read_layers, FalconBlock, read_model, plain_fields, NAMES, frozenset(ACTIVATIONS))
