"""The client of `quire bench`, for the scripts here, from the package (frontend/cli/bench/sse_client.py)."""

from quire.frontend.cli.bench.sse_client import (
    Answer,
    Body,
    Choice,
    Connection,
    Connections,
    Delta,
    Event,
    Events,
    Target,
    Usage,
    ask,
    clock,
)

__all__ = [
    "Answer", "Body", "Choice", "Connection", "Connections", "Delta", "Event", "Events", "Target", "Usage", "ask", "clock",
]  # fmt: skip
