"""CoreToFrontends against frontends made by hand: handshake, files, refusals, hostile bytes; slow, silent, gone frontends."""

import time

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ipc_cores import FILES, LoopingCore, RawFrontend, make_beat, make_welcome

from quire.ipc.links import core_to_frontends as core_endpoint
from quire.ipc.links.core_to_frontends import new_epoch
from quire.ipc.messages import (
    MAX_FRONTEND_MESSAGE,
    MAX_REQUEST_ID,
    MAX_TOGETHER,
    PROTOCOL_VERSION,
    TOGETHER_BYTES,
    Abort,
    AddRequest,
    Beat,
    CoreMessage,
    File,
    Finish,
    Finished,
    Generate,
    GetFile,
    Hello,
    Ping,
    Refused,
    RequestError,
    Started,
    StepOutputs,
    TokenInputs,
    TokenLogprobs,
    Welcome,
)
from quire.ipc.sampling import SamplingParams

EPOCH = 77
decode = msgspec.msgpack.Decoder(CoreMessage).decode


@pytest.fixture
def make_core():
    cores = []

    def make(**options) -> LoopingCore:
        cores.append(LoopingCore(epoch=EPOCH, beats=False, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.endpoint.close(linger_s=0)


@pytest.fixture
def core(make_core):
    return make_core()


@pytest.fixture
def make_frontend(core):
    frontends = []

    def make(hello: bool = True, at: LoopingCore = core) -> RawFrontend:
        frontends.append(RawFrontend(at.endpoint.address))
        if hello:
            frontends[-1].send(Hello(PROTOCOL_VERSION))
            assert isinstance(answer(at, frontends[-1]), Welcome)
        return frontends[-1]

    yield make
    for frontend in frontends:
        frontend.close()


def answer(core: LoopingCore, frontend: RawFrontend) -> CoreMessage:
    """The next message to the frontend."""
    core.until(frontend.ready)
    return decode(frontend.socket.recv())


def add(request_id: int, epoch: int = EPOCH, **params) -> AddRequest:
    return AddRequest(
        epoch, request_id, TokenInputs(np.arange(4, dtype=np.int32).tobytes()), Generate(SamplingParams(**params))
    )


def outputs(*tokens: int, key: int = 0, **more) -> StepOutputs:
    return StepOutputs(EPOCH, 0, np.full(len(tokens), key, np.int64).tobytes(), np.asarray(tokens, np.int32).tobytes(), **more)


# ------------------------------------------------------------------------------------------------- handshake and files
def test_hello_is_answered_with_a_welcome_and_files_on_demand(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION))
    assert answer(core, frontend) == make_welcome(EPOCH)
    for name, data in FILES.items():
        frontend.send(GetFile(EPOCH, name))
        got = answer(core, frontend)
        assert isinstance(got, File) and (got.name, got.data) == (name, data)
        assert got.digest == next(f.digest for f in make_welcome(EPOCH).files if f.name == name)
    assert core.endpoint.frontends == [frontend.identity]
    assert core.requests == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "config.json"])
def test_only_listed_files_are_given(core, make_frontend, name):
    frontend = make_frontend()
    frontend.send(GetFile(EPOCH, name))
    assert isinstance(answer(core, frontend), Refused)


def test_frontend_that_comes_early_waits_for_its_welcome(make_core, make_frontend):
    core = make_core()
    core.endpoint._welcome = None
    frontend = make_frontend(hello=False, at=core)
    frontend.send(Hello(PROTOCOL_VERSION))
    frontend.send(Ping(0))
    core.until(lambda: core.endpoint._frontends)
    assert core.endpoint.frontends == []
    core.endpoint.broadcast(make_beat(EPOCH))
    assert isinstance(answer(core, frontend), Beat)  # so that it knows that somebody is there
    core.endpoint.set_welcome(make_welcome(EPOCH), FILES)
    assert isinstance(answer(core, frontend), Welcome)
    assert core.endpoint.frontends == [frontend.identity]


def test_other_protocol_is_refused_with_both_numbers(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION + 8))
    refused = answer(core, frontend)
    assert isinstance(refused, Refused)
    assert f"protocol {PROTOCOL_VERSION}" in refused.reason and str(PROTOCOL_VERSION + 8) in refused.reason


