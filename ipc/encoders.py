"""Which architectures are encoders, and how long their texts may be: by config.json, without torch.

The core must know it before a worker reads the model, since an encoder's prompts are computed whole. The worker's own table is
workers/models/encoders/table.py; a test compares the two.
"""

from collections.abc import Mapping
from typing import Any

KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
STEMS: tuple[str, ...] = (
    "Bert",
    "Camembert",
    "DistilBert",
    "EuroBert",
    "Gte",
    "JinaBert",
    "JinaEmbeddingsV3",
    "MPNet",
    "ModernBert",
    "New",
)
STEMS += ("NomicBert", "Roberta", "XLMRoberta")
ARCHITECTURES = frozenset({f"{stem}{kind}" for stem in STEMS for kind in KINDS} | {"Gemma3TextModel"})
MOST_TOKENS = 32768  # of a step by default, and so of a text
TWO_WAY_LLAMA = "LlamaBidirectional"
_ROBERTA = ("Roberta", "XLMRoberta", "Camembert")


# names of encoders with a product behind them: ColBERT's by "model_type", and vLLM's for BGE-M3 with all of its vectors
COLBERTS = ("HF_ColBERT", "ColBERTModernBertModel", "ColBERTJinaRobertaModel")
BY_REQUEST = "by request"  # in place of a task of jina-embeddings-v5: each request chooses one
JINA_V5 = "JinaEmbeddingsV5Model"  # Qwen3's layers or EuroBERT's, and adapters/TASK/
_BY_TYPE = {"bert": "BertModel", "modernbert": "ModernBertModel", "xlm-roberta": "XLMRobertaModel", "roberta": "RobertaModel"}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The name in "architectures"; of an encoder in a model of token vectors, the encoder's."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name in COLBERTS:
        return _BY_TYPE.get(str(config.get("model_type")), name)
    if name == JINA_V5:
        return "EuroBertModel" if config.get("is_decoder") is False else "Qwen3Model"
    return "XLMRobertaModel" if name == "BgeM3EmbeddingModel" else name


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether its tokens see both ways: an encoder's, and those of a decoder that was made an embedder so."""
    return architecture_of(config) in ARCHITECTURES or is_two_way(config)


def is_two_way(config: Mapping[str, Any]) -> bool:
    """Whether it is a decoder whose tokens see both ways."""
    name = architecture_of(config)
    return name not in ARCHITECTURES and (config.get("is_causal") is False or name.startswith(TWO_WAY_LLAMA))


def longest_text(config: Mapping[str, Any], positions: int) -> int:
    """Most tokens of a text, given the model's positions: RoBERTa's first ones, and MPNet's, are never used."""
    name = architecture_of(config)
    if name.startswith("MPNet"):
        return positions - 2
    if name.startswith(_ROBERTA) and config.get("position_embedding_type") != "rotary":
        padding = config.get("pad_token_id", 1)
        return positions - (padding if type(padding) is int else 1) - 1
    return positions
