"""The keys of --speculative-config, which are vLLM's: what they may say, and which of them are refused, each with a reason.

`speculation_of` makes a SpeculativeConfig of them, for the flags (config.py) and for the options of `LLM`.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.ipc import quantization as quantizations
from quire.ipc.speculative_config import BUNDLED_DRAFTS, MAX_NGRAM, MAX_SPECULATIVE_TOKENS, MODEL_DRAFTS, SpeculativeConfig
from quire.ipc.unknown_names import what_to_write

FLAG = "--speculative-config"
Method = Literal["ngram", "draft_model", "eagle3", "mtp"]
_NGRAM = ("ngram", "[ngram]", "ngram_gpu")
_USE = '{"method": "ngram"}, "draft_model", "eagle3" and "mtp" are'
_YET = "is not served yet; " + _USE
_NOT_HERE = "is not served; " + _USE
METHODS = {  # vLLM's methods that are not served
    "eagle": _YET,
    **dict.fromkeys(("dflash", "dspark", "suffix", "medusa", "mlp_speculator", "extract_hidden_states"), _NOT_HERE),
    "custom_class": "is not served, as no code of others is loaded; " + _USE,
}
_DRAFT_MODEL = "is a key of draft models, and ngram has none: leave it out"
_OF_DRAFT_MODELS = ("max_model_len", "quantization", "revision")
_OF_OTHER_FOLDERS = "is a key of models with a folder of their own, and mtp is a part of the model: leave it out"
_OF_NGRAM = ("prompt_lookup_min", "prompt_lookup_max")
_NGRAMS = "is a key of n-grams, and the method is another: leave it out"
_AS_THE_MODEL = "is no key of it: a draft model is run like the model, with its type, kernels and GPUs"
_NO_EFFECT = ("enforce_eager", "disable_logprobs", "disable_log_stats")
_OTHER_KEYS = {  # each with the reason why it is refused, unless its value is None or False
    **dict.fromkeys(
        (
            "draft_tensor_parallel_size",
            "tensor_parallel_size",
            "moe_backend",
            "attention_backend",
            "kv_cache_dtype",
            "draft_load_config",
            "use_local_argmax_reduction",
            "disable_padded_drafter_batch",
        ),
        _AS_THE_MODEL,
    ),
    "code_revision": "is no key of it, as no code of others is loaded",
    "draft_sample_method": "is no key of it: drafts are drawn with a request's own parameters and noise",
    "use_heterogeneous_vocab": "is not served: a draft model has the model's tokenizer",
    **dict.fromkeys(
        ("disable_eagle_block_drop", "index_share_for_mtp_iteration", "dspark_draft_topk"),
        "is a key of a method that is not served; " + _USE,
    ),
    "parallel_drafting": "(PARD, P-EAGLE) is not served; " + _USE,
    "speculative_token_tree": "is not served, as drafts are chains and no trees",
    **dict.fromkeys(
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "is a key of suffix decoding, which is not served; " + _USE,
    ),
    **dict.fromkeys(
        ("acceptance_method", "draft_token_acceptance_method", "posterior_threshold", "posterior_alpha"),
        "is a key of older versions; drafts are accepted in one way, which changes no answer",
    ),
}
_ACCEPTED = {"standard": False, "strict": False, "probabilistic": False, "synthetic": True}  # is it the synthetic one?


class _Given(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys that mean something here, as they are written."""

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    enable_adaptive_verification: bool | None = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    disable_by_batch_size: int | None = None
    rejection_sample_method: str | None = None
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None


def speculation_of(given: Any) -> SpeculativeConfig | None:
    """The settings that a mapping of vLLM's keys asks for; None, and a SpeculativeConfig, are returned as they are.

    Raises ValueError, which begins with the flag's name and names the key, for what can never work or is not served.
    """
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f'{FLAG}: an object with vLLM\'s keys is needed, like {{"method": "ngram"}}')
    try:
        return _config_of(*_known(given))
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None


