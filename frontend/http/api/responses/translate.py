"""Translate the body of /v1/responses into a ChatRequest, and a chat's errors back, so that a 400 names the field that was
sent.

The sampler's fields have the same names. Tools are flat here, and have a `function` in chats; text.format is response_format.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from quire.frontend.http.api.bodies.schemas import ChatRequest, Json
from quire.frontend.http.api.bodies.structured import JsonSchemaFormat, ResponseFormat
from quire.frontend.http.api.errors import from_exception, invalid
from quire.frontend.http.api.responses.messages import is_unfinished, messages_of
from quire.frontend.http.api.responses.request import ReasoningConfig, ResponsesRequest, TextConfig
from quire.frontend.http.protocol.errors import ApiError

# Fields with the same name and value in both.
_SAME = [
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in ("tools", "tool_choice", "top_logprobs", "stream_options")
]
_OTHER_TOOLS = "only functions are supported by this server: it runs no tools itself"
_MAX_DEPTH = 64  # of a function's parameters: they are repeated in the response, kept, and decoded again
_NOT_OF_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "defer_loading": (False,),
    "allowed_callers": ([], ["direct"]),
}
_FIELDS = {  # a chat's field -> its name here
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
}
_FORMAT = re.compile(r"\bresponse_format(\.json_schema)?\b")


def chat_request(body: ResponsesRequest, items: Sequence[Json], knows_developer: bool) -> ChatRequest:
    """The chat for a body. items: the whole conversation, from items.py. Raises ApiError 400."""
    if not items:
        raise invalid("input must hold an item, for there is no conversation before it", "input")
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    variables = dict(body.chat_template_kwargs or {})
    if text.verbosity is not None:
        variables.setdefault("verbosity", text.verbosity)
    goes_on = is_unfinished(items)
    return ChatRequest(
        **{name: getattr(body, name) for name in _SAME if name != "chat_template_kwargs"},
        messages=messages_of(items, body.instructions, knows_developer),
        tools=None if body.tools is None else [_tool(i, tool) for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(text),
        reasoning_effort=reasoning.effort,
        max_completion_tokens=body.max_output_tokens,
        chat_template_kwargs=variables or None,
        continue_final_message=goes_on or None,
    )


def _tool(i: int, tool: Json) -> Json:
    kind = tool.get("type")
    if kind != "function":
        raise ApiError(
            400,
            f"tools[{i}].type: {_OTHER_TOOLS}, got {str(kind)[:40]!r}.",
            param=f"tools[{i}].type",
            code="unsupported_value",
        )
    for name, harmless in _NOT_OF_FUNCTIONS.items():
        if (value := tool.get(name)) is not None and value not in harmless:
            place = f"tools[{i}].{name}"
            raise ApiError(400, f"{place}: this value is not supported by this server.", param=place, code="unsupported_value")
    if _depth(tool.get("parameters")) > _MAX_DEPTH:
        place = f"tools[{i}].parameters"
        raise invalid(f"{place} may be nested {_MAX_DEPTH} deep at most", place)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _depth(value: Any) -> int:
    """The depth of nested lists and objects."""
    depth, level = 0, [value]
    while level := [item for outer in level for item in _inner(outer)]:
        depth += 1
    return depth


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        raise ApiError(
            400,
            f"tool_choice: {_OTHER_TOOLS}; it may be none, auto, required, or an object of type function or allowed_tools.",
            param="tool_choice",
            code="unsupported_value",
        )
    tools = choice.get("tools")
    if isinstance(tools, list):
        for i, tool in enumerate(tools):
            if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                place = f"tool_choice.tools[{i}]"
                raise invalid(f"{place} must be an object of type function, with a name", place)
        tools = [{"type": "function", "function": tool} for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}


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


def in_our_words(error: ApiError) -> ApiError:
    """A chat's error with the names of this route's fields."""
    param = error.param
    if param is None:
        return error
    ours = _FIELDS.get(param) or re.sub(r"^(tools\[\d+\])\.function\b|^(tool_choice)\.allowed_tools\b", r"\1\2", param)
    message = _FORMAT.sub("text.format", error.message).replace(param, ours)
    if (message, ours) == (error.message, param):
        return error
    return ApiError(error.status, message, param=ours, code=error.code)


def error_of(error: BaseException) -> ApiError | None:
    """The error for an exception of a chat, with the names of this route's fields; None for a bug."""
    known = from_exception(error, "input")
    return None if known is None else in_our_words(known)
