"""Bad requests of every sort, over HTTP and over the engine's own socket, while a stream runs that must not notice.

Seeded, so that a failure can be run again. What a single bad value means is tested where it is checked; here nothing may end
the engine, be answered with a 5xx, or change another's text.
"""

import contextlib
import itertools
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from ipc_cores import RawFrontend
from serving import SMALL, Background, Served, until

from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Finish,
    Generate,
    GetFile,
    Hello,
    Refused,
    StepOutputs,
    TokenInputs,
    Welcome,
    sequence_key,
)
from quire.ipc.sampling import SamplingParams

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little dog"
STREAMED = {"max_tokens": 150, "min_tokens": 150}
VOCABULARY = 2816
HUGE = (2**31 - 1, 2**63 - 1, 2**63, 10**40)
NUMBERS: list[Any] = [*HUGE, *(-n for n in HUGE), 0, -1, 1e308, -1e308, 1e-320, 0.5, True, "1", [1], {}, None]
UNENCODABLE = (10**40, -(10**40))  # for msgpack
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))
RAW_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "1e-400", "01", "0x1")
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "best_of", "max_tokens", "min_tokens", "presence_penalty", "seed",
    "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs", "priority", "truncate_prompt_tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*SMALL, "--max-body-mib", "40") as served:
        yield served.ready()
        assert served.end() == 0
        assert "Traceback" not in served.output


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> str:
    return served.text(PROMPT, **STREAMED)


@pytest.fixture
def meanwhile(served: Served, undisturbed: str) -> Iterator[None]:
    """Around a test: streams run, one after the other, and say what they say when they are alone. Nobody dies of the test."""
    worker, enough = served.pid_of("quire.workers"), threading.Event()

    def stream() -> list[str]:
        texts = []
        while not enough.is_set():
            with served.stream(PROMPT, **STREAMED) as events:
                texts.append(events.text())
        return texts

    streams = Background(stream)
    yield
    enough.set()
    assert set(streams.result()) == {undisturbed}
    assert served.pid_of("quire.workers") == worker and served.metric("worker_restarts_total") == 0
    until(lambda: served.metric("num_requests_running") == 0 == served.metric("num_requests_waiting"))
    assert served.metric("kv_cache_usage_perc") == 0 and served.health() == 200


def complete(served: Served, body: Any) -> int:
    answer = served.ask("POST", "/v1/completions", body)
    if answer.status != 200:
        assert 400 <= answer.status < 500 and answer.error["message"], (body if len(str(body)) < 500 else "...", answer)
    return answer.status


@pytest.mark.usefixtures("meanwhile")
def test_wrong_values_over_http(served: Served) -> None:
    def body(field: str, value: Any) -> dict[str, Any]:
        return {"prompt": "a", "max_tokens": 1, field: value}

    for field, number in itertools.product(FIELDS, NUMBERS):
        complete(served, body(field, number))
    for field, number in itertools.product(FIELDS, RAW_NUMBERS):
        complete(served, json.dumps(body(field, "?")).replace('"?"', number).encode())
    wrong_ids = ([VOCABULARY], [-1], [2**31], [2**64], [1.5], ["a"], [[1]], [None], [])
    for ids in wrong_ids:
        assert complete(served, body("prompt", ids)) == (200 if ids in (["a"], [[1]]) else 400), ids
        complete(served, body("stop_token_ids", ids))
        complete(served, body("allowed_token_ids", ids))
        complete(served, body("logit_bias", {str(i): 1.0 for i in ids}))
    for value in ("", [""], ["a"] * 1000, "x" * 5000, 7, [7], [[]], {"a": 1}, "\ud800", "\x00", None):
        for field in ("prompt", "stop", "bad_words", "model", "cache_salt", "stream", "echo", "stream_options"):
            complete(served, body(field, value))
    for bias in ("NaN", "1e300", "-101", "null", '"x"'):
        assert complete(served, f'{{"prompt": "a", "logit_bias": {{"5": {bias}}}}}'.encode()) == 400


@pytest.mark.usefixtures("meanwhile")
def test_too_much_of_everything_over_http(served: Served) -> None:
    assert complete(served, {"prompt": "a", "n": 10**6}) == 400
    assert complete(served, {"prompt": [[5]] * 2000, "n": 1}) == 400
    assert complete(served, {"prompt": [[5]] * 1000, "n": 128}) == 400
    assert complete(served, {"prompt": "word " * 100_000}) == 400
    assert complete(served, {"prompt": [5] * 2048}) == 400
    assert complete(served, {"prompt": "a", "max_tokens": 10**9}) == 400
    assert complete(served, {"prompt": "a", "allowed_token_ids": [5] * 6_000_000, "max_tokens": 1}) == 400
    assert complete(served, b'{"prompt": "' + b"x" * (41 << 20) + b'"}') == 413
    assert complete(served, b"[" * 1_000_000) == 400
    assert complete(served, b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}") == 400
    chat = {"messages": [{"role": "user", "content": "a"}] * 5000}
    assert served.ask("POST", "/v1/chat/completions", chat).status == 400


