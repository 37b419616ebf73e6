"""Starting engine cores as child processes, for `LLM` and for `quire serve`: from configuration to an address, or an error.

The core manages its own children (workers). It always ends when this process does (process/children.py); `stop` ends it in
order: SIGTERM, time to finish, SIGKILL. For engines that this process did not start, `log_engine_changes` logs when they end
and return.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from typing import Self

import msgspec

from quire.frontend.client.client import Client
from quire.ipc.config import EngineConfig
from quire.ipc.cpu_memory import available
from quire.ipc.process.children import CORE_MODULE, FROM_OUTSIDE, Child, how_it_ended, prespawn, wait_for_all, was_killed
from quire.ipc.process.stopped import StoppedFor

log = logging.getLogger("quire.serve")

ENGINE_ENDED = "the engine ended unexpectedly (%s); requests get 503 until it is back"
ENGINE_IS_BACK = "the engine is back"
REPLICA_ENDED = "an engine ended unexpectedly (%s); the others get its requests until it is back"
ENGINE_STOPPED = "the engine at %s was told to stop; requests get 503 until it is back"
REPLICA_STOPPED = "the engine at %s was told to stop; the others get its requests until it is back"
REPLICA_IS_BACK = "the engine at %s is back"
ENGINE_REFUSES = "the engine at %s does not take this frontend back: %s"

_POLL_S = 1.0
_LOOK_S = 0.5  # the interval of its heartbeats
STOP_GRACE_S = 40.0  # the core lets requests finish for up to 30 s


class EngineStartError(RuntimeError):
    """The engine could not start; the text is the engine's own and for the user. from_outside: it was ended by a signal."""

    def __init__(self, text: str, from_outside: bool = False) -> None:
        super().__init__(text)
        self.from_outside = from_outside


