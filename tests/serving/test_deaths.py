"""Every process of `quire serve` killed or stopped in mid-stream, a client that hangs up, and the end in order.

quire serve (HTTP) ── quire.enginecore ── quire.workers
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import DEADLINE_S
from serving import SMALL, SOON_S, Background, EventStream, Served, ends_well, error_of, until

from quire.enginecore.loading.model_files import BUNDLED

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little dog"
LONG = {"max_tokens": 1500, "min_tokens": 1500}
WORKER, CORE = "quire.workers", "quire.enginecore"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Shared by the tests that a server survives."""
    with Served(*SMALL, "--step-timeout-s", "2") as served:
        yield served.ready()
        assert served.end() == 0


def running(served: Served, **fields: Any) -> EventStream:
    """A stream that has begun and goes on for long."""
    stream = served.stream(PROMPT, **{**LONG, **fields})
    stream.wait_for_text()
    return stream


def test_a_client_that_hangs_up_frees_what_its_request_held(served: Served) -> None:
    streams = [running(served), running(served, n=3)]
    until(lambda: served.metric("num_requests_running") == 4 and served.metric("kv_cache_usage_perc") > 0)
    for stream in streams:
        stream.close()
    assert until(lambda: served.metric("num_requests_running") == 0 == served.metric("kv_cache_usage_perc")) < SOON_S
    assert served.health() == 200


def test_an_engine_says_what_its_processes_do_and_goes_on(served: Served) -> None:
    text = served.text(PROMPT, max_tokens=10)
    with running(served) as stream:  # between its steps
        served_pid = served.pid_of(CORE)
        os.kill(served_pid, signal.SIGUSR1)
        served.line("stacks of the core:")
        served.line("stacks of worker 0:")
        served.line("in _serve$")  # the worker's loop
        assert stream.wait_for_text()
    assert served.pid_of(CORE) == served_pid and served.text(PROMPT, max_tokens=10) == text


def test_a_worker_killed_is_replaced_and_what_it_ran_goes_on(served: Served) -> None:
    before, text = served.metric("worker_restarts_total"), served.text(PROMPT, max_tokens=10)
    whole_text = served.text(PROMPT, **LONG)
    stream = served.stream(PROMPT, **LONG)
    begin = stream.wait_for_text()
    whole = Background(lambda: served.complete(PROMPT, **LONG))
    until(lambda: served.metric("num_requests_running") == 2)
    worker = served.pid_of(WORKER)
    psutil.Process(worker).kill()
    until(lambda: served.health() == 503)
    until(lambda: served.health() == 200)
    with stream:
        assert begin + stream.text() == whole_text
    answer = whole.result()
    assert answer["choices"][0]["text"] == whole_text and answer["usage"]["completion_tokens"] == 1500
    assert served.metric("num_replays_total") >= 1 and served.metric("num_replays_given_up_total") == 0
    assert served.metric("worker_restarts_total") == before + 1
    assert served.pid_of(WORKER) != worker
    assert served.text(PROMPT, max_tokens=10) == text
    served.line("worker 0 ended unexpectedly .signal SIGKILL.; [12] sequences in flight run again")


def test_a_worker_killed_while_idle_is_replaced_and_a_request_meanwhile_waits(served: Served) -> None:
    text, before = served.text(PROMPT, max_tokens=10), served.metric("worker_restarts_total")
    worker = psutil.Process(served.pid_of(WORKER))
    worker.kill()
    worker.wait(DEADLINE_S)  # its parent has noticed
    assert served.text(PROMPT, max_tokens=10) == text
    until(lambda: served.metric("worker_restarts_total") == before + 1 and served.health() == 200)


def test_a_worker_that_hangs_is_found_by_the_step_timeout_and_replaced(served: Served) -> None:
    before, text = served.metric("worker_restarts_total"), served.text(PROMPT, max_tokens=10)
    stream = running(served)
    worker = psutil.Process(served.pid_of(WORKER))
    worker.suspend()
    assert until(lambda: served.health() == 503) > 1.0  # not at once: a step may take its time
    assert ends_well(stream)
    until(lambda: served.health() == 200)
    assert not worker.is_running() and served.metric("worker_restarts_total") == before + 1
    assert served.text(PROMPT, max_tokens=10) == text
    served.line(r"a step took longer than --step-timeout-s \(2 s\)")


