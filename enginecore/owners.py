"""Owners: numbers the frontends for the scheduler, and sends messages to them. It has no state of requests.

A frontend's connection is an identity of 16 bytes; its sequences carry an owner's number, which fits numpy tables by slot and
is never used again. Messages for a frontend that has gone are dropped here. Called by the core's loop.
"""

from collections.abc import Iterable

from quire.ipc.adapters import AdapterInfo
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.messages.frontend import AdaptersChanged, CoreMessage, ErrorCode, RequestError


class Owners:
    def __init__(self, link: CoreToFrontends) -> None:
        self._link = link
        self._numbers: dict[bytes, int] = {}  # by identity
        self._identities: dict[int, bytes] = {}
        self._num_ever = 0

    @property
    def epoch(self) -> int:
        return self._link.epoch

    def number(self, identity: bytes) -> int:
        """The owner of this identity, a new one for a new identity."""
        owner = self._numbers.get(identity)
        if owner is None:
            self._num_ever += 1
            owner = self._numbers[identity] = self._num_ever
            self._identities[owner] = identity
        return owner

    def drop(self, identity: bytes) -> int | None:
        """Forget a frontend that has gone; its owner, or None if it never asked for anything."""
        owner = self._numbers.pop(identity, None)
        if owner is not None:
            del self._identities[owner]
        return owner

    def __contains__(self, owner: int) -> bool:
        return owner in self._identities

    def __len__(self) -> int:
        return len(self._identities)

    def send(self, owner: int, message: CoreMessage) -> None:
        """Send to a frontend, if it is still there."""
        if (identity := self._identities.get(owner)) is not None:
            self._link.send(identity, message)

    def refuse(self, owner: int, request_id: int, code: ErrorCode, text: str, retry_after_s: int = 0) -> None:
        """End a request with an error; `text` is for its user. retry_after_s: when to send it again; 0: not known."""
        self.send(owner, RequestError(self._link.epoch, request_id, code, text, retry_after_s))

    def tell_adapters(self, added: list[AdapterInfo], removed: list[str], present: Iterable[AdapterInfo]) -> None:
        """Tell all frontends that adapters were loaded or unloaded, and those that come later which are there now."""
        self._link.set_adapters(list(present))
        for identity in self._link.frontends:
            self._link.send(identity, AdaptersChanged(self._link.epoch, added, removed))
