"""What parsers of a model's output yield: content, reasoning and tool calls, piece by piece.

Every character of the output stands in exactly one event: shown as it is (Content, Reasoning), as the source of a call's
arguments, or as Markup, which belongs to the format alone and is shown to nobody. So the sources of all events, joined, are the
output; the tests of every parser hold it to that. Yielded by tool_parsers/ and reasoning_parsers/, read by the routes.
"""

import msgspec


class Content(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """index counts the calls of one output from 0."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text; source: what it was in the output."""

    index: int
    text: str
    source: str


class Markup(msgspec.Struct, frozen=True):
    source: str


Event = Content | Reasoning | CallBegun | Arguments | Markup


def source_of(event: Event) -> str:
    """The characters of the output that an event stands for."""
    match event:
        case Content() | Reasoning():
            return event.text
        case Arguments() | Markup():
            return event.source
    return ""


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbours of a kind joined, in linear time."""
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
