"""TenantState: what the core knows of one tenant, that is of one API key or of all keys with one name in the limits file.

It counts the tenant's sequences and tokens, waiting and running. `served` is its place among the tenants: the tokens that it
has had, divided by its weight (the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models").
Backlog (backlog.py) owns all of them; the scheduler's WaitingQueue and preparation.py report what happens. No I/O, no clock.
"""

import math
from typing import Any

from quire.ipc.messages.frontend import Tenant

NO_LIMITS = Tenant()
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


class Totals:
    """The waiting requests of all tenants together."""

    __slots__ = ("num_waiting", "prompt_tokens_waiting", "tokens_waiting")

    def __init__(self) -> None:
        self.num_waiting = 0
        self.prompt_tokens_waiting = 0
        self.tokens_waiting = 0


class TenantState:
    """waiting: accepted and without a slot, also while it is prepared. tokens_waiting: prompts and expected outputs."""

    __slots__ = (
        "_level",
        "_refilled_at",
        "_totals",
        "limits",
        "num_running",
        "num_waiting",
        "prompt_tokens_waiting",
        "ready",
        "served",
        "tokens_waiting",
    )

    def __init__(self, limits: Tenant = NO_LIMITS, totals: Totals | None = None) -> None:
        self.limits = limits
        self.ready: list[Any] = []  # the WaitingQueue's, in order
        self.served = 0.0
        self.num_running = 0  # sequences with a slot
        self.num_waiting = self.prompt_tokens_waiting = self.tokens_waiting = 0
        self._totals = totals or Totals()
        self._level = float(limits.tokens_per_minute)  # tokens that it may still have, of `tokens_per_minute`
        self._refilled_at = -math.inf

    @property
    def weight(self) -> float:
        given = self.limits.weight
        return min(max(given, LEAST_WEIGHT), MOST_WEIGHT) if given == given else 1.0  # NaN

    @property
    def may_start(self) -> bool:
        """Whether one more of its sequences may run."""
        most = self.limits.max_running
        return most is None or self.num_running < most

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running

    # ------------------------------------------------------------------------------------------------ what waits
    def add_waiting(self, prompt_tokens: int, tokens: int) -> None:
        """A sequence waits. tokens: its prompt's and its expected output's."""
        totals = self._totals
        self.num_waiting += 1
        self.prompt_tokens_waiting += prompt_tokens
        self.tokens_waiting += tokens
        totals.num_waiting += 1
        totals.prompt_tokens_waiting += prompt_tokens
        totals.tokens_waiting += tokens

    def remove_waiting(self, prompt_tokens: int, tokens: int) -> None:
        totals = self._totals
        self.num_waiting -= 1
        self.prompt_tokens_waiting -= prompt_tokens
        self.tokens_waiting -= tokens
        totals.num_waiting -= 1
        totals.prompt_tokens_waiting -= prompt_tokens
        totals.tokens_waiting -= tokens

    # ------------------------------------------------------------------------------------------------ what it has had
    def start(self, tokens: int) -> None:
        """A sequence starts that is expected to need so many tokens."""
        self.num_running += 1
        self._charge(tokens)

    def stop(self, charged: int, tokens: int) -> None:
        """It has given back its slot and needed `tokens`; `charged` were counted when it started."""
        self.num_running -= 1
        self._charge(tokens - charged)

    def _charge(self, tokens: int) -> None:
        self.served += tokens / self.weight
        self._level -= tokens

    def tokens_left(self, now: float) -> float:
        """Tokens that it may still have, by its limit of tokens a minute; infinite without one. May be negative.

        now: seconds of a monotonic clock. A minute's tokens may be used at once, and come back evenly over a minute.
        """
        most = self.limits.tokens_per_minute
        if not most:
            return math.inf
        if self._refilled_at == -math.inf:
            self._level = float(most)
        else:
            self._level = min(self._level + most / 60 * max(now - self._refilled_at, 0.0), float(most))
        self._refilled_at = now
        return self._level

    def check(self) -> None:
        counts = self.num_waiting, self.num_running, self.prompt_tokens_waiting, self.tokens_waiting
        assert min(counts) >= 0, counts
