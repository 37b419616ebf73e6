"""`quire serve --frontends 2`: the connections of a frontend that is down, one that hangs, and a stop meanwhile."""

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from deadlines import DEADLINE_S
from fake_core import FakeCore, echo
from serving import LOOK_S, Background, Served, until

from quire.frontend.cli import frontends as frontends_module
from quire.frontend.cli.frontends import PANELS_EACH, Frontends
from quire.frontend.cli.main import main
from quire.frontend.http.api.metrics.metrics import panel_bytes
from quire.frontend.http.listener import bind
from quire.frontend.http.server import FrontendConfig, StopSignals
from quire.ipc.messages.frontend import AddRequest

pytestmark = pytest.mark.slow

FRONTEND = "quire.frontend.http"


def unless_seven(request: AddRequest, child: int) -> list[int] | None:
    """A prompt that begins with 7 is never answered."""
    return None if request.inputs.token_ids.startswith(b"\7\0\0\0") else echo(request, child)


def kill_until_the_pause_is_long(served: Served) -> int:
    """Kill one frontend again and again, until it is not started for 4 s; the other's pid."""
    killed, stays = served.pids(FRONTEND)
    for start in range(1, 4):
        os.kill(killed, signal.SIGKILL)
        served.line(rf"frontend process .* next start in {2 ** (start - 1)} s", 1)
        if start < 3:
            until(lambda: len(served.pids(FRONTEND)) == 2)
            (killed,) = set(served.pids(FRONTEND)) - {stays}
    return stays


def test_others_take_the_connections_of_a_frontend_that_is_down_and_a_stop_does_not_wait_for_it():
    with FakeCore(echo) as core, Served("--engine", core.address, "--frontends", "2") as served:
        served.ready()
        stays = kill_until_the_pause_is_long(served)
        assert [served.health() for _ in range(40)] == [200] * 40
        assert served.pids(FRONTEND) == [stays]  # all that was while the other one was down
        began = time.monotonic()
        assert served.end() == 0
        assert time.monotonic() - began < 3.0
        assert "is back" not in served.output or served.output.rindex("next start in 4 s") > served.output.rindex("is back")


def test_connections_that_waited_for_a_frontend_are_served_by_its_next_process():
    with FakeCore(echo) as core, Served("--engine", core.address, "--frontends", "2") as served:
        served.ready()
        hangs = psutil.Process(served.pids(FRONTEND)[0])
        hangs.suspend()
        until(lambda: hangs.status() == psutil.STATUS_STOPPED)
        connections = [http.client.HTTPConnection(*served.address, timeout=DEADLINE_S) for _ in range(24)]
        for connection in connections:
            connection.request("GET", "/health")
        answers = [Background(lambda c=connection: c.getresponse().status) for connection in connections]
        until(lambda: sum(not answer.is_alive() for answer in answers) > 0)
        assert any(answer.is_alive() for answer in answers)  # 1 of 2^24 times all have come to the other one
        hangs.kill()
        assert [answer.result() for answer in answers] == [200] * len(answers)
        served.line("frontend process . is back")
        for connection in connections:
            connection.close()
        until(lambda: len(served.pids(FRONTEND)) == 2)
        assert [served.health() for _ in range(24)] == [200] * 24
        assert served.end() == 0


def test_a_frontend_that_hangs_is_killed_and_started_again_and_the_other_is_left_alone(monkeypatch):
    monkeypatch.setattr(frontends_module, "HUNG_AFTER_S", 3.0)
    metrics_fd = os.memfd_create("metrics")
    os.ftruncate(metrics_fd, 2 * PANELS_EACH * panel_bytes())
    with FakeCore(echo) as core:
        template = FrontendConfig(engine_addresses=[core.address], listen_fd=-1, metrics_fd=metrics_fd, num_frontends=2)
        asyncio.run(let_one_hang(Frontends(template, bind("127.0.0.1", 0, 2), logs_engine_changes=False)))
    os.close(metrics_fd)


async def let_one_hang(frontends):
    await frontends.start()
    signals = StopSignals()
    keeper = asyncio.create_task(frontends.keep_alive(signals))
    hangs, other = (frontend.child for frontend in frontends._all)
    hangs.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(60.0):
        while not frontends._all[0].is_up or frontends._all[0].child is hangs:
            await asyncio.sleep(LOOK_S)
    assert frontends._all[0].child.poll() is None and frontends._all[1].child is other and other.poll() is None
    signals.stop.set()
    await keeper
    await frontends.stop(signals)


def test_a_frontend_that_is_told_to_stop_leaves_its_connections_to_others_and_is_replaced_at_once():
    """Connections hung in its queue until its last stream had ended."""
    with FakeCore(unless_seven) as core, Served("--engine", core.address, "--frontends", "2") as served:
        served.ready()
        hangs = Background(lambda: served.complete([7], max_tokens=4))
        core.next(AddRequest)
        for number, pid in enumerate(served.pids(FRONTEND), 1):  # one of them has the request
            os.kill(pid, signal.SIGTERM)
            assert [served.health() for _ in range(20)] == [200] * 20
            served.line(r"frontend process . was told to stop, .* next start in 0 s", number)
            served.line("frontend process . is back", number)
        until(lambda: len(served.pids(FRONTEND)) == 3)  # one still has its last request
        assert hangs.is_alive()
        assert [served.health() for _ in range(20)] == [200] * 20
        served.kill()
        served.kill()
        assert served.wait() == 0


@pytest.mark.parametrize("number", ["1", "2"])
def test_a_reload_reads_keys_again_and_ends_no_request(number, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    flags = "--frontends", number, "--api-key-file", str(keys)
    with FakeCore(unless_seven) as core, Served("--engine", core.address, *flags) as served:
        served.ready()
        hangs = Background(lambda: served.ask("POST", "/v1/completions", {"prompt": [7]}, {"X-Api-Key": "old"}))
        core.next(AddRequest)
        before = set(served.pids(FRONTEND))

        def statuses(*keys: str) -> set[tuple[int, ...]]:
            return {tuple(served.ask("GET", "/version", None, {"X-Api-Key": key}).status for key in keys) for _ in range(20)}

        keys.write_text("new\n")
        served.kill(signal.SIGHUP)  # it has no terminal
        until(lambda: statuses("old", "new") == {(401, 200)})
        keys.write_text("")
        assert main(["reload", str(served.pid)]) == 0
        served.line("nothing was changed: --api-key-file .*: no key in this file")
        assert statuses("new") == {(200,)} and hangs.is_alive()
        assert number == "1" or len(set(served.pids(FRONTEND)) - before) == 2
        served.kill()
        served.kill()
        assert served.wait() == 0


STOPPED_AS_THE_LOOP_BEGINS = """
import signal, sys

set_wakeup_fd = signal.set_wakeup_fd
calls = []

def stopped(*arguments, **options):  # uvloop calls it amid its own C code
    calls.append(arguments)
    if len(calls) == 1:
        signal.raise_signal(signal.SIGTERM)
    return set_wakeup_fd(*arguments, **options)

signal.set_wakeup_fd = stopped
from quire.frontend.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_stop_just_as_the_event_loop_begins(tmp_path):
    arguments = ["serve", "--port", "0", "--engine", f"ipc://{tmp_path}/nobody.sock"]
    command = [sys.executable, "-P", "-c", STOPPED_AS_THE_LOOP_BEGINS, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
