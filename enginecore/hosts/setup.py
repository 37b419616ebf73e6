"""Where the ranks of an engine run, by its flags: here, here and on the hosts of a file, or where Ray has room for them.

Called once by the daemon, before workers are started. Whatever cannot be is a PlacementError or a HostFailed, in words for the
user.
"""

import logging
from pathlib import Path

import msgspec

from quire.enginecore.device import find_gpus, unfit_for_ranks
from quire.enginecore.hosts.placement import HostEntry, Placement, PlacementError, place, read_hosts_file
from quire.enginecore.hosts.remote_ranks import RemoteRanks, no_others
from quire.enginecore.hosts.same_model import model_files
from quire.ipc.config import EngineConfig, WorkerConfig
from quire.ipc.interfaces import LOOPBACK, Interface, find_interface
from quire.ipc.links.curve import KeyPair, load_or_make_keys
from quire.ipc.links.paths import check_address, is_loopback

log = logging.getLogger("quire.enginecore")


def is_spread(config: EngineConfig) -> bool:
    """Whether some ranks may be on other hosts."""
    return config.hosts is not None or config.distributed_executor_backend == "ray"


def place_ranks(config: EngineConfig, template: WorkerConfig, folder: Path) -> tuple[WorkerConfig, RemoteRanks]:
    """The template with what all ranks must know of it, and where each rank runs. Raises PlacementError, HostFailed."""
    if not is_spread(config):
        return _bound_to(template, _interface(config)), no_others(template.world_size, template.device_index)
    assert config.hosts is not None and config.hosts_key_file is not None
    hosts = read_hosts_file(config.hosts)
    interface = _interface(config, hosts)
    placement, gpu_name = _place(config, template, hosts)
    keys = _keys(config.hosts_key_file)
    model, silence_s = model_files(config, folder), config.collective_timeout_s
    return _bound_to(template, interface), RemoteRanks(placement, keys, model, gpu_name, silence_s=silence_s)


def _place(config: EngineConfig, template: WorkerConfig, hosts: list[HostEntry]) -> tuple[Placement, str | None]:
    """And the name that all GPUs must have."""
    gpus = find_gpus()[template.device_index :] if template.device == "cuda" else []
    devices = range(template.device_index, template.device_index + len(gpus)) if gpus else None
    placement = place(hosts, template.world_size, config.tensor_parallel_size, template.output_rank, devices)
    if gpus and (problem := unfit_for_ranks(gpus, len(placement.ranks_of(None)))):
        raise PlacementError(problem)
    return placement, gpus[0].name if gpus else None


def _interface(config: EngineConfig, hosts: list[HostEntry] | None = None) -> Interface:
    if config.interface is not None:
        try:
            return find_interface(config.interface)
        except ValueError as error:
            raise PlacementError(str(error)) from None
    for host in hosts or ():
        if not is_loopback(check_address(host.address) or ""):
            raise PlacementError(
                f"--hosts names {host.address}: say by --interface which network interface joins the hosts, a private one, for "
                "the sockets of NCCL and gloo know no keys"
            )
    return LOOPBACK


def _bound_to(template: WorkerConfig, interface: Interface) -> WorkerConfig:
    return msgspec.structs.replace(template, interface=interface.name, interface_address=interface.address)


def _keys(path: str) -> KeyPair:
    try:
        keys = load_or_make_keys(path)
    except (OSError, ValueError) as error:
        raise PlacementError(f"--hosts-key-file: {error}") from None
    log.info("the engine's public key, for other hosts: %s", keys.public.decode())
    return keys
