"""Reading a request's body: decoded here if that is quick, beside the event loop if it is large."""

from typing import TypeVar

import msgspec

from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body import BodyDecoder
from quire.frontend.http.api.bodies.body_shape import WEIGHED_BYTES
from quire.frontend.http.api.bodies.unknown_fields import UnknownFields
from quire.frontend.http.protocol.exchange import Request

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(decoder: BodyDecoder[T], request: Request, unknown: UnknownFields) -> T:
    """As BodyDecoder.decode. A decoder may go over a body three times: between these the loop has its turns."""
    body = request.take_body()
    if len(body) < WEIGHED_BYTES:
        return decoder.decode(body, unknown)
    return await in_thread(decoder.decode, body, unknown)
