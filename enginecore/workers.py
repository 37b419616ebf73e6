"""WorkerGroup: the workers of one engine as the core sees them: started, sized, ready, dead, started anew. No torch.

Starting is a small state machine, driven by messages, so that the core's loop goes on beating while an 8B model loads:

    spawn -> WorkerProfile of every rank -> AllocateKV with the least of their blocks -> WorkerReady of every rank

A generation of workers has rings of its own; after a death the group is closed as a whole and a new generation is spawned.
When, and whether they hang, is WorkerSupervisor's business.
"""

import contextlib
import signal
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import zmq

from quire.ipc.config import WorkerConfig
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.messages import AllocateKV, WorkerFailed, WorkerMessage, WorkerProfile, WorkerPromptLogprobs, WorkerReady
from quire.ipc.process.children import WORKER_MODULE, Child, begin, how_it_ended, wait_for_all
from quire.ipc.step.plan import H_WORLD_SIZE
from quire.ipc.step.plan_ring import KIND_MASK, KIND_PLAN, KIND_SHUTDOWN, PlanRing, RingCorrupt, RingFull
from quire.ipc.step.result_ring import ResultRing

RING_WORDS = 8 << 20  # int32: room for the largest plan several times over; pages are touched as the ring turns
RING_TIMEOUT_S = 10.0
STOP_GRACE_S = 3.0
STACKS_S = 0.5  # for all of them to be written
KILL_WAIT_S = 1.0  # that the loop waits for killed workers; frontends miss its beats after 2


class WorkersFailed(Exception):
    """The workers cannot start or go on; the text is for the user."""


