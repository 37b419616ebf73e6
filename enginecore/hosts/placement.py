"""Places ranks on hosts and GPUs: on the core's own host or on others. Pure functions; called once, at the start.

Each host has consecutive ranks, in the order of the hosts, so that ranks that share layers are next to each other. The output
rank is on the core's own host, because its results come through shared memory; so that host has the first ranks, or the last.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quire.ipc.links.core_and_hosts import check_host_address
from quire.ipc.links.curve import parse_key


class HostEntry(NamedTuple):
    """Another host: where its agent listens, the agent's public key, how many of its GPUs (or processes, on a CPU) we use."""

    address: str
    public_key: bytes
    num_gpus: int


class RankPlacement(NamedTuple):
    """Where one rank runs. host: an index into Placement.hosts, None for the core's own host."""

    host: int | None
    device_index: int  # among the GPUs that the host's agent, or the core, sees
    group_on_one_host: bool  # whether all ranks that share this one's layers are on one host


class Placement(NamedTuple):
    hosts: list[HostEntry]
    ranks: list[RankPlacement]  # by rank

    def ranks_of(self, host: int | None) -> list[int]:
        return [rank for rank, entry in enumerate(self.ranks) if entry.host == host]


class PlacementError(ValueError):
    """The ranks cannot be placed; the text is for the user."""


def all_here(world_size: int, first_device: int = 0) -> Placement:
    """Every rank on the core's own host."""
    return Placement([], [RankPlacement(None, first_device + rank, True) for rank in range(world_size)])


def place(
    hosts: Sequence[HostEntry], world_size: int, group_size: int, output_rank: int, devices: Sequence[int] | None
) -> Placement:
    """Place ranks on the other hosts, and the rest here. devices: numbers of the GPUs here, None for processes on a CPU.

    group_size: how many ranks, one after another, share their layers. Raises PlacementError.
    """
    elsewhere = sum(host.num_gpus for host in hosts)
    num_here = world_size - elsewhere
    if num_here < 1:
        gpus, workers = _count(elsewhere, "GPU"), _count(world_size, "worker")
        raise PlacementError(
            f"--hosts: {gpus} on other hosts for {workers}: at least one, which says the results, runs on this host; list fewer"
        )
    if devices is not None and num_here > len(devices):
        listed = ", ".join(f"{host.num_gpus} on {host.address}" for host in hosts)
        raise PlacementError(
            f"{world_size} workers need as many GPUs, and there are {len(devices) + elsewhere}: {len(devices)} on this host "
            f"(CUDA_VISIBLE_DEVICES counts), {listed}"
        )
    here: list[tuple[int | None, int]] = [(None, devices[i] if devices is not None else i) for i in range(num_here)]
    others: list[tuple[int | None, int]] = [(number, i) for number, host in enumerate(hosts) for i in range(host.num_gpus)]
    places = [*here, *others] if output_rank < num_here else [*others, *here]
    if places[output_rank][0] is not None:
        raise PlacementError(
            f"worker {output_rank}, which says the results, must be on this host; {num_here} of {world_size} are left"
        )
    ranks = []
    for rank, (number, device) in enumerate(places):
        first = rank // group_size * group_size
        group = places[first : first + group_size]
        ranks.append(RankPlacement(number, device, all(member[0] == number for member in group)))
    return Placement(list(hosts), ranks)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def read_hosts_file(path: str) -> list[HostEntry]:
    """Read the file of --hosts: a line `ADDRESS PUBLIC_KEY GPUS` for each other host. Empty lines and # comments are skipped.

    Raises PlacementError, naming the line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"--hosts {path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    hosts: list[HostEntry] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            hosts.append(_entry(words))
            if hosts[-1].address in [host.address for host in hosts[:-1]]:
                raise ValueError(f"{hosts[-1].address} is named twice")
        except ValueError as error:
            raise PlacementError(f"--hosts {path}, line {number}: {error}") from None
    if not hosts:
        raise PlacementError(f"--hosts {path} names no host: a line is ADDRESS PUBLIC_KEY GPUS")
    return hosts


def _entry(words: list[str]) -> HostEntry:
    if len(words) != 3:
        raise ValueError("a line is ADDRESS PUBLIC_KEY GPUS: tcp://10.0.0.2:7000, the key that `quire host` says, and 8")
    address, key, gpus = words
    check_host_address(address)
    if not gpus.isascii() or not gpus.isdecimal() or not 1 <= int(gpus[:4]) <= 64 or len(gpus) > 4:
        raise ValueError(f"{gpus!r:.20} is no number of GPUs (1 to 64)")
    return HostEntry(address, parse_key(key), int(gpus))
