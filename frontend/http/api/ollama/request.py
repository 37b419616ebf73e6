"""Translate a body of Ollama's API into a ChatRequest, or a raw prompt into a CompletionRequest.

chat_run.py and prompt_run.py run them like any other. Fields that are not supported are refused by name.
"""

from typing import TypeVar

import msgspec

from quire.frontend.http.api.bodies.schemas import SAMPLING_VALUES, ChatRequest, CompletionRequest, Json
from quire.frontend.http.api.bodies.structured import JsonSchemaFormat, ResponseFormat
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.ollama.schemas import (
    InputCall,
    NotHere,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request
from quire.frontend.media.parts import PLACE

_Body = OllamaChatRequest | OllamaGenerateRequest
T = TypeVar("T", ChatRequest, CompletionRequest)

_INSTEAD = {
    "suffix": "models go on from the end of a prompt; put all of the text into prompt, with raw: true.",
    "images": "a raw prompt has no place for them; leave raw out.",
    "template": "the model's own is used; send a prompt that is whole with raw: true.",
    "context": "send the conversation to /api/chat.",
    "logprobs": "ask /v1/chat/completions.",
    "top_logprobs": "ask /v1/chat/completions.",
}
_SAME_OPTIONS = tuple(name for name in Options.__struct_fields__ if name in SAMPLING_VALUES)


async def model_of(services: Services, request: Request, name: str | None) -> str:
    """The model's name to answer with: as the request has it, with or without ":latest". Raises ApiError 404."""
    names = [] if not name else [name, name.removesuffix(":latest"), f"{name}:latest"]
    known = next((each for each in names if each in services.model_names or each in services.client.adapters), None)
    try:
        await check_model(services, request, known or (names[1] if names else None))
    except ApiError as error:
        if error.status != 404:
            raise
        raise ApiError(404, f"model {name!r} not found", param="model", code="model_not_found") from None
    return name or services.model_names[0]


def chat_of(body: _Body) -> ChatRequest:
    """The body as a chat. Raises ApiError 400."""
    _check_not_here(body)
    if isinstance(body, OllamaChatRequest):
        chat = ChatRequest(messages=_Conversation().read(body.messages or []), tools=body.tools or None)
        last = chat.messages[-1]
        chat.continue_final_message = (last["role"] == "assistant" and "tool_calls" not in last) or None
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _with_images(body.prompt or "", body.images, "images")
        chat = ChatRequest(messages=[*system, {"role": "user", "content": content}])
    if body.think is not None:
        chat.chat_template_kwargs = dict.fromkeys(("enable_thinking", "thinking"), bool(body.think))  # templates use either
        chat.reasoning_effort = body.think if isinstance(body.think, str) else None
    return _with_options(chat, body)


def completion_of(body: OllamaGenerateRequest) -> CompletionRequest:
    """A raw prompt as a completion. Raises ApiError 400."""
    _check_not_here(body)
    if body.images:
        raise _unsupported("images", "images")
    return _with_options(CompletionRequest(prompt=body.prompt), body)


def _check_not_here(body: NotHere) -> None:
    for name in NotHere.__annotations__:
        if getattr(body, name):
            raise _unsupported(name, name)


def _unsupported(place: str, name: str) -> ApiError:
    return ApiError(400, f"{place} is not supported: {_INSTEAD[name]}", param=place, code="unsupported_value")


def _with_options(to: T, body: _Body) -> T:
    options = body.options or Options()
    to.stream = body.stream is not False
    for name in _SAME_OPTIONS:
        setattr(to, name, getattr(options, name))
    to.repetition_penalty = options.repeat_penalty
    to.seed = options.seed if options.seed is not None and options.seed >= 0 else None  # -1 means a random one
    to.max_tokens = options.num_predict if (options.num_predict or 0) > 0 else None
    if isinstance(body.format, dict):
        to.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="format", schema=body.format))
    elif body.format == "json":
        to.response_format = ResponseFormat(type="json_object")
    elif body.format:
        raise invalid('format must be "json" or a JSON Schema', "format")
    return to


def _with_images(text: str, images: list[str] | None, place: str) -> str | list[Json]:
    """Ollama's images, base64, come before the message's text, as there."""
    if not images:
        return text
    parts: list[Json] = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}, PLACE: f"{place}[{i}]"}
        for i, data in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


class _Conversation:
    """Ollama's messages, translated in order. Calls without an id get one; a result without one is that of its tool's first
    call without a result."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []  # names and ids of calls without a result

    def read(self, messages: list[OllamaMessage]) -> list[Json]:
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: OllamaMessage, place: str) -> Json:
        result: Json = {"role": message.role, "content": _with_images(message.content or "", message.images, f"{place}.images")}
        if message.thinking:
            result["reasoning_content"] = message.thinking
        if message.tool_calls:
            result["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role == "tool":
            result |= self._answered(message)
        return result

    def _call(self, call: InputCall) -> Json:
        self._num_calls += 1
        called = call.id or f"call{self._num_calls:05d}"  # Mistral's templates want nine letters or digits
        self._open.append((call.function.name, called))
        arguments = msgspec.json.encode(call.function.arguments or {}).decode()
        return {"id": called, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

    def _answered(self, message: OllamaMessage) -> Json:
        """The fields of a result that name its call."""
        name, call = message.tool_name, message.tool_call_id
        mine = [pair for pair in self._open if call == pair[1] or (call is None and name in (None, pair[0]))]
        if mine:
            self._open.remove(mine[0])
            name, call = mine[0]
        return {key: value for key, value in (("name", name), ("tool_call_id", call)) if value}
