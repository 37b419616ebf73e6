"""SamplingParams: the sampling options of a request, with vLLM's names and defaults, and the one table of bounds.

A Python user builds this struct, it travels from a frontend to the core, and the core reads it.
Bounds that depend on the value alone are checked when the struct is made, also when it is decoded from a message, and when one
of its fields is set, which scripts for vLLM do and our code does not. Bounds that depend on the engine (vocabulary, context,
caps) are checked by `check_against`, in the frontend and again in the core.
"""

import enum
import math
import numbers
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import msgspec

from quire.ipc.step.sections import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from quire.ipc.struct_errors import StructErrors, check_elsewhere, is_elsewhere, no_field, other_field
from quire.ipc.structured_outputs import StructuredOutputs, check_grammar
from quire.ipc.structured_outputs_params import StructuredOutputsParams

SAMPLING_EPS = 1e-5  # a temperature below this means greedy
MIN_TEMPERATURE = 1e-2  # a positive temperature below this is raised to it, as in vLLM: fp32 logits / T overflow below

MAX_N = 128
ALL_LOGPROBS = -1  # as many as the engine's max_logprobs
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 240  # plus at most 16 end-of-sequence ids of the model: MAX_MASKED_STOPS
MAX_REASONING_END_IDS = 16
MAX_EXTRA_ARGS = 64  # names
MAX_EXTRA_ARGS_BYTES = 16 << 10  # as JSON
_MAY_QUOTE = {
    "stop",
    "bad_words",
    "bad_words_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "extra_args",
}  # fields that may quote a text of the user's

# name: (lowest, highest, whether the lowest itself is allowed); None = no limit on that side. NaN and infinity never pass.
BOUNDS: dict[str, tuple[float | None, float | None, bool]] = {
    "n": (1, MAX_N, True),
    "temperature": (0.0, None, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, None, True),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, None, False),
    "seed": (-(2**63), 2**63 - 1, True),
    "max_tokens": (1, None, True),
    "min_tokens": (0, 2**31 - 1, True),
    "logprobs": (ALL_LOGPROBS, MAX_LOGPROBS, True),
    "prompt_logprobs": (ALL_LOGPROBS, MAX_LOGPROBS, True),
    "thinking_token_budget": (0, 2**31 - 1, True),
}

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # fields of generation_config.json

# A user may set either; only StructuredOutputs travels and is decoded. The client converts (frontend/client/client.py).
if TYPE_CHECKING:
    _WantedOutput = StructuredOutputs | StructuredOutputsParams
else:
    _WantedOutput = StructuredOutputs
_OUTPUT_KINDS = (StructuredOutputs, StructuredOutputsParams)


