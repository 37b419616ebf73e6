"""Adapters: LoRA adapters of one engine while it serves: which are loaded, and where. Requests owns it.

It answers frontends that load and unload adapters, finds the adapter of each new request (it is a Preparer), asks the workers
to load adapters into the slots that the lease gives them (slots.py), and tells all frontends what has changed. A folder is read
in a child process (folders.py), and the workers answer a load when they are done, so nothing here waits.

A load of a new adapter, in order:

    its folder is read and checked by the child -> every rank reads its part into host memory, and checks it -> it has its name

Only then does it get an adapter slot, when a sequence needs one. All calls are of the core's thread.
"""

import functools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from quire.enginecore.adapters.folders import Folders, Found
from quire.enginecore.adapters.giving import give
from quire.enginecore.adapters.hub import Hub
from quire.enginecore.adapters.registry import Adapter, AdapterRegistry, last_part
from quire.enginecore.adapters.slots import AdapterSlots, Load
from quire.enginecore.adapters.to_workers import ToWorkers
from quire.enginecore.adapters.turns import LoadTurns, Over, Unnested
from quire.enginecore.owners import Owners
from quire.enginecore.preparation import PreparationFailed, PreparingRequests
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.tenants.backlog import QueueBounds
from quire.enginecore.workers import WorkerGroup
from quire.ipc.adapters import HOST_ONLY, AdapterError, AdapterFile, AdapterInfo, AdapterLimits, AdapterMissing, AdapterPlan
from quire.ipc.messages.frontend import AddRequest
from quire.ipc.messages.stats import AdapterStats
from quire.ipc.messages.utilities import UtilityFailed

log = logging.getLogger("quire.enginecore")

LOOK_S = 0.25  # between looks at who waits for a slot
MISSING_S = 1.0  # how long a name that no folder has is remembered
MOST_MISSING = 4096
MOST_NAMES = 64  # in a metric's label
ON_DEMAND = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,255}")
CHANGED = "the adapter's file has changed since"

Outcome = Adapter | UtilityFailed
Done = Callable[[Outcome], None]


