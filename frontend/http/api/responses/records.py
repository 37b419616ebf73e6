"""Kept responses: their records, and conversations that continue from one. Bounds are in store/bounds.py.

A record has the response as it was answered, and its conversation: every item before its output. So one read is enough to
continue, and a response may be deleted without affecting those that follow it. A record belongs to an API key; for any other
key it does not exist. A response in the background has a record from its beginning, with a lease that the frontend which runs
it renews. If the lease runs out, the response has failed.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from quire.frontend.client.turns import Slice, in_thread
from quire.frontend.http.api.bodies.body_shape import WEIGHED_BYTES
from quire.frontend.http.api.bodies.json_pieces import pieces
from quire.frontend.http.api.bodies.schemas import Json
from quire.frontend.http.api.responses.answer import (
    Item,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
)
from quire.frontend.http.api.responses.items import response_of_item
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.bounds import MAX_RESPONSES_BYTES
from quire.frontend.http.store.database import Database
from quire.frontend.http.store.storage import Storage

logger = logging.getLogger("quire.http")

_ID = re.compile(r"resp_[A-Za-z0-9._:-]{1,250}")
ABANDONED_S = 20.0  # duration of a lease
_RUNNING, _ENDED = "running", ""  # tags of records
_MAX_BYTES = MAX_RESPONSES_BYTES // 8  # of one record in the store


class Record(msgspec.Struct):
    """items: the conversation before it. said: its output, without log-probabilities. running: it still runs in background."""

    response: msgspec.Raw
    items: list[msgspec.Raw]
    said: list[msgspec.Raw]
    background: bool = False
    running: bool = False


class _Id(msgspec.Struct):
    id: str


_record_decoder = msgspec.json.Decoder(Record)
_item_decoder = msgspec.json.Decoder(dict)
_id_decoder = msgspec.json.Decoder(_Id)


async def find(storage: Storage, owner: str, id: str) -> Record | None:
    body = await storage.get("response", owner, id) if _ID.fullmatch(id) else None
    record = await _decoded_record(body)
    if record is None or not record.running or not await storage.database(lambda db: _is_abandoned(db, id)):
        return record
    return await _decoded_record(
        await storage.database(
            lambda db: db.edit("response", owner, id, lambda body: _failed(body) if _is_abandoned(db, id) else body, _ENDED)
        )
    )


async def _decoded_record(body: bytes | None) -> Record | None:
    if body is None:
        return None
    return _record_decoder.decode(body) if len(body) < WEIGHED_BYTES else await in_thread(_record_decoder.decode, body)


# -------------------------------------------------------------------------------------------------- in the background
def _is_abandoned(database: Database, id: str) -> bool:
    """Whether a response that runs according to its record has no valid lease."""
    now = database.clock()
    return not now < database.leased_until(id) <= now + ABANDONED_S  # a later end is impossible: the clock was set back


def _failed(body: bytes) -> bytes:
    error = ResponseError("server_error", "The server that ran this response was stopped.")
    return _ended(body, status="failed", error=msgspec.to_builtins(error))


def _ended(body: bytes, **fields: Any) -> bytes:
    """The record with a response that runs no longer. fields: those that change. A record that has ended is unchanged."""
    record = _record_decoder.decode(body)
    if not record.running:
        return body
    response = msgspec.json.decode(record.response, type=dict[str, msgspec.Raw])
    record.response, record.running = msgspec.Raw(json_bytes({**response, **fields})), False
    return json_bytes(record)


async def cancel(storage: Storage, owner: str, id: str) -> Record | None:
    """Mark a response as cancelled, whichever frontend runs it. One that has ended is unchanged. None: there is no record."""
    return await _decoded_record(
        await storage.edit("response", owner, id, lambda body: _ended(body, status="cancelled"), _ENDED)
    )


async def touch(storage: Storage, owner: str, id: str) -> bool:
    """Renew the lease of a response. Returns whether it was neither cancelled nor deleted."""
    return await storage.database(lambda db: db.renew("response", owner, id, _RUNNING, db.clock() + ABANDONED_S))


async def keep_result(storage: Storage, owner: str, response: ResponseObject, items: Sequence[Json]) -> None:
    """Replace the record of a response that ran in the background, unless that was cancelled or deleted."""
    try:
        body = await _record_of(response, items)
    except ApiError as error:
        response.fail(error)
        response.output = []
        body = await _record_of(response, items)

    def replace(database: Database) -> None:
        with database.transaction():
            if database.has("response", owner, response.id, _RUNNING):
                database.add("response", owner, response.id, body, tag=_ENDED)

    await storage.database(replace)


# ------------------------------------------------------------------------------------------------------------ going on
async def conversation(storage: Storage, owner: str, previous_response_id: str | None) -> tuple[list[Json], int]:
    """The items of a conversation, up to and including that response's output; and their size in bytes. Raises ApiError 400."""
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
    if record.running:
        raise ApiError(400, "previous_response_id: this response is still in progress.", param="previous_response_id",
                       code="response_in_progress")  # fmt: skip
    raws = [*record.items, *record.said]
    return await _decoded(raws), sum(_size(raw) for raw in raws)


async def referred_items(storage: Storage, owner: str, ids: Iterable[str]) -> dict[str, Json]:
    """Items of kept responses by id; ids that do not exist are left out."""
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
    """Add the record of a response that begins to run in the background. Raises ApiError."""
    body = await _record_of(response, items, running=True)

    def begin(database: Database) -> None:
        with database.transaction():
            database.add("response", owner, response.id, body, tag=_RUNNING)
            database.lease(response.id, database.clock() + ABANDONED_S)

    await storage.database(begin)


async def keep(storage: Storage, owner: str, response: ResponseObject, items: Sequence[Json]) -> None:
    """Keep a response. If that fails, it is answered with `store: false`, and the reason is logged."""
    try:
        await storage.put("response", owner, response.id, await _record_of(response, items))
    except ApiError as error:
        response.store = False
        logger.warning("a response is not kept: %s", error.message)


async def _record_of(response: ResponseObject, items: Sequence[Json], running: bool = False) -> bytes:
    """A record's JSON, encoded in turns of the event loop. Raises ApiError 400."""
    said = [json_bytes(_without_logprobs(item)) for item in response.output]
    parts, size, piece = [b'{"response":'], 0, Slice()
    flags = json_bytes(response.background), json_bytes(running)
    tail = (b'],"said":[', b",".join(said), b'],"background":%b,"running":%b}' % flags)
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
