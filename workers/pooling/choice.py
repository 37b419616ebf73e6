"""The choice whether a decoder generates, pools, or does both; and how it pools.

`--runner` and `--convert` decide, as in vLLM; by `auto` an architecture's last word does, and a modules.json makes a causal
model an embedder. A generating model that is also converted (`--convert embed`) does both. Called by the worker, before
config.json is read by the family: fields about pooling are taken out, and the family's architecture replaces the given one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from quire.ipc.encoders import TWO_WAY_LLAMA, architecture_of, is_two_way
from quire.ipc.pooling import PoolingInfo, PoolingTask, PoolingType
from quire.workers.models.config import ModelConfigError, PoolingSpec
from quire.workers.models.encoders.table import ENCODERS
from quire.workers.pooling.encoder_choice import EncoderChoice, choose_encoder, choose_two_way
from quire.workers.pooling.label_tokens import label_tokens, step_tag
from quire.workers.pooling.labels import LabelActivation, label_activation, labels_of
from quire.workers.pooling.modules import Modules, read_modules
from quire.workers.pooling.sentence_transformers import DenseStage
from quire.workers.pooling.templates import QWEN3_RERANKER

Json = dict[str, Any]
Convert = Literal["none", "embed", "classify"]

CAUSAL = "ForCausalLM"
_ENDINGS: dict[str, tuple[Convert, bool]] = {  # of an architecture: what it is for, and whether its labels are of tokens
    "ForSequenceClassification": ("classify", False),
    "ForTokenClassification": ("classify", True),
    "ForRewardModel": ("classify", False),
    "ForProcessRewardModel": ("classify", True),
    "Model": ("embed", False),
}
# Fields of config.json that only this file reads.
_OWN_FIELDS = (
    "classifier_from_token", "method", "is_original_qwen3_reranker", "is_causal", "is_matryoshka", "matryoshka_dimensions",
    "sentence_transformers", "sbert_ce_default_activation_function", "classifier_dropout", "score_bias",
)  # fmt: skip
_POOLER = ("pooling_type", "seq_pooling_type", "tok_pooling_type", "use_activation", "normalize", "softmax", "activation")
REWARDS = ("ForRewardModel", "ForProcessRewardModel")  # a reward for a text, or for each step of it
_LONG = ("enable_chunked_processing", "max_embed_len")  # of texts that are longer than the context
MAX_EMBED_LEN = 1 << 22
_USES = ("use_activation", "normalize", "softmax", "activation")
_TYPES: tuple[PoolingType, ...] = ("CLS", "LAST", "MEAN")


class PoolingChoice(NamedTuple):
    """fields: config.json without the fields about pooling, for the family. spec, info: None if the model only generates."""

    fields: Json
    spec: PoolingSpec | None = None
    info: PoolingInfo | None = None
    activation: LabelActivation = "identity"
    encoder: EncoderChoice | None = None  # None: it is a decoder
    dense: tuple[DenseStage, ...] = ()  # of a decoder's vectors, behind their pooling
    poolings: tuple[PoolingType, ...] = ()  # of a decoder's vectors, side by side; empty: the info's
    folder: Path = Path()  # the checkpoint's


def choose_pooling(
    fields: Json, model_dir: Path, families: Mapping[str, object], *, runner: str, convert: str, pooler_config: Json
) -> PoolingChoice:
    """families: the architectures with a decoder here. runner, convert, pooler_config: the flags. Raises ModelConfigError."""
    name = architecture_of(fields)
    if name in ENCODERS:
        pooler = _given_pooler(pooler_config)
        found = choose_encoder(fields, model_dir, name, runner=runner, convert=convert, pooler=pooler)
        plain = {key: value for key, value in fields.items() if key not in _OWN_FIELDS} | {
            "architectures": [found.architecture]
        }
        return PoolingChoice(plain, PoolingSpec(), found.info, found.activation, found)
    family, kind, is_of_tokens = _by_architecture(name.replace(TWO_WAY_LLAMA, "Llama"), families)
    if family is not None and is_two_way(fields):
        return _two_way(fields, model_dir, family, runner, convert, pooler_config)
    if family is None:
        if runner == "pooling" or convert not in ("auto", "none"):
            raise ModelConfigError(f"--runner pooling: architecture {name!r:.80} has no decoder that can pool (docs/models.md)")
        return PoolingChoice(fields)
    modules = read_modules(model_dir)
    if runner == "auto":
        pools = kind != "none" or convert == "classify" or (modules is not None and convert == "auto")
        runner = "pooling" if pools else "generate"
    if convert == "auto":
        convert = "none" if runner == "generate" else kind if kind != "none" else "embed"
    if runner == "generate" and kind != "none":
        raise ModelConfigError(f"--runner generate: {name} has no head over the vocabulary; it can pool: --runner pooling")
    if convert == "none":
        if runner == "pooling":
            raise ModelConfigError(f"--convert none: {name} does not pool as it is; --convert embed makes it an embedder")
        return PoolingChoice(fields)
    plain = {key: value for key, value in fields.items() if key not in _OWN_FIELDS} | {"architectures": [family]}
    if convert == "classify":
        return _classifier(fields, plain, model_dir, runner, pooler_config, is_of_tokens)
    return _embedder(fields, plain, model_dir, modules or Modules(), runner, pooler_config)


def _two_way(fields: Json, model_dir: Path, family: str, runner: str, convert: str, pooler_config: Json) -> PoolingChoice:
    """A decoder with two-way attention: it makes vectors, or scores of labels."""
    has_labels = str(fields["architectures"][0]).endswith(("ForSequenceClassification", "ForTokenClassification"))
    if runner == "generate" or convert not in ("auto", "embed", *(("classify",) if has_labels else ())):
        raise ModelConfigError("config.json: is_causal false: such a model makes vectors: --runner pooling, --convert embed")
    labels = has_labels and convert != "embed"
    found = choose_two_way(fields, model_dir, family, _given_pooler(pooler_config), labels)
    own = (*_OWN_FIELDS, "pooling")
    plain = {key: value for key, value in fields.items() if key not in own} | {"architectures": [family]}
    return PoolingChoice(plain, PoolingSpec(), found.info, found.activation, found)


def _given_pooler(config: Json) -> tuple[PoolingType | None, bool | None]:
    """--pooler-config's type and use_activation, as far as it names them."""
    kind, use = _pooler(config, "LAST", True)
    return kind if _names_type(config) else None, use if _names_use(config) else None


