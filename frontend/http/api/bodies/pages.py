"""Lists in pages, as OpenAI's clients read them: the query string (after, limit, order) and the answer."""

from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.store.database import Page

PAGE_FIELDS: dict[str, dict[str, Any]] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "purpose": {"type": "string"},
}
_MAX_FIELDS = 32


class PageQuery(NamedTuple):
    after: str | None
    limit: int
    descending: bool
    purpose: str | None


class _Id(msgspec.Struct):
    id: str


_id_decoder = msgspec.json.Decoder(_Id)


def page_query(query: bytes, *, default_limit: int, max_limit: int) -> PageQuery:
    """Raises ApiError 400, naming the field. Unknown fields are ignored, as everywhere."""
    try:
        fields = dict(parse_qsl(query.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise invalid("the query string is not understood") from None
    limit = fields.get("limit", str(default_limit))
    if not limit.isascii() or not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= max_limit:
        raise invalid(f"limit must be a number from 1 to {max_limit}", "limit")
    order = fields.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    return PageQuery(fields.get("after"), int(limit), order == "desc", fields.get("purpose"))


def page_json(page: Page | None) -> bytes:
    """Raises ApiError 400 for a page after an object that does not exist."""
    return b"".join(page_parts(page))


def page_parts(page: Page | None) -> list[bytes]:
    """As `page_json`, in pieces without copies."""
    if page is None:
        raise invalid("after names nothing that there is", "after")
    first, last = (_id_of(page.bodies[0]), _id_of(page.bodies[-1])) if page.bodies else (b"null", b"null")
    has_more = b"true" if page.has_more else b"false"
    head = b'{"object":"list","first_id":%b,"last_id":%b,"has_more":%b,"data":[' % (first, last, has_more)
    parts = [head]
    for body in page.bodies:
        parts += (body, b",")
    return [*(parts[:-1] if page.bodies else parts), b"]}"]


def _id_of(body: bytes) -> bytes:
    return msgspec.json.encode(_id_decoder.decode(body).id)
