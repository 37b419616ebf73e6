"""Target: parsers of outputs: tool calls, reasoning before them, custom tools behind them, and Harmony. A text, in pieces.

However a text is cut, the same comes out, in the same order, and every character of it is in some event. A call's arguments
can be made into an object.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import tool_cases
from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import ODD_TEXTS, mutated_text, pieces_of
from harmony_cases import cases as harmony_cases
from tool_cases import FORMATS, SCHEMAS
from tool_texts import written

from quire.frontend.http.api.messages.blocks import input_of
from quire.frontend.text.custom_calls import CustomCalls
from quire.frontend.text.harmony.parser import HarmonyParser
from quire.frontend.text.harmony.tokens import MARKS, spelled
from quire.frontend.text.output_events import Arguments, CallBegun, Event, Markup, Reasoning, merged, source_of
from quire.frontend.text.output_parser import OutputParser
from quire.frontend.text.reasoning_parsers.choice import REASONING_PARSERS
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS

_LONGEST = 4000  # characters
_BYTE_BY_BYTE = 1000
_CUTS = 4
_CALLS = [[("f", {"a": "x\n✓", "n": 1})], [("g", {"o": {"p": [1, None, "\"'"]}}), ("f", {})], [("f", {"input": "a\\b"})]]
_WORDS = [
    *MARKS,
    *ODD_TEXTS,
    *'{}[]",:\\ \n<>|()=',
    "functions.",
    " to=functions.f",
    "```",
    "<think>",
    "</think>",
    "\\u00e",
    "\\ud83d",
    "null",
    "f",
]


def seeds() -> Sequence[Case]:
    found = []
    for i, (name, text, *_) in enumerate(tool_cases.CASES):
        if text.strip():
            found.append(_case(text, tools=name, seed=i))
    for name in FORMATS:
        for i, calls in enumerate(_CALLS):
            thinks = sorted(REASONING_PARSERS)[len(found) % len(REASONING_PARSERS)]
            tags = REASONING_PARSERS[thinks]
            text = f"{tags.starts[0]}hm{tags.ends[0]}\n{(tags.frame or [''])[0]}{written(name, calls)}"
            found += [
                _case(written(name, calls), tools=name, seed=i),
                _case(text, tools=name, reasoning=thinks, custom=True, seed=i),
            ]
    found += [_case("".join(pieces), harmony=True, seed=i) for i, pieces in enumerate(harmony_cases()[:120])]
    return found


def _case(text: str, **head: Any) -> Case:
    return Case(head, text.encode(errors="surrogatepass"))


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    head = {**case.head, "seed": draw.randrange(1 << 30)}
    if "harmony" not in head and draw.random() < 0.3:
        head |= {"reasoning": draw.choice([None, *sorted(REASONING_PARSERS)]), "opened": draw.choice([None, True, False])}
        head |= {"custom": draw.random() < 0.5, "forced": draw.random() < 0.3}
    other = draw.choice(others).payload.decode(errors="surrogatepass")
    at = draw.randrange(len(other) + 1)
    words = [*_WORDS, other[at : at + 12], other[:at]]
    name = head.get("tools")
    words += TOOL_PARSERS[name].special if name in TOOL_PARSERS else ()
    words += REASONING_PARSERS[head["reasoning"]].tags() if head.get("reasoning") else ()
    text = mutated_text(draw, case.payload.decode(errors="surrogatepass"), words)[:_LONGEST]
    return Case(head, text.encode(errors="surrogatepass"))


# --------------------------------------------------------------------------------------------------------------- a case
def check(case: Case) -> None:
    text, draw = case.payload.decode(errors="surrogatepass"), Draw(case.head["seed"])
    text = "".join(char for char in text if not 0xD800 <= ord(char) < 0xE000)  # an output is decoded from UTF-8
    if case.head.get("harmony"):
        for marker, mark in MARKS.items():
            text = text.replace(marker, mark)
    make = _maker(case.head)
    whole = _parsed(make, [text])
    cuts = [pieces_of(draw, text) for _ in range(_CUTS)]
    if len(text) <= _BYTE_BY_BYTE:
        cuts.append(list(text))
    for pieces in cuts:
        cut = _parsed(make, pieces)
        must("".join(map(source_of, cut)) == spelled(text), "characters are lost, in pieces:", pieces, cut)
        must(_shown(cut) == _shown(whole), "in pieces:", pieces, _shown(cut), "whole:", _shown(whole))
    must("".join(map(source_of, whole)) == spelled(text), "characters are lost:", whole)
    for arguments in _arguments(whole):
        must(isinstance(json.loads(input_of(arguments)), dict), "a call's input is no object:", arguments)


def _maker(head: dict[str, Any]) -> Callable[[], Any]:
    if head.get("harmony"):
        return lambda: HarmonyParser(takes_calls=head["seed"] % 5 > 0, in_final=head["seed"] % 7 == 0, new_id=lambda: "id")
    name, reasoning = head.get("tools"), head.get("reasoning")

    def make() -> Any:
        tools = tool_cases.parser_of(name)
        if head.get("forced") and name in TOOL_PARSERS:
            tools = TOOL_PARSERS[name](SCHEMAS, new_id=lambda: "id", is_forced=True)
        parser = OutputParser(REASONING_PARSERS[reasoning](head.get("opened")) if reasoning else None, tools)
        return CustomCalls(parser, frozenset("f")) if head.get("custom") else parser

    return make


def _parsed(make: Callable[[], Any], pieces: Sequence[str]) -> list[Event]:
    parser = make()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def _shown(events: list[Event]) -> list[Any]:
    """What a client gets, in order: texts by kind, calls with their arguments."""
    return [
        (type(event).__name__, getattr(event, "text", ""), getattr(event, "name", ""))
        for event in merged([event for event in events if not isinstance(event, Markup)])
        if not isinstance(event, Arguments | Reasoning) or event.text
    ]


def _arguments(events: list[Event]) -> list[str]:
    texts: list[str] = []
    for event in events:
        if isinstance(event, CallBegun):
            must(event.index == len(texts), "calls are not in order:", events)
            texts.append("")
        elif isinstance(event, Arguments):
            texts[event.index] += event.text
    return texts


TARGET = Target("parsers", seeds, mutate, check)
