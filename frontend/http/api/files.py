"""/v1/files: upload the input of a batch, list, read and delete files, with OpenAI's objects and fields.

A file belongs to the API key that uploaded it; for any other key it does not exist. Uploads are forms (multipart.py), which
threads parse and write. A download holds one piece in memory, and reads the next when the client has taken it.
"""

import asyncio
import os
import re

import msgspec

from quire.frontend.http.api.bodies.multipart import Form, FormFile, boundary_of, parse_form
from quire.frontend.http.api.bodies.pages import page_json, page_query
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.store.batch_queue import Result
from quire.frontend.http.store.bounds import KINDS, MAX_EXPIRY_S, MAX_FILE_BYTES, MIN_EXPIRY_S
from quire.frontend.http.store.storage import Storage, new_record_id

PURPOSES = ("batch", "vision", "user_data")  # for batches, and for images of messages
PREFIX = b"/v1/files/"
_ID = re.compile(r"file-[0-9a-f]{32}")
_MAX_PAGE = 10_000
_BINARY = b"application/octet-stream"
UPLOAD_FIELDS: dict[str, dict[str, object]] = {
    "purpose": {"type": "string", "enum": ["batch", "vision", "user_data"]},
    "file": {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"},
    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
    "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
}
_AS_A_DOWNLOAD = ((b"content-disposition", b"attachment"), (b"x-content-type-options", b"nosniff"))


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


file_decoder = msgspec.json.Decoder(FileObject)


def new_file_id() -> str:
    return new_record_id("file-")


def new_file(storage: Storage, id: str, name: str, purpose: str, size: int, ttl_s: float | None = None) -> Result:
    """The record of a new file."""
    now, most = int(storage.clock()), KINDS["file"].ttl_s
    assert most is not None
    expires_at = now + int(most if ttl_s is None else ttl_s)
    body = FileObject(id=id, bytes=size, created_at=now, expires_at=expires_at, filename=name, purpose=purpose)
    return Result(id, msgspec.json.encode(body), size, expires_at, purpose)


# ------------------------------------------------------------------------------------------------------------ /v1/files
async def upload_file(services: Services, request: Request, response: Response) -> None:
    boundary = boundary_of(request.headers.get(b"content-type", b""))
    storage = services.storage
    with storage.upload_slot():
        body = request.take_body()
        form = await asyncio.to_thread(parse_form, body, boundary)
        file, ttl_s = _file_of(form), _time_to_live(form.fields)
        result = new_file(storage, new_file_id(), file.name, form.fields["purpose"], file.end - file.begin, ttl_s)
        await storage.upload(request.owner, result, [memoryview(body)[file.begin : file.end]])
    response.send(200, result.body)


def _file_of(form: Form) -> FormFile:
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise ApiError(400, "purpose: this field is required.", param="purpose", code="missing_required_parameter")
    if purpose not in PURPOSES:
        raise invalid(f"purpose must be {' or '.join(PURPOSES)}: nothing else here reads files", "purpose")
    file = form.files.get("file")
    if file is None:
        raise ApiError(400, "file: this field is required, as a file.", param="file", code="missing_required_parameter")
    if file.end - file.begin > MAX_FILE_BYTES:
        raise ApiError(413, f"A file may be at most {MAX_FILE_BYTES} bytes long.", param="file", code="body_too_large")
    if file.end == file.begin:
        raise invalid("file is empty", "file")
    return file


def _time_to_live(fields: dict[str, str]) -> int | None:
    """Seconds, from the form fields expires_after[anchor] and expires_after[seconds] of OpenAI's clients."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        if "expires_after" in fields:
            raise invalid(
                "expires_after is given in a form as expires_after[anchor] and expires_after[seconds]", "expires_after"
            )
        return None
    if anchor != "created_at":
        raise invalid("expires_after.anchor must be created_at", "expires_after")
    if seconds is None or not re.fullmatch("[0-9]{1,9}", seconds):
        raise invalid("expires_after.seconds must be a number", "expires_after")
    return checked_time_to_live(int(seconds), "expires_after")


def checked_time_to_live(seconds: int, param: str) -> int:
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise invalid(f"{param}.seconds must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}", param)
    return seconds


async def list_files(services: Services, request: Request, response: Response) -> None:
    query = page_query(request.query, default_limit=_MAX_PAGE, max_limit=_MAX_PAGE)
    page = await services.storage.list(
        "file", request.owner, after=query.after, limit=query.limit, descending=query.descending, tag=query.purpose
    )
    response.send(200, page_json(page))


# -------------------------------------------------------------------------------------------------- /v1/files/{id}[/...]
async def read_file(services: Services, request: Request, response: Response) -> None:
    """GET /v1/files/{id} and /v1/files/{id}/content."""
    id, _, rest = request.path.removeprefix(PREFIX).decode("latin-1").partition("/")
    if rest not in ("", "content"):
        raise ApiError(404, "There is no such path here.", code="not_found")
    body = await _body(services.storage, request.owner, id)
    if rest:
        await _send_content(services.storage, file_decoder.decode(body), response)
    else:
        response.send(200, body)


async def _send_content(storage: Storage, file: FileObject, response: Response) -> None:
    try:
        fd = await storage.open_content(file.id)
    except FileNotFoundError:  # deleted since
        raise _no_file() from None
    try:
        if response.start_sized(file.bytes, _BINARY, _AS_A_DOWNLOAD):
            async for piece in storage.pieces(fd, file.bytes):
                response.write(piece)
                await response.drain()
            response.end()
    finally:
        os.close(fd)


async def read_whole(storage: Storage, owner: str, id: str, most: int) -> bytes | None:
    """The content of an owner's file of at most so many bytes; None if there is no such file. Raises ApiError."""
    body = await storage.get("file", owner, id) if _ID.fullmatch(id) else None
    if body is None:
        return None
    size = file_decoder.decode(body).bytes
    if size > most:
        raise invalid(f"the file has {size} bytes, and {most} are left for the images of this request", "file_id")
    try:
        fd = await storage.open_content(id)
    except FileNotFoundError:  # deleted since
        return None
    try:
        return b"".join([piece async for piece in storage.pieces(fd, size)])
    finally:
        os.close(fd)


async def delete_file(services: Services, request: Request, response: Response) -> None:
    id = request.path.removeprefix(PREFIX).decode("latin-1")
    if not _ID.fullmatch(id) or not await services.storage.delete("file", request.owner, id):
        raise _no_file()
    response.send(200, msgspec.json.encode({"id": id, "object": "file", "deleted": True}))


async def _body(storage: Storage, owner: str, id: str) -> bytes:
    body = await storage.get("file", owner, id) if _ID.fullmatch(id) else None
    if body is None:
        raise _no_file()
    return body


def _no_file() -> ApiError:
    return ApiError(404, "There is no such file.", param="id", code="not_found")
