"""Target: messages between processes. Hostile bytes on the engine's socket, which strangers may reach, and in every decoder.

The core's end of the socket is the real one, and so is its check of requests. Whatever a peer sends, each stranger is answered
in the end, and a frontend that behaves is served. Decoders raise only what their callers expect.
"""

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from core_to_frontends_cases import EPOCH, add
from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import mutated_bytes, odd_value, places, replaced
from ipc_cores import LoopingCore, RawFrontend

from quire.enginecore.intake import Intake, IntakeConfig
from quire.enginecore.kv.pool import BlockHasher
from quire.enginecore.tenants.backlog import Room
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Candidates,
    CoreMessage,
    EngineLimits,
    Finish,
    FrontendMessage,
    Generate,
    GetFile,
    Hello,
    Ping,
    Refused,
    Resume,
    Tenant,
    TokenInputs,
    Utility,
)
from quire.ipc.messages.hosts import HostCommand, HostMessage
from quire.ipc.messages.message import DECODE_ERRORS
from quire.ipc.messages.utilities import GetServerInfo, ResetPrefixCache, StartProfile
from quire.ipc.messages.workers import WorkerCommand, WorkerMessage
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs

DECODERS = [
    msgspec.msgpack.Decoder(kind)
    for kind in (FrontendMessage, CoreMessage, HostMessage, HostCommand, WorkerMessage, WorkerCommand)
]
_PROMPT = np.arange(8, dtype=np.int32).tobytes()
_PATIENCE_S = 30.0
VOCAB_SIZE = 100
_OURS = 1 << 40  # ids of the frontend that behaves


def _add(params: SamplingParams, **more: Any) -> AddRequest:
    task = Generate(params, more.pop("candidates", None), more.pop("resume", None))
    return AddRequest(EPOCH, 3, TokenInputs(_PROMPT), task, **more)


MESSAGES: list[Any] = [
    Hello(PROTOCOL_VERSION),
    Ping(EPOCH),
    GetFile(EPOCH, "tokenizer.json"),
    Abort(EPOCH, [3, 4]),
    Finish(EPOCH, 3 << 8),
    Utility(EPOCH, 1, ResetPrefixCache()),
    Utility(EPOCH, 2, GetServerInfo()),
    Utility(EPOCH, 3, StartProfile()),
    _add(SamplingParams(max_tokens=2)),
    _add(SamplingParams(max_tokens=3, n=3, seed=5, logprobs=2, prompt_logprobs=1), priority=0, cache_salt="s", timeout_s=0.5),
    _add(SamplingParams(max_tokens=2, temperature=0.0, min_tokens=1, stop_token_ids=[1, 2], allowed_token_ids=[1, 2, 3])),
    _add(SamplingParams(logit_bias={1: 2.0}, bad_words=["a"], bad_words_token_ids=[[1]], stop=["x"]), is_bounded=True),
    _add(SamplingParams(max_tokens=2), tenant=Tenant("t", "l", 2.0, 3, 4, 5.0, -1), arrival_time=1.5),
    _add(SamplingParams(max_tokens=4, n=2), resume=Resume([_PROMPT[:8], None], 7)),
    _add(SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs("regex", "a+"))),
    _add(SamplingParams(max_tokens=1), candidates=Candidates(2, 1)),
]


def seeds() -> Sequence[Case]:
    frames = [msgspec.msgpack.encode(message) for message in MESSAGES]
    together = [frames[i] for i in (0, 8, 4, 3)]
    return [*(_case([frames[0], frame]) for frame in frames), _case(together)]


def _case(frames: list[bytes]) -> Case:
    return Case({"sizes": [len(frame) for frame in frames]}, b"".join(frames))


def _frames(case: Case) -> list[bytes]:
    """The frames of a case; one that was cut has fewer bytes."""
    frames, rest = [], case.payload
    for size in case.head["sizes"]:
        frames.append(rest[:size])
        rest = rest[size:]
    return frames


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    frames = [*_frames(case), *(_frames(draw.choice(others)) if draw.random() < 0.3 else ())]
    at = draw.randrange(len(frames))
    try:
        value = msgspec.msgpack.decode(frames[at])
    except DECODE_ERRORS:
        value = None
    if value is None or draw.random() < 0.3:
        frames[at] = mutated_bytes(draw, frames[at])
    else:
        for _ in range(draw.choice([1, 1, 2, 3])):
            value = replaced(value, draw.choice(places(value)), _odd(draw))
        frames[at] = _packed(value) or mutated_bytes(draw, frames[at])
    if draw.random() < 0.1:
        frames.append(draw.randbytes(draw.choice([0, 1, 20])))
    return _case(frames)


def _odd(draw: Draw) -> Any:
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.choice([0, 3, 4, 8, 64]))
    if kind == 1:
        ids = [draw.choice([0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, -1, 2**31 - 1]) for _ in range(draw.choice([1, 5, 63, 64, 70]))]
        return np.asarray(ids, np.int32).tobytes()
    return odd_value(draw)


def _packed(value: Any) -> bytes | None:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError, TypeError):
        return None


# --------------------------------------------------------------------------------------------------------------- a case
class _Engine:
    """The core's end of its socket, what it accepts of requests, and a frontend that behaves."""

    def __init__(self) -> None:
        self.core = LoopingCore(None, epoch=EPOCH, heartbeats=False)
        limits = EngineLimits(max_model_len=64, vocab_size=VOCAB_SIZE, max_num_seqs=4, max_logprobs=20)
        self.intake = Intake(IntakeConfig(limits, (0,), True, True, 0, 100), BlockHasher(4))
        self.good = RawFrontend(self.core.link.address)
        self.good.send(Hello(PROTOCOL_VERSION))
        self.core.until(self.good.ready)
        self.good.socket.recv()
        self.next_id = _OURS

    def turn(self) -> None:
        """Take what has come, as the core's loop does."""
        for _, message in self.core.turn(1):
            if isinstance(message, AddRequest):
                self.intake.accept(1, message, Room(0, 4, 0.0, 0.0, 0.0))
        self.core.requests = self.core.requests[-10:]

    def serves(self) -> bool:
        """Whether a request of the one that behaves is taken."""
        self.next_id += 1
        self.good.send(add(self.next_id, max_tokens=1, temperature=0.0))
        self.core.until(lambda: self.core.requests and getattr(self.core.requests[-1][1], "id", 0) == self.next_id)
        return not self.good.ready()


@functools.cache
def _engine() -> _Engine:
    return _Engine()


def check(case: Case) -> None:
    frames = _frames(case)
    for frame in frames:
        for decoder in DECODERS:
            with contextlib.suppress(*DECODE_ERRORS):
                decoder.decode(frame)
    engine = _engine()
    with RawFrontend(engine.core.link.address) as stranger:
        if len(frames) > 1 and len(case.payload) % 2:
            stranger.socket.send_multipart(frames)
        else:
            for frame in frames:
                stranger.send(frame)
        stranger.send(Ping(EPOCH + 1))  # is refused, whatever came before it
        until = time.monotonic() + _PATIENCE_S
        while not _has_ended(stranger):
            must(time.monotonic() < until, "a stranger is not answered")
            engine.turn()
    must(engine.serves(), "a frontend that behaves is not served")


def _has_ended(stranger: RawFrontend) -> bool:
    """Read what the core has said, as a frontend does. Whether it was the end: a refusal for an epoch that is none."""
    while stranger.ready():
        said = DECODERS[1].decode(b"".join(stranger.socket.recv_multipart()))
        if isinstance(said, Refused) and said.reason.startswith("stale epoch"):
            return True
    return False


TARGET = Target("messages", seeds, mutate, check)
