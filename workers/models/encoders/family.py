"""EncoderFamily: what a family's file defines; the block that several share, and readers of fields that they have in common.

The layers' names in the model are those of newer checkpoints: self_attn.q_proj, …, post_attention_layernorm, mlp.up_proj,
mlp.down_proj, post_mlp_layernorm; `names` maps those of a family's own checkpoints to them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import torch

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.layers.heads import HeadSpec
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import MLP, GatedMLP, SelfAttention
from quire.workers.models.config import (
    AttentionSpec,
    EncoderSpec,
    LayerSpec,
    ModelConfig,
    ModelConfigError,
    ModelSpec,
    RopeConfig,
)
from quire.workers.models.decoder import MakeBlock
from quire.workers.models.fields import Json, number, read_rope, size
from quire.workers.models.fused import RowsByName, RowsOf, separate
from quire.workers.models.spellings import ACTIVATIONS
from quire.workers.models.step_context import StepContext
from quire.workers.shard import Shard


class EncoderFamily(NamedTuple):
    """A family's readers and block. `kind` of a head: the end of the architecture's name, "Model" for none."""

    name: str
    fields: frozenset[str]  # of config.json, read by this family besides those that all families read
    read_layers: Callable[[Json], tuple[LayerSpec, ...]]
    make_block: MakeBlock
    read_model: Callable[[Json], ModelSpec]
    read_encoder: Callable[[Json, HeadSpec | None], EncoderSpec]
    read_head: Callable[[Json, str], HeadSpec | None]
    names: Callable[[Json, str], CheckpointNames]
    plain_fields: Callable[[Json], Json] = dict  # config.json -> the same with the names and defaults of fields.py


class EncoderMLP(Protocol):
    """The interface of an MLP to a post-norm block."""

    def of(self, h: torch.Tensor) -> torch.Tensor: ...


class PostNormBlock(Module):
    """h = norm(h + attention(h)); h = norm(h + mlp(h)).

    The MLP is gated if `gate_up` says how its first product is stored; `mlp` makes another one in its place.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        place: Placement,
        layer: int,
        *,
        qkv: RowsOf = separate,
        gate_up: Callable[[Shard], RowsByName] | None = None,
        mlp: Callable[[Placement], EncoderMLP] | None = None,
    ):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias, inner = spec.attention_bias, spec.intermediate_size
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, qkv=qkv)
        self.post_attention_layernorm = make_norm(*norm)
        how = {"has_bias": spec.mlp_bias, "activation": spec.activation}
        self.mlp: EncoderMLP
        if mlp is not None:
            self.mlp = mlp(place.at("mlp"))
        elif gate_up is None:
            self.mlp = MLP(hidden_size, inner, place, "up_proj", "down_proj", **how)  # type: ignore[arg-type]
        else:
            self.mlp = GatedMLP(hidden_size, inner, place, gate_up=gate_up, down_bias=spec.down_bias, **how)  # type: ignore[arg-type]
        self.post_mlp_layernorm = make_norm(*norm)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[None, torch.Tensor]:
        assert x is None and logits_indices is None, "all tokens of an encoder are computed"
        h = self.post_attention_layernorm.add(self.self_attn.of(residual, context, None), residual)
        return None, self.post_mlp_layernorm.add(self.mlp.of(h), h)


def read_heads(fields: Json) -> AttentionSpec:
    """Two-way attention without rotation, of as many KV heads as heads."""
    heads, hidden_size = size(fields, "num_attention_heads"), size(fields, "hidden_size")
    if hidden_size % heads:
        raise ModelConfigError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")
    dim = hidden_size // heads
    return AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=dim, scale=dim**-0.5, window=0, is_causal=False, rope=None
    )


def layer_norm(fields: Json, name: str = "layer_norm_eps", default: float = 1e-12) -> NormSpec:
    return NormSpec(type="layer", has_bias=True, eps=number(fields, name, default))


def activation_of(fields: Json, name: str, default: str) -> Activation:
    """A field's activation by our name for it. Raises ModelConfigError."""
    value = fields.get(name)
    value = default if value is None else value
    if value not in ACTIVATIONS:
        raise ModelConfigError(f"config.json sets {name} to {value!r:.60}: only {', '.join(ACTIVATIONS)} are supported")
    return ACTIVATIONS[value]


def num_labels(fields: Json) -> int:
    """By id2label, else num_labels, else transformers' two."""
    labels = fields.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return size(fields, "num_labels", 2)


def small_int(fields: Json, name: str, default: int) -> int:
    """An integer that may be 0."""
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value <= 1 << 30:
        raise ModelConfigError(f"config.json: {name} must be an integer of at least 0, not {value!r:.60}")
    return value


def rotary_layers(fields: Json, theta: float, bias: bool, up_bias: bool, down_bias: bool) -> tuple[LayerSpec, ...]:
    """theta: the default of rope_theta; the biases are attention's, the MLP's and its last product's."""
    attention = read_heads(fields)
    rope: RopeConfig = read_rope(fields, attention.head_dim, theta=theta)
    layer = LayerSpec(
        attention=msgspec.structs.replace(attention, rope=rope),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=bias,
        mlp_bias=up_bias,
        down_bias=down_bias,
        activation=activation_of(fields, "hidden_act", "gelu"),
    )
    return (layer,) * size(fields, "num_hidden_layers")


def read_typed_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    """Token types and no table of positions."""
    return EncoderSpec(num_token_types=small_int(fields, "type_vocab_size", 0), head=head)