class WorkerGroup:
    """`template` says everything about the workers but rank, epoch, address and descriptors. `begun`: a worker's process that
    loads its modules already and waits for its configuration."""

    def __init__(self, template: WorkerConfig, begun: Child | None = None):
        self.template = template
        self._begun = begun
        self.world_size = template.world_size
        self.generation = 0
        self.is_ready = False
        self.profile: WorkerProfile | None = None
        self.start_s = 0.0  # what the last start that succeeded took
        self._started_at = 0.0
        self._children: list[Child] = []
        self._dying: list[Child] = []  # killed, of earlier generations, and not gone yet
        self._endpoint: CoreToWorkers | None = None

    # --------------------------------------------------------------------------------------------------- life cycle
    def start(self) -> None:
        """Spawn a new generation."""
        self.generation += 1
        self.is_ready, self._started_at = False, time.monotonic()
        self._profiles: dict[int, WorkerProfile] = {}
        self._ready: set[int] = set()
        self.plan_ring = PlanRing.create(RING_WORDS, self.world_size)
        self.result_ring = ResultRing.create(self.template.max_num_seqs)
        self._endpoint = CoreToWorkers(self.generation)
        for rank in range(self.world_size):
            child, self._begun = self._begun or begin(WORKER_MODULE), None
            self._children.append(child)
            config = self._config(rank)
            child.configure(config, [*config.plan_ring_fds, *config.result_ring_fds])

    def _config(self, rank: int) -> WorkerConfig:
        assert self._endpoint is not None
        override = self.template.num_gpu_blocks_override
        if self.profile is not None:  # a later generation must have the KV cache that frontends were told of
            override = self.profile.num_blocks
        return msgspec.structs.replace(
            self.template,
            rank=rank,
            epoch=self.generation,
            control_address=self._endpoint.address,
            plan_ring_fds=self.plan_ring.fds(rank),
            result_ring_fds=self.result_ring.fds() if rank == self.template.output_rank else [],
            num_gpu_blocks_override=override,
        )

    def stop(self) -> None:
        """End the generation, politely if it still listens."""
        if self._endpoint is None:
            return
        with contextlib.suppress(RingFull, RingCorrupt):  # who does not read any more is not asked
            self.plan_ring.write(KIND_SHUTDOWN, np.zeros(0, np.int32), 0.1)
        wait_for_all(self._children, STOP_GRACE_S if self.is_ready else 0.0)
        self.kill()

    def dump_stacks(self) -> None:
        """Ask workers that hang to write their threads' stacks to stderr."""
        for child in self._children:
            child.send_signal(signal.SIGUSR1)
        wait_for_all(self._children, STACKS_S)

    def kill(self) -> None:
        """End the generation now; who is not gone at once (its memory is being freed, or the kernel holds it) is `dying`."""
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        self._dying += wait_for_all(self._children, KILL_WAIT_S)
        for child in self._children:
            child.close()
        self._children = []
        if self._endpoint is not None:
            self._endpoint.close()
            self.plan_ring.close()
            self.result_ring.close()
        self._endpoint, self.is_ready = None, False

    def dying(self) -> list[str]:
        """Killed workers that are not gone yet, by their process ids."""
        self._dying = wait_for_all(self._dying, 0.0)
        return [f"pid {child.pid}" for child in self._dying]

    # ------------------------------------------------------------------------------------------------------- events
    def pollables(self) -> Iterator[int | zmq.Socket]:
        """What the core's poller must watch: deaths, messages, results. Nothing between two generations."""
        if self._endpoint is None:
            return
        yield from (child.fileno() for child in self._children)
        yield from self._endpoint.sockets()
        yield self.result_ring.fileno()

    def check_alive(self) -> None:
        """Raises WorkersFailed if a worker has ended."""
        for rank, child in enumerate(self._children):
            code = child.poll()
            if code is not None:
                raise WorkersFailed(f"worker {rank} ended unexpectedly ({how_it_ended(code)})")

    def messages(self) -> list[WorkerPromptLogprobs]:
        """Take what the workers have said; start-up is handled here. Raises WorkersFailed."""
        if self._endpoint is None:
            return []
        results: list[WorkerPromptLogprobs] = []
        for _, message in self._endpoint.receive():
            self._handle(message, results)
        return results

    def _handle(self, message: WorkerMessage, results: list[WorkerPromptLogprobs]) -> None:
        match message:
            case WorkerProfile():
                self._profiles[message.rank] = message
                if len(self._profiles) == self.world_size:
                    self._allocate()
            case WorkerReady():
                self._ready.add(message.rank)
                if len(self._ready) == self.world_size:
                    self.is_ready, self.start_s = True, time.monotonic() - self._started_at
            case WorkerFailed():
                raise WorkersFailed(message.message)
            case WorkerPromptLogprobs():
                results.append(message)

    def _allocate(self) -> None:
        assert self._endpoint is not None
        num_blocks = min(p.num_blocks for p in self._profiles.values())
        first = self._profiles[0]
        self.profile = msgspec.structs.replace(first, num_blocks=num_blocks)
        for rank in range(self.world_size):
            self._endpoint.send(rank, AllocateKV(num_blocks))

    @property
    def start_stage(self) -> str:
        """What workers that are not ready yet are at."""
        is_sized = len(self._profiles) == self.world_size
        return "make their KV cache and graphs" if is_sized else "load the model and measure a step"

    # -------------------------------------------------------------------------------------------------------- steps
    def drain_doorbell(self) -> None:
        """Forget that results came, if they did."""
        if self._endpoint is not None:
            self.result_ring.drain_doorbell()

    def send_plan(self, words: np.ndarray) -> None:
        """`words` are StepPlan.encode's, completed here. Raises WorkersFailed if a worker does not read."""
        words[H_WORLD_SIZE] = self.world_size
        self._write(KIND_PLAN, words)

    def send_mask(self, words: np.ndarray) -> None:
        """Grammar masks of the step last sent, which has FLAG_LATE_MASK."""
        self._write(KIND_MASK, words)

    def _write(self, kind: int, words: np.ndarray) -> None:
        try:
            self.plan_ring.write(kind, words, RING_TIMEOUT_S)
        except (RingFull, RingCorrupt) as error:
            raise WorkersFailed(f"a worker does not take its plans: {error}") from error
        except ValueError as error:  # too long for the ring; the scheduler's limits should not let it come to this
            raise WorkersFailed(f"a plan cannot be sent: {error}") from error