def test_message_for_an_earlier_core_is_refused(core, make_frontend):
    """As a DEALER that reconnects by itself would deliver its queue to a successor."""
    stranger = make_frontend(hello=False)
    stranger.send(add(1, epoch=EPOCH - 1))
    refused = answer(core, stranger)
    assert isinstance(refused, Refused) and refused.epoch == EPOCH and "stale" in refused.reason
    known = make_frontend()
    for message in (add(1, EPOCH - 1), Abort(EPOCH - 1, [1]), Finish(EPOCH - 1, 256), Ping(EPOCH - 1)):
        known.send(message)
        assert isinstance(answer(core, known), Refused)
    assert core.requests == []
    assert core.lost == [known.identity]


def test_request_without_hello_is_refused_even_with_the_right_epoch(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(add(1))
    assert isinstance(answer(core, frontend), Refused)
    assert core.requests == []


def test_frontends_are_limited(core, make_frontend, monkeypatch):
    monkeypatch.setattr(core_endpoint, "MAX_FRONTENDS", 1)
    make_frontend()
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION))
    assert isinstance(answer(core, frontend), Refused)


def test_two_frontends_with_the_same_ids_are_kept_apart(core, make_frontend):
    a, b = make_frontend(), make_frontend()
    a.send(add(5, max_tokens=3))
    b.send(add(5, max_tokens=4))
    core.until(lambda: len(core.requests) == 2)
    assert {(i, m.id, m.task.params.max_tokens) for i, m in core.requests} == {(a.identity, 5, 3), (b.identity, 5, 4)}
    core.endpoint.send(a.identity, outputs(1, key=5 << 8))
    core.endpoint.send(b.identity, outputs(2, key=5 << 8))
    core.endpoint.send(a.identity, outputs(3, key=5 << 8))
    got_a, got_b = [answer(core, a), answer(core, a)], answer(core, b)
    assert [(m.seq, m.tokens) for m in got_a] == [(0, b"\1\0\0\0"), (1, b"\3\0\0\0")]
    assert (got_b.seq, got_b.tokens) == (0, b"\2\0\0\0")
    assert not b.ready()


def test_receive_looks_at_no_more_than_its_limit(core, make_frontend):
    frontend = make_frontend()
    for i in range(10):
        frontend.send(add(i))
    got: list = []
    deadline = time.monotonic() + 20
    while len(got) < 10 and time.monotonic() < deadline:
        core._poller.poll(1000)
        new = core.endpoint.receive(3)
        assert len(new) <= 3
        got += new
    assert [m.id for _, m in got] == list(range(10))


