"""Responses that are kept: what a record holds, and how a conversation goes on from one. Its bounds are store/bounds.py's.

A record has the response as it was answered, and its conversation: every item before its output. So one read is enough to go
on, and a response may be deleted without breaking those that came after it. Records are their key's: another's are not found.
One that runs in the background has a record from the beginning, which whoever runs it touches now and then: where nobody does
any more, it has failed.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from quire.frontend.client.turns import Slice, in_thread
from quire.frontend.http.api.body_shape import WEIGHED_BYTES
from quire.frontend.http.api.json_pieces import pieces
from quire.frontend.http.api.responses.answer import (
    Item,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
)
from quire.frontend.http.api.responses.items import response_of_item
from quire.frontend.http.api.schemas import Json
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.bounds import MAX_RESPONSES_BYTES
from quire.frontend.http.store.database import Database
from quire.frontend.http.store.storage import Storage

logger = logging.getLogger("quire.http")

_ID = re.compile(r"resp_[A-Za-z0-9._:-]{1,250}")
ABANDONED_S = 20.0  # since it was last seen to run
_MAX_BYTES = MAX_RESPONSES_BYTES // 8  # of one record; as the store has it


class Record(msgspec.Struct):
    """items: of the conversation before it. said: its output, without log-probabilities. seen_at: when whoever runs it in the
    background was last seen to do so; 0 for one that has ended."""

    response: msgspec.Raw
    items: list[msgspec.Raw]
    said: list[msgspec.Raw]
    seen_at: float = 0.0


class Status(msgspec.Struct):
    """Of a response."""

    status: str
    background: bool


class _Id(msgspec.Struct):
    id: str


_record_decoder = msgspec.json.Decoder(Record)
_item_decoder = msgspec.json.Decoder(dict)
_id_decoder = msgspec.json.Decoder(_Id)
status_decoder = msgspec.json.Decoder(Status)


def decode(body: bytes) -> Record:
    return _record_decoder.decode(body)


async def find(storage: Storage, owner: str, id: str) -> Record | None:
    body = await storage.get("response", owner, id) if _ID.fullmatch(id) else None
    if body is None:
        return None
    record = decode(body) if len(body) < WEIGHED_BYTES else await in_thread(decode, body)
    if _is_abandoned(record, storage.clock()):
        body = await storage.edit("response", owner, id, lambda body: _failed(body, storage.clock()))
        return None if body is None else decode(body)
    return record


# -------------------------------------------------------------------------------------------------- in the background
def is_running(response: bytes | msgspec.Raw) -> bool:
    return status_decoder.decode(response).status == "in_progress"


def _is_abandoned(record: Record, now: float) -> bool:
    return bool(record.seen_at) and is_running(record.response) and not 0 <= now - record.seen_at < ABANDONED_S


def _failed(body: bytes, now: float) -> bytes:
    record = decode(body)
    if not _is_abandoned(record, now):
        return body
    error = ResponseError("server_error", "The server that ran this response was stopped.")
    return _with(record, status="failed", error=msgspec.to_builtins(error))


def cancelled(body: bytes) -> bytes:
    """The record of a response that is to be given up; of one that has ended, as it is."""
    record = decode(body)
    return _with(record, status="cancelled") if is_running(record.response) else body


def touched(body: bytes, now: float) -> bytes:
    """The record of a response that still runs."""
    record = decode(body)
    record.seen_at = now
    return json_bytes(record)


def _with(record: Record, **fields: Any) -> bytes:
    response = msgspec.json.decode(record.response, type=dict[str, msgspec.Raw])
    record.response = msgspec.Raw(json_bytes({**response, **fields}))
    return json_bytes(record)


async def touch(storage: Storage, owner: str, id: str) -> bool:
    """Whether it is still wanted: neither cancelled nor deleted."""
    body = await storage.edit("response", owner, id, lambda body: touched(body, storage.clock()))
    return body is not None and is_running(decode(body).response)


async def keep_result(storage: Storage, owner: str, response: ResponseObject, items: Sequence[Json]) -> None:
    """Of a response that ran in the background: in place of its record, if that is still there and not cancelled."""
    try:
        body = await _record_of(response, items, 0.0)
    except ApiError as error:
        response.fail(error)
        response.output = []
        body = await _record_of(response, items, 0.0)

    def replace(database: Database) -> None:
        with database.transaction():
            before = database.get("response", owner, response.id)
            if before is not None and is_running(decode(before).response):
                database.add("response", owner, response.id, body)

    await storage.database(replace)


# ------------------------------------------------------------------------------------------------------------ going on
async def conversation(storage: Storage, owner: str, previous_response_id: str | None) -> tuple[list[Json], int]:
    """The items up to that response's output, which is the last of them; and their bytes. Raises ApiError 400."""
    if previous_response_id is None:
        return [], 0
    record = await find(storage, owner, previous_response_id)
    if record is None:
        raise ApiError(
            400,
            f"Previous response with id {previous_response_id[:80]!r} not found: responses are kept with store: true, for a "
            "time and for the API key that made them.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if is_running(record.response):
        raise ApiError(400, "previous_response_id: this response is still in progress.", param="previous_response_id",
                       code="response_in_progress")  # fmt: skip
    raws = [*record.items, *record.said]
    return await _decoded(raws), sum(_size(raw) for raw in raws)


async def referred_items(storage: Storage, owner: str, ids: Iterable[str]) -> dict[str, Json]:
    """Items of kept responses by id, those of them that there are."""
    wanted: dict[str, list[str]] = {}
    for id in ids:
        wanted.setdefault(response_of_item(id), []).append(id)
    found: dict[str, Json] = {}
    for response_id, item_ids in wanted.items():
        record = await find(storage, owner, response_id)
        if record is not None:
            raws = [raw for raw in (*record.items, *record.said) if item_id_of(raw) in item_ids]
            found |= {item["id"]: item for item in await _decoded(raws)}
    return found


def item_id_of(item: msgspec.Raw) -> str:
    return _id_decoder.decode(item).id


async def _decoded(raws: Sequence[msgspec.Raw]) -> list[Json]:
    items, piece = [], Slice()
    for raw in raws:
        small = _size(raw) < WEIGHED_BYTES
        items.append(_item_decoder.decode(raw) if small else await in_thread(_item_decoder.decode, raw))
        if piece.is_over:
            await piece.next()
    return items


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


# -------------------------------------------------------------------------------------------------------------- keeping
async def keep_begun(storage: Storage, owner: str, response: ResponseObject, items: Sequence[Json]) -> None:
    """Of a response that begins to run in the background. Raises ApiError."""
    await storage.put("response", owner, response.id, await _record_of(response, items, storage.clock()))


async def keep(storage: Storage, owner: str, response: ResponseObject, items: Sequence[Json]) -> None:
    """What cannot be kept is answered all the same: then the response says `store: false`, and the log why."""
    try:
        await storage.put("response", owner, response.id, await _record_of(response, items, 0.0))
    except ApiError as error:
        response.store = False
        logger.warning("a response is not kept: %s", error.message)


async def _record_of(response: ResponseObject, items: Sequence[Json], seen_at: float) -> bytes:
    """A record's JSON, made in turns of the loop. Raises ApiError 400."""
    said = [json_bytes(_without_logprobs(item)) for item in response.output]
    parts, size, piece = [b'{"response":'], 0, Slice()
    tail = (b'],"said":[', b",".join(said), b'],"seen_at":%f}' % seen_at)
    for part in chain(pieces(response), (b',"items":[',), _encoded(items), tail):
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise ApiError(400, "this response is too large to be kept.", code="storage_full")
        if piece.is_over:
            await piece.next()
    return b"".join(parts)


def _encoded(items: Sequence[Json]) -> Iterable[bytes]:
    for i, item in enumerate(items):
        yield b"," + json_bytes(item) if i else json_bytes(item)


def _without_logprobs(item: Item) -> Item:
    if not isinstance(item, OutputMessage):
        return item
    return msgspec.structs.replace(item, content=[OutputText(text=part.text) for part in item.content])
