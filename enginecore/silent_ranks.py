"""SilentRanks: which of a model's ranks the others wait for, once some of them say that they wait too long.

A rank whose exchange fails says so (PeerSilent) and waits for its end. Who is at fault says nothing: it is dead, which
WorkerGroup sees first; or stopped; or stuck, and then it has not spoken when all others have had their time to.
"""

from collections.abc import Callable, Sequence

GRACE_S = 1.0  # from the first that speaks to the last: they began to wait within milliseconds of each other


class SilentRanks:
    """Of one generation."""

    def __init__(self, timeout_s: float, where: Callable[[int], str] = lambda rank: "") -> None:
        """where: words behind a worker's number, for models on several hosts."""
        self._timeout_s = timeout_s
        self._where = where
        self._said: dict[int, str] = {}
        self._since = 0.0

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
        mute = [rank for rank in range(size) if rank not in self._said]
        if mute and now - self._since < GRACE_S:
            return None
        rank, message = next(iter(self._said.items()))
        says = f"worker {rank}{self._where(rank)} says: {message}"
        if mute:
            return f"{self._workers(mute)} silent in an exchange for --collective-timeout-s ({self._timeout_s:g} s); {says}"
        return f"the exchange between the workers failed: {says}"

    def _workers(self, ranks: Sequence[int]) -> str:
        names = [f"{rank}{self._where(rank)}" for rank in ranks]
        if len(names) == 1:
            return f"worker {names[0]} was"
        return f"workers {', '.join(names[:-1])} and {names[-1]} were"
