"""`quire serve`: the port, the engine, one or more frontends, and the end of all of them in order. The process tree is here.

    quire serve ─┬─ quire.enginecore ── workers      (unless --engine names a running daemon)
                 └─ quire.frontend.http × N          (with --frontends N > 1; a single frontend runs in this process)

The port is bound before the model loads. An engine that dies is started again at the same address, and the frontends, which
answer 503 meanwhile, find it by themselves; if it cannot start, everything ends with its message and exit code 1.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.http.api.metrics import block_bytes
from quire.frontend.http.server import FrontendConfig, FrontendError, StopSignals, bind, frontend_keys, run, serve
from quire.frontend.launcher import (
    ENGINE_ENDED,
    ENGINE_IS_BACK,
    CoreProcess,
    EngineStartError,
    launch_core,
)
from quire.ipc.config import EngineConfig
from quire.ipc.links.paths import private_directory
from quire.ipc.process.children import Child, how_it_ended, spawn
from quire.ipc.process.command import as_started

log = logging.getLogger("quire.serve")

_RESTART_PAUSE_S, _MAX_RESTART_PAUSE_S = 1.0, 30.0
_LIVED_WELL_S = 120.0  # after so long the pause before the next start is the shortest again
_START_TIMEOUT_S = 60.0  # of a frontend process


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `quire serve` was asked for. engine: None to attach to `frontend.engine_address`."""

    host: str
    port: int
    num_frontends: int
    engine: EngineConfig | None
    frontend: FrontendConfig  # the template: address, sockets and numbers are filled in


class ServeError(Exception):
    """The server cannot start or go on; the text is for the user."""


def run_server(config: ServeConfig, begun: Child | None = None) -> None:
    """Serve until SIGTERM or SIGINT. `begun`: the engine's process, if it was begun; the caller ends it if it was not used.

    Raises ServeError.
    """
    engine = Engine(config.engine, config.frontend.engine_address, begun)
    try:
        frontend_keys(config.frontend)
        sockets = bind(config.host, config.port, config.num_frontends)
        port = sockets[0].getsockname()[1]
        engine.start()
        if config.engine is None:
            log.info("waiting for an engine at %s (up to %.0f s)", engine.address, config.frontend.connect_timeout_s)
        template = msgspec.structs.replace(config.frontend, engine_address=engine.address, num_frontends=config.num_frontends)
        print_ready = ReadyMessage(config.host, port, bool(config.frontend.api_keys))
        if config.num_frontends == 1:
            run(lambda: _serve_here(template, sockets[0], engine, print_ready))
        else:
            run(lambda: _serve_in_children(template, sockets, engine, print_ready))
    except (FrontendError, EngineStartError) as error:
        raise ServeError(str(error)) from None
    finally:
        engine.stop()


class Engine:
    """The engine process, kept alive; or, without a config, somebody else's engine, which is left alone."""

    def __init__(
        self,
        config: EngineConfig | None,
        address: str,
        begun: Child | None = None,
        *,
        launch: Callable[..., CoreProcess] = launch_core,
        restart_pause_s: float = _RESTART_PAUSE_S,
    ) -> None:
        self.address = address
        self._process: CoreProcess | None = None
        self._config = config
        self._begun = begun  # a process that waits for its configuration
        self._launch = launch
        self._restart_pause_s = restart_pause_s
        if config is not None:
            self.address = config.listen or f"ipc://{_socket_folder()}/engine.sock"
            self._config = msgspec.structs.replace(config, listen=self.address)  # the same one after a restart

    @property
    def is_ours(self) -> bool:
        return self._config is not None

    @property
    def pid(self) -> int:
        """Of the engine's process; 0 for somebody else's."""
        return 0 if self._process is None else self._process.child.pid

    def start(self) -> None:
        """Returns when the engine is ready. Raises EngineStartError."""
        if self._config is not None:
            begun, self._begun = self._begun, None
            self._process = self._launch(self._config, begun=begun)
            self.address = self._process.address

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    async def keep_alive(self) -> None:
        """Start the engine again whenever it ends. Raises ServeError if it cannot start."""
        if self._process is None:
            await asyncio.Event().wait()
            return
        pause_s = self._restart_pause_s
        while True:
            started = time.monotonic()
            await _ended(self._process.child)
            code = self._process.stop(0.0)
            log.error(ENGINE_ENDED, how_it_ended(code))
            pause_s = self._restart_pause_s if time.monotonic() - started > _LIVED_WELL_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RESTART_PAUSE_S)
            try:
                await _in_daemon_thread(self.start)
            except EngineStartError as error:
                raise ServeError(f"the engine cannot start again: {error}") from None
            log.info(ENGINE_IS_BACK)


def _socket_folder() -> str:
    """A folder for the engine's socket, gone with this process. One within the private directory: that one is locked by us for
    its life, and the engine locks the folder in which it binds."""
    folder = os.path.join(private_directory(), "engine")
    os.mkdir(folder, 0o700)
    return folder


class ReadyMessage:
    """What the user sees when requests can come."""

    def __init__(self, host: str, port: int, needs_key: bool) -> None:
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        self._needs_key = needs_key

    def __call__(self, model: str) -> None:
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._needs_key else ""
        body = shlex.quote(json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}))
        print(f"Quire serves {model} at {self._url}")
        print(f"Try: curl {self._url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {body}")
        key = " --api-key YOUR_KEY" if self._needs_key else ""
        print(f"or:  {as_started('quire chat')} --url {self._url}{key}", flush=True)


