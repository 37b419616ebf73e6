"""The core's end of other hosts against agents by hand: what they may say, and how it is named when they say something else."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
import zmq
from core_by_hand import worker_template
from deadlines import DEADLINE_S

from quire.enginecore.hosts import remote_ranks as module
from quire.enginecore.hosts.placement import HostEntry, place
from quire.enginecore.hosts.remote_host import HostFailed
from quire.enginecore.hosts.remote_ranks import RemoteRanks
from quire.ipc.links.core_and_hosts import HostToCore
from quire.ipc.links.curve import CoreKeys, make_keys
from quire.ipc.messages.hosts import (
    BeginRanks,
    EndRanks,
    HostCommand,
    HostHeartbeat,
    HostHello,
    HostMessage,
    HostRefused,
    HostWelcome,
    ModelFiles,
    PlanRecord,
    RankCommand,
    RankEnded,
    RankMessage,
)
from quire.ipc.messages.workers import AllocateKV, SideResults, WorkerReady
from quire.ipc.step.plan_ring import KIND_PLAN
from quire.ipc.version import VERSION

TIMEOUT_S = DEADLINE_S
MODEL = ModelFiles(None, None, None, True, {})
WELCOME = HostWelcome(VERSION, ["GPU"] * 2)


class Other:
    """Another host, whose agent says what the test says; ranks 1 and 2 of three are there."""

    def __init__(self, gpu_name: str | None = None, silence_s: float = 10.0) -> None:
        own, engine = make_keys(), make_keys()
        self.keys = CoreKeys(own, frozenset({engine.public}))
        self.link = HostToCore("tcp://127.0.0.1:*", self.keys)
        entry = HostEntry(self.link.address, own.public, 2)
        self.ranks = RemoteRanks(place([entry], 3, 3, 0, None), engine, MODEL, gpu_name, silence_s=silence_s)
        self.configs = {rank: msgspec.structs.replace(worker_template(3), rank=rank) for rank in (1, 2)}
        self.connection = b""
        self.at = f"host {self.link.address} with workers 1, 2: "
        self.ranks.begin(self.configs)

    def next(self, kind: type[HostCommand]):
        """What the core sends next, which must be of a kind."""
        poller = zmq.Poller()
        for source in self.link.sockets():
            poller.register(source, zmq.POLLIN)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            poller.poll(100)
            for connection, command in self.link.receive(1):
                assert isinstance(command, kind), command
                self.connection = connection
                return command
        raise AssertionError("nothing has come")

    def say(self, message: HostMessage) -> None:
        assert self.link.send(self.connection, message)

    def begun(self) -> None:
        assert self.next(HostHello).version == VERSION
        self.say(WELCOME)
        self.turn_until(lambda: self.ranks._hosts[0].is_welcome)
        assert self.next(BeginRanks).configs == list(self.configs.values())

    def turn_until(self, condition) -> list:
        said: list = []
        deadline = time.monotonic() + TIMEOUT_S
        poller = zmq.Poller()
        for source in self.ranks.sockets():
            poller.register(source, zmq.POLLIN)
        while not condition() and not said:
            assert time.monotonic() < deadline, "it has not come in time"
            poller.poll(20)
            said += self.ranks.messages()
            self.ranks.check()
        return said

    def failure(self) -> str:
        with pytest.raises(HostFailed) as error:
            self.turn_until(lambda: False)
        return str(error.value)

    def close(self) -> None:
        self.ranks.end()
        self.ranks.close()
        self.link.close()


@pytest.fixture(autouse=True)
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 1e9)  # but for the first


@pytest.fixture
def other() -> Iterator[Other]:
    other = Other()
    yield other
    other.close()


def test_a_host_that_was_here_is_waited_for_behind_a_proxy_that_hangs_up(other: Other) -> None:
    """Which is what another key looks like, too: at the first start it is taken for one."""
    other.begun()
    other.ranks.end()
    other.link.close()
    with socket.create_server(("127.0.0.1", int(other.link.address.rpartition(":")[2]))) as proxy:
        proxy.setblocking(False)
        tries = []

        def have_been_two() -> bool:
            with suppress(BlockingIOError):
                proxy.accept()[0].close()
                tries.append(other.ranks._hosts[0].is_welcome)
            return len(tries) > 1

        other.ranks.begin(other.configs)
        other.turn_until(have_been_two)
    other.link = HostToCore(other.link.address, other.keys)
    other.begun()


def test_commands_and_records_go_there_and_messages_come(other: Other) -> None:
    other.begun()
    assert other.ranks.here == [0] and not other.ranks.send(0, AllocateKV(5)) and other.ranks.send(2, AllocateKV(5))
    assert other.next(RankCommand) == RankCommand(2, AllocateKV(5))
    other.ranks.write(KIND_PLAN, (np.arange(3, dtype=np.int32), np.array([[7], [8]], np.int64)))
    assert np.frombuffer(other.next(PlanRecord).words, np.int32).tolist() == [0, 1, 2, 7, 8]
    other.say(RankMessage(WorkerReady(1)))
    assert other.turn_until(lambda: False) == [WorkerReady(1)]
    other.say(HostHeartbeat([2, 0]))
    other.turn_until(lambda: other.ranks.is_stopped(2))
    assert not other.ranks.is_stopped(0) and not other.ranks.is_stopped(1)
    assert (other.ranks.where(0), other.ranks.where(1)) == (" on this host", f" on host {other.link.address}")
    other.ranks.end()
    other.next(EndRanks)
    assert not list(other.ranks.sockets()) and other.ranks.messages() == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (HostRefused("another model is in /m"), "another model is in /m"),
        (RankMessage(WorkerReady(0)), "it sent what was not due"),
        (RankEnded(0, 0), "it sent what was not due"),
        (WELCOME, "it sent what was not due"),
        (RankMessage(SideResults(1, 1, [])), "a worker there sent results, which come from this host's only"),
    ],
)
def test_what_a_host_may_not_say_is_its_failure(other: Other, message: HostMessage, why: str) -> None:
    other.begun()
    other.say(message)
    assert other.failure() == other.at + why


def test_the_end_of_a_rank_is_named_with_its_host(other: Other) -> None:
    other.begun()
    other.say(RankEnded(2, -9))
    assert other.failure() == f"worker 2 on host {other.link.address} ended unexpectedly (signal SIGKILL)"


def test_bytes_that_are_no_message(other: Other) -> None:
    other.begun()
    other.link._router.send_multipart([other.connection, b"\xc1"])
    assert other.failure().startswith(other.at + "it sent what cannot be read: ")


def test_another_version(other: Other) -> None:
    other.next(HostHello)
    other.say(HostWelcome("9.9.9", []))
    assert other.failure() == other.at + f"it runs Quire 9.9.9, and this host {VERSION}: they must be the same"


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (["NVIDIA H200"], "2 GPUs are wanted there, and it has 1 (CUDA_VISIBLE_DEVICES counts)"),
        (["NVIDIA H200", "NVIDIA H100"], "its GPUs differ from this host's: NVIDIA H100 there, NVIDIA H200 here"),
    ],
)
def test_gpus_that_do_not_fit(gpus: list[str], why: str) -> None:
    other = Other("NVIDIA H200")
    try:
        other.next(HostHello)
        other.say(HostWelcome(VERSION, gpus))
        assert other.failure() == other.at + why
    finally:
        other.close()


def test_a_connection_that_is_lost_is_noticed_at_once(other: Other) -> None:
    other.begun()
    other.link.close()
    assert other.failure() == other.at + "its agent, or the connection to it, is gone"


def test_silence_is_noticed_and_sooner_when_a_rank_is_waited_for(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    other.begun()
    now = other.ranks._clock.now
    monkeypatch.setattr(other.ranks._clock, "now", now + 2.5)
    other.ranks.check()
    with pytest.raises(HostFailed, match="nothing was heard of it for 2 s"):
        other.ranks.check(is_suspect=True)
    monkeypatch.setattr(other.ranks._clock, "now", now + 10.5)
    with pytest.raises(HostFailed, match="nothing was heard of it for 10 s: it, or its agent, is stopped or cut off"):
        other.ranks.check()


def test_a_host_that_does_not_answer(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other.ranks._clock, "now", other.ranks._clock.now + 10.5)
    with pytest.raises(HostFailed, match="it cannot be reached: no answer for 10 s"):
        other.ranks.check()


def test_a_host_that_was_there_may_take_its_time_to_be_back(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    other.begun()
    other.ranks.end()
    other.ranks.begin(other.configs)
    monkeypatch.setattr(other.ranks._clock, "now", other.ranks._clock.now + 200.0)
    other.ranks.check()
    monkeypatch.setattr(other.ranks._clock, "now", other.ranks._clock.now + 50.0)
    with pytest.raises(HostFailed, match="no answer for 240 s"):
        other.ranks.check()
