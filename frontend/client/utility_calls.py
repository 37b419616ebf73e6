"""UtilityCalls: calls to the engine that are no requests, each awaited until it is answered or the engine is lost.

The calls are structs of ipc/messages/utilities.py. Called by AsyncClient, which owns the link; everything happens in the event
loop's thread.
"""

import asyncio
from typing import TypeVar

from quire.frontend.client.stream import ERRORS, ClientError, EngineDown, EngineError, Overloaded
from quire.ipc.links.frontend_to_core import FrontendToCore, LinkBusy, LinkDown
from quire.ipc.messages.frontend import Utility, UtilityResult
from quire.ipc.messages.utilities import UtilityAnswer, UtilityCall, UtilityFailed

TIMEOUT_S = 300.0  # a trace of many steps takes a minute

A = TypeVar("A", bound=UtilityAnswer)


class UtilityCalls:
    def __init__(self) -> None:
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[UtilityAnswer]] = {}

    async def call(self, link: FrontendToCore | None, what: UtilityCall, kind: type[A]) -> A:
        """The engine's answer to a call, which must be of this kind. Raises InvalidRequest, EngineError, EngineDown,
        Overloaded."""
        if link is None or not link.connected:
            raise EngineDown("there is no connection to the engine")
        self._next_id += 1
        number = self._next_id
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            link.send(Utility(link.epoch, number, what))
            async with asyncio.timeout(TIMEOUT_S):
                answer = await future
        except LinkBusy as error:
            raise Overloaded("the engine does not take requests as fast as they come: try again later") from error
        except (LinkDown, TimeoutError) as error:
            raise EngineDown("the engine does not answer") from error
        finally:
            del self._waiting[number]
        if isinstance(answer, UtilityFailed):
            raise ERRORS[answer.code](answer.message)
        if not isinstance(answer, kind):
            raise EngineError(f"the engine answered {type(answer).__name__}, not {kind.__name__}")
        return answer

    def answered(self, message: UtilityResult) -> None:
        future = self._waiting.get(message.id)
        if future is not None and not future.done():
            future.set_result(message.answer)

    def fail_all(self, error: ClientError) -> None:
        """The engine is lost: fail all calls."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
