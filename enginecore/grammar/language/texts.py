"""Turns what a user asks for into a grammar as llguidance reads it: Lark with `no_forcing`, for all kinds.

no_forcing leaves the choice among the tokenizations of a text to the model, as it was in training. White space in JSON is
limited to nothing, a space, or a line break with an indentation (`x-guidance` in the schema changes it). Without a limit a
model that should write the next key may write line breaks until its tokens are used up, so all engines have one.

Runs in the process that tries grammars (trial.py): its time grows with its input. Raises ValueError, with a text for the user.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quire.enginecore.grammar.language.ebnf import is_ebnf, lark_of
from quire.enginecore.grammar.language.lark import OPTIONS, json_schema, one_of, regex_body
from quire.enginecore.grammar.language.structural_tag import structural_tag
from quire.ipc.structured_outputs import Kind, StructuredOutputs

MAX_ERROR_CHARS = 1000
_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")
_WITHIN = re.compile(r"\s*while processing [a-z-]+:\S*")
_ONE_OF = re.compile(r"oneOf constraints are not supported\. Enable 'coerce_one_of' .*")
_ONE_OF_IN_WORDS = (
    "oneOf with alternatives that may overlap is not supported; use anyOf, or a required property that tells them apart"
)
_EXCERPT = re.compile(r"^ +\d+ \| ", re.M)  # how llguidance begins the lines in which it quotes the grammar


def to_lark(wanted: StructuredOutputs, special_names: Mapping[str, int] = MappingProxyType({})) -> str:
    """special_names: of tokens that are not text, to their ids. Raises ValueError that says what is wrong, and where."""
    if wanted.kind == "structural_tag":
        return structural_tag(_decoded(wanted.text), special_names)
    return _KINDS[wanted.kind](wanted.text)


def in_words(wanted: StructuredOutputs, error: str) -> str:
    """llguidance's error for the user, without our own text and places in it. In a user's Lark its places stay."""
    if "NoExtension" in error:
        return "there is no text that it allows"
    error = error.partition("; following special tokens")[0].replace("<non-verbose/>", "")
    if wanted.kind != "grammar" or is_ebnf(wanted.text):
        error = _WITHIN.sub("", _EXCERPT.split(_PLACE.sub("", error))[0])
        error = _ONE_OF.sub(_ONE_OF_IN_WORDS, error)
    return (
        "\n".join(line for line in error.splitlines() if OPTIONS not in line).strip()[:MAX_ERROR_CHARS] or "it cannot be read"
    )


# -------------------------------------------------------------------------------------------------------------- kinds
def _json(text: str) -> str:
    return f"{OPTIONS}\nstart: {json_schema(_decoded(text))}\n"


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _choice(text: str) -> str:
    choices = _decoded(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a choice must be a list of texts, none of them empty")
    return f"start: OUTPUT\nOUTPUT: {one_of(choices)}\n{OPTIONS}\n"


_KINDS: dict[Kind, Callable[[str], str]] = {
    "json": _json,
    "json_object": lambda _: _json('{"type":"object"}'),
    "regex": lambda text: f"start: OUTPUT\nOUTPUT: {regex_body(text)}\n{OPTIONS}\n",
    "choice": _choice,
    "grammar": lambda text: f"{lark_of(text)}\n{OPTIONS}\n",
}
