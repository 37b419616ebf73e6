"""ItemTraffic: the messages about items' tensors: it asks frontends for them, takes what comes, and sends it to the workers.

Large items travel in pieces, as many in a turn of the core's loop as the plan ring has room for beside plans, so that no plan
waits for them. ItemBytes knows what is where. Called by requests.py.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from quire.enginecore.media.item_bytes import ItemBytes
from quire.enginecore.owners import Owners
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import ErrorCode
from quire.ipc.messages.media import MediaData, MediaGone, MediaWanted

TIMEOUT_S = 60.0  # from a question to its answer
MAX_REASON = 300  # characters of a frontend's text
PIECES_A_TURN = 4


class Failed(NamedTuple):
    """A request that cannot go on."""

    owner: int
    request_id: int
    code: ErrorCode
    text: str


class ItemTraffic:
    def __init__(self, items: ItemBytes, owners: Owners, workers: WorkerGroup, clock: Callable[[], float]):
        self._items, self._owners, self._workers, self._clock = items, owners, workers, clock
        self._look_at = 0.0
        self.is_sending = False  # there is more to send, for which the ring may have room at once

    @property
    def has_work(self) -> bool:
        return bool(self._items.questions) or len(self._items) > 0 or self._items.has_given_up

    def take(self, owner: int, message: MediaData | MediaGone) -> Iterator[Failed]:
        """An answer to a question; yields the request that it fails."""
        match message:
            case MediaData():
                if problem := self._items.take(owner, message.digest, message.tensors):
                    yield Failed(owner, message.request_id, "invalid", problem)
            case MediaGone():
                yield Failed(owner, message.request_id, "invalid", message.reason[:MAX_REASON])

    def turn(self) -> Iterable[Failed]:
        """Ask and send what can be asked and sent; returns requests with items that have not come in time."""
        self._items.drop_ended()
        self._ask()
        self._send()
        now = self._clock()
        if now < self._look_at:
            return []
        self._look_at = now + 1.0
        text = f"an item of the prompt did not come within {TIMEOUT_S:g} s"
        late = {(seq.owner, seq.request_id) for seq in self._items.overdue(now - TIMEOUT_S)}
        return [Failed(owner, request_id, "overloaded", text) for owner, request_id in late]

    def _ask(self) -> None:
        questions, self._items.questions = self._items.questions, []
        for owner, request_id, index in questions:
            self._owners.send(owner, MediaWanted(self._owners.epoch, request_id, index))

    def _send(self) -> None:
        self.is_sending = False
        if not self._workers.is_ready:
            return
        for count, piece in enumerate(self._items.pieces()):
            if count == PIECES_A_TURN or not self._workers.send_piece(piece):
                self.is_sending = True
                return
