"""Routes and fields for docs/api.md, from ROUTES, the structs of bodies and answers, and the notes beside them.

A new struct or route appears by itself; a field without a note fails tests/docs/test_pages.py.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages_fields as messages
import msgspec
import responses_fields as responses
from error_codes import ERROR_CODES
from field_notes import ANSWERS, FIELDS_OF, ROUTE_NOTES
from field_table import FIELDS
from markdown import code, table
from note import Note

from quire.frontend.http.api.bodies.schemas import ChatRequest, CompletionRequest
from quire.frontend.http.api.messages.schemas import CountTokensRequest, MessagesRequest
from quire.frontend.http.api.page import FILES
from quire.frontend.http.api.responses.request import ResponsesRequest
from quire.frontend.http.api.route import JSON, Route
from quire.frontend.http.api.routes import ROUTES
from quire.ipc.sampling import BOUNDS, SamplingParams

Struct = type[msgspec.Struct]

ROOT = Path(__file__).parents[2]
TAGS = {
    "generate": "Generating",
    "responses": "Responses",
    "ollama": "As Ollama's",
    "models": "Models",
    "batches": "Files and batches",
    "tokens": "Tokens",
    "service": "Service",
    "admin": "For the operator",
    "pooling": "Vectors and scores",
    "audio": "Not here yet: audio",
}
# Bodies with a table of all fields that a reference names, also of those that are not read here.
_TABLES: dict[Struct, list[Any]] = {
    ChatRequest: [field for field in FIELDS if field.routes in ("chat", "both")],
    CompletionRequest: [field for field in FIELDS if field.routes in ("completions", "both")],
    ResponsesRequest: list(responses.FIELDS),
    MessagesRequest: list(messages.FIELDS),
    CountTokensRequest: [field for field in messages.FIELDS if field.routes == "both"],
}
_SAMPLING_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
_STATUS_WORD = {"works": "", "harmless": "Taken, without effect: ", "refused": "**400**: "}
_PAGE_PATHS = {path.decode() for path in FILES}


# ------------------------------------------------------------------------------------------------------------------ routes
def routes() -> str:
    parts = []
    for tag in dict.fromkeys(route.tag for route in ROUTES.routes):
        rows = dict[str, list[str]]()
        for route in ROUTES.routes:
            if route.tag == tag:
                name, *rest = _route_row(route)
                same = "; ".join(rest)  # files of the page, and what is not here, are a row each
                rows[same] = [f"{rows[same][0]}, {name}" if same in rows else name, *rest]
        parts += [f"### {TAGS.get(tag, tag.capitalize())}", table(["route", "", "key", "body", "answer"], rows.values())]
    return "\n\n".join(parts)


def name_of(route: Route) -> str:
    path = re.sub(r":path\}", "}", route.path)
    return f"{route.method} {path}"


def _route_row(route: Route) -> list[str]:
    name = name_of(route)
    if route.missing:
        return [code(name), f"**501**: {route.missing}", "yes", "", ""]
    if route.path in _PAGE_PATHS:
        return [code(name), "The page, and its files", "no", "", "text"]
    notes = [route.summary, ROUTE_NOTES.get(name, "")]
    if route.query:
        notes.append("query: " + ", ".join(_query(name, schema) for name, schema in route.query.items()))
    body = _link(route.body) if route.body else ("a form" if route.media_type != JSON else "")
    answer = _link(route.answer) if isinstance(route.answer, type) and issubclass(route.answer, msgspec.Struct) else ""
    answer = answer or ("JSON" if route.answer_type == JSON and route.answer else route.answer_type if not route.answer else "")
    if route.answer is None and route.answer_type == JSON:
        answer = "empty"
    key = "no" if route.is_open else "yes"
    return [code(name), "; ".join(filter(None, notes)), key, body, answer + _stream(route)]


def _stream(route: Route) -> str:
    return "" if not route.streams else ", or events" if "event-stream" in route.stream_type else ", or lines of JSON"


def _query(name: str, schema: Any) -> str:
    what = ", ".join(map(str, schema.get("enum", ()))) or {"integer": "a number"}.get(schema["type"], "a text")
    return f"{code(name)} ({what}{'; default: ' + str(schema['default']) if 'default' in schema else ''})"


@functools.cache
def title_of(struct: Struct) -> str:
    """Its name, with its folder if several structs have the name."""
    others = {other for kind in ("body", "answer") for other in _structs(kind) if other.__name__ == struct.__name__}
    return struct.__name__ + (f" ({struct.__module__.split('.')[-2]})" if len(others) > 1 else "")


def _link(struct: Struct) -> str:
    title = title_of(struct)
    return f"[{title}](#{re.sub(r'[()]', '', title.lower()).replace(' ', '-')})"


# ------------------------------------------------------------------------------------------------------------------ fields
def fields() -> str:
    """Every struct of a body with its structs within it, then those of answers."""
    bodies, answers = _structs("body"), _structs("answer")
    parts = ["## Fields of bodies", _INTRO]
    parts += [_body(struct) for struct in bodies]
    parts += ["## Fields of answers"]
    parts += [_answer(struct) for struct in answers if struct not in bodies]
    return "\n\n".join(parts)


_INTRO = (
    "A field that is null means the same as one that is left out, and so does an unknown one (the log names it once). Numbers "
    'and booleans are taken as vLLM takes them: `5.0` and `"5"` for `5`, `"true"` for `true`. "The model\'s" defaults are '
    "those of its `generation_config.json`; `--generation-config vllm` leaves them out."
)


def _structs(kind: str) -> list[Struct]:
    found: dict[Struct, None] = {}
    for route in ROUTES.routes:
        for struct in _within(getattr(route, kind)):
            found.setdefault(struct)
    return list(found)


def _within(kind: Any) -> Iterator[Struct]:
    """A type's structs: itself, then those of its fields."""
    todo = [msgspec.inspect.type_info(kind)] if kind is not None else []
    seen: list[Struct] = []
    while todo:
        info = todo.pop(0)
        if isinstance(info, msgspec.inspect.StructType) and info.cls not in seen:
            seen.append(info.cls)
            todo += [field.type for field in info.fields]
        todo += [getattr(info, name) for name in ("item_type", "value_type") if hasattr(info, name)]
        todo += list(getattr(info, "types", ()))
    yield from seen


