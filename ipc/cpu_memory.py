"""The memory that an engine on a CPU may take: what this machine has left, and how it is divided.

The kernel's MemAvailable and the limits of the process's cgroups are read, and the smaller one counts; swap does not. Workers
refuse by these formulas what does not fit, before they load any weights, and `quire estimate --device cpu` predicts it.
"""

from pathlib import Path
from typing import NamedTuple

from quire.ipc.memory_plan import GIB, MIB

# The memory of processes besides weights, activations and KV cache; some of it grows with the vocabulary. Measured in MiB, by
# proportional set size, with vocabularies of 512 (the bundled model's) and of 128,256 tokens:
#   a frontend 42 and 103, with two helpers that render chat templates (19 and 20 each)
#   a core 39 and 131, with three helpers that try grammars (26 and 105 each)
FRONTEND_BYTES, FRONTEND_TOKEN_BYTES = 96 * MIB, 1024  # merges of a tokenizer take as much as its tokens
CORE_BYTES, CORE_TOKEN_BYTES = 128 * MIB, 3072
PARENT_BYTES = 48 * MIB  # of several frontends: 37 MiB
WORKER_BYTES = 224 * MIB  # torch and its libraries: a worker took 201 MiB with the bundled model loaded
MOST_DEFAULT_KV_BYTES = 8 * GIB
UNKNOWN_KV_BYTES = GIB // 2  # where the free memory cannot be read
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


class CpuNeeds(NamedTuple):
    """Bytes of one rank, and how many like it share the machine."""

    weights: int
    activations: int
    ranks: int  # of one engine
    engines: int
    itemsize: int  # bytes of an element of the model's dtype
    is_packed: bool = False  # weights have few bits, whatever the dtype is
    frontends: int = 1
    vocab_size: int = 0

    @property
    def processes(self) -> int:
        """Bytes of all processes on the machine beside weights, activations and KV caches."""
        return process_bytes(self.ranks, self.engines, self.frontends, self.vocab_size)


class Available(NamedTuple):
    """The memory that processes may take, and the limit that says so."""

    num_bytes: int
    limit: str


# -------------------------------------------------------------------------------------------------------- what is there
def available(root: Path = Path("/")) -> Available | None:
    """Memory that processes started now can take, by the /proc and /sys below `root`. None if neither tells, as on macOS."""
    rooms = [Available(room, "the limit of the cgroup") for room in _cgroup_rooms(root)]
    free = _mem_available(_text(root / "proc/meminfo"))
    return min([*rooms, *([] if free is None else [Available(free, "MemAvailable")])], default=None)


def _mem_available(meminfo: str) -> int | None:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    words = fields.get("MemAvailable", "").split()
    return int(words[0]) << 10 if words and words[0].isdecimal() else None


def _cgroup_rooms(root: Path) -> list[int]:
    """Limit minus use of this process's memory cgroup and of each one above it."""
    mounts, rooms = root / "sys/fs/cgroup", []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _along(mounts / "memory", path, *names)
        elif not controllers:
            mount = mounts if (mounts / "cgroup.controllers").exists() else mounts / "unified"
            rooms += _along(mount, path, "memory.max", "memory.current", "inactive_file")
    return rooms


def _along(mount: Path, path: str, limit: str, use: str, reclaimable: str) -> list[int]:
    """Absent folders are passed over: a container may see its own cgroup at the mount, and not under the path's name."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    rooms = []
    for n in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:n])
        most, used = _number(folder / limit), _number(folder / use)
        if most is not None and used is not None and most < NO_LIMIT:
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if len(line.split()) == 2)
            cached = int(stat.get(reclaimable, 0))  # pages of files, which the kernel drops before it kills anything
            rooms.append(max(0, most - max(0, used - cached)))
    return rooms


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------- how it is divided
def process_bytes(ranks: int, engines: int, frontends: int = 1, vocab_size: int = 0) -> int:
    """The memory that all processes take beside weights, activations and KV cache. Several frontends have a parent process. On
    a host of `quire host`, its two processes are in place of the frontend and the core."""
    parent = PARENT_BYTES if frontends > 1 else 0
    frontend, core = FRONTEND_BYTES + vocab_size * FRONTEND_TOKEN_BYTES, CORE_BYTES + vocab_size * CORE_TOKEN_BYTES
    return parent + frontends * frontend + engines * (core + ranks * WORKER_BYTES)


def room_for_kv(available: int, needs: CpuNeeds) -> int:
    """Bytes that one rank's KV cache may take; negative if weights and activations do not fit."""
    share = (available - needs.processes) // (needs.ranks * needs.engines)
    return share - needs.weights - needs.activations


def default_kv_bytes(room: int | None, copies: int = 1) -> int:
    """One rank's KV cache without a flag: half of what is left. The bound is for all `copies` on the machine together."""
    return UNKNOWN_KV_BYTES if room is None else max(0, min(room // 2, MOST_DEFAULT_KV_BYTES // copies))


def refusal(available: int, needs: CpuNeeds, kv_bytes: int, limit: str = "") -> str | None:
    """Why the model cannot start with a KV cache of kv_bytes in each rank, in one line; None if it fits.

    limit: what says how much is available, if that was read.
    """
    room = room_for_kv(available, needs)
    if kv_bytes <= room:
        return None
    copies, processes = needs.ranks * needs.engines, needs.processes
    total = copies * (needs.weights + needs.activations + kv_bytes) + processes
    parts = (("weights", needs.weights), ("activations", needs.activations), ("KV cache", kv_bytes))
    listed = ", ".join(f"{name} {copies * size / GIB:.2f}" for name, size in parts)
    left, too_large = available - processes, "the KV cache does"
    if copies * needs.weights > left:
        too_large = "the weights do"
    elif room < 0:
        too_large = "weights and activations do"
    shared = f" for {copies} workers" if copies > 1 else ""
    return (
        f"{too_large} not fit into this machine's memory: {total / GIB:.2f} GiB are needed{shared} ({listed}, processes "
        f"{processes / GIB:.2f}), and {available / GIB:.2f} GiB are available"
        f"{f' by {limit}' if limit else ''}. {_advice(needs, room, left, kv_bytes)}"
    )


def _advice(needs: CpuNeeds, room: int, left: int, kv_bytes: int) -> str:
    copies, helps = needs.ranks * needs.engines, []
    if needs.itemsize == 4 and not needs.is_packed and kv_bytes <= room + (needs.weights + needs.activations) // 2:
        helps.append("--dtype bfloat16")
    if room >= 0:
        helps += [
            "a smaller KV cache (--cpu-kv-cache-gib, --kv-cache-memory-bytes, --num-gpu-blocks-override)",
            "a smaller --max-model-len or --max-num-seqs",
        ]
    else:
        helps.append("a model of fewer bits or parameters")
        if copies * needs.weights <= left:  # a step can be smaller, and weights cannot
            helps.append("a smaller --max-num-batched-tokens or --max-num-seqs")
    if needs.frontends > 1:
        helps.append("a smaller --frontends")
    if needs.engines > 1:
        helps.append("a smaller --data-parallel-size")
    if needs.ranks > 1:
        helps.append("fewer ranks")
    return f"This may help: {', '.join(helps)}, or more memory"