def _known(given: Mapping[str, Any]) -> tuple[Method, _Given]:
    """The method, and the keys with a meaning, with values of the right types. Raises ValueError."""
    left = dict(given)
    for key, value in given.items():
        if key in _NO_EFFECT or (key in _OTHER_KEYS and value in (None, False)):
            del left[key]
    known = _Given.__struct_fields__
    for key in left:
        if key not in known and key not in _OTHER_KEYS:
            raise ValueError(f"there is no key {key!r}; {what_to_write(key, (*known, *_OTHER_KEYS))}")
    method = _method(left)
    others = dict.fromkeys(_OF_DRAFT_MODELS, _DRAFT_MODEL) if method == "ngram" else dict.fromkeys(_OF_NGRAM, _NGRAMS)
    if method == "mtp":
        others |= dict.fromkeys(("quantization", "revision"), _OF_OTHER_FOLDERS)
    for key, value in left.items():
        if key not in known or (key in others and value is not None):
            raise ValueError(f"{key}={value!r:.80} {(_OTHER_KEYS | others)[key]}")
    try:
        return method, msgspec.convert(left, _Given)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise ValueError(f"{path.rstrip('`')}: {what[:1].lower()}{what[1:]}".replace("`", "")) from None


def _method(given: Mapping[str, Any]) -> Method:
    """The method that the keys name, or that their model is for. Raises ValueError if it is not served."""
    method, model = given.get("method"), given.get("model")
    if method is None and model not in (None, *_NGRAM):
        method = method_of(str(model))
        said = f"method {method!r}, which model {str(model)!r:.80} is for,"
    elif method is None and model is None and not any(given.get(key) for key in _OF_NGRAM):
        if not given.get("num_speculative_tokens"):
            raise ValueError('name a method, like {"method": "ngram"}, or the model that drafts')
        return "mtp"  # as in vLLM, a number alone asks for what the model itself has
    elif method is None:
        return "ngram"
    else:
        said = f"method {method!r:.80}"
    if method in _NGRAM:
        if model not in (None, *_NGRAM):
            raise ValueError(f"model {str(model)!r:.80} contradicts method ngram, which drafts without a model")
        return "ngram"
    if method == "draft_model" or method == "eagle3":
        return "eagle3" if method == "eagle3" else "draft_model"
    if method == "mtp" or str(method).endswith("_mtp"):  # older versions have a name for each family
        return "mtp"
    if (reason := METHODS.get(method)) is None:
        known = ("ngram", "draft_model", "eagle3", "mtp", *METHODS)
        raise ValueError(f"there is no method {method!r:.80}; {what_to_write(str(method), known)}")
    raise ValueError(f"{said} {reason}")


def method_of(model: str) -> str:
    """vLLM's name of the method that a drafter is for: by its config.json if it is a folder, else by its name."""
    config = _config_json(model)
    kind = str(config.get("model_type", ""))
    if kind in ("medusa", "mlp_speculator") or kind.endswith("_mtp"):
        return "mtp" if kind.endswith("_mtp") else kind
    said = config.get("speculators_model_type") or config.get("architectures")
    words = f"{said or Path(model).name}".lower()
    return next((name for name in ("dflash", "dspark", "eagle3", "eagle", "medusa") if name in words), "draft_model")


