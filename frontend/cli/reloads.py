"""Reloads: waits, in a server, for the signals that ask it to read its files again; `quire reload` sends one (reload.py).

Used by serve.py, which knows what is read again.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn

from quire.ipc.process.command import reload_signals

log = logging.getLogger("quire.serve")


class Reloads:
    """Reloads of one server, one after the other. `asked` may be set from the event loop's thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in reload_signals():
            loop.add_signal_handler(number, self.asked.set)

    async def follow(self, reload: Callable[[], Awaitable[None]]) -> NoReturn:
        """Call `reload` after each signal, until cancelled. It raises ValueError if nothing was changed."""
        while True:
            await self.asked.wait()
            self.asked.clear()
            log.info("reading keys and certificates again")
            try:
                await reload()
            except ValueError as error:
                log.error("nothing was changed: %s", error)


def ignore_reload_signals() -> None:
    """While a server ends: the signal's default action would kill it."""
    for number in reload_signals():
        signal.signal(number, signal.SIG_IGN)
