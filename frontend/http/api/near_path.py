"""What a path that is not there was likely to be: "did you mean /v1/chat/completions?". For those who may ask at all."""

import re
from collections.abc import Iterable

from quire.frontend.http.api.bodies.unknown_fields import closest_name

_MAX_PATH = 64  # bytes; a longer one is nobody's slip
_PREFIXES = re.compile(r"^(/(api|openai|v\d+))+(?=/)")


def near_path(path: bytes, known: Iterable[bytes]) -> str | None:
    """The known path that is meant, most likely: with or without /v1, a slash too many, a letter wrong. Up to 0.3 ms."""
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
    ends = {p.removeprefix("/v1"): p for p in paths}  # the version, which most share, would make all of them alike
    return ends.get(closest_name(bare, ends) or "")
