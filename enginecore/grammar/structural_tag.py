"""Structural tags: free text in which some places follow schemas; vLLM's two shapes of them, made into Lark.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}      the older one
    {"type": "structural_tag", "format": {"type": ..., ...}}             formats within formats, as xgrammar has them

Formats: const_string, json_schema (style "json", "qwen_xml" or "pythonic"), qwen_xml_parameter, regex, grammar, any_text,
sequence, or, optional, star, plus, repeat, tag, triggered_tags, tags_with_separator. Any other, and any other field, is refused
with its place. any_text and triggered_tags go on up to the end of the tag that they end, or of the output; so, as with
xgrammar, nothing may follow them in a sequence. Ours beside xgrammar's: `excludes_start`, a regex that such a text must not
begin with; and `definitions` beside `format`, each a format by its name, which {"type": "ref", "name": ...} stands for.

Called by texts.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from quire.enginecore.grammar.call_arguments import python_arguments, qwen_xml_arguments
from quire.enginecore.grammar.lark import ANY, SOME, Writer, json_schema, lark_of, one_of, quoted, regex_body
from quire.ipc.structured_outputs import StructuredOutputs

_Style = Literal["json", "qwen_xml", "pythonic"]


class _Format(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    pass


class _ConstString(_Format, tag="const_string"):
    value: str


class _JsonSchema(_Format, tag="json_schema"):
    json_schema: Any
    style: _Style = "json"


class _QwenXmlParameter(_Format, tag="qwen_xml_parameter"):
    json_schema: Any


class _Regex(_Format, tag="regex"):
    pattern: str


class _Grammar(_Format, tag="grammar"):
    grammar: str


class _AnyText(_Format, tag="any_text"):
    excludes: list[str] = []
    excludes_start: str = ""


class _Sequence(_Format, tag="sequence"):
    elements: list["Format"]


class _Or(_Format, tag="or"):
    elements: list["Format"]


class _Optional(_Format, tag="optional"):
    content: "Format"


class _Star(_Format, tag="star"):
    content: "Format"


class _Plus(_Format, tag="plus"):
    content: "Format"


class _Repeat(_Format, tag="repeat"):
    min: int
    max: int
    content: "Format"


class _Tag(_Format, tag="tag"):
    begin: str
    content: "Format"
    end: str | list[str]

    @property
    def ends(self) -> list[str]:
        return [self.end] if isinstance(self.end, str) else self.end


class _TriggeredTags(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []
    excludes_start: str = ""


class _TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class _Ref(_Format, tag="ref"):
    name: str


Format = (
    _ConstString | _JsonSchema | _QwenXmlParameter | _Regex | _Grammar | _AnyText | _Sequence | _Or | _Optional | _Star | _Plus
    | _Repeat | _Tag | _TriggeredTags | _TagsWithSeparator | _Ref
)  # fmt: skip


_TYPES = sorted(str(kind.__struct_config__.tag) for kind in get_args(Format))


class _Structure(msgspec.Struct):
    begin: str
    schema: Any = True
    end: str = ""


_OLDER = "structures"  # the type that a tag of the older shape is given


class _Structures(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    format: Format
    type: str = "structural_tag"
    definitions: dict[str, Format] = {}


def structural_tag(given: Any, special: Mapping[str, int]) -> str:
    """The grammar of a structural tag, decoded from JSON. special: see lark.Writer. Raises ValueError, with the place."""
    tag = _read(given)
    return _Formats(special, tag.definitions).lark(tag.format, _place(tag))


def parts_of(given: Any) -> Iterator[tuple[str, StructuredOutputs]]:
    """The schemas, regexes and grammars in a structural tag, each as one by itself, and where it stands."""
    tag = _read(given)
    todo = [*((f, f"definitions.{name}") for name, f in reversed(tag.definitions.items())), (tag.format, _place(tag))]
    while todo:
        f, path = todo.pop()
        match f:
            case _JsonSchema() | _QwenXmlParameter():
                yield _inner(path, "json_schema"), StructuredOutputs("json", msgspec.json.encode(f.json_schema).decode())
            case _Regex():
                yield _inner(path, "pattern"), StructuredOutputs("regex", f.pattern)
            case _Grammar():
                yield _inner(path, "grammar"), StructuredOutputs("grammar", f.grammar)
            case _Sequence() | _Or():
                todo += [(e, _inner(path, f"elements[{i}]")) for i, e in enumerate(f.elements)][::-1]
            case _TriggeredTags() | _TagsWithSeparator():
                todo += [(tag, _inner(path, f"tags[{i}]")) for i, tag in enumerate(f.tags)][::-1]
            case _Optional() | _Star() | _Plus() | _Repeat() | _Tag():
                todo.append((f.content, _inner(path, "content")))


def _read(given: Any) -> _StructuralTag:
    """Of either shape."""
    try:
        if isinstance(given, dict) and "format" in given:
            return msgspec.convert(given, _StructuralTag)
        tag = msgspec.convert(given, _Structures)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(error)) from None
    if not tag.structures or not tag.triggers:
        raise ValueError("structural_tag: `structures` and `triggers` must not be empty")
    tags = [_Tag(s.begin, _JsonSchema(s.schema), s.end) for s in tag.structures]
    return _StructuralTag(_TriggeredTags(tag.triggers, tags), _OLDER)


def _place(tag: _StructuralTag) -> str:
    return "" if tag.type == _OLDER else "format"


def _inner(path: str, part: str) -> str:
    """A place within another, as the user wrote it: `structures[0].schema` in the older shape, whose outermost place is ""."""
    if not path:
        return part.replace("tags[", "structures[")
    if path.startswith("structures["):
        return path if part == "content" else f"{path}.schema"
    return f"{path}.{part}"


def _in_words(error: msgspec.ValidationError) -> str:
    """With the place first, and the types that there are where one is unknown."""
    what, _, place = str(error).partition(" - at ")
    place = place.strip("`").removeprefix("$").removeprefix(".")
    if place.endswith("type") and "Invalid value" in what:
        what += f" is not a type that is supported; {', '.join(_TYPES)} are"
    return f"structural_tag: {place}{': ' * bool(place)}{what}"


class _Formats:
    """Formats as bodies of rules. `ends`: where a text that has no end of its own must stop; none at the end of the output."""

    def __init__(self, special: Mapping[str, int], definitions: Mapping[str, Format]) -> None:
        self._w = Writer(special)
        self._definitions = definitions
        self._defined: dict[str, str | None] = {}  # bodies; None while one is made

    def lark(self, whole: Format, path: str) -> str:
        return self._w.lark(self._body(whole, path, []))

    def _body(self, f: Format, path: str, ends: Sequence[str]) -> str:
        """With one of the ends behind it, if there are any."""
        if _goes_on(f):
            return self._endless(f, path, ends)
        if not ends or ends == [""]:
            return self._limited(f, path)
        if (regular := self._regular(f, path)) is not None and not any(map(self._w.has_special, ends)):
            return self._w.token(f"{regular} {one_of(ends)}" if isinstance(f, _ConstString) else _up_to(regular, ends))
        return f"{self._limited(f, path)} {_either([self._w.literal(end) for end in ends])}"

    # ------------------------------------------------------------------------------------------- what has an end of its own
    def _limited(self, f: Format, path: str) -> str:
        if (regular := self._regular(f, path)) is not None:
            return self._w.token(regular)
        match f:
            case _ConstString():
                return self._w.literal(f.value)
            case _JsonSchema() | _QwenXmlParameter():
                return self._json(f, path)
            case _Grammar():
                return _nested(f.grammar, path)
            case _Sequence():
                return self._w.rule(" ".join(self._sequence(f.elements, path)))
            case _Or():
                return _either([self._body(e, _inner(path, f"elements[{i}]"), []) for i, e in enumerate(f.elements)])
            case _Tag():
                return self._tag(f, path, f.begin)
            case _TriggeredTags():  # at least one and no more
                return self._tags(f.tags, path)
            case _TagsWithSeparator():
                return self._separated(f, path)
            case _Ref():
                return self._definition(f.name, path)
        content, times = _repeated(f, path)
        return f"({self._limited(content, _inner(path, 'content'))}){times}"

    def _definition(self, name: str, path: str) -> str:
        if name not in self._defined:
            self._defined[name] = None
            f = self._definitions.get(name)
            if f is None or _goes_on(f):
                raise ValueError(
                    f"structural_tag: {path}.name: {name!r} is no definition of a format that has an end of its own"
                )
            self._defined[name] = self._w.rule(self._limited(f, f"definitions.{name}"))
        if (body := self._defined[name]) is None:
            raise ValueError(f"structural_tag: {path}.name: {name!r} refers to itself")
        return body

    def _sequence(self, elements: list[Format], path: str) -> list[str]:
        """Bodies of what may follow each other; neighbours that are regular are one token."""
        bodies: list[str] = []
        run: list[str] = []
        for i, element in enumerate(elements):
            place = _inner(path, f"elements[{i}]")
            if (regular := self._regular(element, place)) is not None:
                run.append(f"({regular})")
                continue
            bodies += [self._w.token(" ".join(run))] if run else []
            run = []
            bodies.append(self._limited(element, place))
        return bodies + ([self._w.token(" ".join(run))] if run else [])

    def _json(self, f: _JsonSchema | _QwenXmlParameter, path: str) -> str:
        style = "qwen_xml" if isinstance(f, _QwenXmlParameter) else f.style
        with_place = _at(_inner(path, "json_schema"), field_of(f.json_schema))
        if style == "json":
            return self._w.rule(with_place(json_schema, f.json_schema))
        return with_place(qwen_xml_arguments if style == "qwen_xml" else python_arguments, f.json_schema, self._w)

    def _tag(self, f: _Tag, path: str, begin: str) -> str:
        """Where all of `begin` is still to come."""
        if not f.ends:
            raise ValueError(f"structural_tag: {path}.end must not be empty")
        return self._w.rule(f"{self._w.literal(begin)} {self._body(f.content, _inner(path, 'content'), f.ends)}".strip())

    def _tags(self, tags: list[_Tag], path: str) -> str:
        if not tags:
            raise ValueError(f"structural_tag: {path}.tags must not be empty")
        return _either([self._tag(tag, _inner(path, f"tags[{i}]"), tag.begin) for i, tag in enumerate(tags)])

    def _separated(self, f: _TagsWithSeparator, path: str) -> str:
        tag = self._w.rule(self._tags(f.tags, path))
        body = tag if f.stop_after_first else f"{tag} ({self._w.literal(f.separator)} {tag})*"
        return self._w.rule(body) if f.at_least_one else f"({body})?"

    # --------------------------------------------------------------------------------------------------- what is regular
    def _regular(self, f: Format, path: str) -> str | None:
        """As the body of a token, if it is one, with no token that is no text."""
        match f:
            case _ConstString():
                return None if self._w.has_special(f.value) else quoted(f.value)
            case _Regex():
                return _at(_inner(path, "pattern"))(regex_body, f.pattern)
            case _Sequence() | _Or():
                if not f.elements:
                    raise ValueError(f"structural_tag: {path}.elements must not be empty")
                if isinstance(f, _Sequence) and any(map(_goes_on, f.elements[:-1])):
                    raise ValueError(f"structural_tag: {path}: nothing may follow an any_text or triggered_tags in a sequence")
                parts = [self._regular(e, _inner(path, f"elements[{i}]")) for i, e in enumerate(f.elements)]
                return None if None in parts else f"({(' ' if isinstance(f, _Sequence) else ' | ').join(map(str, parts))})"
            case _Optional() | _Star() | _Plus() | _Repeat():
                content, times = _repeated(f, path)
                part = self._regular(content, _inner(path, "content"))
                return None if part is None else f"({part}){times}"
        return None

    # ------------------------------------------------------------------------------------------------------ what goes on
    def _endless(self, f: Format, path: str, ends: Sequence[str]) -> str:
        match f:
            case _AnyText():
                return self._rest(self._text(f, path), ends)
            case _TriggeredTags():
                return self._triggered(f, path, ends)
            case _Sequence():
                self._regular(f, path)  # what is wrong with it
                last = len(f.elements) - 1
                before = self._sequence(f.elements[:last], path)
                return " ".join([*before, self._body(f.elements[last], _inner(path, f"elements[{last}]"), ends)])
        assert isinstance(f, _Or)
        return _either([self._body(e, _inner(path, f"elements[{i}]"), ends) for i, e in enumerate(f.elements)])

    def _text(self, f: _AnyText | _TriggeredTags, path: str, start: bool = True) -> str:
        """The body of a token."""
        text = ANY
        for i, excluded in enumerate(f.excludes):
            if not excluded:
                raise ValueError(f"structural_tag: {path}.excludes[{i}] must not be empty")
            text += f" & ~({ANY} {quoted(excluded)} {ANY})"
        if start and f.excludes_start:
            text += f" & ~({_at(_inner(path, 'excludes_start'))(regex_body, f.excludes_start)} {ANY})"
        return text

    def _rest(self, text: str, ends: Sequence[str]) -> str:
        if not any(ends):
            return self._w.token(text)
        return _either([self._w.rule(way) for end in ends for way in self._w.text_up_to(end, text)])

    def _triggered(self, f: _TriggeredTags, path: str, ends: Sequence[str]) -> str:
        behind = self._by_trigger(f, path)
        first, later = self._text(f, path), self._text(f, path, start=False)

        def headed(text: str) -> str:
            return _either([f"({way}) {rest}" for trigger, rest in behind for way in self._w.text_up_to(trigger, text)])

        at_once = self._tags(f.tags, path)
        end = _either([self._w.literal(e) for e in ends]) if any(ends) else ""
        if f.stop_after_first:
            return f"(({at_once if f.at_least_one else headed(first)}) {end}" + (
                ")" if f.at_least_one else f" | {self._rest(first, ends)})"
            )
        on = f"({headed(later)})* {self._rest(later, ends)}"
        if f.at_least_one:
            return f"{at_once} {on}"
        return on if first == later else f"(({headed(first)}) {on} | {self._rest(first, ends)})"

    def _by_trigger(self, f: _TriggeredTags, path: str) -> list[tuple[str, str]]:
        """Triggers, and the body of what must stand behind each."""
        if not f.triggers or not all(f.triggers):
            raise ValueError(f"structural_tag: {_inner(path, 'triggers')} must not be empty, nor hold an empty text")
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(f.tags):
            fitting = [t for t in f.triggers if tag.begin.startswith(t)]
            place = _inner(path, f"tags[{i}]")
            if len(fitting) != 1:
                raise ValueError(
                    f"structural_tag: {place}: {tag.begin!r} must begin with exactly one of the triggers {f.triggers}"
                )
            bodies.setdefault(fitting[0], []).append(self._tag(tag, place, tag.begin[len(fitting[0]) :]))
        return [(trigger, _either(rests)) for trigger, rests in bodies.items()]


def _goes_on(f: Format) -> bool:
    """Whether a format has no end of its own."""
    match f:
        case _AnyText():
            return True
        case _TriggeredTags():
            return not (f.at_least_one and f.stop_after_first)
        case _Sequence():
            return bool(f.elements) and _goes_on(f.elements[-1])
        case _Or():
            return any(map(_goes_on, f.elements))
    return False


def _repeated(f: Format, path: str) -> tuple[Format, str]:
    """What is repeated, and how often, as Lark writes it."""
    match f:
        case _Optional():
            content, times = f.content, "?"
        case _Star():
            content, times = f.content, "*"
        case _Plus():
            content, times = f.content, "+"
        case _Repeat():
            if not 0 <= f.min <= (f.max if f.max != -1 else f.min):
                raise ValueError(f"structural_tag: {path}: min must be at least 0 and at most max (-1: no bound)")
            content, times = f.content, f"{{{f.min},{f.max if f.max != -1 else ''}}}"
        case _:
            raise AssertionError(f)
    if _goes_on(content):
        raise ValueError(f"structural_tag: {path}.content: an any_text or triggered_tags cannot be repeated")
    return content, times


def _up_to(regular: str, ends: Sequence[str]) -> str:
    """A token's body: what is regular, up to the first end where it is complete."""
    return f"(({regular}) {one_of(ends)}) & ~(({regular}) {one_of(ends)} {SOME})"


def _either(bodies: list[str]) -> str:
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(dict.fromkeys(bodies))})"


def _nested(grammar: str, path: str) -> str:
    return f"%lark {{\n{_at(_inner(path, 'grammar'))(lark_of, grammar)}\n}}"


def field_of(schema: Any) -> str | None:
    """A frontend's own tag holds schemas of a request, each with the field that it comes from as a comment: that one's name."""
    comment = schema.get("$comment") if isinstance(schema, dict) else None
    return comment if isinstance(comment, str) and comment.startswith("tools[") else None


def _at(path: str, field: str | None = None) -> Callable[..., str]:
    """Call something whose ValueError is to say its place, or the field."""

    def call(function: Callable[..., str], *arguments: Any) -> str:
        try:
            return function(*arguments)
        except ValueError as error:
            raise ValueError(f"{field or f'structural_tag: {path}'}: {error}") from None

    return call
