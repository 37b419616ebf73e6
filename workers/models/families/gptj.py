"""GPT-J: parallel attention and MLP, x += attention(h) + mlp(h) with h = norm(x), a LayerNorm with bias; the first elements of
each head are rotated, neighbors as pairs. Attention has no biases; the MLP, which is ungated, and the LM head have some.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import MLP, Names, SelfAttention, parallel_residual
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, number, read_attention, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation, only, renamed
from quire.workers.models.step_context import StepContext

FIELDS = words(
    "rotary_dim layer_norm_epsilon scale_attn_weights rotary summary_activation summary_first_dropout",
    "summary_proj_to_labels summary_type summary_use_proj",
)
RENAMED = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "n_ctx": "max_position_embeddings", "activation_function": "hidden_act",
}  # fmt: skip
NAMES = CheckpointNames(
    prefixes=(
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        ("transformer.h.", "model.layers."),
    ),
    ignored=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)


class GPTJBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, inner = config.hidden_size, spec.intermediate_size
        self.ln_1 = make_norm(config.model.norm, hidden_size, place.dtype, place.device)
        names = Names("attn", "out_proj")
        self.attn = SelfAttention(spec.attention, hidden_size, place, layer, names=names, feeds_add_norm=False)
        self.mlp = MLP(hidden_size, inner, place, "fc_in", "fc_out", activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return parallel_residual(self.attn, self.mlp, self.ln_1, None, x, residual, context, logits_indices)


def plain_fields(fields: Json) -> Json:
    found = renamed(fields, RENAMED, {"hidden_act": "gelu_new"})
    if found.get("intermediate_size") is None and type(found.get("hidden_size")) is int:
        found["intermediate_size"] = 4 * found["hidden_size"]
    return found


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "gptj", scale_attn_weights=True, rotary=True)
    attention = read_attention(fields)
    rotary_dim = size(fields, "rotary_dim", 64)
    if rotary_dim % 2 or rotary_dim > attention.head_dim:
        raise ModelConfigError(f"config.json: rotary_dim {rotary_dim} must be even, and at most a head's {attention.head_dim}")
    assert attention.rope is not None
    rope = msgspec.structs.replace(attention.rope, rotary_dim=rotary_dim % attention.head_dim, interleaved=True)
    layer = LayerSpec(
        attention=msgspec.structs.replace(attention, rope=rope),
        intermediate_size=size(fields, "intermediate_size"),
        activation=activation(fields, "gelu_new"),
        is_parallel=True,
        has_mlp_norm=False,
    )
    return (layer,) * len(uniform_windows(fields, "gptj", 0))


def read_model(fields: Json) -> ModelSpec:
    norm = NormSpec(type="layer", has_bias=True, eps=number(fields, "layer_norm_epsilon", 1e-5))
    return ModelSpec(norm=norm, head_bias=True)


FAMILY = Family("gptj", FIELDS, read_layers, GPTJBlock, read_model, plain_fields, NAMES, frozenset(ACTIVATIONS))
