"""The agent of a host against engines by hand: who is heard, and what is refused; nothing that comes ends it."""

import re
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from core_by_hand import worker_template
from deadlines import DEADLINE_S
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.enginecore.hosts import agent as agent_module
from quire.enginecore.hosts.agent import Agent
from quire.enginecore.hosts.same_model import model_files
from quire.enginecore.loading.model_files import BUNDLED
from quire.ipc.config import EngineConfig
from quire.ipc.interfaces import LOOPBACK
from quire.ipc.links.core_and_hosts import CoreToHost, HostLost, HostToCore
from quire.ipc.links.curve import CoreKeys, KeyPair, make_keys
from quire.ipc.messages.hosts import (
    BeginRanks,
    CoreHeartbeat,
    EndRanks,
    HostHeartbeat,
    HostHello,
    HostMessage,
    HostRefused,
    HostWelcome,
    PlanRecord,
    RankMessage,
)
from quire.ipc.messages.workers import WorkerFailed
from quire.ipc.version import VERSION
from quire.ipc.worker_config import WorkerConfig

TIMEOUT_S = DEADLINE_S
MODEL = model_files(EngineConfig(), BUNDLED)


class Host:
    """An agent in a thread, and what connects to it."""

    def __init__(self) -> None:
        self.own, self.engine = make_keys(), make_keys()
        self.link = HostToCore("tcp://127.0.0.1:*", CoreKeys(self.own, frozenset({self.engine.public})))
        self.agent = Agent(self.link, LOOPBACK)
        self.thread = threading.Thread(target=self.agent.run, name="test-agent")
        self.thread.start()
        self.context = zmq.Context()
        self.engines: list[CoreToHost] = []

    def connect(self, keys: KeyPair | None = None, expected: bytes | None = None) -> CoreToHost:
        engine = CoreToHost(self.context, keys or self.engine)
        self.engines.append(engine)
        engine.connect(self.link.address, expected or self.own.public)
        return engine

    def welcomed(self, name: str = "first") -> CoreToHost:
        engine = self.connect()
        tell(engine, HostHello(VERSION, name))
        assert answer(engine, HostWelcome).version == VERSION
        return engine

    def close(self) -> None:
        self.agent.stop()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        for engine in self.engines:
            engine.close()
        self.context.term()
        self.link.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def tell(engine: CoreToHost, command) -> None:
    assert engine.send(engine.encode(command))


def wait_for(look: Callable[[], object]):
    deadline = time.monotonic() + TIMEOUT_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it has not come in time"
        threading.Event().wait(0.005)
    return found


def answer(engine: CoreToHost, kind: type[HostMessage]):
    """The next message of a kind; heartbeats are passed over."""

    def look():
        for message in engine.receive(1):
            if isinstance(message, HostHeartbeat) and kind is not HostHeartbeat:
                continue
            assert isinstance(message, kind), message
            return message

    return wait_for(look)


def lost(engine: CoreToHost) -> str:
    def look():
        try:
            engine.check()
        except HostLost as error:
            return str(error)

    return wait_for(look)


def test_only_keys_of_the_list_are_admitted_and_only_this_key_is_this_host(host: Host) -> None:
    assert "does not admit this engine's key" in lost(host.connect(make_keys()))
    assert "its key is not the one that is expected" in lost(host.connect(expected=make_keys().public))
    host.welcomed()


def test_an_engine_without_keys_gets_nowhere(host: Host) -> None:
    with host.context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(host.link.address)
        stranger.send(msgspec.msgpack.encode(HostHello(VERSION, "stranger")))
        assert not stranger.poll(500)
    host.welcomed()


def test_another_version_is_refused_by_both_numbers(host: Host) -> None:
    engine = host.connect()
    tell(engine, HostHello("9.9.9", "first"))
    assert answer(engine, HostRefused).reason == f"it runs Quire {VERSION}, and the engine's host 9.9.9: they must be the same"


def test_a_second_engine_is_refused_until_the_first_has_gone(host: Host) -> None:
    first = host.welcomed("first")
    second = host.connect()
    tell(second, HostHello(VERSION, "second"))
    assert "it serves another engine" in answer(second, HostRefused).reason
    first.close()
    wait_for(lambda: True if host.agent._core is None else None)
    tell(second, HostHello(VERSION, "second"))
    answer(second, HostWelcome)