def test_receive_takes_what_is_large_one_by_one(make_core, make_frontend):
    """A turn of the loop must stay short for everybody's streams, whatever one frontend sends."""
    size = core_endpoint.RECEIVE_BYTES
    core = make_core()
    large, small = make_frontend(at=core), make_frontend(at=core)
    for i in range(6):
        large.send(AddRequest(EPOCH, i, TokenInputs(bytes(size // 2)), Generate(SamplingParams())))
        small.send(add(i))
    got: list = []
    deadline = time.monotonic() + 20
    while len(got) < 12 and time.monotonic() < deadline:
        core._poller.poll(1000)
        new = core.endpoint.receive()
        assert sum(len(m.inputs.token_ids) for _, m in new) <= 1.5 * size
        got += new
    assert [m.id for i, m in got if i == large.identity] == [m.id for i, m in got if i == small.identity] == list(range(6))


def test_a_file_is_sent_once_a_connection_and_few_files_a_turn(make_core, make_frontend):
    core = make_core()
    names = [f"{i}.json" for i in range(4)]
    files = {name: bytes(core_endpoint.RECEIVE_BYTES) for name in names}
    core.endpoint.set_welcome(make_welcome(EPOCH, files), files)
    frontend = make_frontend(at=core)
    for name in names:
        frontend.send(GetFile(EPOCH, name))
    deadline, sent = time.monotonic() + 20, 0
    while sent < 4 and time.monotonic() < deadline:
        core._poller.poll(1000)
        core.endpoint.receive()
        before, sent = sent, len(core.endpoint._frontends[frontend.identity].files)
        assert sent - before <= 1
    assert [answer(core, frontend).name for _ in names] == names
    frontend.send(GetFile(EPOCH, names[0]))
    assert isinstance(answer(core, frontend), Refused)


# ------------------------------------------------------------------------------------------------- bad messages
def encoded_add(**changes) -> bytes:
    """An AddRequest with fields of any type."""
    order = ["tag", *AddRequest.__struct_fields__]
    fields = dict(zip(order, msgspec.msgpack.decode(msgspec.msgpack.encode(add(7))), strict=True))
    assert changes.keys() <= fields.keys()
    return msgspec.msgpack.encode(list((fields | changes).values()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": ["tokens", b""]}, "the prompt must hold at least one int32"),
        ({"inputs": ["tokens", b"12345"]}, "the prompt must hold"),
        ({"inputs": ["tokens", [1, 2]]}, "Expected `bytes`"),
        ({"inputs": ["pictures", b"1234"]}, "Invalid value 'pictures'"),
        ({"task": ["generate", [1, float("nan")]]}, "temperature"),
        ({"task": ["generate", [129]]}, "n must be at least 1 and at most 128"),
        ({"task": ["generate", "greedy"]}, "Expected `array`"),
        ({"task": ["dream", [1]]}, "Invalid value 'dream'"),
        ({"arrival_time": float("inf")}, "arrival_time"),
        ({"priority": 2**63}, "priority"),
        ({"cache_salt": 5}, "Expected `str`"),
    ],
    ids=lambda value: str(next(iter(value)) if isinstance(value, dict) else "")[:20],
)
def test_bad_request_fails_alone(core, make_frontend, changes, text):
    frontend = make_frontend()
    frontend.send(encoded_add(**changes))
    error = answer(core, frontend)
    assert isinstance(error, RequestError) and (error.epoch, error.id, error.code) == (EPOCH, 7, "invalid")
    assert text in error.message
    frontend.send(add(8))
    core.until(lambda: core.requests)
    assert [m.id for _, m in core.requests] == [8]
    assert core.lost == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode(["no_such_tag", EPOCH]),
        msgspec.msgpack.encode(["abort", EPOCH, ["x"]]),
        msgspec.msgpack.encode(["abort", EPOCH]),
        msgspec.msgpack.encode(["add", EPOCH, "id"]),
        msgspec.msgpack.encode(["welcome"]),
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 elements
        b"\xc6\xff\xff\xff\xff",  # so many bytes
        b"\x91" * 5000,  # nested deeply
        msgspec.msgpack.encode(add(1)) + b"\0",
    ],
    ids=lambda payload: payload[:12].hex() or "empty",
)
def test_unreadable_message_is_refused(core, make_frontend, payload):
    frontend = make_frontend()
    frontend.send(payload)
    assert isinstance(answer(core, frontend), Refused)
    core.turn(0)
    assert core.lost == [frontend.identity]
    other = make_frontend()
    other.send(add(8))
    core.until(lambda: core.requests)


def test_unreadable_message_of_a_stranger_is_no_ones_loss(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(encoded_add(task=["generate", [0]]))
    assert isinstance(answer(core, frontend), Refused)
    assert core.lost == []


def test_request_id_out_of_range_is_refused(core, make_frontend):
    for bad in (-1, MAX_REQUEST_ID + 1):
        frontend = make_frontend()
        frontend.send(encoded_add(id=bad))
        assert isinstance(answer(core, frontend), RequestError)
        assert core.requests == []


def test_what_is_sent_together_is_taken_up_together_whatever_one_of_it_is(core, make_frontend):
    frontend = make_frontend()
    frames = [msgspec.msgpack.encode(add(i)) for i in range(MAX_TOGETHER - 2)]
    frontend.socket.send_multipart([*frames, encoded_add(id=300, task=["generate", [0]]), msgspec.msgpack.encode(add(301))])
    assert isinstance(error := answer(core, frontend), RequestError) and error.id == 300
    assert [m.id for _, m in core.requests] == [*range(MAX_TOGETHER - 2), 301]


def test_what_is_sent_together_ends_with_what_is_refused(core, make_frontend):
    frontend, other = make_frontend(), make_frontend()
    frontend.socket.send_multipart([msgspec.msgpack.encode(add(1)), b"junk", msgspec.msgpack.encode(add(2)), b"junk"])
    assert isinstance(answer(core, frontend), Refused)
    other.send(add(3))
    core.until(lambda: len(core.requests) == 2)
    assert [m.id for _, m in core.requests] == [1, 3] and core.lost == [frontend.identity]
    assert not frontend.socket.poll(50)  # it was told once


@pytest.mark.parametrize(("empty", "pings"), [(1, 1), (0, MAX_TOGETHER + 1)])
def test_message_of_too_many_frames_or_an_empty_one_is_refused(core, make_frontend, empty, pings):
    frontend = make_frontend()
    frontend.socket.send_multipart([b""] * empty + [msgspec.msgpack.encode(Ping(EPOCH))] * pings)
    assert isinstance(answer(core, frontend), Refused)


def test_messages_too_large_to_travel_together_are_refused(core, make_frontend):
    """Else they would all be dealt with in one turn of the loop."""
    alone, together = make_frontend(), make_frontend()
    large = msgspec.msgpack.encode(AddRequest(EPOCH, 1, TokenInputs(b"\1\0\0\0" * 150_000), Generate(SamplingParams())))
    assert len(large) < TOGETHER_BYTES < 2 * len(large)
    together.socket.send_multipart([large, large])
    assert isinstance(answer(core, together), Refused) and core.requests == []
    alone.socket.send_multipart([large])
    core.until(lambda: core.requests)


def test_much_sent_together_does_not_go_beyond_what_a_turn_takes(core, make_frontend):
    frontend = make_frontend()
    core.turn()
    for _ in range(5):
        frontend.socket.send_multipart([msgspec.msgpack.encode(add(i)) for i in range(100)])
    taken = []
    while sum(taken) < 500:
        core._poller.poll(1000)
        taken.append(len(core.endpoint.receive(limit=150)))
    assert max(taken) <= 250  # what is begun is taken as a whole


def test_oversized_message_costs_the_sender_its_connection(core, make_frontend):
    frontend, other = make_frontend(), make_frontend()
    frontend.send(bytes(MAX_FRONTEND_MESSAGE + 1))

    def probe() -> bool:
        core.endpoint.broadcast(make_beat(EPOCH))
        return bool(core.lost)

    core.until(probe)
    assert core.lost == [frontend.identity]
    other.send(add(1))
    core.until(lambda: core.requests)


def test_foreign_identities_are_refused(core):
    frontend = RawFrontend(core.endpoint.address, b"short")
    frontend.send(Hello(PROTOCOL_VERSION))
    assert isinstance(answer(core, frontend), Refused)
    frontend.close()


valid_messages = st.sampled_from(
    [Hello(1), Ping(EPOCH), GetFile(EPOCH, "a"), add(3, logit_bias={1: 2.0}), Abort(EPOCH, [1, 2]), Finish(EPOCH, 1)]
).map(msgspec.msgpack.encode)
any_value = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8)
    ),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)


