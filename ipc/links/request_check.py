"""Checks of an AddRequest by the core's end of the socket, before the core sees it. Intake checks bounds of the engine."""

import math

import msgspec

from quire.ipc.messages.frontend import (
    MAX_REQUEST_ID,
    MAX_TENANT_NAME,
    MAX_TOGETHER,
    TOGETHER_BYTES,
    AddRequest,
    Tenant,
)
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
    if (tenant := request.tenant) is not None and (problem := _problem_with_tenant(tenant)):
        return problem
    if abs(request.priority) >= 1 << 63:
        return "priority must fit 64 bits"
    return None


def _problem_with_tenant(tenant: Tenant) -> str | None:
    if max(len(tenant.name), len(tenant.label)) > MAX_TENANT_NAME:
        return f"a tenant's name may be at most {MAX_TENANT_NAME} characters long"
    limits = tenant.max_running or 1, tenant.max_waiting or 0, tenant.best_priority or 0
    if not all(-(1 << 63) < limit < 1 << 63 for limit in limits) or limits[0] < 1 or limits[1] < 0:
        return "a tenant's limits must be at least 1 sequence that runs and 0 that wait"
    if not (0 <= tenant.tokens_per_minute < math.inf and 0 < tenant.weight < math.inf):
        return "a tenant's weight and tokens a minute must be finite and not negative"
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
