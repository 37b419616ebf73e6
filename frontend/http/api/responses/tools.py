"""Tools of a response, towards a chat: functions and custom tools, also those in namespaces, under names of their own.

A function of a namespace has both names in the model's calls, as `namespace__name`; `ChatTools` knows which tool a call means.
Tools that OpenAI's servers run are left out (tools/left_out.py). translate.py calls this.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.frontend.http.api.bodies.schemas import Json
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.left_out import is_left_out, leave_out
from quire.frontend.http.protocol.errors import ApiError

_MAX_NAME = 128
_MAX_DEPTH = 64  # of a function's parameters: they are repeated in the response, kept, and decoded again
_NOT_OF_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "allowed_callers": ([], ["direct"]),
}
_NOT_RUN = "this server runs no tools itself"


class ToolName(NamedTuple):
    name: str
    namespace: str | None = None


@dataclass
class ChatTools:
    """tools: as a chat has them; None if the request has none. names: what its client calls them. places: where they are."""

    tools: list[Json] | None = None
    names: dict[str, ToolName] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    def name_of(self, called: str) -> ToolName:
        return self.names.get(called) or ToolName(called)

    def place(self, index: int) -> str:
        """Where the chat's tool of this index is in the request."""
        return self.places[index] if index < len(self.places) else f"tools[{index}]"

    def choose(self, choice: Any) -> Any:
        """A request's tool_choice as a chat has it. Raises ApiError 400."""
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind in ("function", "custom"):
            return {"type": kind, kind: {"name": self._chosen(choice, kind)}}
        if kind != "allowed_tools":
            raise _not_chosen(
                "tool_choice", "it may be none, auto, required, or an object of type function, custom or allowed_tools"
            )
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [one for i, tool in enumerate(tools) for one in self._allowed(tool, f"tool_choice.tools[{i}]")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}

    def _allowed(self, tool: Any, place: str) -> Iterable[Json]:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if is_left_out(kind):
            raise _not_chosen(place, "name functions and custom tools")
        if kind not in ("function", "custom", "namespace") or not isinstance(tool.get("name"), str):
            raise invalid(f"{place} must be an object of type function, custom or namespace, with a name", place)
        if kind != "namespace":
            return [{"type": kind, kind: {"name": self._chosen(tool, kind)}}]
        members = [called for called, name in self.names.items() if name.namespace == tool["name"]]
        if not members:
            raise invalid(f"{place}: there is no namespace {tool['name'][:64]!r} in tools", place)
        return [{"type": "function", "function": {"name": called}} for called in members]

    def _chosen(self, tool: Json, kind: str) -> Any:
        """The name in a chat of a tool that is chosen. Without a namespace, a name that only one namespace has is found."""
        name, namespace = tool.get("name"), tool.get("namespace")
        if not isinstance(name, str) or (namespace is None and name in self.names):
            return name
        if isinstance(namespace, str):
            return called_name(ToolName(name, namespace))
        found = [called for called, known in self.names.items() if known.name == name]
        return found[0] if len(found) == 1 else name


def called_name(tool: ToolName) -> str:
    """The name by which a model calls a tool. The end of a name that is too long is kept."""
    if tool.namespace is None:
        return tool.name
    return f"{tool.namespace}{'' if tool.namespace.endswith('__') else '__'}{tool.name}"[-_MAX_NAME:]


def chat_tools(tools: Sequence[Json] | None) -> ChatTools:
    """Raises ApiError 400, naming the field."""
    if tools is None:
        return ChatTools()
    chat = ChatTools(tools=[])
    for i, tool in enumerate(tools):
        kind, place = tool.get("type"), f"tools[{i}]"
        if is_left_out(kind):
            leave_out(kind)  # type: ignore[arg-type]
        elif kind == "namespace":
            _add_namespace(chat, tool, place)
        else:
            _add(chat, tool, place)
    return chat


def _add_namespace(chat: ChatTools, space: Json, place: str) -> None:
    """The description of a namespace goes before that of its first function."""
    name, tools, about = space.get("name"), space.get("tools"), space.get("description")
    if not isinstance(name, str) or not name:
        raise invalid(f"{place}.name must be a text that is not empty", f"{place}.name")
    if about is not None and not isinstance(about, str):
        raise invalid(f"{place}.description must be a text", f"{place}.description")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid(f"{place}.tools must be a list of tools", f"{place}.tools")
    for i, tool in enumerate(tools):
        if is_left_out(tool.get("type")):
            leave_out(tool["type"])
            continue
        own = tool.get("description")
        if about and (own is None or isinstance(own, str)):
            tool, about = {**tool, "description": f"{about}\n\n{own or ''}".rstrip()}, None
        _add(chat, tool, f"{place}.tools[{i}]", name)


def _add(chat: ChatTools, tool: Json, place: str, namespace: str | None = None) -> None:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        raise ApiError(
            400,
            f"{place}.type: tools may be of type function, custom or namespace, for {_NOT_RUN}; got {str(kind)[:40]!r}.",
            param=f"{place}.type",
            code="unsupported_value",
        )
    for field_name, harmless in _NOT_OF_FUNCTIONS.items():
        if (value := tool.get(field_name)) is not None and value not in harmless:
            where = f"{place}.{field_name}"
            raise ApiError(400, f"{where}: this value is not supported by this server.", param=where, code="unsupported_value")
    if _depth(tool.get("parameters")) > _MAX_DEPTH:
        where = f"{place}.parameters"
        raise invalid(f"{where} may be nested {_MAX_DEPTH} deep at most", where)
    fields = ("name", "description", "format") if kind == "custom" else ("name", "description", "parameters", "strict")
    given = {key: tool[key] for key in fields if tool.get(key) is not None}
    if isinstance(name, str):
        given["name"] = _called(chat, ToolName(name, namespace), place)
    assert chat.tools is not None
    chat.tools.append({"type": kind, kind: given})
    chat.places.append(place)


def _called(chat: ChatTools, tool: ToolName, place: str) -> str:
    """The tool's name towards the model. Raises ApiError 400 if another tool has it, too."""
    called = called_name(tool)
    other = chat.names.setdefault(called, tool)
    if other != tool:
        names = " and ".join(f"{t.name[:64]!r}{f' of {t.namespace[:64]!r}' if t.namespace else ''}" for t in (other, tool))
        raise invalid(
            f"{place}.name: {names} are both called {called!r} towards the model; rename one of them", f"{place}.name"
        )
    return called


def _depth(value: Any) -> int:
    """The depth of nested lists and objects."""
    depth, level = 0, [value]
    while level := [item for outer in level for item in _inner(outer)]:
        depth += 1
    return depth


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _not_chosen(place: str, instead: str) -> ApiError:
    return ApiError(400, f"{place}: {_NOT_RUN}; {instead}.", param=place, code="unsupported_value")
