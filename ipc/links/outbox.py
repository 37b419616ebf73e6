"""Outbox: messages that a slow frontend has not taken yet, in order, with the tokens of several steps merged into one.

Owned by the CoreToFrontends, one per `FrontendConnection`. It counts its own bytes and those of all outboxes. The link drops a
frontend with an outbox beyond its bound, and the frontend with the fullest outbox if all together exceed theirs.
"""

from collections import deque

import msgspec

from quire.ipc.messages.frontend import CoreMessage, Finished, Started, StepOutputs, TokenLogprobs

_ITEM_BYTES = 64  # rough size of a Finished or Started
_LOGPROBS_BYTES = 64


class PendingOutputs:
    """StepOutputs that still grow; they become a message when the socket has room."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.keys = bytearray()
        self.tokens = bytearray()
        self.finished: list[Finished] = []
        self.started: list[Started] = []
        self.logprobs: list[TokenLogprobs] = []
        self.drafts = bytearray()

    def merge(self, outputs: StepOutputs) -> None:
        self.keys += outputs.keys
        self.tokens += outputs.tokens
        self.finished += outputs.finished
        self.started += outputs.started
        self.logprobs += outputs.logprobs
        self.drafts += outputs.drafts

    def message(self, seq: int) -> StepOutputs:
        keys, tokens, drafts = bytes(self.keys), bytes(self.tokens), bytes(self.drafts)
        return StepOutputs(self.epoch, seq, keys, tokens, self.finished, self.started, self.logprobs, drafts)


class Total:
    """Bytes in all outboxes of a link."""

    num_bytes = 0


class Outbox:
    """A queue of messages in sending order; adjacent StepOutputs are one entry."""

    def __init__(self, total: Total) -> None:
        self._entries: deque[tuple[int, PendingOutputs | bytes]] = deque()  # (weight, merged outputs or an encoded message)
        self._total = total
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, message: CoreMessage, encoder: msgspec.msgpack.Encoder) -> None:
        if not isinstance(message, StepOutputs):
            self._push(encoder.encode(message))
            return
        weight = _weight(message)
        last = self._entries[-1][1] if self._entries else None
        if isinstance(last, PendingOutputs):
            last.merge(message)
            self._entries[-1] = (self._entries[-1][0] + weight, last)
        else:
            pending = PendingOutputs(message.epoch)
            pending.merge(message)
            self._entries.append((weight, pending))
        self._count(weight)

    def _push(self, encoded: bytes) -> None:
        self._entries.append((len(encoded), encoded))
        self._count(len(encoded))

    def first(self) -> PendingOutputs | bytes:
        return self._entries[0][1]

    def pop(self) -> None:
        weight, _ = self._entries.popleft()
        self._count(-weight)

    def clear(self) -> None:
        """Drop all messages: the frontend is lost."""
        self._entries.clear()
        self._count(-self.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._total.num_bytes += num_bytes

    def check(self) -> None:
        """Assert that num_bytes is the sum of the entries' bytes."""
        assert self.num_bytes == sum(weight for weight, _ in self._entries)


def _weight(m: StepOutputs) -> int:
    logprobs = sum(_LOGPROBS_BYTES + len(x.top_ids) + len(x.top_logprobs) for x in m.logprobs)
    return len(m.keys) + len(m.tokens) + len(m.drafts) + _ITEM_BYTES * (1 + len(m.finished) + len(m.started)) + logprobs


class FrontendConnection:
    """One connection: its identity, the time of its last message, and its outbox."""

    __slots__ = ("files", "heard_at", "identity", "next_seq", "outbox", "welcomed")

    def __init__(self, identity: bytes, now: float, total: Total) -> None:
        self.identity = identity
        self.heard_at = now
        self.next_seq = 0
        self.outbox = Outbox(total)
        self.files: set[str] = set()  # names of files that were sent
        self.welcomed = False
