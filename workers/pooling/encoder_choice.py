"""How an encoder pools: by the files of sentence-transformers beside its config.json, its head of labels, or --pooler-config.

An encoder does not generate. Its prompts are computed whole, since its tokens see both ways (`PoolingInfo.is_whole`). Called by
choice.py; workers/outputs/encoder_vectors.py runs what is chosen here.
"""

from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from quire.ipc.encoders import COLBERTS
from quire.ipc.pooling import PoolingInfo, PoolingTask, PoolingType
from quire.workers.layers.heads import HeadPooling, HeadSpec
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling.labels import LabelActivation, label_activation, labels_of
from quire.workers.pooling.late_interaction import M3_FILES, colbert_size
from quire.workers.pooling.late_tokens import late_interaction, unweighted
from quire.workers.pooling.poolers import DEFAULT
from quire.workers.pooling.sentence_transformers import (
    PUNCTUATION,
    DenseStage,
    LateInteraction,
    Mode,
    NormalizeStage,
    PoolingConfigError,
    PoolingStage,
    SentenceTransformers,
    SpladeStage,
    matryoshka_dimensions,
    read_sentence_transformers,
    read_stanford_colbert,
)

Json = dict[str, Any]
STANFORD = LateInteraction(query_prefix="[unused0]", document_prefix="[unused1]", document_length=220, skiplist=PUNCTUATION)
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
    m3: bool = False  # BGE-M3's sparse vectors and vectors of tokens are beside the dense ones
    special_ids: tuple[int, ...] = ()  # of these: tokens without a weight
    head: HeadSpec | None = None  # of labels, of a decoder with two-way attention


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
        if spec is None and (late := read_stanford_colbert(folder)) is not None:
            spec = SentenceTransformers(stages=(), late=late)
        if spec is None and str((fields.get("architectures") or [""])[0]) in COLBERTS:
            spec = SentenceTransformers(stages=(), late=STANFORD)
    except PoolingConfigError as error:
        raise ModelConfigError(str(error)) from None
    if spec is not None and spec.late is not None:
        return _late(fields, folder, name, spec, dimensions, pooler)
    return _embedder(fields, folder, name, spec, dimensions, pooler)


def _late(
    fields: Json,
    folder: Path,
    name: str,
    spec: SentenceTransformers,
    dimensions: tuple[int, ...] | None,
    pooler: tuple[PoolingType | None, bool | None],
) -> EncoderChoice:
    """A model of token vectors: ColBERT's own checkpoints, with the product beside the encoder, or pylate's modules."""
    if pooler[0] is not None:
        raise ModelConfigError("--pooler-config: a model of token vectors pools no texts")
    late = spec.late
    assert late is not None
    dense = [stage.out_features for stage in spec.stages if isinstance(stage, DenseStage)]
    if spec.stages and not isinstance(spec.stages[-1], NormalizeStage):
        spec = msgspec.structs.replace(spec, stages=(*spec.stages, NormalizeStage("token")))
    try:
        size = dense[-1] if dense else _size(fields, spec, False) if spec.stages else colbert_size(folder)
    except WeightsError as error:
        raise ModelConfigError(str(error)) from None
    info = PoolingInfo(
        tasks=["token_embed"],
        pooling_type="MEAN",
        token_size=size,
        use_activation=True,
        is_matryoshka=dimensions is not None,
        matryoshka_dimensions=list(dimensions or ()),
        similarity_fn_name="maxsim",
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        is_whole=True,
        do_lower_case=spec.do_lower_case,
        late=late_interaction(late, folder),
    )
    return EncoderChoice(_without_head(name), info, "identity", spec, folder)


_OLD_NAMES: dict[str, Mode] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "lasttoken"}


def choose_two_way(
    fields: Json, folder: Path, family: str, pooler: tuple[PoolingType | None, bool | None], labels: bool = False
) -> EncoderChoice:
    """The choice for a decoder with two-way attention; family: its architecture. labels: it has a head of labels.

    Without files, by config.json's `pooling`, else the last token. Raises ModelConfigError.
    """
    named = fields.get("pooling", "last")
    if named not in _OLD_NAMES:
        raise ModelConfigError(f"config.json: pooling {named!r:.40} is not supported; supported are {', '.join(_OLD_NAMES)}")
    if labels:
        return _two_way_classifier(fields, folder, family, _OLD_NAMES[named], pooler)
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
    is_m3 = not is_sparse and all((folder / name).is_file() for name in M3_FILES)
    tasks: list[PoolingTask] = ["embed", "embed_sparse"] if is_sparse or is_m3 else ["embed"]
    info = PoolingInfo(
        tasks=tasks if is_sparse else [*tasks, "token_embed"],
        pooling_type=_type_of(plain),
        embedding_size=_size(fields, plain, is_sparse),
        use_activation=normalizes if pooler[1] is None else pooler[1],
        is_matryoshka=dimensions is not None,
        matryoshka_dimensions=list(dimensions or ()),
        similarity_fn_name=spec.similarity or ("dot" if is_sparse else "cosine"),
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        is_whole=True,
        skips_prompts=any(isinstance(stage, PoolingStage) and not stage.include_prompt for stage in plain.stages),
        do_lower_case=spec.do_lower_case,
        truncate_dim=0 if is_sparse else spec.truncate_dim or 0,
    )
    choice = EncoderChoice(name if is_sparse else _without_head(name), info, "identity", plain, folder)
    return choice._replace(m3=True, special_ids=unweighted(folder)) if is_m3 else choice


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


def _two_way_classifier(
    fields: Json, folder: Path, family: str, mode: Mode, pooler: tuple[PoolingType | None, bool | None]
) -> EncoderChoice:
    """mode: how a text's state is made of its tokens', by config.json."""
    choice = _classifier(fields, folder, str(fields["architectures"][0]), pooler)
    of_tokens = "token_classify" in choice.info.tasks
    has_bias = of_tokens or fields.get("score_bias") is True
    head = HeadSpec(kind="token" if of_tokens else "sequence", num_outputs=len(choice.info.labels), out_bias=has_bias)
    if not of_tokens:
        head = msgspec.structs.replace(head, pooling=cast(HeadPooling, mode))
    info = msgspec.structs.replace(choice.info, takes_types=False, pooling_type=_TYPES.get(mode, "LAST"))
    return choice._replace(architecture=family, info=info, head=head)


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
