"""The encoders that can be served, by architecture, and the reading of config.json by them. Called by family_table.py.

A family is one file. An architecture is a family and a kind of head: BertModel, BertForSequenceClassification, ….
"""

import torch

from quire.workers.layers.linear import Placement
from quire.workers.loading.quantized.schemes import Quantization
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.decoder import MakeBlock
from quire.workers.models.encoder import Encoder
from quire.workers.models.encoders import bert, distilbert, eurobert, gemma3, gte, jina_v3, jinabert, modernbert, mpnet, nomic
from quire.workers.models.encoders.family import EncoderFamily
from quire.workers.models.fields import Json, flag, number, read_dtype, refuse_unknown, size, words
from quire.workers.models.spellings import ACTIVATIONS
from quire.workers.parallel import Parallel

KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
# fields that concern training, or the functions of labels, which pooling/heads.py reads
OF_ALL = words(
    "classifier_dropout sentence_transformers sbert_ce_default_activation_function layer_norm_eps adapters",
    "num_choices finetuning_task_name use_flash_attn",
)


def _kinds(name: str, family: EncoderFamily, kinds: tuple[str, ...] = KINDS) -> dict[str, tuple[EncoderFamily, str]]:
    return {f"{name}{kind}": (family, kind) for kind in kinds}


# by config.json's "architectures"
ENCODERS: dict[str, tuple[EncoderFamily, str]] = {
    **_kinds("Bert", bert.BERT),
    **_kinds("Roberta", bert.ROBERTA),
    **_kinds("XLMRoberta", bert.ROBERTA),
    **_kinds("Camembert", bert.ROBERTA),
    **_kinds("DistilBert", distilbert.FAMILY),
    **_kinds("EuroBert", eurobert.FAMILY),
    **_kinds("Gemma3Text", gemma3.FAMILY, ("Model",)),
    **_kinds("Gte", gte.FAMILY),
    **_kinds("JinaBert", jinabert.FAMILY),
    **_kinds("JinaEmbeddingsV3", jina_v3.FAMILY),
    **_kinds("MPNet", mpnet.FAMILY),
    **_kinds("ModernBert", modernbert.FAMILY),
    **_kinds("New", gte.FAMILY),
    **_kinds("NomicBert", nomic.FAMILY),
}


def _entry(fields: Json, architecture: str) -> tuple[EncoderFamily, str]:
    """jina-embeddings-v3 has XLM-RoBERTa's name."""
    family, kind = ENCODERS[architecture]
    is_rotary = fields.get("position_embedding_type") == "rotary"
    return (jina_v3.FAMILY, kind) if family is bert.ROBERTA and is_rotary else (family, kind)


def read_encoder_config(fields: Json, architecture: str, quantized: Quantization | None = None) -> ModelConfig:
    """ModelConfig from config.json's fields for an architecture of the table. Raises ModelConfigError, naming the field."""
    family, kind = _entry(fields, architecture)
    given, fields = fields, family.plain_fields(fields)
    refuse_unknown(fields, family.name, family.fields | OF_ALL, frozenset(ACTIVATIONS), given)
    encoder = family.read_encoder(fields, family.read_head(fields, kind))
    positions = size(fields, "max_position_embeddings")
    return ModelConfig(
        architecture=f"JinaEmbeddingsV3{kind}" if family is jina_v3.FAMILY else architecture,
        vocab_size=size(fields, "vocab_size"),
        hidden_size=size(fields, "hidden_size"),
        layers=family.read_layers(fields),
        model=family.read_model(fields),
        names=family.names(fields, kind)._replace(torch_files=True),
        tie_word_embeddings=flag(fields, "tie_word_embeddings"),
        max_position_embeddings=positions,
        initializer_range=number(fields, "initializer_range", 0.02),
        dtype=read_dtype(fields),
        quantization=quantized,
        longest=positions - encoder.first_position if encoder.first_position else None,
        encoder=encoder,
    )


def build_encoder(config: ModelConfig, dtype: torch.dtype, parallel: Parallel, make_block: MakeBlock | None = None) -> Encoder:
    """The rank's shard with uninitialized parameters. make_block: of a decoder's family, instead of the encoder's.

    Raises ModelConfigError for a number of ranks that cannot share it."""
    heads, inner = config.layers[0].attention.num_heads, config.layers[0].intermediate_size
    if heads % parallel.size or inner % parallel.size:
        raise ModelConfigError(
            f"--tensor-parallel-size {parallel.size} does not fit the model: it has {heads} attention heads and "
            f"intermediate_size {inner}"
        )
    if parallel.stage.count > 1:
        raise ModelConfigError("an encoder runs in one piece: --pipeline-parallel-size 1")
    make_block = make_block or ENCODERS[config.architecture][0].make_block
    return Encoder(config, make_block, Placement(dtype, parallel, config.quantization))
