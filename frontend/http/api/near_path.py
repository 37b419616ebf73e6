"""Suggest a known path for an unknown one: "did you mean /v1/chat/completions?". Only requests with a valid key see it."""

import re
from collections.abc import Iterable

from quire.frontend.http.api.bodies.unknown_fields import closest_name

_MAX_PATH = 64  # bytes; a longer path is not a typing error
_PREFIXES = re.compile(r"^(/(api|openai|v\d+))+(?=/)")


def near_path(path: bytes, known: Iterable[bytes]) -> str | None:
    """The most likely known path: it may lack or have a /v1, an extra slash, a wrong letter. Takes up to 0.3 ms."""
    if len(path) > _MAX_PATH:
        return None
    paths = {k.decode() for k in known}
    given = re.sub(r"/+", "/", path.decode("latin-1")).rstrip("/").lower()
    bare = _PREFIXES.sub("", given + "/").rstrip("/")
    for other in (given, f"/v1{bare}", bare):
        if other in paths:
            return other
    longer = [p for p in paths if p.startswith(f"/v1{bare}/")] if bare else []  # /v1/chat
    if longer:
        return min(longer, key=len)
    ends = {p.removeprefix("/v1"): p for p in paths}  # with the common prefix, all paths would be similar
    return ends.get(closest_name(bare, ends) or "")
