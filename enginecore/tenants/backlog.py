"""Backlog: what waits, for which tenants, and how long that will take; and whether one more request is taken.

A queue is bounded by time: what waits, divided by the rate at which tokens were computed lately while requests waited. A
request that would wait too long is refused at once, so that those that are taken are answered in time. A tenant waits behind
its own requests and its share of the others', and its requests count against its own limits first. Intake asks `refusal` for
each request; requests.py reports steps. No I/O, no clock.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire.enginecore.tenants.tenant import NO_LIMITS, TenantState, Totals
from quire.ipc.messages.frontend import ErrorCode, Tenant
from quire.ipc.messages.stats import TenantStats

HALF_LIFE_S = 5.0  # of the rate, in seconds of steps
KNOWN_S = 1.0  # seconds of steps before the rate is known
LEAST_RETRY_S, MOST_RETRY_S = 1, 60  # OpenAI's clients obey a retry-after of at most a minute
FIRST_PURGE = 64  # tenants that are kept before idle ones are forgotten
MOST_REPORTED = 32  # tenants with a label of their own in metrics
OTHERS = "other"


@dataclass(frozen=True)
class QueueBounds:
    """Bounds of all that waits. 0: none, except for max_num_waiting."""

    max_num_waiting: int
    max_num_queued_tokens: int = 0
    max_queue_s: float = 0.0


class Ask(NamedTuple):
    """A new request. is_bounded: refused if it would wait longer than max_queue_s. timeout_s: 0 for none."""

    n: int
    prompt_tokens: int
    is_bounded: bool = False
    timeout_s: float = 0.0


class Room(NamedTuple):
    """num_waiting: sequences that wait beyond those that free slots have room for. now: seconds of a monotonic clock. down_s:
    for how long the workers have been away; 0 if they are there. start_s: how long they take to start."""

    num_waiting: int = 0
    free_slots: int = 0
    now: float = 0.0
    down_s: float = 0.0
    start_s: float = 0.0


class Refusal(NamedTuple):
    code: ErrorCode
    text: str
    retry_after_s: int = 0


class TokenRate:
    """Tokens a second of steps: a mean that follows the load."""

    def __init__(self) -> None:
        self.known_s = 0.0  # seconds of such steps
        self._tokens = self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds
        self.known_s += seconds

    @property
    def per_s(self) -> float | None:
        """None while it is not known."""
        return self._tokens / self._seconds if self.known_s >= KNOWN_S and self._tokens > 0 else None


class Backlog:
    """mean_output: the running mean of output tokens of sequences that have ended."""

    def __init__(self, bounds: QueueBounds, mean_output: Callable[[], float] = lambda: 256.0) -> None:
        self.bounds = bounds
        # Steps with free slots say less about a full engine: a lone sequence has a fraction of the rate of a full batch.
        self.rate = TokenRate()  # of steps that requests waited for
        self.rate_before = TokenRate()  # of others with many rows; used until the former is known
        self.totals = Totals()
        self.mean_output = mean_output
        self._tenants: dict[str, TenantState] = {}
        self._purge_at = FIRST_PURGE

    def __iter__(self) -> Iterator[TenantState]:
        return iter(self._tenants.values())

    def tenant(self, limits: Tenant | None) -> TenantState:
        """The tenant of a request, with the limits that the request brings."""
        limits = limits or NO_LIMITS
        state = self._tenants.get(limits.name)
        if state is None:
            if len(self._tenants) >= self._purge_at:
                self._forget_idle()
            state = self._tenants[limits.name] = TenantState(limits, self.totals)
        elif state.limits != limits:
            state.limits = limits  # its operator has changed them
        return state

    def _forget_idle(self) -> None:
        self._tenants = {name: t for name, t in self._tenants.items() if not t.is_idle or t.limits.tokens_per_minute}
        self._purge_at = max(FIRST_PURGE, 2 * len(self._tenants))

    # ------------------------------------------------------------------------------------------------------ time
    def wait_s(self, tenant: TenantState) -> float:
        """How long a new request of this tenant would wait for what waits before it: at most for all that waits, and at most
        for its tenant's own requests together with the others' share of that time. 0 while the rate is not known."""
        rate = self.rate.per_s or self.rate_before.per_s
        if rate is None or not tenant.tokens_waiting:
            return 0.0
        return min(self.totals.tokens_waiting, tenant.tokens_waiting / self._share(tenant)) / rate

    def _share(self, tenant: TenantState) -> float:
        """The part of the engine that a tenant gets while it and the tenants that wait now have requests."""
        if len(self._tenants) == 1:
            return 1.0
        weights = sum(t.weight for t in self._tenants.values() if t.num_waiting and t is not tenant)
        return tenant.weight / (tenant.weight + weights)

    # ------------------------------------------------------------------------------------------------------ decisions
    def refusal(self, tenant: TenantState, ask: Ask, room: Room) -> Refusal | None:
        """Why a request is not taken; None if it is."""
        return self._beyond_own(tenant, ask, room) or self._beyond_all(tenant, ask, room) or self._too_late(tenant, ask, room)

    def _beyond_own(self, tenant: TenantState, ask: Ask, room: Room) -> Refusal | None:
        limits = tenant.limits
        if limits.max_waiting is not None:
            free = max(room.free_slots, int(tenant.is_idle))  # for one without any, another is preempted
            if limits.max_running is not None:
                free = min(free, max(limits.max_running - tenant.num_running, 0))
                if ask.n > limits.max_running + limits.max_waiting:
                    most = limits.max_running + limits.max_waiting
                    return Refusal("invalid", f"n may be at most {most} for this API key; got {ask.n}")
            if tenant.num_waiting + ask.n > free + limits.max_waiting:
                text = f"this API key may have {limits.max_waiting} requests that wait, and has as many"
                return Refusal("rate_limited", text, retry_after(self.wait_s(tenant)))
        left = tenant.tokens_left(room.now) - tenant.tokens_waiting
        if left <= 0:
            text = f"this API key has had its {limits.tokens_per_minute} tokens a minute"
            return Refusal("rate_limited", text, retry_after((1 - left) * 60 / limits.tokens_per_minute))
        return None

    def _beyond_all(self, tenant: TenantState, ask: Ask, room: Room) -> Refusal | None:
        """A tenant with less than its share of the queue is not refused because others have filled it."""
        bounds, totals = self.bounds, self.totals
        most, most_tokens = bounds.max_num_waiting, bounds.max_num_queued_tokens
        if ask.n > most:
            return Refusal("invalid", f"n may be at most --max-num-waiting, {most}; got {ask.n}")
        is_full = room.num_waiting + ask.n > most
        num, share = tenant.num_waiting + ask.n, most
        if not is_full and most_tokens and totals.prompt_tokens_waiting:
            is_full = totals.prompt_tokens_waiting + ask.prompt_tokens > most_tokens
            num, share = tenant.prompt_tokens_waiting + ask.prompt_tokens, most_tokens
        if not is_full or ((part := self._share(tenant)) < 1.0 and num <= share * part):
            return None
        return Refusal("overloaded", "too many requests are waiting; try again later", retry_after(self.wait_s(tenant)))

    def _too_late(self, tenant: TenantState, ask: Ask, room: Room) -> Refusal | None:
        most_s = self.bounds.max_queue_s if ask.is_bounded else 0.0
        if most_s and room.down_s > most_s:
            return self.workers_away(room.start_s)
        wait_s = self.wait_s(tenant)
        if ask.timeout_s and wait_s > ask.timeout_s:
            return Refusal("deadline_exceeded", f"the request cannot begin within its timeout: the queue takes {wait_s:.0f} s")
        if most_s and wait_s > most_s:
            return Refusal("overloaded", "the queue takes too long; try again later", retry_after(wait_s))
        return None

    def workers_away(self, start_s: float) -> Refusal:
        text = "the engine's workers are away for longer than a request may wait"
        return Refusal("unavailable", text, retry_after(start_s))

    # ------------------------------------------------------------------------------------------------------ for metrics
    def stats(self) -> list[TenantStats]:
        """Tenants with requests, those with most first; of those beyond MOST_REPORTED the sum."""
        live = [t for t in self._tenants.values() if not t.is_idle and t.limits.label]
        live.sort(key=lambda t: -t.num_waiting)
        found = [TenantStats(t.limits.label, t.num_waiting, t.num_running) for t in live[:MOST_REPORTED]]
        if rest := live[MOST_REPORTED:]:
            found.append(TenantStats(OTHERS, sum(t.num_waiting for t in rest), sum(t.num_running for t in rest)))
        return found

    def check(self) -> None:
        tenants = list(self._tenants.values())
        for tenant in tenants:
            tenant.check()
        assert self.totals.num_waiting == sum(t.num_waiting for t in tenants)
        assert self.totals.tokens_waiting == sum(t.tokens_waiting for t in tenants)


def retry_after(seconds: float) -> int:
    """A whole number of seconds that clients obey."""
    return max(math.ceil(seconds), LEAST_RETRY_S) if seconds < MOST_RETRY_S else MOST_RETRY_S
