"""Structural tags: free text with parts that follow schemas. Translates vLLM's two shapes of them to Lark.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}      the older shape
    {"type": "structural_tag", "format": {"type": ..., ...}}             nested formats, as xgrammar has them

Formats: const_string, json_schema (a style of call_arguments.py, or "json"), qwen_xml_parameter, regex, grammar, any_text,
sequence, or, optional, star, plus, repeat, tag, triggered_tags, tags_with_separator. Any other type or field is refused with
its place. any_text and triggered_tags go on to the end of the tag that they are in, or of the output; so, as with xgrammar,
nothing may follow them in a sequence. Additions to xgrammar's: `excludes_start`, a regex that such a text must not begin with;
`definitions` beside `format`: formats by name, to which {"type": "ref", "name": ...} refers; and `special_only` (lark.Writer).

Called by texts.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.enginecore.grammar.language.call_arguments import arguments
from quire.enginecore.grammar.language.ebnf import lark_of
from quire.enginecore.grammar.language.lark import ANY, SOME, Writer, json_schema, one_of, quoted, regex_body
from quire.enginecore.grammar.language.tag_formats import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    QwenXmlParameterFormat,
    RefFormat,
    RegexFormat,
    RepeatFormat,
    SequenceFormat,
    StarFormat,
    StructuralTag,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
    field_of,
    inner,
    place_of,
    read,
)


def structural_tag(given: Any, special: Mapping[str, int]) -> str:
    """The grammar of a structural tag, decoded from JSON. special: see lark.Writer. Raises ValueError, with the place."""
    tag = read(given)
    return _Formats(special, tag).lark(tag.format, place_of(tag))


class _Formats:
    """Formats as bodies of rules. `ends`: texts that end a format without an end of its own; none: the output's end does."""

    def __init__(self, special: Mapping[str, int], tag: StructuralTag) -> None:
        self._w = Writer(special, tag.special_only)
        self._definitions = tag.definitions
        self._defined: dict[str, str | None] = {}  # bodies by name; None while one is being made

    def lark(self, whole: Format, path: str) -> str:
        return self._w.lark(self._body(whole, path, []))

    def _body(self, f: Format, path: str, ends: Sequence[str]) -> str:
        """The body of a format, followed by one of the ends if there are any."""
        if _goes_on(f):
            return self._endless(f, path, ends)
        if not ends or ends == [""]:
            return self._limited(f, path)
        if (regular := self._regular(f, path)) is not None and not any(map(self._w.has_special, ends)):
            return self._w.token(f"{regular} {one_of(ends)}" if isinstance(f, ConstStringFormat) else _up_to(regular, ends))
        return f"{self._limited(f, path)} {_either([self._w.literal(end) for end in ends])}"

    # -------------------------------------------------------------------------------------- formats with an end of their own
    def _limited(self, f: Format, path: str) -> str:
        if (regular := self._regular(f, path)) is not None:
            return self._w.token(regular)
        match f:
            case ConstStringFormat():
                return self._w.literal(f.value)
            case JsonSchemaFormat() | QwenXmlParameterFormat():
                return self._json(f, path)
            case GrammarFormat():
                return _nested(f.grammar, path)
            case SequenceFormat():
                return self._w.rule(" ".join(self._sequence(f.elements, path)))
            case OrFormat():
                return _either([self._body(e, inner(path, f"elements[{i}]"), []) for i, e in enumerate(f.elements)])
            case TagFormat():
                return self._tag(f, path, f.begin)
            case TriggeredTagsFormat():  # exactly one tag: else it has no end of its own
                return self._tags(f.tags, path)
            case TagsWithSeparatorFormat():
                return self._separated(f, path)
            case RefFormat():
                return self._definition(f.name, path)
        content, times = _repeated(f, path)
        return f"({self._limited(content, inner(path, 'content'))}){times}"

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
        """The bodies of a sequence's elements; neighbors that are regular become one token."""
        bodies: list[str] = []
        run: list[str] = []
        for i, element in enumerate(elements):
            place = inner(path, f"elements[{i}]")
            if (regular := self._regular(element, place)) is not None:
                run.append(f"({regular})")
                continue
            bodies += [self._w.token(" ".join(run))] if run else []
            run = []
            bodies.append(self._limited(element, place))
        return bodies + ([self._w.token(" ".join(run))] if run else [])

    def _json(self, f: JsonSchemaFormat | QwenXmlParameterFormat, path: str) -> str:
        style = "qwen_xml" if isinstance(f, QwenXmlParameterFormat) else f.style
        with_place = _at(inner(path, "json_schema"), field_of(f.json_schema))
        if style == "json":
            return self._w.rule(with_place(json_schema, f.json_schema))
        return with_place(arguments, style, f.json_schema, self._w)

    def _tag(self, f: TagFormat, path: str, begin: str) -> str:
        """The body of a tag. begin: what is not written yet of its beginning."""
        if not f.ends:
            raise ValueError(f"structural_tag: {path}.end must not be empty")
        return self._w.rule(f"{self._w.literal(begin)} {self._body(f.content, inner(path, 'content'), f.ends)}".strip())

    def _tags(self, tags: list[TagFormat], path: str) -> str:
        if not tags:
            raise ValueError(f"structural_tag: {path}.tags must not be empty")
        return _either([self._tag(tag, inner(path, f"tags[{i}]"), tag.begin) for i, tag in enumerate(tags)])

    def _separated(self, f: TagsWithSeparatorFormat, path: str) -> str:
        tag = self._w.rule(self._tags(f.tags, path))
        body = tag if f.stop_after_first else f"{tag} ({self._w.literal(f.separator)} {tag})*"
        return self._w.rule(body) if f.at_least_one else f"({body})?"

    # --------------------------------------------------------------------------------------------------- regular formats
    def _regular(self, f: Format, path: str) -> str | None:
        """A format as the body of a token; None if it is not regular, or may have special tokens."""
        match f:
            case ConstStringFormat():
                return None if self._w.has_special(f.value) else quoted(f.value)
            case RegexFormat():
                return _at(inner(path, "pattern"))(regex_body, f.pattern)
            case SequenceFormat() | OrFormat():
                if not f.elements:
                    raise ValueError(f"structural_tag: {path}.elements must not be empty")
                if isinstance(f, SequenceFormat) and any(map(_goes_on, f.elements[:-1])):
                    raise ValueError(f"structural_tag: {path}: nothing may follow an any_text or triggered_tags in a sequence")
                parts = [self._regular(e, inner(path, f"elements[{i}]")) for i, e in enumerate(f.elements)]
                return None if None in parts else f"({(' ' if isinstance(f, SequenceFormat) else ' | ').join(map(str, parts))})"
            case OptionalFormat() | StarFormat() | PlusFormat() | RepeatFormat():
                content, times = _repeated(f, path)
                part = self._regular(content, inner(path, "content"))
                return None if part is None else f"({part}){times}"
        return None

    # ----------------------------------------------------------------------------------- formats without an end of their own
    def _endless(self, f: Format, path: str, ends: Sequence[str]) -> str:
        match f:
            case AnyTextFormat():
                return self._rest(self._text(f, path), ends)
            case TriggeredTagsFormat():
                return self._triggered(f, path, ends)
            case SequenceFormat():
                self._regular(f, path)  # only to check it
                last = len(f.elements) - 1
                before = self._sequence(f.elements[:last], path)
                return " ".join([*before, self._body(f.elements[last], inner(path, f"elements[{last}]"), ends)])
        assert isinstance(f, OrFormat)
        return _either([self._body(e, inner(path, f"elements[{i}]"), ends) for i, e in enumerate(f.elements)])

    def _text(self, f: AnyTextFormat | TriggeredTagsFormat, path: str, start: bool = True) -> str:
        """The body of a token: free text without what is excluded. start: whether excludes_start applies."""
        text = ANY
        for i, excluded in enumerate(f.excludes):
            if not excluded:
                raise ValueError(f"structural_tag: {path}.excludes[{i}] must not be empty")
            text += f" & ~({ANY} {quoted(excluded)} {ANY})"
        if start and f.excludes_start:
            text += f" & ~({_at(inner(path, 'excludes_start'))(regex_body, f.excludes_start)} {ANY})"
        return text

    def _rest(self, text: str, ends: Sequence[str]) -> str:
        if not any(ends):
            return self._w.token(text)
        return _either([self._w.rule(way) for end in ends for way in self._w.text_up_to(end, text)])

    def _triggered(self, f: TriggeredTagsFormat, path: str, ends: Sequence[str]) -> str:
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

    def _by_trigger(self, f: TriggeredTagsFormat, path: str) -> list[tuple[str, str]]:
        """Triggers, each with the body of what must follow it."""
        if not f.triggers or not all(f.triggers):
            raise ValueError(f"structural_tag: {inner(path, 'triggers')} must not be empty, nor hold an empty text")
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(f.tags):
            fitting = [t for t in f.triggers if tag.begin.startswith(t)]
            place = inner(path, f"tags[{i}]")
            if len(fitting) != 1:
                raise ValueError(
                    f"structural_tag: {place}: {tag.begin!r} must begin with exactly one of the triggers {f.triggers}"
                )
            bodies.setdefault(fitting[0], []).append(self._tag(tag, place, tag.begin[len(fitting[0]) :]))
        return [(trigger, _either(rests)) for trigger, rests in bodies.items()]


