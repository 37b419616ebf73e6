"""Bamba: x += mixer(norm(x)); x += mlp(norm(x)). The mixer is attention in the layers of attn_layer_indices, else Mamba 2.

Half of each head of attention is rotated.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import NO_ATTENTION, LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, read_attention, size, words
from quire.workers.models.mamba2 import Mamba2, MambaSpec
from quire.workers.models.mamba_fields import BAMBA_FIELDS, read_mamba
from quire.workers.models.step_context import StepContext


class BambaBlock(Module):
    _mixer: Mamba2 | SelfAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        self.input_layernorm = make_norm(*norm)
        if isinstance(spec.recurrent, MambaSpec):
            self.mamba = Mamba2(spec.recurrent, hidden_size, place, layer, eps=config.rms_norm_eps)
        else:
            bias = spec.attention_bias
            self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias)
        self.__dict__["_mixer"] = self.mamba if spec.recurrent is not None else self.self_attn  # a child has one name
        self.pre_ff_layernorm = make_norm(*norm)
        self.feed_forward = GatedMLP(hidden_size, spec.intermediate_size, place, name="feed_forward", has_bias=spec.mlp_bias)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._mixer(x, residual, self.input_layernorm, context, logits_indices)
        return self.feed_forward(x, residual, self.pre_ff_layernorm)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    num_layers, of_attention = size(fields, "num_hidden_layers"), fields.get("attn_layer_indices") or []
    if not isinstance(of_attention, list) or not all(type(layer) is int for layer in of_attention):
        raise ModelConfigError("config.json: attn_layer_indices must list numbers of layers")
    mamba = LayerSpec(
        attention=NO_ATTENTION,
        recurrent=read_mamba(fields),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
        mlp_bias=flag(fields, "mlp_bias"),
    )
    full = msgspec.structs.replace(mamba, recurrent=None, attention=read_attention(fields, default_kv_heads=8, partial=0.5))
    return tuple(full if layer in of_attention else mamba for layer in range(num_layers))


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults. It ignores partial_rotary_factor, and the list of kinds, which it derives."""
    found = {"rms_norm_eps": 1e-5, **fields, "partial_rotary_factor": 0.5}
    return {name: value for name, value in found.items() if name not in ("layer_types", "layers_block_type")}


FIELDS = BAMBA_FIELDS | words("attn_layer_indices attention_bias mlp_bias num_logits_to_keep z_loss_coefficient")
NAMES = CheckpointNames(prefixes=(("model.final_layernorm.", "model.norm."),))
FAMILY = Family("bamba", FIELDS, read_layers, BambaBlock, plain_fields=plain_fields, names=NAMES)
