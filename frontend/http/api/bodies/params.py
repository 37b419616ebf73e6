"""From a request's fields to what the engine takes: SamplingParams, and prompts as token ids.

Defaults come, in this order, from the request, the model's generation_config.json, and the route (16 tokens for completions,
the rest of the context for chats). What needs the prompt's length is checked here, so that the text can name the numbers.
"""

import re
from operator import attrgetter
from typing import Any

from quire.frontend.client.client import Client
from quire.frontend.client.encoding import encode_end
from quire.frontend.client.turns import in_native_thread, in_thread
from quire.frontend.http.api.bodies.fields import check_fields, check_stream_options
from quire.frontend.http.api.bodies.schemas import (
    MAX_ITEMS,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
    check_supported,
)
from quire.frontend.http.api.bodies.structured import structured_outputs
from quire.frontend.http.api.errors import invalid, too_long
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.chat_template import ChatTemplateError
from quire.frontend.text.request_templates import ToRender, render_apart
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.limits import output_limit, output_room
from quire.ipc.sampling import BOUNDS, RequestOutputKind, SamplingParams

# fields that a body and SamplingParams have under one name, without those that depend on the prompt's length or differ in shape
_OTHER = {"max_tokens", "structured_outputs"}
_COPIED = [n for n in SamplingParams.__struct_fields__ if n in SamplingFields.__struct_fields__ and n not in _OTHER]
_copied_values = attrgetter(*_COPIED)  # all at once: one getattr for each takes three times as long
LONG_BODY, _MANY_MESSAGES = 16 << 10, 64  # bytes and messages: a template renders so much in 3 ms
_RESERVED_KWARGS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "self")
)


class SamplingRequest:
    """The sampling fields of one request body, checked once; `params` completes them for each prompt."""

    def __init__(
        self,
        body: SamplingFields,
        tokenizer: Tokenizer,
        max_model_len: int,
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        max_tokens_field: str = "max_tokens",
    ) -> None:
        """max_tokens: as the body's field of the name max_tokens_field has it. default_max_tokens: the route's."""
        check_supported(body)
        check_fields(body)
        check_stream_options(body)
        if max_tokens is not None and max_tokens < 1:
            raise invalid(f"{max_tokens_field} must be at least 1, got {max_tokens}", max_tokens_field)
        self._fields: dict[str, Any] = {**tokenizer.generation_defaults}
        default = self._fields.pop("max_tokens", None)
        self._fields |= {name: value for name, value in zip(_COPIED, _copied_values(body), strict=True) if value is not None}
        self._fields["top_k"] = min(self._fields.get("top_k", 0), 2**31 - 1)
        self._fields["logprobs"] = logprobs
        if not body.stream:
            self._fields["output_kind"] = RequestOutputKind.FINAL_ONLY
        self._tokenizer = tokenizer
        self._fields["structured_outputs"] = structured_outputs(body)
        self._fields["extra_args"] = body.vllm_xargs or None
        self._max_tokens = max_tokens
        self._default_max_tokens = default if default is not None else default_max_tokens
        self._max_model_len = max_model_len
        low, high, _ = BOUNDS["n"]
        self.n = self._fields.get("n", 1)
        if not low <= self.n <= high:  # type: ignore[operator]
            raise invalid(f"n must be at least {low} and at most {high}, got {self.n}", "n")
        self._num_sampled = max(self.n, body.best_of or 1)
        if self._num_sampled > high:  # type: ignore[operator]
            raise invalid(f"best_of must be at most {high}, got {body.best_of}", "best_of")

    async def prepare(self) -> None:
        """What takes long and is the same for every prompt: bad words as tokens."""
        if self._fields.get("bad_words"):
            try:
                words = SamplingParams(bad_words=self._fields["bad_words"])
                words = await in_native_thread(self._tokenizer.with_bad_words, words)
            except ValueError as error:
                raise invalid(str(error), "bad_words") from None
            self._fields["bad_words_token_ids"] = words.bad_words_token_ids

    def check_fan_out(self, num_prompts: int) -> None:
        total, name = num_prompts * self._num_sampled, "n" if self._num_sampled == self.n else "best_of"
        if total > MAX_SEQUENCES:
            raise invalid(f"{name} times the number of prompts may be at most {MAX_SEQUENCES}, got {total}", name)

    def params(self, num_prompt_tokens: int, prompt_field: str) -> SamplingParams:
        """For a prompt of this length. Raises ApiError 400 for a value out of bounds or a request beyond the context."""
        room = output_room(num_prompt_tokens, self._max_model_len)
        max_tokens = self._max_tokens
        if room < 1:
            raise too_long(
                f"This model's maximum context length is {self._max_model_len} tokens, but the prompt has {num_prompt_tokens} "
                "and at least one must be generated. Please shorten the prompt.",
                prompt_field,
            )
        if max_tokens is not None and max_tokens > room:
            raise too_long(
                f"This model's maximum context length is {self._max_model_len} tokens, but {num_prompt_tokens + max_tokens} "
                f"were requested ({num_prompt_tokens} in the prompt, {max_tokens} for the completion). "
                "Please shorten the prompt or ask for fewer tokens.",
                prompt_field,
            )
        if max_tokens is None and self._default_max_tokens is not None:
            max_tokens = output_limit(self._default_max_tokens, room)
        if self._fields.get("min_tokens", 0) > room:
            raise invalid(f"min_tokens must be at most {room}, what the context has left after the prompt", "min_tokens")
        try:
            return SamplingParams(**self._fields, max_tokens=max_tokens)
        except ValueError as error:
            raise invalid(str(error).replace("extra_args", "vllm_xargs")) from None


