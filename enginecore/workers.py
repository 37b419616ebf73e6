"""WorkerGroup: the workers of one engine as the core sees them: it starts, sizes, watches and ends them. No torch.

Starting is a small state machine, driven by messages, so that the core's loop goes on while an 8B model loads:

    spawn -> WorkerProfile of every rank -> AllocateKV with the least of their blocks -> WorkerReady of every rank

Each generation of workers has rings of its own; if one worker dies, the whole group is closed and a new generation is spawned.
WorkerSupervisor decides when, and whether workers hang. RemoteRanks (hosts/) has the ranks on other hosts: they are sent what
the ranks on this host are sent, and their messages come together with those from here.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import zmq

from quire.enginecore.encoded_steps import EncodedSteps
from quire.enginecore.group_store import GroupStore
from quire.enginecore.hosts.remote_host import HostFailed
from quire.enginecore.hosts.remote_ranks import RemoteRanks, no_others
from quire.enginecore.silent_ranks import SilentRanks
from quire.enginecore.spare_workers import SpareWorkers
from quire.enginecore.worker_profiles import WorkersFailed, profile_of_all
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.messages.group import PeerSilent, StoreRequest
from quire.ipc.messages.workers import (
    AllocateKV,
    ControlReply,
    ControlRequest,
    ItemFailed,
    ItemsEncoded,
    SideResults,
    WorkerCommand,
    WorkerFailed,
    WorkerMessage,
    WorkerProfile,
    WorkerReady,
)
from quire.ipc.process.children import WORKER_MODULE, Child, how_it_ended, wait_for_all, was_killed
from quire.ipc.step.control import encode_control
from quire.ipc.step.items import ItemPiece, encode_piece
from quire.ipc.step.masks import any_token_record, area_records, mask_records, no_masks_record
from quire.ipc.step.plan_ring import (
    KIND_CONTROL,
    KIND_ITEM,
    KIND_MASK,
    KIND_PLAN,
    KIND_SHUTDOWN,
    PlanRing,
    RingCorrupt,
    RingFull,
)
from quire.ipc.step.result_ring import ResultRing, result_depth
from quire.ipc.step.sections import HEADER, USUAL_LOGPROBS
from quire.ipc.worker_config import WorkerConfig

RING_WORDS = 8 << 20  # int32: room for the largest plan several times over; pages are touched as the ring turns
AREA_WORDS = 4 << 20  # int32: room for masks that are being made or read, 890 for a vocabulary of 150,000
ITEMS_UNREAD_BYTES = RING_WORDS  # a quarter of the ring: while so much is unread, no bytes of items are added
RING_TIMEOUT_S = 5.0  # the launcher takes a core without heartbeats for 8 s to hang
STOP_GRACE_S = 3.0
STACKS_S = 0.5  # for all stacks to be written
KILL_WAIT_S = 1.0  # how long the loop waits for killed workers; frontends miss its heartbeats after 2
WORLD_SIZE = HEADER.at["world_size"]


class WorkerGroup:
    """template: the workers' configuration, without rank, device, generation, address and descriptors. prespawned: worker
    processes that already load their modules and wait for their configuration, at most as many as there will be ranks.
    ranks: where each rank runs; None: all on this host."""

    def __init__(self, template: WorkerConfig, prespawned: Sequence[Child] = (), ranks: RemoteRanks | None = None):
        self.template = template
        self._ranks = ranks or no_others(template.engine.world_size, template.gpu_index)
        self._here = self._ranks.here
        self._is_spread = bool(self._ranks.placement.hosts)
        self._spares = SpareWorkers(prespawned)
        self.world_size = template.engine.world_size
        self.generation = 0
        self.is_ready = False
        self.profile: WorkerProfile | None = None
        self.start_s = 0.0  # how long the last successful start took
        self._started_at = 0.0
        self._children: list[Child] = []  # of the ranks on this host, in their order
        self._dying: list[Child] = []  # killed, of earlier generations, and not gone yet
        self._link: CoreToWorkers | None = None
        self._broken = ""  # why masks do not reach the workers
        self.when_ready: list[Callable[[], None]] = []  # called once, when the workers are ready the next time
        self.on_item_failed: Callable[[ItemFailed], None] = lambda message: None
        engine = template.engine
        self.encoded = EncodedSteps(engine.tensor_parallel_size, result_depth(engine.pipeline_parallel_size))
        self._last_control = 0
        self._unanswered: dict[int, tuple[set[int], Callable[[ControlReply], None]]] = {}  # by id: ranks, on_reply

    # --------------------------------------------------------------------------------------------------- life cycle
    def start(self) -> None:
        """Spawn a new generation. Raises OSError or ZMQError if the system has no room for it, WorkersFailed."""
        self.generation += 1
        engine = self.template.engine
        self.is_ready, self._started_at = False, time.monotonic()
        self._profiles: dict[int, WorkerProfile] = {}
        self._ready: set[int] = set()
        with contextlib.ExitStack() as on_failure:  # an attempt that lacks descriptors must leave nothing open
            plan_ring = PlanRing.create(RING_WORDS, len(self._here), 0 if self._is_spread else AREA_WORDS)
            on_failure.callback(plan_ring.close)
            num_logprobs, depth = max(engine.max_logprobs, USUAL_LOGPROBS), result_depth(engine.pipeline_parallel_size)
            result_ring = ResultRing.create(engine.max_num_seqs, num_logprobs, depth, engine.max_samples)
            on_failure.callback(result_ring.close)
            self._link = CoreToWorkers(self.generation)
            on_failure.pop_all()
        self.plan_ring, self.result_ring = plan_ring, result_ring
        self._store = GroupStore(self._send)
        limits = engine.collective_timeout_s, engine.tensor_parallel_size
        self._silent = SilentRanks(*limits, self._ranks.where)
        for _ in self._here:  # all of them load their modules before the first gets its configuration
            self._children.append(self._spares.take(WORKER_MODULE))
        with _as_failure():
            self._ranks.begin({rank: self._config(rank) for rank in range(self.world_size) if rank not in self._here})
        for rank, child in zip(self._here, self._children, strict=True):
            config = self._config(rank)
            child.configure(config, [*config.plan_ring_fds, *config.result_ring_fds])

    def _config(self, rank: int) -> WorkerConfig:
        assert self._link is not None
        is_here, placed = rank in self._here, self._ranks.placement.ranks[rank]
        engine = self.template.engine
        if self.profile is not None:  # a later generation must have a KV cache of the size that frontends were told
            states = self.profile.num_states or None
            engine = msgspec.structs.replace(engine, num_gpu_blocks_override=self.profile.num_blocks, num_states=states)
        return msgspec.structs.replace(
            self.template,
            engine=engine,
            rank=rank,
            gpu_index=placed.device_index,
            one_host=not self._is_spread,
            group_on_one_host=placed.group_on_one_host,
            generation=self.generation,
            control_address=self._link.address if is_here else "",
            plan_ring_fds=self.plan_ring.fds(self._here.index(rank)) if is_here else [],
            result_ring_fds=self.result_ring.fds() if rank == engine.output_rank else [],
        )

    def stop(self) -> None:
        """End the generation, and the spare processes. Workers that still read the ring end by themselves."""
        self._spares.close()
        if self._link is None:
            return
        with contextlib.suppress(RingFull, RingCorrupt, HostFailed):  # workers that no longer read cannot be asked
            self._ranks.write(KIND_SHUTDOWN, ())
            self.plan_ring.write(KIND_SHUTDOWN, np.zeros(0, np.int32), 0.1)
        wait_for_all(self._children, STOP_GRACE_S if self.is_ready else 0.0)
        self.kill()

    def dump_stacks(self) -> None:
        """Make workers that hang write their threads' stacks to stderr. (Serving workers are asked by DumpStacks.)"""
        self._ranks.dump_stacks()
        for child in self._children:
            child.send_signal(signal.SIGUSR1)
        wait_for_all(self._children, STACKS_S)

    def kill(self) -> bool:
        """Kill the generation. Processes that are not gone at once (the kernel still frees their memory) are `dying`. Returns
        whether a signal from outside had ended or stopped one of them before."""
        from_outside = any(was_killed(child.poll()) or child.is_stopped() for child in self._children)
        self._ranks.end()  # other hosts are told before any process is waited for
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        self._dying += wait_for_all(self._children, KILL_WAIT_S)
        for child in self._children:
            child.close()
        self._children = []
        if self._link is not None:
            self._link.close()
            self.plan_ring.close()
            self.result_ring.close()
        self._link, self.is_ready, self._broken = None, False, ""
        self.encoded.clear()
        self._give_up_control()
        return from_outside

    def keep_spares(self) -> None:
        """Start spare processes for the next generation on this host, as far as there is room for them."""
        while len(self._spares) < len(self._here) and self._spares.add(WORKER_MODULE):
            pass

    def dying(self) -> list[str]:
        """Killed workers that are not gone yet, as "pid N"."""
        self._dying = wait_for_all(self._dying, 0.0)
        return [f"pid {child.pid}" for child in self._dying]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this host, in their order; none between two generations."""
        return [child.pid for child in self._children]

    # ------------------------------------------------------------------------------------------------------- events
    def pollables(self) -> Iterator[int | zmq.Socket]:
        """Sources that the core's poller must watch: deaths, messages, results. None between two generations."""
        if self._link is None:
            return
        yield from (child.fileno() for child in self._children)
        yield from self._link.sockets()
        yield from self._ranks.sockets()
        yield self.result_ring.fileno()

    def check_alive(self) -> None:
        """Raises WorkersFailed if a worker has ended, its host is lost, or it keeps the others waiting for too long."""
        for rank, child in zip(self._here, self._children):  # noqa: B905  # none of them between two generations
            code = child.poll()
            if code is not None:
                raise WorkersFailed(f"worker {rank}{self._ranks.where(rank)} ended unexpectedly ({how_it_ended(code)})")
        if self._broken:
            raise WorkersFailed(self._broken)
        if not self._children:
            return
        if self._is_spread:
            with _as_failure():
                self._ranks.check(self._silent.has_heard)
        if self._silent.has_heard and (verdict := self._silent.verdict(self.stopped(), self.world_size, time.monotonic())):
            raise WorkersFailed(verdict)
        if not self.is_ready and (said := self._silent.stopped_for_long(self.stopped(), "the workers still start")):
            raise WorkersFailed(said)

    def check_stopped(self, meanwhile: str) -> None:
        """Raises WorkersFailed if some ranks that serve have been stopped for too long: requests would hang. meanwhile: words
        on what the workers should do. Call it several times a second."""
        if self.is_ready and (said := self._silent.stopped_for_long(self.stopped(), meanwhile)):
            raise WorkersFailed(said)

    def stopped(self) -> list[int]:
        """Ranks with a process that was stopped by a signal."""
        here = [rank for rank, child in zip(self._here, self._children) if child.is_stopped()]  # noqa: B905
        return sorted([*here, *filter(self._ranks.is_stopped, range(self.world_size))])

    def messages(self) -> list[SideResults]:
        """Take the workers' messages; returns side results, and handles all others here. Raises WorkersFailed."""
        if self._link is None:
            return []
        results: list[SideResults] = []
        for _, message in self._link.receive():
            self._handle(message, results)
        if self._is_spread:
            with _as_failure():
                for message in self._ranks.messages():
                    self._handle(message, results)
        return results

    def _send(self, rank: int, command: WorkerCommand) -> None:
        assert self._link is not None
        with _as_failure():
            if not self._ranks.send(rank, command):
                self._link.send(rank, command)

    def _handle(self, message: WorkerMessage, results: list[SideResults]) -> None:
        match message:
            case WorkerProfile():
                self._profiles[message.rank] = message
                if len(self._profiles) == self.world_size:
                    self._allocate()
            case WorkerReady():
                self._ready.add(message.rank)
                if len(self._ready) == self.world_size:
                    if self.result_ring.generation != self.generation:
                        raise WorkersFailed("the workers are ready, but none of them has taken the ring of results")
                    self.is_ready, self.start_s = True, time.monotonic() - self._started_at
                    calls, self.when_ready = self.when_ready, []
                    for call in calls:
                        call()
            case WorkerFailed():
                elsewhere = message.rank not in self._here
                by = f" (worker {message.rank}{self._ranks.where(message.rank)})" if elsewhere else ""
                raise WorkersFailed(message.message + by)
            case StoreRequest():
                self._store.handle(message)
            case PeerSilent():
                self._silent.heard(message.rank, message.message, time.monotonic())
            case ItemFailed():
                self.on_item_failed(message)
            case ItemsEncoded():
                self.encoded.heard(message)
            case SideResults():
                results.append(message)
            case ControlReply():
                self._replied(message)

    def _allocate(self) -> None:
        self.profile = profile_of_all([self._profiles[rank] for rank in range(self.world_size)])
        for rank in range(self.world_size):
            self._send(rank, AllocateKV(self.profile.num_blocks, self.profile.num_states))

    @property
    def start_stage(self) -> str:
        """The work of workers that are not ready yet, as words for a log line."""
        is_sized = len(self._profiles) == self.world_size
        return "make their KV cache and graphs" if is_sized else "load the model and measure a step"

    # -------------------------------------------------------------------------------------------------------- steps
    def drain_doorbell(self) -> None:
        """Reset the descriptor by which the workers signal results."""
        if self._link is not None:
            self.result_ring.drain_doorbell()

    def send_plan(self, words: np.ndarray) -> None:
        """Send a plan. words: StepPlan.encode's; the world size is added. Raises WorkersFailed if a worker does not read."""
        words[WORLD_SIZE] = self.world_size
        self._write(KIND_PLAN, words)

    def send_piece(self, piece: ItemPiece) -> bool:
        """Send a piece of an item's bytes; False if plans would have too little room beside it. Raises WorkersFailed."""
        if self.plan_ring.num_unread_bytes > ITEMS_UNREAD_BYTES:
            return False
        self._write(KIND_ITEM, *encode_piece(piece))
        return True

    def send_masks(self, step: int, rows: np.ndarray, masks: np.ndarray, windows: bool = False) -> None:
        """Send masks (int32 [n, words], bit set = allowed) for some of the mask rows (int32 [n]) of the step last sent.

        windows: the step has some, and `rows` has names of masks."""
        area = self.plan_ring.area
        if area is not None and (place := area.place_of(masks)) is not None:
            for parts in area_records(step, rows, place, masks.shape[1], windows):
                self._write_masks(*parts)
            area.named(place, self.plan_ring.position)
            return
        for parts in mask_records(step, rows, masks, self.plan_ring.max_record_words, windows):
            self._write_masks(*parts)

    def mask_memory(self, n: int, width: int) -> np.ndarray:
        """An array, int32 [n, width], to make masks in: in memory that workers read, if it has room. For any thread."""
        area = self.plan_ring.area if self._link is not None else None
        room = area.take(n, width) if area is not None else None
        return np.empty((n, width), np.int32) if room is None else room

    def send_no_masks(self, step: int, rows: np.ndarray) -> None:
        """Tell workers that these mask rows of the step last sent get no mask: their results will be NO_TOKEN."""
        self._write_masks(*no_masks_record(step, rows))

    def send_any_token(self, step: int, rows: np.ndarray) -> None:
        """Tell workers that these mask rows of the step last sent may be any token."""
        self._write_masks(*any_token_record(step, rows))

    # ------------------------------------------------------------------------------------------------------ control
    def send_control(self, make: Callable[[int], ControlRequest], on_reply: Callable[[ControlReply], None]) -> None:
        """Send a request to every serving worker, which handles it between two steps; `make` gets the request's id.

        on_reply is called with each rank's answer, in a later `messages`; for a worker that ended before, with an error.
        Raises WorkersFailed if the workers do not serve.
        """
        if not self.is_ready:
            raise WorkersFailed("the workers do not serve yet")
        self._last_control += 1
        self._unanswered[self._last_control] = (set(range(self.world_size)), on_reply)  # if sending fails, `kill` answers
        self._write(KIND_CONTROL, encode_control(make(self._last_control)))

    def _replied(self, reply: ControlReply) -> None:
        ranks, on_reply = self._unanswered.get(reply.id, (set(), None))
        if on_reply is None or reply.rank not in ranks:
            raise WorkersFailed(f"worker {reply.rank} answered what it was not asked")
        ranks.remove(reply.rank)
        if not ranks:
            del self._unanswered[reply.id]
        on_reply(reply)

    def _give_up_control(self) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for request_id, (ranks, on_reply) in unanswered.items():
            for rank in sorted(ranks):
                on_reply(ControlReply(rank, request_id, "the worker ended before it answered", b""))

    def _write_masks(self, *parts: np.ndarray) -> None:
        """Write, or let the next `check_alive` raise: tokens that are being taken meanwhile must not be lost."""
        if not self._broken:
            try:
                self._write(KIND_MASK, *parts)
            except WorkersFailed as error:
                self._broken = str(error)

    def _write(self, kind: int, *parts: np.ndarray) -> None:
        try:
            if self._is_spread:
                self._ranks.write(kind, parts)
            self.plan_ring.write_parts(kind, parts, RING_TIMEOUT_S)
        except HostFailed as error:
            raise WorkersFailed(str(error)) from error
        except (RingFull, RingCorrupt) as error:
            raise WorkersFailed(f"a worker does not take its plans: {error}") from error
        except ValueError as error:  # too long for the ring, which the scheduler's limits should prevent
            raise WorkersFailed(f"a plan cannot be sent: {error}") from error


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    try:
        yield
    except HostFailed as error:
        raise WorkersFailed(str(error)) from error