class Adapters:
    """bounds: of requests that wait for a slot (max_queue_s), and of loads on demand that wait (max_num_waiting)."""

    def __init__(
        self,
        limits: AdapterLimits,
        bounds: QueueBounds,
        scheduler: Scheduler,
        owners: Owners,
        workers: WorkerGroup,
        preparing: PreparingRequests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slots = scheduler.leases.adapters
        assert slots is not None
        self.registry = AdapterRegistry()
        self._limits, self._max_queue_s, self._clock = limits, bounds.max_queue_s, clock
        self._scheduler, self._owners, self._preparing = scheduler, owners, preparing
        self._slots: AdapterSlots = slots
        self._default = limits.default
        self._workers = ToWorkers(workers)
        self._folders = Folders(limits, preparing.later)
        self._busy: dict[str, deque[Callable[[], None]]] = {}  # names with a load under way, and what comes after it
        self._turns, self._unnested = LoadTurns(bounds.max_num_waiting), Unnested()
        self._loading: set[int] = set()  # numbers that the workers read, or of names that are loaded anew
        self._missing: dict[str, float] = {}  # names that no folder has, and until when this holds
        self._pins: dict[int, Done] = {}  # by number: to be pinned once they are loaded
        self._look_at = 0.0
        self._num_loads, self._load_s = 0, 0.0
        preparing.add(self.prepare, self._folders.close)

    def begin_with(self, plans: Mapping[str, AdapterPlan], hub: Hub, base_names: Iterable[str] = ()) -> dict[str, str | None]:
        """Register adapters that were read before the start, and let the workers read them. Returns, by name, the error of each
        that is known: None until then, empty once it is loaded. hub: where later ones may be downloaded from. base_names: of
        the model."""
        self._folders.hub, self.registry.base_names = hub, {last_part(name) for name in base_names}
        outcomes: dict[str, str | None] = dict.fromkeys(plans)
        for name, plan in plans.items():
            adapter = self.registry.make(name, plan, 0.0)
            self.registry.add(adapter)
            self._workers.load(adapter, HOST_ONLY, functools.partial(outcomes.__setitem__, name))
        return outcomes

    # ------------------------------------------------------------------------------------------- loads, in turn by name
    def load(self, name: str, path: str, in_place: bool, done: Done) -> None:
        """Load an adapter from a folder."""
        if name in self._limits.tasks:
            return done(UtilityFailed("invalid", f"The name {name!r} is that of one of the model's tasks."))

        def begin(end: Done) -> None:
            if not in_place and self.registry.get(name) is not None:
                said = "If you want to load the adapter in place, set 'load_inplace' to True."
                return end(UtilityFailed("invalid", f"The lora adapter '{name}' has already been loaded. {said}"))
            return self._folders.read(path, lambda found: self._was_read(name, found, time.time(), end))

        return self._in_turn(name, begin, done)

    def unload(self, name: str, done: Done) -> None:
        """Take an adapter's name from it."""

        def begin(end: Done) -> None:
            adapter = self.registry.remove(name)
            if adapter is None:
                return end(UtilityFailed("not_found", f"The lora adapter '{name}' cannot be found."))
            self._tell([], [name])
            log.info("adapter %s is unloaded", name)
            return end(adapter)

        self._in_turn(name, begin, done)

    def find(self, name: str, done: Done, key: str | None = None) -> None:
        """An adapter by its name; one that is being loaded is waited for, and with --lora-on-demand it is loaded now. key: for
        whom; None: its loads are not bounded."""
        if (adapter := self.registry.get(name)) is not None and adapter.number not in self._loading:
            return done(adapter)
        may_load = self._limits.on_demand and ON_DEMAND.fullmatch(name) is not None and not self._is_missing(name)
        if not may_load and name not in self._busy:
            return done(_not_found(name))

        def begin(end: Done) -> None:
            if (adapter := self.registry.get(name)) is not None:
                return end(adapter)
            if not may_load or self._is_missing(name):
                return end(_not_found(name))
            return self._folders.find(name, lambda found: self._was_read(name, found, time.time(), end))

        def work(over: Over) -> None:
            def ended(outcome: Outcome) -> None:
                over()
                done(outcome)

            self._in_turn(name, begin, ended)

        if key is None or not may_load:
            return self._in_turn(name, begin, done)
        if not self._turns.begin(key, work):
            done(UtilityFailed("overloaded", "too many adapters wait to be loaded: try again later"))
        return None

    def restore(self, infos: Iterable[AdapterInfo], done: Callable[[list[str]], None]) -> None:
        """Load adapters that another engine had: done gets the names of those that failed."""
        lacking = [info for info in infos if self._lacks(info)]
        left, failed = len(lacking), list[str]()
        if not lacking:
            return done([])

        def one(info: AdapterInfo, outcome: Outcome) -> None:
            nonlocal left
            left -= 1
            if isinstance(outcome, UtilityFailed):
                log.warning("adapter %s of an engine that was lost cannot be loaded: %s", info.name, outcome.message)
                failed.append(info.name)
            if not left:
                done(failed)

        for info in lacking:
            self._in_turn(info.name, functools.partial(self._restore, info), functools.partial(one, info))
        return None

    def _lacks(self, info: AdapterInfo) -> bool:
        """Where they differ, the later load wins; each engine has its own files of the model's tasks."""
        current, is_task = self.registry.get(info.name), info.name in self._limits.tasks
        return current is None or (not is_task and current.plan.file != info.file and current.loaded_at < info.loaded_at)

    def _restore(self, info: AdapterInfo, end: Done) -> None:
        same = self.registry.with_file(info.name, info.file)
        if not self._lacks(info):
            return end(same or _not_found(info.name))
        if same is not None:
            self._register(same)
            return end(same)
        found = functools.partial(self._was_read, info.name, at=info.loaded_at, end=end, expected=info.file)
        return self._folders.read(info.file.folder, found)

    def _in_turn(self, name: str, begin: Callable[[Done], None], done: Done) -> None:
        """Begin when no other call is at work on this name."""

        def end(outcome: Outcome) -> None:
            waiting = self._busy[name]
            if not waiting:
                del self._busy[name]
            done(outcome)
            if waiting:
                self._unnested(waiting.popleft())

        if (waiting := self._busy.get(name)) is not None:
            waiting.append(lambda: begin(end))
        else:
            self._busy[name] = deque()
            begin(end)

    def _was_read(
        self,
        name: str,
        found: Found,
        at: float,
        end: Done,
        expected: AdapterFile | None = None,
        registers: bool = True,
    ) -> None:
        """A folder was read. expected: the file that it must have. registers: the adapter gets its name."""
        if isinstance(found, AdapterMissing):
            self._note_missing(name)
            return end(UtilityFailed("not_found", str(found)))
        if isinstance(found, AdapterError):
            return end(UtilityFailed("invalid", f"{name}: {found}"))
        if expected is not None and found.file != expected:
            return end(UtilityFailed("invalid", CHANGED))
        adapter = self.registry.make(name, found, at)
        self._loading.add(adapter.number)

        def kept(error: str) -> None:
            self._loading.discard(adapter.number)
            if error:
                return end(UtilityFailed("invalid", f"{name}: {error}"))
            if registers:
                self._register(adapter)
            return end(adapter)

        return self._workers.load(adapter, HOST_ONLY, kept)

    def _register(self, adapter: Adapter) -> None:
        self.registry.add(adapter)
        self._missing.pop(adapter.name, None)
        self._tell([adapter.info], [])
        log.info("adapter %s is loaded, number %d", adapter.name, adapter.number)

    def _tell(self, added: list[AdapterInfo], removed: list[str]) -> None:
        self._owners.tell_adapters(added, removed, (adapter.info for adapter in self.registry))

    def _is_missing(self, name: str) -> bool:
        return self._missing.get(name, 0.0) > self._clock()

    def _note_missing(self, name: str) -> None:
        if len(self._missing) >= MOST_MISSING:
            self._missing.clear()
        self._missing[name] = self._clock() + MISSING_S

    def pin(self, name: str, done: Done) -> None:
        """Load an adapter into a slot and keep it there."""
        adapter = self.registry.get(name)
        if adapter is None:
            return done(_not_found(name))
        if self._slots.num_pinned + len(self._pins) >= self._limits.max_loras - 1:
            return done(UtilityFailed("invalid", "one adapter slot must not be pinned: see --max-loras"))
        if self._slots.pin(adapter):
            return done(adapter)
        self._pins[adapter.number] = done
        return self._slots.want(adapter)

    # ------------------------------------------------------------------------------------------------------ requests
    def prepare(self, request: AddRequest, sequences: list[Sequence]) -> Future[None] | None:
        """A Preparer: give a request's sequences their adapter, once it is loaded."""
        use = request.adapter or self._default
        if use is None:
            return None
        file = use.file if request.task.is_resumed and use.name not in self._limits.tasks else None
        adapter = self.registry.get(use.name) if file is None else self.registry.with_file(use.name, file)
        if adapter is not None and adapter.number not in self._loading:
            self._give(sequences, adapter)
            return None
        future: Future[None] = Future()

        def done(outcome: Outcome) -> None:
            if future.done():  # it was aborted
                return
            if isinstance(outcome, UtilityFailed):
                text = f"{use.name}: {outcome.message}" if file is not None else outcome.message
                future.set_exception(PreparationFailed(text, outcome.code if file is None else "engine_error"))
            else:
                self._give(sequences, outcome)
                future.set_result(None)

        if file is None:
            self.find(use.name, done)
        else:
            self._in_turn(use.name, functools.partial(self._find_file, use.name, file), done)
        return future

    def _find_file(self, name: str, file: AdapterFile, end: Done) -> None:
        """The adapter of a request that another engine has run: of the same version of the same file."""
        if (adapter := self.registry.with_file(name, file)) is not None:
            return end(adapter)
        found = functools.partial(self._was_read, name, at=0.0, end=end, expected=file, registers=False)
        return self._folders.read(file.folder, found)

    def _give(self, sequences: list[Sequence], adapter: Adapter) -> None:
        give(sequences, adapter, self._scheduler.kv.hasher)
        if any(seq.adapter is adapter for seq in sequences):
            self._slots.want(adapter)

    # ----------------------------------------------------------------------------------------------------- each turn
    def turn(self) -> None:
        """Let the workers load what is wanted, and end what has waited for too long."""
        if self._slots.is_settled and not self.registry.has_retired:
            return
        now = self._clock()
        if self._workers.are_ready:
            for load in self._slots.turn(now, self._waits):
                self._workers.load(load.adapter, load.slot, functools.partial(self._was_loaded, load, now), once=True)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()

    def _waits(self, adapter: Adapter) -> bool:
        return any(seq.adapter is adapter for seq in self._scheduler.waiting)

    def _was_loaded(self, load: Load, since: float, error: str) -> None:
        now = self._clock()
        if error:
            return self._could_not_load(load, error)
        self._num_loads, self._load_s = self._num_loads + 1, self._load_s + now - since
        self._slots.loaded(load, now)
        if (done := self._pins.pop(load.adapter.number, None)) is not None:
            self._slots.pin(load.adapter)
            done(load.adapter)
        return None

    def _could_not_load(self, load: Load, error: str) -> None:
        """An adapter that was evicted from host memory cannot be read again: its file is another one."""
        adapter = load.adapter
        log.warning("adapter %s, number %d, cannot be loaded any more: %s", adapter.name, adapter.number, error)
        waiting = {(s.owner, s.request_id) for s in self._scheduler.waiting if s.adapter is adapter}
        for owner, request_id in waiting:
            self._scheduler.abort(owner, request_id)
            self._owners.refuse(owner, request_id, "invalid", f"the adapter {adapter.name!r} cannot be used any more: {error}")
        self._slots.failed(load)
        if (done := self._pins.pop(adapter.number, None)) is not None:
            done(UtilityFailed("invalid", error))
        if self.registry.is_current(adapter):
            self._loading.add(adapter.number)  # requests that come from now on wait for the new file
            self._in_turn(adapter.name, functools.partial(self._load_anew, adapter), lambda outcome: None)

    def _load_anew(self, adapter: Adapter, end: Done) -> None:
        def loaded(outcome: Outcome) -> None:
            self._loading.discard(adapter.number)
            if isinstance(outcome, UtilityFailed) and self.registry.is_current(adapter):
                self.registry.remove(adapter.name)
                self._tell([], [adapter.name])
                log.error("adapter %s is unloaded: %s", adapter.name, outcome.message)
            end(outcome)

        if not self.registry.is_current(adapter):
            return loaded(adapter)
        folder = adapter.plan.file.folder
        return self._folders.read(folder, lambda found: self._was_read(adapter.name, found, time.time(), loaded), trusted=True)

    def _look(self) -> None:
        scheduler, now = self._scheduler, time.time()
        waiting = [seq for seq in scheduler.waiting if seq.adapter is not None]
        awaited = {seq.adapter.number for seq in waiting} | self._pins.keys()
        for adapter in self._slots.wanted:
            if adapter.number not in awaited:
                self._slots.unwant(adapter)
        if self._max_queue_s:
            late = [seq for seq in waiting if seq.is_bounded and not seq.first_scheduled]
            late = [seq for seq in late if now - seq.arrival_time > self._max_queue_s and not self._slots.is_open(seq.adapter)]
            for owner, request_id in {(seq.owner, seq.request_id) for seq in late}:
                scheduler.abort(owner, request_id)
                text = f"no adapter slot came free within --max-queue-s ({self._max_queue_s:g} s)"
                self._owners.refuse(owner, request_id, "overloaded", text, 1)
        if self.registry.has_retired:
            self._drop_retired(waiting)

    def _drop_retired(self, waiting: Iterable[Sequence]) -> None:
        held = {seq.adapter.number for seq in (*waiting, *self._preparing.sequences()) if seq.adapter is not None}
        held |= {seq.adapter.number for seq in self._scheduler.slots.holders if seq.adapter is not None}
        for adapter in self.registry.drop_retired(held | self._loading):
            self._slots.drop(adapter)
            self._workers.forget(adapter)

    # --------------------------------------------------------------------------------------------------------- state
    def stats(self) -> AdapterStats:
        names = [list(dict.fromkeys(a.name for a in some)) for some in (self._slots.running, self._slots.wanted)]
        running, waiting = (some[:MOST_NAMES] for some in names)
        evictions = self._slots.num_evictions
        return AdapterStats(self._limits.max_loras, running, waiting, self._num_loads, evictions, self._load_s)

    def check(self) -> None:
        """Assert that every adapter that a sequence holds is known."""
        self.registry.check()
        self._turns.check()


def _not_found(name: str) -> UtilityFailed:
    return UtilityFailed("not_found", f"The model {name!r} does not exist.")
