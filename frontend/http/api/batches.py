"""/v1/batches: create, list, read and cancel batches, with OpenAI's objects and fields. batches/runner.py runs them.

A batch belongs to the API key that created it, like its files. Creating one only writes its record; the frontend that runs it
reads its input.
"""

import re
from typing import Annotated

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder
from quire.frontend.http.api.bodies.pages import page_json, page_query
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.files import checked_time_to_live, file_decoder
from quire.frontend.http.api.services import Services
from quire.frontend.http.batches.lines import ENDPOINTS
from quire.frontend.http.batches.record import Batch, cancelling, decode
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.store.batch_queue import ACTIVE
from quire.frontend.http.store.bounds import MAX_WINDOW_S
from quire.frontend.http.store.storage import new_record_id

PREFIX = b"/v1/batches/"
_ID = re.compile(r"batch_[0-9a-f]{32}")
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_SECONDS = {"h": 3600, "d": 24 * 3600}
_DEFAULT_PAGE, _MAX_PAGE = 20, 100

Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]


class ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """A body with `metadata` as a field of its own; bodies of other routes ignore it."""

    input_file_id: Annotated[str, msgspec.Meta(max_length=64)]
    endpoint: Annotated[str, msgspec.Meta(max_length=64)]
    completion_window: Annotated[str, msgspec.Meta(max_length=16)]
    output_expires_after: ExpiresAfter | None = None


class _Metadata(msgspec.Struct):
    metadata: Metadata | None = None


_decoder = BodyDecoder(BatchRequest)
_metadata_decoder = msgspec.json.Decoder(_Metadata)


async def create_batch(services: Services, request: Request, response: Response) -> None:
    data, storage = request.take_body(), services.storage
    body = _decoder.decode(data, services.unknown_fields)
    if body.endpoint not in ENDPOINTS:
        raise invalid(f"endpoint must be {' or '.join(ENDPOINTS)}", "endpoint")
    file = await storage.get("file", request.owner, body.input_file_id)
    if file is None:
        raise ApiError(404, "input_file_id: there is no such file.", param="input_file_id", code="not_found")
    if file_decoder.decode(file).purpose != "batch":
        raise invalid("input_file_id: this file's purpose is not batch", "input_file_id")
    now = int(storage.clock())
    batch = Batch(
        id=new_record_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + _window_s(body.completion_window),
        metadata=_metadata(data),
        output_expires_after_s=_output_time_to_live(body.output_expires_after),
    )
    await storage.put("batch", request.owner, batch.id, msgspec.json.encode(batch), tag=ACTIVE)
    storage.batch_made.set()
    response.send(200, msgspec.json.encode(batch))


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise invalid(
            "completion_window must be 24h, or another number of hours (h) or days (d) up to 30d", "completion_window"
        )
    return seconds


def _metadata(data: bytearray) -> dict[str, str] | None:
    try:
        return _metadata_decoder.decode(data).metadata
    except (msgspec.DecodeError, UnicodeDecodeError):  # the first decoder did not read it
        text = "metadata must be at most 16 texts of up to 512 characters, under names of up to 64"
        raise invalid(text, "metadata") from None


def _output_time_to_live(expires_after: ExpiresAfter | None) -> int | None:
    if expires_after is None:
        return None
    if expires_after.anchor != "created_at":
        raise invalid("output_expires_after.anchor must be created_at", "output_expires_after")
    return checked_time_to_live(expires_after.seconds, "output_expires_after")


async def list_batches(services: Services, request: Request, response: Response) -> None:
    query = page_query(request.query, default_limit=_DEFAULT_PAGE, max_limit=_MAX_PAGE)
    page = await services.storage.list(
        "batch", request.owner, after=query.after, limit=query.limit, descending=query.descending
    )
    response.send(200, page_json(page))


async def one_batch(services: Services, request: Request, response: Response) -> None:
    id = request.path.removeprefix(PREFIX).decode("latin-1")
    body = await services.storage.get("batch", request.owner, id) if _ID.fullmatch(id) else None
    if body is None:
        raise _no_batch()
    response.send(200, body)


async def cancel_batch(services: Services, request: Request, response: Response) -> None:
    """POST /v1/batches/{id}/cancel: running requests are stopped soon; finished ones are written to its files."""
    id, _, action = request.path.removeprefix(PREFIX).decode("latin-1").partition("/")
    if action != "cancel":
        raise ApiError(404, "There is no such path here.", code="not_found")
    storage, now = services.storage, int(services.storage.clock())
    body = await storage.edit("batch", request.owner, id, cancelling(now)) if _ID.fullmatch(id) else None
    if body is None:
        raise _no_batch()
    if decode(body).status not in ("cancelling", "cancelled"):
        raise ApiError(400, "The batch has ended already.", param="id", code="batch_ended")
    storage.batch_made.set()
    response.send(200, body)


def _no_batch() -> ApiError:
    return ApiError(404, "There is no such batch.", param="id", code="not_found")
