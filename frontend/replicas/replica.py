"""Replica: the client of one of several engines; it reports the progress of requests to its owner (replicas.py)."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.pooling import PooledState
from quire.frontend.client.resend import HOLD_S, model_of
from quire.frontend.client.stream import RequestState
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.adapters import AdapterInfo
from quire.ipc.links.curve import FrontendKeys
from quire.ipc.links.frontend_to_core import SHUTTING_DOWN
from quire.ipc.messages.frontend import (
    Abort,
    AddRequest,
    CoreMessage,
    Finish,
    FrontendMessage,
    Heartbeat,
    Pooled,
    RequestError,
    StepOutputs,
    Welcome,
)
from quire.ipc.messages.utilities import AdaptersRestored

FULL = ("overloaded", "rate_limited", "unavailable")  # codes of an engine that cannot take a request which another might


class Owner(Protocol):
    """mismatched: by number, engines that serve another model than the others, and why they get no requests."""

    mismatched: dict[int, str]

    @property
    def engines(self) -> Sequence[AsyncClient]: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def welcome(self) -> Welcome: ...

    def hold(self) -> None: ...

    def connected(self, number: int) -> None:
        """An engine has connected or reconnected, with an empty cache, and perhaps with another model."""

    def adapters_beside(self, number: int) -> Mapping[str, AdapterInfo] | None:
        """The adapters of the other engines; None if no other one gets requests."""

    def restored(self, number: int) -> None:
        """An engine has the adapters of the others, or cannot get them."""

    def stopped(self, number: int) -> None:
        """An engine was told to stop, and is about to be lost: it will not run requests that it has not begun."""

    def lost(self, number: int) -> None:
        """An engine is lost, with all of its requests: those that may go on (`Replica.send_lost`) have no engine now."""

    def add_up(self, number: int, heartbeat: Heartbeat) -> None: ...

    def send_elsewhere(self, number: int, request_id: int) -> bool:
        """An engine has refused a request as it is FULL. Returns whether another engine has it now."""

    def send_again(self, state: RequestState | PooledState, request: AddRequest) -> None:
        """Send a request that has lost its engine to the best engine now. Raises ClientError if none takes it."""

    def computed(self, request_id: int) -> None:
        """The request's first token has arrived."""

    def refused(self, request_id: int) -> None:
        """The request has ended with an error, usually before it ran."""

    def ended(self, request_id: int) -> None:
        """The request has ended in any way, or was not known any more."""


class Replica(AsyncClient):
    """The client of one of several engines. It reports the progress of requests to its owner."""

    def __init__(self, address: str, keys: FrontendKeys | None, number: int, owner: Owner, hold_s: float = HOLD_S) -> None:
        super().__init__(address, keys, hold_s)
        self.number = number
        self.unloaded_meanwhile: set[str] = set()  # adapters that were unloaded from the others while this engine was away
        self._owner = owner

    def health(self) -> str | None:
        return self._owner.mismatched.get(self.number) or super().health()

    def _on_message(self, message: CoreMessage) -> None:
        owner, requests = self._owner, self._dispatcher.requests
        if isinstance(message, RequestError) and message.code in FULL and owner.send_elsewhere(self.number, message.id):
            return
        super()._on_message(message)
        match message:
            case StepOutputs():
                for start in message.started:
                    owner.computed(start.key >> 8)
                for end in message.finished:
                    if end.key >> 8 not in requests:
                        owner.ended(end.key >> 8)
            case RequestError():
                owner.refused(message.id)
            case Heartbeat():
                owner.add_up(self.number, message)

    def _pooled(self, message: Pooled) -> None:
        for request_id in self._dispatcher.pooled(message):
            self._owner.ended(request_id)

    def _enqueue(self, message: FrontendMessage) -> None:
        super()._enqueue(message)
        match message:
            case Abort():
                for request_id in message.ids:
                    self._owner.ended(request_id)
            case Finish() if message.key >> 8 not in self._dispatcher.requests:
                self._owner.ended(message.key >> 8)

    def _read_tokenizer(self, digests: dict[str, str]) -> Tokenizer:
        """Share one tokenizer among engines: reading it takes memory, and blocks the event loop."""
        other = next((e for e in self._owner.engines if e is not self and e._digests == digests and e._tokenizer), None)
        return super()._read_tokenizer(digests) if other is None else other.tokenizer

    def _wanted_adapters(self, welcome: Welcome) -> Mapping[str, AdapterInfo]:
        """Those of the other engines: some may have been loaded or unloaded while this one was away."""
        others = self._owner.adapters_beside(self.number)
        if others is None:
            return super()._wanted_adapters(welcome)
        is_same = model_of(self._owner.welcome) == model_of(welcome)
        return others if is_same and welcome.limits.adapters is not None else {}

    def _restored(self, task: "asyncio.Future[AdaptersRestored]", asked: Mapping[str, AdapterInfo]) -> None:
        super()._restored(task, asked)
        self._owner.restored(self.number)

    def _on_connected(self, welcome: Welcome) -> None:
        if self._link is not None:
            self._take_welcome(welcome)
            self._owner.connected(self.number)

    def _on_lost(self, reason: str) -> None:
        if reason == SHUTTING_DOWN:
            self._owner.stopped(self.number)
        super()._on_lost(reason)

    def _after_loss(self) -> None:
        self._owner.lost(self.number)
        self.send_lost()

    def send_lost(self) -> None:
        """Send the requests that were lost with this engine to any of the engines."""
        if self._lost and self._owner.is_connected:
            self._owner.hold()
            self._lost.send(self._owner.welcome, self._send_again)

    def _send_again(self, state: RequestState | PooledState, request: AddRequest) -> None:
        self._owner.send_again(state, request)
