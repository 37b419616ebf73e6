"""Post-norm encoders with rotary embedding and gated MLPs: NomicBERT (arXiv:2402.01613) and GTE (arXiv:2407.19669).

Their checkpoints have q, k and v in one tensor, and the names of the code that they were published with.
"""

from typing import Any

import msgspec

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec, LayerSpec, ModelConfig, ModelConfigError, RopeConfig
from quire.workers.models.encoders.bert import BERT, BUFFERS, EMBEDDINGS, HEADS, UNUSED
from quire.workers.models.encoders.bert import FIELDS as BERT_FIELDS
from quire.workers.models.encoders.family import PostNormBlock, activation_of, read_heads, small_int
from quire.workers.models.fields import Json, flag, number, read_rope, rope_parameters, size, words
from quire.workers.models.fused import RowsByName, pair, stacked
from quire.workers.models.spellings import only, renamed
from quire.workers.pooling.specs import HeadSpec
from quire.workers.shard import RowRanges, Shard

# ------------------------------------------------------------------------------------------------------------ NomicBERT
NOMIC_FIELDS = BERT_FIELDS | words(
    "rotary_emb_fraction rotary_emb_interleaved rotary_emb_scale_base rotary_scaling_factor max_trained_positions prenorm",
    "parallel_block parallel_block_tied_norm use_rms_norm qkv_proj_bias mlp_fc1_bias mlp_fc2_bias causal scale_attn_weights",
    "scale_attn_by_inverse_layer_idx reorder_and_upcast_attn fused_bias_fc fused_dropout_add_ln dense_seq_output",
    "pad_vocab_size_multiple use_xentropy summary_activation summary_first_dropout summary_proj_to_labels summary_type",
    "summary_use_proj add_pooling_layer num_experts expert_choice_router moe_every_n_layers moe_impl",
    "moe_normalize_expert_weights moe_resid_pdrop moe_top_k num_shared_experts ffn_div",
)
NOMIC_RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
NOMIC_LAYERS = (
    ("attn.Wqkv.", "self_attn.Wqkv."),
    ("attn.out_proj.", "self_attn.o_proj."),
    ("norm1.", "post_attention_layernorm."),
    ("norm2.", "post_mlp_layernorm."),
    ("mlp.fc11.", "mlp.up_proj."),
    ("mlp.fc12.", "mlp.gate_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
)
FLASH_EMBEDDINGS = (*EMBEDDINGS, ("emb_ln.", "model.embed_norm."), ("encoder.layers.", "model.layers."))
GLU = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}  # the activations' names of the first configs


def _nomic_block(config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module:
    return PostNormBlock(config, spec, place, layer, qkv=stacked("Wqkv"), gate_up=pair)


def nomic_fields(fields: Json) -> Json:
    found = renamed(fields, NOMIC_RENAMED, {"tie_word_embeddings": True, "type_vocab_size": 2})
    if found.get("hidden_act") in GLU:
        found["hidden_act"] = GLU[found["hidden_act"]]
    return {"hidden_act": "silu", **found}


def read_nomic_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(
        fields, "NomicBERT", prenorm=False, parallel_block=False, use_rms_norm=False, causal=False, rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
    )  # fmt: skip
    for name in ("num_experts", "rotary_emb_scale_base", "rotary_scaling_factor", "num_shared_experts"):
        if fields.get(name):
            raise ModelConfigError(f"config.json sets {name}: not supported for NomicBERT models")
    return rotary_layers(
        fields, 1000.0, flag(fields, "qkv_proj_bias"), flag(fields, "mlp_fc1_bias"), flag(fields, "mlp_fc2_bias")
    )


def nomic_names(fields: Json, kind: str) -> CheckpointNames:
    heads: Any = [(theirs.replace("transform.LayerNorm", "transform.layer_norm"), ours) for theirs, ours in HEADS[kind]]
    prefixes = (("nomic_bert.", ""), ("bert.", ""), *FLASH_EMBEDDINGS, *heads)
    return CheckpointNames(prefixes, (*BUFFERS, *UNUSED[kind]), inner=NOMIC_LAYERS)


# ------------------------------------------------------------------------------------------------------------------ GTE
GTE_FIELDS = BERT_FIELDS | words(
    "layer_norm_type logn_attention_clip1 logn_attention_scale pack_qkv unpad_inputs use_memory_efficient_attention",
)
GTE_LAYERS = (
    ("attention.qkv_proj.", "self_attn.qkv_proj."),
    ("attention.o_proj.", "self_attn.o_proj."),
    ("attn_ln.", "post_attention_layernorm."),
    ("mlp_ln.", "post_mlp_layernorm."),
)
GTE_HEADS = {
    **HEADS,
    "ForMaskedLM": (("lm_head.dense.", "head.dense."), ("lm_head.norm.", "head.norm."), ("lm_head.decoder.", "lm_head.")),
}


def _up_then_gate(inner: Shard) -> RowsByName:
    gate = inner.full + inner.start, inner.full + inner.stop
    return {"up_gate_proj": RowRanges.of(2 * inner.full, [gate, (inner.start, inner.stop)])}


def _gte_block(config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module:
    return PostNormBlock(config, spec, place, layer, qkv=stacked("qkv_proj"), gate_up=_up_then_gate)


def gte_fields(fields: Json) -> Json:
    """The type `ntk` of the first configs scales the base and, slightly, all frequencies, for texts of any length."""
    found = {"tie_word_embeddings": True, "type_vocab_size": 1, "position_embedding_type": "rope", **fields}
    _, params = rope_parameters(found)
    if params.get("type", params.get("rope_type")) != "ntk":
        return found
    if params.get("mixed_b") is not None:
        raise ModelConfigError("config.json: rope_scaling sets mixed_b: not supported")
    factor, dim = number(params, "factor", 1.0), read_heads(found).head_dim
    theta = number(found, "rope_theta", 10000.0) * factor
    rope = {"rope_type": "linear", "factor": factor ** (2 / dim), "rope_theta": theta}
    return {**found, "rope_scaling": None, "rope_parameters": rope}


def read_gte_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(
        fields, "GTE", position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True, logn_attention_scale=False,
        logn_attention_clip1=False,
    )  # fmt: skip
    return rotary_layers(fields, 160000.0, True, False, True)


def gte_names(fields: Json, kind: str) -> CheckpointNames:
    unused = UNUSED[kind] if kind != "ForMaskedLM" else ("pooler.",)
    return CheckpointNames((("new.", ""), ("gte.", ""), *EMBEDDINGS, *GTE_HEADS[kind]), (*BUFFERS, *unused), inner=GTE_LAYERS)


# -------------------------------------------------------------------------------------------------------------- shared
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


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    return EncoderSpec(num_token_types=small_int(fields, "type_vocab_size", 0), head=head)


NOMIC = BERT._replace(
    name="NomicBERT",
    fields=NOMIC_FIELDS,
    read_layers=read_nomic_layers,
    make_block=_nomic_block,
    read_encoder=read_encoder,
    names=nomic_names,
    plain_fields=nomic_fields,
)
GTE = BERT._replace(
    name="GTE",
    fields=GTE_FIELDS,
    read_layers=read_gte_layers,
    make_block=_gte_block,
    read_encoder=read_encoder,
    names=gte_names,
    plain_fields=gte_fields,
)
