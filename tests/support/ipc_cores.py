"""Both ends of links for tests of ipc/: a core's loop around a link, a raw frontend, and the reports of child processes."""

import os
import select
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from deadlines import DEADLINE_S

from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.welcome import file_infos
from quire.ipc.messages.frontend import PROTOCOL_VERSION, EngineLimits, FrontendMessage, Heartbeat, Welcome

TIMEOUT_S = DEADLINE_S
FILES = {"tokenizer.json": b"{}" * 1000, "chat_template.jinja": b"{{ messages }}"}


class Reports:
    """The reading end of the children's reports."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        self._rest = b""

    def next(self, timeout_s: float = TIMEOUT_S) -> dict:
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._read_fd], [], [], timeout_s)
            assert ready, "a child has not reported in time"
            part = os.read(self._read_fd, 1 << 16)
            assert part, "the children have ended without a report"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line)

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self.fd)


def make_welcome(epoch: int, files: dict[str, bytes] = FILES) -> Welcome:
    limits = EngineLimits(max_model_len=64, vocab_size=512, max_num_seqs=4, max_logprobs=20)
    return Welcome(epoch, PROTOCOL_VERSION, ["tiny"], limits, file_infos(files), [0], "0", 1, 60.0)


def make_heartbeat(epoch: int) -> Heartbeat:
    return Heartbeat(epoch, 0.0, 0, 0, 0.0, 0, 0, 0, 0, 0, True)


class LoopingCore:
    """A core's loop around a link: `turn` until something is so. Requests and losses are kept in lists."""

    def __init__(self, address: str | None = None, epoch: int = 1, heartbeats: bool = True, **options) -> None:
        self.link = CoreToFrontends(address, epoch=epoch, welcome=make_welcome(epoch), files=FILES, **options)
        self.epoch = epoch
        self.heartbeats = heartbeats
        self.requests: list[tuple[bytes, FrontendMessage]] = []
        self.lost: list[bytes] = []
        self._poller = zmq.Poller()
        for socket in self.link.sockets():
            self._poller.register(socket, zmq.POLLIN)
        self._next_heartbeat = 0.0

    def turn(self, wait_ms: int = 50) -> list[tuple[bytes, FrontendMessage]]:
        self._poller.poll(wait_ms)
        new = self.link.receive()
        self.requests += new
        self.link.flush()
        if self.heartbeats and time.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + 0.25
            self.link.broadcast(make_heartbeat(self.epoch))
        self.lost += self.link.lost()
        self.link.check()
        return new

    def until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it has not happened in time"
            self.turn()


class CoreThread(threading.Thread):
    """A LoopingCore that runs by itself; `answer(core, identity, message)` is called for each request, in the thread."""

    def __init__(self, answer: Callable[[LoopingCore, bytes, FrontendMessage], None], *args, **options) -> None:
        super().__init__(name="test-core")
        self.core = LoopingCore(*args, **options)
        self.address = self.core.link.address
        self._answer = answer
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            for identity, message in self.core.turn(20):
                self._answer(self.core, identity, message)
        self.core.link.close(linger_s=0)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class RawFrontend:
    """A frontend by hand: a DEALER that sends and reads bytes."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.identity = identity or b"\1" + os.urandom(15)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTING_ID, self.identity)
        self.socket.connect(address)

    def send(self, message: object) -> None:
        self.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def ready(self) -> bool:
        return bool(self.socket.poll(0))

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> "RawFrontend":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
