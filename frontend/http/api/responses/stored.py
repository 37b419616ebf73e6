"""/v1/responses/{id}: read, delete and cancel kept responses, and list their input items.

A response belongs to the API key that made it; for any other key it does not exist. Nor does one made with `store: false`.
"""

from urllib.parse import parse_qsl

from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.json_pieces import send_parts
from quire.frontend.http.api.bodies.pages import page_parts, page_query
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.responses.records import Record, cancel, find, item_id_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.store.database import Page

_DEFAULT_PAGE, _MAX_PAGE = 20, 100


async def read_response(services: Services, request: Request, response: Response) -> None:
    query = dict(parse_qsl(request.query.decode("latin-1")))
    if query.get("stream", "false").lower() not in ("false", "0"):
        raise invalid("stream is not available for a response that was made: it is returned whole", "stream")
    await send_parts(response, [(await _record(services, request)).response])


async def delete_response(services: Services, request: Request, response: Response) -> None:
    await _record(services, request)
    id = request.path_parameters["response_id"]
    if not await services.storage.delete("response", request.owner, id):
        raise _not_found()
    if (task := services.state.background.get(id)) is not None:
        task.cancel()
    response.send(200, json_bytes({"id": id, "object": "response", "deleted": True}))


async def cancel_response(services: Services, request: Request, response: Response) -> None:
    """POST /v1/responses/{id}/cancel, for responses in the background; one that has ended is returned unchanged."""
    id = request.path_parameters["response_id"]
    if not (await _record(services, request)).background:
        raise ApiError(400, "Only a response that was made with background: true can be cancelled.", param="response_id",
                       code="not_in_background")  # fmt: skip
    record = await cancel(services.storage, request.owner, id)
    if record is None:
        raise _not_found()
    if (task := services.state.background.get(id)) is not None:
        task.cancel()
    await send_parts(response, [record.response])


async def list_input_items(services: Services, request: Request, response: Response) -> None:
    """GET /v1/responses/{id}/input_items: the whole conversation before it, including items of earlier responses."""
    query = page_query(request.query, default_limit=_DEFAULT_PAGE, max_limit=_MAX_PAGE)
    record = await _record(services, request)
    page = await in_thread(_page, record, query.after, query.limit, query.descending)
    await send_parts(response, page_parts(page))


def _page(record: Record, after: str | None, limit: int, descending: bool) -> Page | None:
    items = record.items[::-1] if descending else record.items
    if after is not None:
        at = next((i for i, item in enumerate(items) if item_id_of(item) == after), None)
        if at is None:
            return None
        items = items[at + 1 :]
    return Page([bytes(item) for item in items[:limit]], len(items) > limit)


async def _record(services: Services, request: Request) -> Record:
    record = await find(services.storage, request.owner, request.path_parameters["response_id"])
    if record is None:
        raise _not_found()
    return record


def _not_found() -> ApiError:
    text = "There is no such response: they are kept with store: true, for a time and for the API key that made them."
    return ApiError(404, text, param="response_id", code="not_found")
