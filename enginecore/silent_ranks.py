"""SilentRanks: finds the ranks that the others wait for, once some ranks report that they have waited for too long.

A rank reports a failed exchange (PeerSilent) and waits for its end. The rank at fault reports nothing: it is dead, which
WorkerGroup sees first; or stopped; or stuck, and then it is still silent when all others have had time to report. With pipeline
stages not all others need to wait for it: a stage that has finished its part of the step is silent, too.
"""

import time
from collections.abc import Callable, Sequence

from quire.ipc.process.stopped import StoppedFor

STOPPED_SHARE = 0.8  # of the time-out: a stopped rank is found, and its process replaced, before the others give up
GRACE_S = 1.0  # from the first report to the last: the ranks began to wait within milliseconds of each other


class SilentRanks:
    """Serves one generation of workers. stage_size: ranks of a stage; None: there is one stage, with all ranks."""

    def __init__(
        self,
        timeout_s: float,
        stage_size: int | None = None,
        where: Callable[[int], str] = lambda rank: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """where: words after a worker's number, for models on several hosts. clock: for ranks stopped outside a step."""
        self._timeout_s = timeout_s
        self._stage_size, self._where = stage_size, where
        self._said: dict[int, str] = {}
        self._since = 0.0
        self._stopped_for = StoppedFor(clock)

    def heard(self, rank: int, message: str, now: float) -> None:
        """A rank has reported that it waits for others for too long."""
        if not self._said:
            self._since = now
        self._said.setdefault(rank, message)

    @property
    def has_heard(self) -> bool:
        """Whether some rank has reported that it waits for others for too long."""
        return bool(self._said)

    def verdict(self, stopped: Sequence[int], size: int, now: float) -> str | None:
        """The ranks at fault, in words for the user, once they are known. All `size` ranks live; stopped: by a signal."""
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

    def stopped_for_long(self, stopped: Sequence[int], meanwhile: str) -> str | None:
        """Words on ranks that have been stopped for too long; the caller looks repeatedly. Ranks may be stopped while no other
        waits for them in an exchange: there is only one, or all are stopped, or they start, or they have nothing to do."""
        stopped_s = self._stopped_for.seconds(bool(stopped))
        if stopped_s <= STOPPED_SHARE * self._timeout_s:
            return None
        return f"{self._workers(stopped)} stopped by a signal {stopped_s:.3g} s ago, and {meanwhile}"

    def _silent(self, num_ranks: int) -> list[int]:
        """The silent ranks that the others wait for: those in the stages of ranks that reported, or else in the stages before
        these. Before the first stage comes the last one, because it samples the tokens that the first one needs."""
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
