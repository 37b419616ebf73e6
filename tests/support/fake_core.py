"""A core without an engine, in a thread, for tests of frontends: its sequences return a script's tokens, one per turn.

`FakeCore(script=...)` simulates a whole engine: eos and stop tokens, max_tokens, abort. Without a script it only records
messages (`next`) and sends what the test asks for (`say`). Every method may be called from any thread.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import toy_tokenizers
import zmq
from deadlines import DEADLINE_S

from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.welcome import file_infos, new_epoch
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    CoreMessage,
    EngineLimits,
    Finish,
    Finished,
    FinishReason,
    FrontendMessage,
    Heartbeat,
    ShuttingDown,
    Started,
    StepOutputs,
    Welcome,
    sequence_key,
)
from quire.ipc.messages.stats import CacheInfo

TIMEOUT_S = DEADLINE_S
LIMITS = EngineLimits(max_model_len=64, vocab_size=400, max_num_seqs=4, max_logprobs=20)

Script = Callable[[AddRequest, int], list[int] | None]  # a request and a child's index -> its tokens; None: it never starts
M = TypeVar("M", bound=FrontendMessage)


def outputs(
    tokens: list[tuple[int, int]], finished: dict[int, FinishReason] | None = None, *, epoch: int = 1, **more: object
) -> StepOutputs:
    """A StepOutputs from (key, token) pairs. `stops`: key -> the token that ended it."""
    stops = more.pop("stops", {})
    keys, ids = np.array([k for k, _ in tokens], "<i8"), np.array([t for _, t in tokens], "<i4")
    ends = [Finished(k, reason, stops.get(k)) for k, reason in (finished or {}).items()]
    return StepOutputs(epoch, 0, keys.tobytes(), ids.tobytes(), ends, **more)


class FakeCore:
    """Runs from its making until `stop` or the end of a `with`."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        files: dict[str, bytes] | None = None,
        limits: EngineLimits = LIMITS,
        eos: tuple[int, ...] = (),
        address: str | None = None,
        spins: bool = False,
        name: str = "toy",
        cache: CacheInfo | None = None,
        model: str = "",
        **more: Any,
    ) -> None:
        """more: fields of its Welcome."""
        self.epoch = new_epoch()
        self.heartbeat = Heartbeat(self.epoch, 0.0, 0, 0, 0.0, 0, 0, 0, 0, 0, True)
        self._files = toy_tokenizers.files() if files is None else files
        infos = file_infos(self._files)
        welcome = Welcome(self.epoch, PROTOCOL_VERSION, [name], limits, infos, list(eos), "0", 1, 60.0, spins, cache, model)
        welcome = msgspec.structs.replace(welcome, **more)
        self._limits, self._eos, self._script = limits, eos, script
        self._link = CoreToFrontends(address, epoch=self.epoch, welcome=welcome, files=self._files)
        self.address = self._link.address
        self._received: queue.Queue[FrontendMessage] = queue.Queue()
        self._todo: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._running = True
        self._owner = b""
        self._unsaid: deque[CoreMessage] = deque()
        self._playing: dict[int, tuple[AddRequest, deque[int]]] = {}
        self._started: list[Started] = []
        self._thread = threading.Thread(target=self._run, name="test-core", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------- for the test
    def next(self, kind: type[M]) -> M:
        """The next message from a frontend, which must be of this kind."""
        message = self._received.get(timeout=TIMEOUT_S)
        assert isinstance(message, kind), message
        return message

    def say(self, *messages: CoreMessage) -> None:
        """Send messages to the frontend that has spoken last, or to the first that does."""
        self._do(lambda: self._unsaid.extend(messages))

    def announce(self, **fields: object) -> None:
        """Change the Heartbeat, and send it now."""
        self.heartbeat = Heartbeat(**{**{n: getattr(self.heartbeat, n) for n in Heartbeat.__struct_fields__}, **fields})
        self._do(lambda: self._link.broadcast(self.heartbeat))

    def say_that_it_stops(self) -> None:
        self._do(lambda: self._link.broadcast(ShuttingDown(self.epoch)))

    def stop(self) -> None:
        """Go without a word. May be called again."""
        if not self._thread.is_alive():
            return
        self._do(lambda: setattr(self, "_running", False))
        self._thread.join()
        os.close(self._wake_fd)  # here: who plays may be gone before `_do` has woken him

    def _do(self, job: Callable[[], object]) -> None:
        self._todo.append(job)
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------------------------------------- in the thread
    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (*self._link.sockets(), self._wake_fd):
            poller.register(source, zmq.POLLIN)
        next_heartbeat = 0.0
        while self._running:
            for source, _ in poller.poll(0 if self._playing else 100):
                if source == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
            while self._todo:
                self._todo.popleft()()
            for identity, message in self._link.receive():
                self._owner = identity
                self._received.put(message)
                self._take(message)
            while self._unsaid and self._owner:
                self._link.send(self._owner, self._unsaid.popleft())
            self._play()
            self._link.flush()
            if time.monotonic() >= next_heartbeat:
                next_heartbeat = time.monotonic() + 0.5
                self._link.broadcast(self.heartbeat)
            if self._link.lost():
                self._playing.clear()
        self._link.close(linger_s=0.0)

    def _take(self, message: FrontendMessage) -> None:
        match message:
            case AddRequest() if self._script is not None:
                resume = message.task.resume
                for child in range(message.task.params.n):
                    key, tokens = sequence_key(message.id, child), self._script(message, child)
                    before = b"" if resume is None else resume.outputs[child]
                    if tokens is not None and before is not None:
                        self._playing[key] = (message, deque(tokens[len(before) // 4 :]))
                        if not before:
                            self._started.append(Started(key, 0, 0.0, message.task.params.seed or 0))
            case Abort():
                for key in [k for k in self._playing if k >> 8 in message.ids]:
                    del self._playing[key]
            case Finish():
                self._playing.pop(message.key, None)

    def _play(self) -> None:
        """One step: a token of each sequence that plays."""
        if not self._playing:
            return
        tokens, finished, stops = [], {}, {}
        for key, (request, left) in self._playing.items():
            token = left.popleft()
            tokens.append((key, token))
            if self._is_stop(request, token):
                finished[key], stops[key] = "stop", token
            elif not left:
                finished[key] = "length"
        for key in finished:
            del self._playing[key]
        started, self._started = self._started, []
        self._link.send(self._owner, outputs(tokens, finished, stops=stops, epoch=self.epoch, started=started))

    def _is_stop(self, request: AddRequest, token: int) -> bool:
        p = request.task.params
        return token in (p.stop_token_ids or ()) or (token in self._eos and not p.ignore_eos)


def prompt_of(request: AddRequest) -> list[int]:
    return np.frombuffer(request.inputs.token_ids, "<i4").tolist()


def echo(request: AddRequest, child: int) -> list[int]:
    """A script: the prompt again and again, to max_tokens or to the end of the context."""
    prompt = prompt_of(request)
    count = request.task.params.max_tokens or LIMITS.max_model_len - len(prompt)
    return [prompt[i % len(prompt)] for i in range(count)]
