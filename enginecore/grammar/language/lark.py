"""Writes Lark as llguidance reads it: literals, schemas, regexes, and a Writer that names rules and tokens.

A token (a lexeme) is matched as far as possible, and the parser sees it when it has ended. So whatever is regular should be one
token, which keeps all continuations open; only what is not regular should be a rule of several tokens. A `[lazy]` token ends at
its first match, and wins against tokens that would go on.

Used by texts.py and structural_tag.py, in the process that tries grammars.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import llguidance

from quire.enginecore.grammar.language.alternatives import exclude_each_other, resolver
from quire.enginecore.grammar.language.regex_text import on_one_line
from quire.enginecore.grammar.language.schema_keywords import in_known_words, with_discriminator
from quire.enginecore.grammar.language.schema_values import (
    COUNTS,
    LOWER_BOUNDS,
    UPPER_BOUNDS,
    check_literal,
    check_min_properties,
    kept_bound,
    kept_count,
)
from quire.enginecore.grammar.language.tag_formats import field_of

OPTIONS = '%llguidance {"no_forcing": true}'
WHITESPACE = r"(?: |\r?\n[ \t]{0,32})"
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_DATA = frozenset(("const", "enum", "default", "examples", "x-guidance"))  # keywords with values that are not schemas
_LITERALS = frozenset(("const", "enum"))
_DEFINITIONS = ("$defs", "definitions")
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))  # maps of names to schemas
_MADE = "x-guidance:"  # prefix of the names of definitions that are made here
ANY, SOME = r"/(.|\n)*/", r"/(.|\n)+/"


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def one_of(texts: Iterable[str]) -> str:
    """The body of a token that is one of these texts."""
    return f"({' | '.join(map(quoted, texts))})"


class Place(NamedTuple):
    """Where a part of a schema is: a JSON pointer, and the field that it starts from if a frontend's grammar has several."""

    field: str = ""
    pointer: str = ""

    def inner(self, key: str | int) -> "Place":
        return self._replace(pointer=f"{self.pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")

    def checked(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `check` returns; if it raises ValueError, add this place to the text."""
        try:
            return check(*arguments)
        except ValueError as error:
            raise ValueError(f"{self.field}{': ' * bool(self.field)}at #{self.pointer}: {error}") from None


START = Place()


def json_schema(schema: Any, place: Place = START, **options: Any) -> str:
    """A JSON Schema as the body of a rule. place: where it is in the schema that has its definitions. options: llguidance's,
    beside the schema's own. Raises ValueError, with the place, for what is not a schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON Schema must be an object, got {'false' if schema is False else type(schema).__name__}")
    own = schema.get("x-guidance")
    own = {**own, **options} if isinstance(own, dict) else options
    if not own.keys() & {"whitespace_pattern", "whitespace_flexible"}:
        own = {**own, "whitespace_pattern": WHITESPACE}
    how, definitions = _How(own.get("lenient") is True, schema), {k: schema[k] for k in _DEFINITIONS if k in schema}
    rest = _kept({key: schema[key] for key in schema if key not in _DEFINITIONS}, how, place)
    definitions = _kept(definitions, how, START)
    if made := how.kept_definitions():
        definitions["$defs"] = {**definitions.get("$defs", {}), **made}
    return "%json " + json.dumps({**rest, **definitions, "x-guidance": own})


class _How:
    """How a schema is rewritten, and definitions that this adds to it. lenient: drop what llguidance cannot keep."""

    def __init__(self, lenient: bool, schema: Any) -> None:
        self.lenient = lenient
        self._resolve = resolver(schema)
        self._made: dict[str, Any] = {}  # by name
        self._names: dict[str, str] = {}

    def resolve(self, ref: str) -> Any:
        """The schema that a reference names."""
        name = ref.removeprefix("#/$defs/")
        return self._made[name] if name in self._made else self._resolve(ref)

    def define(self, what: str, schema: Any) -> str:
        """Add a definition; returns the reference to it. what: a key, for which it is added once."""
        name = self._names.setdefault(what, f"{_MADE}{len(self._names)}")
        self._made.setdefault(name, schema)
        return f"#/$defs/{name}"

    def kept_definitions(self) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        while len(kept) < len(self._made):  # rewriting one may add others
            name = list(self._made)[len(kept)]
            kept[name] = _kept(self._made[name], self, START)
        return kept


def _kept(schema: Any, how: _How, place: Place) -> Any:
    """A schema as llguidance keeps it: without formats that it does not know and would refuse (JSON Schema's only annotate), in
    keywords that it knows (schema_keywords.py), with values that it keeps (schema_values.py), and with anyOf for a oneOf that
    means the same (alternatives.py). Raises ValueError for other values.

    lenient: also without types that do not exist, and without patterns that it cannot compile (look-around, back references,
    other dialects), which its own option of this name does not drop; a literal or minProperties that it would not keep passes.
    """
    if isinstance(schema, list):
        return [_kept(item, how, place.inner(i)) for i, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    if place.pointer and (field := field_of(schema)) is not None:
        place = Place(field)
    schema = with_discriminator(in_known_words(schema, how.resolve, bool(place.pointer)), how.resolve, how.define)
    if not how.lenient:
        place.inner("minProperties").checked(check_min_properties, schema)
    result: dict[str, Any] = {}
    for key, value in schema.items():
        there = place.inner(key)
        if key in _DATA:
            if key in _LITERALS and not how.lenient:
                there.checked(check_literal, value)
            result[key] = value
        elif key in _NAMED and isinstance(value, dict):
            result[key] = {name: _kept(inner, how, there.inner(name)) for name, inner in value.items()}
        elif key in LOWER_BOUNDS or key in UPPER_BOUNDS:
            result[key] = there.checked(kept_bound, key, value)
        elif key in COUNTS:
            result[key] = kept_count(value)
        elif how.lenient and key in ("pattern", "type") and not _can_be_followed(json.dumps({key: value})):
            continue
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            result[key] = _kept(value, how, there)
    if isinstance(schema.get("oneOf"), list) and exclude_each_other(schema, how.resolve):
        return _as_any_of(result)
    return result


@lru_cache(maxsize=1024)
def _can_be_followed(schema: str) -> bool:
    """Whether llguidance can compile a schema of one keyword; takes 0.1 ms."""
    return not llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("json_schema", schema))


def _as_any_of(schema: dict[str, Any]) -> dict[str, Any]:
    any_of, rest = {"anyOf": schema["oneOf"]}, {key: value for key, value in schema.items() if key != "oneOf"}
    if "anyOf" not in rest:
        return {**rest, **any_of}
    return {**rest, "allOf": [*rest["allOf"], any_of] if isinstance(rest.get("allOf"), list) else [any_of]}


def regex_body(pattern: str) -> str:
    """A regex for a whole text, as the body of a token. Raises ValueError."""
    if not pattern:
        raise ValueError("a regex must not be empty")
    escaped = _without_anchors(on_one_line(pattern)) or "(?:)"
    return f"/{llguidance.regex_to_lark(escaped, 'dws')}/"  # type: ignore[attr-defined]


def _without_anchors(text: str) -> str:
    """A regex without anchors around all of it: it is matched against the whole output anyway."""
    if "|" in text:  # they may belong to one alternative
        return text
    text = text.removeprefix("^")
    return text[:-1] if re.search(r"(?<!\\)(\\\\)*\$$", text) else text


class Writer:
    """special: ids of tokens that are not text, by name. Where a grammar has such a name, the token or its text may stand.

    special_only: only the token, for parsers that read ids (Harmony's).
    """

    def __init__(self, special: Mapping[str, int], special_only: bool = False) -> None:
        self._special = special
        self._special_only = special_only
        self._is_special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._names: dict[tuple[str, str], str] = {}
        self._defined: dict[str, str] = {}

    def token(self, body: str) -> str:
        """The name of a token with this body."""
        return self._name("T", body)

    def lazy(self, body: str) -> str:
        """The name of a token that ends at the first match of this body."""
        return self._name("lazy", body)

    def rule(self, body: str) -> str:
        return self._name("r", body)

    def define(self, name: str, body: str) -> None:
        """Add a rule of this name; it may refer to itself."""
        self._defined[name] = body

    def _name(self, kind: str, body: str) -> str:
        return self._names.setdefault((kind, body), f"{kind}{len(self._names)}")

    def lark(self, start: str) -> str:
        heads = {"T": "", "lazy": "[lazy]", "r": ""}
        lines = [f"{name}{heads[kind]}: {body}" for (kind, body), name in self._names.items()]
        lines += [f"{name}: {body}" for name, body in self._defined.items()]
        return "\n".join([OPTIONS, f"start: {start}", *lines, ""])

    def has_special(self, text: str) -> bool:
        return self._is_special.search(text) is not None

    def literal(self, text: str) -> str:
        """A text in the body of a rule; '' for an empty one."""
        parts, at = [], 0
        for found in self._is_special.finditer(text):
            parts += [quoted(text[at : found.start()])] if found.start() > at else []
            token = f"<[{self._special[found[0]]}]>"
            parts.append(token if self._special_only else f"({token} | {quoted(found[0])})")
            at = found.end()
        parts += [quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def text_up_to(self, marker: str, text: str = ANY) -> list[str]:
        """Bodies of rules for text up to and with the first marker. text: the body of a token, for what may stand before it."""
        found = self._is_special.match(marker)
        ways = [] if found and self._special_only else [self.lazy(f"({text}) {quoted(marker)}")]
        if found:
            rest = self.literal(marker[found.end() :])
            ways.append(f"{self.token(text)} <[{self._special[found[0]]}]> {rest}".rstrip())
        return ways
