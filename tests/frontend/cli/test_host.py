"""`quire host`: what it does with an agent that a signal has stopped. All else is in tests/serving/test_hosts.py."""

import select
import signal

import pytest
from deadlines import DEADLINE_S

from quire.frontend.cli import host
from quire.ipc.host_config import HostConfig
from quire.ipc.process.children import prespawn


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_agent_that_is_stopped_is_ended(
    is_ready: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "STOPPED_LIMIT_S", 0.2)
    monkeypatch.setattr(host, "LOOK_S", 0.02)
    agent = prespawn(host.AGENT_MODULE)
    if is_ready:
        agent.configure(HostConfig(listen="tcp://127.0.0.1:*"))
        select.select([agent._control], [], [])
    agent.send_signal(signal.SIGSTOP)
    assert host._watch(agent) == 1
    out, err = capsys.readouterr()
    assert err == "quire host: the agent was stopped by a signal 0 s ago\n" and out.startswith("Quire host ready") == is_ready
    assert agent.wait(DEADLINE_S) == -signal.SIGKILL
    agent.close()