def _by_architecture(name: str, families: Mapping[str, object]) -> tuple[str | None, Convert, bool]:
    """(the family's architecture, what this one is for, whether its labels are of tokens)."""
    if name in families:
        return name, "none", False
    for ending, (kind, is_of_tokens) in _ENDINGS.items():
        if name.endswith(ending) and (family := name.removesuffix(ending) + CAUSAL) in families:
            return family, kind, is_of_tokens
    return None, "none", False


def _embedder(fields: Json, plain: Json, model_dir: Path, modules: Modules, runner: str, pooler_config: Json) -> PoolingChoice:
    dimensions = fields.get("matryoshka_dimensions") or []
    poolings = (*sorted(modules.poolings, key=lambda kind: kind == "LAST"), "LAST")[:1]  # one that needs all tokens first
    pooling_type, use = _pooler(pooler_config, poolings[0], True)
    poolings = (pooling_type,) if _names_type(pooler_config) or not modules.poolings else modules.poolings
    if modules.poolings and not modules.normalizes:
        use = pooler_config.get("use_activation", pooler_config.get("normalize", False)) is True
    info = PoolingInfo(
        tasks=["embed", "token_embed"],
        pooling_type=pooling_type,
        generates=runner == "generate",
        embedding_size=modules.dense[-1].out_features if modules.dense else len(poolings) * _size(fields),
        token_size=_size(fields),
        use_activation=use,
        is_matryoshka=bool(dimensions) or fields.get("is_matryoshka") is True,
        matryoshka_dimensions=[int(n) for n in dimensions] if isinstance(dimensions, list) else [],
        similarity_fn_name=modules.similarity_fn_name,
        prompts=modules.prompts,
        default_prompt_name=modules.default_prompt_name,
        skips_prompts=not modules.include_prompt and pooling_type != "LAST",
        truncate_dim=modules.truncate_dim,
    )
    spec = PoolingSpec(generates=runner == "generate")
    return PoolingChoice(plain, spec, info, dense=modules.dense, folder=model_dir, poolings=poolings)


