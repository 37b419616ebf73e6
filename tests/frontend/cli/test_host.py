"""`quire host`: what it does with an agent that a signal has stopped. All else is in tests/serving/test_hosts.py."""

import select
import signal

import pytest
from deadlines import DEADLINE_S

from quire.frontend.cli import host
from quire.ipc.host_config import HostConfig
from quire.ipc.process.children import Child, prespawn
from quire.ipc.process.restarts import Restarts


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
    watcher = host.AgentKeeper(HostConfig(listen="tcp://127.0.0.1:*"), Restarts())
    assert watcher.watch(agent) == "the agent was stopped by a signal 0 s ago"
    assert capsys.readouterr().out.startswith("Quire host ready") == is_ready
    assert agent.wait(DEADLINE_S) == -signal.SIGKILL
    agent.close()


class Agents:
    """Agents that end as the test says; each gets ready first, if it may."""

    def __init__(self, keeper: host.AgentKeeper, *ends: signal.Signals | None) -> None:
        self.keeper, self.ends, self.configs = keeper, list(ends), list[HostConfig]()

    def spawn(self, module: str, config: HostConfig) -> Child:
        """After the last end, the command is told to stop."""
        self.configs.append(config)
        agent = prespawn(module)
        agent.configure(config)
        select.select([agent.control_fileno()], [], [], DEADLINE_S)
        if self.ends:
            agent.send_signal(self.ends.pop(0) or signal.SIGTERM)
            agent.wait(DEADLINE_S)  # dead before the keeper's first look: it was ready, all the same
        else:
            self.keeper.on_stop()
            agent.send_signal(signal.SIGTERM)
        return agent


def test_an_agent_that_ends_is_started_again_at_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    keeper = host.AgentKeeper(HostConfig(listen="tcp://127.0.0.1:*"), Restarts(first_pause_s=0.0, lived_well_s=0.0))
    agents = Agents(keeper, signal.SIGKILL, signal.SIGTERM)
    try:
        assert keeper.run(agents.spawn) == 0
    finally:
        keeper.close()
    said = capsys.readouterr().err
    assert "the agent ended unexpectedly (signal SIGKILL); next start in 0 s" in said
    assert "the agent was told to stop; next start in 0 s" in said
    first, second, third = (config.listen for config in agents.configs)
    assert first.endswith(":*") and second == third and not second.endswith(":*")


def test_an_agent_that_cannot_start_is_given_up_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    keeper = host.AgentKeeper(HostConfig(listen="tcp://nowhere.invalid:1"), Restarts())
    assert keeper.run() == 1
    keeper.close()
    assert "cannot listen at" in capsys.readouterr().err
