"""Terms: for whom a request runs, with which adapter, until when, and whether it may be refused for the length of the queue.

Routes make them from a request's API key, headers and body (frontend/http/api/terms.py); Python clients have none, and so wait
for as long as it takes. The client sends what is left of the time, as the engine has another clock.
"""

import hashlib
import math
import time
from functools import lru_cache

import msgspec

from quire.frontend.client.stream import DeadlineExceeded, InvalidRequest
from quire.ipc.adapters import AdapterUse
from quire.ipc.messages.frontend import Tenant


class Terms(msgspec.Struct, frozen=True):
    """deadline: by time.monotonic(). salt: keeps the tenant's cached prefixes apart from those of others; None: all share."""

    tenant: Tenant | None = None
    deadline: float = math.inf
    is_bounded: bool = False
    salt: str | None = None
    adapter: AdapterUse | None = None  # None: the model itself

    @property
    def name(self) -> str:
        """The tenant's; empty without one."""
        return "" if self.tenant is None else self.tenant.name

    def timeout_s(self) -> float:
        """Seconds that are left; 0 without a deadline. Raises DeadlineExceeded."""
        if self.deadline == math.inf:
            return 0.0
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's timeout has passed")
        return left

    def salted(self, own: str) -> str:
        """The cache salt to send, of a request's `own`. Raises InvalidRequest."""
        if self.salt is None:
            return own
        try:  # neither part can be taken for the other: a tenant's salt has no NUL
            return hashlib.blake2b(f"{self.salt}\0{own}".encode(), digest_size=16).hexdigest()
        except UnicodeEncodeError as error:
            raise InvalidRequest("a string of the request is not valid Unicode") from error


NO_TERMS = Terms()


@lru_cache(maxsize=4096)
def share_of(tenant: Tenant, num_engines: int) -> Tenant:
    """The share of one of several engines that a tenant may have."""

    def part(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // num_engines)

    return msgspec.structs.replace(
        tenant,
        max_running=part(tenant.max_running),
        max_waiting=part(tenant.max_waiting),
        tokens_per_minute=tenant.tokens_per_minute / num_engines,
    )
