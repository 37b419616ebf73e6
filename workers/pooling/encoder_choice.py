"""How an encoder pools: by the files of sentence-transformers beside its config.json, its head of labels, or --pooler-config.

An encoder does not generate. Its prompts are computed whole, since its tokens see both ways (`PoolingInfo.is_whole`). Called by
choice.py; workers/outputs/encoder_vectors.py runs what is chosen here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.ipc.pooling import PoolingInfo, PoolingType
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling.labels import LabelActivation, label_activation, labels_of
from quire.workers.pooling.poolers import DEFAULT
from quire.workers.pooling.sentence_transformers import (
    DenseStage,
    Mode,
    NormalizeStage,
    PoolingConfigError,
    PoolingStage,
    SentenceTransformers,
    SpladeStage,
    matryoshka_dimensions,
    read_sentence_transformers,
)

Json = dict[str, Any]
_MODES: dict[PoolingType, Mode] = {"CLS": "cls", "MEAN": "mean", "LAST": "lasttoken"}
_TYPES: dict[Mode, PoolingType] = {mode: kind for kind, mode in _MODES.items()}
_LABELS = ("ForSequenceClassification", "ForTokenClassification")


class EncoderChoice(NamedTuple):
    """architecture: the encoder's, without a head that is not used. stages: without a norm at the end, which is the info's."""

    architecture: str
    info: PoolingInfo
    activation: LabelActivation
    spec: SentenceTransformers
    folder: Path


def choose_encoder(
    fields: Json, folder: Path, name: str, *, runner: str, convert: str, pooler: tuple[PoolingType | None, bool | None]
) -> EncoderChoice:
    """name: the architecture, of encoders.table. pooler: --pooler-config's type and use_activation. Raises ModelConfigError."""
    if runner == "generate":
        raise ModelConfigError(f"--runner generate: {name} is an encoder, which writes no text; it can pool: --runner pooling")
    if convert == "none":
        raise ModelConfigError(f"--convert none: {name} does not pool as it is; --convert embed makes it an embedder")
    if name.endswith(_LABELS) and convert != "embed":
        return _classifier(fields, folder, name, pooler)
    if convert == "classify":
        raise ModelConfigError(f"--convert classify: {name} has no head of labels")
    try:
        spec = read_sentence_transformers(folder)
        dimensions = matryoshka_dimensions(fields)
    except PoolingConfigError as error:
        raise ModelConfigError(str(error)) from None
    return _embedder(fields, folder, name, spec, dimensions, pooler)


_OLD_NAMES: dict[str, Mode] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "lasttoken"}


def choose_two_way(fields: Json, folder: Path, family: str, pooler: tuple[PoolingType | None, bool | None]) -> EncoderChoice:
    """The choice for a decoder whose tokens see both ways; family: its architecture.

    Without files, by config.json's `pooling`, else the last token. Raises ModelConfigError.
    """
    named = fields.get("pooling", "last")
    if named not in _OLD_NAMES:
        raise ModelConfigError(f"config.json: pooling {named!r:.40} is not supported; supported are {', '.join(_OLD_NAMES)}")
    default = msgspec.structs.replace(DEFAULT, stages=(PoolingStage((_OLD_NAMES[named],)), NormalizeStage()))
    try:
        spec = read_sentence_transformers(folder) or default
        dimensions = matryoshka_dimensions(fields)
    except PoolingConfigError as error:
        raise ModelConfigError(str(error)) from None
    return _embedder(fields, folder, family, spec, dimensions, pooler)


def _embedder(
    fields: Json,
    folder: Path,
    name: str,
    given: SentenceTransformers | None,
    dimensions: tuple[int, ...] | None,
    pooler: tuple[PoolingType | None, bool | None],
) -> EncoderChoice:
    spec = _with_type(given or DEFAULT, pooler[0])
    is_sparse = any(isinstance(stage, SpladeStage) for stage in spec.stages)
    normalizes = bool(spec.stages) and isinstance(spec.stages[-1], NormalizeStage)
    plain = msgspec.structs.replace(spec, stages=spec.stages[:-1] if normalizes else spec.stages)
    _check(plain)
    info = PoolingInfo(
        tasks=["embed"] if is_sparse or spec.late is None else ["token_embed"],
        pooling_type=_type_of(plain),
        embedding_size=_size(fields, plain, is_sparse),
        use_activation=normalizes if pooler[1] is None else pooler[1],
        is_matryoshka=dimensions is not None,
        matryoshka_dimensions=list(dimensions or ()),
        similarity_fn_name=spec.similarity or "cosine",
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        is_whole=True,
    )
    if info.tasks == ["embed"] and not is_sparse:
        info = msgspec.structs.replace(info, tasks=["embed", "token_embed"])
    return EncoderChoice(name if is_sparse else _without_head(name), info, "identity", plain, folder)


def _check(spec: SentenceTransformers) -> None:
    """Refuse what the engine does not tell the workers yet."""
    if spec.late is not None:
        raise ModelConfigError("config_sentence_transformers.json: models of token vectors (ColBERT) are not served yet")
    if any(isinstance(stage, PoolingStage) and not stage.include_prompt for stage in spec.stages):
        raise ModelConfigError("1_Pooling/config.json: include_prompt false is not served yet")
    if spec.do_lower_case:
        raise ModelConfigError("sentence_bert_config.json: do_lower_case is not served: the tokenizer's files should say it")


def _classifier(fields: Json, folder: Path, name: str, pooler: tuple[PoolingType | None, bool | None]) -> EncoderChoice:
    if pooler[0] is not None:
        raise ModelConfigError("--pooler-config: the head of labels decides of which token its scores are")
    labels = labels_of(fields)
    of_tokens = name.endswith("ForTokenClassification")
    info = PoolingInfo(
        tasks=["token_classify"] if of_tokens else ["classify"],
        pooling_type="CLS",
        labels=labels,
        use_activation=True if pooler[1] is None else pooler[1],
        is_whole=True,
        takes_types=_token_types(fields) > 1,
    )
    return EncoderChoice(name, info, label_activation(fields, len(labels)), DEFAULT, folder)


def _token_types(fields: Json) -> int:
    value = fields.get("type_vocab_size", 2)
    return value if isinstance(value, int) else 0


def _with_type(spec: SentenceTransformers, kind: PoolingType | None) -> SentenceTransformers:
    if kind is None:
        return spec
    stages = [PoolingStage((_MODES[kind],)) if isinstance(stage, PoolingStage) else stage for stage in spec.stages]
    return msgspec.structs.replace(spec, stages=tuple(stages))


def _type_of(spec: SentenceTransformers) -> PoolingType:
    modes = [stage.modes for stage in spec.stages if isinstance(stage, PoolingStage)]
    return _TYPES.get(modes[0][0], "MEAN") if modes else "MEAN"


def _size(fields: Json, spec: SentenceTransformers, is_sparse: bool) -> int:
    """Elements of a vector: of the last dense layer, else of all poolings side by side."""
    if is_sparse:
        return int(fields.get("vocab_size") or 0)
    value = fields.get("hidden_size") or fields.get("n_embd") or fields.get("dim")
    size = value if isinstance(value, int) else 0
    for stage in spec.stages:
        if isinstance(stage, PoolingStage):
            size *= len(stage.modes)
        elif isinstance(stage, DenseStage):
            size = stage.out_features
    return size


def _without_head(name: str) -> str:
    """The encoder alone, of one that was saved with a head that an embedder does not use."""
    for ending in (*_LABELS, "ForMaskedLM"):
        if name.endswith(ending):
            return name.removesuffix(ending) + "Model"
    return name
