"""One frontend process: a listening socket, the client to the engine, the application between them, and an orderly shutdown.

`serve` runs until told to stop, in the process of `quire serve` itself or in a child of it (`python -m quire.frontend.http`).
Shutdown: /ready answers 503 first, then no connection is accepted, then running requests may end within the grace period.
Sockets are in listener.py.
"""

import asyncio
import logging
import math
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import msgspec
import uvloop

from quire.frontend.client.client import Client
from quire.frontend.client.media_data import open_media
from quire.frontend.client.stream import EngineDown
from quire.frontend.client.turns import SWITCH_INTERVAL_S
from quire.frontend.http.api.access import Access, access_of
from quire.frontend.http.api.app import App
from quire.frontend.http.api.bodies.checked import RequestDefaults
from quire.frontend.http.api.logs.access_log import AccessLog
from quire.frontend.http.api.logs.tracing import TracedApp
from quire.frontend.http.api.metrics.metrics import Metrics
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.api.responses.background import end_all, let_end
from quire.frontend.http.api.services import MAX_RESPONSE_BYTES, Services
from quire.frontend.http.batches.runner import BatchRunner
from quire.frontend.http.garbage import GarbageCollection
from quire.frontend.http.limits.key_limits import CurrentLimits, KeyLimits
from quire.frontend.http.listener import FrontendError
from quire.frontend.http.listeners import Listeners
from quire.frontend.http.loop_lag import watch_lag
from quire.frontend.http.protocol.cors import Cors
from quire.frontend.http.server_state import Limits, ServerState
from quire.frontend.http.store.bounds import DEFAULT_FILES_MIB
from quire.frontend.http.store.storage import Storage
from quire.frontend.http.tls import TlsFiles
from quire.frontend.launcher import log_engine_changes
from quire.frontend.media.children import MediaChildrenError
from quire.frontend.media.options import NO_MEDIA_OPTIONS, MediaOptions
from quire.frontend.replicas.replicas import client_of
from quire.frontend.replicas.router import DEFAULT_ROUTER, Policy
from quire.ipc.links.curve import FrontendKeys, load_keys, make_keys, parse_key, write_keys
from quire.ipc.process.command import stop_signals

log = logging.getLogger("quire.http")

# Descriptors that a process keeps for itself: the engine's sockets, files of uploads and of the store, children, connections
# that were accepted in the same turn of the loop.
OWN_FDS = 512


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one frontend process. It is sent over the control socket, so that keys appear in no command line.

    listen_fd: a bound TCP or unix socket. metrics_fd: a file shared by all frontend processes (metrics.py), in which this one
    has the panel `index`, or -1 for metrics in this process's memory.
    """

    engine_addresses: list[str]
    router: Policy = DEFAULT_ROUTER  # among several engines
    listen_fd: int
    api_keys: list[str] = []
    admin_api_keys: list[str] = []
    allowed_hosts: tuple[str, ...] = ("*",)
    metrics_open: bool = False
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    log_requests: bool = False
    log_level: str = "info"
    log_format: str = "text"
    access_log: bool = False
    access_log_without: tuple[str, ...] = ()  # paths
    request_ids: bool = False  # on every answer
    defaults: RequestDefaults = RequestDefaults()
    tool_call_parser: str = "auto"  # or a name, or "none": output_plan.py
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    metrics_fd: int = -1
    index: int = 0
    num_frontends: int = 1
    logs_engine_changes: bool = False  # log when the engine stops and returns; False if the launcher does
    drain_delay_s: float = 0.0  # from a stop, when /ready turns 503, until no connection is accepted
    shutdown_grace_s: float = 30.0
    tls: TlsFiles | None = None
    root_path: str = ""
    has_docs: bool = True
    max_response_mib: int = MAX_RESPONSE_BYTES >> 20
    connect_timeout_s: float = 30.0
    curve_key_file: str | None = None  # this frontend's key pair, for a tcp:// engine; made if it does not exist
    curve_engine_keys: list[str] = []  # the engines' public keys: one each, or one for all
    otlp_traces_endpoint: str | None = None
    limits: Limits = Limits()
    files_dir: str | None = None  # shared by all frontends of a server; None: private to this process
    max_files_mib: int = DEFAULT_FILES_MIB
    key_limits: KeyLimits = KeyLimits()
    request_timeout_s: float = 0.0  # the longest that a request may take; 0: no limit
    media: MediaOptions = NO_MEDIA_OPTIONS


def run(main: Callable[[], object]) -> None:
    """asyncio.run on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