def _goes_on(f: Format) -> bool:
    """Whether a format has no end of its own."""
    match f:
        case AnyTextFormat():
            return True
        case TriggeredTagsFormat():
            return not (f.at_least_one and f.stop_after_first)
        case SequenceFormat():
            return bool(f.elements) and _goes_on(f.elements[-1])
        case OrFormat():
            return any(map(_goes_on, f.elements))
    return False


def _repeated(f: Format, path: str) -> tuple[Format, str]:
    """The format that is repeated, and how often, as Lark writes it."""
    match f:
        case OptionalFormat():
            content, times = f.content, "?"
        case StarFormat():
            content, times = f.content, "*"
        case PlusFormat():
            content, times = f.content, "+"
        case RepeatFormat():
            if not 0 <= f.min <= (f.max if f.max != -1 else f.min):
                raise ValueError(f"structural_tag: {path}: min must be at least 0 and at most max (-1: no bound)")
            content, times = f.content, f"{{{f.min},{f.max if f.max != -1 else ''}}}"
        case _:
            raise AssertionError(f)
    if _goes_on(content):
        raise ValueError(f"structural_tag: {path}.content: an any_text or triggered_tags cannot be repeated")
    return content, times


def _up_to(regular: str, ends: Sequence[str]) -> str:
    """The body of a token: `regular` and an end, the first one before which `regular` is complete."""
    return f"(({regular}) {one_of(ends)}) & ~(({regular}) {one_of(ends)} {SOME})"


def _either(bodies: list[str]) -> str:
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(dict.fromkeys(bodies))})"


def _nested(grammar: str, path: str) -> str:
    return f"%lark {{\n{_at(inner(path, 'grammar'))(lark_of, grammar)}\n}}"


def _at(path: str, field: str | None = None) -> Callable[..., str]:
    """A wrapper for calls: it adds the place, or the field, to the text of a ValueError."""

    def call(function: Callable[..., str], *arguments: Any) -> str:
        try:
            return function(*arguments)
        except ValueError as error:
            raise ValueError(f"{field or f'structural_tag: {path}'}: {error}") from None

    return call
