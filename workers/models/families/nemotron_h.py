"""Nemotron-H, Nemotron 2 and 3: each layer is x += mixer(norm(x)), with one mixer: Mamba 2, attention, MLP or experts.

`layers_block_type`, in transformers 4 `hybrid_override_pattern`, says which layer is which. Attention does not rotate. MLP and
experts have no gate, but the square of relu. The router is DeepSeek V3's; experts may read and write a latent
(moe_latent_size). Mamba's step is at least time_step_min, and its norm is by groups and comes after the gate. Layers that
predict a further token (MTP) are an attention and one with experts, which a drafter reads.
"""

import msgspec
import torch

from quire.kernels.experts.experts_reference import Relu2
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.layers.stacked_experts import Names as ExpertNames
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import MLP, Names, SelfAttention
from quire.workers.models.config import NO_ATTENTION, ExpertsSpec, LayerSpec, ModelConfig, ModelConfigError, ModelSpec, MTPSpec
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, rms_norm_eps, size, words
from quire.workers.models.mamba2 import Mamba2, MambaSpec
from quire.workers.models.mamba_fields import ATTENTION, MAMBA, OLD_KINDS, check_groups, check_time_step_limit
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import GROUP_FIELDS, MOE_FIELDS, check_only, count, read_group_routing
from quire.workers.models.spellings import renamed
from quire.workers.models.step_context import StepContext

PLAIN, EXPERTS = "mlp", "moe"
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": PLAIN, "E": EXPERTS}
KINDS = {**OLD_KINDS, **{kind: kind for kind in LETTERS.values()}}
EXPERT_NAMES = ExpertNames(gate="")
CORRECTION = "gate.e_score_correction_bias"


class NemotronBlock(Module):
    mixer: Mamba2 | SelfAttention | MLP | MoE

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.norm = make_norm(config.model.norm, hidden_size, place.dtype, place.device)
        if isinstance(spec.recurrent, MambaSpec):
            self.mixer = Mamba2(spec.recurrent, hidden_size, place, layer, eps=eps, name="mixer")
        elif spec.attention.is_there:
            self.mixer = SelfAttention(spec.attention, hidden_size, place, layer, names=Names("mixer"))
        elif spec.experts is not None:
            self.mixer = MoE(
                spec.experts,
                hidden_size,
                place,
                name="mixer",
                names=EXPERT_NAMES,
                correction=CORRECTION,
                shared="shared_experts",
            )
        else:
            self.mixer = MLP(
                hidden_size,
                spec.intermediate_size,
                place,
                "up_proj",
                "down_proj",
                has_bias=spec.mlp_bias,
                activation=spec.activation,
                name="mixer",
            )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixer = self.mixer
        if isinstance(mixer, Mamba2 | SelfAttention):
            return mixer(x, residual, self.norm, context, logits_indices)
        if logits_indices is None:
            return mixer(x, residual, self.norm)
        h = self.norm(residual) if x is None else self.norm.add(x, residual)
        h, residual = h.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return mixer.of(h), residual


def block_types(fields: Json) -> list[str] | None:
    """The kind of each layer; None: config.json does not say. Raises ModelConfigError."""
    types, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    types = fields.get("layer_types") if types is None else types
    known: dict[str, str] = KINDS
    if types is None:
        types, known = pattern, LETTERS
    if types is None:
        return None
    if not isinstance(types, list | str) or not types or any(kind not in known for kind in types):
        name = "hybrid_override_pattern" if known is LETTERS else "layers_block_type"
        raise ModelConfigError(f"config.json: {name} must have {', '.join(known)} for each layer, not {types!r:.80}")
    return [known[kind] for kind in types]


def plain_fields(fields: Json) -> Json:
    """Fields under the names that are read here. The number of layers is that of their kinds, as in transformers."""
    names = {
        "layer_norm_epsilon": "rms_norm_eps",
        "norm_eps": "rms_norm_eps",
        "mlp_hidden_act": "hidden_act",
        "attention_head_dim": "head_dim",
    }
    defaults = {"rms_norm_eps": 1e-5, "head_dim": 128, "norm_topk_prob": True, "num_key_value_heads": 8}
    found = renamed(fields, names, defaults)
    types = block_types(found)
    given = fields.get("num_hidden_layers")
    if types is None:
        raise ModelConfigError("config.json lacks layers_block_type, or hybrid_override_pattern, which says what each layer is")
    if given is not None and given != len(types):
        raise ModelConfigError(f"config.json: num_hidden_layers is {given!r:.20}, but kinds are given of {len(types)} layers")
    return {**found, "layers_block_type": types, "num_hidden_layers": len(types)}


