"""Translate a request's system prompt and messages, made of content blocks, into the messages that a chat template takes.

Consecutive turns of one role are joined. A tool's result becomes a message of the role "tool", an assistant's thinking becomes
reasoning_content. A content block that a text model cannot take, or in a wrong place, is an ApiError 400 that names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, Json
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.messages.schemas import Block, CountTokensRequest, InputMessage
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.media.parts import PLACE
from quire.frontend.text.prompt_marks import CACHE_CONTROL

_ATTRIBUTION = "x-anthropic-billing-header:"  # of Claude Code's first system block, for billing; it differs in each request
# Uses and results of tools that Anthropic's servers run, in a conversation that began there: passed over.
_OF_SERVER_TOOLS = frozenset(
    (
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "compaction",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    )
)
_MEDIA = frozenset(("image", "document", "search_result", "container_upload"))

T = TypeVar("T")


def chat_messages(body: CountTokensRequest) -> list[Json]:
    """The messages of a chat. Raises ApiError 400."""
    turns = _Turns()
    if system := _system_text(body.system):
        turns.of("system").texts.append(system)
    for i, message in enumerate(body.messages):
        _READ[message.role](turns, message, f"messages[{i}]")
        if message.role != "user" and _is_marked(message.content):
            turns.mark()
    if len(turns.turns) > MAX_ITEMS:
        raise invalid(f"messages may hold at most {MAX_ITEMS} turns and results of tools", "messages")
    return [turn.message() for turn in turns.turns]


def without_later_system(messages: list[Json]) -> list[Json] | None:
    """The messages with later system messages moved into users' turns, for templates that take a system message only at the
    beginning; None if there are none. Claude Code sends such messages."""
    if all(message["role"] != "system" for message in messages[1:]):
        return None
    result = messages[:1]
    for message in messages[1:]:
        if message["role"] == "system":
            message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        if message["role"] == "user" == result[-1]["role"]:
            result[-1] = {"role": "user", "content": _parts(result[-1]["content"])}
            result[-1]["content"] += _parts(message["content"])
        else:
            result.append(message)
    return result


def _parts(content: str | list[Json]) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


@dataclass(slots=True)
class _Turn:
    """A message that is being built. texts: its parts, which are texts or images. more: fields of the role "tool". marks: how
    many of its parts were there before each cache_control."""

    role: str
    texts: list[str | Json] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    more: Json = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)

    def message(self) -> Json:
        has_images = not all(isinstance(text, str) for text in self.texts)
        if has_images or (self.role == "user" and len(self.texts) > 1):
            content: Any = [self._part(i) for i in range(len(self.texts))]
        else:
            content = "\n\n".join(text for text in self.texts if isinstance(text, str) and text)
        message: Json = {"role": self.role, "content": content, **self.more}
        if self.calls:
            message["tool_calls"] = self.calls
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.marks and (isinstance(message["content"], str) or self.marks[-1] == len(self.texts)):
            message[CACHE_CONTROL] = True
        return message

    def _part(self, i: int) -> Json:
        text = self.texts[i]
        part = {"type": "text", "text": text} if isinstance(text, str) else text
        return {**part, CACHE_CONTROL: True} if i + 1 in self.marks and i + 1 < len(self.texts) else part


class _Turns:
    """The conversation so far. names: the called tools' names by the ids of the calls."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self.names: dict[str, str] = {}

    def of(self, role: str) -> _Turn:
        """The last turn if it has this role, else a new one."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(_Turn(role))
        return self.turns[-1]

    def mark(self) -> None:
        """A block with cache_control was read."""
        if self.turns:
            self.turns[-1].marks.append(len(self.turns[-1].texts))


def _system_text(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, f"system[{i}]") for i, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(_ATTRIBUTION))


def _is_marked(content: str | Sequence[Block] | None) -> bool:
    return not isinstance(content, str) and any(block.cache_control is not None for block in content or ())


def _content(message: InputMessage, place: str) -> str | list[Block]:
    content = message.content
    if content is None:
        _needed(None, f"{place}.content")
    assert content is not None
    return content


def _read_system(turns: _Turns, message: InputMessage, place: str) -> None:
    turns.of("system").texts.append(_joined(_content(message, place), f"{place}.content"))


def _read_user(turns: _Turns, message: InputMessage, place: str) -> None:
    content = _content(message, place)
    if isinstance(content, str):
        turns.of("user").texts.append(content)
        return
    if not content:
        turns.of("user")
    for j, block in enumerate(content):
        where = f"{place}.content[{j}]"
        if block.type == "tool_result":
            turns.turns.append(_result(turns, block, where))
        elif block.type not in _OF_SERVER_TOOLS:
            turns.of("user").texts.append(_image(block, where) if block.type == "image" else _text(block, where))
        if block.cache_control is not None:
            turns.mark()


def _result(turns: _Turns, block: Block, place: str) -> _Turn:
    call = _needed(block.tool_use_id, f"{place}.tool_use_id")
    name = {"name": turns.names[call]} if call in turns.names else {}  # some templates need it
    return _Turn("tool", _result_parts(block, f"{place}.content"), more={"tool_call_id": call, **name})


def _result_parts(block: Block, place: str) -> list[str | Json]:
    """A result's text, or its texts and images in order."""
    content, error = block.content or "", "Error: " if block.is_error else ""
    if isinstance(content, str) or not any(each.type == "image" for each in content):
        return [error + _joined(content, place)]
    blocks = [(f"{place}[{j}]", each) for j, each in enumerate(content) if each.type not in _OF_SERVER_TOOLS]
    parts = [_image(each, where) if each.type == "image" else _text(each, where) for where, each in blocks]
    return [error, *parts] if error else parts


