"""Arguments of a function call, by the function's JSON Schema, in syntaxes that are not JSON: each as the body of a rule.

qwen_xml    <parameter=KEY>VALUE</parameter>, one after the other. A string is written as it is, anything else as JSON.
pythonic    KEY=VALUE, KEY=VALUE. Values are JSON, which parsers of such Python-like calls accept, too.

A parameter list has names and nothing else, so the schema must list them at its top, in `properties`. Other constraints on an
object (anyOf, dependentRequired, ...) are refused at the top, and allowed inside values. Names that are not listed cannot be
written, unless no property is listed and others are allowed: then any name can be.

The parsers in frontend/text/tool_parsers (qwen3_coder, pythonic) read what these rules admit back as values that are valid by
the schema. Called by structural_tag.py.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from quire.enginecore.grammar.language.lark import ANY, SOME, START, Writer, json_schema, one_of, quoted, regex_body

_BEYOND_NAMES = (
    "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "minProperties",
    "maxProperties", "propertyNames", "enum", "const",
)  # fmt: skip
_END = "</parameter>"
_VALUE = f"({ANY} {quoted(_END)}) & ~({ANY} {quoted(_END)} {SOME})"  # any text, up to the first end tag
_ANY_PARAMETER = rf"/<parameter=[^<>\n]+>/ ({_VALUE})"
_LINE_BREAK = r"/\n?/"
_PYTHON_NAME = re.compile(r"[\w.-]+")
_PYTHON_KEY = r"/[^\W\d][\w]*/"


def arguments(style: str, schema: Any, writer: Writer) -> str:
    """The arguments in this style. A schema that cannot be followed in it is passed over if its `x-guidance` is lenient."""
    try:
        return _STYLES[style](schema, writer)
    except ValueError:
        own = schema.get("x-guidance") if isinstance(schema, dict) else None
        if not isinstance(own, dict) or own.get("lenient") is not True:
            raise
        return _STYLES[style]({"type": "object"}, writer)


def qwen_xml_arguments(schema: Any, writer: Writer) -> str:
    root, names = _parameters(schema)
    if not names and root.get("additionalProperties") is not False:
        return f"({writer.token(_ANY_PARAMETER)} {writer.token(_LINE_BREAK)})*"
    parts = []
    for name, (value, required) in names.items():
        if re.search(r"[<>\n]|^\s|\s$|^$", name):
            raise ValueError(f"a parameter of the name {name!r} cannot be written as <parameter=...>")
        part = f"{quoted(f'<parameter={name}>')} {_qwen_value(name, value, root, writer)} {writer.token(_LINE_BREAK)}"
        parts.append(part if required else f"({part})?")
    return writer.rule(" ".join(parts)) if parts else '""'


def _qwen_value(name: str, value: Any, root: dict[str, Any], writer: Writer) -> str:
    """A value and its end tag. The parser takes the value for a string if, and only if, its schema says `string`."""
    kinds = _kinds(value, root)
    if "string" not in kinds:
        line_break = writer.token(_LINE_BREAK)
        return f"{line_break} {_json(name, value, root)} {line_break} {quoted(_END)}"
    texts = [_text(option) for option in _string_options(value, root)]
    ways = [writer.token(_VALUE if text is None else rf'"\n" ({text}) "\n{_END}"') for text in texts]
    if "null" in kinds:
        ways.append(writer.token(rf"/\n?null\n?/ {quoted(_END)}"))
    return f"({' | '.join(dict.fromkeys(ways))})"


def _string_options(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema that may be a string."""
    schema = _resolved(schema, root)
    options = [o for key in ("anyOf", "oneOf") for o in schema.get(key, ()) if "string" in _kinds(o, root)]
    if not options:
        return [schema]
    if "type" in schema or "enum" in schema:
        raise ValueError("a text's alternatives may not be bound beside anyOf or oneOf")
    return [found for option in options for found in _string_options(option, root)]


