"""JSON in pieces: large answers are encoded slice by slice, in turns of the event loop, and sent as fast as the client reads.

`JsonPieces` is a value that is encoded when it is read; it can stand for any field of a response. `pieces` walks a response and
yields the bytes that `json_bytes` would make. `send_json` sends an answer of any size: it never holds more than KEPT_BYTES, and
encodes a longer answer twice, the first time for its length. `stream_json` encodes once, and a longer answer has no length in
its head. This file knows no route and no field.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from quire.frontend.client.turns import Slice
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import JSON, Response

KEPT_BYTES = 1 << 20
LARGE_ANSWER = 8192  # an answer of more tokens of text, or token ids, is sent in pieces
_WRITE_BYTES = 64 << 10
_ITEMS = 4096  # items of a plain list that are encoded at once


class JsonPieces:
    """A JSON value as pieces of bytes, each made in a few milliseconds at most. It can be read more than once."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterator[bytes]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[bytes]:
        return self._make()


def in_list(parts: Iterable[list[Any]]) -> Iterator[bytes]:
    """One JSON list, encoded slice by slice."""
    opening = b"["
    for part in parts:
        if part:
            yield opening + json_bytes(part)[1:-1]
            opening = b","
    yield b"[]" if opening == b"[" else b"]"


def pieces(value: Any) -> Iterator[bytes]:
    """A value's JSON: structs field by field, lists a few items at a time, JsonPieces piece by piece."""
    if isinstance(value, JsonPieces):
        yield from value
    elif isinstance(value, msgspec.Struct) and _is_plain(value):
        opening = b"{"
        for field in value.__struct_encode_fields__:
            part = getattr(value, field)
            if part is not msgspec.UNSET:
                yield opening + json_bytes(field) + b":"
                yield from pieces(part)
                opening = b","
        yield b"{}" if opening == b"{" else b"}"
    elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct | JsonPieces):
        for i, item in enumerate(value):
            yield b"," if i else b"["
            yield from pieces(item)
        yield b"]"
    elif isinstance(value, dict) and any(isinstance(each, JsonPieces) for each in value.values()):
        for i, (name, each) in enumerate(value.items()):
            yield (b"," if i else b"{") + json_bytes(name) + b":"
            yield from pieces(each)
        yield b"}"
    elif isinstance(value, list) and len(value) > _ITEMS:
        yield from in_list(value[i : i + _ITEMS] for i in range(0, len(value), _ITEMS))
    else:
        yield json_bytes(value)


def _is_plain(value: msgspec.Struct) -> bool:
    """Whether msgspec encodes it as an object of all its fields under their own names."""
    config = value.__struct_config__
    names_kept = value.__struct_encode_fields__ == value.__struct_fields__
    return not (config.array_like or config.omit_defaults or config.tag is not None) and names_kept


async def send_json(response: Response, answer: Any, most_bytes: int) -> None:
    """Answer 200 with JSON of any size. Raises ApiError 400 if it is longer than most_bytes."""
    kept, size, piece = list[bytes](), 0, Slice()
    for data in pieces(answer):
        size += len(data)
        if size > most_bytes:
            raise too_large(most_bytes)
        if size <= KEPT_BYTES:
            kept.append(data)
        if piece.is_over:
            await piece.next()
    if size <= KEPT_BYTES:
        return response.send(200, b"".join(kept))
    kept.clear()
    response.start_sized(size)
    await write_pieces(response, pieces(answer))
    response.end()


async def stream_json(response: Response, answer: Any) -> None:
    """Answer 200 with JSON of any size, encoded once: one of more than KEPT_BYTES is sent in chunks."""
    parts, kept, size, piece = pieces(answer), list[bytes](), 0, Slice()
    for data in parts:
        kept.append(data)
        size += len(data)
        if size > KEPT_BYTES:
            break
        if piece.is_over:
            await piece.next()
    else:
        return response.send(200, b"".join(kept))
    response.start(JSON)
    await write_pieces(response, chain(kept, parts))
    response.end()


async def send_parts(response: Response, parts: Sequence[bytes | msgspec.Raw]) -> None:
    """Answer 200 with JSON that is encoded already, of any size."""
    views = [memoryview(part) for part in parts]
    size = sum(view.nbytes for view in views)
    if size <= KEPT_BYTES:
        return response.send(200, b"".join(views))
    if response.start_sized(size):
        await write_pieces(response, (bytes(view[at : at + _WRITE_BYTES])
                                      for view in views for at in range(0, view.nbytes, _WRITE_BYTES)))  # fmt: skip
        response.end()


async def write_pieces(response: Response, parts: Iterable[bytes]) -> None:
    """Join pieces to writes of a good size, and write them to a response that has begun as fast as the client reads."""
    buffer, size, piece = list[bytes](), 0, Slice()
    for data in parts:
        buffer.append(data)
        size += len(data)
        if size >= _WRITE_BYTES:
            response.write(b"".join(buffer))
            buffer, size = [], 0
            await response.drain()
        if piece.is_over:
            await piece.next()
    response.write(b"".join(buffer))


def too_large(most_bytes: int) -> ApiError:
    return ApiError(
        400,
        f"The answer is longer than the {most_bytes >> 20} MiB that this server sends in one piece: ask for fewer tokens, "
        "choices or logprobs, or for a stream.",
        code="response_too_large",
    )
