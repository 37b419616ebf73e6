"""MPNet (arXiv:2004.09297): BERT's layers with a bias by relative position, which they share; positions begin at 2."""

from quire.workers.layers.heads import HeadSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec
from quire.workers.models.encoders.bert import BERT, BUFFERS, EMBEDDINGS, ROBERTA_HEADS, UNUSED, read_roberta_head
from quire.workers.models.fields import Json, size, words
from quire.workers.models.spellings import only

FIELDS = words("hidden_dropout_prob attention_probs_dropout_prob relative_attention_num_buckets")
BUCKETS = 32  # transformers computes with so many, whatever the field says
LAYERS = (
    ("attention.attn.q.", "self_attn.q_proj."),
    ("attention.attn.k.", "self_attn.k_proj."),
    ("attention.attn.v.", "self_attn.v_proj."),
    ("attention.attn.o.", "self_attn.o_proj."),
    ("attention.LayerNorm.", "post_attention_layernorm."),
    ("intermediate.dense.", "mlp.up_proj."),
    ("output.dense.", "mlp.down_proj."),
    ("output.LayerNorm.", "post_mlp_layernorm."),
)
BIAS = ("encoder.relative_attention_bias.", "model.relative_attention_bias.")


def plain_fields(fields: Json) -> Json:
    return {"tie_word_embeddings": True, "max_position_embeddings": 512, **fields}


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    only(fields, "MPNet", relative_attention_num_buckets=BUCKETS)
    return EncoderSpec(num_positions=size(fields, "max_position_embeddings"), first_position=2, num_buckets=BUCKETS, head=head)


def read_names(fields: Json, kind: str) -> CheckpointNames:
    prefixes = (("mpnet.", ""), *EMBEDDINGS, BIAS, *ROBERTA_HEADS[kind])
    return CheckpointNames(prefixes, (*BUFFERS, *UNUSED[kind]), inner=LAYERS)


FAMILY = BERT._replace(
    name="MPNet",
    fields=FIELDS,
    read_encoder=read_encoder,
    read_head=read_roberta_head,
    names=read_names,
    plain_fields=plain_fields,
)
