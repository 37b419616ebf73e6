"""Starting the engine core as a child process, for `LLM` and for `quire serve`: from configuration to an address, or an error.

The child's own children (workers) are its business. It ends with us whatever happens (process/children.py); `stop` ends it in
order: SIGTERM, time to finish, SIGKILL. Of an engine that somebody else has started, its coming and going is logged.
"""

import asyncio
import logging
import time
from typing import Self

from quire.frontend.client.async_client import AsyncClient
from quire.ipc.config import EngineConfig
from quire.ipc.process.children import CORE_MODULE, Child, how_it_ended, prespawn

log = logging.getLogger("quire.serve")

ENGINE_ENDED = "the engine ended unexpectedly (%s); requests get 503 until it is back"
ENGINE_IS_BACK = "the engine is back"

_POLL_S = 1.0
_LOOK_S = 0.5  # as often as it beats
STOP_GRACE_S = 40.0  # the core lets what runs finish for up to 30 s


class EngineStartError(RuntimeError):
    """The engine could not start; the text is the engine's own and for the user."""


class CoreProcess:
    """A running engine core: where it listens, and its process."""

    def __init__(self, address: str, child: Child) -> None:
        self.address = address
        self.child = child

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self.child.poll()

    def stop(self, grace_s: float = STOP_GRACE_S) -> int | None:
        """End it, with grace_s to finish what runs; its exit code. May be called again."""
        return self.child.terminate(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def launch_core(
    config: EngineConfig, timeout_s: float | None = None, module: str = CORE_MODULE, prespawned: Child | None = None
) -> CoreProcess:
    """Start a core, or go on with `prespawned`, and wait until it is ready: model loaded, workers up, address bound.

    timeout_s None waits as long as the child lives: a download or a large checkpoint takes what it takes. Raises
    EngineStartError with the engine's own words if it cannot start; on any exception (Ctrl-C too) the child is gone.
    """
    child = prespawn(module) if prespawned is None else prespawned
    try:
        child.configure(config)
        return CoreProcess(_address(child, timeout_s), child)
    except BaseException as error:  # Ctrl-C, too: passed on, without a child left running
        child.terminate(grace_s=5.0)
        if isinstance(error, TimeoutError):
            raise EngineStartError("the engine's process does not take its configuration") from None
        raise


async def tell_of_engine(client: AsyncClient) -> None:
    """Log when somebody else's engine, whose client this is, ends and is back. For as long as it is not cancelled."""
    was_connected = True
    while True:
        if client.is_connected != was_connected:
            was_connected = client.is_connected
            if was_connected:
                log.info(ENGINE_IS_BACK)
            else:
                log.error(ENGINE_ENDED, f"no connection to {client.address}")
        await asyncio.sleep(_LOOK_S)


def _address(child: Child, timeout_s: float | None) -> str:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        patience_s = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
        said = child.receive(patience_s)
        if said is not None and "ready" in said:
            return said["ready"]
        if said is not None and "error" in said:
            raise EngineStartError(said["error"])
        code = child.wait(0.0)
        if code is not None:
            raise EngineStartError(f"the engine ended while it started ({how_it_ended(code)}); if it said why, that is above")
        if deadline is not None and time.monotonic() > deadline:
            raise EngineStartError(f"the engine was not ready within {timeout_s:.3g} s")