def _body(struct: Struct) -> str:
    paths = [f"`{r.method} {r.path}`" for r in ROUTES.routes if r.body is struct]
    head = f"### {title_of(struct)}"
    rows = [_field_row(struct, field) for field in _fields(struct)]
    if struct in _TABLES:
        rows = _in_order(struct, rows)
    return "\n\n".join(
        [head, *([f"Body of {', '.join(paths)}."] if paths else []), table(["field", "type", "default", "bounds", ""], rows)]
    )


def _in_order(struct: Struct, rows: list[list[str]]) -> list[list[str]]:
    """In the order of the table of fields, with those that are not read: working fields first, refused ones last."""
    by_name = {row[0]: row for row in rows}
    here = sorted(_TABLES[struct], key=lambda field: ("works", "harmless", "refused").index(field.treatment))
    return [by_name.get(code(f.name)) or [code(f.name), "", "", "", _said(note_of(struct, f.name))] for f in here]


def _said(note: Note) -> str:
    return _STATUS_WORD[note.treatment] + note.text


def _fields(struct: Struct) -> list[msgspec.inspect.Field]:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return list(info.fields)


def note_of(struct: Struct, name: str) -> Note:
    """The meaning of a body's field: from its own notes or table, else as on the generating routes.

    Raises KeyError for a field without a note.
    """
    own = FIELDS_OF.get(struct.__name__, {})
    if name in own:
        return own[name]
    mine = next((field for field in _TABLES.get(struct, ()) if field.name == name), None)
    common = next((field for field in FIELDS if field.name == name and field.note), None)
    if mine is None:
        mine = common
    elif common is not None and common.treatment != mine.treatment:
        common = None
    text = (mine and mine.note) or (common and common.note)
    if mine is None or not text:
        raise KeyError(f"{struct.__name__}.{name}")
    default = getattr(mine, "default", "") or (common.default if common is not None else "")
    return Note(text, default, mine.treatment)


