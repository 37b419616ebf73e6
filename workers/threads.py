"""How many threads a CPU worker computes with."""

import os
from pathlib import Path

SMALL_WEIGHTS_BYTES = 64 << 20
MIN_THREADS, ENV = 1, ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CPUS = Path("/sys/devices/system/cpu")


def choose_num_threads(weights_bytes: int) -> int | None:
    """Threads for a model of so many bytes; None where the user has said how many, in OMP_NUM_THREADS or MKL_NUM_THREADS.

    A small model's step is a few hundred operations of microseconds each: to split them over threads costs more than it gains,
    and each split waits for the slowest thread, which on a busy machine may be off its core for milliseconds. From
    SMALL_WEIGHTS_BYTES on: all physical cores that this process may use.
    """
    if any(os.environ.get(name) for name in ENV):
        return None
    return MIN_THREADS if weights_bytes < SMALL_WEIGHTS_BYTES else num_physical_cores()


def num_physical_cores() -> int:
    """Cores that this process may run on, hyper-threads of one counted once."""
    allowed = os.sched_getaffinity(0)
    cores = {(_topology(cpu, "physical_package_id"), _topology(cpu, "core_id") or str(cpu)) for cpu in allowed}
    return len(cores)


def _topology(cpu: int, what: str) -> str:
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / what).read_text().strip()
    except OSError:
        return ""