@st.composite
def hostile_bytes(draw) -> bytes:
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return draw(st.binary(max_size=64))
    if kind == 1:
        tag = draw(st.sampled_from(["add", "abort", "finish", "hello", "ping", "get_file", "x"]))
        return msgspec.msgpack.encode([tag, EPOCH, *draw(st.lists(any_value, max_size=8))])
    data = bytearray(draw(valid_messages))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def test_no_bytes_raise_in_the_cores_loop(core):
    """Straight into the decoder, without the socket between, so that many can be tried."""
    identity = b"\1" * 16
    kinds = set()

    @settings(max_examples=500, deadline=None)
    @given(payload=hostile_bytes())
    @example(payload=msgspec.msgpack.encode(Abort(EPOCH, [1, 2])))
    def try_one(payload: bytes) -> None:
        core.endpoint._frontends.setdefault(identity, core_endpoint.FrontendConnection(identity, 0.0)).welcomed = True
        accepted = core.endpoint._accept(identity, payload)
        assert accepted is None or isinstance(accepted, AddRequest | Abort | Finish)
        kinds.add(type(accepted))
        core.endpoint.lost()
        core.endpoint.check()

    try_one()
    assert {Abort, type(None)} <= kinds  # so bytes were decoded


# ------------------------------------------------------------------------------------------------- slow, silent, gone
class SlowFrontend:
    """A core with a low high-water mark, and a frontend that does not read. `key` names its one sequence."""

    def __init__(self, make_core, make_frontend, **options) -> None:
        self.core = make_core(send_hwm=2, **options)
        self.frontend = make_frontend(at=self.core)

    def fill(self, first: int = 0, big: int = 4096) -> int:
        """Send tokens first, first + 1, ... until the outbox is in use; returns the next token."""
        token = first
        while not self.core.endpoint._slow:
            self.core.endpoint.send(self.frontend.identity, outputs(*[token] * big))
            token += 1
        return token

    def read_all(self) -> list[StepOutputs]:
        got: list[StepOutputs] = []
        while self.core.endpoint._slow or self.frontend.socket.poll(100):
            while self.frontend.ready():
                got.append(decode(self.frontend.socket.recv()))
            self.core.turn(0)
        return got


