"""The engines of `quire serve` and `quire run-batch`: own processes, each kept alive, or addresses of engines that run already.

An engine that dies is restarted at the same address, where clients find it. One that cannot restart is given up: other engines
go on without it; the last engine's error is raised.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from quire.frontend.launcher import CoreProcess, EngineStartError, engine_configs, launch_core, launch_cores, stop_cores
from quire.frontend.supervisor import StartFailed, Supervisor, in_daemon_thread
from quire.ipc.config import EngineConfig
from quire.ipc.links.paths import private_directory
from quire.ipc.process.children import Child
from quire.ipc.process.restarts import FIRST_PAUSE_S, START_LIMIT_S, Restarts, restart_limit_s

log = logging.getLogger("quire.serve")

# Seconds without a heartbeat while we run. A healthy core stands still for 5 s at most: when a worker takes no plans
# (RING_TIMEOUT_S).
HUNG_AFTER_S = 8.0
# Shorter lives count as failures: an engine ends when its workers die too often, which takes a minute or two with their pauses.
LIVED_WELL_S = 600.0


class Engine:
    """One engine process, kept alive. number: its number among several engines."""

    name, while_down = "the engine", "requests get 503 until it is back"

    def __init__(
        self,
        config: EngineConfig,
        prespawned: Child | None = None,
        number: int | None = None,
        *,
        launch: Callable[..., CoreProcess] = launch_core,
        restart_pause_s: float = FIRST_PAUSE_S,
        hung_after_s: float = HUNG_AFTER_S,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        """start_limit_s: the least time limit for a restart; a first start has no limit."""
        if number is not None:
            self.name, self.while_down = f"engine {number}", "the others get its requests until it is back"
        self.address = config.listen or f"ipc://{_socket_folder(number)}/engine.sock"
        self.config = msgspec.structs.replace(config, listen=self.address)  # the same address after a restart
        self._process: CoreProcess | None = None
        self._prespawned = prespawned  # a process that waits for its configuration
        self._launch = launch
        self._start_limit_s = start_limit_s
        self._start_s = 0.0  # how long the last successful start took
        self._supervisor = Supervisor(self, Restarts(first_pause_s=restart_pause_s, lived_well_s=LIVED_WELL_S), hung_after_s)

    @property
    def process(self) -> CoreProcess | None:
        return self._process

    @property
    def child(self) -> Child:
        assert self._process is not None
        return self._process.child

    def on_message(self, child: Child, said: dict[str, str]) -> bool:
        return False

    def start(self, limit_s: float | None = None) -> None:
        """Returns when the engine is ready. Raises EngineStartError, also after limit_s; then its process has ended."""
        prespawned, self._prespawned = self._prespawned, None
        started = time.monotonic()
        process = self._launch(self.config, timeout_s=limit_s, prespawned=prespawned)
        self.started(process, time.monotonic() - started)

    def started(self, process: CoreProcess, seconds: float) -> None:
        self._process, self._start_s = process, seconds

    async def start_again(self) -> None:
        try:
            limit_s = restart_limit_s(self._start_s, self._start_limit_s)
            await in_daemon_thread(lambda: self.start(limit_s))
        except (EngineStartError, OSError) as error:  # OSError: no process can be created now
            raise StartFailed(str(error), isinstance(error, EngineStartError) and error.from_outside) from None

    def on_down(self) -> None:
        self._process = None  # a process that is starting ends with us

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    async def keep_alive(self) -> None:
        """Restart the engine whenever it ends or hangs, until cancelled. Raises StartFailed when that is given up."""
        await self._supervisor.keep_alive()


class Engines:
    """The engines that config asks for; without a config those that run already at `addresses`."""

    def __init__(self, config: EngineConfig | None, addresses: Sequence[str] = (), prespawned: Child | None = None) -> None:
        """prespawned: the first engine's process. Raises ValueError."""
        configs = [] if config is None else engine_configs(config)
        self._prespawned = [] if prespawned is None else [prespawned]
        self._all = [Engine(each, number=i if len(configs) > 1 else None) for i, each in enumerate(configs)]
        self.addresses = [engine.address for engine in self._all] or list(addresses)

    @property
    def are_ours(self) -> bool:
        return bool(self._all)

    def start(self) -> None:
        """Returns when all are ready. Raises EngineStartError; then none is left."""
        started, prespawned, self._prespawned = time.monotonic(), self._prespawned, []
        processes = launch_cores([engine.config for engine in self._all], prespawned=prespawned) if self._all else []
        for engine, process in zip(self._all, processes, strict=True):
            engine.started(process, time.monotonic() - started)

    def stop(self) -> None:
        stop_cores([engine.process for engine in self._all if engine.process is not None])

    async def keep_alive(self) -> None:
        """Keep all alive until cancelled. Raises StartFailed when the last one is given up."""
        keepers = [asyncio.create_task(engine.keep_alive()) for engine in self._all]
        if not keepers:
            await asyncio.Event().wait()
        waiting = set(keepers)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for keeper in done:
                    if not waiting or not isinstance(keeper.exception(), StartFailed):
                        keeper.result()
                    log.error("%s; the others go on without it", keeper.exception())
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


def _socket_folder(number: int | None) -> str:
    """A folder for an engine's socket, removed with this process. It is inside the private directory, which we keep locked,
    because the engine locks the folder in which it binds. Raises ValueError."""
    try:
        folder = os.path.join(private_directory(), "engine" if number is None else f"engine-{number}")
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise ValueError(error.strerror) from None
    return folder