def test_a_freeze_of_all_processes_is_no_hang(served: Served) -> None:
    stream, worker = running(served, max_tokens=150, min_tokens=150), served.pid_of(WORKER)
    processes = [psutil.Process(served.pid), *served.processes()]
    for process in processes:
        process.suspend()
    thawed = time.monotonic() + 3.0  # more than --step-timeout-s
    until(lambda: time.monotonic() > thawed)
    for process in processes:
        process.resume()
    with stream:
        assert len(stream.text()) > 150
    assert served.pid_of(WORKER) == worker


def test_a_core_that_hangs_shows_in_health(served: Served) -> None:
    core = psutil.Process(served.pid_of(CORE))
    text = served.text(PROMPT, max_tokens=10)
    core.suspend()
    try:
        until(lambda: served.health() == 503)
    finally:
        core.resume()
    until(lambda: served.health() == 200)
    assert served.text(PROMPT, max_tokens=10) == text


def test_a_core_killed_leaves_no_worker_and_is_started_again(served: Served) -> None:
    text, epoch_line = served.text(PROMPT, max_tokens=10), served.engine_address()
    whole_text = served.text(PROMPT, **LONG)
    stream = served.stream(PROMPT, **LONG)
    begin = stream.wait_for_text()
    core, worker = served.pid_of(CORE), psutil.Process(served.pid_of(WORKER))
    psutil.Process(core).kill()
    until(lambda: served.health() == 503)
    answer = served.ask("POST", "/v1/completions", {"prompt": PROMPT})
    assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
    worker.wait(DEADLINE_S)
    until(lambda: served.health() == 200)
    assert served.pid_of(CORE) != core and served.pid_of(WORKER) != worker.pid
    assert served.engine_address(2) == epoch_line
    with stream:
        assert begin + stream.text() == whole_text
    assert served.text(PROMPT, max_tokens=10) == text
    served.line("the engine ended unexpectedly .signal SIGKILL.")


def test_a_core_killed_twice_is_started_a_third_time(served: Served) -> None:
    text, first = served.text(PROMPT, max_tokens=10), served.pid_of(CORE)
    psutil.Process(first).kill()
    until(lambda: served.pids(CORE) not in ([], [first]))
    psutil.Process(served.pid_of(CORE)).kill()  # while it loads
    served.line("the engine did not start again .the engine ended while it started .signal SIGKILL.*; next start in 0 s")
    until(lambda: served.health() == 200)
    assert served.text(PROMPT, max_tokens=10) == text


def test_without_replay_requests_end_with_the_process_that_ran_them() -> None:
    with Served(*SMALL, "--no-replay") as another:
        stream = running(another.ready())
        psutil.Process(another.pid_of(WORKER)).kill()
        error = error_of(stream)
        assert (error["code"], error["type"]) == ("engine_error", "server_error") and "engine failed" in error["message"]
        until(lambda: another.health() == 200)
        stream = running(another)
        psutil.Process(another.pid_of(CORE)).kill()
        assert error_of(stream)["code"] == "engine_down"


def test_nothing_survives_a_killed_server() -> None:
    with Served(*SMALL) as another:
        stream = running(another.ready())
        assert len(another.pids(CORE)) == len(another.pids(WORKER)) == 1
        another.kill(signal.SIGKILL)
        assert another.tree_has_ended(10.0)
        stream.close()


def test_workers_that_cannot_start_again_end_the_server_with_their_reason(tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED, tmp_path / "model")
    with Served(str(model), *SMALL) as another:
        worker = psutil.Process(another.ready().pid_of(WORKER))
        (model / "model.safetensors").unlink()
        worker.kill()
        assert another.wait() == 1
        assert re.match("quire serve: the engine cannot start again: .*safetensors", another.lines[-1])
        assert "Traceback" not in another.output


def test_sigterm_lets_a_stream_end_and_then_ends_everything_in_order(served: Served) -> None:
    """The last one of those that share the server."""
    stream = running(served, max_tokens=150, min_tokens=150)
    idle = running(served, max_tokens=1, min_tokens=1)
    assert idle.text() == ""  # a connection that is kept alive holds nothing up
    served.kill(signal.SIGTERM)
    with stream:
        assert len(stream.text()) > 150
    assert served.wait() == 0
    assert "Traceback" not in served.output
    idle.close()
