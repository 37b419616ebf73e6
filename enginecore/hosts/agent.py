"""The agent of a host (`quire host`): starts the workers that an engine on another host wants here, passes on messages between
them and the engine, and ends the workers when the engine says so, has gone, or is silent.

It serves one engine at a time; only engines with keys on its list can send messages at all. A request that it cannot fulfill is
answered by HostRefused, whatever bytes the engine sends, and the agent goes on. One thread runs one loop; another thread finds,
and downloads, a model.
"""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from quire.enginecore.device import find_gpus
from quire.enginecore.hosts.host_ranks import HostRanks
from quire.enginecore.hosts.same_model import find_same_model
from quire.enginecore.loading.hub import ModelFilesError
from quire.ipc.interfaces import Interface, find_interface
from quire.ipc.links.core_and_hosts import HostToCore
from quire.ipc.messages.hosts import (
    HEARTBEAT_INTERVAL_S,
    MAX_ENGINE_ID,
    BeginRanks,
    CoreHeartbeat,
    DumpRankStacks,
    EndRanks,
    HostCommand,
    HostHeartbeat,
    HostHello,
    HostMessage,
    HostRefused,
    HostWelcome,
    ModelFiles,
    PlanRecord,
    RankCommand,
    RankMessage,
)
from quire.ipc.process.children import Child, wait_for_all
from quire.ipc.process.loop_clock import LoopClock
from quire.ipc.step.plan_ring import RingCorrupt, RingFull
from quire.ipc.version import VERSION
from quire.ipc.worker_config import WorkerConfig

log = logging.getLogger("quire.host")

CORE_SILENCE_S = 30.0  # after which an engine counts as gone, if its machine vanished
DYING_LIMIT_S = 30.0  # how long new workers wait for killed ones to be gone: until then their memory is not free
LOOK_S = 0.1  # between looks at killed workers that are not gone


