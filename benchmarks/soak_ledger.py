"""The ledger of `soak.py --kill`: every request that was sent, exactly once, with its end. It sends nothing and kills nothing.

An entry ends as one of `ENDS`:

    right     the answer is the one that the server gave before the first kill
    error     an error that names its cause, and the cause is admissible: a fault that explains it was injected (CAUSES)
    left out  a line of a batch that was never accepted, because the request that would have made the batch got such an error
    wrong     another answer, or an error that nothing explains
    doubled   a second end, more choices than were asked for, or a batch line that was answered twice
    lost      no end within the client's patience, or none at all
"""

import bisect
import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ENDS = ("right", "error", "left out", "wrong", "doubled", "lost")
ENGINE_KINDS = frozenset(("core", "worker", "spare"))


class Fault(NamedTuple):
    """A signal that was sent. at: seconds of the client's clock."""

    at: float
    kind: str  # of the process
    signal: str  # KILL or STOP
    pid: int


class Cause(NamedTuple):
    """When an error is admissible: after a fault of one of these kinds of processes.

    within_s: how long after the fault an error may still come of it, with 10 s for finding a stopped process among them.
    least: how many such faults the request must have been open at."""

    kinds: frozenset[str]
    within_s: float
    least: int = 1
    why: str = ""


# By the error's code, or one of the names that `cause_of` gives to a connection's end.
CAUSES: dict[str, Cause] = {
    "connection lost": Cause(frozenset(("frontend",)), 20.0, why="the frontend that answered died with its connections"),
    "cannot connect": Cause(frozenset(("frontend",)), 20.0, why="no frontend accepts connections yet"),
    "response stopped": Cause(
        frozenset(("frontend",)), 90.0, why="a response in the background ends with its frontend; its record's lease runs out"
    ),
    "engine_down": Cause(ENGINE_KINDS, 60.0, why="the engine or its workers are away"),
    "overloaded": Cause(ENGINE_KINDS | {"trial", "template"}, 60.0, why="the queue is long, or a helper was lost twice"),
    "engine_error": Cause(ENGINE_KINDS, 60.0, least=2, why="the request ran at two deaths and had no new token between them"),
}


class Observed(NamedTuple):
    """The part of an answer that a client saw."""

    text: str
    tokens: int = 0
    finish: str = ""


@dataclass
class Entry:
    number: int
    kind: str
    began: float
    ended: float = 0.0
    end: str = ""  # "" while the request is open
    cause: str = ""  # of an error
    note: str = ""


def cause_of(status: int, error: str) -> str:
    """The code of an error that a client saw: the server's own code, or a name for what happened to the connection."""
    if "cannot connect" in error or "ConnectionRefused" in error:
        return "cannot connect"
    if "connection was lost" in error or "ConnectionReset" in error or "BrokenPipe" in error:
        return "connection lost"
    if "server that ran this response was stopped" in error:
        return "response stopped"
    for code in ("engine_down", "overloaded", "engine_error"):
        if f'"{code}"' in error:
            return code
    return f"status {status}" if status not in (0, 200) else "unknown"


def unexplained(cause: str, entry: Entry, now: float, faults: Iterable[Fault]) -> str:
    """Why an error is not admissible; "" if it is."""
    allowed = CAUSES.get(cause)
    if allowed is None:
        return f"{cause} is no cause that a kill may have"
    near = [f for f in faults if f.kind in allowed.kinds and f.at <= now and f.at >= entry.began - allowed.within_s]
    if allowed.least > 1:
        near = [fault for fault in near if fault.at >= entry.began]
    if len(near) < allowed.least:
        return f"{cause}, but there were {len(near)} faults of {', '.join(sorted(allowed.kinds))} that explain it"
    return ""


def differs(expected: Observed, observed: Observed, by_text: bool) -> str:
    """How an answer differs from the expected one; "" if it does not. by_text: else lengths and finish reasons are compared."""
    if expected.finish != observed.finish:
        return f"finish reason {observed.finish!r} instead of {expected.finish!r}"
    if expected.tokens != observed.tokens:
        return f"{observed.tokens} tokens instead of {expected.tokens}"
    if by_text and expected.text != observed.text:
        at = next((i for i, (a, b) in enumerate(zip(expected.text, observed.text, strict=False)) if a != b), 0)
        return f"from character {at} on, {observed.text[at : at + 40]!r} instead of {expected.text[at : at + 40]!r}"
    return ""


