"""Places the ranks of an engine by its flags: here, here and on the hosts of a file, or where Ray has room for them.

Called once by the daemon, before workers are started. Failures are PlacementError or HostFailed, with a text for the user.
"""

import logging
import os
from pathlib import Path

import msgspec

from quire.enginecore.device import find_gpus, unfit_for_ranks
from quire.enginecore.hosts.placement import HostEntry, Placement, PlacementError, place, read_hosts_file
from quire.enginecore.hosts.ray_hosts import RayHosts, own_devices
from quire.enginecore.hosts.remote_ranks import RemoteRanks, no_others
from quire.enginecore.hosts.same_model import model_files
from quire.ipc.config import EngineConfig
from quire.ipc.interfaces import LOOPBACK, Interface, find_interface
from quire.ipc.links.curve import KeyPair, load_or_make_keys, make_keys
from quire.ipc.links.paths import check_address, is_loopback
from quire.ipc.worker_config import WorkerConfig

log = logging.getLogger("quire.enginecore")


def is_spread(config: EngineConfig) -> bool:
    """Whether some ranks may be on other hosts."""
    return config.hosts is not None or config.distributed_executor_backend == "ray"


def place_ranks(config: EngineConfig, template: WorkerConfig, folder: Path) -> tuple[WorkerConfig, RemoteRanks]:
    """The template with the network interface of all ranks, and where each rank runs. Raises PlacementError, HostFailed."""
    if config.distributed_executor_backend == "ray":
        return _by_ray(config, template, folder)
    if config.hosts is None or config.hosts_key_file is None:
        return _bound_to(template, _interface(config)), no_others(template.engine.world_size, template.gpu_index)
    hosts = read_hosts_file(config.hosts)
    interface = _interface(config, hosts)
    gpus = find_gpus()[template.gpu_index :] if template.engine.device == "cuda" else []
    devices = range(template.gpu_index, template.gpu_index + len(gpus)) if gpus else None
    placement = place(hosts, template.engine.world_size, config.tensor_parallel_size, template.engine.output_rank, devices)
    if gpus and (problem := unfit_for_ranks(gpus, len(placement.ranks_of(None)))):
        raise PlacementError(problem)
    keys, model, name = _keys(config.hosts_key_file), model_files(config, folder), gpus[0].name if gpus else None
    ranks = RemoteRanks(placement, keys, model, name, silence_s=config.collective_timeout_s)
    return _bound_to(template, interface, placement), ranks


def _by_ray(config: EngineConfig, template: WorkerConfig, folder: Path) -> tuple[WorkerConfig, RemoteRanks]:
    keys, size = make_keys(), config.tensor_parallel_size
    actor = keys.public.decode(), config.interface or "", config.log_level, config.log_format
    resource = "GPU" if template.engine.device == "cuda" else "CPU"
    ray = RayHosts(template.engine.world_size // size, size, template.engine.output_rank // size, resource, actor)
    try:
        if resource == "CPU" and config.device == "auto" and ray.num_gpus:
            raise PlacementError("Ray's cluster has GPUs, and this host has none: run the engine on a host with GPUs")
        given, hosts = ray.place()
        gpus = find_gpus() if resource == "GPU" else []
        devices = own_devices(given, os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus else None
        placement = place(hosts, template.engine.world_size, size, template.engine.output_rank, devices)
        own = _interface(config) if config.interface or not hosts else find_interface(ray.node_address)
        model, name = model_files(config, folder), gpus[(devices or [0])[0]].name if gpus else None
    except BaseException:  # Ctrl-C, too
        ray.close()
        raise
    ranks = RemoteRanks(placement, keys, model, name, ray.find if hosts else None, config.collective_timeout_s, ray.close)
    return _bound_to(template, own, placement), ranks


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


def _bound_to(template: WorkerConfig, interface: Interface, placement: Placement | None = None) -> WorkerConfig:
    here = None if placement is None else len(placement.ranks_of(None))
    engine = msgspec.structs.replace(template.engine, host_ranks=here)  # an agent puts its own number there
    return msgspec.structs.replace(template, engine=engine, bound_to=interface)


def _keys(path: str) -> KeyPair:
    try:
        keys = load_or_make_keys(path)
    except (OSError, ValueError) as error:
        raise PlacementError(f"--hosts-key-file: {error}") from None
    log.info("the engine's public key, for other hosts: %s", keys.public.decode())
    return keys
