"""StructuredOutputs: a constraint on an output, as a kind of grammar and its text. Made by frontends, compiled by the core.

Length is checked when the struct is made, also when it is decoded from a message. Nesting is checked by `check_grammar`, which
the frontend calls so that its 400 can name the field, and the core calls again (both through sampling.check_against). Whether
the text is a valid grammar turns out when it is compiled (enginecore/grammar/).
"""

import re
from typing import Literal

import msgspec
import numpy as np

MAX_GRAMMAR_BYTES = 256 << 10  # length of the text in UTF-8
MAX_FIELD_CHARS = 128
MAX_GRAMMAR_DEPTH = 64  # brackets within brackets

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


class StructuredOutputs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """kind and text: json, a JSON Schema; json_object, any JSON object (no text); regex; choice, a JSON list of texts; grammar,
    in Lark or EBNF; structural_tag, JSON as vLLM's. field: the user's name for it, for errors. Raises ValueError if a text is
    too long."""

    kind: Kind
    text: str = ""
    field: str = ""

    def __post_init__(self) -> None:
        if len(self.field) > MAX_FIELD_CHARS:
            raise ValueError(f"structured_outputs: the name of its field may have at most {MAX_FIELD_CHARS} characters")
        if len(self.text) > MAX_GRAMMAR_BYTES or len(self.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"structured_outputs may be at most {MAX_GRAMMAR_BYTES >> 10} KiB long")

    @property
    def name(self) -> str:
        """The beginning of an error's text."""
        return self.field or f"structured_outputs ({self.kind})"


def check_grammar(wanted: StructuredOutputs) -> None:
    """Raises ValueError for brackets nested beyond MAX_GRAMMAR_DEPTH. 2 µs for a usual text, 5 ms for the longest."""
    num_opening = sum(wanted.text.count(bracket) for bracket in "([{")
    if num_opening > MAX_GRAMMAR_DEPTH and nesting_depth(wanted) > MAX_GRAMMAR_DEPTH:
        raise ValueError(f"{wanted.name}: brackets may be nested {MAX_GRAMMAR_DEPTH} deep at most")


def nesting_depth(wanted: StructuredOutputs) -> int:
    """Most brackets that are open at once, without quoted and escaped ones. In a regex only parentheses count."""
    data = wanted.text.encode(errors="replace")
    depth = _depth(data, wanted.kind == "regex")
    if wanted.kind == "grammar" and depth > MAX_GRAMMAR_DEPTH:  # 50 ms for the longest
        depth = _depth((_EBNF_QUOTED if b"::=" in data else _LARK_QUOTED).sub(b" ", data), False)
    return depth


def _depth(data: bytes, is_regex: bool) -> int:
    for escaped in (b"\\\\", b"\\(", b"\\)", b'\\"'):
        data = data.replace(escaped, b"  ")
    steps = (_PARENTHESES if is_regex else _BRACKETS)[np.frombuffer(data, np.uint8)]
    if not is_regex:
        quotes = np.frombuffer(data, np.uint8) == ord('"')
        steps[np.cumsum(quotes) & 1 == 1] = 0
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


# A grammar's texts, and the places in which quotation marks and brackets stand for themselves: EBNF's classes and Lark's
# regexes. An unterminated one ends with its line, so that time is linear.
_TEXT = rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
_EBNF_QUOTED = re.compile(_TEXT + rb"|\[[^\]\\\n]*(?:\\.[^\]\\\n]*)*\]?")
_LARK_QUOTED = re.compile(_TEXT + rb"|/[^/\\\n]*(?:\\.[^/\\\n]*)*/?")


def _steps(opening: bytes, closing: bytes) -> np.ndarray:
    """int8 [256]: the change of depth at a byte."""
    table = np.zeros(256, np.int8)
    table[list(opening)], table[list(closing)] = 1, -1
    return table


_PARENTHESES, _BRACKETS = _steps(b"(", b")"), _steps(b"([{", b")]}")
