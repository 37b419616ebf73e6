"""The models that the package holds, which are served if none is named: a chat model, and an embedder for --runner pooling."""

from pathlib import Path
from typing import NamedTuple


class Bundled(NamedTuple):
    name: str  # under which it is served
    folder: Path


_FOLDERS = Path(__file__).parents[1] / "enginecore" / "loading"
CHAT_MODEL = Bundled("quire-tiny", _FOLDERS / "bundled")
EMBEDDER = Bundled("quire-tiny-embed", _FOLDERS / "bundled_embedder")


def bundled(runner: str) -> Bundled:
    """runner: the flag."""
    return EMBEDDER if runner == "pooling" else CHAT_MODEL
