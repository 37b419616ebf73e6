"""Child processes: configuration, descriptors, ending in order, and ending with the parent however it dies."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from deadlines import DEADLINE_S
from ipc_children import Role
from ipc_cores import Reports

from quire.ipc.process import children as children_module
from quire.ipc.process.children import Child, how_it_ended, prespawn, spawn, wait_for_all
from quire.ipc.step.plan_ring import KIND_PLAN, PlanRing


def start(reports: Reports, name: str, *, pass_fds: tuple[int, ...] = (), arguments: tuple[str, ...] = (), **more) -> Child:
    role = Role(name=name, report_fd=reports.fd, **more)
    return spawn("ipc_children", role, [reports.fd, *pass_fds], arguments=arguments)


def ended_within(pid: int, timeout_s: float) -> bool:
    """Whether a process that need not be our child is gone or goes within the time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([pidfd], [], [], timeout_s)
    os.close(pidfd)
    return bool(ready)


def test_child_gets_its_configuration_however_long(reports):
    text = "ü" * 500_000  # more than a socket's buffer holds
    child = start(reports, "echo", text=text[:1000])
    said = reports.next()
    assert (said["text"], said["pid"], said["parent"]) == (text[:1000], child.pid, os.getpid())
    assert os.getcwd() not in said["path"] and "" not in said["path"]
    assert child.wait(DEADLINE_S) == 0 == child.poll()
    child.close()
    child = spawn("ipc_children", Role(name="idle", report_fd=reports.fd, text=text), [reports.fd])
    assert reports.next()["pid"] == child.pid
    assert child.terminate(20.0) == -signal.SIGTERM


def test_prespawned_child_waits_for_its_configuration_or_its_parents_end(reports):
    child = prespawn("ipc_children", [reports.fd])
    child.configure(Role(name="echo", report_fd=reports.fd, text="at last"))
    assert reports.next()["text"] == "at last"
    assert child.wait(DEADLINE_S) == 0
    child.close()
    child = prespawn("ipc_children", [reports.fd])
    child._control.close()
    assert child.wait(DEADLINE_S) == 70
    child.close()


def test_child_tells_its_parent(reports):
    text = "ready " * 100_000
    child = start(reports, "teller", text=text)
    assert child.receive(20.0) == {"text": text}
    assert child.receive(20.0) is None  # it has ended
    assert child.wait(DEADLINE_S) == 0
    child.close()
    child = start(reports, "idle")
    assert child.receive(0.0) is None
    child.terminate(20.0)


def test_ending_is_seen_by_a_poller(reports):
    child = start(reports, "idle")
    reports.next()
    poll = select.poll()
    poll.register(child, select.POLLIN)
    assert poll.poll(0) == []
    assert child.poll() is None and child.wait(0.0) is None
    os.kill(child.pid, signal.SIGKILL)
    assert poll.poll(20_000)
    assert child.poll() == -signal.SIGKILL
    assert child.terminate(0.0) == child.terminate(0.0) == -signal.SIGKILL


def test_child_that_ignores_sigterm_is_killed(reports):
    child = start(reports, "busy")
    reports.next()
    assert child.terminate(0.05) == -signal.SIGKILL


def test_child_that_is_stopped_goes_on_to_end(reports):
    child = start(reports, "idle")
    reports.next()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert child.terminate(DEADLINE_S) == -signal.SIGTERM


def test_child_that_cannot_be_killed_is_not_waited_for_for_ever(reports, monkeypatch):
    monkeypatch.setattr(children_module, "KILL_WAIT_S", 0.05)
    child = start(reports, "busy")
    reports.next()
    with monkeypatch.context() as uninterruptible:
        uninterruptible.setattr(child.proc, "kill", lambda: None)
        code = child.terminate(0.0)
    assert code is None and "does not end" in how_it_ended(code)
    assert child.wait(DEADLINE_S) == 70  # its parent let go of it
    assert child.terminate(0.0) == 70


def test_several_children_are_waited_for_together(reports, monkeypatch):
    stays = [start(reports, "idle") for _ in range(2)]
    goes = start(reports, "idle")
    for _ in range(3):
        reports.next()
    goes.send_signal(signal.SIGKILL)
    assert goes.wait(DEADLINE_S) == -signal.SIGKILL
    goes.send_signal(signal.SIGKILL)  # nobody is there any more
    wait, patience = Child.wait, []
    with monkeypatch.context() as watched:
        watched.setattr(Child, "wait", lambda child, timeout_s: (patience.append(timeout_s), wait(child, timeout_s))[1])
        assert wait_for_all([stays[0], goes, stays[1]], 0.2) == stays
    assert 0.0 < patience[0] <= 0.2 and max(patience[1:]) <= 0.0  # the first has used it up
    for child in (*stays, goes):
        child.terminate(20.0)