def read_mamba(fields: Json) -> MambaSpec:
    check_only(fields, mamba_hidden_act="silu")
    check_time_step_limit(fields)  # transformers ignores it, so only one that limits nothing is taken
    bias = flag(fields, "use_bias")
    return check_groups(
        MambaSpec(
            num_heads=size(fields, "mamba_num_heads", 128),
            head_dim=size(fields, "mamba_head_dim", 64),
            num_groups=size(fields, "n_groups", 8),
            state_size=size(fields, "ssm_state_size", 128),
            window=size(fields, "conv_kernel", 4),
            has_conv_bias=flag(fields, "use_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            dt_min=number(fields, "time_step_min", 0.001),
        )
    )


def read_experts(fields: Json) -> ExpertsSpec:
    latent = fields.get("moe_latent_size")
    return ExpertsSpec(
        routing=read_group_routing(fields),
        intermediate_size=size(fields, "moe_intermediate_size"),
        shared_size=size(fields, "moe_shared_expert_intermediate_size"),
        latent_size=0 if latent is None else size(fields, "moe_latent_size"),
        act=Relu2(),
        has_bias=flag(fields, "mlp_bias"),
    )


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, attention_bias=False, sliding_window=None)
    return layers_of(fields, fields["layers_block_type"])


def read_mtp(fields: Json, layers: tuple[LayerSpec, ...]) -> MTPSpec | None:
    """The layers for one further token, by mtp_layers_block_type or mtp_hybrid_override_pattern."""
    if not count(fields, "num_nextn_predict_layers", 0):
        return None
    named = {"layers_block_type": fields.get("mtp_layers_block_type")}
    types = block_types({**named, "hybrid_override_pattern": fields.get("mtp_hybrid_override_pattern")})
    if types is None:
        return None
    found, first, last = layers_of(fields, types), "mtp.layers.0.", f"mtp.layers.{len(types) - 1}."
    parts = (f"{first}enorm.", "mtp.enorm."), (f"{first}hnorm.", "mtp.hnorm."), (f"{first}eh_proj.", "mtp.fc.")
    why_not = None if any(layer.attention.is_there for layer in found) and MAMBA not in types else f"they are {types}"
    ends = (f"{last}final_layernorm.", "mtp.norm.")
    return MTPSpec(layers=found, prefixes=(("model.mtp.", "mtp."), *parts, ends), why_not=why_not)


def layers_of(fields: Json, types: list[str]) -> tuple[LayerSpec, ...]:
    """Layers of these kinds."""
    empty, replace = LayerSpec(attention=NO_ATTENTION, intermediate_size=0), msgspec.structs.replace
    made: dict[str, LayerSpec] = {}
    if MAMBA in types:
        made[MAMBA] = replace(empty, recurrent=read_mamba(fields))
    if ATTENTION in types:
        attention = read_attention(fields, partial=1.0)
        made[ATTENTION] = replace(empty, attention=replace(attention, rope=None))
    if PLAIN in types:
        inner, bias = size(fields, "intermediate_size"), flag(fields, "mlp_bias")
        made[PLAIN] = replace(empty, intermediate_size=inner, mlp_bias=bias, activation="relu2")
    if EXPERTS in types:
        made[EXPERTS] = replace(empty, experts=read_experts(fields))
    return tuple(made[kind] for kind in types)


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=rms_norm_eps(fields), weighs="wide"))


FIELDS = (
    MOE_FIELDS
    | GROUP_FIELDS
    | words(
        "layers_block_type hybrid_override_pattern mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel",
        "use_conv_bias use_bias mlp_bias attention_bias time_step_min time_step_limit mamba_hidden_act mamba_ssm_cache_dtype",
        "moe_shared_expert_intermediate_size moe_latent_size",
        # how weights are drawn, how other code computes, and what predicts further tokens
        "time_step_max time_step_floor time_step_rank mamba_proj_bias expand chunk_size rescale_prenorm_residual",
        "residual_in_fp32 use_mamba_kernels num_logits_to_keep moe_shared_expert_overlap num_nextn_predict_layers",
        "mtp_layers_block_type mtp_hybrid_override_pattern n_shared_experts",
    )
)
NAMES = CheckpointNames(
    prefixes=(("backbone.", "model."), ("model.embeddings.", "model.embed_tokens."), ("model.norm_f.", "model.norm.")),
    ignored=("mtp.", "model.mtp."),
)
FAMILY = Family(
    "nemotron_h",
    FIELDS,
    read_layers,
    NemotronBlock,
    read_model,
    plain_fields,
    NAMES,
    activations=frozenset({"relu2"}),
    read_mtp=read_mtp,
)
