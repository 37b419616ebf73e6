"""RayHosts: hosts of a Ray cluster (`--distributed-executor-backend ray`), with room for each group of ranks, and an agent.

A group is the ranks that share their layers. Each has a placement group of its own, STRICT_PACK: its GPUs are on one host. The
output rank's group is on the engine's host, where the engine starts the ranks itself. Every other group has an actor, which
starts an agent (ray_actor.py) and says its address and public key. Ray does nothing else. Its own ports have no keys, and it
pickles what it transfers, so they must be private. Used by setup.py; a thread of RemoteRanks calls `find`.
"""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from quire.enginecore.hosts.placement import HostEntry, PlacementError
from quire.enginecore.hosts.ray_actor import START_TIMEOUT_S, AgentActor
from quire.enginecore.hosts.remote_host import CONNECT_TIMEOUT_S, HostFailed
from quire.ipc.links.curve import parse_key

ROOM_TIMEOUT_S = 60.0  # for other users of the cluster to leave, or for an autoscaler
MISSING = "--distributed-executor-backend ray: Ray is not installed here; pip install '.[ray]' in Quire's folder, on all hosts"
NO_CLUSTER = "--distributed-executor-backend ray: no Ray cluster was found ({}); `ray start --head` begins one"


class RayHosts:
    """num_groups groups of group_size ranks, of which `own` is the engine's. resource: "GPU" or "CPU"."""

    def __init__(self, num_groups: int, group_size: int, own: int, resource: str, actor_arguments: Sequence[str]) -> None:
        """Connect. Raises PlacementError if there is no Ray, or no cluster."""
        self._ray = _connected()
        self._group_size, self._own, self._resource = group_size, own, resource
        self._actor_arguments = list(actor_arguments)
        self._actors: dict[int, Any] = {}  # by group
        self._rooms: dict[int, Any] = {}
        self._others = [group for group in range(num_groups) if group != own]
        self.node_address: str = self._ray.util.get_node_ip_address()

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return int(self._ray.cluster_resources().get("GPU", 0))

    def place(self) -> tuple[list[str], list[HostEntry]]:
        """Make room; returns the engine's own GPUs, as in CUDA_VISIBLE_DEVICES, and the other hosts. Raises PlacementError."""
        needed, there = (1 + len(self._others)) * self._group_size, int(self._ray.cluster_resources().get(self._resource, 0))
        if needed > there:
            raise PlacementError(f"{needed} workers need as many {self._resource}s, and Ray's cluster has {there}")
        try:
            with self._as_host_failed("Ray has no answer"):
                for group in [self._own, *self._others]:
                    self._make_room(group)
                own = self._ray.get(self._actors[self._own].gpus.remote(), timeout=START_TIMEOUT_S)
            return own.split(",") if own else [], self.find()
        except HostFailed as error:
            raise PlacementError(str(error)) from None

    def find(self) -> list[HostEntry]:
        """The other hosts as they are now: starts agents again that have ended, and replaces lost nodes. Raises HostFailed."""
        found = []
        with self._as_host_failed("no agent can be started by Ray"):
            for group in self._others:
                try:
                    said = self._agent_of(group)
                except self._ray.exceptions.RayActorError:  # its node, or Ray's process there, is gone
                    self._make_room(group)
                    said = self._agent_of(group)
                found.append(HostEntry(said["ready"], parse_key(said["public_key"]), self._group_size))
        return found

    def _agent_of(self, group: int) -> dict[str, str]:
        return self._ray.get(self._actors[group].agent.remote(), timeout=START_TIMEOUT_S)

    def _make_room(self, group: int) -> None:
        """Make a new placement group for a group of ranks, and a new actor in it. Raises HostFailed."""
        util = self._ray.util
        if (room := self._rooms.pop(group, None)) is not None:
            util.remove_placement_group(room)
        here = {"ray.io/node-id": self._ray.get_runtime_context().get_node_id()}
        more: dict[str, Any] = {"bundle_label_selector": [here]} if group == self._own else {}
        room = util.placement_group([{self._resource: self._group_size}], strategy="STRICT_PACK", **more)
        self._rooms[group] = room
        if not room.wait(ROOM_TIMEOUT_S):
            where = "on this host" if group == self._own else "on one host"
            free = int(self._ray.available_resources().get(self._resource, 0))
            raise HostFailed(
                f"Ray has found no {self._group_size} free {self._resource}s {where} for {ROOM_TIMEOUT_S:.0f} s; "
                f"{free} are free in its cluster"
            )
        amount = {"num_gpus": self._group_size} if self._resource == "GPU" else {"num_cpus": self._group_size}
        scheduling = util.scheduling_strategies.PlacementGroupSchedulingStrategy(room)
        options = {"num_cpus": 0, **amount, "scheduling_strategy": scheduling}
        self._actors[group] = self._ray.remote(AgentActor).options(**options).remote(*self._actor_arguments)

    @contextlib.contextmanager
    def _as_host_failed(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._ray.exceptions.RayError as error:
            raise HostFailed(f"{what}: {_last_line(error)}") from error

    def close(self) -> None:
        """Leave the cluster; agents end with their actors, and the actors with this process."""
        with _kept_handlers():
            self._ray.shutdown()


def _connected() -> Any:
    """The ray module, connected to this host's cluster, or to that of RAY_ADDRESS. Raises PlacementError."""
    with _kept_handlers():
        try:
            import ray
            import ray.util.scheduling_strategies
        except ImportError:
            raise PlacementError(MISSING) from None
        _check_address(os.environ.get("RAY_ADDRESS", "auto"))
        try:
            ray.init(address="auto", namespace="quire", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PlacementError(NO_CLUSTER.format(_last_line(error).rstrip("."))) from None
    return ray


def _check_address(address: str) -> None:
    """Raises PlacementError if RAY_ADDRESS does not answer; Ray itself would try for minutes."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            return
    except (OSError, ValueError, OverflowError) as error:
        raise PlacementError(NO_CLUSTER.format(f"at RAY_ADDRESS={address}: {error}")) from None


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Restore our handlers of stop signals afterwards: Ray sets its own."""
    numbers = signal.SIGTERM, signal.SIGINT
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def own_devices(given: Sequence[str], visible: str | None) -> list[int]:
    """Numbers of the GPUs that Ray assigned to this host, among those that this process sees. Raises PlacementError.

    given: as in CUDA_VISIBLE_DEVICES of Ray's actor. visible: this process's CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    try:
        if visible is None:
            return [int(gpu) for gpu in given]
        return [visible.split(",").index(gpu) for gpu in given]
    except ValueError:
        raise PlacementError(
            f"Ray has given GPUs {', '.join(given)} to this host's workers; not all are among CUDA_VISIBLE_DEVICES={visible}"
        ) from None
