"""How far a load is: tqdm's bar in a terminal; elsewhere, as in a log file, a line every few seconds.

`bench serve` uses it on its event loop.
"""

import asyncio
import sys
from typing import Any, Self, TextIO

from tqdm import tqdm

from quire.frontend.cli.bench.metrics import Result
from quire.frontend.cli.bench.sse_client import clock

LINE_S = 5.0  # between two lines


class Progress:
    """Counts the results of `total` requests, and shows their number unless `is_quiet`."""

    def __init__(self, total: int, is_quiet: bool, err: TextIO | None = None, line_s: float = LINE_S) -> None:
        self._total, self._err, self._line_s = total, err or sys.stderr, line_s
        self._done = self._failed = self._refused = 0
        self._begin = clock()
        self._bar: Any = None
        self._lines: asyncio.Task[None] | None = None
        self._shows_bar = not is_quiet and self._err.isatty()
        self._shows_lines = not is_quiet and not self._shows_bar

    def add(self, result: Result) -> None:
        self._done += 1
        self._failed += bool(result.error)
        self._refused += result.is_refused
        if self._bar is not None:
            self._bar.update(1)

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(self._line_s)
            failed = f", {self._failed} failed ({self._refused} refused)" if self._failed else ""
            line = f"{clock() - self._begin:.0f} s: {self._done} of {self._total} requests done{failed}"
            print(f"quire bench serve: {line}", file=self._err, flush=True)

    def __enter__(self) -> Self:
        if self._shows_bar:
            self._bar = tqdm(total=self._total, unit="request", file=self._err)
        elif self._shows_lines:
            self._lines = asyncio.create_task(self._say())
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._lines is not None:
            self._lines.cancel()