def _config_json(model: str) -> dict[str, Any]:
    """The config.json of a folder; {} for a hub id, and for a file that cannot be read, which the start refuses later."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _drafts_of(model: str | None) -> int:
    """The number of drafts that a checkpoint of the speculators library was made for, or that of any other model."""
    if not model:
        return BUNDLED_DRAFTS
    said: Any = _config_json(model).get("speculators_config")
    ways = said.get("proposal_methods") if isinstance(said, dict) else None
    counts = [way.get("speculative_tokens") for way in ways if isinstance(way, dict)] if isinstance(ways, list) else []
    return next((count for count in counts if type(count) is int and count >= 1), MODEL_DRAFTS)


def _config_of(method: Method, given: _Given) -> SpeculativeConfig:
    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(what)

    own = {"mtp": 1, "ngram": MAX_SPECULATIVE_TOKENS}.get(method) or _drafts_of(given.model)
    asked = given.num_speculative_tokens or own
    need(given.num_speculative_tokens != 0 and asked >= 1, "num_speculative_tokens must be at least 1")
    drafts = min(asked, MAX_SPECULATIVE_TOKENS)
    shortest, longest = given.prompt_lookup_min, given.prompt_lookup_max
    if shortest is None:
        shortest = 5 if longest is None else longest
    if longest is None:
        longest = shortest
    need(shortest >= 1, f"prompt_lookup_min must be at least 1, not {shortest}")
    need(longest <= MAX_NGRAM, f"prompt_lookup_max must be at most {MAX_NGRAM}, not {longest}")
    need(shortest <= longest, f"prompt_lookup_min ({shortest}) must not be above prompt_lookup_max ({longest})")
    need(given.max_model_len is None or given.max_model_len >= 1, "max_model_len must be at least 1")
    names = quantizations.NAMES
    need(
        given.quantization in (None, *names), f"quantization must be one of {', '.join(names)}, not {given.quantization!r:.40}"
    )
    need(given.disable_by_batch_size is None or given.disable_by_batch_size >= 1, "disable_by_batch_size must be at least 1")
    ranges = given.num_speculative_tokens_per_batch_size or []
    key = "num_speculative_tokens_per_batch_size"
    need(not ranges or ranges[0][0] == 1, f"{key}: the first range begins at 1")
    need(all(1 <= first <= last and most >= 0 for first, last, most in ranges), f"{key} is [[first, last, most drafts], ...]")
    need(all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), f"{key}: ranges rise and do not overlap")
    return SpeculativeConfig(
        method=method,
        model=None if method == "ngram" else given.model or None,
        revision=given.revision,
        quantization=given.quantization,
        max_model_len=given.max_model_len,
        num_speculative_tokens=drafts,
        asked_tokens=asked if asked > drafts else None,
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        enable_adaptive_verification=given.enable_adaptive_verification is not False,
        num_speculative_tokens_per_batch_size=ranges,
        disable_by_batch_size=given.disable_by_batch_size,
        synthetic_acceptance_rates=_synthetic_rates(given, asked)[:drafts],
    )


def _synthetic_rates(given: _Given, drafts: int) -> list[float]:
    """The unconditional rates by place; [] if drafts are accepted for what they are. Raises ValueError."""
    way, rates, length = given.rejection_sample_method, given.synthetic_acceptance_rates, given.synthetic_acceptance_length
    if way is not None and way not in _ACCEPTED:
        raise ValueError(f"rejection_sample_method {way!r:.40} is not served; there are standard and synthetic")
    if not _ACCEPTED[way or "standard"]:
        if rates is not None or length is not None:
            name = "synthetic_acceptance_rates" if rates is not None else "synthetic_acceptance_length"
            raise ValueError(f'{name} needs {{"rejection_sample_method": "synthetic"}}')
        return []
    if (rates is None) == (length is None):
        raise ValueError("rejection_sample_method synthetic needs synthetic_acceptance_rates or ..._length, and not both")
    if length is not None:  # as many places as its whole part are always accepted, the next one with the rest as probability
        if not 1.0 <= length <= drafts + 1:
            raise ValueError(f"synthetic_acceptance_length must be between 1 and {drafts + 1}")
        return [min(max(length - 1.0 - place, 0.0), 1.0) for place in range(drafts)]
    assert rates is not None
    if len(rates) != drafts or not all(0.0 <= b <= a <= 1.0 for a, b in zip([1.0, *rates], rates, strict=False)):
        raise ValueError(
            f"synthetic_acceptance_rates must be {drafts} numbers (num_speculative_tokens) between 0 and 1, none above the one "
            "before it"
        )
    return rates
