"""Fields of both generating routes that are not the sampler's: beam search, truncation, names; and vLLM's unsupported ones.

`MoreFields` is a part of each body (schemas.py). `check_fields` refuses, naming the field, a value that would change the answer
and is not supported; docs/tools/field_table.py says how every field is treated.
"""

import re
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec

from quire.frontend.client.beam_search import MAX_BEAM_WIDTH, BeamSearchParams
from quire.frontend.http.api.bodies.structured import ResponseFormat
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.protocol.errors import ApiError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Unsupported fields of OpenAI and vLLM, with the values that have no effect and are accepted.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "watermarking": (False,),
    "logprob_token_ids": ([],),
    "repetition_detection": ({},),
    "routed_experts_prompt_start": (0,),
    "return_weight_versions": (False,),
    "stream_interval": (1,),
    "ec_transfer_params": ({},),
    "moderation": ({},),
}
_INSTEAD = {
    "watermarking": "answers carry none.",
    "logprob_token_ids": "logprobs are those of the likeliest tokens; ask for up to 20 of them.",
    "repetition_detection": "see repetition_penalty and frequency_penalty.",
    "routed_experts_prompt_start": "which experts were chosen is not told.",
    "return_weight_versions": "weights are loaded once; see /version.",
    "stream_interval": "each token is sent when it is there, as with 1.",
    "ec_transfer_params": "nothing is sent between engines.",
    "moderation": "nothing is moderated here.",
}
_not_supported = attrgetter(*NOT_SUPPORTED)
_NOTHING = (None,) * len(NOT_SUPPORTED)

# Fields that a beam search refuses, with the values that have no effect and are accepted. The sampler's other fields are
# accepted and have no effect, for a search samples nothing and clients always send some.
_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "vllm_xargs": ({},),
    "stop": ("", []),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "prompt_logprobs": (),
    # vLLM's server drops these silently: each beam would need a matcher of its own, rolled back when beams are dropped
    "structured_outputs": (),
    "response_format": (ResponseFormat(type="text"),),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("none", "auto"),
    "thinking_token_budget": (-1,),
}


class MoreFields(msgspec.Struct, kw_only=True):
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    # refused, except values without effect
    watermarking: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    return_weight_versions: Any = None
    stream_interval: Any = None
    ec_transfer_params: Any = None
    moderation: Any = None


def check_fields(body: Any) -> None:
    """body: SamplingFields. Raises ApiError 400, naming the field."""
    if (values := _not_supported(body)) != _NOTHING:
        _refuse(values)
    if body.request_id is not None and not _REQUEST_ID.fullmatch(body.request_id):
        raise invalid("request_id takes up to 128 letters, digits and characters of '._:-'", "request_id")
    if body.use_beam_search:
        _check_beams(body)
    else:
        _check_best_of(body)


def _refuse(values: tuple[Any, ...]) -> None:
    for (name, harmless), value in zip(NOT_SUPPORTED.items(), values, strict=True):
        if value is not None and value not in harmless:
            why = f"{name}: this value is not supported by this server: {_INSTEAD[name]}"
            raise ApiError(400, why, param=name, code="unsupported_value")


def _check_best_of(body: Any) -> None:
    for name, default in (("length_penalty", 1), ("early_stopping", False)):
        if getattr(body, name) not in (None, default, "never"):
            raise invalid(f"{name} needs use_beam_search: true", name)
    best_of, n = body.best_of, body.n or 1
    if best_of is None:
        return
    if best_of < n:
        raise invalid(f"best_of must be at least n ({n}), got {best_of}", "best_of")
    if best_of > n and body.stream:
        raise invalid("best_of above n is not available with stream: true, for the best is known at the end", "best_of")


def _check_beams(body: Any) -> None:
    width = beam_width(body)
    if not 1 <= width <= MAX_BEAM_WIDTH or width < (body.n or 1):
        name = "n" if body.best_of is None else "best_of"
        least = 1 if body.best_of is None else min(max(1, body.n or 1), MAX_BEAM_WIDTH)
        what = f"{name}, the beams of use_beam_search, must be at least {least} and at most {MAX_BEAM_WIDTH}"
        raise invalid(f"{what}, got {width}", name)
    for name, harmless in _NOT_WITH_BEAMS.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise invalid(f"{name} is not available with use_beam_search: true", name)
    beam_search_params(body, 1)  # raises for values out of bounds
    if body.stream:
        raise invalid("stream: true is not available with use_beam_search: true, for the best is known at the end", "stream")


def beam_width(body: Any) -> int:
    """How many beams are kept: best_of, or n. n of them are returned."""
    width: int = body.best_of if body.best_of is not None else 1 if body.n is None else body.n
    return width


def beam_search_params(body: Any, max_tokens: int) -> BeamSearchParams:
    """Raises ApiError 400."""
    try:
        return BeamSearchParams(
            beam_width(body),
            max_tokens,
            ignore_eos=bool(body.ignore_eos),
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            stop_token_ids=body.stop_token_ids,
            early_stopping=body.early_stopping or False,
            skip_special_tokens=body.skip_special_tokens is not False,
        )
    except ValueError as error:
        raise invalid(str(error), str(error).split()[0]) from None
