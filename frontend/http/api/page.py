"""The page at /: a chat playground and live charts. Its plain files in frontend/http/page/ are read once, at the start.

They need no API key because they contain no data: the page's requests to the API bring the key that its user enters. The
Content-Security-Policy lets only these files run or load, and only this server be asked.
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
    (b"cache-control", b"no-cache"),  # a browser asks again each time; with the ETag that costs a few bytes
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
    """Redirect the root path without its slash to the one with it: a browser resolves the page's files against that."""
    response.send(307, b"", b"text/plain", headers=((b"location", services.root_path.encode() + b"/"),))
