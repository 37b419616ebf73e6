"""The workers of an engine whose two ranks are groups of one, by Ray: one here, one by an agent on the cluster's other node.

A process of its own. It starts them, says so, waits for the agent's end, starts them again, says so, and ends.
"""

import time
from pathlib import Path

import msgspec
import psutil

from quire.enginecore.daemon import worker_config
from quire.enginecore.hosts.placement import place
from quire.enginecore.hosts.ray_hosts import RayHosts
from quire.enginecore.hosts.remote_ranks import RemoteRanks
from quire.enginecore.hosts.same_model import model_files
from quire.enginecore.loading.model_files import BUNDLED, model_summary
from quire.enginecore.workers import WorkerGroup, WorkersFailed
from quire.ipc.config import EngineConfig
from quire.ipc.interfaces import find_interface
from quire.ipc.links.curve import make_keys

TIMEOUT_S = 60.0


def main() -> None:
    config = EngineConfig(device="cpu", dtype="float32", tensor_parallel_size=2, max_num_seqs=8, cpu_kv_cache_gib=0.05)
    keys = make_keys()
    ray = RayHosts(2, 1, 0, "CPU", (keys.public.decode(), "", "info", "text"))
    given, hosts = ray.place()
    assert not given and len(hosts) == 1
    placement, model = place(hosts, 2, 1, 0, None), model_files(config, BUNDLED)
    ranks = RemoteRanks(placement, keys, model, find=ray.find, on_close=ray.close)
    own = find_interface(ray.node_address)
    template = worker_config(config, Path(BUNDLED), model_summary(BUNDLED))
    template = msgspec.structs.replace(template, interface=own.name, interface_address=own.address)
    workers = WorkerGroup(template, ranks=ranks)
    for generation in (1, 2):
        workers.start()
        turn_until(workers, lambda: workers.is_ready)
        print(f"generation {generation} is ready; its agent is {agent_pid()}", flush=True)
        if generation == 1:
            try:
                turn_until(workers, lambda: False)
            except WorkersFailed as error:
                print(f"failed: {error}", flush=True)
            workers.kill()
    workers.stop()
    ranks.close()


def turn_until(workers: WorkerGroup, condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        workers.messages()
        workers.check_alive()
        time.sleep(0.01)


def agent_pid() -> int:
    """The one that lives, of Ray's processes: no child of ours."""
    (pid,) = [p.pid for p in psutil.process_iter(["cmdline"]) if "quire.enginecore.hosts" in (p.info["cmdline"] or [])]
    return pid


if __name__ == "__main__":
    main()
