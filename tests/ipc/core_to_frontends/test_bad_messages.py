"""CoreToFrontends and what nobody should send: bad fields, bad bytes, too much at once."""

import msgspec
import pytest
from core_to_frontends_cases import EPOCH, add, answer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ipc_cores import RawFrontend, make_heartbeat

from quire.ipc.links import core_to_frontends
from quire.ipc.messages.frontend import (
    MAX_FRONTEND_MESSAGE,
    MAX_REQUEST_ID,
    MAX_TOGETHER,
    PROTOCOL_VERSION,
    TOGETHER_BYTES,
    Abort,
    AddRequest,
    Finish,
    Generate,
    GetFile,
    Hello,
    Ping,
    Refused,
    RequestError,
    TokenInputs,
)
from quire.ipc.sampling import SamplingParams


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
        taken.append(len(core.link.receive(limit=150)))
    assert max(taken) <= 250  # what is begun is taken as a whole


def test_oversized_message_costs_the_sender_its_connection(core, make_frontend):
    frontend, other = make_frontend(), make_frontend()
    frontend.send(bytes(MAX_FRONTEND_MESSAGE + 1))

    def probe() -> bool:
        core.link.broadcast(make_heartbeat(EPOCH))
        return bool(core.lost)

    core.until(probe)
    assert core.lost == [frontend.identity]
    other.send(add(1))
    core.until(lambda: core.requests)


def test_foreign_identities_are_refused(core):
    frontend = RawFrontend(core.link.address, b"short")
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
        connection = core_to_frontends.FrontendConnection(identity, 0.0, core.link._waiting)
        core.link._frontends.setdefault(identity, connection).welcomed = True
        accepted = core.link._accept(identity, payload)
        assert accepted is None or isinstance(accepted, AddRequest | Abort | Finish)
        kinds.add(type(accepted))
        core.link.lost()
        core.link.check()

    try_one()
    assert {Abort, type(None)} <= kinds  # so bytes were decoded
