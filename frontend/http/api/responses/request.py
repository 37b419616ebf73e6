"""The body of POST /v1/responses: OpenAI's fields, the sampler's fields that vLLM has too, and the unsupported ones.

This file has the struct and its checks; translate.py makes a chat of it, docs/tools/responses_fields.py says how every field is
treated. Items of the input may be any JSON here: items.py checks them, so its errors can name the item.
"""

from typing import Annotated, Any, Literal

import msgspec

from quire.frontend.http.api.batches import Metadata
from quire.frontend.http.api.bodies.checked import check_stream_options
from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, SAMPLING_VALUES, ChatRequest, Int64, Json, Objects, ShortText
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.sampling import ALL_LOGPROBS

Items = Annotated[list[Json], msgspec.Meta(max_length=MAX_ITEMS)]

# Fields by the names and types of /v1/chat/completions: the sampler's, and those that vLLM has beside OpenAI's.
AS_IN_CHATS = (
    *(name for name in SAMPLING_VALUES if name not in ("n", "prompt_logprobs", "skip_reading_prefix_cache")),
    "vllm_xargs", "thinking_token_budget", "structured_outputs", "chat_template_kwargs", "priority", "timeout", "cache_salt",
    "request_id",
)  # fmt: skip
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# Other values of `include` that are accepted and have no effect: there are no such tools and inputs.
_NOTHING_TO_INCLUDE = frozenset(
    (
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
# Unsupported fields that would change the answer: values without effect, which are accepted, and what works instead.
_NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "conversations are not kept by this server; previous_response_id goes on from a response."),
    "prompt": ((), "prompt templates are not kept by this server; send their text as instructions and input."),
    "context_management": (([],), "contexts are not compacted by this server; truncation: auto leaves out what is oldest."),
    "moderation": (({},), "this server does not moderate."),
    "watermarking": ((False,), "answers carry no watermark."),
    "personality": ((), "this server has none; say it in instructions."),
    "access_programs": (({}, {"cyber": "standard"}), "this server has none."),
    "image": (({}, {"context_compression": "auto"}, {"context_compression": "disabled"}), "this server takes text only."),
    "mm_processor_kwargs": (({},), "the server says how images are processed, with --mm-processor-kwargs."),
    "media_io_kwargs": (({},), "an image is decoded in one way."),
    "include_reasoning": ((True,), "thoughts are items of their own, which a client may leave out."),
    "kv_transfer_params": (({},), "KV blocks stay in their engine."),
    "ec_transfer_params": (({},), "this server has no encoders."),
    "enable_response_messages": ((False,), "messages are not returned; see /v1/chat/completions with return_prompt_text."),
    "previous_input_messages": (([],), "send them as items of input."),
    "previous_response": ((), "send its output as items of input, or its id as previous_response_id."),
}


class TextFormat(msgspec.Struct, kw_only=True):
    """type: text, json_object, or json_schema with name and schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """summary: "auto" gives none, because reasoning is returned as it is."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: ShortText | None = None
    generate_summary: ShortText | None = None
    context: ShortText | None = None
    mode: ShortText | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    mode: ShortText | None = None
    ttl: ShortText | None = None
    prewarm: bool | None = None
    comparison_response_id: ShortText | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


_AsInChats = msgspec.defstruct(
    "_AsInChats",
    [(f.name, f.type, None) for f in msgspec.structs.fields(ChatRequest) if f.name in AS_IN_CHATS],
    kw_only=True,
)


class ResponsesRequest(_AsInChats):  # type: ignore[misc, valid-type]
    input: str | Items | None = None
    model: ShortText | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[ShortText] | None = None
    tools: Objects | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int64 | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Int64 | None = None
    top_logprobs: Int64 | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    # repeated in the answer, without any other effect
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: ShortText | None = None
    service_tier: ShortText | None = None
    background_options: Json | None = None  # no effect: the response starts at once
    # refused, except values without effect
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    watermarking: Any = None
    personality: Any = None  # of /v1/responses/input_tokens
    access_programs: Any = None
    image: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    include_reasoning: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    enable_response_messages: Any = None
    previous_input_messages: Any = None
    previous_response: Any = None

    @property
    def keeps(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def check_request(body: ResponsesRequest, max_logprobs: int) -> None:
    """Raises ApiError 400, naming the field, for a value that is invalid or not supported."""
    for name, (harmless, instead) in _NOT_HERE.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise _unsupported(name, instead)
    if body.input is None and body.previous_response_id is None:
        raise ApiError(400, "input: this field is required.", param="input", code="missing_required_parameter")
    for i, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, ENCRYPTED) and name not in _NOTHING_TO_INCLUDE:
            raise invalid(f"include[{i}] must be {LOGPROBS!r} or {ENCRYPTED!r}: {name[:64]!r} is not known", f"include[{i}]")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise invalid(f"max_output_tokens must be at least 1, got {body.max_output_tokens}", "max_output_tokens")
    if body.top_logprobs == ALL_LOGPROBS:
        body.top_logprobs = max_logprobs
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= max_logprobs:
        raise invalid(f"top_logprobs must be at least 0 and at most {max_logprobs}, got {body.top_logprobs}", "top_logprobs")
    _check_storing(body)
    _check_options(body)


def _check_storing(body: ResponsesRequest) -> None:
    if body.background and not body.keeps:
        raise invalid("background: true needs store: true: there is nowhere else to read the answer from", "background")
    if body.background and body.stream:
        raise invalid(
            "stream: true is not available with background: true: ask for the response until it is completed", "stream"
        )


def _check_options(body: ResponsesRequest) -> None:
    check_stream_options(body)
    if (reasoning := body.reasoning) is not None:
        for name, harmless in _REASONING.items():
            if (value := getattr(reasoning, name)) is not None and value != harmless:
                raise _unsupported(
                    f"reasoning.{name}", f"only {harmless!r} is supported: thoughts are returned whole, in their own items."
                )
    if (cache := body.prompt_cache_options) is not None:
        for name in ("prewarm", "comparison_response_id"):
            if getattr(cache, name):
                raise _unsupported(f"prompt_cache_options.{name}", "prefixes are found by their tokens; leave it out.")


_REASONING = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}


def _unsupported(name: str, instead: str) -> ApiError:
    return ApiError(400, f"{name}: {instead}", param=name, code="unsupported_value")