def _text(schema: dict[str, Any]) -> str | None:
    """The body of a token for a string written as it is; None if any will do. `format` only annotates, as in the standard."""
    if beyond := schema.keys() & {"allOf", "not", "if"}:
        raise ValueError(f"{sorted(beyond)[0]} cannot be followed for a text that is not written as JSON")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        texts = [v for v in values if isinstance(v, str) and _END not in v]
        if not texts:
            raise ValueError("none of the values can be written")
        return one_of(texts)
    low, high, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    if not low and high is None and pattern is None:
        return None
    bodies = [f"{ANY} & ~({ANY} {quoted(_END)} {ANY})", f"/(.|\\n){{{int(low)},{'' if high is None else int(high)}}}/"]
    if pattern is not None:
        anchored = ("" if pattern.startswith("^") else "(.|\\n)*", "" if pattern.endswith("$") else "(.|\\n)*")
        bodies.append(regex_body(f"{anchored[0]}({pattern.removeprefix('^').removesuffix('$')}){anchored[1]}"))
    return " & ".join(f"({body})" for body in bodies)


def python_arguments(schema: Any, writer: Writer) -> str:
    root, names = _parameters(schema)
    if not names and root.get("additionalProperties") is not False:
        pair = f'{writer.token(_PYTHON_KEY)} "=" {_python_value(writer)}'
        return writer.rule(f'({pair} (", " {pair})*)?')
    first, rest = '""', '""'  # rules of the properties that follow: if none is written yet, and if one is
    for name, (value, required) in reversed(names.items()):
        if not _PYTHON_NAME.fullmatch(name) or name[0].isdigit():
            raise ValueError(f"a parameter of the name {name!r} cannot be written as a Python keyword")
        pair = writer.rule(f"{quoted(name + '=')} {_json(name, value, root)}")
        first, rest = (
            writer.rule(f"{pair} {rest}" if required else f"{pair} {rest} | {first}"),
            writer.rule(f'", " {pair} {rest}' if required else f'(", " {pair})? {rest}'),
        )
    return first


def _python_value(writer: Writer) -> str:
    """The name of a rule for the Python literals that the parser reads."""
    word = r"""/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|True|False|None|true|false|null/"""
    text = r"""/"([^"\\\n]|\\[nrtbf"'\\])*"|'([^'\\\n]|\\[nrtbf"'\\])*'/"""
    name = "python_value"
    writer.define(
        name,
        f'{writer.token(word)} | {writer.token(text)} | "[" ({name} (", " {name})*)? "]" | '
        f'"{{" ({writer.token(text)} ": " {name} (", " {writer.token(text)} ": " {name})*)? "}}"',
    )
    return name


# ------------------------------------------------------------------------------------------------------------ schemas
def _parameters(schema: Any) -> tuple[dict[str, Any], dict[str, tuple[Any, bool]]]:
    """The object's schema, and each property's schema by name, with whether the property is required."""
    whole = {} if schema is True else schema
    if not isinstance(whole, dict):
        raise ValueError("a JSON Schema must be an object")
    root = {**whole, **_resolved(whole, whole)}
    if beyond := [key for key in _BEYOND_NAMES if key in root]:
        raise ValueError(f"{beyond[0]} at the top of a function's parameters cannot be followed in this syntax")
    properties = root.get("properties") or {}
    required = root.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("`properties` must be an object, and `required` a list")
    others = root.get("additionalProperties", True)
    names = {name: (value, name in required) for name, value in properties.items() if value is not False or name in required}
    names |= {str(name): (others, True) for name in required if name not in properties}
    return root, names


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$ref` at its top; {} if the reference leads nowhere, which the JSON Schema compiler reports."""
    seen = 0
    while isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str) and ref.startswith("#") and seen < 64:
        target: Any = root
        for part in unquote(ref[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        schema, seen = target, seen + 1
    return schema if isinstance(schema, dict) else {}


def _kinds(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON Schema types of a value as far as they are stated: its own, and those of its alternatives."""
    found = _resolved(schema, root)
    kind = found.get("type")
    kinds = set(kind if isinstance(kind, list) else [kind] if kind is not None else [])
    for key in ("anyOf", "oneOf") if depth < 64 else ():
        for option in found.get(key) or ():
            kinds |= _kinds(option, root, depth + 1)
    return frozenset(kinds)


def _json(name: str, value: Any, root: Mapping[str, Any]) -> str:
    """The body of a rule for the value of a property, written as JSON."""
    return json_schema(_alone(value, root), START.inner("properties").inner(name))


def _alone(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema as a schema of its own, with the definitions that it may refer to."""
    if not isinstance(schema, dict) or '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}


_STYLES = {"qwen_xml": qwen_xml_arguments, "pythonic": python_arguments}
