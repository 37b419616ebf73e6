"""Resource usage of a process of this host, read from /proc: the numbers behind Prometheus' `process_*`.

The core reads its own and its workers' for each Heartbeat, a frontend its own and its neighbors' for each scrape: some 40 us
each.
"""

import os
from functools import cache

import msgspec

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One process. name: "frontend-0", "server", "engine", "worker-0"."""

    name: str
    cpu_s: float  # user and system time since its start
    resident_bytes: int
    virtual_bytes: int
    start_time: float  # seconds since the Unix epoch
    open_fds: int
    max_fds: float  # infinity: no limit


def process_usage(pid: int, name: str) -> ProcessUsage | None:
    """The usage of a process; None if it has ended, is another user's, or there is no /proc."""
    folder = f"/proc/{pid}"
    try:
        with open(f"{folder}/stat", "rb") as file:
            # split after the program's name, which may contain anything; fields[0] is the state, proc(5)'s third field
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in b"ZX":
            return None  # a zombie: dead, and its parent has not waited for it yet
        return ProcessUsage(
            name,
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            resident_bytes=int(fields[21]) * _PAGE_BYTES,
            virtual_bytes=int(fields[20]),
            start_time=_boot_time() + int(fields[19]) / _TICKS_PER_S,
            open_fds=len(os.listdir(f"{folder}/fd")),
            max_fds=_max_fds(folder),
        )
    except (OSError, ValueError, IndexError):
        return None


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads since its start; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return 0.0


def _max_fds(folder: str) -> float:
    with open(f"{folder}/limits") as file:
        soft = next(line.split()[3] for line in file if line.startswith("Max open files"))
    return float("inf") if soft == "unlimited" else float(soft)


@cache
def _boot_time() -> int:
    with open("/proc/stat") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("btime "))
