"""jina-embeddings-v2 (arXiv:2310.19923): BERT's layers with ALiBi to both sides instead of positions, and gated MLPs."""

import msgspec

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.layers.heads import HeadSpec
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.alibi import alibi_slopes
from quire.workers.models.config import AlibiConfig, EncoderSpec, LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.encoders.bert import BERT, BUFFERS, EMBEDDINGS, HEADS, LAYERS, UNUSED
from quire.workers.models.encoders.bert import FIELDS as BERT_FIELDS
from quire.workers.models.encoders.bert import plain_fields as bert_fields
from quire.workers.models.encoders.family import PostNormBlock, read_heads, small_int
from quire.workers.models.fields import Json, size, words
from quire.workers.models.fused import stacked_pair
from quire.workers.models.spellings import only

FIELDS = BERT_FIELDS | words("attn_implementation emb_pooler feed_forward_type model_max_length")
GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}  # feed_forward_type -> the activation of the first half
MLP = (("mlp.wo.", "mlp.down_proj."), ("mlp.layernorm.", "post_mlp_layernorm."))


def _block(config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module:
    return PostNormBlock(config, spec, place, layer, gate_up=stacked_pair("gated_layers"))


def plain_fields(fields: Json) -> Json:
    return bert_fields({"position_embedding_type": "alibi", "feed_forward_type": "geglu", **fields})


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "JinaBERT", is_decoder=False, position_embedding_type="alibi")
    kind = str(fields.get("feed_forward_type"))
    if kind not in GATES:
        known = ", ".join(GATES)
        raise ModelConfigError(f"config.json sets feed_forward_type to {kind!r:.60}: only {known} are supported")
    attention = read_heads(fields)
    layer = LayerSpec(
        attention=msgspec.structs.replace(attention, alibi=AlibiConfig(slopes=alibi_slopes(attention.num_heads))),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=True,
        down_bias=True,
        activation=GATES[kind],
    )
    return (layer,) * size(fields, "num_hidden_layers")


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    return EncoderSpec(num_token_types=small_int(fields, "type_vocab_size", 2), head=head)


def read_names(fields: Json, kind: str) -> CheckpointNames:
    prefixes = (("bert.", ""), *EMBEDDINGS, *HEADS[kind])
    return CheckpointNames(prefixes, (*BUFFERS, *UNUSED[kind]), inner=(*LAYERS, *MLP))


FAMILY = BERT._replace(
    name="JinaBERT",
    fields=FIELDS,
    read_layers=read_layers,
    make_block=_block,
    read_encoder=read_encoder,
    names=read_names,
    plain_fields=plain_fields,
)
