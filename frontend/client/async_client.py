"""AsyncClient: requests to an engine core from asyncio, directly over its socket, with text as input and output.

It checks and numbers requests, passes arriving messages to their `Stream`s (dispatch.py, stream.py) and keeps the latest
Heartbeat. When the core is lost, the link reconnects, and running requests go on when a core is back (resend.py). All methods
must be called in the event loop's thread.

    async with AsyncClient("ipc:///run/quire.sock") as client:
        async for output in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from quire.frontend.client.client import Client
from quire.frontend.client.dispatch import Dispatcher
from quire.frontend.client.media import TensorSender
from quire.frontend.client.media_data import close_media
from quire.frontend.client.pooling import PooledState
from quire.frontend.client.resend import HOLD_S, LostRequests, model_of
from quire.frontend.client.stream import DeadlineExceeded, EngineDown, InvalidRequest, Overloaded, RequestState, error_of
from quire.frontend.client.terms import Terms
from quire.frontend.client.utility_calls import A, UtilityCalls
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.adapters import AdapterInfo
from quire.ipc.links.curve import FrontendKeys
from quire.ipc.links.frontend_to_core import SHUTTING_DOWN, FrontendToCore, LinkBusy, LinkDown
from quire.ipc.messages.frontend import (
    AdaptersChanged,
    AddRequest,
    CoreMessage,
    FrontendMessage,
    Heartbeat,
    Pooled,
    PromptLogprobs,
    RequestError,
    StepOutputs,
    UtilityResult,
    Welcome,
)
from quire.ipc.messages.media import MediaWanted
from quire.ipc.messages.utilities import AdaptersRestored, RestoreAdapters, UtilityCall
from quire.ipc.process.cpus import cpu_share
from quire.ipc.sampling import SamplingParams

HEARTBEAT_TIMEOUT_S = 2.0
LATE_S = 1.0  # after a request's deadline, until we no longer wait for the engine to end it
WATCH_S = 2e-2  # how long to poll for the first answer to a lone request
FEW_CORES = 4  # with at most this many, only the engine's processes spin


class AsyncClient(Client):
    """One connection to a core. `async with AsyncClient(address)`, or `connect` and `close`."""

    def __init__(self, address: str, keys: FrontendKeys | None = None, hold_s: float = HOLD_S) -> None:
        """hold_s: how long running requests wait for a core after theirs was lost; 0: where none will be started again."""
        super().__init__(address)
        self._keys = keys
        self._hold_s = hold_s
        self._link: FrontendToCore | None = None
        self._connecting = asyncio.Lock()
        self._num_closed = 0
        self._digests: dict[str, str] = {}  # of the files that the tokenizer was made from
        self._broken: str | None = None  # why the core's files cannot be used
        self._may_spin = False
        self.is_restoring = False  # it was told of adapters that it should have, and has not answered yet
        self._dispatcher = Dispatcher(self._enqueue)
        self._lost = LostRequests()
        self._utilities = UtilityCalls()
        self._tensors = TensorSender(self._dispatcher.requests)
        self._unsent: deque[FrontendMessage] = deque()  # Abort and Finish that found the link busy

    async def connect(self, timeout_s: float | None = 30.0) -> None:
        """Connect and fetch the files. Raises EngineDown if no core answers in time, ValueError if its tokenizer is unreadable.

        Does nothing if the client is connected already, or reconnecting. Concurrent callers share one connection.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._connecting.acquire()
        except TimeoutError:
            raise EngineDown(f"the client has been connecting to {self.address} for {timeout_s:g} s") from None
        try:
            if self._link is None:
                await self._connect(timeout_s)
        finally:
            self._connecting.release()

    async def _connect(self, timeout_s: float | None) -> None:
        num_closed = self._num_closed
        try:
            link = await FrontendToCore.connect(
                self.address,
                on_message=self._on_message,
                on_lost=self._on_lost,
                on_connected=self._on_connected,
                keys=self._keys,
                timeout_s=timeout_s,
            )
        except LinkDown as error:
            raise EngineDown(str(error)) from error
        if self._num_closed != num_closed:
            await link.close()
            raise EngineDown("the client was closed")
        self._link = link
        assert link.welcome is not None
        self._on_connected(link.welcome)  # the first call came before we had the link
        if self._broken is not None:
            await self.close()
            raise ValueError(self._broken)

    async def close(self) -> None:
        self._num_closed += 1
        await close_media(self)
        link, self._link = self._link, None
        if link is not None:
            await link.close()
            self._dispatcher.fail_all(EngineDown("the client was closed"))
            self._lost.fail_after(0.0, EngineDown("the client was closed"))
            self._utilities.fail_all(EngineDown("the client was closed"))

    # --------------------------------------------------------------------------------------------------------- state
    @property
    def engines(self) -> "Sequence[AsyncClient]":
        return (self,)

    @property
    def files(self) -> Mapping[str, bytes]:
        return self._link.files if self._link is not None else {}

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.connected

    @property
    def refusal(self) -> str | None:
        return None if self._link is None or self.is_connected else self._link.refusal

    @property
    def num_requests(self) -> int:
        return len(self._dispatcher.requests) + len(self._lost)

    def health(self) -> str | None:
        if not self.is_connected:
            return "there is no connection to the engine"
        if self._broken is not None:
            return "the engine's tokenizer cannot be read"
        if time.monotonic() - self.heartbeat_time > HEARTBEAT_TIMEOUT_S:
            return "the engine does not answer"
        if self.heartbeat is not None and not self.heartbeat.ready:
            return "the engine's workers are starting"
        if self.heartbeat is not None and self.heartbeat.oldest_step_s > self.welcome.step_timeout_s:
            return "the engine is stuck in a step"
        return None

    # ------------------------------------------------------------------------------------------------- requests
    def _check_connected(self) -> None:
        self._connected_link()

    def _send_to_one(self, request: AddRequest, terms: Terms) -> Self:
        self.send(request, terms)
        return self

    def take_up(self, state: RequestState | PooledState, is_alone: bool) -> None:
        self._dispatcher.add(state)
        if is_alone and self._may_spin and self._link is not None:
            self._link.watch(WATCH_S)

    def abort_sent(self, request_id: int, params: SamplingParams) -> None:
        self._dispatcher.abort_sent(request_id, params)

    def _cancel(self, request_id: int) -> None:
        self._lost.abort(request_id)
        self._dispatcher.cancel(request_id)

    def _connected_link(self) -> FrontendToCore:
        link = self._link
        if link is None or not link.connected or self._broken is not None:
            raise EngineDown(self._broken or "there is no connection to the engine")
        return link

    def send(self, request: AddRequest, terms: Terms) -> None:
        """Send a checked request, whatever its epoch. Raises Overloaded, EngineDown, DeadlineExceeded; InvalidRequest if it
        cannot be encoded."""
        link, timeout_s = self._connected_link(), terms.timeout_s()
        try:
            link.send(
                msgspec.structs.replace(
                    request, epoch=link.epoch, tenant=terms.tenant, timeout_s=timeout_s, is_bounded=terms.is_bounded
                )
            )
        except LinkBusy as error:
            raise Overloaded("the engine does not take requests as fast as they come: try again later") from error
        except LinkDown as error:
            raise EngineDown("there is no connection to the engine") from error
        except UnicodeEncodeError as error:
            raise InvalidRequest("a string of the request is not valid Unicode") from error
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def expire(self, now: float) -> None:
        for state in [s for s in self._dispatcher.requests.values() if s.deadline + LATE_S <= now]:
            self._dispatcher.fail(state.id, DeadlineExceeded("the request's timeout has passed"))
            self._dispatcher.abort_sent(state.id, state.params if isinstance(state, RequestState) else None)
        self._lost.expire(now)

    def abort(self, request: str | int) -> None:
        for state in [s for s in (*self._lost, *self._dispatcher.requests.values()) if request in (s.name, s.id)]:
            self._cancel(state.id)

    def abort_all(self) -> None:
        for state in [*self._lost, *self._dispatcher.requests.values()]:
            self._cancel(state.id)

    def hold(self) -> None:
        if self._link is not None:
            self._link.hold()

    async def utility(self, call: UtilityCall, kind: type[A]) -> A:
        return await self._utilities.call(self._link, call, kind)

    # ------------------------------------------------------------------------------------------------- to and from the core
    def _enqueue(self, message: FrontendMessage) -> None:
        """Send an Abort or a Finish, which must not be lost: later, if the link is busy; never, if the core is lost."""
        if self._link is not None:
            self._link.hold()  # when a request with a thousand prompts ends, it sends as many
        self._unsent.append(message)
        self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent and self._link is not None:
                self._link.send(self._unsent[0])
                self._unsent.popleft()
        except LinkBusy:
            pass  # tried again with the next Heartbeat
        except LinkDown:
            self._unsent.clear()  # a lost core has dropped our requests itself

    def _on_connected(self, welcome: Welcome) -> None:
        if self._link is not None:  # the first time, `connect` calls again
            self._take_welcome(welcome)
            self.send_lost()

    def _take_welcome(self, welcome: Welcome) -> None:
        self._restore_adapters(welcome)
        self._welcome = welcome
        self._may_spin = welcome.spins and cpu_share() > FEW_CORES
        self._dispatcher.begin(welcome.epoch, welcome.eos_token_ids)
        self.heartbeat, self.heartbeat_time = None, time.monotonic()
        digests = {file.name: file.digest for file in welcome.files}
        if digests == self._digests:
            return
        self._digests, self._broken = digests, None
        try:
            self._tokenizer = self._read_tokenizer(digests) if "tokenizer.json" in digests else None
        except ValueError as error:
            self._broken = f"the engine's tokenizer cannot be read: {error}"

    def _restore_adapters(self, welcome: Welcome) -> None:
        """The core is another one: tell it of the adapters that it should have. Where they differ, the later load wins.
        Requests may name them at once: the core lets these wait. If it is lost again meanwhile, its successor is told."""
        known, wanted = {info.name: info for info in welcome.adapters}, self._wanted_adapters(welcome)
        lacking = {n: i for n, i in wanted.items() if n not in known or known[n].loaded_at < i.loaded_at}
        self._adapters, self.is_restoring = known | lacking, bool(lacking)
        if lacking:
            call = self._utilities.call(self._link, RestoreAdapters(list(lacking.values())), AdaptersRestored)
            asyncio.ensure_future(call).add_done_callback(lambda task: self._restored(task, lacking))

    def _wanted_adapters(self, welcome: Welcome) -> Mapping[str, AdapterInfo]:
        """Those of its predecessor."""
        before, has_any = self._welcome, welcome.limits.adapters is not None
        return self.adapters if has_any and before is not None and model_of(before) == model_of(welcome) else {}

    def _restored(self, task: "asyncio.Future[AdaptersRestored]", asked: Mapping[str, AdapterInfo]) -> None:
        self.is_restoring = False
        if task.cancelled() or task.exception() is not None:
            return
        for name in task.result().failed:
            if self._adapters.get(name) is asked[name]:
                del self._adapters[name]

    def _read_tokenizer(self, digests: dict[str, str]) -> Tokenizer:
        """The tokenizer of the connected core's files, which have these digests. Raises ValueError."""
        assert self._link is not None
        return Tokenizer.from_files(self._link.files)

    def _on_lost(self, reason: str) -> None:
        self.was_stopped = reason == SHUTTING_DOWN
        self._unsent.clear()
        error = EngineDown(f"the engine was lost: {reason}")
        self._utilities.fail_all(error)
        if self.welcome.replay:
            may_have_waited = self.heartbeat is not None and self.heartbeat.num_waiting > 0
            self._lost.add(self._dispatcher.release_all(), self.welcome, may_have_waited)
        else:
            self._dispatcher.fail_all(error)
        self._after_loss()
        self._lost.fail_after(0.0 if self.was_stopped else self._hold_s, error)

    def _after_loss(self) -> None:
        """For one of several engines: the requests have failed, or others may go on with them now."""

    def send_lost(self) -> None:
        """Send the requests of a lost core to the one that is connected now, if there is one."""
        if self._lost and self.is_connected and self._broken is None:
            self.hold()
            self._lost.send(self.welcome, self._send_again)

    def _send_again(self, state: RequestState | PooledState, request: AddRequest) -> None:
        """Raises ClientError if no engine takes the request now."""
        self.send(request, state.terms)
        self._dispatcher.add(state)

    def _pooled(self, message: Pooled) -> None:
        self._dispatcher.pooled(message)

    def _on_message(self, message: CoreMessage) -> None:
        match message:
            case StepOutputs():
                self._dispatcher.outputs(message)
            case Heartbeat():
                self.heartbeat, self.heartbeat_time = message, time.monotonic()
                self._send_unsent()
                self.send_lost()
                self._dispatcher.forget_long_dropped()
            case AdaptersChanged():
                for name in message.removed:
                    self.adapters.pop(name, None)
                self._adapters |= {info.name: info for info in message.added}
            case PromptLogprobs():
                self._dispatcher.prompt_logprobs(message)
            case Pooled():
                self._pooled(message)
            case RequestError():
                self._dispatcher.fail(message.id, error_of(message))
            case UtilityResult():
                self._utilities.answered(message)
            case MediaWanted() if self._link is not None:
                self._tensors.wanted(message, self._link)
