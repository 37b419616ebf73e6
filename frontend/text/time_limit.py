"""A bound on how long Python code runs in its thread: for templates that strangers send, whose loops may have no end."""

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError at the first line of Python that is run within it, in a function called within it, after so long.

    The thread's trace function looks at the clock: such code takes several times as long, and what runs in C is not ended.
    """
    deadline = time.monotonic() + seconds

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took more than {seconds:g} s")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
