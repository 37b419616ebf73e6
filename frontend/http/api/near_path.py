"""What a path that is not there was likely to be: "did you mean /v1/chat/completions?". For those who may ask at all."""

import difflib
import re
from collections.abc import Iterable

_MAX_PATH = 100  # bytes; a longer one is nobody's slip


def near_path(path: bytes, known: Iterable[bytes]) -> str | None:
    """The known path that is meant, most likely: with or without /v1, a slash too many, a letter wrong."""
    if len(path) > _MAX_PATH:
        return None
    paths = [k.decode() for k in known]
    given = "/" + re.sub(r"/+", "/", path.decode("latin-1")).strip("/").lower()
    bare = re.sub(r"^(/(api|openai|v\d+))+(?=/)", "", given)
    for other in (given, f"/v1{bare}", bare):
        if other in paths:
            return other
    close = [
        (difflib.SequenceMatcher(None, _last(other), _last(k)).ratio(), k) for other in (given, f"/v1{bare}") for k in paths
    ]
    ratio, best = max(close, default=(0.0, ""))
    return best if ratio >= 0.8 else None


def _last(path: str) -> str:
    """Without the version, which all of them share."""
    return path.removeprefix("/v1")
