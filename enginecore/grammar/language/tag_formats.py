"""The formats of structural tags as structs: reads them from JSON, and reports what is wrong with its place.

structural_tag.py gives them their meaning. Here the two shapes of a tag are read, and the grammars in a tag are listed.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from quire.ipc.structured_outputs import StructuredOutputs

_Style = Literal["json", "qwen_xml", "minimax_xml", "glm_xml", "pythonic", "gemma4", "functiongemma"]


class _Base(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    pass


class ConstStringFormat(_Base, tag="const_string"):
    value: str


class JsonSchemaFormat(_Base, tag="json_schema"):
    json_schema: Any
    style: _Style = "json"


class QwenXmlParameterFormat(_Base, tag="qwen_xml_parameter"):
    json_schema: Any


class RegexFormat(_Base, tag="regex"):
    pattern: str


class GrammarFormat(_Base, tag="grammar"):
    grammar: str


class AnyTextFormat(_Base, tag="any_text"):
    excludes: list[str] = []
    excludes_start: str = ""


class SequenceFormat(_Base, tag="sequence"):
    elements: list["Format"]


class OrFormat(_Base, tag="or"):
    elements: list["Format"]


class OptionalFormat(_Base, tag="optional"):
    content: "Format"


class StarFormat(_Base, tag="star"):
    content: "Format"


class PlusFormat(_Base, tag="plus"):
    content: "Format"


class RepeatFormat(_Base, tag="repeat"):
    min: int
    max: int
    content: "Format"


class TagFormat(_Base, tag="tag"):
    begin: str
    content: "Format"
    end: str | list[str]

    @property
    def ends(self) -> list[str]:
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTagsFormat(_Base, tag="triggered_tags"):
    triggers: list[str]
    tags: list[TagFormat]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []
    excludes_start: str = ""


class TagsWithSeparatorFormat(_Base, tag="tags_with_separator"):
    tags: list[TagFormat]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class RefFormat(_Base, tag="ref"):
    name: str


Format = (
    ConstStringFormat | JsonSchemaFormat | QwenXmlParameterFormat | RegexFormat | GrammarFormat | AnyTextFormat | SequenceFormat
    | OrFormat | OptionalFormat | StarFormat | PlusFormat | RepeatFormat | TagFormat | TriggeredTagsFormat
    | TagsWithSeparatorFormat | RefFormat
)  # fmt: skip


_TYPES = sorted(str(kind.__struct_config__.tag) for kind in get_args(Format))


class Structure(msgspec.Struct):
    begin: str
    schema: Any = True
    end: str = ""


_OLDER = "structures"  # the type given to a tag of the older shape


class Structures(msgspec.Struct):
    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """special_only: where a text has the name of a special token, only that token may stand, and not its name as text."""

    format: Format
    type: str = "structural_tag"
    definitions: dict[str, Format] = {}
    special_only: bool = False


def parts_of(given: Any) -> Iterator[tuple[str, StructuredOutputs]]:
    """The schemas, regexes and grammars in a structural tag, as (place, grammar of its own)."""
    tag = read(given)
    todo = [*((f, f"definitions.{name}") for name, f in reversed(tag.definitions.items())), (tag.format, place_of(tag))]
    while todo:
        f, path = todo.pop()
        match f:
            case JsonSchemaFormat() | QwenXmlParameterFormat():
                yield inner(path, "json_schema"), StructuredOutputs("json", msgspec.json.encode(f.json_schema).decode())
            case RegexFormat():
                yield inner(path, "pattern"), StructuredOutputs("regex", f.pattern)
            case GrammarFormat():
                yield inner(path, "grammar"), StructuredOutputs("grammar", f.grammar)
            case SequenceFormat() | OrFormat():
                todo += [(e, inner(path, f"elements[{i}]")) for i, e in enumerate(f.elements)][::-1]
            case TriggeredTagsFormat() | TagsWithSeparatorFormat():
                todo += [(tag, inner(path, f"tags[{i}]")) for i, tag in enumerate(f.tags)][::-1]
            case OptionalFormat() | StarFormat() | PlusFormat() | RepeatFormat() | TagFormat():
                todo.append((f.content, inner(path, "content")))


def read(given: Any) -> StructuralTag:
    """Read a tag of either shape. Raises ValueError, with the place."""
    try:
        if isinstance(given, dict) and "format" in given:
            return msgspec.convert(given, StructuralTag)
        if isinstance(given, dict) and "structures" not in given:
            raise ValueError("structural_tag needs a `format`, or `structures` and `triggers`")
        tag = msgspec.convert(given, Structures)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(error)) from None
    if not tag.structures or not tag.triggers:
        raise ValueError("structural_tag: `structures` and `triggers` must not be empty")
    tags = [TagFormat(s.begin, JsonSchemaFormat(s.schema), s.end) for s in tag.structures]
    return StructuralTag(TriggeredTagsFormat(tag.triggers, tags), _OLDER)


def place_of(tag: StructuralTag) -> str:
    return "" if tag.type == _OLDER else "format"


def inner(path: str, part: str) -> str:
    """The place of a part, as the user wrote it: `structures[0].schema` in the older shape, where the outermost place is ""."""
    if not path:
        return part.replace("tags[", "structures[")
    if path.startswith("structures["):
        return path if part == "content" else f"{path}.schema"
    return f"{path}.{part}"


def _in_words(error: msgspec.ValidationError) -> str:
    """The error with its place first; for an unknown type, with the types that are known."""
    what, _, place = str(error).partition(" - at ")
    place = place.strip("`").removeprefix("$").removeprefix(".")
    if place.endswith("type") and "Invalid value" in what:
        what += f" is not a type that is supported; {', '.join(_TYPES)} are"
    return f"structural_tag: {place}{': ' * bool(place)}{what}"


FIELDS = ("tools[", "response_format.")  # how the names of request fields with schemas begin


def field_of(schema: Any) -> str | None:
    """The request field that a schema comes from, or None: tags made by a frontend note it as a comment in each schema."""
    comment = schema.get("$comment") if isinstance(schema, dict) else None
    return comment if isinstance(comment, str) and comment.startswith(FIELDS) else None
