"""The page at /: a chat playground and live charts, as plain files of frontend/http/page/ that are read once, at the start.

They are open without a key, for they hold nothing: what the page asks the API for needs the key that its user enters. The
policy lets nothing run or load but these files, and nothing be asked but this server.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response

FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # kept, and asked for anew: with the ETag that costs a few bytes
)


class File(NamedTuple):
    data: bytes
    content_type: bytes
    etag: bytes


def _read(path: Path) -> File:
    data = path.read_bytes()
    return File(data, _TYPES[path.suffix], b'"%b"' % hashlib.sha256(data).hexdigest()[:32].encode())


def _path_of(name: str) -> bytes:
    return b"/" if name == "index.html" else f"/page/{name}".encode()


FILES = {_path_of(path.name): _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}


async def page(services: Services, request: Request, response: Response) -> None:
    file = FILES[bytes(request.path)]
    known = [tag.strip().removeprefix(b"W/") for tag in request.headers.get(b"if-none-match", b"").split(b",")]
    status = 304 if file.etag in known or known == [b"*"] else 200
    response.send(status, file.data, file.content_type, headers=((b"etag", file.etag), *_HEADERS))


async def to_page(services: Services, request: Request, response: Response) -> None:
    """The root path without its slash: what the page names would be looked for beside it."""
    response.send(307, b"", b"text/plain", headers=((b"location", services.root_path.encode() + b"/"),))
