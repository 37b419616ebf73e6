"""Falcon-H1: x += s mamba(h) + a attention(h) with h = norm(x); x += mlp(norm(x)). Each layer has a state and keys and values.

Multipliers (muP) of config.json are applied where transformers applies them: to the embedding, to what Mamba 2 and attention
read and give, to the five parts of in_proj's output, to keys, to the MLP's gate and output, and to the logits. The norm behind
the recurrence is there only with mamba_rms_norm, before the gate or after it as mamba_norm_before_gate says.
"""

from typing import Any

import msgspec
import torch

from quire.workers.layers import ops
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.bamba import NAMES
from quire.workers.models.fields import Json, flag, number, read_attention, rms_norm_eps, size, words
from quire.workers.models.mamba2 import Mamba2, MambaSpec
from quire.workers.models.mamba_fields import BAMBA_FIELDS, read_mamba
from quire.workers.models.step_context import StepContext


class Multipliers(msgspec.Struct, frozen=True, kw_only=True):
    """The factors of a layer."""

    mamba_in: float
    mamba_out: float
    attention_in: float
    attention_out: float
    gate: float
    down: float


class FalconH1Spec(LayerSpec, frozen=True, kw_only=True):
    multipliers: Multipliers


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


class ScaledMLP(GatedMLP):
    """down · down_proj(silu(gate · gate_proj(h)) · up_proj(h))"""

    def __init__(self, hidden_size: int, intermediate_size: int, place: Placement, factors: Multipliers, has_bias: bool):
        super().__init__(hidden_size, intermediate_size, place, name="feed_forward", has_bias=has_bias, feeds_add_norm=False)
        self._factors = factors

    def of(self, h: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(h)
        if self._factors.gate != 1.0:
            gate_up[:, : gate_up.shape[1] // 2] *= self._factors.gate
        return scaled(self.down_proj(ops.silu_mul(gate_up)), self._factors.down)


class FalconH1Block(Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        assert isinstance(spec, FalconH1Spec) and isinstance(spec.recurrent, MambaSpec)
        self._factors, bias = spec.multipliers, spec.attention_bias
        self.input_layernorm = make_norm(*norm)
        self.mamba = Mamba2(spec.recurrent, hidden_size, place, layer, eps=config.rms_norm_eps, feeds_add_norm=False)
        self.self_attn = SelfAttention(
            spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, feeds_add_norm=False
        )
        self.pre_ff_layernorm = make_norm(*norm)
        self.feed_forward = ScaledMLP(hidden_size, spec.intermediate_size, place, spec.multipliers, spec.mlp_bias)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factors = self._factors
        h = self.input_layernorm(residual) if x is None else self.input_layernorm.add(x, residual)
        out = scaled(self.mamba.of(scaled(h, factors.mamba_in), context, logits_indices), factors.mamba_out)
        attended = self.self_attn.of(scaled(h, factors.attention_in), context, logits_indices)
        out = out + scaled(attended, factors.attention_out)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        return self.feed_forward.of(self.pre_ff_layernorm.add(out, residual)), residual


def read_factors(fields: Json, name: str, count: int) -> tuple[float, ...]:
    """The multipliers that a field lists; all are 1 without it."""
    values: Any = fields.get(name)
    values = [1.0] * count if values is None else values
    if not isinstance(values, list) or len(values) != count:
        raise ModelConfigError(f"config.json: {name} must list {count} numbers, not {values!r:.80}")
    return tuple(number({name: value}, name, 1.0) for value in values)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    replace = msgspec.structs.replace
    mamba = read_mamba(fields, None if fields.get("mamba_d_ssm", 1024) is None else size(fields, "mamba_d_ssm", 1024))
    z, x, b, c, dt = read_factors(fields, "ssm_multipliers", 5)
    gate, down = read_factors(fields, "mlp_multipliers", 2)
    attention = read_attention(fields, default_kv_heads=8)
    layer = FalconH1Spec(
        attention=replace(attention, scale=attention.scale * number(fields, "key_multiplier", 1.0)),
        recurrent=replace(
            mamba,
            out_bias=flag(fields, "projectors_bias"),
            has_norm=flag(fields, "mamba_rms_norm"),
            norms_first=flag(fields, "mamba_norm_before_gate", True),
            multipliers=(z, x, b, c, dt),
        ),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=flag(fields, "attention_bias"),
        mlp_bias=flag(fields, "mlp_bias"),
        multipliers=Multipliers(
            mamba_in=number(fields, "ssm_in_multiplier", 1.0),
            mamba_out=number(fields, "ssm_out_multiplier", 1.0),
            attention_in=number(fields, "attention_in_multiplier", 1.0),
            attention_out=number(fields, "attention_out_multiplier", 1.0),
            gate=gate,
            down=down,
        ),
    )
    return (layer,) * size(fields, "num_hidden_layers")


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(
        norm=NormSpec(eps=rms_norm_eps(fields)),
        embedding_scale=number(fields, "embedding_multiplier", 1.0),
        logit_scale=number(fields, "lm_head_multiplier", 1.0),
    )


def plain_fields(fields: Json) -> Json:
    """The fields with transformers' defaults, without the list of kinds, which are all one."""
    found = {"rms_norm_eps": 1e-5, **fields}
    return {name: value for name, value in found.items() if name not in ("layer_types", "layers_block_type")}


FIELDS = BAMBA_FIELDS | words(
    "mamba_d_ssm mamba_rms_norm mamba_norm_before_gate projectors_bias attention_bias mlp_bias ssm_multipliers mlp_multipliers",
    "key_multiplier ssm_in_multiplier ssm_out_multiplier attention_in_multiplier attention_out_multiplier embedding_multiplier",
    "lm_head_multiplier num_logits_to_keep attn_layer_indices mamba_use_mlp",
)
FAMILY = Family("falcon_h1", FIELDS, read_layers, FalconH1Block, read_model, plain_fields, NAMES)
