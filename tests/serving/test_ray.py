"""`--distributed-executor-backend ray`: without Ray, and with a cluster of two nodes on this machine (`make test-ray`).

Ray itself runs in processes of its own, and is not imported here: its warnings are its own business.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import serving
from deadlines import DEADLINE_S
from hosts import AGENT, WORKER
from serving import SMALL, Served, ends_well, until

CLUSTER = Path(serving.__file__).with_name("ray_cluster.py")
BY_RAY = "--distributed-executor-backend", "ray"
PROMPT = "Once upon a time there was a little dog"


def refused(env: dict[str, str], *flags: str) -> str:
    with Served(*SMALL, *BY_RAY, *flags, env=env) as served:
        assert served.wait() == 1
        return served.lines[-1].removeprefix("quire serve: ")


def test_ray_that_is_missing_is_named_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')\n")
    assert refused({"PYTHONPATH": str(tmp_path)}, "-tp", "2") == (
        "--distributed-executor-backend ray: Ray is not installed here; pip install '.[ray]' in Quire's folder, on all hosts"
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of processes that find it: two CPUs on this node, two on another."""
    command = [sys.executable, str(CLUSTER), "2", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as ray:
        assert ray.stdout is not None and ray.stdin is not None
        said = ray.stdout.readline()
        assert said.startswith("Ray cluster at "), said
        yield {"RAY_ADDRESS": said.split()[-1]}
        ray.stdin.close()
        assert ray.wait(DEADLINE_S) == 0


@pytest.mark.ray
def test_no_cluster_and_too_small_a_cluster_are_said(cluster: dict[str, str]) -> None:
    assert refused(cluster, "-tp", "8") == "8 workers need as many CPUs, and Ray's cluster has 4"
    assert refused({"RAY_ADDRESS": "127.0.0.1:1"}, "-tp", "2").startswith(
        "--distributed-executor-backend ray: no Ray cluster was found ("
    )


@pytest.mark.ray
def test_a_group_on_the_engines_node_is_served(cluster: dict[str, str]) -> None:
    with Served(*SMALL, "-tp", "2") as served:
        text = served.ready().text(PROMPT, max_tokens=10)
        assert served.end() == 0
    with Served(*SMALL, "-tp", "2", *BY_RAY, env=cluster) as served:
        assert served.ready().text(PROMPT, max_tokens=10) == text
        assert len(served.pids(WORKER)) == 2
        assert served.end() == 0


@pytest.mark.ray
def test_a_stage_of_another_group_has_an_agent_which_is_started_again(cluster: dict[str, str]) -> None:
    with Served(*SMALL, "-pp", "2", *BY_RAY, env=cluster) as served:
        text = served.ready().text(PROMPT, max_tokens=10)
        first = agent_process()
        (worker,) = first.children()
        assert WORKER in worker.cmdline() and len(served.pids(WORKER)) == 1
        stream = served.stream(PROMPT, max_tokens=1500, min_tokens=1500)
        stream.wait_for_text()
        first.kill()
        assert ends_well(stream)
        served.line(r"host tcp://\S+ with worker 0: its agent, or the connection to it, is gone; 1 sequences in flight")
        until(lambda: served.health() == 200 and not worker.is_running())
        assert served.text(PROMPT, max_tokens=10) == text
        second = agent_process()
        assert second.pid != first.pid
        assert served.end() == 0
    until(lambda: not second.is_running(), 60.0)


def agent_process() -> psutil.Process:
    """The agent that lives: a child of Ray's, not of ours."""
    (agent,) = [p for p in psutil.process_iter(["cmdline", "status"]) if AGENT in (p.info["cmdline"] or [])]
    return agent
