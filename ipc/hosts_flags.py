"""The engine's flags about where its workers run: other hosts, Ray, the network between them. Used by config.py.

EngineConfig holds their values; their combinations are checked here, for the command line and for `LLM` alike.
"""

from collections.abc import Callable
from typing import Any

from quire.ipc.process.flags import one_of


def add_hosts_arguments(add: Callable[..., None]) -> None:
    add(
        "--distributed-executor-backend",
        type=one_of(("mp", "ray"), {"uni": "mp"}),
        metavar="BACKEND",
        help="how workers are started: mp, by the engine and the agents of --hosts; ray, by a Ray cluster (the extra `ray`)",
    )
    add(
        "--hosts",
        metavar="FILE",
        help="a file of other hosts that run `quire host` for a part of the model: a line ADDRESS PUBLIC_KEY GPUS for each "
        "(default: all workers are on this host)",
    )
    add(
        "--hosts-key-file",
        metavar="FILE",
        help="file of the engine's key pair, for --hosts; it is made if it does not exist (default: none)",
    )
    add(
        "--interface",
        metavar="NAME",
        help="network interface, or its address, to which the sockets of NCCL and gloo are bound, which no keys protect "
        "(default: lo, on one host)",
    )


def check_hosts(config: Any, need: Callable[[bool, str], None]) -> None:
    """Check an EngineConfig for combinations that can never work."""
    has_ray = config.distributed_executor_backend == "ray"
    need(config.hosts is not None or config.hosts_key_file is None, "--hosts-key-file is for --hosts, which is not given")
    if config.hosts is None and not has_ray:
        return
    elsewhere = "--hosts" if config.hosts is not None else "--distributed-executor-backend ray"
    need(
        config.hosts is None or not has_ray,
        "--hosts: with --distributed-executor-backend ray, Ray knows the hosts; leave one of the two out",
    )
    need(
        has_ray or config.hosts_key_file is not None,
        "--hosts needs --hosts-key-file, the engine's key pair, whose public key is in the hosts' --allow-file; "
        "`quire host --generate-keys FILE` makes one",
    )
    need(config.data_parallel_size == 1, f"{elsewhere} is one engine's, and --data-parallel-size says that there are several")
    need(config.emulate_world_size == 1, f"{elsewhere}: --emulate-world-size runs one rank alone")
