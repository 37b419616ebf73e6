"""`quire serve`: the port, the engines, one or more frontends, and their orderly shutdown. The process tree is here.

    quire serve ─┬─ quire.enginecore ── workers      (or several, or none if --engine names running daemons)
                 └─ quire.frontend.http × N          (with --frontends N > 1; a single frontend runs in this process)

The port is bound before the model loads. An engine that dies is restarted at the same address, and the frontends, which answer
503 meanwhile, find it by themselves; if it cannot start, everything ends with its error and exit code 1.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.frontend.cli.engines import Engines
from quire.frontend.cli.frontends import PANELS_EACH, Frontends
from quire.frontend.cli.ready_message import ReadyMessage
from quire.frontend.cli.reloads import Reloads, ignore_reload_signals
from quire.frontend.cli.service_manager import ServiceManager
from quire.frontend.client.client import Client
from quire.frontend.http.api.access import Access
from quire.frontend.http.api.keys import ApiKeys
from quire.frontend.http.api.logs.tracing import TracingError, check_endpoint
from quire.frontend.http.api.metrics.metrics import panel_bytes
from quire.frontend.http.limits.key_limits import CurrentLimits
from quire.frontend.http.listener import FrontendError, UnixPath, bind, bind_unix
from quire.frontend.http.listeners import Listeners
from quire.frontend.http.server import FrontendConfig, Owner, StopSignals, frontend_keys, run, serve
from quire.frontend.http.store.contents import FilesFolder
from quire.frontend.http.store.storage import check_folder
from quire.frontend.http.tls import make_context
from quire.frontend.launcher import EngineStartError
from quire.frontend.replicas.router import DEFAULT_ROUTER
from quire.frontend.supervisor import StartFailed
from quire.ipc.config import EngineConfig
from quire.ipc.process.children import Child
from quire.ipc.process.command import reload_signals, stop_signals

log = logging.getLogger("quire.serve")


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of `quire serve` or `quire route`. engine: None to attach to `frontend.engine_addresses`."""

    command: str = "quire serve"  # for errors
    host: str
    port: int
    num_frontends: int
    uds: str | None = None  # a unix socket's path, instead of host and port
    uds_mode: int = 0o660
    engine: EngineConfig | None
    frontend: FrontendConfig  # the template: address, sockets and numbers are filled in
    read_again: Callable[[FrontendConfig], FrontendConfig] = lambda config: config  # with the files' text of now; ValueError


class ServeError(Exception):
    """The server cannot start or go on; the text is for the user."""


class EarlyStop:
    """Signals before StopSignals and Reloads take over. Until `only_note` a stop raises, so that everything started is cleaned
    up.

    Nothing may be raised once the event loop starts: it would leave uvloop's C code half way, and a stop was lost that way.
    Before that, raising is not enough: an exception in a finalizer is dropped. So the signal is noted in either case.
    """

    def __init__(self) -> None:
        self.asked = self.reload_asked = False
        self._raises = True

    def __call__(self, *_: object) -> None:
        self.asked = True
        if self._raises:
            sys.exit(0)

    def on_reload(self, *_: object) -> None:
        self.reload_asked = True

    def only_note(self) -> None:
        self._raises = False
        if self.asked:
            sys.exit(0)

    def signals(self) -> StopSignals:
        """In the event loop: the StopSignals that take over, with a stop that was asked for before."""
        signals = StopSignals(besides=reload_signals())
        if self.asked:
            signals.stop.set()
        return signals

    def reloads(self) -> Reloads:
        """In the event loop: the Reloads that take over."""
        reloads = Reloads()
        if self.reload_asked:
            reloads.asked.set()
        return reloads


def run_server(config: ServeConfig, prespawned: Child | None, early: EarlyStop) -> None:
    """Serve until SIGTERM or SIGINT. `prespawned`: the engine's process, if any; the caller ends it if it was not used.

    Raises ServeError.
    """
    try:
        engine = Engines(config.engine, config.frontend.engine_addresses, prespawned)
    except ValueError as error:
        raise ServeError(str(error)) from None
    files = _files_folder(config.frontend.files_dir)
    unix_path: UnixPath | None = None
    try:
        frontend_keys(config.frontend)
        check_endpoint(config.frontend.otlp_traces_endpoint)
        if config.frontend.tls is not None:
            make_context(config.frontend.tls)  # errors are reported now, not after the model has loaded
        if config.uds is not None:
            sockets = bind_unix(config.uds, config.uds_mode, config.num_frontends)
            unix_path = UnixPath(config.uds)
        else:
            sockets = bind(config.host, config.port, config.num_frontends)
        if len(engine.addresses) == 1 and config.frontend.router != DEFAULT_ROUTER:
            log.info("there is one engine: --router %s makes no difference", config.frontend.router)
        engine.start()
        if config.engine is None:
            where = " and ".join(engine.addresses)
            log.info("waiting for an engine at %s (up to %.0f s)", where, config.frontend.connect_timeout_s)
        template = msgspec.structs.replace(
            config.frontend,
            engine_addresses=engine.addresses,
            num_frontends=config.num_frontends,
            files_dir=str(files.path),
        )
        print_ready = ReadyMessage.of(config.frontend, sockets[0], config.host, config.uds)
        serve_all = _serve_here if config.num_frontends == 1 else _serve_in_children
        early.only_note()
        run(lambda: serve_all(_Launch(template, sockets, engine, print_ready, config.read_again, early)))
    except (FrontendError, EngineStartError, StartFailed, TracingError, ValueError) as error:
        raise ServeError(str(error)) from None
    finally:
        if unix_path is not None:
            unix_path.remove()
        ignore_reload_signals()
        engine.stop()
        files.close()


