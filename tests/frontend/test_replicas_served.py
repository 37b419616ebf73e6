"""Replicas: engines that come, go, and are not of one model; and the routes over them."""

import asyncio
import gc
import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import fake_client
import pytest
import toy_tokenizers
from fake_core import LIMITS, FakeCore, echo
from own_loop import heard, until
from replica_cases import CAT, ENDLESS, THE, engine_of, refuse, with_cores

from quire.frontend import launcher
from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.stream import EngineDown, InvalidRequest
from quire.frontend.replicas import replicas as module
from quire.frontend.replicas.replicas import Replicas, client_of
from quire.ipc.links.curve import FrontendKeys, make_keys
from quire.ipc.messages.frontend import EngineLimits, Utility, UtilityResult
from quire.ipc.messages.utilities import (
    GetServerInfo,
    ProfileDone,
    ResetDone,
    ResetPrefixCache,
    ServerInfo,
    StopProfile,
    UtilityFailed,
)
from quire.ipc.numerics import Numerics
from quire.ipc.sampling import SamplingParams


@pytest.fixture
def folder() -> Iterator[str]:
    """For sockets: pytest's own may be too long a path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


# --------------------------------------------------------------------------------------------------------- connections
def test_one_engine_needs_no_replicas() -> None:
    assert type(client_of(["ipc:///tmp/a"])) is AsyncClient
    several = client_of(["ipc:///tmp/a", "ipc:///tmp/b"], policy="least-loaded")
    assert isinstance(several, Replicas) and several.address == "ipc:///tmp/a, ipc:///tmp/b"
    assert not several.is_connected and several.num_requests == 0 and several.health()
    with pytest.raises(EngineDown):
        several.submit([1], SamplingParams())
    with pytest.raises(EngineDown):
        _ = several.welcome


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"name": "dog"}, r"the engine at ipc://\S+ serves '(toy|dog)', the one at ipc://\S+ '(toy|dog)'"),
        (
            {"files": {**toy_tokenizers.files(), "chat_template.jinja": b"{{ x }}"}},
            "different models: their chat_template",
        ),
        ({"model": "sha256"}, "different models: their config.json, --hf-overrides or weights differ"),
        ({"limits": EngineLimits(64, 401, 4, 20)}, "different models: their vocabularies"),
        ({"eos": (3,)}, "vocabularies or end tokens differ"),
        ({"numerics": Numerics(dtype="bfloat16")}, r"they differ in --dtype \((none and bfloat16|bfloat16 and none)\)$"),
    ],
)
def test_engines_of_different_models_are_refused_by_both_names(other: dict[str, Any], match: str) -> None:
    async def main() -> None:
        with FakeCore() as one, FakeCore(**other) as two:
            client = Replicas([one.address, two.address], [None, None])
            with pytest.raises(ValueError, match=match) as caught:
                await client.connect()
            assert one.address in str(caught.value) and two.address in str(caught.value)
            assert not client.is_connected

    asyncio.run(asyncio.wait_for(main(), 100))


def test_an_engine_that_comes_back_as_another_model_gets_nothing(monkeypatch, caplog, folder) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)

    async def main() -> None:
        addresses = [f"ipc://{folder}/{i}" for i in range(2)]
        cores = [FakeCore(address=address) for address in addresses]
        async with Replicas(addresses, [None, None]) as client:
            cores[0].stop()
            await until(lambda: not client.engines[0].is_connected)
            cores[0] = FakeCore(address=addresses[0], name="dog")
            await until(lambda: client.engines[0].is_connected)
            assert f"; the engine at {addresses[0]} gets no requests" in caplog.text
            assert "serves 'toy'" in client.engines[0].health() and client.health() is None
            assert client.welcome.served_model_names == ["toy"]
            streams = [client.submit([THE, i], ENDLESS) for i in range(8)]
            assert {engine_of(client, stream) for stream in streams} == {1}
            cores[1].stop()
            await until(lambda: not client.engines[1].is_connected)
            with pytest.raises(EngineDown):
                client.submit([THE], ENDLESS)
            cores[1] = FakeCore(address=addresses[1], name="dog")  # and so all have changed
            await until(lambda: all(engine.health() is None for engine in client.engines))
            assert client.welcome.served_model_names == ["dog"]
            more = [client.submit([THE, i], ENDLESS) for i in range(8)]
            assert {engine_of(client, stream) for stream in more} == {0, 1}
        for core in cores:
            core.stop()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_engines_of_two_versions_are_used_and_named(monkeypatch, caplog) -> None:
    async def main() -> None:
        with FakeCore(echo, version="1") as one, FakeCore(echo, version="2") as two:
            async with Replicas([one.address, two.address], [None, None]) as client:
                assert client.health() is None and all(engine.health() is None for engine in client.engines)
            [said] = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
            assert f"{one.address} is of version 1" in said and f"{two.address} is of version 2" in said

    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    asyncio.run(asyncio.wait_for(main(), 100))


def test_an_engine_that_refuses_us_says_why_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)

    async def main() -> None:
        with FakeCore() as one, FakeCore() as two:
            client = Replicas([one.address, two.address], [None, None])
            connect, refusals = client._replicas[0].connect, iter(["another key", "another key", "another version"])

            async def refused(timeout_s: float | None) -> None:
                if why := next(refusals, None):
                    raise EngineDown(why)
                await connect(timeout_s)

            monkeypatch.setattr(client._replicas[0], "connect", refused)
            async with client:
                await until(lambda: all(engine.health() is None for engine in client.engines))
        said = [record.getMessage() for record in caplog.records]
        assert said.count("another key") == said.count("another version") == 1

    asyncio.run(asyncio.wait_for(main(), 100))


def test_an_engine_that_stops_in_order_did_not_end_unexpectedly(monkeypatch, caplog) -> None:
    monkeypatch.setattr(launcher, "_LOOK_S", 0.001)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)

    async def main() -> None:
        with FakeCore() as stopped, FakeCore() as killed:
            async with Replicas([stopped.address, killed.address], [None, None]) as client:
                tasks = [asyncio.create_task(log) for log in launcher.log_engine_changes(client)]
                stopped.say_that_it_stops()
                killed.stop()
                await until(lambda: f"the engine at {stopped.address} was told to stop; the others get its" in caplog.text)
                await until(lambda: f"an engine ended unexpectedly (no connection to {killed.address})" in caplog.text)
                for task in tasks:
                    task.cancel()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_an_engine_that_does_not_take_us_back_says_why(monkeypatch, caplog, folder) -> None:
    """As after a key was removed from its list, or an upgrade: 503 without an end would have no reason in the log."""
    monkeypatch.setattr(launcher, "_LOOK_S", 0.001)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)

    async def main() -> None:
        with FakeCore(address=f"ipc://{folder}/core") as old:
            async with AsyncClient(old.address) as client:
                task = asyncio.create_task(launcher.log_changes_of(client))
                old.stop()
                await until(lambda: "the engine ended unexpectedly" in caplog.text)
                assert "does not take" not in caplog.text
                with FakeCore(address=old.address, protocol=99):
                    why = f"the engine at {old.address} does not take this frontend back: the engine speaks protocol 99"
                    await until(lambda: why in caplog.text)
                with FakeCore(address=old.address):
                    await until(lambda: client.is_connected)
                    assert client.refusal is None
                task.cancel()
        assert caplog.text.count("does not take") == 1

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_that_is_not_there_yet_is_not_waited_for_long(monkeypatch, caplog, folder) -> None:
    monkeypatch.setattr(module, "OTHERS_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(launcher, "_LOOK_S", 0.001)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire")

    async def main() -> None:
        address = f"ipc://{folder}/0"
        with FakeCore() as one:
            async with Replicas([address, one.address], [None, None]) as client:
                assert client.health() is None and not client.engines[0].is_connected
                why = f"no engine at {address} for 0.05 s: none listens at this address"
                assert f"no engine at {address} yet: the others get its requests ({why})" in caplog.text
                await client.connect()  # nothing to do
                tasks = [asyncio.create_task(log) for log in launcher.log_engine_changes(client)]
                with FakeCore(address=address):
                    await until(lambda: client.engines[0].health() is None)
                    client._looked = 0.0
                    streams = [client.submit([THE, i], ENDLESS) for i in range(20)]
                    assert {engine_of(client, stream) for stream in streams} == {0, 1}
                    await until(lambda: f"the engine at {address} is back" in caplog.text)
                    assert "ended unexpectedly" not in caplog.text
                    for task in tasks:
                        task.cancel()
            with pytest.raises(EngineDown):
                client.submit([THE], ENDLESS)

    asyncio.run(asyncio.wait_for(main(), 100))


def test_without_any_engine_in_time_there_is_no_client_and_each_one_has_its_reason(folder) -> None:
    """Keys that do not fit are not to be looked for as an engine that is down."""
    keys = FrontendKeys(make_keys(), make_keys().public)

    async def main() -> None:
        addresses = [f"ipc://{folder}/{i}" for i in range(2)]
        with pytest.raises(EngineDown) as raised, FakeCore(address=addresses[1]):
            await Replicas(addresses, [None, keys]).connect(timeout_s=1.0)
        assert str(raised.value) == (
            f"no connection for 1 s: no engine at {addresses[0]} for 0.5 s: none listens at this address; no engine at "
            f"{addresses[1]} for 0.5 s: the handshake failed: one side uses keys that the other does not expect"
        )
        for wrong, match in (("nonsense", "an address starts with"), ("tcp://a b:1", "no connection can be made to tcp://a b")):
            with pytest.raises(ValueError, match=match):
                await Replicas([addresses[0], wrong], [None, None]).connect()

    asyncio.run(asyncio.wait_for(main(), 100))


SMALL = EngineLimits(max_model_len=32, vocab_size=400, max_num_seqs=2, max_logprobs=5)


@with_cores({}, {"limits": SMALL})
async def test_what_holds_for_all_is_what_clients_are_told(cores: list[FakeCore], client: Replicas) -> None:
    assert client.welcome.limits == EngineLimits(32, 400, LIMITS.max_num_seqs + 2, 5)
    assert client.tokenizer is client.engines[0].tokenizer is client.engines[1].tokenizer
    for core in cores:
        core.announce(num_running=3, num_waiting=1)
    await until(lambda: client.heartbeat is not None and (client.heartbeat.num_running, client.heartbeat.num_waiting) == (6, 2))
    cores[0].stop()
    await until(lambda: (client.heartbeat.num_running, client.heartbeat.num_waiting) == (3, 1))


@with_cores({}, {})
async def test_what_is_asked_beside_requests_is_asked_of_all(cores: list[FakeCore], client: Replicas) -> None:
    async def answers(call: Any, kind: type, *said: Any) -> Any:
        task = asyncio.create_task(client.utility(call, kind))
        for core, answer in zip(cores, said, strict=True):
            message = await heard(core, Utility)
            assert message.call == call
            core.say(UtilityResult(core.epoch, message.id, answer))
        return await task

    assert (await answers(ResetPrefixCache(), ResetDone, ResetDone(True), ResetDone(True))).complete
    assert not (await answers(ResetPrefixCache(), ResetDone, ResetDone(True), ResetDone(False))).complete
    assert (await answers(StopProfile(), ProfileDone, ProfileDone(["a"]), ProfileDone(["b"]))).traces == ["a", "b"]
    info = await answers(GetServerInfo(), ServerInfo, ServerInfo({"model": "x"}), ServerInfo({"model": "x"}))
    assert info.config == {"model": "x", "data_parallel_size": 2}
    with pytest.raises(InvalidRequest, match="no folder"):
        await answers(StopProfile(), ProfileDone, ProfileDone([]), UtilityFailed("invalid", "no folder"))
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    with pytest.raises(InvalidRequest, match="first"):
        await answers(StopProfile(), ProfileDone, UtilityFailed("invalid", "first"), UtilityFailed("invalid", "second"))
    gc.collect()
    assert not told


# ---------------------------------------------------------------------------------------------------------------- HTTP
@with_cores({"script": echo}, {"script": echo})
async def test_routes_need_not_know(cores: list[FakeCore], client: Replicas) -> None:
    api = fake_client.Api(client)
    status, body = await api.json("POST", fake_client.COMPLETIONS, {"model": "toy", "prompt": [THE, CAT], "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    for core in cores:
        core.announce(num_running=int(core is cores[0]))
    await until(lambda: all(engine.heartbeat for engine in client.engines))
    await until(lambda: client.engines[0].heartbeat.num_running == 1)
    text = (await api.ask("GET", "/metrics")).body.decode()
    for engine in (0, 1):
        assert f'vllm:num_requests_running{{model_name="toy",engine="{engine}"}} {1.0 - engine}' in text
        assert f'quire:engine_up{{model_name="toy",engine="{engine}"}} 1.0' in text
        assert f'vllm:cache_config_info{{engine="{engine}",' in text
    assert 'vllm:request_success_total{model_name="toy",engine="all",finished_reason="length"} 1.0' in text
    names = [line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(names) == len({*names})
    cores[0].stop()
    await until(lambda: not client.engines[0].is_connected)
    assert (await api.ask("GET", "/health")).status == (await api.ask("GET", "/ready")).status == 200
    text = (await api.ask("GET", "/metrics")).body.decode()
    assert 'quire:engine_up{model_name="toy",engine="1"} 1.0' in text
    cores[1].stop()
    await until(lambda: not client.is_connected)
    assert (await api.ask("GET", "/health")).status == 503
    status, body = await api.json("POST", fake_client.COMPLETIONS, {"model": "toy", "prompt": [THE]})
    assert (status, body["error"]["code"]) == (503, "engine_down")


@with_cores({}, {})
async def test_a_request_that_all_have_refused_gets_503(cores: list[FakeCore], client: Replicas) -> None:
    asked = asyncio.create_task(
        fake_client.Api(client).ask("POST", fake_client.COMPLETIONS, {"model": "toy", "prompt": [THE], "max_tokens": 3})
    )
    await until(lambda: client.num_requests)
    first = next(iter(client._sent.values())).engine
    await refuse(cores[first])
    await refuse(cores[1 - first])
    answer = await asked
    assert answer.status == 503 and b'"overloaded"' in answer.body and int(answer.headers["retry-after"]) > 0
