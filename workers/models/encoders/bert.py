"""BERT (arXiv:1810.04805) and the RoBERTa models: learned positions, token types, post-norm blocks with an ungated MLP.

RoBERTa's first position is the padding token's id + 1, and its heads differ. XLM-RoBERTa and CamemBERT are RoBERTa.
"""

import msgspec

from quire.workers.layers.heads import HeadSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec, LayerSpec, ModelSpec
from quire.workers.models.encoders.family import (
    EncoderFamily,
    PostNormBlock,
    activation_of,
    layer_norm,
    num_labels,
    read_heads,
    small_int,
)
from quire.workers.models.fields import Json, size, words
from quire.workers.models.spellings import only

FIELDS = words("type_vocab_size hidden_dropout_prob attention_probs_dropout_prob layer_norm_eps position_embedding_type")
# the layers of BERT's own checkpoints, which older ones of other families share
LAYERS = (
    (".gamma", ".weight"),
    (".beta", ".bias"),
    ("attention.self.query.", "self_attn.q_proj."),
    ("attention.self.key.", "self_attn.k_proj."),
    ("attention.self.value.", "self_attn.v_proj."),
    ("attention.output.dense.", "self_attn.o_proj."),
    ("attention.output.LayerNorm.", "post_attention_layernorm."),
    ("intermediate.dense.", "mlp.up_proj."),
    ("output.dense.", "mlp.down_proj."),
    ("output.LayerNorm.", "post_mlp_layernorm."),
)
EMBEDDINGS = (
    ("embeddings.word_embeddings.", "model.embed_tokens."),
    ("embeddings.position_embeddings.", "model.position_embeddings."),
    ("embeddings.token_type_embeddings.", "model.token_type_embeddings."),
    ("embeddings.LayerNorm.", "model.embed_norm."),
    ("encoder.layer.", "model.layers."),
)
# of checkpoints whose code came from flash-attention's
FLASH_EMBEDDINGS = (*EMBEDDINGS, ("emb_ln.", "model.embed_norm."), ("encoder.layers.", "model.layers."))
BUFFERS = (".position_ids", ".token_type_ids")
HEADS = {
    "Model": (),
    "ForSequenceClassification": (("pooler.dense.", "head.dense."), ("classifier.", "head.out.")),
    "ForTokenClassification": (("classifier.", "head.out."),),
    "ForMaskedLM": (
        ("cls.predictions.transform.dense.", "head.dense."),
        ("cls.predictions.transform.LayerNorm.", "head.norm."),
        ("cls.predictions.decoder.", "lm_head."),
        ("cls.predictions.bias", "lm_head.bias"),
    ),
}
# modules that a checkpoint may have and this kind of model does not use
UNUSED = {
    "Model": ("pooler.", "cls.", "classifier.", "lm_head."),
    "ForSequenceClassification": ("cls.", "lm_head.dense.", "lm_head.layer_norm."),
    "ForTokenClassification": ("pooler.", "cls."),
    "ForMaskedLM": ("pooler.", "cls.seq_relationship.", "cls.predictions.decoder.bias", "lm_head.decoder.bias"),
}
ROBERTA_HEADS = {
    "Model": (),
    "ForSequenceClassification": (("classifier.dense.", "head.dense."), ("classifier.out_proj.", "head.out.")),
    "ForTokenClassification": (("classifier.", "head.out."),),
    "ForMaskedLM": (
        ("lm_head.dense.", "head.dense."),
        ("lm_head.layer_norm.", "head.norm."),
        ("lm_head.decoder.", "lm_head."),
    ),
}
ROBERTA_PREFIXES = (("roberta.", ""), ("xlm_roberta.", ""), ("camembert.", ""))


def plain_fields(fields: Json) -> Json:
    return {"tie_word_embeddings": True, "type_vocab_size": 2, "max_position_embeddings": 512, **fields}


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "BERT", is_decoder=False, position_embedding_type="absolute", num_key_value_heads=None, head_dim=None)
    layer = LayerSpec(
        attention=read_heads(fields),
        intermediate_size=size(fields, "intermediate_size"),
        attention_bias=True,
        mlp_bias=True,
        activation=activation_of(fields, "hidden_act", "gelu"),
    )
    return (layer,) * size(fields, "num_hidden_layers")


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=layer_norm(fields), embedding_norm=layer_norm(fields))


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    positions, types = size(fields, "max_position_embeddings"), small_int(fields, "type_vocab_size", 2)
    return EncoderSpec(num_positions=positions, num_token_types=types, head=head)


def read_roberta_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    first = small_int(fields, "pad_token_id", 1) + 1
    return msgspec.structs.replace(read_encoder(fields, head), first_position=first)


def read_head(fields: Json, kind: str) -> HeadSpec | None:
    """BERT's: its pooler is the dense layer of classification."""
    if kind == "ForSequenceClassification":
        return HeadSpec(kind="sequence", num_outputs=num_labels(fields), dense="tanh")
    if kind == "ForTokenClassification":
        return HeadSpec(kind="token", num_outputs=num_labels(fields))
    if kind == "ForMaskedLM":
        act = activation_of(fields, "hidden_act", "gelu")
        return HeadSpec(kind="masked_lm", num_outputs=size(fields, "vocab_size"), dense=act, norm=layer_norm(fields))
    return None


def read_roberta_head(fields: Json, kind: str) -> HeadSpec | None:
    """Its masked language model has GELU whatever the layers have."""
    return read_head({**fields, "hidden_act": "gelu"}, kind)


def read_names(fields: Json, kind: str) -> CheckpointNames:
    return CheckpointNames((("bert.", ""), *EMBEDDINGS, *HEADS[kind]), (*BUFFERS, *UNUSED[kind]), inner=LAYERS)


def read_roberta_names(fields: Json, kind: str) -> CheckpointNames:
    prefixes = (*ROBERTA_PREFIXES, *EMBEDDINGS, *ROBERTA_HEADS[kind])
    return CheckpointNames(prefixes, (*BUFFERS, *UNUSED[kind]), inner=LAYERS)


BERT = EncoderFamily("BERT", FIELDS, read_layers, PostNormBlock, read_model, read_encoder, read_head, read_names, plain_fields)
ROBERTA = BERT._replace(
    name="RoBERTa", read_encoder=read_roberta_encoder, read_head=read_roberta_head, names=read_roberta_names
)
