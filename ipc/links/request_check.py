"""Checks of an AddRequest by the core's end of the socket, before the core sees it. Intake checks bounds of the engine."""

import math

import msgspec

from quire.ipc.messages.frontend import MAX_REQUEST_ID, MAX_TOGETHER, TOGETHER_BYTES, AddRequest
from quire.ipc.messages.message import DECODE_ERRORS


def problem_with(request: AddRequest) -> str | None:
    """The problem with a request beyond its types, or None. The core checks what depends on the engine."""
    if not 0 <= request.id <= MAX_REQUEST_ID:
        return f"id must be between 0 and {MAX_REQUEST_ID}"
    token_ids = request.inputs.token_ids
    if not token_ids or len(token_ids) % 4:
        return "the prompt must hold at least one int32"
    if not math.isfinite(request.arrival_time):
        return "arrival_time must be finite"
    if not 0 <= request.timeout_s < math.inf:
        return "timeout_s must be finite and at least 0"
    if abs(request.priority) >= 1 << 63:
        return "priority must fit 64 bits"
    return None


_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_any_int = msgspec.msgpack.Decoder(int)
_any_str = msgspec.msgpack.Decoder(str)


def identify_request(payload: bytes, epoch: int) -> int | None:
    """The id of an AddRequest of this epoch with other fields that do not decode, or None."""
    try:
        tag, *fields = _raw_list.decode(payload)
        if _any_str.decode(tag) == "add" and len(fields) >= 2 and _any_int.decode(fields[0]) == epoch:
            request_id = _any_int.decode(fields[1])
            return request_id if 0 <= request_id <= MAX_REQUEST_ID else None
    except DECODE_ERRORS:
        pass
    return None


def may_travel_as_one(frames: list[bytes], size: int) -> bool:
    """Whether one ZeroMQ message may hold these frames; a larger one would delay all other frontends."""
    return len(frames) == 1 or (1 < len(frames) <= MAX_TOGETHER and size <= TOGETHER_BYTES)
