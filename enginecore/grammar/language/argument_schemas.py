"""Reads the JSON Schema of a function's arguments for syntaxes that are not JSON: names, types, and texts written as they are.

call_arguments.py and gemma_arguments.py write the rules.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from quire.enginecore.grammar.language.lark import ANY, SOME, START, Writer, json_schema, one_of, quoted, regex_body

_BEYOND_NAMES = (
    "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "minProperties",
    "maxProperties", "propertyNames", "enum", "const",
)  # fmt: skip


_CHOICES = ("anyOf", "oneOf")
_EMPTY: dict[str, Any] = {}


def is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value >= 0 and value == int(value)


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or is_names(value), "a text or a list of texts"),
    "pattern": (lambda value: isinstance(value, str), "a text"),
    **dict.fromkeys((*_CHOICES, "enum"), (_is_list, "a list")),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "a whole number of at least 0")),
}
# The engine's regexes lack look-arounds and back-references.
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9]|\(\?P=")


def any_text(end: str, writer: Writer) -> str:
    """Any text, up to the first end, and the end."""
    ways = [writer.token(f"({ANY} {quoted(end)}) & ~({ANY} {quoted(end)} {SOME})")]
    if writer.has_special(end):
        ways.append(f"{writer.token(f'{ANY} & ~({ANY} {quoted(end)} {ANY})')} {writer.literal(end)}")
    return f"({' | '.join(ways)})"


def string_options(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema that may be a string."""
    found: list[dict[str, Any]] = []
    todo, seen = [resolved(schema, root)], set[int]()
    while todo:
        option = todo.pop(0)
        if id(option) in seen:  # alternatives may refer to each other
            continue
        seen.add(id(option))
        inner = [resolved(o, root) for key in _CHOICES for o in option.get(key, ()) if "string" in kinds_of(o, root)]
        if not inner:
            found.append(option)
        elif "type" in option or "enum" in option:
            raise ValueError("a text's alternatives may not be bound beside anyOf or oneOf")
        todo = inner + todo
    return found


def text_body(schema: dict[str, Any], end: str, root: Mapping[str, Any]) -> str | None:
    """The body of a token for a string written as it is, before `end`, which it must not have; None if any will do.

    `format` only annotates, as in the standard. A pattern that no regex of ours can follow is passed over if root is lenient.
    """
    if beyond := schema.keys() & {"allOf", "not", "if"}:
        raise ValueError(f"{sorted(beyond)[0]} cannot be followed for a text that is not written as JSON")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        texts = [v for v in values if isinstance(v, str) and end not in v]
        if not texts:
            raise ValueError("none of the values can be written")
        return one_of(texts)
    low, high, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    if pattern is not None and is_lenient(root) and _NOT_REGULAR.search(pattern):
        pattern = None
    if not low and high is None and pattern is None:
        return None
    bodies = [f"{ANY} & ~({ANY} {quoted(end)} {ANY})", f"/(.|\\n){{{int(low)},{'' if high is None else int(high)}}}/"]
    if pattern is not None:
        anchored = ("" if pattern.startswith("^") else "(.|\\n)*", "" if pattern.endswith("$") else "(.|\\n)*")
        bodies.append(regex_body(f"{anchored[0]}({pattern.removeprefix('^').removesuffix('$')}){anchored[1]}"))
    return " & ".join(f"({body})" for body in bodies)


def parameters_of(schema: Any) -> tuple[dict[str, Any], dict[str, tuple[Any, bool]]]:
    """The object's schema, and each property's schema by name, with whether the property is required."""
    whole = {} if schema is True else schema
    if not isinstance(whole, dict):
        raise ValueError("a JSON Schema must be an object")
    root = {**whole, **resolved(whole, whole)}
    if beyond := [key for key in _BEYOND_NAMES if key in root]:
        raise ValueError(f"{beyond[0]} at the top of a function's parameters cannot be followed in this syntax")
    properties = root.get("properties") or {}
    required = root.get("required") or []
    if not isinstance(properties, dict) or not is_names(required):
        raise ValueError("`properties` must be an object, and `required` a list of texts")
    others = root.get("additionalProperties", True)
    names = {
        name: (value, name in required) for name, value in properties.items() if name in required or not _is_never(value, root)
    }
    names |= {str(name): (others, True) for name in required if name not in properties}
    return root, names


def _is_never(schema: Any, root: dict[str, Any]) -> bool:
    """Whether no value is valid by it, so that a property that is not required is not written."""
    return schema is False or any(resolved(schema, root).get(name) == [] for name in ("enum", *_CHOICES))


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$ref` at its top; {} if the reference leads nowhere, which the JSON Schema compiler reports."""
    seen = 0
    while isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str) and ref.startswith("#") and seen < 64:
        target: Any = root
        for part in unquote(ref[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        schema, seen = target, seen + 1
    return _checked(schema) if isinstance(schema, dict) else _EMPTY


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema. Raises ValueError if a keyword that is read here has a value of another form."""
    for name, (is_of_form, form) in _FORMS.items():
        if name in schema and not is_of_form(schema[name]):
            raise ValueError(f"{name} must be {form}")
    return schema


def kinds_of(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The JSON Schema types of a value as far as they are stated: its own, and those of its alternatives."""
    kinds, seen, todo = set[str](), set[int](), [resolved(schema, root)]
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        kind = found.get("type", [])
        kinds |= set(kind if isinstance(kind, list) else [kind])
        todo += [resolved(option, root) for key in _CHOICES for option in found.get(key, ())]
    return frozenset(kinds)


def json_value(name: str, value: Any, root: Mapping[str, Any]) -> str:
    """The body of a rule for the value of a property, written as JSON."""
    return json_schema(_alone(value, root), START.inner("properties").inner(name))


def is_lenient(root: Any) -> bool:
    """Whether what cannot be followed of this schema is passed over."""
    own = root.get("x-guidance") if isinstance(root, Mapping) else None
    return isinstance(own, dict) and own.get("lenient") is True


def _alone(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema as a schema of its own, as lenient as the whole, with the definitions that it may refer to."""
    if not isinstance(schema, dict):
        return schema
    own = {"x-guidance": root["x-guidance"], **schema} if is_lenient(root) else schema
    if '"$ref"' not in json.dumps(schema):
        return own
    return {**own, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