def test_outputs_of_a_slow_frontend_wait_merged_and_in_order(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend)
    at = slow.fill()
    identity, endpoint = slow.frontend.identity, slow.core.endpoint
    logprobs = [TokenLogprobs(-1.0, 1, b"", b"")]
    for token in range(at, at + 50):
        endpoint.send(identity, outputs(token, started=[Started(token, 0, 0.1)], logprobs=logprobs))
    endpoint.send(identity, RequestError(EPOCH, 9, "engine_error", "between"))
    endpoint.send(identity, outputs(at + 50, finished=[Finished(0, "stop", 3)]))
    assert len(endpoint._slow[identity].outbox) == 3  # 51 steps, an error, one step
    endpoint.check()
    got = slow.read_all()
    steps = [m for m in got if isinstance(m, StepOutputs)]
    tokens = [t for m in steps for t in dict.fromkeys(np.frombuffer(m.tokens, np.int32).tolist())]
    assert tokens == list(range(at + 51))
    assert [m.seq for m in steps] == list(range(len(steps)))
    assert isinstance(got[-2], RequestError) and got[-1].finished == [Finished(0, "stop", 3)]
    assert [s.key for s in steps[-2].started] == list(range(at, at + 50))
    assert len(steps[-2].logprobs) == 50
    assert len(steps[-2].keys) == 8 * len(steps[-2].tokens) // 4
    assert slow.core.lost == []


def test_frontend_that_never_reads_is_lost_at_its_bound(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend, outbox_bytes=1 << 20)
    other = make_frontend(at=slow.core)
    token = slow.fill()
    while slow.core.endpoint.send(slow.frontend.identity, outputs(*[token] * 4096)):
        slow.core.endpoint.check()
        token += 1
    slow.core.turn(0)
    assert slow.core.lost == [slow.frontend.identity]
    assert not slow.core.endpoint.send(slow.frontend.identity, outputs(1))
    assert slow.core.endpoint.send(other.identity, outputs(1))
    assert isinstance(answer(slow.core, other), StepOutputs)


def test_beats_do_not_wait_for_a_slow_frontend(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend)
    slow.fill()
    held = slow.core.endpoint._slow[slow.frontend.identity].outbox.num_bytes
    for _ in range(1000):
        slow.core.endpoint.broadcast(make_beat(EPOCH))
    assert slow.core.endpoint._slow[slow.frontend.identity].outbox.num_bytes == held


def test_gone_frontend_is_lost_at_the_next_send(core, make_frontend):
    frontend, other = make_frontend(), make_frontend()
    frontend.socket.close()
    core.until(lambda: not core.endpoint.send(frontend.identity, outputs(1)), timeout_s=1.0)
    core.turn(0)
    assert core.lost == [frontend.identity]
    assert core.endpoint.frontends == [other.identity]


def test_gone_frontend_without_outputs_is_lost_at_the_next_beat(core, make_frontend):
    frontend = make_frontend()
    frontend.socket.close()
    core.beats = True
    core.until(lambda: core.lost, timeout_s=1.0)
    assert core.lost == [frontend.identity]


def test_gone_frontend_is_lost_while_its_outbox_waits(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend)
    slow.fill()
    slow.frontend.socket.close()
    slow.core.until(lambda: slow.core.lost, timeout_s=1.0)


def test_silent_frontend_is_lost_and_one_that_pings_is_not(make_core, make_frontend):
    core = make_core(frontend_timeout_s=0.4)
    silent, alive = make_frontend(at=core), make_frontend(at=core)

    def ping() -> bool:
        alive.send(Ping(EPOCH))
        return bool(core.lost)

    core.until(ping)
    assert core.lost == [silent.identity]
    assert isinstance(answer(core, silent), Refused)
    core.until(ping, timeout_s=1.0)
    assert core.lost == [silent.identity]


def test_core_that_stood_still_blames_nobody(make_core, make_frontend):
    core = make_core(frontend_timeout_s=3.0)
    frontend = make_frontend(at=core)
    core.endpoint._last_tick -= 60.0  # the process was stopped for a minute
    core.turn(0)
    assert core.lost == []
    frontend.send(Ping(EPOCH))
    core.turn(1000)
    assert 1.0 <= core.endpoint._frontends[frontend.identity].heard_at < 3.0


def test_send_to_nobody_is_harmless(core):
    assert not core.endpoint.send(b"\1" * 16, outputs(1))
    core.endpoint.broadcast(make_beat(EPOCH))
    assert core.endpoint.lost() == []


def test_epochs_differ():
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000 and all(0 < e < 2**62 for e in epochs)
