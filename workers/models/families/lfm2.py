"""LFM2, LFM2.5 and LFM2-MoE: pre-norm blocks, x += operator(norm(x)); x += feed_forward(norm(x)). An operator is a gated short
convolution or attention with QK-norm, and `layer_types` or `full_attn_idxs` says which.

The MLP's width is block_ff_dim or intermediate_size, of which LFM2 takes two thirds, times block_ffn_dim_multiplier, rounded up
to a multiple of block_multiple_of, unless block_auto_adjust_ff_dim is false. In LFM2-MoE all layers but the first
num_dense_layers have experts: scores are sigmoids, a bias is added for the choice only, and the chosen scores are normalized.
"""

import msgspec
import torch

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.layers.stacked_experts import Names as ExpertNames
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP, Names, SelfAttention
from quire.workers.models.config import NO_ATTENTION, ExpertsSpec, LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.fields import Json, flag, number, read_attention, rms_norm_eps, size, words
from quire.workers.models.moe import MoE
from quire.workers.models.moe_fields import MOE_FIELDS, check_only, count, read_routing
from quire.workers.models.short_convolution import ShortConvolution, ShortConvolutionSpec
from quire.workers.models.step_context import StepContext

CONVOLUTION, FULL = "conv", "full_attention"
MLP = "feed_forward"
CHECKPOINT = CheckpointNames(
    prefixes=(("model.embedding_norm.", "model.norm."), ("embedding_norm.", "norm.")),
    inner=(
        (".self_attn.q_layernorm.", ".self_attn.q_norm."),
        (".self_attn.k_layernorm.", ".self_attn.k_norm."),
        (f".{MLP}.w1.", f".{MLP}.gate_proj."),
        (f".{MLP}.w3.", f".{MLP}.up_proj."),
        (f".{MLP}.w2.", f".{MLP}.down_proj."),
    ),
)


class Lfm2Block(Module):
    _operator: ShortConvolution | SelfAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        self.operator_norm = RMSNorm(*norm)
        if isinstance(spec.recurrent, ShortConvolutionSpec):
            self.conv = ShortConvolution(spec.recurrent, hidden_size, place, layer)
        else:
            self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, names=Names(o_proj="out_proj"))
        self.__dict__["_operator"] = self.self_attn if spec.recurrent is None else self.conv  # a child has one name
        self.ffn_norm = RMSNorm(*norm)
        self.feed_forward = (
            GatedMLP(hidden_size, spec.intermediate_size, place, name=MLP)
            if spec.experts is None
            else MoE(
                spec.experts,
                hidden_size,
                place,
                name=MLP,
                names=ExpertNames("w1", "w3", "w2"),
                correction="expert_bias" if spec.experts.has_correction else None,
            )
        )

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._operator(x, residual, self.operator_norm, context, logits_indices)
        return self.feed_forward(x, residual, self.ffn_norm)