def _field_row(struct: Struct, field: msgspec.inspect.Field) -> list[str]:
    note, name = note_of(struct, field.encode_name), field.encode_name
    if note.treatment == "refused":
        return [code(name), "", "", "", _said(note)]
    default = note.default
    if field.required:
        default = "required"
    elif not default and note.treatment == "works":
        default = _default(name)
    kind, limits = _type(field.type)
    return [code(name), kind, default, note.bounds or _bounds(name, kind) or limits, _said(note)]


def _default(name: str) -> str:
    value = _SAMPLING_DEFAULTS.get(name)
    return "" if value is None else {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _bounds(name: str, kind: str) -> str:
    if name not in BOUNDS or kind not in ("integer", "number", "integer or boolean"):
        return ""
    low, high, closed = BOUNDS[name]
    if name == "thinking_token_budget":
        low = -1  # of bodies: no limit
    if low == -(2**63):
        return "64 bits"
    low_text = f"{'' if closed else 'above '}{low:g}" if low is not None else ""
    high_text = "2^31 - 1" if high == 2**31 - 1 else f"{high:g}" if high is not None else ""
    return f"{low_text} to {high_text}" if high_text else f"{'at least ' if closed else ''}{low_text}"


def _type(info: msgspec.inspect.Type) -> tuple[str, str]:
    """The type in JSON's words, and the bounds of its annotation."""
    kinds = [t for t in getattr(info, "types", (info,)) if not isinstance(t, msgspec.inspect.NoneType)]
    names = [_one_type(t) for t in kinds]
    return " or ".join(dict.fromkeys(names)), "; ".join(filter(None, map(_limits, kinds)))


def _one_type(t: Any) -> str:
    inspect = msgspec.inspect
    match t:
        case inspect.StructType():
            return _link(t.cls)
        case inspect.ListType() | inspect.TupleType() | inspect.VarTupleType():
            item = _type(t.item_type)[0] if hasattr(t, "item_type") else "anything"
            return f"list of {item}"
        case inspect.DictType():
            inner = _type(t.value_type)[0]
            return "object" if inner == "anything" else f"object of {inner}"
        case inspect.LiteralType():
            return ", ".join(map(str, t.values))
    names = {"IntType": "integer", "FloatType": "number", "StrType": "text", "BoolType": "boolean", "AnyType": "anything"}
    return names.get(type(t).__name__, type(t).__name__)


def _limits(t: Any) -> str:
    if (low := getattr(t, "ge", None)) is not None and (high := getattr(t, "le", None)) is not None:
        return {2**63 - 1: "64 bits", 2**31 - 1: "32 bits" if low else "0 to 2^31 - 1"}.get(high, f"{low} to {high}")
    low, high = getattr(t, "min_length", None), getattr(t, "max_length", None)
    unit = "characters" if isinstance(t, msgspec.inspect.StrType) else ""
    if high is not None:
        return f"{low or 0} to {high:,} {unit}".strip() if low else f"up to {high:,} {unit}".strip()
    return f"at least {low} {unit}".strip() if low else ""


def _answer(struct: Struct) -> str:
    rows = [[code(f.encode_name), _type(f.type)[0], answer_note(struct, f.encode_name)] for f in _fields(struct)]
    paths = [f"`{r.method} {r.path}`" for r in ROUTES.routes if r.answer is struct]
    said = [f"Answer of {', '.join(paths)}."] if paths else []
    return "\n\n".join([f"### {title_of(struct)}", *said, table(["field", "type", ""], rows)])


def answer_note(struct: Struct, name: str) -> str:
    """Raises KeyError for a field without a note."""
    own = f"{struct.__name__}.{name}"
    return ANSWERS[own] if own in ANSWERS else ANSWERS[name]


# ------------------------------------------------------------------------------------------------------------------ errors
def error_codes() -> str:
    return table(["code", "status", "when"], [[code(name), status, when] for name, (status, when) in ERROR_CODES.items()])
