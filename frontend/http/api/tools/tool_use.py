"""ToolUse: the functions that a model may call, and whether it may call one, must call one, or must call a certain one.

It does not depend on a route's JSON, except in `functions_of`, which checks the functions' own fields for all routes.
output_plan.py reads a chat's fields into a ToolUse; tool_grammar.py uses it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.protocol.errors import ApiError

MAX_TOOLS_BYTES = 256 << 10  # of a request's tools, as JSON: a chat template takes 0.13 ms a KiB
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # OpenAI allows 64, Anthropic 128

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class Function:
    """parameters: a JSON Schema of an object. strict: arguments must follow it. place: where it is in the body, for errors.

    is_custom: it stands for a custom tool (custom_tools.py).
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    place: str = "tools"
    is_custom: bool = False


@dataclass(frozen=True)
class ToolUse:
    """mode: "named" has one function, which must be called. parallel: whether one answer may contain several calls; None if the
    request does not say, which means yes where the model writes calls in its own format."""

    mode: Mode
    functions: Sequence[Function]
    parallel: bool | None = None


def functions_of(tools: Sequence[tuple[str, Any, bool]]) -> list[Function]:
    """tools: each function's place in the body ("tools[0].function"), its value, and whether it stands for a custom tool.

    Raises ApiError 400, naming the field.
    """
    functions: dict[str, Function] = {}
    for place, value, is_custom in tools:
        function = _function(place, value, is_custom)
        if function.name in functions:
            raise invalid(f"{place}.name: there are two functions of the name {function.name!r}", f"{place}.name")
        functions[function.name] = function
    check_tools_size([value for _, value, _ in tools])
    return list(functions.values())


def _function(place: str, value: Any, is_custom: bool) -> Function:
    if not isinstance(value, dict):
        raise invalid(f"{place} must be an object with a name", place)
    name, parameters, strict = value.get("name"), value.get("parameters"), value.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{place}.name must be 1 to 128 letters, digits, '_', '-' or '.'", f"{place}.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.parameters must be a JSON Schema of an object", f"{place}.parameters")
    if parameters and parameters.get("type") not in (None, "object"):
        raise invalid(
            f"{place}.parameters must be a JSON Schema of an object: its type must be 'object'", f"{place}.parameters"
        )
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{place}.strict must be true or false", f"{place}.strict")
    description = value.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.description must be a text", f"{place}.description")
    return Function(name, parameters or {}, bool(strict), place, is_custom)


def check_tools_size(values: list[Any]) -> None:
    """Raises ApiError 400."""
    try:
        size = len(msgspec.json.encode(values))
    except (RecursionError, UnicodeEncodeError):
        raise invalid("tools must be JSON that is neither nested too deeply nor broken Unicode", "tools") from None
    if size > MAX_TOOLS_BYTES:
        raise ApiError(
            400,
            f"tools may have at most {MAX_TOOLS_BYTES >> 10} KiB in all, got {size >> 10} KiB.",
            param="tools",
            code="invalid_value",
        )


def chosen(use: ToolUse, name: str, param: str) -> ToolUse:
    """A ToolUse in which this function must be called. Raises ApiError 400 if it is not one of the functions."""
    for function in use.functions:
        if function.name == name:
            return ToolUse("named", [function], use.parallel)
    raise invalid(f"{param}: there is no function {name[:64]!r} in tools", param)
