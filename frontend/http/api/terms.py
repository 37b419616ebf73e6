"""The terms of an HTTP request: its key's tenant, its deadline, and that it is refused where it would wait too long.

A deadline comes from the body's `timeout` or the header X-Request-Timeout-S, whichever is sooner, and is at most
--request-timeout-s away. Lines of batch files are patient: they wait for as long as it takes. Each generating route calls
`terms_of` once its body is decoded.
"""

import math
import time

from quire.frontend.client.terms import Terms
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request

HEADER = b"x-request-timeout-s"


def terms_of(services: Services, request: Request, timeout_s: float | None, priority: int | None = None) -> Terms:
    """timeout_s, priority: the body's fields. Raises ApiError: 400, or a refusal of a moment ago."""
    if not request.is_patient:
        services.refusals.check(request.owner)
    access = services.key_limits.access(request.owner)
    best = access.best_priority
    if best is not None and priority is not None and priority < best:
        raise invalid(f"priority must be at least {best} for this API key, got {priority}", "priority")
    seconds = [services.request_timeout_s] if services.request_timeout_s else []
    if timeout_s is not None:
        seconds.append(_checked(timeout_s, "timeout"))
    if (given := request.headers.get(HEADER)) is not None:
        seconds.append(_checked(_number(given), HEADER.decode()))
    deadline = time.monotonic() + min(seconds) if seconds else math.inf
    return Terms(access.tenant, deadline, not request.is_patient, access.salt, request.adapter)


def _number(given: bytes) -> float:
    try:
        return float(given)
    except ValueError:
        return math.nan


def _checked(seconds: float, name: str) -> float:
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"{name} must be a number of seconds greater than 0.", param=name, code="invalid_value")
    return seconds
