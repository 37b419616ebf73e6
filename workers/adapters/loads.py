"""AdapterLoads: does what the core asks of adapters in a thread of its own, so that steps go on meanwhile.

Requests are done one after another, in the order in which they come, and each is answered when it is done.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable

from quire.ipc.adapters import HOST_ONLY, AdapterError
from quire.ipc.messages.workers import ForgetAdapter, LoadAdapter
from quire.workers.adapters.slots import AdapterSlots

log = logging.getLogger("quire.workers")

Request = LoadAdapter | ForgetAdapter
SWITCH_S = 5e-4  # the longest that this thread keeps the interpreter from a step that has just computed something


class AdapterLoads:
    """answer: called from the thread with a request's id and its error, which is empty if it was done."""

    def __init__(self, slots: AdapterSlots, answer: Callable[[int, str], None]) -> None:
        self._slots, self._answer = slots, answer
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def take(self, request: Request) -> None:
        self._requests.put(request)

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            self._answer(request.id, self._do(request))

    def _do(self, request: Request) -> str:
        try:
            match request:
                case ForgetAdapter():
                    self._slots.forget(request.number)
                case LoadAdapter(slot=slot) if slot == HOST_ONLY:
                    self._slots.keep(request.number, request.plan)
                case LoadAdapter():
                    self._slots.load(request.number, request.slot, request.plan)
        except AdapterError as error:
            return str(error)
        except Exception as error:
            log.exception("adapter %d could not be loaded", request.number)
            return f"{type(error).__name__}: {error}"
        return ""