class RequestOutputKind(enum.Enum):
    """The content of each output of a running request: the whole text so far, only the new part, or one output at the end.

    Python's clients read it. The core reads it to decide how long a step with prompts may delay a token.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(enum.IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class SamplingParams(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True, metaclass=StructErrors):
    """How to sample one request. Names, defaults and meaning are vLLM's.

    n: completions per prompt (1 to 128). temperature: 0 is greedy. top_p in (0, 1]; top_k: -1 or 0 means all; min_p in [0, 1].
    presence_penalty, frequency_penalty in [-2, 2], over output tokens; repetition_penalty > 0, over prompt and output.
    seed: None, or -1, draws one; the same seed gives the same noise at the same position, whatever runs beside it.
    stop: strings that end the text (cut from it unless include_stop_str_in_output). stop_token_ids: ids that end it.
    ignore_eos: go on past the model's end-of-sequence ids. max_tokens: None means as many as fit into the context (the HTTP
    routes and `LLM` set 16 where OpenAI's and vLLM's defaults are 16). min_tokens: no stop id before so many tokens.
    logprobs, prompt_logprobs: None, or how many alternatives to return beside each token's own log-probability: 0 to 128, and
    at most the engine's max_logprobs, which is 20 if nothing else is said; -1: as many as that.
    logit_bias: token id -> bias in [-100, 100]. allowed_token_ids: nothing else may be sampled. bad_words: never produced.
    detokenize: False returns ids without text. skip_special_tokens: leave special tokens out of the text.
    structured_outputs: what the output must be (StructuredOutputsParams). thinking_token_budget: most tokens of a model's
    reasoning before its end-of-thinking token is forced; without effect if it does not reason.
    skip_reading_prefix_cache: compute the whole prompt, even if a part of it is cached.
    extra_args: JSON for the logits processors that the engine was started with (--logits-processors). output_kind: what the
    outputs of `AsyncLLM.generate`, `AsyncClient.generate` and `LLMEngine.step` hold; if all running requests are
    FINAL_ONLY, prompts are computed at once, although that delays next tokens.

    Raises ValueError, naming the field, for a value outside its bounds, also where a field is set.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: _WantedOutput | None = None
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # filled in by the frontend, which has the tokenizer
    bad_words_token_ids: list[list[int]] | None = None
    reasoning_end_token_ids: list[int] | None = None  # end of the reasoning that precedes structured output
    reasoning_start_token_ids: list[int] | None = (
        None  # without these at the output's beginning there is no reasoning; None: it has begun
    )

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for value, (name, default) in zip(_bounded(self), _DEFAULTS, strict=True):
            if value != default or type(value) is not type(default):
                if type(value) not in _OWN:
                    value = _own_number(value)
                    msgspec.structs.force_setattr(self, name, value)
                _check_bound(name, value)
        if self.seed == -1:  # means None, as in vLLM
            msgspec.structs.force_setattr(self, "seed", None)
        if 0 < self.temperature < SAMPLING_EPS:
            msgspec.structs.force_setattr(self, "temperature", 0.0)
        elif SAMPLING_EPS <= self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", MIN_TEMPERATURE)
        _check_kind("output_kind", self.output_kind, RequestOutputKind, "a RequestOutputKind")
        if self.structured_outputs is not None:
            _check_kind("structured_outputs", self.structured_outputs, _OUTPUT_KINDS, "StructuredOutputsParams")
        _check_lists(self)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "guided_decoding":
            name = "structured_outputs"
        elif is_elsewhere(name):
            return check_elsewhere("SamplingParams", name, value, self.n)
        if name not in self.__struct_fields__:
            no_field(type(self), name)
        checked = msgspec.structs.replace(self, **{name: value})
        msgspec.structs.force_setattr(self, name, getattr(checked, name))
        return None

    if not TYPE_CHECKING:  # type checkers must not know other names

        def __getattr__(self, name: str) -> Any:
            return other_field(type(self), name)

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """As vLLM's: a field that is None gets its default, but for max_tokens, which then means as many as fit.

        logit_bias may have ids that are texts, as in JSON; values beyond its bounds are clamped.
        """
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): min(100.0, max(-100.0, bias)) for token, bias in given["logit_bias"].items()}
        return cls(**given)

    def clone(self) -> Self:
        """A copy with fields that can be set."""
        return msgspec.structs.replace(self)

    @property
    def grammar(self) -> StructuredOutputs | None:
        """structured_outputs in the form that travels. Raises ValueError for options without meaning."""
        wanted = self.structured_outputs
        return wanted.to_message() if isinstance(wanted, StructuredOutputsParams) else wanted

    @property
    def guided_decoding(self) -> StructuredOutputsParams | StructuredOutputs | None:
        """The older name of structured_outputs."""
        return self.structured_outputs

    @property
    def sampling_type(self) -> SamplingType:
        """vLLM's name for how tokens are chosen."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def all_stop_token_ids(self) -> set[int]:
        """The ids of stop_token_ids; the engine knows the model's own besides."""
        return set(self.stop_token_ids or ())

    def update_from_generation_config(self, *_: object) -> None:
        """vLLM's step of adding the model's own stop ids: the engine does it."""

    def update_from_tokenizer(self, *_: object) -> None:
        """vLLM's step of turning bad_words into ids: the engine's client does it."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def needs_filter(self) -> bool:
        """Whether top-k, top-p or min-p removes anything; it never does under greedy sampling."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_logits_processors(self) -> bool:
        """Whether the request needs rare sampling state: a row of the device's LogitsProcessorPool."""
        return bool(
            self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids or self.min_tokens > 0
        )


