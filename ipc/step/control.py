"""Control records on the plan ring: requests to serving workers between two steps, as ControlRequest messages.

The first word is the message's length in bytes; the message follows as msgpack. Answers come on the control link as
ControlReply. Written by the core (enginecore/workers.py), read by each worker between steps (workers/worker.py).
"""

import msgspec
import numpy as np

from quire.ipc.messages.message import DECODE_ERRORS
from quire.ipc.messages.workers import MAX_CONTROL_BYTES, ControlRequest

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ControlRequest).decode


def encode_control(request: ControlRequest) -> np.ndarray:
    """The record, int32. Raises ValueError for a request of more than MAX_CONTROL_BYTES."""
    data = _encode(request)
    if len(data) > MAX_CONTROL_BYTES:
        raise ValueError(f"a control request of {len(data)} bytes: at most {MAX_CONTROL_BYTES}")
    words = np.zeros(1 + -(-len(data) // 4), np.int32)
    words[0] = len(data)
    words[1:].view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return words


def decode_control(words: np.ndarray) -> ControlRequest:
    """Read a record. Raises ValueError if it is malformed."""
    length = int(words[0])
    if not 0 <= length <= min(4 * (len(words) - 1), MAX_CONTROL_BYTES):
        raise ValueError(f"a control record of {len(words)} words claims {length} bytes")
    try:
        return _decode(words[1:].tobytes()[:length])
    except DECODE_ERRORS as error:
        raise ValueError(f"a control record cannot be read: {error}") from None
