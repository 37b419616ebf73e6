"""A core and frontends in processes of their own, which are stopped and killed."""

import os
import signal

import psutil
import pytest
from deadlines import DEADLINE_S
from frontend_to_core_cases import outputs
from ipc_children import Role
from ipc_cores import LoopingCore

from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.process.children import spawn


@pytest.fixture
def make_frontend(reports):
    children = []

    def make(core: LoopingCore, **more):
        role = Role(name="frontend", report_fd=reports.fd, address=core.link.address, **more)
        children.append(spawn("ipc_children", role, [reports.fd]))
        return children[-1]

    yield make
    for child in children:
        child.terminate(0.0)


@pytest.fixture
def core():
    core = LoopingCore(epoch=2**61 + 3, send_hwm=2)
    yield core
    core.link.close(linger_s=0)


def wait_until_stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


def test_stopped_frontend_gets_everything_in_order_when_it_goes_on(core, make_frontend, reports):
    child = make_frontend(core)
    core.until(lambda: core.requests)
    reports.next()
    wait_until_stopped(child.pid)
    identity = core.requests[0][0]
    sent, waiting = 0, 0
    while waiting < 100 * 500 * 12:  # kernel and socket hold some; then the outbox fills
        core.link.send(identity, outputs(core.epoch, 0, *range(sent, sent + 500)))
        sent += 500
        core.turn(0)
        waiting = core.link._slow[identity].outbox.num_bytes if core.link._slow else 0
    num_steps = sent // 500
    core.link.send(identity, outputs(core.epoch, 0, sent, finished=True))
    core.turn(0)
    assert core.lost == [] and core.link._slow
    os.kill(child.pid, signal.SIGCONT)
    core.until(lambda: not core.link._slow)
    core.until(lambda: child.poll() is not None)
    said = reports.next()
    assert (said["counts"], said["ordered"]) == ([sent + 1], True)
    assert said["num_messages"] <= num_steps - 90  # the waiting steps came as one


def test_killed_frontend_is_lost_long_before_it_has_been_silent_for_long(core, make_frontend, reports):
    children = [make_frontend(core), make_frontend(core)]
    core.until(lambda: len(core.requests) == 2)
    reports.next(), reports.next()
    children[0].proc.kill()
    core.until(lambda: core.lost, timeout_s=DEADLINE_S)
    assert len(core.lost) == 1 == len(core.link.frontends)


def test_stopped_and_killed_frontend_is_lost_too(core, make_frontend, reports):
    child = make_frontend(core)
    core.until(lambda: core.requests)
    wait_until_stopped(child.pid)
    while not core.link._slow:
        core.link.send(core.requests[0][0], outputs(core.epoch, 0, *range(500)))
    child.proc.kill()
    core.until(lambda: core.lost, timeout_s=DEADLINE_S)


def test_address_in_use_by_a_live_core_is_refused_and_that_of_a_dead_one_taken(tmp_path, make_core):
    address = f"ipc://{tmp_path}/core"
    core = make_core(address=address)
    with pytest.raises(FileExistsError, match="another process listens"):
        CoreToFrontends(address, epoch=2)
    assert (tmp_path / "core").stat().st_mode & 0o777 == 0o600
    core.stop()
    assert not (tmp_path / "core").exists()
