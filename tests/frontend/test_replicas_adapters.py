"""Adapters of several engines: all have the same, or none has; and requests go where their adapter has a slot."""

import asyncio
import time

import numpy as np
import pytest
from fake_core import LIMITS, FakeCore, echo
from msgspec.structs import replace
from own_loop import heard, until
from replica_cases import CACHE, THE, ended, engine_of, with_cores

from quire.frontend.client import adapter_calls
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.client.terms import Terms
from quire.frontend.replicas.adapter_places import SWAP_TOKENS, AdapterPlaces
from quire.frontend.replicas.replicas import Replicas
from quire.frontend.replicas.router import ROW_TOKENS, Router
from quire.ipc.adapters import AdapterFile, AdapterInfo, AdapterLimits, AdapterUse
from quire.ipc.messages.frontend import AdaptersChanged, Utility, UtilityResult
from quire.ipc.messages.stats import AdapterStats
from quire.ipc.messages.utilities import (
    AdapterLoaded,
    AdaptersRestored,
    AdapterUnloaded,
    LoadFolder,
    RestoreAdapters,
    UnloadAdapter,
    UtilityFailed,
)
from quire.ipc.sampling import SamplingParams

WITH_ADAPTERS = {"limits": replace(LIMITS, adapters=AdapterLimits(max_loras=2))}
LONG = SamplingParams(max_tokens=None)


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name, AdapterFile(f"/{name}", 1, 2, 3, 4), loaded_at=time.time())


OLD, NEW = info("x"), replace(info("x"), file=AdapterFile("/new", 5, 6, 7, 8))


async def called(core: FakeCore, kind: type) -> Utility:
    call = await heard(core, Utility)
    assert isinstance(call.call, kind), call
    return call


async def answer(core: FakeCore, kind: type, with_what: object) -> Utility:
    call = await called(core, kind)
    core.say(UtilityResult(core.epoch, call.id, with_what))
    return call


def again(core: FakeCore, **more: object) -> FakeCore:
    """A successor at the same address."""
    return FakeCore(echo, address=core.address, cache=CACHE, **{**WITH_ADAPTERS, **more})


@with_cores({**WITH_ADAPTERS, "adapters": [OLD]}, {**WITH_ADAPTERS, "adapters": [OLD]})
async def test_a_load_that_fails_somewhere_is_undone_and_the_error_says_where(cores: list[FakeCore], client: Replicas) -> None:
    loading = asyncio.create_task(adapter_calls.load(client, "x", "/new", in_place=True))
    await answer(cores[0], LoadFolder, AdapterLoaded(NEW))
    await answer(cores[1], LoadFolder, UtilityFailed("invalid", "x: r is 0"))
    await answer(cores[0], UnloadAdapter, AdapterUnloaded())
    assert (await answer(cores[0], RestoreAdapters, AdaptersRestored([]))).call.adapters == [OLD]
    with pytest.raises(InvalidRequest) as error:
        await loading
    assert str(error.value) == f"x: r is 0 (the engine at {cores[1].address})"


@with_cores(WITH_ADAPTERS, {"script": echo, **WITH_ADAPTERS})
async def test_an_engine_that_is_lost_during_a_load_gets_the_adapter_before_requests(
    cores: list[FakeCore], client: Replicas
) -> None:
    loading = asyncio.create_task(adapter_calls.load(client, "x", "/x"))
    await called(cores[0], LoadFolder)
    cores[0].stop()
    await until(lambda: not client.engines[0].is_connected)
    await answer(cores[1], LoadFolder, AdapterLoaded(OLD))
    assert await loading == OLD
    cores[1].say(AdaptersChanged(cores[1].epoch, [OLD], []))
    await until(lambda: client.adapters)
    with again(cores[0]) as successor:
        call = await called(successor, RestoreAdapters)
        assert call.call.adapters == [OLD] and client.adapters == {"x": OLD}
        streams = [client.submit([THE], LONG) for _ in range(6)]
        assert {engine_of(client, stream) for stream in streams} == {1}
        successor.say(UtilityResult(successor.epoch, call.id, AdaptersRestored([])))
        await until(lambda: not client.engines[0].is_restoring)
        streams += [client.submit([THE], LONG) for _ in range(6)]
        assert 0 in {engine_of(client, stream) for stream in streams[6:]}
        await ended(streams)


@with_cores(WITH_ADAPTERS, WITH_ADAPTERS)
async def test_an_engine_that_connects_during_a_load_follows(cores: list[FakeCore], client: Replicas) -> None:
    cores[1].stop()
    await until(lambda: not client.engines[1].is_connected)
    loading = asyncio.create_task(adapter_calls.load(client, "x", "/x"))
    call = await called(cores[0], LoadFolder)
    with again(cores[1]) as successor:
        await until(lambda: client.engines[1].is_connected)
        cores[0].say(UtilityResult(cores[0].epoch, call.id, AdapterLoaded(OLD)))
        assert (await answer(successor, RestoreAdapters, AdaptersRestored([]))).call.adapters == [OLD]
        assert await loading == OLD