def _read_assistant(turns: _Turns, message: InputMessage, place: str) -> None:
    turn, texts = turns.of("assistant"), []
    if isinstance(message.content, str):
        turn.texts.append(message.content)
        return
    for j, block in enumerate(message.content or ()):
        where = f"{place}.content[{j}]"
        match block.type:
            case "thinking":
                turn.reasoning.append(_needed(block.thinking, f"{where}.thinking"))
            case "redacted_thinking":
                pass  # encrypted by Anthropic
            case kind if kind in _OF_SERVER_TOOLS:
                pass
            case "tool_use":
                turn.calls.append(_call(turns, block, where))
            case _:
                texts.append(_text(block, where))
    turn.texts.append("".join(texts))


def _call(turns: _Turns, block: Block, place: str) -> Json:
    call, name = _needed(block.id, f"{place}.id"), _needed(block.name, f"{place}.name")
    turns.names[call] = name
    return {"id": call, "type": "function", "function": {"name": name, "arguments": _input(block, f"{place}.input")}}


def _input(block: Block, place: str) -> str:
    """A call's input as JSON text; chat_template.py decodes and bounds the arguments of all calls."""
    text, block.input = bytes(block.input), msgspec.Raw()  # the Raw would keep the whole body in memory
    if text in (b"", b"null"):
        _needed(None, place)
    if not text.startswith(b"{"):
        raise invalid(f"{place} must be an object", place)
    return text.decode(errors="replace")


def _image(block: Block, place: str) -> Json:
    """An image as a chat's part; whether the model takes it, the chat tells."""
    source = _needed(block.source, f"{place}.source")
    kind = source.get("type")
    match kind:
        case "base64":
            kind_of_media = source.get("media_type")
            url = f"data:{kind_of_media if isinstance(kind_of_media, str) else ''};base64,{_field(source, 'data', place)}"
        case "url":
            url = _field(source, "url", place)
        case "file":
            return {"type": "input_image", "file_id": _field(source, "file_id", place), PLACE: place}
        case _:
            raise invalid(f"{place}.source.type must be base64, url or file", f"{place}.source.type")
    return {"type": "image_url", "image_url": {"url": url}, PLACE: place}


def _field(source: Json, name: str, place: str) -> str:
    value = _needed(source.get(name), f"{place}.source.{name}")
    if not isinstance(value, str):
        raise invalid(f"{place}.source.{name} must be a text", f"{place}.source.{name}")
    return value


_READ = {"system": _read_system, "user": _read_user, "assistant": _read_assistant}


def _joined(content: str | Sequence[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    blocks = [(j, block) for j, block in enumerate(content) if block.type not in _OF_SERVER_TOOLS]
    return "\n".join([_text(block, f"{place}[{j}]") for j, block in blocks])


def _text(block: Block, place: str) -> str:
    """The text of a content block that must be a text, or of one that says which tool a client's own search has found."""
    if block.type == "text":
        return _needed(block.text, f"{place}.text")
    if block.type == "tool_reference":
        return f"The function {_needed(block.tool_name, f'{place}.tool_name')} can be called now."
    if block.type in _MEDIA:
        what = f"{place}: no block of type {block.type!r} is taken here; send its text as a block of type 'text'."
    else:
        what = f"{place}: a block of type {block.type[:64]!r} is not taken here."
    raise ApiError(400, what, param=place, code="unsupported_value")


def _needed(value: T | None, place: str) -> T:
    if value is None:
        raise ApiError(400, f"{place}: this field is required.", param=place, code="missing_required_parameter")
    return value
