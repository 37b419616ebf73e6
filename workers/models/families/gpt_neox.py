"""GPT-NeoX and Pythia: LayerNorms with biases, q, k and v interleaved by head in one tensor, a quarter of each head rotated, an
ungated MLP. Attention and MLP are parallel, x += attention(norm(x)) + mlp(norm(x)) with a norm each, or, without
use_parallel_residual, one after the other.
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import MLP, Names, SelfAttention, parallel_residual
from quire.workers.models.config import LayerSpec, ModelConfig, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, size, uniform_windows, words
from quire.workers.models.fused import by_group
from quire.workers.models.spellings import ACTIVATIONS, activation, renamed
from quire.workers.models.step_context import StepContext

FIELDS = words(
    "layer_norm_eps use_parallel_residual attention_bias classifier_dropout attention_probs_dropout_prob",
    "hidden_dropout_prob rotary_pct rotary_emb_base",
)
NAMES = CheckpointNames(
    prefixes=(
        ("gpt_neox.embed_in.", "model.embed_tokens."),
        ("gpt_neox.final_layer_norm.", "model.norm."),
        ("gpt_neox.", "model."),
        ("embed_out.", "lm_head."),
    ),
    ignored=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)


class GPTNeoXBlock(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        self.input_layernorm = make_norm(*norm)
        self.post_attention_layernorm = make_norm(*norm)
        self.attention = SelfAttention(
            spec.attention,
            hidden_size,
            place,
            layer,
            qkv_bias=bias,
            o_bias=bias,
            qkv=by_group("query_key_value"),
            names=Names("attention", "dense"),
            feeds_add_norm=not spec.is_parallel,
        )
        self.mlp = MLP(hidden_size, spec.intermediate_size, place, "dense_h_to_4h", "dense_4h_to_h", activation=spec.activation)
        self._is_parallel = spec.is_parallel

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms = self.input_layernorm, self.post_attention_layernorm
        if self._is_parallel:
            return parallel_residual(self.attention, self.mlp, *norms, x, residual, context, logits_indices)
        x, residual = self.attention(x, residual, norms[0], context, logits_indices)
        return self.mlp(x, residual, norms[1])


def plain_fields(fields: Json) -> Json:
    """transformers does not read the two fields under other families' names, which its version 4 wrote, too."""
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    own = {name: value for name, value in fields.items() if name not in names.values()}
    return renamed(own, names, {"hidden_act": "gelu", "attention_bias": True})


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    layer = LayerSpec(
        attention=read_attention(fields, partial=0.25),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
        activation=activation(fields, "gelu"),
        is_parallel=flag(fields, "use_parallel_residual", True),
    )
    return (layer,) * len(uniform_windows(fields, "gpt_neox", 0))


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(type="layer", has_bias=True, eps=number(fields, "layer_norm_eps", 1e-5)))


FAMILY = Family("gpt_neox", FIELDS, read_layers, GPTNeoXBlock, read_model, plain_fields, NAMES, frozenset(ACTIVATIONS))