class CoreProcess:
    """A running engine core: its address and its process."""

    def __init__(self, address: str, child: Child) -> None:
        self.address = address
        self.child = child

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        return self.child.poll()

    def stop(self, grace_s: float = STOP_GRACE_S) -> int | None:
        """End the core, with grace_s for running requests; returns the exit code. May be called again."""
        return self.child.terminate(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def launch_core(
    config: EngineConfig, timeout_s: float | None = None, module: str = CORE_MODULE, prespawned: Child | None = None
) -> CoreProcess:
    """Start a core, or configure `prespawned`, and wait until it is ready: model loaded, workers up, address bound.

    timeout_s None: wait as long as the child lives, as a download or a large checkpoint may take long. A child that a signal
    has stopped is given up after --collective-timeout-s, as a worker is. Raises EngineStartError with the engine's own text if
    it cannot start; after any exception, Ctrl-C included, no child is left.
    """
    child = prespawn(module) if prespawned is None else prespawned
    return _start([child], [config], timeout_s)[0]


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """One config per engine of --data-parallel-size, each with GPUs of its own. Raises ValueError."""
    if config.data_parallel_size > 1 and config.listen is not None:
        raise ValueError("--listen is one engine's address, and --data-parallel-size says that there are several")
    several = config.data_parallel_size > 1 and config.device != "cuda"  # the memory is read once: they share it
    if several and (found := available()) is not None:
        config = msgspec.structs.replace(config, host_memory_bytes=found.num_bytes, host_memory_limit=found.limit)
    return [
        msgspec.structs.replace(config, device_index=config.device_index + i * config.world_size)
        for i in range(config.data_parallel_size)
    ]


def launch_cores(
    configs: Sequence[EngineConfig], module: str = CORE_MODULE, prespawned: Sequence[Child] = ()
) -> list[CoreProcess]:
    """`launch_core` for several cores at once: all are ready when this returns, or none is left."""
    children = [*prespawned, *(prespawn(module) for _ in range(len(prespawned), len(configs)))]
    return _start(children, configs, None)


def stop_cores(cores: Sequence[CoreProcess], grace_s: float = STOP_GRACE_S) -> None:
    """End the cores in parallel."""
    for core in cores:
        core.child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for core in cores:
        core.stop(max(0.0, deadline - time.monotonic()))


def log_engine_changes(client: Client) -> list[Coroutine[None, None, None]]:
    """Coroutines, one per engine, that log when an engine that this process did not start ends or returns, until cancelled."""
    engines = client.engines
    return [log_changes_of(engine, len(engines) > 1) for engine in engines]


async def log_changes_of(client: Client, is_one_of_several: bool = False) -> None:
    """Log the changes of the one engine of this client."""
    # if one of several engines has never connected, Replicas has logged that
    was_connected, refusal = client.is_connected or not is_one_of_several, None
    while True:
        if client.is_connected != was_connected:
            was_connected = client.is_connected
            if was_connected:
                log.info(*([REPLICA_IS_BACK, client.address] if is_one_of_several else [ENGINE_IS_BACK]))
            elif client.was_stopped:
                log.warning(REPLICA_STOPPED if is_one_of_several else ENGINE_STOPPED, client.address)
            else:
                log.error(REPLICA_ENDED if is_one_of_several else ENGINE_ENDED, f"no connection to {client.address}")
        if client.refusal != refusal and (refusal := client.refusal):
            log.error(ENGINE_REFUSES, client.address, refusal)
        await asyncio.sleep(_LOOK_S)


def _start(children: Sequence[Child], configs: Sequence[EngineConfig], timeout_s: float | None) -> list[CoreProcess]:
    try:
        for child, config in zip(children, configs, strict=True):
            child.configure(config)
        starts = [_Start(child, config.collective_timeout_s) for child, config in zip(children, configs, strict=True)]
        addresses = _addresses(starts, timeout_s)
    except BaseException as error:  # includes Ctrl-C: raised again when no child is left
        for child in children:
            child.send_signal(signal.SIGTERM)
        wait_for_all(children, 5.0)
        for child in children:
            child.terminate(0.0)
        if isinstance(error, TimeoutError):
            raise EngineStartError("the engine's process does not take its configuration") from None
        raise
    return [CoreProcess(address, child) for address, child in zip(addresses, children, strict=True)]


def _addresses(starts: Sequence["_Start"], timeout_s: float | None) -> list[str]:
    """The cores' addresses, when all are ready. Raises EngineStartError as soon as one cannot start."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    found: dict[int, str] = {}
    while len(found) < len(starts):
        patience_s = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
        for number, start in enumerate(starts):
            if number in found:
                continue
            try:
                address = start.address(patience_s / (len(starts) - len(found)))
            except EngineStartError as error:
                text = f"engine {number}: {error}" if len(starts) > 1 else str(error)
                raise EngineStartError(text, error.from_outside) from None
            if address is not None:
                found[number] = address
        if deadline is not None and time.monotonic() > deadline:
            raise EngineStartError(f"the engine was not ready within {timeout_s:.3g} s")
    return [found[number] for number in range(len(starts))]


class _Start:
    """A core that is not ready yet. stopped_limit_s: how long a signal may have stopped it."""

    def __init__(self, child: Child, stopped_limit_s: float) -> None:
        self._child, self._stopped_limit_s = child, stopped_limit_s
        self._stopped_for = StoppedFor()

    def address(self, patience_s: float) -> str | None:
        """The core's address; None if it is not ready after patience_s. Raises EngineStartError."""
        said = self._child.receive(patience_s)
        if said is not None and "ready" in said:
            return said["ready"]
        if said is not None and "error" in said:
            raise EngineStartError(said["error"], FROM_OUTSIDE in said)
        code = self._child.wait(0.0)
        if code is not None:
            text = f"the engine ended while it started ({how_it_ended(code)}); if it said why, that is above"
            raise EngineStartError(text, was_killed(code))
        stopped_s = self._stopped_for.seconds(self._child.is_stopped())
        if stopped_s > self._stopped_limit_s:
            self._child.send_signal(signal.SIGKILL)  # the only signal that a stopped process obeys
            raise EngineStartError(
                f"the engine's process was stopped by a signal {stopped_s:.3g} s ago, while it started", True
            )
        return None
