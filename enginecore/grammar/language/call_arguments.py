"""Arguments of a function call, by the function's JSON Schema, in syntaxes that are not JSON: each as the body of a rule.

qwen_xml       <parameter=KEY>VALUE</parameter>, one after the other. A string is written as it is, anything else as JSON.
minimax_xml    <parameter name="KEY">VALUE</parameter>, the same.
glm_xml        <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, the same.
pythonic       KEY=VALUE, KEY=VALUE. Values are JSON, which parsers of such Python-like calls accept, too.
gemma4, functiongemma    {KEY:VALUE,KEY:VALUE}, see gemma_arguments.py.

A parameter list has names and nothing else, so the schema must list them at its top, in `properties`. Other constraints on an
object (anyOf, dependentRequired, ...) are refused at the top, and allowed inside values. Names that are not listed cannot be
written, unless no property is listed and others are allowed: then any name can be.

The parsers in frontend/text/tool_parsers read what these rules admit back as values that are valid by the schema. Called by
structural_tag.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.enginecore.grammar.language.argument_schemas import (
    any_text,
    json_value,
    kinds_of,
    parameters_of,
    string_options,
    text_body,
)
from quire.enginecore.grammar.language.gemma_arguments import QUOTES, gemma_arguments
from quire.enginecore.grammar.language.lark import Writer, quoted

_LINE_BREAK = r"/\n?/"
_PYTHON_NAME = re.compile(r"[\w.-]+")
_PYTHON_KEY = r"/[\p{L}_][\p{L}\p{Nd}_]{0,127}/"  # of letters that are in Python's \w, too


def arguments(style: str, schema: Any, writer: Writer) -> str:
    """The arguments in this style. A schema that cannot be followed in it is passed over if its `x-guidance` is lenient."""
    write = _writer_of(style)
    try:
        return write(schema, writer)
    except ValueError:
        own = schema.get("x-guidance") if isinstance(schema, dict) else None
        if not isinstance(own, dict) or own.get("lenient") is not True:
            raise
        return write({"type": "object"}, writer)


def _writer_of(style: str) -> Callable[[Any, Writer], str]:
    if style in XML_STYLES:
        return partial(xml_arguments, XML_STYLES[style])
    return python_arguments if style == "pythonic" else partial(gemma_arguments, QUOTES[style])


@dataclass(frozen=True)
class XmlStyle:
    """How a parameter is written: the texts before its name, behind its name, and behind its value.

    Line breaks may stand between the texts of `behind_name`. breaks_value: whether a line break stands on both sides of a
    value, and does not belong to it.
    """

    before_name: str
    behind_name: tuple[str, ...]
    end: str
    breaks_value: bool = False


XML_STYLES = {
    "qwen_xml": XmlStyle("<parameter=", (">",), "</parameter>", breaks_value=True),
    "minimax_xml": XmlStyle('<parameter name="', ('">',), "</parameter>"),
    "glm_xml": XmlStyle("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
}


def xml_arguments(style: XmlStyle, schema: Any, writer: Writer) -> str:
    root, names = parameters_of(schema)
    line_break = writer.token(_LINE_BREAK)
    begins_value = f" {line_break} ".join(map(writer.literal, style.behind_name))
    if not names and root.get("additionalProperties") is not False:
        name = writer.token(r"/[^<>\n\"]{1,128}/")
        return f"({writer.literal(style.before_name)} {name} {begins_value} {any_text(style.end, writer)} {line_break})*"
    parts = []
    for name, (value, required) in names.items():
        if re.search(r"[<>\n\"]|^\s|\s$|^$", name):
            raise ValueError(f"a parameter of the name {name!r} cannot be written as {style.before_name}...")
        head = f"{writer.literal(style.before_name)} {quoted(name)} {begins_value}"
        part = f"{head} {_xml_value(name, value, root, style, writer)} {line_break}"
        parts.append(part if required else f"({part})?")
    return writer.rule(" ".join(parts)) if parts else '""'


def _xml_value(name: str, value: Any, root: dict[str, Any], style: XmlStyle, writer: Writer) -> str:
    """A value and its end tag. The parser takes the value for a string if, and only if, its schema says `string`."""
    kinds = kinds_of(value, root)
    end, line_break = writer.literal(style.end), writer.token(_LINE_BREAK)
    if "string" not in kinds:
        return f"{line_break} {json_value(name, value, root)} {line_break} {end}"
    ways = [_xml_text(text_body(option, style.end), style, writer) for option in string_options(value, root)]
    if "null" in kinds:
        null = writer.token(r"/\n?null\n?/")
        ways.append(f"{null} {end}")
    return f"({' | '.join(dict.fromkeys(ways))})"


def _xml_text(text: str | None, style: XmlStyle, writer: Writer) -> str:
    if text is None:
        return any_text(style.end, writer)
    around = r'"\n"' if style.breaks_value else ""
    if not writer.has_special(style.end):
        return writer.token(f"{around} ({text}) {around} {quoted(style.end)}".strip())
    return f"{writer.token(f'{around} ({text}) {around}'.strip())} {writer.literal(style.end)}"


def python_arguments(schema: Any, writer: Writer) -> str:
    root, names = parameters_of(schema)
    if not names and root.get("additionalProperties") is not False:
        pair = f'{writer.token(_PYTHON_KEY)} "=" {_python_value(writer)}'
        return writer.rule(f'({pair} (", " {pair})*)?')
    first, rest = '""', '""'  # rules of the properties that follow: if none is written yet, and if one is
    for name, (value, required) in reversed(names.items()):
        if not _PYTHON_NAME.fullmatch(name) or name[0].isdigit():
            raise ValueError(f"a parameter of the name {name!r} cannot be written as a Python keyword")
        pair = writer.rule(f"{quoted(name + '=')} {json_value(name, value, root)}")
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
