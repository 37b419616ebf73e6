"""Checks of a request's fields that need no client, and values that stand for others."""

import msgspec

from quire.frontend.client.stream import InvalidRequest
from quire.ipc.sampling import ALL_LOGPROBS, SamplingParams


def check_priority(priority: int) -> None:
    """Raises InvalidRequest."""
    if abs(priority) >= 1 << 31:
        raise InvalidRequest("priority must fit 32 bits")


def with_number_of_logprobs(p: SamplingParams, max_logprobs: int) -> SamplingParams:
    """The same, with max_logprobs in place of ALL_LOGPROBS."""
    wanted = [name for name in ("logprobs", "prompt_logprobs") if getattr(p, name) == ALL_LOGPROBS]
    return msgspec.structs.replace(p, **dict.fromkeys(wanted, max_logprobs)) if wanted else p