_OWN = {int, float, bool, type(None)}  # numbers that a message can hold; numpy's are converted
_REAL = {field.name for field in msgspec.structs.fields(SamplingParams) if field.type is float}
_DEFAULTS = [  # fields with bounds; most requests have the defaults, which are within them
    (name, default)
    for name, default in zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
    if name in BOUNDS
]
_bounded = attrgetter(*(name for name, _ in _DEFAULTS))


def _own_number(value: Any) -> Any:
    """An int or a float for an equivalent number, e.g. numpy's; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _check_kind(name: str, value: object, kind: type | tuple[type, ...], words: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {words}, got {value!r:.80}")


def _check_bound(name: str, value: float | None) -> None:
    if value is None and name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget"):
        return
    whole = name not in _REAL
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{name} must be {'an integer' if whole else 'a number'}, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # also in fields of floats: no message holds such integers
        raise ValueError(f"{name} must fit 64 bits")
    low, high, closed = BOUNDS[name]
    inside = math.isfinite(value) if isinstance(value, float) else True
    inside = inside and (low is None or (value >= low if closed else value > low)) and (high is None or value <= high)
    if not inside:
        floor = "" if low is None else f"{'at least' if closed else 'greater than'} {low}"
        top = "" if high is None else f"at most {high}"
        raise ValueError(f"{name} must be {' and '.join(p for p in (floor, top) if p)}, got {value}")


def _check_lists(p: SamplingParams) -> None:
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ValueError(f"min_tokens must be at most max_tokens ({p.max_tokens}), got {p.min_tokens}")
    _check_strings("stop", p.stop, MAX_STOP_STRINGS)
    check_bad_words(p.bad_words)
    if p.stop_token_ids is not None:
        msgspec.structs.force_setattr(p, "stop_token_ids", _check_ids("stop_token_ids", p.stop_token_ids, MAX_STOP_TOKEN_IDS))
    if p.allowed_token_ids is not None:
        msgspec.structs.force_setattr(p, "allowed_token_ids", _check_ids("allowed_token_ids", p.allowed_token_ids, 1 << 20))
    _check_ids("reasoning_end_token_ids", p.reasoning_end_token_ids, MAX_REASONING_END_IDS)
    _check_ids("reasoning_start_token_ids", p.reasoning_start_token_ids, MAX_REASONING_END_IDS)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise ValueError("allowed_token_ids must not be empty")
    if p.extra_args is not None:
        _check_extra_args(p.extra_args)
    if p.logit_bias is not None:
        _check_kind("logit_bias", p.logit_bias, dict, "a dict of token ids and biases")
        if len(p.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(p.logit_bias)}")
        if not set(map(type, (*p.logit_bias, *p.logit_bias.values()))) <= {int, float}:
            own_bias = {_own_number(token): _own_number(bias) for token, bias in p.logit_bias.items()}
            msgspec.structs.force_setattr(p, "logit_bias", own_bias)
        _check_ids("logit_bias", list(p.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in p.logit_bias.items():
            if not (isinstance(bias, int | float) and -100 <= bias <= 100):
                raise ValueError(f"logit_bias of token {token} must be between -100 and 100, got {bias}")
    if p.bad_words_token_ids is not None:
        if len(p.bad_words_token_ids) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words takes at most {MAX_BAD_WORDS} token sequences, got {len(p.bad_words_token_ids)}")
        for word in p.bad_words_token_ids:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise ValueError(f"each of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} tokens long, got {len(word)}")
            _check_ids("bad_words", word, MAX_BAD_WORD_TOKENS)


def _check_extra_args(extra_args: dict[str, Any]) -> None:
    if not isinstance(extra_args, dict) or not all(isinstance(name, str) for name in extra_args):
        raise ValueError("extra_args must be an object whose names are strings")
    if len(extra_args) > MAX_EXTRA_ARGS:
        raise ValueError(f"extra_args takes at most {MAX_EXTRA_ARGS} names, got {len(extra_args)}")
    try:
        size = len(msgspec.json.encode(extra_args))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("extra_args must hold JSON values only") from None
    if size > MAX_EXTRA_ARGS_BYTES:
        raise ValueError(f"extra_args may be at most {MAX_EXTRA_ARGS_BYTES >> 10} KiB long, got {size} bytes")


def check_bad_words(words: list[str] | None) -> None:
    """Raises ValueError for words that cannot be bad_words, whatever their tokens are."""
    _check_strings("bad_words", words, MAX_BAD_WORDS)


def _check_strings(name: str, strings: list[str] | str | None, most: int) -> None:
    if strings is None:
        return
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"{name} must be a list of strings")
    if len(strings) > most:
        raise ValueError(f"{name} takes at most {most} strings, got {len(strings)}")
    for s in strings:
        if not s:
            raise ValueError(f"{name} must not contain an empty string")
        if len(s) > MAX_STOP_LENGTH:
            raise ValueError(f"a string of {name} may be at most {MAX_STOP_LENGTH} characters long")


def _check_ids(name: str, ids: list[int] | None, most: int) -> list[int] | None:
    """The same list, or a new one of ints if it holds equivalent numbers (numpy's)."""
    if ids is None:
        return None
    if not hasattr(ids, "__len__"):
        raise ValueError(f"{name} must be a list of token ids, got {ids!r:.80}")
    if len(ids) > most:
        raise ValueError(f"{name} takes at most {most} token ids, got {len(ids)}")
    if not len(ids) or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31):  # a million take some 20 ms
        return ids
    own = [_own_number(i) for i in ids]
    for i in own:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31:
            raise ValueError(f"{name} must hold token ids, got {i!r}")
    return own