@with_cores({**WITH_ADAPTERS, "adapters": [OLD]}, {**WITH_ADAPTERS, "adapters": [OLD]})
async def test_what_was_unloaded_while_an_engine_was_away_is_unloaded_there(cores: list[FakeCore], client: Replicas) -> None:
    cores[1].stop()
    await until(lambda: not client.engines[1].is_connected)
    unloading = asyncio.create_task(adapter_calls.unload(client, "x"))
    await answer(cores[0], UnloadAdapter, AdapterUnloaded())
    await unloading
    cores[0].say(AdaptersChanged(cores[0].epoch, [], ["x"]))
    await until(lambda: not client.adapters)
    with again(cores[1], adapters=[OLD]) as successor:  # an adapter of --lora-modules is there again
        assert (await answer(successor, UnloadAdapter, AdapterUnloaded())).call.name == "x"
        assert client.adapters == {} == client.engines[1].adapters


@with_cores(*[{**WITH_ADAPTERS, "adapters": [OLD]}] * 3)
async def test_an_engine_that_connects_while_another_one_follows_unloads_too(cores: list[FakeCore], client: Replicas) -> None:
    for core in cores[1:]:
        core.stop()
    await until(lambda: not any(engine.is_connected for engine in client.engines[1:]))
    unloading = asyncio.create_task(adapter_calls.unload(client, "x"))
    call = await called(cores[0], UnloadAdapter)
    with again(cores[1], adapters=[OLD]) as follower:
        await until(lambda: client.engines[1].is_connected)
        cores[0].say(UtilityResult(cores[0].epoch, call.id, AdapterUnloaded()), AdaptersChanged(cores[0].epoch, [], ["x"]))
        call = await called(follower, UnloadAdapter)
        with again(cores[2], adapters=[OLD]) as last:
            await answer(last, UnloadAdapter, AdapterUnloaded())
            follower.say(UtilityResult(follower.epoch, call.id, AdapterUnloaded()))
            await unloading
            assert "x" not in client.engines[2].adapters


@with_cores({"script": echo, **WITH_ADAPTERS}, {"script": echo, **WITH_ADAPTERS})
async def test_a_request_goes_where_its_adapter_runs_or_a_slot_is_free(cores: list[FakeCore], client: Replicas) -> None:
    def submit(name: str) -> int:
        streams.append(client.submit([THE], LONG, terms=Terms(adapter=AdapterUse(name))))
        return engine_of(client, streams[-1])

    streams: list = []
    cores[0].announce(adapters=AdapterStats(2, ["a", "b"], [], 2, 0, 0.1))
    cores[1].announce(adapters=AdapterStats(2, ["c"], [], 1, 0, 0.1))
    await until(lambda: all(engine.heartbeat and engine.heartbeat.adapters for engine in client.engines))
    assert {submit("d") for _ in range(4)} == {1}, "the other engine's slots are busy"
    assert {submit("b") for _ in range(4)} == {0}, "where it runs, although less work waits elsewhere"
    await ended(streams)


def test_a_swap_costs_tokens_where_all_slots_are_busy_with_others() -> None:
    places = AdapterPlaces(3)
    assert list(places.swaps("a")) == [0, 0, 0], "nothing is known yet"
    for engine, running in enumerate((["a", "b"], ["a"], ["c", "d"])):
        places.told(engine, AdapterStats(2, running, [], 0, 0, 0.0))
    assert list(places.swaps("a")) == [0, 0, SWAP_TOKENS] and list(places.swaps("e")) == [SWAP_TOKENS, 0, SWAP_TOKENS]
    places.sent(1, "b")
    assert list(places.swaps("e")) == [SWAP_TOKENS] * 3, "sent since the last heartbeat"
    assert list(places.swaps("")) == []
    places.ended(1, "b")
    assert list(places.swaps("e")) == [SWAP_TOKENS, 0, SWAP_TOKENS]
    places.check()
    places.sent(2, "f")
    places.lost(2)
    assert list(places.swaps("e"))[2] == 0
    places.check()


@pytest.mark.parametrize("policy", ["cache-aware", "least-loaded"])
def test_the_router_weighs_other_work_against_its_own(policy: str) -> None:
    router, prompt = Router(2, policy), np.arange(10)
    assert [router.send(prompt, more=[SWAP_TOKENS, 0]).engine for _ in range(5)] == [1] * 5
    for _ in range(SWAP_TOKENS // ROW_TOKENS):
        router.send(prompt, only=1)
    assert router.send(np.arange(20, 30), more=[SWAP_TOKENS, 0]).engine == 0
