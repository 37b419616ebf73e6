"""Faults of `soak.py --kill`: finds a server's processes by kind, sends them SIGKILL and SIGSTOP, and watches their memory.

The kinds: frontend (one of several: a single one is the launcher, which stays), core, worker, spare (a worker's process that is
kept ready), trial (tries grammars) and template (renders chat templates).
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from servers import alive, gpu_memory_mib, tree
from soak_ledger import Fault

MODULES = {
    "quire.frontend.http": "frontend",
    "quire.enginecore": "core",
    "quire.workers": "worker",
    "quire.enginecore.grammar.trial": "trial",
    "quire.frontend.text.request_templates": "template",
}
KINDS = (*MODULES.values(), "spare")
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
BOUNDS_MIB = {"launcher": 2.0, "frontend": 2.0, "core": 2.0, "worker": 32.0, "spare": 32.0}
GPU_BOUND_MIB = 32.0
BURST = 0.2  # part of the faults that come soon after the one before, perhaps while it is healed
PART = 5  # growth is the median of the last fifth of a process's samples after its warm-up, less that of the first


def parse_faults(text: str) -> list[tuple[str, str]]:
    """`worker:KILL,core:STOP` or `worker,core` (both signals). Raises ValueError that says what there is."""
    found = []
    for word in text.split(","):
        kind, _, name = word.strip().partition(":")
        if kind not in KINDS or (name and name.upper() not in SIGNALS):
            raise ValueError(f"--faults {word}: KIND:SIGNAL is needed, of {', '.join(KINDS)} and {', '.join(SIGNALS)}")
        found += [(kind, name.upper())] if name else [(kind, each) for each in SIGNALS]
    return found


class Processes:
    """The processes of one server. ranks: how many workers each core has; later ones are spares."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.ranks = 1
        groups = self._workers()
        self.ranks = max((len(pids) for pids in groups.values()), default=1)

    def by_kind(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for pid in tree(self.root):
            kind = MODULES.get(module_of(pid), "")
            if kind and kind != "worker" and alive(pid):
                found[kind].append(pid)
        for pids in self._workers().values():
            found["worker"] += pids[: self.ranks]
            found["spare"] += pids[self.ranks :]
        return found

    def _workers(self) -> dict[int, list[int]]:
        """By core: its workers' processes, by age."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for pid in tree(self.root):
            if module_of(pid) == "quire.workers" and alive(pid):
                parent, started = stat_of(pid)
                groups.setdefault(parent, []).append((started, pid))
        return {parent: [pid for _, pid in sorted(pids)] for parent, pids in groups.items()}


def module_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return ""


def stat_of(pid: int) -> tuple[int, int]:
    """The parent, and when it started; zeros for a process that has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1]), int(fields[19])
    return 0, 0


class Killer:
    """Sends signals at random moments, which depend only on the seed. Every fault of the list comes once in each round.

    kept: pids that get none, so that their memory can be judged. A stopped process stays stopped: the server must find it."""

    def __init__(self, processes: Processes, faults: list[tuple[str, str]], every_s: float, seed: int, kept: set[int]) -> None:
        self._processes, self._faults, self._every_s, self._kept = processes, faults, every_s, kept
        self._random = random.Random(seed)
        self._round: list[tuple[str, str]] = []
        self.absent: set[str] = set()  # kinds of which there was no process to kill

    async def run(self, sent: list[Fault], clock: Callable[[], float], until: float) -> None:
        while True:
            is_burst = self._random.random() < BURST
            pause = self._random.uniform(0.0, 2.0) if is_burst else self._random.uniform(0.5, 1.5) * self._every_s
            await asyncio.sleep(pause)
            if clock() >= until:
                return
            for _ in range(len(self._faults)):
                if (fault := self._next(clock)) is not None:
                    sent.append(fault)
                    break

    def _next(self, clock: Callable[[], float]) -> Fault | None:
        if not self._round:
            self._round = self._random.sample(self._faults, len(self._faults))
        kind, name = self._round.pop()
        pids = [pid for pid in self._processes.by_kind()[kind] if pid not in self._kept and not is_stopped(pid)]
        if not pids:
            self.absent.add(kind)
            return None
        pid = self._random.choice(pids)
        fault = Fault(clock(), kind, name, pid)
        try:
            os.kill(pid, SIGNALS[name])
        except ProcessLookupError:
            return None
        return fault


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class Memory:
    """RSS and PSS of each process, and the GPU's memory, over time."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._series: dict[int, list[tuple[float, float, float]]] = {}  # by pid: seconds, RSS, PSS
        self._kinds: dict[int, str] = {processes.root: "launcher"}
        self._gpu: list[tuple[float, float]] = []

    def sample(self, now: float) -> None:
        pids = self._processes.by_kind()
        self._kinds |= {pid: kind for kind, found in pids.items() for pid in found}
        for pid in (self._processes.root, *(pid for found in pids.values() for pid in found)):
            if (both := memory_mib(pid)) is not None:
                self._series.setdefault(pid, []).append((now, *both))
        gpu = gpu_memory_mib(tree(self._processes.root))
        if gpu is not None:
            self._gpu.append((now, gpu))

    def total_mib(self) -> float:
        last = max((series[-1][0] for series in self._series.values()), default=0.0)
        return sum(series[-1][2] for series in self._series.values() if series[-1][0] == last)

    def growth(self, warm_up_s: float, killed: set[int]) -> dict[str, dict[str, float]]:
        """MiB that processes grew by after the warm-up: those that were there at the beginning, with full caches, and were not
        killed."""
        found: dict[str, dict[str, float]] = {}
        begin = min((series[0][0] for series in self._series.values()), default=0.0)
        for pid, series in self._series.items():
            if series[0][0] > begin:
                continue
            steady = [sample for sample in series if sample[0] >= series[0][0] + warm_up_s]
            if pid in killed or len(steady) < 2 * PART or steady[-1][0] - steady[0][0] < warm_up_s / 2:
                continue
            rss, pss = grown([rss for _, rss, _ in steady]), grown([pss for _, _, pss in steady])
            found[f"{self._kinds[pid]} {pid}"] = {"rss": rss, "pss": pss, "lived_s": round(series[-1][0] - series[0][0])}
        return found

    def gpu_growth(self, warm_up_s: float) -> float | None:
        """As its highest use: workers that are away use none."""
        steady = [mib for at, mib in self._gpu if at >= self._gpu[0][0] + warm_up_s]
        part = len(steady) // PART
        return round(max(steady[-part:]) - max(steady[:part]), 1) if part else None


def grown(values: list[float]) -> float:
    part = max(len(values) // PART, 1)
    return round(sorted(values[-part:])[part // 2] - sorted(values[:part])[part // 2], 1)


def broken_bounds(growth: dict[str, dict[str, float]], gpu: float | None) -> list[str]:
    """The memory that grew too much. The lesser of RSS and PSS counts: pages that two processes share move between them."""
    found = []
    for name, mib in growth.items():
        bound = BOUNDS_MIB.get(name.split()[0])
        if bound is not None and min(mib["rss"], mib["pss"]) > bound:
            found.append(f"{name} grew by {min(mib['rss'], mib['pss'])} MiB, more than {bound:g}")
    if gpu is not None and gpu > GPU_BOUND_MIB:
        found.append(f"the GPU's memory grew by {gpu} MiB, more than {GPU_BOUND_MIB:g}")
    return found


def memory_mib(pid: int) -> tuple[float, float] | None:
    """RSS and PSS; None for a process that has ended."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines[1:] if line.split()[0] in ("Rss:", "Pss:")}
        return found["Rss:"], found["Pss:"]
    return None
