"""SilentRanks: which of a model's ranks the others wait for, once some of them say that they wait too long.

A rank whose exchange fails says so (PeerSilent) and waits for its end. Who is at fault says nothing: it is dead, which
WorkerGroup sees first; or stopped; or stuck, and then it has not spoken when all others have had their time to. Of a model in
stages not all others need wait for it: a stage may have done its part, and then says nothing, either.
"""

import time
from collections.abc import Callable, Sequence

from quire.ipc.process.stopped import StoppedFor

GRACE_S = 1.0  # from the first that speaks to the last: they began to wait within milliseconds of each other


class SilentRanks:
    """Of one generation. stage_size: ranks of a stage, None: of all, there is one."""

    def __init__(
        self,
        timeout_s: float,
        stage_size: int | None = None,
        where: Callable[[int], str] = lambda rank: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """where: words behind a worker's number, for models on several hosts. clock: of what is no step."""
        self._timeout_s = timeout_s
        self._stage_size, self._where = stage_size, where
        self._said: dict[int, str] = {}
        self._since = 0.0
        self._stopped_for = StoppedFor(clock)

    def heard(self, rank: int, message: str, now: float) -> None:
        """A rank waits for others."""
        if not self._said:
            self._since = now
        self._said.setdefault(rank, message)

    @property
    def has_heard(self) -> bool:
        """Whether some rank waits for others for too long."""
        return bool(self._said)

    def verdict(self, stopped: Sequence[int], size: int, now: float) -> str | None:
        """Who is at fault, for the user, once that is clear. All `size` ranks live; stopped: those whose processes are."""
        if not self._said:
            return None
        if stopped:
            return f"{self._workers(stopped)} stopped by a signal; the others waited in an exchange"
        silent = self._silent(size)
        if silent and now - self._since < GRACE_S:
            return None
        rank, message = next(iter(self._said.items()))
        says = f"worker {rank}{self._where(rank)} says: {message}"
        if silent:
            return f"{self._workers(silent)} silent in an exchange for --collective-timeout-s ({self._timeout_s:g} s); {says}"
        return f"the exchange between the workers failed: {says}"

    def stopped_in_step(self, stopped: Sequence[int], age_s: float) -> str | None:
        """Of a step of this age: ranks that are all stopped wait for nobody, and say nothing."""
        if not stopped or age_s <= self._timeout_s:
            return None
        return f"{self._workers(stopped)} stopped by a signal, and a step has taken {age_s:.3g} s"

    def stopped_for_long(self, stopped: Sequence[int], meanwhile: str) -> str | None:
        """Of ranks that start or have nothing to do, looked at again and again: nobody waits for them in an exchange."""
        stopped_s = self._stopped_for.seconds(bool(stopped))
        if stopped_s <= self._timeout_s:
            return None
        return f"{self._workers(stopped)} stopped by a signal {stopped_s:.3g} s ago, and {meanwhile}"

    def _silent(self, num_ranks: int) -> list[int]:
        """Of the ranks that have said nothing those that the others wait for: in their own stages, or else in the stages before
        these, where the first one's is the last, whose tokens it needs."""
        size = self._stage_size or num_ranks
        speaking = {rank // size for rank in self._said}
        silent = [rank for rank in range(num_ranks) if rank not in self._said]
        own = [rank for rank in silent if rank // size in speaking]
        return own or [rank for rank in silent if (rank // size + 1) % (num_ranks // size) in speaking]

    def _workers(self, ranks: Sequence[int]) -> str:
        names = [f"{rank}{self._where(rank)}" for rank in ranks]
        if len(names) == 1:
            return f"worker {names[0]} was"
        return f"workers {', '.join(names[:-1])} and {names[-1]} were"
