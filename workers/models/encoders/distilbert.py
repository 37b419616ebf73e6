"""DistilBERT (arXiv:1910.01108): BERT's layers without token types, under names of its own."""

from quire.workers.layers.heads import HeadSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec
from quire.workers.models.encoders.bert import BERT, BUFFERS, EMBEDDINGS
from quire.workers.models.encoders.family import activation_of, layer_norm, num_labels
from quire.workers.models.fields import Json, size, words
from quire.workers.models.spellings import renamed

FIELDS = words("dropout qa_dropout seq_classif_dropout sinusoidal_pos_embds")
RENAMED = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
LAYERS = (
    ("attention.q_lin.", "self_attn.q_proj."),
    ("attention.k_lin.", "self_attn.k_proj."),
    ("attention.v_lin.", "self_attn.v_proj."),
    ("attention.out_lin.", "self_attn.o_proj."),
    ("sa_layer_norm.", "post_attention_layernorm."),
    ("ffn.lin1.", "mlp.up_proj."),
    ("ffn.lin2.", "mlp.down_proj."),
    ("output_layer_norm.", "post_mlp_layernorm."),
)
HEADS = {
    "Model": (),
    "ForSequenceClassification": (("pre_classifier.", "head.dense."), ("classifier.", "head.out.")),
    "ForTokenClassification": (("classifier.", "head.out."),),
    "ForMaskedLM": (("vocab_transform.", "head.dense."), ("vocab_layer_norm.", "head.norm."), ("vocab_projector.", "lm_head.")),
}
UNUSED = ("pre_classifier.", "classifier.", "vocab_")


def plain_fields(fields: Json) -> Json:
    return renamed(fields, RENAMED, {"tie_word_embeddings": True, "max_position_embeddings": 512})


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    """The table of positions is in the checkpoint, whether it was learned or computed."""
    return EncoderSpec(num_positions=size(fields, "max_position_embeddings"), head=head)


def read_head(fields: Json, kind: str) -> HeadSpec | None:
    if kind == "ForSequenceClassification":
        return HeadSpec(kind="sequence", num_outputs=num_labels(fields), dense="relu")
    if kind == "ForTokenClassification":
        return HeadSpec(kind="token", num_outputs=num_labels(fields))
    if kind == "ForMaskedLM":
        act = activation_of(fields, "hidden_act", "gelu")
        return HeadSpec(kind="masked_lm", num_outputs=size(fields, "vocab_size"), dense=act, norm=layer_norm({}))
    return None


def read_names(fields: Json, kind: str) -> CheckpointNames:
    prefixes = (("distilbert.", ""), *EMBEDDINGS, ("transformer.layer.", "model.layers."), *HEADS[kind])
    return CheckpointNames(prefixes, (*BUFFERS, *(UNUSED if kind == "Model" else ())), inner=LAYERS)


FAMILY = BERT._replace(
    name="DistilBERT",
    fields=FIELDS,
    read_encoder=read_encoder,
    read_head=read_head,
    names=read_names,
    plain_fields=plain_fields,
)