@dataclass
class Ledger:
    """by_text: whether texts must be equal; else lengths and finish reasons."""

    by_text: bool = True
    faults: list[Fault] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # entries that break the rules, as text; the first of them

    def send(self, kind: str, now: float) -> Entry:
        """A request is sent: its entry."""
        self.entries.append(Entry(len(self.entries), kind, now))
        return self.entries[-1]

    def answer(self, entry: Entry, now: float, expected: Observed, observed: Observed) -> None:
        """An answer has come, without an error."""
        problem = differs(expected, observed, self.by_text)
        self._end(entry, now, "wrong" if problem else "right", note=problem)

    def error(self, entry: Entry, now: float, status: int, error: str) -> None:
        """An error has come, or the connection has ended."""
        cause = cause_of(status, error)
        problem = unexplained(cause, entry, now, self.faults)
        self._end(entry, now, "wrong" if problem else "error", cause, f"{problem}: {error[:300]}" if problem else "")

    def leave_out(self, entry: Entry, now: float) -> None:
        self._end(entry, now, "left out")

    def double(self, entry: Entry, note: str) -> None:
        entry.end, entry.note = "doubled", note
        self._show(entry)

    def lose(self, entry: Entry, now: float, note: str) -> None:
        self._end(entry, now, "lost", note=note)

    def close(self, now: float) -> None:
        """The run is over: what is open is lost."""
        for entry in self.entries:
            if not entry.end:
                self.lose(entry, now, "it is still open at the end")

    def _end(self, entry: Entry, now: float, end: str, cause: str = "", note: str = "") -> None:
        if entry.end:
            return self.double(entry, f"it ended as {entry.end}, and again as {end}")
        entry.ended, entry.end, entry.cause, entry.note = now, end, cause, note
        if end in ("wrong", "lost"):
            self._show(entry)
        return None

    def _show(self, entry: Entry) -> None:
        when = f"sent at {entry.began:.1f} s, {entry.end} at {entry.ended:.1f} s"
        text = f"request {entry.number} ({entry.kind}), {when}: {entry.note}"
        if len(self.shown) < 30:
            self.shown.append(text)
            print(f"  {text}", flush=True)

    # ------------------------------------------------------------------------------------------------------ results
    def ends(self) -> dict[str, int]:
        """How many requests ended so; `open`: not yet."""
        found = collections.Counter(entry.end or "open" for entry in self.entries)
        return {end: found.get(end, 0) for end in (*ENDS, "open")}

    def errors(self) -> dict[str, int]:
        return dict(collections.Counter(entry.cause for entry in self.entries if entry.end == "error"))

    def errors_by_kind(self) -> dict[str, int]:
        return dict(collections.Counter(f"{entry.kind}: {entry.cause}" for entry in self.entries if entry.end == "error"))

    def kills(self) -> dict[str, int]:
        return dict(collections.Counter(f"{fault.kind}:{fault.signal}" for fault in self.faults))


class Stalls:
    """Times in which a client that streams saw nothing, from a chunk to the next one, perhaps of a later request."""

    LEAST_S = 0.1

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._stalls: list[tuple[int, float, float]] = []  # client, from, to

    def progress(self, client: int, now: float) -> None:
        last = self._last.get(client, now)
        if now - last >= self.LEAST_S:
            self._stalls.append((client, last, now))
        self._last[client] = now

    def pause(self, client: int) -> None:
        """The client sends nothing for a while by its own will."""
        self._last.pop(client, None)

    def worst_s(self) -> float:
        return max((to - begin for _, begin, to in self._stalls), default=0.0)

    def by_fault(self, faults: list[Fault]) -> dict[str, dict[str, float]]:
        """By kind and signal: of the clients that stood still, for how long after the fault.

        A stall belongs to the first fault that came during it, else to the last one before it."""
        times = [fault.at for fault in faults]
        longest: dict[tuple[int, int], float] = {}  # by fault and client
        for client, begin, to in self._stalls:
            number = bisect.bisect_left(times, begin)
            if number == len(times) or times[number] >= to:
                number -= 1
            if number >= 0:
                longest[number, client] = max(longest.get((number, client), 0.0), to - max(begin, times[number]))
        found: dict[str, list[float]] = {f"{fault.kind}:{fault.signal}": [] for fault in faults}
        for (number, _), seconds in longest.items():
            found[f"{faults[number].kind}:{faults[number].signal}"].append(seconds)
        return {name: spread(values) for name, values in sorted(found.items())}


def spread(values: list[float]) -> dict[str, float]:
    """count, median, P99 and worst."""
    values = sorted(values)
    if not values:
        return {"count": 0, "median": 0.0, "p99": 0.0, "worst": 0.0}
    at = {"median": len(values) // 2, "p99": min(len(values) * 99 // 100, len(values) - 1), "worst": -1}
    return {"count": len(values), **{name: round(values[i], 2) for name, i in at.items()}}
