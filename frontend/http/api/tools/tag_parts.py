"""Parts of structural tags, from which call_formats.py and xml_call_formats.py build the formats of tool calls.

A part is a format of enginecore/grammar/language/structural_tag.py, as the dict that becomes JSON.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.frontend.http.api.tools.tool_use import Function

Format = dict[str, Any]
Functions = Sequence[Function]
Builder = Callable[[Functions, bool], Format]  # the bool: whether one answer may hold several calls

ANY_SPACE = {"type": "regex", "pattern": r"[ \n]?"}


def named(function: Function, arguments: str = "arguments") -> str:
    """The beginning of a call in JSON, up to its arguments."""
    return f'{{"name": "{function.name}", "{arguments}": '


def ref(function: Function) -> Format:
    """A reference to the definition of its arguments."""
    return {"type": "ref", "name": function.name}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], tags: list[Format], **fields: Any) -> Format:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **fields}


def separated(tags: list[Format], separator: str, several: bool) -> Format:
    """One call or, if several may be made, any number of them."""
    listed = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
    return listed if several else {**listed, "stop_after_first": True}


def sequence(elements: Iterable[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}
