"""What the flags about other hosts may say together, and vLLM's flags for the same, which are refused with the nearest way."""

import pytest

from quire.frontend.cli.vllm_compat import UnsupportedFlag, take_out
from quire.frontend.client.engine_options import engine_options
from quire.ipc.config import EngineConfig


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hosts": "h"}, "--hosts needs --hosts-key-file"),
        ({"hosts_key_file": "k"}, "--hosts-key-file is for --hosts, which is not given"),
        ({"hosts_key_file": "k", "distributed_executor_backend": "ray"}, "--hosts-key-file is for --hosts"),
        ({"hosts": "h", "hosts_key_file": "k", "distributed_executor_backend": "ray"}, "Ray knows the hosts"),
        ({"hosts": "h", "hosts_key_file": "k", "data_parallel_size": 2}, "--hosts is one engine's, and --data-parallel-size"),
        (
            {"distributed_executor_backend": "ray", "data_parallel_size": 2},
            "backend ray is one engine's",
        ),
        (
            {"distributed_executor_backend": "ray", "emulate_world_size": 2, "load_format": "dummy"},
            "--emulate-world-size runs one rank alone",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig(**fields)


def test_what_can_be() -> None:
    EngineConfig(hosts="h", hosts_key_file="k", tensor_parallel_size=4)
    EngineConfig(distributed_executor_backend="ray", interface="eth0")
    EngineConfig(interface="eth0")


@pytest.mark.parametrize("words", [["--nnodes", "2"], ["--node-rank", "1"], ["-r", "1"], ["--master-addr", "10.0.0.1"]])
def test_vllms_flags_for_several_hosts_are_refused_with_the_way_here(words: list[str]) -> None:
    with pytest.raises(UnsupportedFlag, match=r"`quire host`.*; nearest: --hosts FILE, or --distributed-executor-backend ray"):
        take_out(words, ())


def test_vllms_defaults_of_them_are_taken() -> None:
    words = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29501"]
    assert take_out(words, ())[0] == []


def test_the_python_option_has_vllms_values() -> None:
    for value, ours in (("mp", "mp"), ("uni", "mp"), ("ray", "ray")):
        assert engine_options({"distributed_executor_backend": value}) == {"distributed_executor_backend": ours}
    assert engine_options({"distributed_executor_backend": None}) == {}
