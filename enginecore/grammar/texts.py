"""From what a user asks for to a grammar as llguidance reads it: Lark with `no_forcing`, whatever the kind was.

no_forcing leaves the choice among the tokenizations of a text to the model, as it had it when it was trained. White space in
JSON is bounded: nothing, a space, or a line break with an indentation; left to itself, a model that should write the next
key can write line breaks to the end of its tokens, so that all engines bound it in some way (`x-guidance` in the schema
changes it).

Runs in the process that tries grammars (trial.py): it is as fast as its input is small, and raises ValueError for the user.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from quire.ipc.structured_outputs import Kind, StructuredOutputs

OPTIONS = '%llguidance {"no_forcing": true}'
WHITESPACE = r"(?: |\r?\n[ \t]{0,32})"
MAX_ERROR_CHARS = 1000
EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.M)
_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"^ +\d+ \| ", re.M)  # how lines of the grammar begin, with what points into them


def to_lark(wanted: StructuredOutputs, special_names: Collection[str] = ()) -> str:
    """special_names: of tokens that are no text. Raises ValueError: what is wrong with it, and where."""
    if wanted.kind == "structural_tag":
        return _structural_tag(wanted.text, special_names)
    return _KINDS[wanted.kind](wanted.text)


def in_words(kind: Kind, error: str) -> str:
    """llguidance's error, for the user: without what we wrote around it, and without places in that."""
    error = error.partition("; following special tokens")[0].replace("<non-verbose/>", "")
    if kind != "grammar":
        error = _EXCERPT.split(_PLACE.sub("", error))[0]
    return "\n".join(line for line in error.splitlines() if OPTIONS not in line).strip()[:MAX_ERROR_CHARS]


# -------------------------------------------------------------------------------------------------------------- kinds
def _json(text: str) -> str:
    return f"{OPTIONS}\nstart: {_schema(_decoded(text))}\n"


def _schema(schema: Any) -> str:
    """A JSON Schema as a rule's body."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON Schema must be an object, got {'false' if schema is False else type(schema).__name__}")
    options = schema.get("x-guidance")
    options = options if isinstance(options, dict) else {}
    if not options.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        options = {**options, "whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _regex(text: str) -> str:
    if not text:
        raise ValueError("a regex must not be empty")
    pattern = llguidance.regex_to_lark(_without_anchors(text).replace("\n", "\\n").replace("\r", "\\r"), "dws")  # type: ignore[attr-defined]
    return f"start: OUTPUT\nOUTPUT: /{pattern}/\n{OPTIONS}\n"


def _without_anchors(text: str) -> str:
    """A regex is matched against the whole output: anchors around all of it say nothing."""
    if "|" in text:  # they may belong to one alternative
        return text
    text = text.removeprefix("^")
    return text[:-1] if re.search(r"(?<!\\)(\\\\)*\$$", text) else text


def _choice(text: str) -> str:
    choices = _decoded(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a choice must be a list of texts, none of them empty")
    return f"start: OUTPUT\nOUTPUT: {' | '.join(map(_quoted, choices))}\n{OPTIONS}\n"


def _quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def _grammar(text: str) -> str:
    if not EBNF_RULE.search(text):
        return f"{text}\n{OPTIONS}\n"
    try:
        return f"{gbnf_to_lark(text)}\n{OPTIONS}\n"
    except RecursionError:
        raise ValueError("the EBNF is nested too deeply") from None
    except GbnfToLarkError as error:
        raise ValueError(f"the EBNF cannot be read: {error}") from None
    except Exception as error:  # its only other class, for rules that are missing or there twice
        raise ValueError(f"the EBNF cannot be read: {error}") from None


_KINDS: dict[Kind, Callable[[str], str]] = {
    "json": _json,
    "json_object": lambda _: _json('{"type":"object"}'),
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


# ----------------------------------------------------------------------------------------------------- structural tags
class _Structure(msgspec.Struct):
    begin: str
    schema: Any = True
    end: str = ""


class _StructuralTag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _structural_tag(text: str, special_names: Collection[str]) -> str:
    """Any text; a trigger in it must begin one of the structures, whose content follows its schema up to its end."""
    if isinstance(given := _decoded(text), dict) and "format" in given:
        raise ValueError("structural_tag: `format` is not supported; `structures` (begin, schema, end) with `triggers` are")
    try:
        tag = msgspec.json.decode(text, type=_StructuralTag)
    except msgspec.ValidationError as error:
        raise ValueError(f"structural_tag: {error}") from None
    if not tag.structures or not all(tag.triggers):
        raise ValueError("structural_tag needs at least one structure, and no empty trigger")
    rules = [_structure(i, s, tag.triggers, special_names) for i, s in enumerate(tag.structures)]
    names = " | ".join(f"tag_{i}" for i in range(len(rules)))
    return "\n".join([OPTIONS, f"start: ({names})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules, ""])


def _structure(index: int, structure: _Structure, triggers: list[str], special_names: Collection[str]) -> str:
    trigger = next((t for t in triggers if structure.begin.startswith(t)), None)
    if trigger is None:
        raise ValueError(f"structural_tag: {structure.begin!r} begins with none of the triggers {triggers}")
    begin = structure.begin[len(trigger) :]
    parts = [_quoted(begin)] * bool(begin) + [_schema(structure.schema)] + [_literal(structure.end, special_names)]
    if trigger in special_names:  # a token, which no text can be mistaken for
        return f"tag_{index}: TEXT {_literal(trigger, special_names)} {' '.join(parts)}"
    return f"head_{index}[lazy]: TEXT {_quoted(trigger)}\ntag_{index}: head_{index} {' '.join(parts)}"


def _literal(text: str, special_names: Collection[str]) -> str:
    if text in special_names and text.startswith("<") and text.endswith(">"):
        return text
    return _quoted(text) if text else ""