def _files_folder(path: str | None) -> FilesFolder:
    """The folder for files, locked and checked. Raises ServeError."""
    folder = None
    try:
        folder = FilesFolder(None if path is None else Path(path).expanduser().resolve())
        if path is not None:
            check_folder(folder.path)
    except (OSError, ValueError) as error:
        if folder is not None:
            folder.close()
        what = "a folder for files, or --files-dir" if path is None else "--files-dir"
        raise ServeError(f"{what}: {error}") from None
    return folder


class _Launch(NamedTuple):
    """State that exists when the event loop begins."""

    template: FrontendConfig
    sockets: list[socket.socket]
    engine: Engines
    print_ready: ReadyMessage
    read_again: Callable[[FrontendConfig], FrontendConfig]
    early: EarlyStop

    def read(self, template: FrontendConfig) -> FrontendConfig:
        """A template with the files' text as it is now. Raises ValueError."""
        template = self.read_again(template)
        if template.tls is not None:
            make_context(template.tls)
        return template


class _Here(Owner):
    """A single frontend, in this process."""

    def __init__(self, launch: _Launch, manager: ServiceManager) -> None:
        self._launch, self._manager = launch, manager
        self._serving: tuple[Access, Listeners, CurrentLimits] | None = None

    def began(self, access: Access, listeners: Listeners, key_limits: CurrentLimits) -> None:
        self._serving = access, listeners, key_limits

    def ready(self, client: Client) -> None:
        model = client.welcome.served_model_names[0]
        self._launch.print_ready(model, client.welcome.limits.tasks)
        self._manager.ready(f"serves {model}")

    async def reload(self) -> None:
        """Read keys, their limits and certificates again, in place."""
        if self._serving is None:
            return  # not yet: they are read at the start
        template = self._launch.read(self._launch.template)
        access, listeners, key_limits = self._serving
        access.use(ApiKeys(template.api_keys, template.admin_api_keys, template.key_limits))
        key_limits.use(template.key_limits)
        await listeners.refresh()


async def _serve_here(launch: _Launch) -> None:
    signals, manager = launch.early.signals(), ServiceManager()
    owner = _Here(launch, manager)
    listen_fd = launch.sockets[0].detach()
    template = msgspec.structs.replace(launch.template, listen_fd=listen_fd, logs_engine_changes=not launch.engine.are_ours)
    async with _managed(launch, manager, owner.reload):
        await _until_stopped(signals, serve(template, signals, owner), launch.engine)


async def _serve_in_children(launch: _Launch) -> None:
    signals, manager, sockets = launch.early.signals(), ServiceManager(), launch.sockets
    metrics_fd = os.memfd_create("quire-metrics", os.MFD_CLOEXEC)
    os.ftruncate(metrics_fd, panel_bytes() * PANELS_EACH * len(sockets))
    template = msgspec.structs.replace(launch.template, metrics_fd=metrics_fd)
    frontends = Frontends(template, sockets, logs_engine_changes=not launch.engine.are_ours)
    try:
        if (model := await _ready(frontends, signals)) is None:
            return
        launch.print_ready(model, frontends.tasks)
        manager.ready(f"serves {model}")
        async with _managed(launch, manager, lambda: frontends.reload(launch.read(frontends.template))):
            await _until_stopped(signals, frontends.keep_alive(signals), launch.engine)
    finally:
        await frontends.stop(signals)
        os.close(metrics_fd)


@contextlib.asynccontextmanager
async def _managed(launch: _Launch, manager: ServiceManager, reload: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Meanwhile, tell the service manager that the loop turns, and reload when a signal asks for it."""

    async def reload_as_told() -> None:
        manager.reloading()
        try:
            await reload()
        finally:
            manager.ready("serves")

    tasks = [asyncio.create_task(manager.beat()), asyncio.create_task(launch.early.reloads().follow(reload_as_told))]
    try:
        yield
    finally:
        manager.stopping()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ready(frontends: Frontends, signals: StopSignals) -> str | None:
    """The served model's name, when all frontends are ready; None if a stop was requested meanwhile. Raises StartFailed."""
    starting, stopping = asyncio.create_task(frontends.start()), asyncio.create_task(signals.stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return None


async def _until_stopped(signals: StopSignals, serving: Coroutine[None, None, None], engine: Engines) -> None:
    """Run `serving`, which ends after a signal, and keep the engine alive. If that fails for good, end and raise."""
    task, keeper = asyncio.create_task(serving), asyncio.create_task(engine.keep_alive())
    stopping = asyncio.create_task(signals.stop.wait())
    try:
        await asyncio.wait((task, keeper, stopping), return_when=asyncio.FIRST_COMPLETED)
        is_lost = keeper.done() and not signals.stop.is_set()
        if is_lost:
            signals.stop.set()
            signals.now.set()  # no running request can end well
        keeper.cancel()
        await task
        if is_lost:
            await keeper
    finally:
        for each in (task, keeper, stopping):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartFailed):
            await keeper


def main(config: ServeConfig, prespawned: Child | None = None) -> int:
    """The exit code of the command; `prespawned` as for `run_server`."""
    early = EarlyStop()
    reloads = reload_signals()
    numbers = [number for number in stop_signals() if number not in (signal.SIGINT, *reloads)]  # SIGINT: KeyboardInterrupt
    before = {number: signal.signal(number, early) for number in numbers}  # until StopSignals takes over
    before |= {number: signal.signal(number, early.on_reload) for number in reloads}
    try:
        run_server(config, prespawned, early)
        log.info("stopped")
    except ServeError as error:
        print(f"{config.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the model was loading
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
