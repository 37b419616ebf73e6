"""HostRanks: the workers of one generation on an agent's host. It starts them, talks to them, and kills them.

They have what workers have on the core's own host: a plan ring, into which the agent copies the core's records, and a channel;
the agent passes on its messages. Their results are not read: the output rank is on the core's host. Used by agent.py.
"""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq

from quire.ipc.cpu_memory import available
from quire.ipc.interfaces import Interface
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.messages.hosts import RankEnded
from quire.ipc.messages.workers import WorkerCommand, WorkerMessage
from quire.ipc.process.children import WORKER_MODULE, Child, prespawn, wait_for_all
from quire.ipc.step.plan_ring import PlanRing
from quire.ipc.worker_config import ResolvedEngineConfig, WorkerConfig

RING_WORDS = 8 << 20  # like the core's own
WRITE_TIMEOUT_S = 1.0  # the ring holds many steps, and about two are in flight: if it is full so long, a worker hangs
KILL_WAIT_S = 1.0


def _on_this_host(engine: ResolvedEngineConfig, num_ranks: int) -> ResolvedEngineConfig:
    """On a CPU, the ranks may take what this host has, and not what the core's has."""
    found = available() if engine.device == "cpu" else None
    size, limit = (None, "") if found is None else found
    return msgspec.structs.replace(
        engine, host_memory_bytes=size, host_memory_limit=limit, host_ranks=num_ranks, data_parallel_size=1, frontends=1
    )


class HostRanks:
    """configs: as the core sent them; at least one, all of the same generation."""

    def __init__(self, configs: Sequence[WorkerConfig], folder: Path, interface: Interface) -> None:
        """Start the workers. Raises OSError or zmq.ZMQError if the system has no room for them."""
        with contextlib.ExitStack() as on_failure:
            self._ring = PlanRing.create(RING_WORDS, len(configs))
            on_failure.callback(self._ring.close)
            self._link = CoreToWorkers(configs[0].generation)
            on_failure.callback(self._link.close)
            children = [prespawn(WORKER_MODULE) for _ in configs]
            on_failure.pop_all()
        self._children = {config.rank: child for config, child in zip(configs, children, strict=True)}
        self._said_ended: set[int] = set()
        engine = _on_this_host(configs[0].engine, len(configs))
        for reader, config in enumerate(configs):
            fds = self._ring.fds(reader)
            here = msgspec.structs.replace(
                config,
                engine=engine,
                model_dir=str(folder),
                control_address=self._link.address,
                plan_ring_fds=fds,
                result_ring_fds=[],
                bound_to=interface,
            )
            self._children[config.rank].configure(here, fds)

    def pollables(self) -> Iterator[int | zmq.Socket]:
        yield from (child.fileno() for rank, child in self._children.items() if rank not in self._said_ended)
        yield from self._link.sockets()

    def messages(self) -> list[WorkerMessage]:
        return [message for _, message in self._link.receive()]

    def ended(self) -> list[RankEnded]:
        """A RankEnded for each worker that has ended since the last call."""
        codes = {rank: child.poll() for rank, child in self._children.items() if rank not in self._said_ended}
        ended = [RankEnded(rank, code) for rank, code in codes.items() if code is not None]
        self._said_ended |= {end.rank for end in ended}
        return ended

    def stopped(self) -> list[int]:
        return [rank for rank, child in self._children.items() if child.is_stopped()]

    def write(self, kind: int, words: bytes) -> None:
        """Write a record to the plan ring. Raises RingFull, RingCorrupt, or ValueError for what is not a record."""
        self._ring.write(kind, np.frombuffer(words, np.int32), WRITE_TIMEOUT_S)

    def send(self, rank: int, command: WorkerCommand) -> None:
        if rank in self._children:
            self._link.send(rank, command)

    def dump_stacks(self) -> None:
        self._signal(signal.SIGUSR1)

    def kill(self) -> list[Child]:
        """Kill the workers; returns those that are not gone at once. No other method may be called after this."""
        self._signal(signal.SIGKILL)
        left = wait_for_all(list(self._children.values()), KILL_WAIT_S)
        for child in self._children.values():
            child.close()
        self._link.close()
        self._ring.close()
        return left

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children.values():
            child.send_signal(number)