class Agent:
    """link: bound. interface: the one that this host's operator chose, or None."""

    def __init__(self, link: HostToCore, interface: Interface | None = None) -> None:
        self._link = link
        self._interface = interface
        self._gpus = [gpu.name for gpu in find_gpus()]
        self._clock = LoopClock()
        self._next_heartbeat = 0.0
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._core: bytes | None = None  # the connection that is served, and below the engine's id
        self._engine = ""
        self._heard_at = 0.0
        self._begin: BeginRanks | None = None  # ranks that wait for their model, or for killed workers to be gone
        self._search: ModelSearch | None = None
        self._ranks: HostRanks | None = None
        self._dying: list[Child] = []
        self._dying_since = 0.0
        self.on_served: Callable[[], None] = lambda: None  # called when an engine's workers start

    @property
    def num_gpus(self) -> int:
        return len(self._gpus)

    def run(self) -> None:
        """Run until `stop`. All workers have ended, or were killed, when this returns."""
        try:
            while not self._stopping:
                self._wait()
                self._clock.tick()
                self._take_commands()
                self._begin_if_due()
                self._pass_on()
                self._heartbeat()
        finally:
            if self._stopping:
                self._send(HostRefused("its agent was told to stop"))
            self._end("this host stops")
            os.close(self._wake_fd)

    def stop(self) -> None:
        """End `run`. Safe in a signal handler, and may be called again."""
        if not self._stopping:
            self._stopping = True
            os.eventfd_write(self._wake_fd, 1)

    def _wait(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_fd, *self._link.sockets(), *(self._ranks.pollables() if self._ranks is not None else ())):
            poller.register(source, zmq.POLLIN)
        timeout_s = min(
            max(self._next_heartbeat - self._clock.now, 0.0), LOOK_S if self._begin is not None else HEARTBEAT_INTERVAL_S
        )
        if (self._wake_fd, zmq.POLLIN) in poller.poll(int(timeout_s * 1000) + 1):
            os.eventfd_read(self._wake_fd)

    # ----------------------------------------------------------------------------------------------------- the core
    def _take_commands(self) -> None:
        for connection, command in self._link.receive():
            if connection == self._core:
                self._heard_at = self._clock.now
                self._handle(command)
            elif isinstance(command, HostHello):
                self._greet(connection, command)
            elif command is None:
                self._link.send(connection, HostRefused(f"it cannot read that; it runs Quire {VERSION}"))

    def _greet(self, connection: bytes, hello: HostHello) -> None:
        if hello.version != VERSION:
            reason = f"it runs Quire {VERSION}, and the engine's host {hello.version[:40]}: they must be the same"
            self._link.send(connection, HostRefused(reason))
            return
        if self._core is not None and hello.engine != self._engine and self._send(HostHeartbeat([])):
            self._link.send(
                connection, HostRefused("it serves another engine, and an agent serves one: start another agent there")
            )
            return
        self._end("another generation of workers comes" if hello.engine == self._engine else "another engine comes")
        self._core, self._engine, self._heard_at = connection, hello.engine[:MAX_ENGINE_ID], self._clock.now
        log.info("an engine has connected")
        self._send(HostWelcome(VERSION, self._gpus))

    def _handle(self, command: HostCommand | None) -> None:
        match command:
            case PlanRecord() if self._ranks is not None:
                self._write(self._ranks, command)
            case RankCommand(rank, worker_command) if self._ranks is not None:
                self._ranks.send(rank, worker_command)
            case BeginRanks() if self._ranks is None and self._begin is None:
                self._prepare(command)
            case DumpRankStacks() if self._ranks is not None:
                self._ranks.dump_stacks()
            case EndRanks():
                self._end("the engine ends them")
            case CoreHeartbeat() | PlanRecord() | RankCommand() | DumpRankStacks():
                pass
            case _:
                self._refuse("it was sent what it cannot read, or what was not due")

    def _write(self, ranks: HostRanks, record: PlanRecord) -> None:
        try:
            ranks.write(record.kind, record.words)
        except (RingFull, RingCorrupt, ValueError) as error:
            self._refuse(f"a worker there does not take its plans: {error}")

    def _send(self, message: HostMessage) -> bool:
        return self._core is not None and self._link.send(self._core, message)

    def _refuse(self, reason: str) -> None:
        log.error("%s", reason)
        self._send(HostRefused(reason))
        self._end("the engine was refused")

    # -------------------------------------------------------------------------------------------------------- ranks
    def _prepare(self, begin: BeginRanks) -> None:
        """Check the ranks that are wanted, and start to look for the model."""
        try:
            self._check(begin.configs)
        except ValueError as error:
            return self._refuse(str(error))
        self._begin, self._search = begin, ModelSearch(begin.model)
        self._search.start()
        return None

    def _check(self, configs: list[WorkerConfig]) -> None:
        if not configs or len({config.rank for config in configs}) < len(configs):
            raise ValueError("it was sent no ranks, or one twice")
        needed = max(config.gpu_index for config in configs) + 1
        if configs[0].engine.device == "cuda" and needed > len(self._gpus):
            raise ValueError(f"{needed} GPUs are wanted there, and it has {len(self._gpus)} (CUDA_VISIBLE_DEVICES counts)")
        self._interface_for(configs[0])

    def _interface_for(self, config: WorkerConfig) -> Interface:
        return self._interface or find_interface(config.bound_to.name)

    def _begin_if_due(self) -> None:
        self._dying = wait_for_all(self._dying, 0.0)
        if self._begin is None or self._search is None or not self._search.is_done:
            return
        if self._search.error:
            return self._refuse(self._search.error)
        if self._dying and self._clock.now < self._dying_since + DYING_LIMIT_S:
            return None
        begin, self._begin = self._begin, None
        ranks = ", ".join(str(config.rank) for config in begin.configs)
        try:
            self._ranks = HostRanks(begin.configs, self._search.folder, self._interface_for(begin.configs[0]))
        except (OSError, ValueError, zmq.ZMQError) as error:
            return self._refuse(f"workers cannot be started there: {error}")
        self.on_served()
        log.info("workers %s of %d start with the model in %s", ranks, begin.configs[0].engine.world_size, self._search.folder)
        return None

    def _pass_on(self) -> None:
        if self._ranks is None:
            return
        ended = self._ranks.ended()  # before `messages`, which then has all that they sent before they ended
        for message in self._ranks.messages():
            self._send(RankMessage(message))
        for end in ended:
            self._send(end)

    def _heartbeat(self) -> None:
        if self._clock.now < self._next_heartbeat:
            return
        self._next_heartbeat = self._clock.now + HEARTBEAT_INTERVAL_S
        if self._core is None:
            return
        if not self._send(HostHeartbeat(self._ranks.stopped() if self._ranks is not None else [])):
            self._leave("the engine has gone")
        elif self._clock.now - self._heard_at > CORE_SILENCE_S:
            self._leave(f"nothing was heard of the engine for {CORE_SILENCE_S:.0f} s")

    def _leave(self, why: str) -> None:
        self._end(why)
        self._core = None

    def _end(self, why: str) -> None:
        """Kill the workers; the connection stays."""
        self._begin = self._search = None
        if self._ranks is not None:
            log.info("%s: its workers are killed", why)
            ranks, self._ranks = self._ranks, None
            self._dying += ranks.kill()
            self._dying_since = self._clock.now


class ModelSearch(threading.Thread):
    """Looks for a model; then `is_done` is set, with a folder or an error. No thread waits for it: a download may take long."""

    def __init__(self, model: ModelFiles) -> None:
        super().__init__(name="quire-model-search", daemon=True)
        self.is_done, self.error = False, ""
        self.folder = Path()
        self._model = model

    def run(self) -> None:
        try:
            self.folder = find_same_model(self._model)
        except (ModelFilesError, OSError) as error:
            self.error = str(error)
        self.is_done = True
