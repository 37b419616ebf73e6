"""sentence-transformers' files beside a checkpoint: modules.json, the modules' configs, prompts and lengths. No weights.

A folder's modules are read into stages (`Stage`), which poolers.py runs: pooling, dense layers, norms to length 1, SPLADE's
pooling. A field that is not known, and so might change a vector, is refused. Formats: sentence-transformers 2 to 5, pylate.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Json = dict[str, Any]
Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Unit = Literal["text", "token"]  # what a stage works on: a vector of each text, or of each token

MODES: tuple[Mode, ...] = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# the flags of older configs, in the order in which several results stand side by side
FLAGS: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# the last part of a class of torch.nn -> our name of the activation
ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid"}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan", "maxsim")
UNITS: dict[str, Unit] = {"sentence_embedding": "text", "token_embeddings": "token"}
TRANSFORMERS = ("Transformer", "MLMTransformer")
PUNCTUATION = tuple("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
PACKAGES = ("sentence_transformers.", "pylate.")


class PoolingConfigError(ValueError):
    """The files ask for what is not served or cannot be read; the text, for the user, names the file and the field."""


class PoolingStage(msgspec.Struct, frozen=True, tag=True):
    """A vector of each text: of its tokens, of several kinds side by side."""

    modes: tuple[Mode, ...]
    include_prompt: bool = True  # False: the tokens of the prompt do not count


class DenseStage(msgspec.Struct, frozen=True, tag=True):
    """activation(x Wᵀ + b), of each text or token."""

    folder: str  # with the weights
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    unit: Unit = "text"
    has_residual: bool = False  # adds x, through a product without a bias if the sizes differ


class NormalizeStage(msgspec.Struct, frozen=True, tag=True):
    """x / |x|, of each text or token."""

    unit: Unit = "text"


class SpladeStage(msgspec.Struct, frozen=True, tag=True):
    """log(1 + relu(x)) of a text's logits, its tokens' maximum or sum; times: how often the logarithm is taken."""

    strategy: Literal["max", "sum"] = "max"
    times: int = 1


Stage = PoolingStage | DenseStage | NormalizeStage | SpladeStage


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between token vectors of queries and of documents: ColBERT's (arXiv:2004.12832) and pylate's settings."""

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32  # tokens of a query, to which it is filled with [MASK] if it `expands`
    document_length: int | None = None
    expands: bool = True
    attends_to_expansion: bool = False  # whether the query's other tokens see those that fill it
    skiplist: tuple[str, ...] = ()  # words of documents without a vector


class SentenceTransformers(msgspec.Struct, frozen=True, kw_only=True):
    """All that the files say."""

    stages: tuple[Stage, ...]
    takes_logits: bool = False  # of a masked language model; False: hidden states
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    max_seq_length: int | None = None  # in tokens, a prompt's and special ones included
    do_lower_case: bool = False
    similarity: str | None = None
    truncate_dim: int | None = None
    late: LateInteraction | None = None

    @property
    def normalizes(self) -> bool:
        return any(isinstance(stage, NormalizeStage) and stage.unit == "text" for stage in self.stages)


def read_sentence_transformers(folder: Path) -> SentenceTransformers | None:
    """The settings in a checkpoint's folder; None if it has no modules.json. Raises PoolingConfigError."""
    modules = _read(folder / "modules.json", list)
    if modules is None:
        return None
    stages: list[Stage] = []
    transformer, late, takes_logits = Path(), False, False
    for number, module in enumerate(modules):
        kind, path, is_pylate = _kind(module, number)
        if kind in TRANSFORMERS:
            if number:
                raise PoolingConfigError(f"modules.json: module {number} is a {kind}: only the first may be one")
            transformer, takes_logits = Path(path), kind == "MLMTransformer"
        elif kind in ("MultiVectorMask", "ColBERT"):
            late = True
        elif number == 0:
            raise PoolingConfigError(f"modules.json: the first module is a {kind}: only a Transformer is supported")
        else:
            stages.append(_stage(kind, path, folder, "token" if is_pylate else "text"))
        late |= is_pylate
    config = _read(folder / "config_sentence_transformers.json", dict) or {}
    lengths = _lengths(folder / transformer)
    is_late = late or "query_prefix" in config or config.get("similarity_fn_name") in ("MaxSim", "maxsim")
    return SentenceTransformers(
        stages=tuple(stages),
        takes_logits=takes_logits or lengths.get("transformer_task") == "fill-mask",
        max_seq_length=_size(lengths, "max_seq_length", "sentence_bert_config.json"),
        do_lower_case=lengths.get("do_lower_case") is True,
        late=_late(folder, config, lengths) if is_late else None,
        **_of_model(config),
    )


