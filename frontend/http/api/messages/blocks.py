"""Blocks: one output's events as Anthropic's content blocks, in steps: a content block is opened, gets pieces, is closed.

A stream sends each step as an event (stream.py); an answer in one piece collects them (`content_of`), so both have the same
content. Reasoning, texts and calls each have a content block of their own, in the order in which the model wrote them. A text
of white space alone has none.
"""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from quire.frontend.http.api.messages.schemas import ContentBlock, TextBlock, ThinkingBlock, ToolUseBlock
from quire.frontend.text.custom_calls import Parser
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Event, Reasoning

_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)
_OUR_ID = "chatcmpl-tool-"

Kind = Literal["text", "thinking", "tool_use"]


class Opened(msgspec.Struct, frozen=True):
    """A content block begins. id, name: a call's."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""


class Piece(msgspec.Struct, frozen=True):
    """More of the open content block: text, reasoning, or a call's input as JSON text."""

    index: int
    kind: Kind
    text: str


class Closed(msgspec.Struct, frozen=True):
    """The content block ends. signature: the reasoning's."""

    index: int
    kind: Kind
    signature: str = ""


Step = Opened | Piece | Closed


class Blocks:
    """max_calls: calls beyond it are left out. shows_reasoning: if False, reasoning has content blocks without text."""

    def __init__(self, parser: Parser, max_calls: int | None = None, shows_reasoning: bool = True) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self.open: Kind | None = None  # the kind of the open content block
        self.index = -1  # its number
        self.num_calls = 0
        self._blank: list[str] = []  # white space that may be the beginning of a text
        self._reasoning = hashlib.sha256()

    @property
    def never_reasoned(self) -> bool:
        return self._parser.never_reasoned

    def feed(self, text: str) -> list[Step]:
        """The steps that this piece of the output adds."""
        return self._steps(self._parser.feed(text))

    def finish(self) -> list[Step]:
        """The remaining steps, when the output has ended."""
        return self._steps(self._parser.finish()) + self._close()

    def _steps(self, events: Iterable[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            match event:
                case Content():
                    steps += self._text(event.text)
                case Reasoning():
                    steps += self._begin("thinking") if self.open != "thinking" else []
                    self._reasoning.update(event.text.encode())
                    steps += [Piece(self.index, "thinking", event.text)] if self._shows_reasoning else []
                case CallBegun() if self._is_wanted(event.index):
                    self.num_calls += 1
                    steps += self._begin("tool_use", id=event.id.replace(_OUR_ID, "toolu_"), name=event.name)
                case Arguments() if event.text and self._is_wanted(event.index):
                    steps.append(Piece(self.index, "tool_use", event.text))
        return steps

    def _is_wanted(self, call: int) -> bool:
        return self._max_calls is None or call < self._max_calls

    def _text(self, text: str) -> list[Step]:
        if self.open == "text":
            return [Piece(self.index, "text", text)]
        self._blank.append(text)
        if text.isspace():
            return []
        text = "".join(self._blank)
        return [*self._begin("text"), Piece(self.index, "text", text)]

    def _begin(self, kind: Kind, **of_call: str) -> list[Step]:
        steps = self._close()
        self.open = kind
        self.index += 1
        self._blank.clear()
        return [*steps, Opened(self.index, kind, **of_call)]

    def _close(self) -> list[Step]:
        kind, self.open = self.open, None
        if kind is None:
            return []
        signature = ""
        if kind == "thinking":
            signature = base64.b64encode(self._reasoning.digest()).decode()
            self._reasoning = hashlib.sha256()
        return [Closed(self.index, kind, signature)]


# ---------------------------------------------------------------------------------------------------------- in one piece
def content_of(steps: Iterable[Step]) -> list[ContentBlock]:
    """The content blocks that the steps result in."""
    content: list[ContentBlock] = []
    opened, texts = Opened(0, "text"), list[str]()
    for step in steps:
        match step:
            case Opened():
                opened, texts = step, []
            case Piece():
                texts.append(step.text)
            case Closed():
                content.append(_block(opened, "".join(texts), step.signature))
    return content


def _block(opened: Opened, text: str, signature: str) -> ContentBlock:
    match opened.kind:
        case "text":
            return TextBlock(text)
        case "thinking":
            return ThinkingBlock(text, signature)
    return ToolUseBlock(opened.id, opened.name, msgspec.Raw(input_of(text).encode()))


def input_of(arguments: str) -> str:
    """A call's arguments as a JSON object, whatever the model wrote; the complete part of arguments that break off."""
    for text in itertools.chain((arguments or "{}",), _completed(arguments)):
        try:
            if isinstance(json.loads(text, parse_constant=_no_json), dict):
                return text
        except (ValueError, RecursionError):
            pass
    return "{}"


def _completed(text: str) -> Iterator[str]:
    """A JSON text that breaks off, with its brackets closed: at its end, or after its last complete value."""
    closing: list[str] = []
    end = 0
    for token in _TOKENS.finditer(text):
        mark = token[0]
        if mark in "{[":
            closing.append("}" if mark == "{" else "]")
            end = token.end()
        elif mark in "}]" and closing:
            closing.pop()
            end = token.end()
        elif mark == ",":
            end = token.start()
    rest = "".join(reversed(closing))
    yield text + rest
    yield text[:end] + rest


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