class StopSignals:
    """SIGTERM, SIGINT, a closed terminal: the first signal asks for an orderly shutdown, the second for one at once."""

    def __init__(self, besides: Collection[signal.Signals] = ()) -> None:
        """besides: signals that mean something else here."""
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self.is_replaced = False
        self.grace_s = 0.0
        self._loop = asyncio.get_running_loop()
        for number in stop_signals():
            if number not in besides:
                self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.is_replaced:
            self.is_replaced = False
            self._loop.call_later(self.grace_s, self.now.set)
        else:
            (self.now if self.stop.is_set() else self.stop).set()

    def retire(self) -> None:
        """Another process serves the same socket: end when the last request has ended, however long that takes, or grace_s
        after a signal."""
        if not self.stop.is_set():
            self.is_replaced = True
            self.stop.set()


class Owner:
    """The messages of `serve` to the process that runs it, and its questions: the launcher and its child override them."""

    def began(self, access: Access, listeners: Listeners, key_limits: CurrentLimits) -> None:
        """Requests can come. These may be changed from now on, in the event loop."""

    def ready(self, client: Client) -> None:
        """Requests can come, and the engine is connected."""

    def served(self) -> None:
        """The first request has been answered."""

    def draining(self) -> None:
        """No connection is accepted from now on."""