def _classifier(
    fields: Json, plain: Json, model_dir: Path, runner: str, pooler_config: Json, is_of_tokens: bool
) -> PoolingChoice:
    if runner == "generate":
        raise ModelConfigError("--convert classify: a model that generates cannot classify, too; write --runner pooling")
    name = str((fields.get("architectures") or [""])[0])
    is_reward = name.endswith(REWARDS)
    tokens, is_difference = ((), False) if is_reward else label_tokens(fields, model_dir)
    if not tokens and plain["architectures"] == fields.get("architectures"):
        raise ModelConfigError(
            "--convert classify: the checkpoint has no head of labels; classifier_from_token in --hf-overrides names "
            "two tokens; their logits are the scores"
        )
    labels = ["LABEL_0"] if is_difference else [f"LABEL_{i}" for i in range(len(tokens))] if tokens else labels_of(fields)
    if name.endswith(REWARDS[0]):
        labels = labels_of({"num_labels": 1, **fields})[:1]
    steps = step_tag(pooler_config, model_dir) if name.endswith(REWARDS[1]) else -1
    pooler = {key: value for key, value in pooler_config.items() if key != "step_tag_id" or not name.endswith(REWARDS[1])}
    pooling_type, use = _pooler(pooler, "LAST", not name.endswith(REWARDS[0]))
    if pooling_type != "LAST" and not is_of_tokens:
        raise ModelConfigError(f"--pooler-config: a decoder's scores are of its LAST token, not {pooling_type}")
    tasks: list[PoolingTask] = ["token_classify"] if is_of_tokens else ["classify", "token_classify"]
    info = PoolingInfo(
        tasks=tasks,
        pooling_type="LAST",
        labels=labels,
        use_activation=use,
        score_template=QWEN3_RERANKER if fields.get("is_original_qwen3_reranker") is True else None,
        step_tag_id=steps,
    )
    has_bias = (is_of_tokens or fields.get("score_bias") is True) and not tokens
    spec = PoolingSpec(num_labels=len(labels), has_bias=has_bias, label_tokens=tokens, is_difference=is_difference)
    spec = msgspec.structs.replace(spec, is_reward=is_reward)
    return PoolingChoice(plain, spec, info, label_activation(fields, len(labels)))


def _size(fields: Json) -> int:
    value = fields.get("hidden_size")
    return value if isinstance(value, int) else 0


def _names_type(config: Json) -> bool:
    return any(config.get(name) is not None for name in ("pooling_type", "seq_pooling_type"))


def _names_use(config: Json) -> bool:
    return any(config.get(name) is not None for name in _USES)


def max_embed_len(config: Json, info: PoolingInfo) -> int:
    """--pooler-config's limit of texts that get their parts' mean vector; 0: there are none. Raises ModelConfigError."""
    is_on, most = config.get("enable_chunked_processing"), config.get("max_embed_len")
    if not is_on and most is None:
        return 0
    if is_on is not True or type(most) is not int or not 1 <= most <= MAX_EMBED_LEN:
        raise ModelConfigError(
            "--pooler-config: longer texts than the context need enable_chunked_processing: true and max_embed_len, "
            f"a number of tokens up to {MAX_EMBED_LEN}"
        )
    if "embed" not in info.tasks:
        raise ModelConfigError("--pooler-config: enable_chunked_processing is of a model that makes vectors of texts")
    return most


def _pooler(config: Json, default: PoolingType, use: bool) -> tuple[PoolingType, bool]:
    """--pooler-config as (pooling type, whether its activation or normalization is used)."""
    for name, value in config.items():
        if name not in (*_POOLER, *_LONG) and value is not None:
            known = ", ".join((*_POOLER, *_LONG))
            raise ModelConfigError(f"--pooler-config: {name} is not supported; supported are {known}")
    if str(config.get("tok_pooling_type") or "ALL").upper() != "ALL":
        raise ModelConfigError("--pooler-config: tok_pooling_type is ALL")
    found = str(config.get("seq_pooling_type") or config.get("pooling_type") or default).upper()
    for known in (*_TYPES, default):
        if found == known:
            flags = [config[name] for name in _USES if config.get(name) is not None]
            if not all(isinstance(value, bool) for value in flags):
                raise ModelConfigError("--pooler-config: use_activation must be true or false")
            return known, flags[0] if flags else use
    raise ModelConfigError(
        f"--pooler-config: seq_pooling_type {found!r:.40} is not supported; supported are {', '.join(_TYPES)}"
    )
