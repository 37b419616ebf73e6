"""Events that parsers of a model's output yield: content, reasoning and tool calls, piece by piece.

Every character of the output is in exactly one event: shown as it is (Content, Reasoning), as the source of a call's arguments,
or as Markup, which is part of the format and never shown. A text that a parser adds has an empty source. So the sources of all
events, joined, are the output; every parser's tests check that. tool_parsers/ and reasoning_parsers/ yield events, routes read
them.
"""

from typing import Literal

import msgspec


class Content(msgspec.Struct, frozen=True):
    """source: this part as it is in the output; None if it is the text."""

    text: str
    source: str | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """source: as of Content."""

    text: str
    source: str | None = None


class CallBegun(msgspec.Struct, frozen=True):
    """A call begins. index: its number in the output, from 0. kind: of the tool; a custom one's arguments are a plain text."""

    index: int
    id: str
    name: str
    kind: Literal["function", "custom"] = "function"


class Arguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text. source: the same part as it is in the output."""

    index: int
    text: str
    source: str


class Markup(msgspec.Struct, frozen=True):
    source: str


Event = Content | Reasoning | CallBegun | Arguments | Markup


def source_of(event: Event) -> str:
    """The characters of the output that are in this event."""
    match event:
        case Content() | Reasoning():
            return event.text if event.source is None else event.source
        case Arguments() | Markup():
            return event.source
    return ""


def merged(events: list[Event]) -> list[Event]:
    """The events with neighbours of a kind joined, in linear time."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    start = 0
    for i in range(1, len(events) + 1):
        if i == len(events) or not _joins(events[start], events[i]):
            result.append(_joined(events[start:i]))
            start = i
    return result


def _joins(a: Event, b: Event) -> bool:
    if type(a) is not type(b) or isinstance(a, CallBegun):
        return False
    if isinstance(a, Content | Reasoning) and isinstance(b, Content | Reasoning) and "" in (a.source, b.source):
        return False  # a text that a parser has added
    return not isinstance(a, Arguments) or (isinstance(b, Arguments) and a.index == b.index)


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if len(run) == 1:
        return first
    source = "".join(map(source_of, run))
    match first:
        case Content() | Reasoning():
            text = "".join([e.text for e in run if isinstance(e, Content | Reasoning)])
            return type(first)(text, None if text == source else source)
        case Arguments():
            return Arguments(first.index, "".join([e.text for e in run if isinstance(e, Arguments)]), source)
    return Markup(source)