def completion_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """`prompt` in its four shapes as a list of texts or of token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        check_supported(body)
        raise ApiError(400, "prompt must not be null.", param="prompt", code="missing_required_parameter")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(kinds) != 1 or [] in prompt:
        raise invalid("prompt must be a text, a list of texts, token ids or a list of lists of token ids; no list may be empty",
                      "prompt")  # fmt: skip
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    return prompt  # type: ignore[return-value]


async def prompt_text(
    body: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, trust_template: bool, num_bytes: int = 0
) -> str:
    """The conversation as prompt text. The model's template is rendered in a thread if the conversation is long; a template of
    the request's own, if such are trusted, in another process. num_bytes: of the request's body."""
    if body.chat_template is not None and not trust_template:
        raise invalid(
            "chat_template: this server takes none from requests (see --trust-request-chat-template)", "chat_template"
        )
    arguments = _template_arguments(body)
    try:
        if body.chat_template is not None:
            source = tokenizer.template_source(body.chat_template, bool(body.tools))
            return await render_apart(ToRender(source, tokenizer.special_tokens, tokenizer.content_format(), **arguments))
        variables = arguments.pop("variables")
        if num_bytes <= LONG_BODY and len(arguments["messages"]) <= _MANY_MESSAGES:
            return tokenizer.render_chat(**arguments, chat_template_kwargs=variables)
        return await in_thread(tokenizer.render_chat, **arguments, chat_template_kwargs=variables)
    except ChatTemplateError as error:
        raise invalid(f"messages: {error}", "messages") from None


def _template_arguments(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What a template is given, by the names of ChatTemplate.render. Raises ApiError 400."""
    messages = body.messages or []
    parts = [m.get(name) for m in messages for name in ("content", "tool_calls")]
    if sum(len(part) for part in parts if isinstance(part, list)) > MAX_ITEMS:
        raise invalid(f"messages may hold at most {MAX_ITEMS} content parts and tool calls", "messages")
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    if continues and opens:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    return {
        "messages": messages,
        "tools": body.tools or None,
        "documents": body.documents or None,
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "variables": _template_variables(body),
    }


def _template_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """chat_template_kwargs, and what other fields of the request say to templates."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED_KWARGS or not re.fullmatch(r"[A-Za-z]\w{0,63}", name):
            raise invalid(f"chat_template_kwargs must not hold {name[:64]!r}", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


async def encoded(client: Client, text: str, add_special_tokens: bool, keep: int | None, side: str | None = None) -> list[int]:
    """The prompt's ids, or `keep` of them (`truncated`), for which no more text is tokenized than can fit into the context."""
    if keep is None:
        return await client.encode(text, add_special_tokens=add_special_tokens)
    ids = await encode_end(
        client.tokenizer, text, add_special_tokens, keep, side == "right", client.welcome.limits.max_model_len
    )
    return truncated(ids, keep, side)


def truncated(token_ids: list[int], keep: int | None, side: str | None = None) -> list[int]:
    """The last `keep` ids (vLLM's truncate_prompt_tokens), or the first where the `side` cut off is the "right" one."""
    if keep is None:
        return token_ids
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def check_model(name: str | None, served: list[str]) -> str:
    """The model's name to answer with; without one or with an empty one, as vLLM has it, the first. Raises ApiError 404."""
    if not name or name in served:
        return name or served[0]
    raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
