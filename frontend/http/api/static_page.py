"""StaticPage: serves one HTML file, with a Content-Security-Policy that lets it load nothing from elsewhere.

Scripts and styles are inline; the policy names their hashes, so nothing else runs, whatever the page shows. The page may send
requests to this server only.
"""

import base64
import hashlib
import re
from pathlib import Path

from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response

FOLDER = Path(__file__).parent / "static"


class StaticPage:
    """A route's handler that serves this file of FOLDER."""

    def __init__(self, name: str) -> None:
        self._html = (FOLDER / name).read_bytes()
        self._headers = (
            (b"content-security-policy", policy(self._html)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        )

    async def __call__(self, services: Services, request: Request, response: Response) -> None:
        response.send(200, self._html, b"text/html; charset=utf-8", self._headers)


def policy(html: bytes) -> bytes:
    """The Content-Security-Policy of a page with inline scripts and styles."""
    scripts, styles = (b" ".join(_hashes(html, tag)) or b"'none'" for tag in (b"script", b"style"))
    rest = b"connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return b"default-src 'none'; script-src %b; style-src %b; %b" % (scripts, styles, rest)


def _hashes(html: bytes, tag: bytes) -> list[bytes]:
    inside = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return [b"'sha256-%b'" % base64.b64encode(hashlib.sha256(text).digest()) for text in inside]