def test_heartbeats_are_counted_whether_they_are_looked_at_or_not(reports):
    child = start(reports, "sends_heartbeats")
    reports.next()
    assert (child.heartbeats(), child.heartbeats()) == (3, 0)
    child.terminate(20.0)


def test_how_a_child_ended_in_words():
    assert (how_it_ended(3), how_it_ended(-signal.SIGKILL)) == ("exit code 3", "signal SIGKILL")


def test_child_of_a_thread_outlives_the_thread(reports):
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(start(reports, "idle")), name="test-spawner")
    thread.start()
    thread.join()
    reports.next()
    assert not ended_within(children[0].pid, 0.1)
    children[0].terminate(20.0)


@pytest.mark.parametrize("in_thread", [False, True])
def test_failure_to_start_is_raised_where_it_was_asked_for(monkeypatch, in_thread):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    errors: list[OSError] = []

    def run() -> None:
        try:
            spawn("ipc_children", Role(name="idle"))
        except OSError as error:
            errors.append(error)

    if in_thread:
        thread = threading.Thread(target=run, name="test-spawner")
        thread.start()
        thread.join()
    else:
        run()
    assert [error.filename for error in errors] == ["/nowhere/python"]


def test_child_that_cannot_start_is_an_ended_child(capfd):
    child = spawn("no_such_module_anywhere", Role(name="idle"))
    assert child.wait(DEADLINE_S) == 1
    child.close()
    assert "no_such_module_anywhere" in capfd.readouterr().err


def test_an_interrupted_child_has_nothing_to_say(reports, capfd):
    child = start(reports, "busy")
    reports.next()
    child.send_signal(signal.SIGINT)
    assert child.wait(DEADLINE_S) == -signal.SIGINT
    child.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["idle", "busy"])
def test_child_ends_when_the_parent_closes_the_control_socket(reports, name):
    child = start(reports, name)
    reports.next()
    child._control.shutdown(socket.SHUT_RDWR)
    assert child.wait(DEADLINE_S) == 70
    child.close()


def test_child_takes_records_from_a_ring_it_was_given(reports):
    ring = PlanRing.create(4096, 1)
    fds = ring.fds(0)
    child = start(reports, "reader", pass_fds=tuple(fds), ring_fds=fds)
    reports.next()
    ring.write(KIND_PLAN, np.arange(10, dtype=np.int32), 1.0)
    assert reports.next() == {"kind": KIND_PLAN, "sum": 45}
    child.terminate(20.0)
    ring.close()


def test_nothing_is_left_when_the_launcher_is_killed(reports):
    """Launcher -> core -> worker: the core serves a socket in a private folder, the worker sleeps on a ring."""
    launcher = start(reports, "launcher")
    core = next(s for s in [reports.next() for _ in range(3)] if "address" in s)
    folder = Path(core["address"].removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    launcher.proc.kill()
    assert ended_within(core["pid"], 20.0) and ended_within(core["child"], 20.0)
    assert not folder.exists()
    launcher.terminate(0.0)


def test_killed_core_takes_its_workers_along(reports):
    child = start(reports, "core", arguments=("--sigterm",))
    core = next(s for s in [reports.next() for _ in range(3)] if "address" in s)
    child.proc.kill()
    assert ended_within(core["child"], 1.0)
    child.terminate(0.0)
    folder = Path(core["address"].removeprefix("ipc://")).parent
    assert folder.exists()  # SIGKILL leaves no time
    child = start(reports, "core", arguments=("--sigterm",))
    for _ in range(3):
        reports.next()
    assert not folder.exists()  # the next to make one has swept it
    child.terminate(20.0)


def test_parent_killed_before_the_child_is_up_leaves_no_child(reports):
    """A parent that is killed right after the start of its child: the child finds another parent, or no configuration."""
    script = (
        "import os, signal, subprocess, sys, socket\n"
        "a, b = socket.socketpair()\n"
        "p = subprocess.Popen([sys.executable, '-P', '-m', 'ipc_children', '--control-fd', str(b.fileno()),"
        " '--parent-pid', str(os.getpid())], pass_fds=[b.fileno()])\n"
        "print(p.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=100)
    assert done.returncode == -signal.SIGKILL
    started = time.monotonic()
    assert ended_within(int(done.stdout), 20.0) and time.monotonic() - started < 20