def matryoshka_dimensions(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The sizes to which vectors may be cut, by config.json: () for any, None if the model was not trained for it."""
    sizes = fields.get("matryoshka_dimensions")
    if sizes is None:
        return () if fields.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not sizes or any(type(n) is not int or n < 1 for n in sizes):
        raise PoolingConfigError(f"config.json: matryoshka_dimensions must list positive integers, not {sizes!r:.80}")
    return tuple(sizes)


# ------------------------------------------------------------------------------------------------------------- modules
def _kind(module: object, number: int) -> tuple[str, str, bool]:
    """The class of a module of modules.json, its folder, and whether it is pylate's."""
    if not isinstance(module, dict) or not isinstance(module.get("type"), str) or not isinstance(module.get("path"), str):
        raise PoolingConfigError(f"modules.json: module {number} has no type or no path")
    name, path = module["type"], module["path"]
    is_own_transformer = number == 0 and name.endswith(".Transformer")  # as custom_st.Transformer of jina-embeddings-v3
    if not name.startswith(PACKAGES) and not is_own_transformer:
        raise PoolingConfigError(f"modules.json: module {number} is a {name!r:.80}: only sentence-transformers' are supported")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise PoolingConfigError(f"modules.json: the path {path!r:.80} leaves the folder")
    return name.rpartition(".")[2], path, name.startswith("pylate.")


def _stage(kind: str, path: str, folder: Path, unit: Unit) -> Stage:
    """unit: what the module works on if its config does not say."""
    file = f"{path}/config.json"
    config = _read(folder / file, dict) or {}
    if kind == "Pooling":
        return read_pooling(config, file)
    if kind == "Dense":
        return read_dense(config, file, path, unit)
    if kind == "Normalize":
        _known(config, file, "module_input_name module_output_name")
        return NormalizeStage(_unit(config, file, unit))
    if kind == "SpladePooling":
        return _splade(config, file)
    raise PoolingConfigError(f"modules.json: a module of type {kind!r:.80} is not supported")


def read_pooling(config: Json, file: str) -> PoolingStage:
    """A pooling by its config.json. Raises PoolingConfigError."""
    _known(config, file, "word_embedding_dimension embedding_dimension include_prompt pooling_mode", *FLAGS)
    given = config.get("pooling_mode")
    if given is None:
        default = [] if config.get("pooling_mode_mean_tokens") is False else ["mean"]
        modes: Any = [mode for name, mode in FLAGS.items() if config.get(name) is True] or default
    else:
        modes = [given] if isinstance(given, str) else given
    if not isinstance(modes, list) or not modes or any(mode not in MODES for mode in modes):
        what = f"pooling_mode {given!r:.80}" if modes else "no pooling"
        raise PoolingConfigError(f"{file}: {what} is not supported; supported are {', '.join(MODES)}")
    return PoolingStage(tuple(modes), config.get("include_prompt") is not False)


def read_dense(config: Json, file: str, path: str, unit: Unit) -> DenseStage:
    """A dense layer by its config.json. Raises PoolingConfigError."""
    _known(config, file, "in_features out_features bias activation_function module_input_name module_output_name use_residual")
    name = str(config.get("activation_function") or "torch.nn.modules.linear.Identity")
    kind = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise PoolingConfigError(
            f"{file}: activation_function {name!r:.80} is not supported; supported of torch.nn are {known}"
        )
    sizes = [_size(config, side, file) for side in ("in_features", "out_features")]
    if sizes[0] is None or sizes[1] is None:
        raise PoolingConfigError(f"{file} lacks in_features or out_features")
    has_bias, adds = config.get("bias") is not False, config.get("use_residual") is True
    return DenseStage(path, sizes[0], sizes[1], has_bias, ACTIVATIONS[kind], _unit(config, file, unit), adds)


def _splade(config: Json, file: str) -> SpladeStage:
    _known(config, file, "pooling_strategy activation_function word_embedding_dimension embedding_dimension chunk_size")
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise PoolingConfigError(
            f"{file}: pooling_strategy {strategy!r:.40}, activation_function {activation!r:.40}: not supported"
        )
    return SpladeStage(strategy, 2 if activation == "log1p_relu" else 1)


def _unit(config: Json, file: str, default: Unit) -> Unit:
    given = config.get("module_input_name")
    if given is None:
        return default
    if given not in UNITS or config.get("module_output_name", given) not in (given, None):
        raise PoolingConfigError(f"{file}: module_input_name and module_output_name must both be one of {', '.join(UNITS)}")
    return UNITS[given]


# ------------------------------------------------------------------------------------------------- the model's settings
def _of_model(config: Json) -> Json:
    """Prompts and similarity in config_sentence_transformers.json."""
    file = "config_sentence_transformers.json"
    _known(config, file, *_OF_MODEL, *_LATE)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or any(not isinstance(text, str | None) for text in prompts.values()):
        raise PoolingConfigError(f"{file}: prompts must be an object of texts")
    prompts = {name: text for name, text in prompts.items() if text is not None}
    if default is not None and default not in prompts:
        raise PoolingConfigError(f"{file}: default_prompt_name {default!r:.80} is not among the prompts")
    similarity = config.get("similarity_fn_name")
    if similarity is not None and str(similarity).lower() not in SIMILARITIES:
        raise PoolingConfigError(f"{file}: similarity_fn_name {similarity!r:.40} is not supported")
    return {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity": None if similarity is None else str(similarity).lower(),
        "truncate_dim": _size(config, "truncate_dim", file),
    }


_LENGTH_FILES = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def _lengths(folder: Path) -> Json:
    """The Transformer module's own settings."""
    for name in _LENGTH_FILES:
        found = _read(folder / name, dict)
        if found is None:
            continue
        _known(found, name, *_OF_TRANSFORMER)
        return found
    return {}


# pylate's settings, beside the model's
_LATE = (
    "query_prefix document_prefix query_length document_length skiplist_words",
    "attend_to_expansion_tokens do_query_expansion attend_to_mask_tokens",
)
_OF_MODEL = (
    "__version__ model_type prompts default_prompt_name similarity_fn_name truncate_dim",
    "max_active_dims router_mapping",
)
_OF_TRANSFORMER = (
    "max_seq_length do_lower_case transformer_task modality_config module_output_name unpad_inputs",
    "model_args config_args tokenizer_args processor_args model_kwargs config_kwargs processor_kwargs",
    "processing_kwargs query_length document_length query_expansion track_media_counts",
)


def _late(folder: Path, config: Json, lengths: Json) -> LateInteraction:
    words = config.get("skiplist_words") or []
    if not isinstance(words, list) or any(not isinstance(word, str) for word in words):
        raise PoolingConfigError("config_sentence_transformers.json: skiplist_words must be a list of words")
    both = {**config, **{name: value for name, value in lengths.items() if name in ("query_length", "document_length")}}
    return LateInteraction(
        query_prefix=str(config.get("query_prefix", "[Q] ")),
        document_prefix=str(config.get("document_prefix", "[D] ")),
        query_length=_size(both, "query_length", str(folder)) or 32,
        document_length=_size(both, "document_length", str(folder)),
        expands=config.get("do_query_expansion") is not False,
        attends_to_expansion=config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens")) is True,
        skiplist=tuple(words),
    )


def read_stanford_colbert(folder: Path) -> LateInteraction | None:
    """The settings of a checkpoint of ColBERT's own code, in artifact.metadata; None if the folder has no such file."""
    found = _read(folder / "artifact.metadata", dict)
    if found is None:
        return None
    return LateInteraction(
        query_prefix=str(found.get("query_token_id", "[unused0]")),
        document_prefix=str(found.get("doc_token_id", "[unused1]")),
        query_length=_size(found, "query_maxlen", "artifact.metadata") or 32,
        document_length=_size(found, "doc_maxlen", "artifact.metadata"),
        attends_to_expansion=found.get("attend_to_mask_tokens") is True,
        skiplist=PUNCTUATION if found.get("mask_punctuation", True) else (),
    )


# --------------------------------------------------------------------------------------------------------------- files
def _read(path: Path, kind: type) -> Any:
    """The JSON of a file; None without the file."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise PoolingConfigError(f"{path.name} cannot be read as JSON: {error}") from None
    if not isinstance(found, kind):
        raise PoolingConfigError(f"{path.name} is not a JSON {'list' if kind is list else 'object'}")
    return found


def _known(config: Json, file: str, *names: str) -> None:
    """Raise for fields that are none of these words."""
    known = {word for line in names for word in line.split()}
    if unknown := sorted(name for name, value in config.items() if name not in known and value is not None):
        raise PoolingConfigError(f"{file} sets {', '.join(unknown)}: not known, so vectors might be wrong")


def _size(config: Json, name: str, file: str) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise PoolingConfigError(f"{file}: {name} must be a positive integer, not {value!r:.60}")
    return value
