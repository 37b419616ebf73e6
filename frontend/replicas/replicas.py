"""Replicas: several engines that serve one model, used as one: a Client on top of AsyncClients, with a Router between.

A request goes to one engine with all of its sequences, and so do all steps of a beam search. A request that an overloaded
engine refuses goes to the next, until all have refused. When an engine is lost, the requests that ran there go on at others
(frontend/client/resend.py); it gets none until its AsyncClient has reconnected. One engine needs none of this: `client_of`
makes the client for any number.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.client import Client
from quire.frontend.client.media import routing_ids
from quire.frontend.client.media_data import close_media
from quire.frontend.client.pooling import PooledState
from quire.frontend.client.resend import HOLD_S
from quire.frontend.client.stream import ClientError, EngineDown, Overloaded, RequestState
from quire.frontend.client.terms import Terms, share_of
from quire.frontend.client.utility_calls import A
from quire.frontend.replicas.adapter_places import AdapterPlaces
from quire.frontend.replicas.replica import Replica
from quire.frontend.replicas.replica_adapters import adapters_of, failures_of, follow, remember, serving, undo_load, unload_late
from quire.frontend.replicas.replica_answers import different_models, holds_for_all, together
from quire.frontend.replicas.router import Policy, Router
from quire.frontend.replicas.sent import Sent
from quire.ipc.adapters import AdapterInfo
from quire.ipc.links.curve import FrontendKeys
from quire.ipc.messages.frontend import AddRequest, Heartbeat
from quire.ipc.messages.utilities import LoadFolder, UtilityCall

log = logging.getLogger("quire.replicas")

LOOK_S = 0.25  # between checks of the engines' health, which heartbeats and missing heartbeats tell
OTHERS_S = 5.0  # how long to wait for the other engines at the start, once one has connected
RETRY_S = 1.0  # until the next attempt to connect to an engine that has refused us
MAX_SEARCHES = 4096  # beam searches with a remembered engine
INDEX_FACTOR = 2  # KV blocks in the router's index per KV block of the engines
MAX_INDEX_BLOCKS = 10_000_000  # 0.6 GB
DEFAULT_BLOCK_SIZE, DEFAULT_NUM_BLOCKS = 64, 16_384  # for an engine that does not say


def client_of(
    addresses: Sequence[str],
    keys: Sequence[FrontendKeys | None] = (None,),
    policy: Policy = "cache-aware",
    hold_s: float = HOLD_S,
) -> Client:
    """A client of these engines. keys: one per engine, or one for all. hold_s: as of AsyncClient."""
    keys = list(keys) if len(keys) == len(addresses) else [keys[0]] * len(addresses)
    if len(addresses) == 1:
        return AsyncClient(addresses[0], keys[0], hold_s)
    return Replicas(addresses, keys, policy, hold_s)


def _version(engine: AsyncClient) -> str:
    return f"the engine at {engine.address} is of version {engine.welcome.version}"


class Replicas(Client):
    """Several engines of one model."""

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Sequence[FrontendKeys | None],
        policy: Policy = "cache-aware",
        hold_s: float = HOLD_S,
    ) -> None:
        super().__init__(", ".join(addresses))
        self._replicas = [Replica(a, k, i, self, hold_s) for i, (a, k) in enumerate(zip(addresses, keys, strict=True))]
        self.mismatched: dict[int, str] = {}  # engines that serve another model than the others, and why they get no requests
        self._policy = policy
        self._router: Router | None = None  # made when the engines' cache sizes are known
        self._sent: dict[int, Sent] = {}
        self._searches: OrderedDict[int, int] = OrderedDict()  # beam search -> engine
        self._lock = asyncio.Lock()
        self._connecting: list[asyncio.Task[None]] = []
        self._has_started = False
        self._refusals: dict[int, str] = {}  # engine -> why the last attempt to connect failed
        self._looked = 0.0
        self._well = [False] * len(addresses)  # at the last check
        self._places = AdapterPlaces(len(addresses))
        self._counts: dict[int, tuple[int, int]] = {}  # engine -> (running, waiting) in its latest Heartbeat

    # ---------------------------------------------------------------------------------------------------- connections
    async def connect(self, timeout_s: float | None = 30.0) -> None:
        """Returns when all engines are connected, or some are and OTHERS_S have passed; the others are connected later.

        Raises EngineDown, with each engine's error, if none connects in time; ValueError if two serve different models.
        """
        async with self._lock:
            if not self._connecting:
                await self._connect(timeout_s)

    async def _connect(self, timeout_s: float | None) -> None:
        attempt_s = OTHERS_S if timeout_s is None else min(OTHERS_S, timeout_s / 2)
        self._connecting = [asyncio.create_task(self._keep_connecting(engine, attempt_s)) for engine in self._replicas]
        try:
            tasks = self._connecting
            done, waiting = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                reasons = [self._refusals[number] for number in sorted(self._refusals)]
                raise EngineDown(f"no connection for {timeout_s:g} s: {'; '.join(reasons) or 'none has answered'}")
            if waiting and not any(task.exception() for task in done):
                done, _ = await asyncio.wait(tasks, timeout=OTHERS_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if self.mismatched:
                raise ValueError(next(iter(self.mismatched.values())))
        except BaseException:  # raised again: disconnect the engines that did connect
            await self.close()
            raise
        self._has_started = True
        for engine in self._replicas:
            if not engine.is_connected:
                why = self._refusals.get(engine.number, "it has not answered")
                log.warning("no engine at %s yet: the others get its requests (%s)", engine.address, why)

    async def _keep_connecting(self, engine: Replica, attempt_s: float) -> None:
        """Connect to one engine, however long it takes. Raises ValueError for an unreadable tokenizer or an unusable address.

        An attempt must end to report its error, so each has a timeout. It doubles, as the engine's files may be large.
        """
        said = ""
        while True:
            began = time.monotonic()
            try:
                return await engine.connect(attempt_s)
            except EngineDown as error:
                if time.monotonic() - began < attempt_s and str(error) != said:  # refused, and not logged yet
                    log.error("%s", error)
                self._refusals[engine.number] = said = str(error)
                attempt_s *= 2
                await asyncio.sleep(RETRY_S)
            except ValueError as error:
                if not self._has_started:
                    raise
                return log.error("the engine at %s gets no requests: %s", engine.address, error)

    async def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)
        self._connecting = []
        await close_media(self)
        for engine in self._replicas:
            await engine.close()
        self._sent.clear()
        self._router = None

    def connected(self, number: int) -> None:
        here = [e for e in self._replicas if e.is_connected]
        engine = self._replicas[number]
        if engine not in here:
            return  # lost already: `connected` is called again later
        ours = next((e for e in here if e.number != number and e.number not in self.mismatched), engine)
        self.mismatched = {e.number: problem for e in here if (problem := different_models(ours, e))}
        if problem := self.mismatched.get(number):
            if self._has_started:  # before that, _connect raises it
                log.error("%s; the engine at %s gets no requests", problem, engine.address)
            return
        if engine.welcome.version != ours.welcome.version:  # during a rolling update
            log.warning("%s and %s: what they answer may differ", _version(ours), _version(engine))
        self._welcome = holds_for_all([e.welcome for e in here if e.number not in self.mismatched])
        self._tokenizer = engine._tokenizer
        if self._router is None:
            self._router = self._new_router()
        self._router.set_capacity(number, engine.welcome.cache.num_gpu_blocks if engine.welcome.cache else DEFAULT_NUM_BLOCKS)
        self._looked = 0.0
        if engine.unloaded_meanwhile:
            self._unloading = asyncio.ensure_future(unload_late(engine))
        for each in self._replicas:
            each.send_lost()

    def _serving(self, but: int = -1) -> list[Replica]:
        """Engines that have all adapters and may get requests. but: without this one."""
        return serving([e for e in self._replicas if e.number != but], self.mismatched)

    def adapters_beside(self, number: int) -> dict[str, AdapterInfo] | None:
        return adapters_of(self._serving(number))

    def restored(self, number: int) -> None:
        self._looked = 0.0

    def _new_router(self) -> Router:
        caches = [e.welcome.cache for e in self._replicas if e._welcome is not None and e.welcome.cache is not None]
        size = max((cache.block_size for cache in caches), default=DEFAULT_BLOCK_SIZE)
        largest = max((cache.num_gpu_blocks for cache in caches), default=DEFAULT_NUM_BLOCKS)
        most = min(INDEX_FACTOR * largest * len(self._replicas), MAX_INDEX_BLOCKS)
        return Router(len(self._replicas), self._policy, block_size=size, max_blocks=most)

    def stopped(self, number: int) -> None:
        for request_id, sent in list(self._sent.items()):
            # prompt_logprobs arrive before the first token, and would arrive twice
            if sent.engine == number and sent.choice is not None and not sent.request.task.has_early_results:
                self.send_elsewhere(number, request_id)

    def lost(self, number: int) -> None:
        for request_id in [i for i, sent in self._sent.items() if sent.engine == number]:
            del self._sent[request_id]
        self._places.lost(number)
        if self._router is not None:
            self._router.lost(number)
        self._counts.pop(number, None)
        self._looked = 0.0

    def _look(self, router: Router) -> None:
        """Make healthy engines available to the router; if none is, those that are connected."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self._well = well = [engine.health() is None for engine in self._replicas]
        if not any(well):
            well = [engine.is_connected and engine.number not in self.mismatched for engine in self._replicas]
        restoring = {engine.number for engine in self._replicas if engine.is_restoring}
        others = any(is_well and number not in restoring for number, is_well in enumerate(well))
        for engine, is_available in enumerate(well):
            router.set_available(engine, is_available and not (others and engine in restoring))

    # --------------------------------------------------------------------------------------------------------- state
    @property
    def engines(self) -> Sequence[AsyncClient]:
        return self._replicas

    @property
    def files(self) -> Mapping[str, bytes]:
        return next((engine.files for engine in self._replicas if engine.is_connected), {})

    @property
    def is_connected(self) -> bool:
        return any(engine.is_connected for engine in self._replicas)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """Those that every engine has which gets requests."""
        known = [engine.adapters for engine in self._serving() or self._replicas if engine.is_connected]
        return {name: info for name, info in known[0].items() if all(name in other for other in known[1:])} if known else {}

    @property
    def num_requests(self) -> int:
        return sum(engine.num_requests for engine in self._replicas)

    def health(self) -> str | None:
        problems = [engine.health() for engine in self._replicas]
        return None if None in problems else problems[0]

    def add_up(self, number: int, heartbeat: Heartbeat) -> None:
        """Combine the engines' Heartbeats: this one, with the sequences of all engines."""
        if self._well[number] != (self._replicas[number].health() is None):
            self._looked = 0.0
        self._places.told(number, heartbeat.adapters)
        self._counts[number] = heartbeat.num_running, heartbeat.num_waiting
        running, waiting = map(sum, zip(*self._counts.values(), strict=True))
        self.heartbeat, self.heartbeat_time = (
            msgspec.structs.replace(heartbeat, num_running=running, num_waiting=waiting),
            time.monotonic(),
        )

    # ------------------------------------------------------------------------------------------------- requests
    def _check_connected(self) -> None:
        if self._router is None:
            raise EngineDown("there is no connection to an engine")

    def _send_to_one(self, request: AddRequest, terms: Terms) -> Replica:
        if terms.tenant is not None:
            terms = msgspec.structs.replace(terms, tenant=share_of(terms.tenant, len(self._replicas)))
        return self._send(Sent(-1, None, request, terms))

    def _send(self, sent: Sent) -> Replica:
        """Send to the best engine that has not refused. Raises Overloaded or EngineDown if there is none; InvalidRequest."""
        request_id, task, salt = sent.request.id, sent.request.task, sent.request.cache_salt.encode(errors="replace")
        name = sent.adapter
        router, candidates = self._router, task.candidates
        is_refused = bool(sent.refused)
        assert router is not None
        ids = routing_ids(sent.request.inputs)
        self._look(router)
        only = self._searches.get(candidates.search) if candidates is not None else None
        while choice := router.send(
            ids,
            salt,
            name.encode(errors="replace"),
            num_rows=task.num_sequences,
            may_hit=task.may_hit,
            refused=sent.refused,
            only=only,
            more=self._places.swaps(name),
        ):
            sent.engine, sent.choice = choice.engine, choice
            self._sent[request_id] = sent  # before sending, which may find that the engine is lost
            self._places.sent(choice.engine, name)
            engine = self._replicas[choice.engine]
            try:
                engine.send(sent.request, sent.terms)
            except (Overloaded, EngineDown) as error:
                is_refused |= isinstance(error, Overloaded)
                sent.refused.add(choice.engine)
                self.refused(request_id)
                continue
            except BaseException:  # the request's own error
                self.refused(request_id)
                raise
            if candidates is not None:
                self._pin(candidates.search, choice.engine)
            return engine
        if is_refused:
            raise Overloaded("no engine takes requests as fast as they come: try again later")
        raise EngineDown("there is no connection to an engine")

    def _pin(self, search: int, engine: int) -> None:
        self._searches[search] = engine
        self._searches.move_to_end(search)
        while len(self._searches) > MAX_SEARCHES:
            self._searches.popitem(last=False)

    def send_elsewhere(self, number: int, request_id: int) -> bool:
        engine = self._replicas[number]
        sent = self._sent.get(request_id)
        if sent is None or sent.choice is None or (state := engine._dispatcher.release(request_id)) is None:
            return False
        self.refused(request_id)
        sent.refused.add(number)
        try:
            other = self._send(sent)
        except ClientError:
            engine._dispatcher.add(state)  # it will report the refusal
            return False
        other._dispatcher.add(state)
        return True

    def send_again(self, state: RequestState | PooledState, request: AddRequest) -> None:
        if self._router is None:
            raise EngineDown("there is no connection to an engine")
        self._send_to_one(request, state.terms)._dispatcher.add(state)
        if state.seed is not None:
            self.computed(state.id)  # no engine will tell: its first token has come from another

    def computed(self, request_id: int) -> None:
        sent = self._sent.get(request_id)
        if sent is not None and sent.choice is not None and self._router is not None:
            self._router.computed(sent.engine, sent.choice.num_uncached)
            sent.choice = None

    def refused(self, request_id: int) -> None:
        sent = self._sent.get(request_id)
        if sent is None or sent.choice is None:  # it has run in part
            self.ended(request_id)
        elif self._router is not None:
            del self._sent[request_id]
            self._places.ended(sent.engine, sent.adapter)
            self._router.refused(sent.choice, sent.request.task.num_sequences)

    def ended(self, request_id: int) -> None:
        self.computed(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is not None and self._router is not None:
            self._places.ended(sent.engine, sent.adapter)
            self._router.ended(sent.engine, sent.request.task.num_sequences)

    def _cancel(self, request_id: int) -> None:
        if (sent := self._sent.get(request_id)) is not None:
            return self._replicas[sent.engine]._cancel(request_id)
        for engine in self._replicas:
            engine._lost.abort(request_id)
        return None

    def expire(self, now: float) -> None:
        for engine in self._replicas:
            engine.expire(now)

    def abort(self, request: str | int) -> None:
        for engine in self._replicas:
            engine.abort(request)

    def abort_all(self) -> None:
        for engine in self._replicas:
            engine.abort_all()

    def hold(self) -> None:
        for engine in self._replicas:
            engine.hold()

    async def utility(self, call: UtilityCall, kind: type[A]) -> A:
        """Call all connected engines and merge their answers. Raises the first error, when all have answered."""
        there = [engine for engine in self._replicas if engine.is_connected]
        if not there:
            raise EngineDown("there is no connection to an engine")
        answers = await asyncio.gather(*(engine.utility(call, kind) for engine in there), return_exceptions=True)
        if failures := failures_of(call, there, answers):
            if isinstance(call, LoadFolder):
                await undo_load(call, there, answers)
            engine, failure = failures[0]
            raise failure if len(there) == 1 else type(failure)(f"{failure} (the engine at {engine.address})")
        remember(call, self._away())  # for those that connect while others follow
        await follow(call, answers, [engine for engine in self._replicas if engine.is_connected and engine not in there])
        remember(call, self._away())  # for those that are lost meanwhile
        return cast(A, together([answer for answer in answers if not isinstance(answer, BaseException)]))

    def _away(self) -> list[Replica]:
        return [engine for engine in self._replicas if not engine.is_connected]

    def check(self) -> None:
        """Assert that our requests are those of the engines' clients, and that the router counts no work without requests."""
        running = {i: engine.number for engine in self._replicas for i in engine._dispatcher.requests}
        assert {i: sent.engine for i, sent in self._sent.items()} == running
        if not running and self._router is not None:
            assert not any(self._router.work), self._router.work
            self._places.check()