def test_an_engine_that_says_nothing_any_more_has_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be: the connection stays."""
    monkeypatch.setattr(agent_module, "CORE_SILENCE_S", 0.2)
    host.welcomed("first")
    wait_for(lambda: True if host.agent._core is None else None)
    host.welcomed("second")


class NoRanks:
    """In HostRanks' place."""

    pollables = messages = ended = stopped = kill = lambda self: ()

    def __init__(self, *_: object) -> None:
        NoRanks.begun.set()

    begun = threading.Event()


def test_ranks_wait_until_those_before_them_are_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is not free before."""
    looks = iter(range(4))
    monkeypatch.setattr(agent_module, "wait_for_all", lambda dying, _: dying if next(looks, None) is not None else [])
    monkeypatch.setattr(agent_module, "HostRanks", NoRanks)
    host.agent._dying, host.agent._dying_since = [object()], float("inf")  # type: ignore[list-item]
    tell(host.welcomed(), BeginRanks(MODEL, [worker_template(2)]))
    assert NoRanks.begun.wait(TIMEOUT_S)
    assert next(looks, None) is None and host.agent._dying == []


def test_an_agent_that_is_told_to_stop_says_so(host: Host) -> None:
    engine = host.welcomed()
    host.agent.stop()
    assert answer(engine, HostRefused).reason == "its agent was told to stop"


def test_an_engines_next_connection_takes_the_place_of_its_last(host: Host) -> None:
    host.welcomed("first")
    again = host.welcomed("first")
    tell(again, CoreHeartbeat())
    answer(again, HostHeartbeat)


def test_bytes_that_are_no_message_are_refused_and_the_agent_goes_on(host: Host) -> None:
    engine = host.connect()
    for garbage in (b"\xc1", b"", msgspec.msgpack.encode(["begin"]), msgspec.msgpack.encode({"hello": 1})):
        assert engine.send(garbage)
        assert f"it runs Quire {VERSION}" in answer(engine, HostRefused).reason
    engine = host.welcomed()
    assert engine.send(b"\xc1")
    assert "cannot read" in answer(engine, HostRefused).reason
    host.welcomed()


def on_gpu(config: WorkerConfig, index: int) -> WorkerConfig:
    engine = msgspec.structs.replace(config.engine, device="cuda")
    return msgspec.structs.replace(config, engine=engine, gpu_index=index)


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (BeginRanks(MODEL, []), "no ranks"),
        (BeginRanks(MODEL, [worker_template(2)] * 2), "one twice"),
        (BeginRanks(MODEL, [on_gpu(worker_template(2), 70)]), "71 GPUs are wanted"),
        (BeginRanks(msgspec.structs.replace(MODEL, name="/nowhere"), [worker_template(2)]), "/nowhere is not there"),
        (BeginRanks(msgspec.structs.replace(MODEL, files={"config.json": "0"}), [worker_template(2)]), "another model is in"),
    ],
)
def test_ranks_that_cannot_be_are_refused(host: Host, begin: BeginRanks, why: str) -> None:
    engine = host.welcomed()
    tell(engine, begin)
    assert why in answer(engine, HostRefused).reason


def test_ranks_that_do_not_fit_into_the_memory_of_their_host_are_refused(host: Host) -> None:
    """Its own memory counts: the engine's host has, as the engine says, enough."""
    config = worker_template()
    wanted = {"host_memory_bytes": 1 << 60, "host_ranks": 3, "kv_cache_memory_bytes": 9 << 43, "cpu_kv_cache_gib": None}
    engine = host.welcomed()
    tell(engine, BeginRanks(MODEL, [msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **wanted))]))
    failed = answer(engine, RankMessage).message
    assert isinstance(failed, WorkerFailed), failed
    assert re.search(
        r"the KV cache does not fit .*: 7\d{4}\.\d\d GiB are needed \(.* \d+\.\d\d GiB are available by", failed.message
    )


def test_what_comes_without_ranks_is_passed_over(host: Host) -> None:
    engine = host.welcomed()
    for command in (PlanRecord(1, b"abc"), EndRanks(), CoreHeartbeat()):
        tell(engine, command)
    answer(engine, HostHeartbeat)


def test_no_bytes_end_the_agent(host: Host) -> None:
    engine = host.welcomed()

    @settings(max_examples=100)
    @given(st.binary(max_size=60))
    def try_one(data: bytes) -> None:
        assert engine.send(data)

    try_one()
    assert host.thread.is_alive()
    host.welcomed("first")
