"""RemoteRanks: the ranks that run on other hosts. It starts, reaches, watches and ends them together, for WorkerGroup.

It owns the connections of the present generation, one for each host (remote_host.py). Without other hosts it is empty, and its
methods do nothing. Its caller knows where hosts come from (a file, Ray): `find` returns their present addresses for a new
generation. It is called in a thread, because it may take a while.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import zmq

from quire.enginecore.hosts.placement import HostEntry, Placement, all_here
from quire.enginecore.hosts.remote_host import LEAST_SILENCE_S, SUSPECT_SILENCE_S, HostFailed, RemoteHost
from quire.ipc.links.core_and_hosts import CoreToHost
from quire.ipc.links.curve import KeyPair
from quire.ipc.messages.hosts import (
    HEARTBEAT_INTERVAL_S,
    CoreHeartbeat,
    DumpRankStacks,
    EndRanks,
    ModelFiles,
    PlanRecord,
    RankCommand,
)
from quire.ipc.messages.workers import WorkerCommand, WorkerMessage
from quire.ipc.process.loop_clock import LoopClock
from quire.ipc.worker_config import WorkerConfig

Find = Callable[[], Sequence[HostEntry]]  # may take seconds; raises HostFailed


class RemoteRanks:
    """placement: of all ranks, including those of the core's own host."""

    def __init__(
        self,
        placement: Placement,
        keys: KeyPair | None = None,
        model: ModelFiles | None = None,
        gpu_name: str | None = None,
        find: Find | None = None,
        silence_s: float = 10.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """keys, model: needed if there are other hosts. find: None if hosts never change. on_close: called by `close`, to
        leave Ray."""
        self.placement = placement
        self.here = placement.ranks_of(None)
        self._keys, self._model, self._gpu_name, self._find, self._silence_s = keys, model, gpu_name, find, silence_s
        self._on_close = on_close
        self._engine = secrets.token_hex(16)
        self._context: zmq.Context | None = None
        self._hosts: list[RemoteHost] = []
        self._by_rank: dict[int, RemoteHost] = {}
        self._searches = 0
        self._finder: ThreadPoolExecutor | None = None
        self._found: Future[Sequence[HostEntry]] | None = None
        self._clock = LoopClock()
        self._next_heartbeat = 0.0

    # --------------------------------------------------------------------------------------------------- life cycle
    def begin(self, configs: Mapping[int, WorkerConfig]) -> None:
        """Begin to connect for a new generation. configs: of the ranks on other hosts. Raises HostFailed."""
        if not self.placement.hosts:
            return
        assert self._keys is not None and self._model is not None
        self._context = self._context or zmq.Context()
        for number in range(len(self.placement.hosts)):
            of_host = [configs[rank] for rank in self.placement.ranks_of(number)]
            link = CoreToHost(self._context, self._keys)
            self._hosts.append(RemoteHost(link, of_host, self._model, self._engine, self._gpu_name))
        self._by_rank = {rank: host for host in self._hosts for rank in host.ranks}
        if self._find is not None and self._searches > 0:  # the first time they were found when ranks were placed
            self._finder = self._finder or ThreadPoolExecutor(1, "quire-find-hosts")
            self._found = self._finder.submit(self._find)
        else:
            self._connect(self.placement.hosts)

    def _connect(self, entries: Sequence[HostEntry]) -> None:
        were_here = self._searches > 0
        self._searches += 1
        for host, entry in zip(self._hosts, entries, strict=True):
            host.connect(entry, self._clock.now, were_here)

    def end(self) -> None:
        """Tell all hosts to kill their ranks, and disconnect. The last message is on its way when this returns."""
        for host in self._hosts:
            with suppress(HostFailed):
                host.send(EndRanks())
            host.close()
        if self._found is not None:
            self._found.cancel()
        self._hosts, self._by_rank, self._found = [], {}, None

    def close(self) -> None:
        """Call it after the last `end`. May be called again."""
        if self._finder is not None:
            self._finder.shutdown(wait=False, cancel_futures=True)
        if self._context is not None:
            self._context.term()
            self._context = None
        on_close, self._on_close = self._on_close, lambda: None
        on_close()

    # --------------------------------------------------------------------------------------------------- every turn
    def sockets(self) -> Iterator[zmq.Socket]:
        for host in self._hosts:
            yield from host.sockets()

    def messages(self) -> list[WorkerMessage]:
        """New messages of ranks on other hosts. Also sends heartbeats to the hosts. Raises HostFailed."""
        now = self._clock.tick()
        if self._found is not None and self._found.done():
            found, self._found = self._found, None
            self._connect(found.result())
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_INTERVAL_S
            for host in self._hosts:
                if host.is_welcome:
                    host.send(CoreHeartbeat())
        return [message for host in self._hosts for message in host.messages(now)]

    def check(self, is_suspect: bool = False) -> None:
        """Raises HostFailed for a host that is lost or silent; sooner if is_suspect: some rank is already waited for."""
        limit_s = SUSPECT_SILENCE_S if is_suspect else max(self._silence_s, LEAST_SILENCE_S)
        for host in self._hosts:
            host.check(self._clock.now, limit_s)

    # -------------------------------------------------------------------------------------------------------- ranks
    def send(self, rank: int, command: WorkerCommand) -> bool:
        """Send a command; returns False if the rank is not on another host. Raises HostFailed."""
        host = self._by_rank.get(rank)
        if host is not None:
            host.send(RankCommand(rank, command))
        return host is not None

    def write(self, kind: int, parts: Sequence[np.ndarray]) -> None:
        """Send a record to the plan rings of all other hosts. Raises HostFailed."""
        if self._hosts:
            words = b"".join(np.ascontiguousarray(part, np.int32).tobytes() for part in parts)
            encoded = self._hosts[0].encode(PlanRecord(kind, words))
            for host in self._hosts:
                host.send_encoded(encoded)

    def is_stopped(self, rank: int) -> bool:
        return rank in self._by_rank and rank in self._by_rank[rank].stopped

    def dump_stacks(self) -> None:
        for host in self._hosts:
            with suppress(HostFailed):
                host.send(DumpRankStacks())

    def where(self, rank: int) -> str:
        """Words after a worker's number that name its host; empty if there is one host."""
        if not self.placement.hosts:
            return ""
        return f" on {self._by_rank[rank].where}" if rank in self._by_rank else " on this host"


def no_others(world_size: int, first_device: int = 0) -> RemoteRanks:
    """RemoteRanks for an engine with every rank on the core's own host."""
    return RemoteRanks(all_here(world_size, first_device))
