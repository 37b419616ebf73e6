"""How much of the machine's CPU this process may use: what may spin, and how many threads are worth having."""

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cpu_share() -> int:
    """Cores that this process may run on, at most those whose time its control group (version 2) grants, rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_MAX.read_text().split()
        return min(allowed, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no such control group, or "max"
        return allowed
