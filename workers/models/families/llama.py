"""Llama 2 and 3.x, and the many checkpoints of this architecture. Full attention; optional biases of attention (q, k, v and o)
and of the MLP. Pre-norm: x += attention(norm(x)); x += mlp(norm(x)). Rotary scaling (linear, llama3, yarn) is in attention's
table, see rope.py. Families that differ only in their specs use the same block (mistral.py, qwen2.py).
"""

import functools

import torch

from quire.workers.layers.formats.format import Projected, RowBlock
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.models.blocks import Attend, Followed, GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, size, uniform_windows, words
from quire.workers.models.spellings import ACTIVATIONS, activation, only, renamed


class LlamaBlock(Followed):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias = spec.attention_bias
        o_bias = bias if spec.output_bias is None else spec.output_bias
        # a stage's sends may hold an SM while the next step begins, and such a kernel needs all of them at once
        self._is_alone = place.parallel.stage.is_first and place.parallel.stage.is_last
        self.input_layernorm = make_norm(*norm)
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=o_bias)
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, has_bias=spec.mlp_bias, activation=spec.activation)

    def forward(
        self,
        x: torch.Tensor | Projected | None,
        residual: torch.Tensor,
        attend: Attend,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | Projected, torch.Tensor]:
        heads, residual = self.self_attn.heads(x, residual, self.input_layernorm, attend, logits_indices)
        if len(heads) == 1 and self._row_block is not None:
            return self._row_block(heads, residual)
        return self.mlp(self.self_attn.projected(heads), residual, self.post_attention_layernorm)

    @functools.cached_property
    def _row_block(self) -> RowBlock | None:
        """For one row all that follows attention, where one kernel computes that; known once weights are there."""
        mlp, after = self.mlp, self.after
        if not (mlp.is_silu and self._is_alone):
            return None
        following = (after.input_layernorm, after.self_attn.qkv_proj) if isinstance(after, LlamaBlock) else None
        return self.self_attn.o_proj.row_block(self.post_attention_layernorm, mlp.gate_up_proj, mlp.down_proj, following)

    def follow_with(self, after: Module | None) -> None:
        super().follow_with(after)
        self.__dict__.pop("_row_block", None)


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
