"""GroupStore: the keys and values by which one generation's ranks find each other (torch.distributed's rendezvous).

Kept by WorkerGroup, which passes on the requests that come on the worker channel. Each generation has a store of its own, so
that no rank finds values of an earlier generation.
"""

from collections.abc import Callable

from quire.ipc.messages.group import StoreRequest, StoreValue


class GroupStore:
    """`send(rank, answer)` sends an answer to a rank."""

    def __init__(self, send: Callable[[int, StoreValue], object]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[int]] = {}  # ranks, by the key that they wait for

    def handle(self, request: StoreRequest) -> None:
        """Do what a rank asks. Raises ValueError for `add` to a value that is not a number."""
        key = request.key
        match request.operation:
            case "set":
                self._set(key, request.value)
            case "get" if key not in self._values:
                self._waiting.setdefault(key, []).append(request.rank)
            case "get":
                self._send(request.rank, StoreValue(self._values[key]))
            case "add":
                total = str(int(self._values.get(key, b"0")) + int(request.value)).encode()
                self._set(key, total)
                self._send(request.rank, StoreValue(total))
            case "check":
                self._send(request.rank, StoreValue(b"1" if key in self._values else b"0"))

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for rank in self._waiting.pop(key, []):
            self._send(rank, StoreValue(value))
