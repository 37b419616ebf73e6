"""GTE (arXiv:2407.19669): a post-norm encoder with rotary embedding and gated MLPs. First published as `NewModel`, with code of
its own, the names of which the checkpoints have: q, k and v are one tensor, and so are up and gate.
"""

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.encoders.bert import BERT, BUFFERS, EMBEDDINGS, HEADS, UNUSED
from quire.workers.models.encoders.bert import FIELDS as BERT_FIELDS
from quire.workers.models.encoders.family import PostNormBlock, read_heads, read_typed_encoder, rotary_layers
from quire.workers.models.fields import Json, number, rope_parameters, words
from quire.workers.models.fused import RowsByName, stacked
from quire.workers.models.spellings import only
from quire.workers.shard import RowRanges, Shard

FIELDS = BERT_FIELDS | words(
    "layer_norm_type logn_attention_clip1 logn_attention_scale pack_qkv unpad_inputs use_memory_efficient_attention",
)
LAYERS = (
    ("attention.qkv_proj.", "self_attn.qkv_proj."),
    ("attention.o_proj.", "self_attn.o_proj."),
    ("attn_ln.", "post_attention_layernorm."),
    ("mlp_ln.", "post_mlp_layernorm."),
)
HEADS_OF_GTE = {
    **HEADS,
    "ForMaskedLM": (("lm_head.dense.", "head.dense."), ("lm_head.norm.", "head.norm."), ("lm_head.decoder.", "lm_head.")),
}


def _up_then_gate(inner: Shard) -> RowsByName:
    gate = inner.full + inner.start, inner.full + inner.stop
    return {"up_gate_proj": RowRanges.of(2 * inner.full, [gate, (inner.start, inner.stop)])}


def _block(config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module:
    return PostNormBlock(config, spec, place, layer, qkv=stacked("qkv_proj"), gate_up=_up_then_gate)


def plain_fields(fields: Json) -> Json:
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


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(
        fields,
        "GTE",
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
        logn_attention_clip1=False,
    )
    return rotary_layers(fields, 160000.0, True, False, True)


def read_names(fields: Json, kind: str) -> CheckpointNames:
    unused = UNUSED[kind] if kind != "ForMaskedLM" else ("pooler.",)
    return CheckpointNames((("new.", ""), ("gte.", ""), *EMBEDDINGS, *HEADS_OF_GTE[kind]), (*BUFFERS, *unused), inner=LAYERS)


FAMILY = BERT._replace(
    name="GTE",
    fields=FIELDS,
    read_layers=read_layers,
    make_block=_block,
    read_encoder=read_typed_encoder,
    names=read_names,
    plain_fields=plain_fields,
)