async def _serve_here(
    template: FrontendConfig, sock: socket.socket, engine: Engine, print_ready: Callable[[str], None]
) -> None:  # fmt: skip
    signals = StopSignals()

    def ready(client: AsyncClient) -> None:
        print_ready(client.welcome.served_model_names[0])

    template = msgspec.structs.replace(template, listen_fd=sock.detach(), tells_of_engine=not engine.is_ours)
    serving = asyncio.create_task(serve(template, signals, ready))
    await _until_stopped(signals, [serving], engine)


async def _serve_in_children(
    template: FrontendConfig, sockets: list[socket.socket], engine: Engine, print_ready: Callable[[str], None]
) -> None:
    signals = StopSignals()
    metrics_fd = os.memfd_create("quire-metrics", os.MFD_CLOEXEC)
    os.ftruncate(metrics_fd, block_bytes() * len(sockets))
    frontends = [
        Frontend(
            msgspec.structs.replace(
                template, listen_fd=s.fileno(), metrics_fd=metrics_fd, index=i, tells_of_engine=i == 0 and not engine.is_ours
            )
        )
        for i, s in enumerate(sockets)
    ]
    for frontend in frontends:
        frontend.start()
    try:
        if (model := await _ready(frontends, signals)) is None:
            return
        print_ready(model)
        await _until_stopped(signals, [asyncio.create_task(f.keep_alive(signals)) for f in frontends], engine)
    finally:
        for frontend in frontends:
            frontend.stop(template.shutdown_grace_s + 5.0)
        os.close(metrics_fd)


async def _ready(frontends: list["Frontend"], signals: StopSignals) -> str | None:
    """The served model's name, when all frontends are ready; None if we were told to stop meanwhile. Raises FrontendError."""
    ready = asyncio.gather(*(asyncio.to_thread(f.wait_until_ready) for f in frontends))
    stopping = asyncio.create_task(signals.stop.wait())
    await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not signals.stop.is_set():
        return (await ready)[0]
    ready.cancel()  # its threads end with the frontends
    with contextlib.suppress(asyncio.CancelledError, FrontendError):
        await ready
    return None


async def _until_stopped(signals: StopSignals, tasks: list[asyncio.Task[None]], engine: Engine) -> None:
    """Run tasks and the engine's keeper until all tasks end, which they do after a signal. An engine that is lost for good
    stops them and is raised."""
    keeper = asyncio.create_task(engine.keep_alive())
    stopping = asyncio.create_task(signals.stop.wait())
    try:
        await asyncio.wait([*tasks, keeper, stopping], return_when=asyncio.FIRST_COMPLETED)
        if keeper.done() and not signals.stop.is_set():
            signals.stop.set()
            signals.now.set()  # nothing that runs can end well
        failed = keeper if keeper.done() else None
        keeper.cancel()
        await asyncio.gather(*tasks)
        if failed is not None:
            await failed
    finally:
        for task in (*tasks, keeper, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ServeError):
            await keeper


class Frontend:
    """One frontend process, kept alive. The parent holds its socket too: connections wait in the backlog across a restart."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._child: Child | None = None

    def start(self) -> None:
        self._child = spawn("quire.frontend.http", self._config, (self._config.listen_fd, self._config.metrics_fd))

    def wait_until_ready(self) -> str:
        """The served model's name. Raises FrontendError."""
        assert self._child is not None
        said = self._child.receive(_START_TIMEOUT_S)
        if said is not None and "ready" in said:
            return said["ready"]
        raise FrontendError((said or {}).get("error", "a frontend process did not start"))

    async def keep_alive(self, signals: StopSignals) -> None:
        """Start the process again when it ends, until signals.stop; then end it."""
        pause_s = _RESTART_PAUSE_S
        stop = asyncio.create_task(signals.stop.wait())
        while True:
            assert self._child is not None
            started, child = time.monotonic(), self._child
            ended = asyncio.create_task(_ended(child))
            await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if stop.done():
                grace_s = 0.0 if signals.now.is_set() else self._config.shutdown_grace_s + 5.0
                await asyncio.to_thread(child.terminate, grace_s)
                return
            pause_s = _RESTART_PAUSE_S if time.monotonic() - started > _LIVED_WELL_S else pause_s
            how = how_it_ended(child.terminate(0.0))
            log.error("frontend process %d ended unexpectedly (%s); next start in %.0f s", self._config.index, how, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RESTART_PAUSE_S)
            self.start()

    def stop(self, grace_s: float) -> None:
        if self._child is not None:
            self._child.terminate(grace_s)


async def _in_daemon_thread(function: Callable[[], None]) -> None:
    """Like asyncio.to_thread, but at exit nobody waits for the thread; the engine it may be starting ends with us."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def work() -> None:
        error = None
        try:
            function()
        except Exception as caught:  # belongs to whoever awaits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are exiting
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=work, name="quire-restart", daemon=True).start()
    await done


async def _ended(child: Child) -> None:
    """Wait for the end of a child."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(child.fileno())


def main(config: ServeConfig, begun: Child | None = None) -> int:
    """The exit code of `quire serve`; `begun` as for `run_server`."""
    before = signal.signal(signal.SIGTERM, _stop_starting)  # until StopSignals takes over
    try:
        run_server(config, begun)
        log.info("stopped")
    except ServeError as error:
        print(f"quire serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the model was loading
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _stop_starting(*_: object) -> None:
    sys.exit(0)  # an exception, so that what has been started is put away
