"""The share of the machine's CPU that this process may use: it decides which loops may spin, and the number of threads."""

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cpu_share() -> int:
    """Number of cores that this process may run on, at most the CPU time of its control group (version 2), rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_MAX.read_text().split()
        return min(allowed, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no such control group, or "max"
        return allowed
