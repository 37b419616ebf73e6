"""ChannelStore: where the ranks of a model meet. The core keeps its keys and values (enginecore/group_store.py). They travel on
the worker channel, which only the core's own workers can reach: no port is open to strangers.
"""

import threading
from datetime import timedelta

from torch._C._distributed_c10d import Store

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.group import StoreRequest, StoreValue

LOOK_S = 1.0


class ChannelStore(Store):
    """torch.distributed's rendezvous over a worker's channel to the core. Only the thread that made it may use it.

    Waits for missing keys have no limit: the core notices ranks that die, and starts that take too long.
    """

    def __init__(self, link: WorkerToCore, rank: int) -> None:
        super().__init__()
        self._link, self._rank = link, rank
        self._thread = threading.get_ident()

    def set(self, key: str, value: bytes | str) -> None:
        self._send("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount).encode()))

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("check", key) == b"1" for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._ask("get", key)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def clone(self) -> "ChannelStore":
        return self

    def _ask(self, operation: str, key: str, value: bytes = b"") -> bytes:
        self._send(operation, key, value)
        while (answer := self._link.receive(LOOK_S)) is None:
            pass
        if not isinstance(answer, StoreValue):
            raise RuntimeError(f"the core sent {type(answer).__name__} where a value of the store was due")
        return answer.value

    def _send(self, operation: str, key: str, value: bytes) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"another thread than the worker's asks for {key}")
        self._link.send(StoreRequest(self._rank, operation, key, value))  # type: ignore[arg-type]
