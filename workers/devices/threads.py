"""The number of threads that a CPU worker computes with."""

import os
from pathlib import Path

import torch

from quire.ipc.process.cpus import cpu_share

SMALL_WEIGHTS_BYTES = 64 << 20
CPUS = Path("/sys/devices/system/cpu")


def choose_num_threads(weights_bytes: int, ranks: int = 1) -> int:
    """Threads for a model of this many bytes: one for a small model, else as many as OMP_NUM_THREADS or MKL_NUM_THREADS says,
    else the physical cores that this process may use, within its container's share of the CPU, divided by the ranks.

    A step of a small model is a few hundred operations of microseconds each: splitting them over threads costs more than it
    gains, since each split waits for the slowest thread. If another process takes a core for a moment, that is milliseconds:
    with two threads on two busy cores a step of 1.4 ms took 25 to 48.
    """
    if weights_bytes < SMALL_WEIGHTS_BYTES:
        return 1
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return torch.get_num_threads()
    return max(1, min(num_physical_cores(), cpu_share()) // ranks)


def num_physical_cores() -> int:
    """Physical cores that this process may run on: hyper-threads of one core count once."""
    allowed = os.sched_getaffinity(0)
    cores = {(_topology(cpu, "physical_package_id"), _topology(cpu, "core_id") or str(cpu)) for cpu in allowed}
    return len(cores)


def _topology(cpu: int, what: str) -> str:
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / what).read_text().strip()
    except OSError:
        return ""