async def serve(config: FrontendConfig, signals: StopSignals, owner: Owner) -> None:
    """Connect to the engine, answer requests until signals.stop, then drain. Raises FrontendError if it cannot start."""
    signals.grace_s = config.shutdown_grace_s
    max_fds = _raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    client = client_of(config.engine_addresses, frontend_keys(config), config.router)
    if not await _connect(client, config, signals):
        return
    try:
        client.media_options = config.media
        await open_media(client)
    except (ValueError, MediaChildrenError) as error:
        await client.close()
        raise FrontendError(str(error)) from error
    key_limits = CurrentLimits(config.key_limits)
    storage = Storage(config.files_dir, config.max_files_mib << 20, key_bounds=key_limits.files)
    services = _services(config, client, storage, key_limits)
    access_log = AccessLog(config.access_log_without) if config.access_log else None
    if client.media is not None:
        client.media.count = partial(services.metrics.count, "media")
    app, access = _application(config, services, access_log, owner)
    traced = TracedApp(app, services, config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
    limits = connections_within(config.limits, max_fds, len(os.listdir("/proc/self/fd")))
    server = ServerState(traced or app, limits)
    listeners = Listeners(socket.socket(fileno=config.listen_fd), server, config.tls)
    await listeners.open()
    sweeper = asyncio.create_task(_sweep(server, client))
    lag = asyncio.create_task(watch_lag(services.metrics.histograms["frontend_lag_seconds"]))
    loggers = [asyncio.create_task(each) for each in log_engine_changes(client)] if config.logs_engine_changes else []
    batches = asyncio.create_task(BatchRunner(app, storage, client).run_forever())
    try:
        owner.began(access, listeners, key_limits)
        owner.ready(client)
        await signals.stop.wait()
        services.state.draining = True
        grace_s = math.inf if signals.is_replaced else config.shutdown_grace_s
        if not signals.is_replaced:
            await _let_notice(signals, config.drain_delay_s)
        owner.draining()
        listeners.close()
        batches.cancel()  # lines not answered yet are left to the next server
        await _shut_down(server, services, grace_s, signals)
    finally:
        batches.cancel()
        await asyncio.wait((batches,))
        sweeper.cancel()
        lag.cancel()
        for logger in loggers:
            logger.cancel()
        listeners.close()
        await end_all(services)
        await storage.close()
        await client.close()
        if access_log is not None:
            access_log.flush()
        if traced is not None:
            await traced.close()


def _application(config: FrontendConfig, services: Services, access_log: AccessLog | None, owner: Owner) -> tuple[App, Access]:
    access = access_of(
        api_keys=config.api_keys,
        admin_keys=config.admin_api_keys,
        key_limits=config.key_limits,
        metrics_open=config.metrics_open,
        allowed_hosts=config.allowed_hosts,
    )
    app = App(
        services,
        access=access,
        cors=Cors(config.allowed_origins, config.allowed_methods, config.allowed_headers, config.allow_credentials),
        access_log=access_log,
        request_ids=config.request_ids,
        root_path=config.root_path,
        has_docs=config.has_docs,
        on_served=owner.served,
    )
    return app, access


def _services(config: FrontendConfig, client: Client, storage: Storage, key_limits: CurrentLimits) -> Services:
    return Services.make(
        client,
        _metrics(config),
        log_requests=config.log_requests,
        defaults=config.defaults,
        parsers=ParserNames(config.tool_call_parser, config.reasoning_parser),
        trust_request_chat_template=config.trust_request_chat_template,
        max_response_bytes=config.max_response_mib << 20,
        storage=storage,
        key_limits=key_limits,
        request_timeout_s=config.request_timeout_s,
    )


async def _connect(client: Client, config: FrontendConfig, signals: StopSignals) -> bool:
    """False if a stop was requested meanwhile."""
    connecting = asyncio.create_task(client.connect(config.connect_timeout_s))
    stopping = asyncio.create_task(signals.stop.wait())
    await asyncio.wait((connecting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not connecting.done():
        connecting.cancel()
        await asyncio.wait((connecting,))
        return False
    try:
        await connecting
    except (EngineDown, ValueError) as error:
        raise FrontendError(f"cannot use the engine at {client.address}: {error}") from error
    return True


async def _sweep(server: ServerState, client: Client) -> None:
    garbage = GarbageCollection()
    while True:
        await asyncio.sleep(1.0)
        server.sweep()
        client.expire(time.monotonic())
        garbage.look(is_idle=client.num_requests == 0)


async def _let_notice(signals: StopSignals, seconds: float) -> None:
    """Give load balancers time to see that /ready has turned 503, while requests are still answered."""
    if seconds > 0:
        log.info("stopping: /ready says so for %.0f s, in which requests are still taken", seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await signals.now.wait()


async def _shut_down(server: ServerState, services: Services, grace_s: float, signals: StopSignals) -> None:
    if server.connections:
        log.info("stopping: %s for open connections to end: %d", _limit(grace_s), len(server.connections))
    drain = asyncio.gather(server.shut_down(grace_s), let_end(services, grace_s))
    forced = asyncio.create_task(signals.now.wait())
    await asyncio.wait((drain, forced), return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, forced):
        task.cancel()
    for connection in list(server.connections):
        connection.abort()
    await asyncio.sleep(0)  # their handlers are cancelled and abort their requests


def _limit(seconds: float) -> str:
    return "as long as it takes" if math.isinf(seconds) else f"up to {seconds:.0f} s"


def frontend_keys(config: FrontendConfig) -> list[FrontendKeys | None]:
    """The keys for tcp:// engines: one each, or one for all. Raises FrontendError."""
    path, engine_keys = config.curve_key_file, config.curve_engine_keys
    if path is None and not engine_keys:
        return [None]
    if path is None or not engine_keys:
        raise FrontendError("--curve-key-file and --curve-engine-key belong together")
    if len(engine_keys) not in (1, len(config.engine_addresses)):
        raise FrontendError(f"--curve-engine-key: {len(engine_keys)} keys for {len(config.engine_addresses)} engines")
    try:
        if not os.path.exists(path):
            keys = make_keys()
            write_keys(path, keys)
            log.info("made %s; the engine's --curve-allow-file needs its public key: %s", path, keys.public.decode())
        own = load_keys(path)
        return [FrontendKeys(own, parse_key(key, "--curve-engine-key")) for key in engine_keys]
    except (OSError, ValueError) as error:
        raise FrontendError(str(error)) from None


def _metrics(config: FrontendConfig) -> Metrics:
    if config.metrics_fd < 0:
        return Metrics()
    return Metrics(mmap.mmap(config.metrics_fd, 0), config.index)


def _raise_file_limit() -> int:
    """Each connection needs a file descriptor; the usual soft limit of 1024 is too low. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def connections_within(limits: Limits, max_fds: int, open_fds: int) -> Limits:
    """The limits with as many connections as there are descriptors for. Without one, the kernel would reset connections, and
    requests that open a file would fail."""
    room = max_fds - open_fds - min(OWN_FDS, max_fds // 4)
    most = max(1, room - limits.num_reserved)
    if most >= limits.max_connections:
        return limits
    log.warning(
        "--max-connections is %d here, not %d: this process may open %d files (ulimit -n)",
        most,
        limits.max_connections,
        max_fds,
    )
    return msgspec.structs.replace(limits, max_connections=most)
