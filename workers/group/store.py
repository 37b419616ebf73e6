"""ChannelStore: where the ranks of a model meet. Keys and values that the core keeps (enginecore/group_store.py) travel on the
worker channel, which nobody but the core's own workers can reach: there is no port for strangers to come to.
"""

import threading
from datetime import timedelta

from torch._C._distributed_c10d import Store

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.group import StoreRequest, StoreValue

LOOK_S = 1.0


class ChannelStore(Store):
    """torch.distributed's rendezvous over a worker's channel to the core. Of the thread that made it: the channel is its own.

    What is not there yet is waited for without a limit: the core sees who dies, and how long a start takes.
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
