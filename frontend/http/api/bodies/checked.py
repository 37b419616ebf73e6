"""From a decoded body to a CheckedRequest: its sampling fields, checked as far as that goes without its prompt.

A route fills in the operator's defaults where the request says nothing (`RequestDefaults`), checks the body, makes the prompt,
and then SamplingParams (params.py). The sampler's defaults come from the model's generation_config.json, then from the route.
"""

from operator import attrgetter
from typing import Any

import msgspec

from quire.frontend.client.terms import NO_TERMS, Terms
from quire.frontend.client.turns import in_native_thread
from quire.frontend.http.api.bodies.fields import NOT_SUPPORTED, check_fields
from quire.frontend.http.api.bodies.schemas import (
    SAMPLING_VALUES,
    ChatRequest,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    Unsupported,
    check_supported,
)
from quire.frontend.http.api.bodies.structured import SOURCES, structured_outputs
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.tool_use import ToolUse
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import BOUNDS, RequestOutputKind, check_bad_words

NO_ROOM = (
    "This model's maximum context length is {max_model_len} tokens, but the prompt has {num_prompt_tokens} "
    "and at least one must be generated. Please shorten the prompt."
)
_sampling_values = attrgetter(*SAMPLING_VALUES)  # all at once: one getattr for each takes three times as long
# Most bodies have none of these fields, and skip their checks.
_RARE = (
    *Unsupported.__annotations__, *NOT_SUPPORTED, *SOURCES,
    "request_id", "use_beam_search", "length_penalty", "early_stopping", "best_of", "vllm_xargs",
)  # fmt: skip
_rare_values = attrgetter(*_RARE)
_NOTHING = (None,) * len(_RARE)


class RequestDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults from flags of `quire serve`, made once. A route passes each decoded body through `fill`.

    include_usage: every event of a stream has the usage, and so has its end, whatever the request says.
    """

    response_role: str = "assistant"
    chat_template_kwargs: dict[str, Any] = {}
    return_tokens_as_token_ids: bool = False
    include_usage: bool = False

    def fill(self, body: SamplingFields | TokenizeRequest) -> None:
        """Set fields that the request leaves out."""
        if self.chat_template_kwargs and isinstance(body, ChatRequest | TokenizeRequest):
            body.chat_template_kwargs = {**self.chat_template_kwargs, **(body.chat_template_kwargs or {})}
        if not isinstance(body, SamplingFields):
            return
        if self.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if body.stream:
            body.stream_options = self.stream_options(body.stream_options)

    def stream_options(self, asked: StreamOptions | None) -> StreamOptions | None:
        """A stream's options, where `asked` are those of its request."""
        return StreamOptions(include_usage=True, continuous_usage_stats=True) if self.include_usage else asked

    def role(self, body: ChatRequest) -> str:
        """The answer's role: response_role, or that of the message that it continues. Templates decide which roles exist."""
        last = body.messages[-1].get("role")
        return last if body.continue_final_message and isinstance(last, str) else self.response_role


class CheckedRequest(msgspec.Struct, kw_only=True):
    """sampling: fields of SamplingParams, except max_tokens. n: completions that are returned; sampling["n"] are generated.

    num_logprobs: alternatives that are returned beside each token; None for no log-probabilities. prompt_field: the body's
    field of the prompt, for errors. cuts_max_tokens: max_tokens beyond the context's room are cut instead of refused.
    no_room: the error text for a prompt that leaves no room for a token; empty if the engine's client refuses such a prompt.
    extra_args: the body's name of that field. is_for_prompt: the one token that is generated is not shown, so the prompt may
    fill the context. tools: a chat's tools. terms: set by the route, which knows the request's key.
    """

    sampling: dict[str, Any]
    max_tokens: int | None
    default_max_tokens: int | None = None
    n: int = 1
    num_logprobs: int | None = None
    prompt_field: str
    cuts_max_tokens: bool = False
    no_room: str = NO_ROOM
    extra_args: str = "vllm_xargs"
    is_for_prompt: bool = False
    tools: ToolUse | None = None
    terms: Terms = NO_TERMS


def check_request(
    body: SamplingFields,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None,
    prompt_field: str,
    default_max_tokens: int | None = None,
    num_logprobs: int | None = None,
    max_tokens_field: str = "max_tokens",
) -> CheckedRequest:
    """max_tokens: the value of the body's field max_tokens_field. default_max_tokens: the route's. Raises ApiError 400."""
    is_rare = _rare_values(body) != _NOTHING
    if is_rare:
        check_supported(body)
        check_fields(body)
    check_stream_options(body)
    if max_tokens is not None and max_tokens < 1:
        raise invalid(f"{max_tokens_field} must be at least 1, got {max_tokens}", max_tokens_field)
    sampling: dict[str, Any] = {**tokenizer.generation_defaults}
    default = sampling.pop("max_tokens", default_max_tokens)
    sampling |= {name: value for name, value in zip(SAMPLING_VALUES, _sampling_values(body), strict=True) if value is not None}
    sampling["top_k"] = min(sampling.get("top_k", 0), 2**31 - 1)
    sampling["logprobs"] = num_logprobs
    if not body.stream:
        sampling["output_kind"] = RequestOutputKind.FINAL_ONLY
    if is_rare:
        sampling["structured_outputs"] = structured_outputs(body)
        sampling["extra_args"] = body.vllm_xargs or None
    checked = CheckedRequest(
        sampling=sampling,
        max_tokens=max_tokens,
        default_max_tokens=default,
        n=sampling.get("n", 1),
        num_logprobs=num_logprobs,
        prompt_field=prompt_field,
    )
    _check_n(body, checked)
    return checked


def _check_n(body: SamplingFields, checked: CheckedRequest) -> None:
    """Check n and best_of. best_of completions are sampled, with the log-probabilities by which n of them are chosen."""
    low, high, _ = BOUNDS["n"]
    if not low <= checked.n <= high:  # type: ignore[operator]
        raise invalid(f"n must be at least {low} and at most {high}, got {checked.n}", "n")
    if body.best_of is None or body.best_of <= checked.n:
        return
    if body.best_of > high:  # type: ignore[operator]
        raise invalid(f"best_of must be at most {high}, got {body.best_of}", "best_of")
    if not body.use_beam_search:
        checked.sampling |= {"n": body.best_of, "logprobs": checked.num_logprobs or 0}


def check_stream_options(body: Any) -> None:
    """body: has `stream` and `stream_options`. Raises ApiError 400."""
    if (options := body.stream_options) is None:
        return
    if not body.stream:
        raise invalid("stream_options is only allowed with stream: true", "stream_options")
    if options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise ApiError(
            400, f"{name}: events are not padded here; use TLS, or leave it out.", param=name, code="unsupported_value"
        )


async def add_bad_words(checked: CheckedRequest, tokenizer: Tokenizer) -> None:
    """Tokenize bad_words in a thread, once for all prompts of a request. Raises ApiError 400."""
    if not (words := checked.sampling.get("bad_words")):
        return
    try:
        check_bad_words(words)
        checked.sampling["bad_words_token_ids"] = await in_native_thread(tokenizer.bad_word_ids, words)
    except ValueError as error:
        raise invalid(str(error), "bad_words") from None