@pytest.mark.usefixtures("meanwhile")
def test_random_bodies_and_random_bytes_over_http(served: Served) -> None:
    draw = random.Random(1)
    for _ in range(150):
        fields = draw.sample([*FIELDS, "prompt", "stop", "echo", "stream", "logit_bias", "ignore_eos"], 4)
        complete(served, {"prompt": "a", "max_tokens": 1, **{f: draw.choice(NUMBERS) for f in fields}})
    for _ in range(50):
        data = bytearray(json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0.5, "stop": ["x"]}).encode())
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        complete(served, bytes(data))
    for _ in range(50):
        with socket.create_connection(served.address) as connection, contextlib.suppress(OSError):
            connection.sendall(draw.randbytes(draw.randrange(1, 4000)))
            connection.sendall(b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass


# ----------------------------------------------------------------------------------------------- the engine's socket
@pytest.fixture
def peer(served: Served) -> Iterator[RawFrontend]:
    """A frontend by hand, with a connection of its own."""
    with RawFrontend(served.engine_address()) as made:
        yield made


def answer(peer: RawFrontend, kind: Any) -> Any:
    """The next message of this kind; others, like heartbeats, are passed over."""
    while peer.socket.poll(20_000):
        data = b"".join(peer.socket.recv_multipart())
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.msgpack.decode(data, type=kind)
    raise AssertionError("no answer")


def hello(peer: RawFrontend) -> int:
    """The engine's epoch, when it has dealt with all that was said before and takes the peer for a frontend."""
    while True:
        peer.send(Hello(PROTOCOL_VERSION))
        while not isinstance(said := answer(peer, Welcome | Refused), Welcome):
            if said.reason.startswith("Hello was said before"):  # now it is forgotten, and may say it again
                break
        else:
            return said.epoch


def int32(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def params(**fields: Any) -> list[Any]:
    """Encoded SamplingParams of one token, with fields that no SamplingParams would take."""
    values = msgspec.to_builtins(SamplingParams(max_tokens=1))
    return [fields.get(name, value) for name, value in zip(SamplingParams.__struct_fields__, values, strict=True)]


@pytest.mark.usefixtures("meanwhile")
def test_garbage_on_the_engines_socket(served: Served, peer: RawFrontend) -> None:
    draw = random.Random(2)
    for length in (0, 1, 2, 7, 100, 5000):
        for _ in range(30):
            peer.send(draw.randbytes(length))
        hello(peer)
    for shape in (
        [b""] * 3,
        [b"x"] * 200,
        [b"", b"\x93"],
        [b"\xdd" + b"\xff" * 4],
        [b"\xc6" + b"\xff" * 4],
        [b"\x91" * 100_000],
        [b"\xc1"],
    ):
        peer.socket.send_multipart(shape)
        hello(peer)
    good = msgspec.msgpack.encode(AddRequest(hello(peer), 7, TokenInputs(int32(5)), Generate(SamplingParams(max_tokens=1))))
    for _ in range(100):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        peer.send(bytes(data))
        peer.send(bytes(data[: draw.randrange(len(data))]))
        hello(peer)
    for identity in (b"short", b"x" * 200):
        with RawFrontend(served.engine_address(), identity) as stranger:
            stranger.send(Hello(PROTOCOL_VERSION))
            assert answer(stranger, Refused).reason == "malformed message"
    with socket.socket(socket.AF_UNIX) as raw:  # not even ZeroMQ
        raw.connect(served.engine_address().removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            for _ in range(50):
                raw.sendall(draw.randbytes(1000))
    with RawFrontend(served.engine_address()) as newcomer:
        hello(newcomer)


@pytest.mark.usefixtures("meanwhile")
def test_well_formed_messages_of_wrong_values_on_the_engines_socket(served: Served, peer: RawFrontend) -> None:
    epoch = hello(peer)
    ids = np.asarray([5, 6, 7], np.int32).tobytes()
    numbers = [n for n in NUMBERS if n not in UNENCODABLE]
    number = itertools.count(10)

    def add(prompt: bytes = ids, priority: Any = 0, salt: Any = "", arrival: Any = 0.0, **fields: Any) -> None:
        peer.send(["add", epoch, next(number), ["tokens", prompt], ["generate", params(**fields)], priority, salt, arrival])

    for field in SamplingParams.__struct_fields__:
        for value in (*numbers, *NOT_FINITE):
            add(**{field: value})
    for prompt in (b"", b"abc", int32(VOCABULARY), int32(-1), int32(-(2**31)), ids * 100_000):
        add(prompt)
    for extra in ({"priority": 2**63 - 1}, {"priority": -(2**63)}, {"salt": "x" * 5000}, *({"arrival": x} for x in NOT_FINITE)):
        add(**extra)
    for fields in (
        {"max_tokens": None, "min_tokens": 2**31 - 1},
        {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
        {"allowed_token_ids": [5] * 6_000_000},
        {"allowed_token_ids": [VOCABULARY]},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {VOCABULARY: 1.0}},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": list(range(300))},
        {"bad_words_token_ids": [[]]},
        {"bad_words_token_ids": [[5] * 100]},
        {"bad_words_token_ids": [[-1]]},
        {"stop": ["x" * 5000]},
        {"stop": [""]},
        {"n": 128, "temperature": 1e308, "repetition_penalty": 1e-320, "min_p": 1e-320, "top_p": 1e-320},
        {"n": 128, "temperature": 1e308, "repetition_penalty": 1e308, "allowed_token_ids": [5]},
    ):
        add(**fields)
    for request_id in (-1, 2**55, 2**63, 0, 0, 0):
        peer.send(["add", epoch, request_id, ["tokens", ids], ["generate", params()]])
    peer.send(Abort(epoch, [0, -1, 2**62, *range(10)]))
    for key in (0, -1, 2**62, -(2**62)):
        peer.send(Finish(epoch, key))
    number = itertools.count(10**6)
    add(max_tokens=2)  # one that is right is answered among all these
    key = sequence_key(10**6, 0)
    while key not in np.frombuffer(answer(peer, StepOutputs).keys, np.int64):
        pass
    peer.send(GetFile(epoch, "../../etc/passwd"))
    assert answer(peer, Refused).reason == "there is no such file"