def loggable(p: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults, without those that may quote a text or do not affect sampling."""
    defaults, left_out = zip(p.__struct_fields__, p.__struct_defaults__, strict=True), {*_MAY_QUOTE, "output_kind"}
    return {name: v for name, default in defaults if name not in left_out and (v := getattr(p, name)) != default}


def check_against(p: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Check bounds that depend on the engine, or take time: ids within the vocabulary, the engine's cap on logprobs, nesting
    of grammars. Raises ValueError."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and not 0 <= value <= max_logprobs:
            raise ValueError(f"{name} must be at most {max_logprobs}, got {value}")
    if (grammar := p.grammar) is not None:
        check_grammar(grammar)
    if p.thinking_token_budget is not None and not p.reasoning_end_token_ids:
        raise ValueError("thinking_token_budget needs a reasoning model, whose end of thinking is known")
    words = [i for word in p.bad_words_token_ids or [] for i in word]
    for name, ids in (
        ("stop_token_ids", p.stop_token_ids or []),
        ("allowed_token_ids", p.allowed_token_ids or []),
        ("logit_bias", p.logit_bias or {}),
        ("bad_words", words),
        ("reasoning_end_token_ids", p.reasoning_end_token_ids or []),
        ("reasoning_start_token_ids", p.reasoning_start_token_ids or []),
    ):
        if len(ids) > vocab_size and name != "bad_words":
            raise ValueError(f"{name} holds {len(ids)} token ids; the vocabulary has {vocab_size}")
        top = max(ids, default=-1)
        if top >= vocab_size:
            raise ValueError(f"{name} holds token id {top}, outside the vocabulary of {vocab_size}")
