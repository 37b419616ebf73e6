"""Messages: each comes back as it went, and nothing but a message decodes."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ipc.messages.frontend import (
    AddRequest,
    CoreMessage,
    FrontendMessage,
    Generate,
    StepOutputs,
    TokenInputs,
    sequence_key,
)
from quire.ipc.messages.message import DECODE_ERRORS
from quire.ipc.messages.workers import ControlRequest, WorkerCommand, WorkerMessage
from quire.ipc.pooling import PoolingParams
from quire.ipc.sampling import SamplingParams

UNIONS = {
    "frontend": FrontendMessage,
    "core": CoreMessage,
    "worker": WorkerMessage,
    "command": WorkerCommand,
    "control": ControlRequest,
}


def members(union) -> list[type]:
    return list(getattr(union, "__args__", [union]))


def values_of(kind) -> st.SearchStrategy:
    """Any value of a field's type."""
    if hasattr(kind, "__metadata__"):  # Annotated
        kind = kind.__origin__
    args = getattr(kind, "__args__", ())
    if kind is SamplingParams:
        return st.builds(SamplingParams, n=st.integers(1, 128), temperature=st.floats(0, 10), stop=st.none() | st.just(["x"]))
    if kind is PoolingParams:
        return st.builds(PoolingParams, dimensions=st.none() | st.integers(1, 4096), use_activation=st.none() | st.booleans())
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return messages_of(kind)
    if str(kind).startswith("typing.Literal"):
        return st.sampled_from(args)
    if getattr(kind, "__origin__", None) is list:
        return st.lists(values_of(args[0]), max_size=3)
    if getattr(kind, "__origin__", None) is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if getattr(kind, "__origin__", None) is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values_of(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, args))
    if args:  # a union
        return st.one_of([values_of(a) for a in args])
    simple = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        memoryview: st.binary(max_size=20).map(memoryview),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[kind]


def messages_of(kind: type[msgspec.Struct]) -> st.SearchStrategy:
    fields = {f.name: values_of(f.type) for f in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


@pytest.mark.parametrize("direction", UNIONS)
def test_every_message_comes_back_as_it_went(direction):
    decoder = msgspec.msgpack.Decoder(UNIONS[direction])

    @settings(max_examples=150, deadline=None)
    @given(st.one_of([messages_of(kind) for kind in members(UNIONS[direction])]))
    def try_one(message: msgspec.Struct) -> None:
        again = decoder.decode(msgspec.msgpack.encode(message))
        assert type(again) is type(message) and again == message

    try_one()


@pytest.mark.parametrize("direction", UNIONS)
def test_no_bytes_decode_to_anything_else(direction):
    decoder = msgspec.msgpack.Decoder(UNIONS[direction])

    @settings(max_examples=150, deadline=None)
    @given(st.binary(max_size=60))
    def try_one(data: bytes) -> None:
        with suppress(*DECODE_ERRORS):
            assert type(decoder.decode(data)) in members(UNIONS[direction])

    try_one()


@pytest.mark.parametrize("direction", UNIONS)
def test_each_tag_belongs_to_one_message_of_its_direction(direction):
    tags = [kind.__struct_config__.tag for kind in members(UNIONS[direction])]
    assert len(set(tags)) == len(tags) and None not in tags


def test_messages_cannot_be_changed_or_extended():
    message = AddRequest(1, 2, TokenInputs(b"abcd"), Generate(SamplingParams()))
    with pytest.raises(AttributeError):
        message.id = 3
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([*fields, 1]), type=FrontendMessage)


def test_bounds_hold_for_what_comes_over_the_wire():
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequest(1, 2, TokenInputs(b"abcd"), Generate(SamplingParams()))))
    fields[4][1][1] = -1.0
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=FrontendMessage)


def test_sequence_keys_name_request_and_child():
    keys = {sequence_key(i, child) for i in (0, 1, 2**55 - 1) for child in range(128)}
    assert len(keys) == 3 * 128
    assert all(0 <= key < 2**63 for key in keys)
    assert sequence_key(5, 3) >> 8 == 5 and sequence_key(5, 3) & 255 == 3


def test_a_steps_message_is_small():
    """64 sequences: 12 bytes a token and little more."""
    message = StepOutputs(2**62, 10**6, bytes(8 * 64), bytes(4 * 64))
    assert len(msgspec.msgpack.encode(message)) < 12 * 64 + 50
