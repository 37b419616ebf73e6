"""How the engine handles signals that tell it to stop, from its start to its end. The daemon sets the handlers.

Before the engine is ready `EarlyStop` ends the start by an exception; then the loop is told; at the end they are ignored.
"""

import signal
from collections.abc import Callable
from types import FrameType

from quire.ipc.process.command import stop_signals


class Stopped(BaseException):
    """The engine was told to end before it was ready. A BaseException, because a handler raises it inside any code, and
    libraries catch Exceptions."""


class EarlyStop:
    """The handler of stop signals until the loop runs. It raises Stopped only once, so that the clean-up is not interrupted."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, *_: object) -> None:
        on_stop_signals(signal.SIG_IGN)
        self._asked = True
        self.check()

    def check(self) -> None:
        """Raises Stopped again if it was raised before: inside a finalizer Python drops it."""
        if self._asked:
            raise Stopped("stopped while it was starting")


def on_stop_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in stop_signals():
        signal.signal(number, handler)
