"""EuroBERT (arXiv:2503.05500): Llama's layers whose tokens see both ways."""

import msgspec

from quire.workers.layers.heads import HeadPooling, HeadSpec
from quire.workers.layers.norm import NormSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec, LayerSpec, ModelConfigError, ModelSpec
from quire.workers.models.encoders.family import EncoderFamily, num_labels
from quire.workers.models.families import llama
from quire.workers.models.fields import Json, flag, number, size, words

FIELDS = llama.FIELDS | words(
    "classifier_pooling clf_pooling clf_dropout hidden_dropout bos_token eos_token pad_token mask_token"
)
# how a head's input is made, by the names that the field has
POOLING: dict[str, HeadPooling] = {"bos": "cls", "mean": "mean", "late": "late"}


def plain_fields(fields: Json) -> Json:
    return {"max_position_embeddings": 8192, **fields}


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    replace = msgspec.structs.replace
    return tuple(replace(layer, attention=replace(layer.attention, is_causal=False)) for layer in llama.read_layers(fields))


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=number(fields, "rms_norm_eps", 1e-5)))


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    return EncoderSpec(has_final_norm=True, head=head)


def read_head(fields: Json, kind: str) -> HeadSpec | None:
    if kind == "ForSequenceClassification":
        name = fields.get("classifier_pooling") or fields.get("clf_pooling") or "late"
        if name not in POOLING:
            raise ModelConfigError(
                f"config.json sets classifier_pooling to {name!r:.60}: only {', '.join(POOLING)} are supported"
            )
        return HeadSpec(kind="sequence", num_outputs=num_labels(fields), pooling=POOLING[name], dense="gelu")
    if kind == "ForTokenClassification":
        return HeadSpec(kind="token", num_outputs=num_labels(fields))
    if kind == "ForMaskedLM":
        return HeadSpec(kind="masked_lm", num_outputs=size(fields, "vocab_size"), out_bias=flag(fields, "mlp_bias"))
    return None


def read_names(fields: Json, kind: str) -> CheckpointNames:
    unused = ("lm_head.", "dense.", "classifier.", "head.") if kind == "Model" else ()
    return CheckpointNames((("dense.", "head.dense."), ("classifier.", "head.out.")), unused)


FAMILY = EncoderFamily(
    "EuroBERT", FIELDS, read_layers, llama.LlamaBlock, read_model, read_encoder, read_head, read_names, plain_fields
)
