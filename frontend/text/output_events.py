"""Events that parsers of a model's output yield: content, reasoning and tool calls, piece by piece.

Every character of the output is in exactly one event: shown as it is (Content, Reasoning), as the source of a call's arguments,
or as Markup, which is part of the format and never shown. So the sources of all events, joined, are the output; every parser's
tests check that. tool_parsers/ and reasoning_parsers/ yield events, routes read them.
"""

import msgspec


class Content(msgspec.Struct, frozen=True):
    """is_added: the output does not have this text."""

    text: str
    is_added: bool = False


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A call begins. index: its number in the output, from 0."""

    index: int
    id: str
    name: str


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
        case Content():
            return "" if event.is_added else event.text
        case Reasoning():
            return event.text
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
    if isinstance(a, Content) and isinstance(b, Content) and (a.is_added or b.is_added):
        return False
    return not isinstance(a, Arguments) or (isinstance(b, Arguments) and a.index == b.index)


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if len(run) == 1:
        return first
    source = "".join(map(source_of, run))
    match first:
        case Content():
            return Content(source)
        case Reasoning():
            return Reasoning(source)
        case Arguments():
            return Arguments(first.index, "".join([e.text for e in run if isinstance(e, Arguments)]), source)
    return Markup(source)
