"""`adapter_config.json` of a PEFT folder: which of its fields are used, which have no effect here, and which are refused.

The table names every field that PEFT 0.17 to 0.21 writes for LoRA. A field that it lacks may change what the adapter computes,
so it is refused unless it is null, false or empty. Ranks and alphas of single layers are chosen by regular expressions, as PEFT
matches them. The adapter's author writes these, so the caller must run this module in a child with a time limit.
"""

import math
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from quire.ipc.adapters import AdapterError

MAX_PATTERNS, MAX_PATTERN_CHARS = 4096, 256
MATCH_S = 0.1  # of CPU time, for all patterns and one layer; 4,096 plain ones take some milliseconds
MAX_RANK = 1 << 16  # of any pattern; the server's own limit is much lower
MAX_INVOCATION_TOKENS = 1024

USED = frozenset(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "alora_invocation_tokens",
        "base_model_name_or_path",
        "peft_version",
        "init_lora_weights",
    )
)
WITHOUT_EFFECT = frozenset(  # when an adapter is applied: its tensors say which layers it has
    (
        "task_type",
        "auto_mapping",
        "revision",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "lora_dropout",
        "fan_in_fan_out",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
    )
)
REFUSED_UNLESS: Mapping[str, tuple[object, ...]] = {  # these change what is computed: the values that leave it as it is
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
    "ensure_weight_tying": (False, None),
}
# PEFT changes the base's weights when it loads an adapter with one of these
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "lora_ga")


class Pattern(NamedTuple):
    regex: re.Pattern[str]
    value: float


class PeftConfig(NamedTuple):
    """The ranks and scales that an adapter's config gives its layers, and where it comes from."""

    rank: int
    alpha: float
    rank_patterns: list[Pattern]
    alpha_patterns: list[Pattern]
    is_rank_stabilized: bool
    base_model: str
    invocation_tokens: tuple[int, ...]
    peft_version: str

    def rank_of(self, layer: str) -> int:
        with _bounded("rank_pattern", self.rank_patterns):
            return int(_chosen(self.rank_patterns, layer, self.rank))

    def scale_of(self, layer: str, rank: int) -> float:
        """The factor of B A."""
        with _bounded("alpha_pattern", self.alpha_patterns):
            alpha = _chosen(self.alpha_patterns, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


@contextmanager
def _bounded(name: str, patterns: list[Pattern]) -> Iterator[None]:
    """End patterns that backtrack without end: `re` looks for signals while it matches. Only a main thread can have the timer;
    the caller's own time limit remains for all else."""
    if not patterns:
        yield
        return

    def late(*_: object) -> None:
        raise AdapterError(f"adapter_config.json: {name} has a regular expression that takes more than {MATCH_S:g} s to match")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _chosen(patterns: list[Pattern], layer: str, otherwise: float) -> float:
    """The value of the first pattern that matches at the layer's end, as in PEFT's `get_pattern_key`."""
    return next((pattern.value for pattern in patterns if pattern.regex.match(layer)), otherwise)


def parse_config(data: bytes) -> PeftConfig:
    """Raises AdapterError, which names the field."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"adapter_config.json is not a JSON object: {error}") from None
    if fields.get("peft_type") != "LORA":
        raise AdapterError(f"adapter_config.json: peft_type is {_shown(fields.get('peft_type'))}; only LORA is served")
    _refuse(fields)
    return PeftConfig(
        rank=_rank(fields.get("r", 8), "r"),
        alpha=_number(fields.get("lora_alpha", 8), "lora_alpha"),
        rank_patterns=_patterns(fields, "rank_pattern", _rank),
        alpha_patterns=_patterns(fields, "alpha_pattern", _number),
        is_rank_stabilized=_flag(fields, "use_rslora"),
        base_model=_text(fields, "base_model_name_or_path"),
        invocation_tokens=_tokens(fields.get("alora_invocation_tokens")),
        peft_version=_text(fields, "peft_version"),
    )


def _refuse(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name in USED or name in WITHOUT_EFFECT:
            continue
        if name in REFUSED_UNLESS:
            if not any(value is good or (type(value) is type(good) and value == good) for good in REFUSED_UNLESS[name]):
                raise AdapterError(f"adapter_config.json: {name} is {_shown(value)}, which is not supported")
        elif not (value is None or value is False or (isinstance(value, str | list | dict) and not value)):
            raise AdapterError(f"adapter_config.json: the field {_shown(name)} is not known, and it is {_shown(value)}")
    initialization = fields.get("init_lora_weights", True)
    if isinstance(initialization, bool) or initialization is None:
        return
    if not isinstance(initialization, str):
        raise AdapterError(f"adapter_config.json: init_lora_weights is {_shown(initialization)}, not a name")
    if initialization.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"adapter_config.json: init_lora_weights is {_shown(initialization)}, which changes the base model's weights: "
            "save the adapter with path_initial_model_for_weight_conversion"
        )
    if initialization.lower() not in PLAIN_INITIALIZATIONS:
        raise AdapterError(f"adapter_config.json: init_lora_weights is {_shown(initialization)}, which is not known")


def _patterns(fields: dict[str, Any], name: str, read: Any) -> list[Pattern]:
    entries = {} if fields.get(name) is None else fields[name]
    if not isinstance(entries, dict):
        raise AdapterError(f"adapter_config.json: {name} is {_shown(entries)}, not an object")
    if len(entries) > MAX_PATTERNS:
        raise AdapterError(f"adapter_config.json: {name} has {len(entries)} keys; at most {MAX_PATTERNS} are read")
    patterns = []
    for key, value in entries.items():
        if len(key) > MAX_PATTERN_CHARS:
            raise AdapterError(f"adapter_config.json: {name} has a key of more than {MAX_PATTERN_CHARS} characters")
        try:
            regex = re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(f"adapter_config.json: {name}: {_shown(key)} is not a regular expression: {error}") from None
        patterns.append(Pattern(regex, read(value, name)))
    return patterns


def _rank(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"adapter_config.json: {name} is {_shown(value)}, not a rank of 1 or more")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e30:
        raise AdapterError(f"adapter_config.json: {name} is {_shown(value)}, not a finite number")
    return float(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"adapter_config.json: {name} is {_shown(value)}, not true or false")
    return bool(value)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise AdapterError(f"adapter_config.json: {name} is {_shown(value)}, not a string")
    return value or ""


def _tokens(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_INVOCATION_TOKENS
    if isinstance(value, list) and is_list and all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        return tuple(value)
    most = f"1 to {MAX_INVOCATION_TOKENS} token ids"
    raise AdapterError(f"adapter_config.json: alora_invocation_tokens is {_shown(value)}, not a list of {most}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
