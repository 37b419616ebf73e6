"""Llama 2 and 3.x, and the many checkpoints of this architecture. Full attention; optional biases of attention (q, k, v and o)
and of the MLP. Pre-norm: x += attention(norm(x)); x += mlp(norm(x)). Rotary scaling (linear, llama3, yarn) is in attention's
table, see rope.py. Families that differ only in their specs use the same block (mistral.py, qwen2.py).
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.norm import make_norm
from quire.workers.models.blocks import GatedMLP, PreNormBlock, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation, only, renamed
from quire.workers.models.step_context import StepContext


class LlamaBlock(PreNormBlock):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        o_bias = bias if spec.output_bias is None else spec.output_bias
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=o_bias)
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, has_bias=spec.mlp_bias, activation=spec.activation)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, context, logits_indices)
        return self.mlp(x, residual, self.post_attention_layernorm)


def plain_fields(fields: Json) -> Json:
    """The first conversions of LLaMA, and Vicunas made from them, call the context length max_sequence_length."""
    return renamed(fields, {"max_sequence_length": "max_position_embeddings"}, {})


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "llama", activation="swiglu")  # Falcon 3 has it; transformers ignores it
    if fields.get("sliding_window") is not None:
        raise ModelConfigError("config.json sets sliding_window: not supported for llama models")
    layer = LayerSpec(
        attention=read_attention(fields),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
        mlp_bias=flag(fields, "mlp_bias"),
        activation=activation(fields),
    )
    return (layer,) * len(uniform_windows(fields, "llama", 0))


FIELDS = words("attention_bias mlp_bias activation")
FAMILY = Family("llama", FIELDS, read_layers, LlamaBlock, plain_fields=plain_fields, activations=frozenset(ACTIVATIONS))
