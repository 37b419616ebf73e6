"""Translate the body of /v1/responses into a ChatRequest, and a chat's errors back, so that a 400 names the field that was
sent.

The sampler's fields have the same names. Tools are flat here, and have a `function` in chats (tools.py); text.format is
response_format.
"""

import re
from collections.abc import Sequence

from quire.frontend.http.api.bodies.schemas import ChatRequest, Json
from quire.frontend.http.api.bodies.structured import JsonSchemaFormat, ResponseFormat
from quire.frontend.http.api.errors import from_exception, invalid
from quire.frontend.http.api.responses.messages import is_unfinished, messages_of
from quire.frontend.http.api.responses.request import ReasoningConfig, ResponsesRequest, TextConfig
from quire.frontend.http.api.responses.tools import ChatTools
from quire.frontend.http.protocol.errors import ApiError

# Fields with the same name and value in both.
_SAME = [
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in ("tools", "tool_choice", "top_logprobs", "stream_options")
]
_FIELDS = {  # a chat's field -> its name here
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.custom.name": "tool_choice.name",
}
_TOOL = re.compile(r"^tools\[(\d+)\]\.(?:function|custom)\b")
_FORMAT = re.compile(r"\bresponse_format(\.json_schema)?\b")


def chat_request(body: ResponsesRequest, tools: ChatTools, items: Sequence[Json], knows_developer: bool) -> ChatRequest:
    """The chat for a body. items: the whole conversation, from items.py. Raises ApiError 400."""
    messages = messages_of(items, body.instructions, knows_developer)
    if not items or not messages:
        raise invalid("input must hold an item that a model reads, for there is no conversation before it", "input")
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    variables = dict(body.chat_template_kwargs or {})
    if text.verbosity is not None:
        variables.setdefault("verbosity", text.verbosity)
    goes_on = is_unfinished(items)
    return ChatRequest(
        **{name: getattr(body, name) for name in _SAME if name != "chat_template_kwargs"},
        messages=messages,
        tools=tools.tools,
        tool_choice=tools.choose(body.tool_choice),
        response_format=_response_format(text),
        reasoning_effort=reasoning.effort,
        max_completion_tokens=body.max_output_tokens,
        chat_template_kwargs=variables or None,
        continue_final_message=goes_on or None,
    )


def _response_format(text: TextConfig) -> ResponseFormat | None:
    if (given := text.format) is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(type="json_object")
    for name in ("name", "schema"):
        if getattr(given, name) is None:
            raise ApiError(400, f"text.format.{name}: this field is required with type json_schema.",
                           param=f"text.format.{name}", code="missing_required_parameter")  # fmt: skip
    schema = JsonSchemaFormat(name=given.name or "", schema=given.schema, strict=given.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


def in_our_words(error: ApiError, tools: ChatTools) -> ApiError:
    """A chat's error with the names of this route's fields."""
    param = error.param
    if param is None:
        return error
    ours = _FIELDS.get(param) or _TOOL.sub(lambda found: tools.place(int(found[1])), param)
    ours = re.sub(r"^(tool_choice)\.allowed_tools\b", r"\1", ours)
    message = _FORMAT.sub("text.format", error.message).replace(param, ours)
    if (message, ours) == (error.message, param):
        return error
    return ApiError(error.status, message, param=ours, code=error.code)


def error_of(error: BaseException, tools: ChatTools) -> ApiError | None:
    """The error for an exception of a chat, with the names of this route's fields; None for a bug."""
    known = from_exception(error, "input")
    return None if known is None else in_our_words(known, tools)