def layer_types(fields: Json) -> tuple[str, ...]:
    """The kind of each layer, CONVOLUTION or FULL. Without either field all are FULL, as in transformers."""
    types, num_layers = fields.get("layer_types"), size(fields, "num_hidden_layers")
    if types is None:
        indices = fields.get("full_attn_idxs")
        indices = list(range(num_layers)) if indices is None else indices
        if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < num_layers for i in indices):
            raise ModelConfigError(f"config.json: full_attn_idxs must list numbers of layers, from 0 to {num_layers - 1}")
        return tuple(FULL if i in indices else CONVOLUTION for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(name not in (CONVOLUTION, FULL) for name in types):
        raise ModelConfigError(f"config.json: layer_types must list {CONVOLUTION} or {FULL} for each of {num_layers} layers")
    return tuple(types)


def read_convolution(fields: Json) -> ShortConvolutionSpec:
    hidden_size = size(fields, "hidden_size")
    check_only(fields, block_dim=hidden_size, conv_dim=hidden_size, conv_dim_out=hidden_size)
    window = size(fields, "conv_L_cache", 3)
    if window < 2:
        raise ModelConfigError("config.json: conv_L_cache must be at least 2")
    return ShortConvolutionSpec(channels=hidden_size, window=window, has_bias=flag(fields, "conv_bias"))


def read_blocks(fields: Json, inner: int) -> list[LayerSpec]:
    """All layers with an MLP of this width."""
    check_only(fields, use_pos_enc=True, block_use_swiglu=True, num_heads=size(fields, "num_attention_heads"))
    attention = read_attention(fields, default_kv_heads=8, theta=1e6)
    attention = msgspec.structs.replace(attention, qk_norm_eps=rms_norm_eps(fields))
    full = LayerSpec(attention=attention, intermediate_size=inner)
    short = LayerSpec(attention=NO_ATTENTION, recurrent=read_convolution(fields), intermediate_size=inner)
    return [full if kind == FULL else short for kind in layer_types(fields)]


def mlp_width(fields: Json) -> int:
    inner = size(fields, "intermediate_size", 12288)
    if not flag(fields, "block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    if "block_ffn_dim_multiplier" in fields and fields["block_ffn_dim_multiplier"] is None:
        return inner
    multiple = size(fields, "block_multiple_of", 256)
    return -(-int(number(fields, "block_ffn_dim_multiplier", 1.0) * inner) // multiple) * multiple


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    return tuple(read_blocks(fields, mlp_width(fields)))


def read_moe_layers(fields: Json) -> tuple[LayerSpec, ...]:
    routing = read_routing(
        fields,
        scores="sigmoid",
        is_normalized=flag(fields, "norm_topk_prob", True),
        eps=1e-6,
        scale=number(fields, "routed_scaling_factor", 1.0),
    )
    experts = ExpertsSpec(
        routing=routing,
        intermediate_size=size(fields, "moe_intermediate_size"),
        has_correction=flag(fields, "use_expert_bias", True),
    )
    first = count(fields, "num_dense_layers", 2)
    blocks = read_blocks(fields, size(fields, "intermediate_size"))
    return tuple(block if i < first else msgspec.structs.replace(block, experts=experts) for i, block in enumerate(blocks))


# Names of fields -> those of fields.py.
RENAMED = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}


def plain_moe_fields(fields: Json) -> Json:
    """The fields under the names of fields.py, with transformers' defaults. If a field has two names, LFM2's has precedence."""
    others = {RENAMED[name]: value for name, value in fields.items() if name in RENAMED and value is not None}
    rest = {name: value for name, value in fields.items() if name not in (*RENAMED, "theta")}
    if rest.get("rope_theta") is None and fields.get("theta") is not None:
        rest["rope_theta"] = fields["theta"]
    return {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **rest, **others}


def plain_fields(fields: Json) -> Json:
    found = plain_moe_fields(fields)
    width = found.pop("block_ff_dim", None)
    return found if width is None else {**found, "intermediate_size": width}


# The second line's fields say how weights were drawn, and repeat the norms' epsilon.
FIELDS = words(
    "full_attn_idxs conv_L_cache conv_bias conv_dim conv_dim_out block_dim num_heads use_pos_enc block_use_swiglu",
    "block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init block_norm_eps",
)
ADJUSTED = words("block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim")
EXPERT_FIELDS = MOE_FIELDS | words(
    "moe_intermediate_size num_dense_layers use_expert_bias norm_topk_prob routed_scaling_factor"
)


LFM2 = Family("lfm2", FIELDS | ADJUSTED, read_layers, Lfm2Block, plain_fields=plain_fields, names=CHECKPOINT)
LFM2_MOE = Family(
    "lfm2_moe", FIELDS | EXPERT_FIELDS, read_moe_layers, Lfm2Block, plain_fields=plain_moe_fields, names=CHECKPOINT
)
