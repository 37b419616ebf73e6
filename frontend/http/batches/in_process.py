"""Requests to the application from inside its own process: the same routes, checks and answers, without a connection.

Batches use this, in the server (runner.py) and without one (cli/run_batch.py). `RetryingApp` repeats a request while the server
is full or has no engine: a batch can wait.
"""

import asyncio
import random
from typing import NamedTuple

from quire.frontend.client.client import Client
from quire.frontend.http.api.app import App
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.batches.lines import MAX_TEXT_LINE_BYTES, Line, new_request_id
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response

_BUSY = (429, 503)
_MAX_LOSSES = 2  # of the engine, after which a request is still repeated
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0


class Reply(NamedTuple):
    status: int
    body: bytes
    request_id: str


class _Bytes:
    """The output of a Response, in place of a connection: gathers an answer's bytes."""

    write_paused = False

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        return

    def date(self) -> bytes:
        return b""

    def is_last(self) -> bool:
        return False

    def is_gone(self) -> bool:
        """Whether the answer is not wanted any more: its batch has ended, which is no failure of the server."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0


async def ask(app: App, line: Line, owner: str = "") -> Reply:
    """POST a line's body to its route. owner: Request.owner, of the key that the batch was made with."""
    route = ROUTES.find(line.url.encode())[0].get("POST")
    if route is None:
        return _not_found()
    if len(line.body) > MAX_TEXT_LINE_BYTES and not (route.has_media and app.takes_media):
        error = ApiError(413, f"A line may be at most {MAX_TEXT_LINE_BYTES} bytes long.", code="body_too_large")
        return Reply(413, error.body(), new_request_id())
    request, output, request_id = Request(), _Bytes(), new_request_id()
    request.method, request.path, request.route, request.owner = "POST", line.url.encode(), route, owner
    request.version = "1.0"  # answers in HTTP/1.0 are not chunked
    request.headers = {b"content-type": b"application/json", b"x-request-id": request_id.encode()}
    request.body = bytearray(line.body)
    request.complete = request.is_patient = True
    response = Response(request, output)
    await app.handle(request, response)
    return Reply(response.status, bytes(output.data.partition(b"\r\n\r\n")[2]), request_id)


def _not_found() -> Reply:
    return Reply(404, ApiError(404, "There is no such path here.", code="not_found").body(), new_request_id())


class RetryingApp:
    """`ask`, repeated until the answer does not come from a temporary condition.

    A request that an engine was lost with, and that no other went on with, is repeated at most _MAX_LOSSES times: it may be the
    cause.
    """

    def __init__(self, app: App, client: Client) -> None:
        self._app = app
        self._client = client

    async def ask(self, line: Line, owner: str = "") -> Reply:
        pause_s, losses = _FIRST_PAUSE_S, 0
        while True:
            was_connected = self._client.is_connected
            reply = await ask(self._app, line, owner)
            losses += was_connected and b'"engine_down"' in reply.body
            if reply.status not in _BUSY or losses > _MAX_LOSSES:
                return reply
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # spreads the retries
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
