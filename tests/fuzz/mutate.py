"""Mutations of bytes, texts and JSON values. All take a random.Random, so that a seed makes the same cases again."""

import json
import random
from collections.abc import Sequence
from typing import Any

Draw = random.Random
Path = list[Any]

ODD_NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    127,
    128,
    255,
    256,
    4096,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    10**30,
    1e308,
    -1e308,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    False,
]
ODD_TEXTS = [
    "",
    " ",
    "\n",
    "\x00",
    "\x7f",
    "a" * 300,
    "é✓",
    "\u2028",
    "\ud800",
    "\udfff\ud800",
    "\U0001f600",
    "0",
    "-1",
    "1e999",
    "null",
    "true",
    "../../etc/passwd",
    "/etc/passwd",
    "%s%n",
    "{{ 7 * 7 }}",
    "{% for x in y %}",
    "<|im_end|>",
    "</think>",
    "$ref",
    "#/$defs/a",
    "(",
    "[",
    "a{1,99999}",
    "\\",
    "\\u0000",
    "auto",
    "none",
    "required",
    "function",
    "custom",
    "namespace",
    "object",
    "*",
    "default",
]
EMPTY: list[Any] = [None, [], {}, [None], {"": None}, [[]], [{}], {"type": None}, {"name": None}, "", 0, False]


def odd_value(draw: Draw) -> Any:
    """A value of any type, often at the edge of what is allowed."""
    kind = draw.randrange(8)
    if kind < 2:
        return draw.choice(EMPTY)
    if kind < 4:
        return draw.choice(ODD_NUMBERS)
    if kind < 6:
        return draw.choice(ODD_TEXTS)
    if kind == 6:
        return [odd_value(draw) for _ in range(draw.randrange(4))]
    return {draw.choice(ODD_TEXTS): odd_value(draw) for _ in range(draw.randrange(4))}


# ---------------------------------------------------------------------------------------------------------------- JSON
def places(value: Any, path: Path | None = None) -> list[Path]:
    """The paths of all values within a value, itself included."""
    path = path or []
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, [*path, key])
    return found


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at this place."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {k: replaced(v, rest, new) if k == key else v for k, v in value.items()}
    return [replaced(v, rest, new) if i == key else v for i, v in enumerate(value)]


def nested(draw: Draw, value: Any) -> Any:
    """The value within many lists or objects."""
    for _ in range(draw.choice([1, 2, 5, 70, 200])):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def mutated_json(draw: Draw, value: Any, others: Sequence[Any], names: Sequence[str] = ()) -> Any:
    """The value with one to four changes. others: values that parts may come from. names: keys that may be added."""
    for _ in range(draw.choice([1, 1, 1, 2, 3, 4])):
        value = _changed(draw, value, others, names)
    return value


def _changed(draw: Draw, value: Any, others: Sequence[Any], names: Sequence[str]) -> Any:
    path = draw.choice(places(value))
    old = at(value, path)
    match draw.randrange(10):
        case 0 | 1:
            return replaced(value, path, odd_value(draw))
        case 2 if path:  # without it
            parent = at(value, path[:-1])
            rest = (
                {k: v for k, v in parent.items() if k != path[-1]}
                if isinstance(parent, dict)
                else parent[: path[-1]] + parent[path[-1] + 1 :]
            )
            return replaced(value, path[:-1], rest)
        case 3 | 4 if others:  # a part of another value
            other = draw.choice(others)
            return replaced(value, path, at(other, draw.choice(places(other))))
        case 5 if isinstance(old, dict) and (
            names or others
        ):  # another field, with a value that it has elsewhere, or an odd one
            other = draw.choice(others) if others else None
            if isinstance(other, dict) and other and draw.random() < 0.7:
                name = draw.choice(list(other))
                return replaced(value, path, {**old, name: other[name]})
            return replaced(value, path, {**old, draw.choice(names or ODD_TEXTS): odd_value(draw)})
        case 6 if isinstance(old, list) and old:  # an element again, or in another order
            again = [*old, draw.choice(old)] if draw.random() < 0.7 else draw.sample(old, len(old))
            return replaced(value, path, again * draw.choice([1, 1, 1, 50]))
        case 7 if isinstance(old, str):
            return replaced(value, path, mutated_text(draw, old))
        case 8:
            return replaced(value, path, nested(draw, old))
        case 9 if isinstance(old, dict) and old:  # a field under another name
            name = draw.choice(list(old))
            return replaced(value, path, {(draw.choice([*names, *ODD_TEXTS]) if k == name else k): v for k, v in old.items()})
    return replaced(value, path, odd_value(draw))


def json_bytes(draw: Draw, value: Any) -> bytes:
    """The value as JSON, with surrogates and numbers that are none. Now and then its bytes are damaged, too."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.7)
    data = text.encode(errors="surrogatepass")
    return mutated_bytes(draw, data) if draw.random() < 0.06 else data


# ------------------------------------------------------------------------------------------------------ bytes and texts
def mutated_bytes(draw: Draw, data: bytes, words: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to six changes. words: what may be put in."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        at = draw.randrange(len(changed) + 1)
        to = min(len(changed), at + draw.choice([1, 1, 2, 4, 16, 64]))
        match draw.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(changed):
                changed[at] = draw.choice([0, 9, 10, 13, 32, 34, 44, 58, 92, 127, 128, 255])
            case 2:
                del changed[at:to]
            case 3:
                changed[at:at] = changed[at:to] * draw.choice([1, 2, 40])
            case 4:
                del changed[at:]
            case 5 if words:
                changed[at:at] = draw.choice(words)
            case _:
                changed[at:at] = draw.randbytes(draw.choice([1, 2, 4]))
    return bytes(changed)


def mutated_text(draw: Draw, text: str, words: Sequence[str] = ()) -> str:
    """The text with one to four changes. words: what may be put in."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(text) + 1)
        to = min(len(text), at + draw.choice([1, 1, 2, 8, 40]))
        match draw.randrange(6):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:at] + text[at:to] * draw.choice([2, 3, 30]) + text[to:]
            case 2:
                text = text[:at]
            case 3 | 4 if words:
                text = text[:at] + draw.choice(words) + text[at:]
            case _:
                text = text[:at] + draw.choice(ODD_TEXTS) + text[at:]
    return text


def pieces_of(draw: Draw, data: Any) -> list[Any]:
    """The text or bytes in up to twelve pieces."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
