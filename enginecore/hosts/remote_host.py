"""RemoteHost: the core's side of one other host, for one generation of workers: it greets, configures, watches and leaves it.

    connect -> HostHello -> HostWelcome -> BeginRanks -> messages of its ranks, and heartbeats

Every failure is a HostFailed that names the host and its ranks. Nothing here waits, and nothing is tried again: the next
generation has connections of its own. The agent's side is agent.py; all hosts together are remote_ranks.py.
"""

import logging
from collections.abc import Sequence

import zmq

from quire.enginecore.hosts.placement import HostEntry
from quire.ipc.links.core_and_hosts import CoreToHost, HostLost, HostUnreadable, NotThisHost
from quire.ipc.messages.hosts import (
    BeginRanks,
    HostCommand,
    HostHeartbeat,
    HostHello,
    HostMessage,
    HostRefused,
    HostWelcome,
    ModelFiles,
    RankEnded,
    RankMessage,
)
from quire.ipc.messages.workers import SideResults, WorkerMessage
from quire.ipc.process.children import how_it_ended
from quire.ipc.version import VERSION
from quire.ipc.worker_config import WorkerConfig

log = logging.getLogger("quire.enginecore")

CONNECT_TIMEOUT_S = 10.0
RETURN_TIMEOUT_S = 240.0  # for a host of an earlier generation to be back; a restart's limit is a little longer
LEAST_SILENCE_S = 3.0  # six of its heartbeats
SUSPECT_SILENCE_S = 2.0  # four heartbeats, if a rank is waited for already
LINGER_S = 1.0  # for the last message to be sent


class HostFailed(Exception):
    """A host cannot take its ranks, or has lost them; the text is for the user."""


class RemoteHost:
    """configs: of its ranks, of one generation. gpu_name: the name that its GPUs must have, None on CPUs."""

    def __init__(
        self, link: CoreToHost, configs: Sequence[WorkerConfig], model: ModelFiles, engine: str, gpu_name: str | None
    ) -> None:
        self.ranks = [config.rank for config in configs]
        self.stopped: set[int] = set()  # ranks that are stopped, by the agent's last heartbeat
        self.address = "another host"
        self._link = link
        self._configs, self._model, self._engine, self._gpu_name = list(configs), model, engine, gpu_name
        self.is_welcome = False
        self._since: float | None = None  # when we began to connect
        self._heard_at = 0.0
        self._was_here = False
        self._answer = "no answer"  # to our last attempt to connect

    def connect(self, entry: HostEntry, now: float, was_here: bool) -> None:
        """was_here: the host was used in an earlier generation. Raises HostFailed for an address that no socket can use."""
        self.address, self._heard_at, self._since, self._was_here = entry.address, now, now, was_here
        try:
            self._link.connect(entry.address, entry.public_key)
        except zmq.ZMQError as error:
            raise self._failed(f"its address cannot be used: {error}") from None
        self.send(HostHello(VERSION, self._engine))

    @property
    def where(self) -> str:
        return f"host {self.address}"

    def sockets(self) -> list[zmq.Socket]:
        return self._link.sockets()

    def encode(self, command: HostCommand) -> bytes:
        return self._link.encode(command)

    def send(self, command: HostCommand) -> None:
        """Raises HostFailed if the host does not accept the message."""
        self.send_encoded(self._link.encode(command))

    def send_encoded(self, encoded: bytes) -> None:
        if not self._link.send(encoded):
            raise self._failed("it does not take what it is sent")

    def messages(self, now: float) -> list[WorkerMessage]:
        """New messages of its ranks. Raises HostFailed."""
        said: list[WorkerMessage] = []
        try:
            for message in self._link.receive():
                self._heard_at = now
                self._handle(message, said)
        except HostUnreadable as error:
            raise self._failed(f"it sent what cannot be read: {error}") from None
        return said

    def _handle(self, message: HostMessage, said: list[WorkerMessage]) -> None:
        match message:
            case HostWelcome() if not self.is_welcome:
                self._welcome(message)
            case HostRefused():
                raise self._failed(message.reason)
            case RankMessage(SideResults()):
                raise self._failed("a worker there sent results, which come from this host's only")
            case RankMessage(inner) if inner.rank in self.ranks:
                said.append(inner)
            case RankEnded(rank, code) if rank in self.ranks:
                raise HostFailed(f"worker {rank} on {self.where} ended unexpectedly ({how_it_ended(code)})")
            case HostHeartbeat():
                self.stopped = {rank for rank in message.stopped if rank in self.ranks}
            case _:
                raise self._failed("it sent what was not due")

    def _welcome(self, welcome: HostWelcome) -> None:
        if welcome.version != VERSION:
            raise self._failed(f"it runs Quire {welcome.version}, and this host {VERSION}: they must be the same")
        if self._gpu_name is not None:
            if len(welcome.gpus) < len(self.ranks):
                needed = f"{len(self.ranks)} GPUs are wanted there"
                raise self._failed(f"{needed}, and it has {len(welcome.gpus)} (CUDA_VISIBLE_DEVICES counts)")
            if others := sorted({name for name in welcome.gpus[: len(self.ranks)] if name != self._gpu_name}):
                raise self._failed(f"its GPUs differ from this host's: {', '.join(others)} there, {self._gpu_name} here")
        self.is_welcome = True
        self.send(BeginRanks(self._model, self._configs))

    def check(self, now: float, limit_s: float) -> None:
        """Raises HostFailed if the host is lost, cannot be reached, or was silent for limit_s. Call it after `messages`."""
        if self._since is None:
            return
        try:
            self._link.check()
        except HostLost as error:
            if not (self._was_here and isinstance(error, NotThisHost)):
                raise self._failed(str(error)) from None
            if self._answer != str(error):
                log.warning("%s: %s; it is waited for", self.where, error)
            self._answer = str(error)  # libzmq keeps trying to connect, until the agent is back
        if not self.is_welcome:
            timeout_s = RETURN_TIMEOUT_S if self._was_here else CONNECT_TIMEOUT_S
            if now - self._since > timeout_s:
                raise self._failed(f"it cannot be reached: {self._answer} for {timeout_s:.0f} s")
        elif now - self._heard_at > limit_s:
            raise self._failed(f"nothing was heard of it for {limit_s:.3g} s: it, or its agent, is stopped or cut off")

    def close(self, linger_s: float = LINGER_S) -> None:
        self._link.close(linger_s)

    def _failed(self, why: str) -> HostFailed:
        workers = "worker" if len(self.ranks) == 1 else "workers"
        return HostFailed(f"{self.where} with {workers} {', '.join(map(str, self.ranks))}: {why}")
