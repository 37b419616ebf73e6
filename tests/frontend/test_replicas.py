"""Replicas over cores in threads: who gets a request, who gets it next, and that an engine's end is its own affair."""

import asyncio
import random

import pytest
from fake_core import FakeCore, echo, outputs
from own_loop import heard, until
from replica_cases import CACHE, CAT, ENDLESS, THE, WORLD, ended, engine_of, refuse, with_cores

from quire.frontend.client import client as client_module
from quire.frontend.client.beam_search import BeamSearchParams, search_all
from quire.frontend.client.stream import EngineDown, InvalidRequest, Overloaded, RateLimited
from quire.frontend.client.terms import Terms
from quire.frontend.replicas import replicas as module
from quire.frontend.replicas.replicas import Replicas
from quire.frontend.replicas.router import ROW_TOKENS
from quire.ipc.links.frontend_to_core import LinkBusy, LinkDown
from quire.ipc.messages.frontend import (
    Abort,
    AddRequest,
    Candidates,
    Finish,
    RequestError,
    ShuttingDown,
    Started,
    Tenant,
)
from quire.ipc.messages.utilities import (
    ResetDone,
    ResetPrefixCache,
)
from quire.ipc.sampling import SamplingParams


# -------------------------------------------------------------------------------------------------------------- answers
@with_cores({"script": echo}, {"script": echo}, {"script": echo})
async def test_requests_are_answered_by_all_engines(cores: list[FakeCore], client: Replicas) -> None:
    streams = [client.submit([THE, CAT, i], SamplingParams(max_tokens=5)) for i in range(30)]
    assert {engine_of(client, stream) for stream in streams} == {0, 1, 2}
    for i, stream in enumerate(streams):
        (delta,) = await stream.collect()
        assert list(delta.token_ids) == [THE, CAT, i, THE, CAT]
    assert [len(client.engines), client.num_requests] == [3, 0]
    found = [output async for output in client.generate(" the cat", SamplingParams(max_tokens=2))]
    assert found[-1].outputs[0].text == " the cat"


@with_cores(*[{"script": echo}] * 4)
async def test_the_next_turn_goes_to_the_same_engine(cores: list[FakeCore], client: Replicas) -> None:
    said = [THE, CAT, WORLD, THE] * 5
    first = client.submit(said, SamplingParams(max_tokens=1))
    engine = engine_of(client, first)
    await first.collect()
    for _ in range(8):
        said = [*said, CAT, CAT, CAT, CAT]
        stream = client.submit(said, SamplingParams(max_tokens=1))
        assert engine_of(client, stream) == engine
        await stream.collect()
    for salt, uncached in (("mine", len(said)), ("yours", len(said)), ("mine", 0)):  # whole blocks
        stream = client.submit(said, SamplingParams(max_tokens=1), cache_salt=salt)
        assert client._sent[stream.id].choice.num_uncached == uncached
        await stream.collect()


@with_cores({}, {})
async def test_all_sequences_of_a_request_run_on_one_engine(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], SamplingParams(n=3, max_tokens=9))
    core = cores[engine_of(client, stream)]
    request = await heard(core, AddRequest)
    assert request.task.params.n == 3
    keys = [request.id << 8 | child for child in range(3)]
    ends = [{keys[0]: "length"}, dict.fromkeys(keys[1:], "length")]
    core.say(outputs([(key, CAT) for key in keys], ends[0], epoch=core.epoch))
    assert [list(delta.token_ids) for delta in await anext(aiter(stream))] == [[CAT]] * 3
    client.check()  # two still run
    core.say(outputs([(key, CAT) for key in keys[1:]], ends[1], epoch=core.epoch))
    assert [list(delta.token_ids) for delta in await stream.collect()] == [[CAT]] * 2


@with_cores(*[{"script": lambda request, child: [CAT]}] * 4)
async def test_all_steps_of_a_beam_search_run_on_one_engine(cores: list[FakeCore], client: Replicas, monkeypatch) -> None:
    one = SamplingParams(max_tokens=1)
    for search in range(1, 9):
        streams = [client.submit([THE, i % 3], one, candidates=Candidates(4, search)) for i in range(6)]
        assert len({engine_of(client, stream) for stream in streams}) == 1
        for stream in streams:
            await stream.collect()
    assert len({*client._searches.values()}) > 1
    monkeypatch.setattr(module, "MAX_SEARCHES", 3)
    await client.submit([THE], SamplingParams(max_tokens=1), candidates=Candidates(4, 99)).collect()
    assert len(client._searches) == 3
    with pytest.raises(InvalidRequest):
        await search_all(client, [[]], BeamSearchParams(2, 2))


# -------------------------------------------------------------------------------------------------- refused for its load
@with_cores({}, {}, {})
async def test_what_an_engine_refuses_for_its_load_goes_to_the_next(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], ENDLESS, cache_salt="s", priority=0)
    seen = []
    for _ in range(2):
        number = engine_of(client, stream)
        seen.append(number)
        first = await refuse(cores[number])
        await until(lambda number=number: engine_of(client, stream) != number)
    last = engine_of(client, stream)
    assert {*seen, last} == {0, 1, 2}
    request = await heard(cores[last], AddRequest)
    assert (request.id, request.inputs, request.task, request.cache_salt) == (first.id, first.inputs, first.task, "s")
    cores[last].say(outputs([(request.id << 8, CAT)], {request.id << 8: "length"}, epoch=cores[last].epoch))
    (delta,) = await stream.collect()
    assert list(delta.token_ids) == [CAT]


@with_cores({}, {})
async def test_only_when_all_refuse_it_is_refused(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], ENDLESS)
    first = engine_of(client, stream)
    await refuse(cores[first])
    await refuse(cores[1 - first])
    with pytest.raises(Overloaded):
        await stream.collect()
    assert client.num_requests == 0
    again = client.submit([THE], ENDLESS)  # what was refused then may be taken now
    await heard(cores[engine_of(client, again)], AddRequest)
    again.cancel()


@pytest.mark.parametrize("how", ["overloaded", "invalid", "busy"])
@with_cores({}, {})
async def test_an_engine_that_has_refused_a_prompt_holds_none_of_it(
    cores: list[FakeCore], client: Replicas, monkeypatch, how: str
) -> None:
    """Wherever the next one with this prompt goes, all of it must be computed."""

    def busy(message: object) -> None:
        raise LinkBusy

    said = [THE, CAT, WORLD, THE] * 5
    if how == "busy":
        for engine in client._replicas:
            monkeypatch.setattr(engine._link, "send", busy)
        with pytest.raises(Overloaded):
            client.submit(said, ENDLESS)
        monkeypatch.undo()
    else:
        stream = client.submit(said, ENDLESS)
        first = engine_of(client, stream)
        for core in (cores[first], cores[1 - first])[: 1 if how == "invalid" else 2]:
            request = await heard(core, AddRequest)
            core.say(RequestError(core.epoch, request.id, how, "not now"))
        with pytest.raises((Overloaded, InvalidRequest)):
            await stream.collect()
    again = client.submit(said, ENDLESS)
    assert client._router.work[engine_of(client, again)] == len(said) + ROW_TOKENS
    await ended([again])


@with_cores({}, {})
async def test_a_request_that_has_moved_is_cancelled_where_it_is(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], ENDLESS, request_name="mine")
    first = engine_of(client, stream)
    request = await refuse(cores[first])
    await until(lambda: engine_of(client, stream) != first)
    await heard(cores[1 - first], AddRequest)
    stream.cancel()
    assert (await heard(cores[1 - first], Abort)).ids == [request.id]
    assert client.num_requests == 0


@with_cores({}, {})
async def test_other_refusals_are_the_requests_own(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], ENDLESS)
    core = cores[engine_of(client, stream)]
    request = await heard(core, AddRequest)
    core.say(RequestError(core.epoch, request.id, "invalid", "not like this"))
    with pytest.raises(InvalidRequest, match="not like this"):
        await stream.collect()


@with_cores({}, {})
async def test_an_engine_that_takes_no_messages_is_passed_over(cores: list[FakeCore], client: Replicas, monkeypatch) -> None:
    def busy(message: object) -> None:
        raise LinkBusy

    monkeypatch.setattr(client._replicas[0]._link, "send", busy)
    streams = [client.submit([THE, i], ENDLESS) for i in range(8)]
    assert {engine_of(client, stream) for stream in streams} == {1}
    monkeypatch.setattr(client._replicas[1]._link, "send", busy)
    with pytest.raises(Overloaded):
        client.submit([THE], ENDLESS)
    monkeypatch.undo()
    await ended(streams)


@with_cores({}, {})
async def test_what_cannot_be_sent_is_refused_before_it_is(cores: list[FakeCore], client: Replicas, monkeypatch) -> None:
    for call in (
        lambda: client.submit([], ENDLESS),
        lambda: client.submit([THE], ENDLESS, priority=1 << 40),
        lambda: client.submit([THE], ENDLESS, cache_salt="\ud800"),
        lambda: client.submit([THE] * 70, ENDLESS),
    ):
        with pytest.raises(InvalidRequest):
            call()
    monkeypatch.setattr(client_module, "RequestState", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        client.submit([THE], ENDLESS)
    assert client._sent == {}


# ---------------------------------------------------------------------------------------------------------------- ends
@with_cores({}, {})
async def test_an_engine_that_dies_takes_only_its_own_requests_along(cores: list[FakeCore], client: Replicas) -> None:
    streams = [client.submit([THE, i], ENDLESS) for i in range(20)]
    mine = [stream for stream in streams if engine_of(client, stream) == 0]
    others = [stream for stream in streams if engine_of(client, stream) == 1]
    assert mine and others
    cores[0].stop()
    for stream in mine:
        with pytest.raises(EngineDown, match="the engine was lost"):
            await stream.collect()
    assert client.health() is None and client.is_connected
    assert [engine.health() for engine in client.engines] == ["there is no connection to the engine", None]
    client.check()
    more = [client.submit([THE, i], ENDLESS) for i in range(20)]
    assert {engine_of(client, stream) for stream in more} == {1}
    for stream in others:
        request = await heard(cores[1], AddRequest)
        cores[1].say(outputs([(request.id << 8, CAT)], {request.id << 8: "length"}, epoch=cores[1].epoch))
        assert list((await stream.collect())[0].token_ids) == [CAT]
    cores[0] = FakeCore(echo, address=cores[0].address, cache=CACHE)
    await until(lambda: client.engines[0].health() is None)
    await until(lambda: engine_of(client, (stream := client.submit([THE], ENDLESS))) == 0 or stream.cancel())
    await ended(more)


@with_cores({}, {})
async def test_what_an_engine_that_stops_has_not_begun_goes_to_the_next(cores: list[FakeCore], client: Replicas) -> None:
    """It was sent before the engine said that it stops, and has come too late there."""
    streams = [client.submit([THE, i], ENDLESS) for i in range(8)]
    begun, late = [stream for stream in streams if engine_of(client, stream) == 0][:2]
    request = await heard(cores[0], AddRequest)
    assert request.id == begun.id
    key = request.id << 8
    cores[0].say(outputs([(key, CAT)], epoch=cores[0].epoch, started=[Started(key, 0, 0.0)]), ShuttingDown(cores[0].epoch))
    with pytest.raises(EngineDown, match="shutting down"):
        await begun.collect()
    await until(lambda: all(engine_of(client, stream) == 1 for stream in streams if stream is not begun))
    assert client.engines[0].was_stopped and not client.engines[1].was_stopped
    while (request := await heard(cores[1], AddRequest)).id != late.id:
        pass
    cores[1].say(outputs([(late.id << 8, CAT)], {late.id << 8: "length"}, epoch=cores[1].epoch))
    assert list((await late.collect())[0].token_ids) == [CAT]
    client.check()
    await ended(streams)


@with_cores({}, {})
async def test_prompt_logprobs_may_have_come_before_an_engine_stopped(cores: list[FakeCore], client: Replicas) -> None:
    """Of the next one they would come once more."""
    params = SamplingParams(max_tokens=5, prompt_logprobs=1)
    streams = [client.submit([THE, i], params) for i in range(8)]
    here = [stream for stream in streams if engine_of(client, stream) == 0]
    cores[0].say(ShuttingDown(cores[0].epoch))
    for stream in here:
        with pytest.raises(EngineDown, match="shutting down"):
            await stream.collect()
    await ended(streams)


@with_cores({}, {})
async def test_without_any_engine_requests_are_told_so(cores: list[FakeCore], client: Replicas) -> None:
    for core in cores:
        core.stop()
    await until(lambda: not client.is_connected)
    with pytest.raises(EngineDown):
        client.submit([THE], ENDLESS)
    with pytest.raises(EngineDown):
        await client.utility(ResetPrefixCache(), ResetDone)
    assert client.health() == "there is no connection to the engine"
    client.connected(0)  # heard of too late
    with pytest.raises(EngineDown):
        client.submit([THE], ENDLESS)


@with_cores({}, {})
async def test_engines_that_are_not_well_get_nothing_while_others_are(cores: list[FakeCore], client: Replicas) -> None:
    cores[0].announce(ready=False)
    await until(lambda: client.engines[0].health() == "the engine's workers are starting")
    streams = [client.submit([THE, i], ENDLESS) for i in range(8)]
    assert {engine_of(client, stream) for stream in streams} == {1} and client.health() is None
    cores[1].announce(ready=False)
    await until(lambda: client.health() == "the engine's workers are starting")
    streams += [client.submit([THE, i], ENDLESS) for i in range(8)]  # they wait for the workers
    assert {engine_of(client, stream) for stream in streams} == {0, 1}
    cores[1].announce(ready=True)
    await until(lambda: client.health() is None)
    streams += (more := [client.submit([THE, i], ENDLESS) for i in range(8)])
    assert {engine_of(client, stream) for stream in more} == {1}
    await ended(streams)


@with_cores({}, {})
async def test_an_engine_found_lost_while_a_request_is_sent_is_passed_over(cores: list[FakeCore], client: Replicas) -> None:
    link = client._replicas[0]._link

    def lost(message: object) -> None:
        link._connection.end("gone")
        raise LinkDown

    link.send = lost
    streams = [client.submit([THE, i], ENDLESS) for i in range(8)]
    assert {engine_of(client, stream) for stream in streams} == {1}
    assert client._router.work[0] == 0 < client._router.work[1]
    await ended(streams)


@with_cores({}, {})
async def test_engines_that_are_all_lost_are_no_overload(cores: list[FakeCore], client: Replicas, monkeypatch) -> None:
    def lost(message: object) -> None:
        raise LinkDown

    for engine in client._replicas:
        monkeypatch.setattr(engine._link, "send", lost)
    with pytest.raises(EngineDown, match="no connection"):
        client.submit([THE], ENDLESS)
    monkeypatch.undo()


@with_cores({}, {})
async def test_a_request_that_the_next_engine_cannot_be_sent_ends(cores: list[FakeCore], client: Replicas, monkeypatch) -> None:
    def too_long(message: object) -> None:
        raise ValueError("a message of so many bytes")

    stream = client.submit([THE], ENDLESS)
    first = engine_of(client, stream)
    monkeypatch.setattr(client._replicas[1 - first]._link, "send", too_long)
    await refuse(cores[first])
    with pytest.raises(Overloaded):
        await stream.collect()
    monkeypatch.undo()


@with_cores({"script": echo}, {"script": echo})
async def test_whatever_becomes_of_requests_no_work_is_left(cores: list[FakeCore], client: Replicas) -> None:
    chance = random.Random(0)
    stopped = SamplingParams(max_tokens=20, stop=[" cat"], n=2)
    streams = []
    for i in range(60):
        params = chance.choice([SamplingParams(max_tokens=3), ENDLESS, stopped, SamplingParams(max_tokens=5, n=3)])
        streams.append(client.submit([THE, CAT, i] * chance.randint(1, 9), params, request_name=f"r{i}"))
        if chance.random() < 0.3:
            streams.pop(chance.randrange(len(streams))).cancel()
        if chance.random() < 0.2:
            client.abort(f"r{i}")
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        client.check()
    client.abort_all()
    for stream in streams:
        await stream.collect()
    await until(lambda: client.num_requests == 0)


@with_cores({}, {})
async def test_a_stop_string_is_told_to_the_engine_that_runs_it(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], SamplingParams(max_tokens=20, stop=[" cat"]))
    core = cores[engine_of(client, stream)]
    request = await heard(core, AddRequest)
    core.say(outputs([(request.id << 8, CAT)], epoch=core.epoch))
    assert (await stream.collect())[0].finish_reason == "stop"
    assert (await heard(core, Finish)).key == request.id << 8


@with_cores({}, {})
async def test_each_engine_has_its_share_of_a_keys_limits_and_the_routers_salt_is_the_keys(
    cores: list[FakeCore], client: Replicas
) -> None:
    terms = Terms(Tenant("a", max_running=5, tokens_per_minute=100.0), salt="a's")
    stream = client.submit([THE, CAT], ENDLESS, terms=terms)
    first = engine_of(client, stream)
    request = await heard(cores[first], AddRequest)
    assert request.tenant == Tenant("a", max_running=3, tokens_per_minute=50.0) and request.cache_salt == terms.salted("")
    cores[first].say(RequestError(cores[first].epoch, request.id, "rate_limited", "enough", 9))
    request = await heard(cores[1 - first], AddRequest)
    assert request.tenant.max_running == 3 and request.cache_salt == terms.salted("")
    cores[1 - first].say(RequestError(cores[1 - first].epoch, request.id, "rate_limited", "enough here, too", 5))
    with pytest.raises(RateLimited, match="here, too"):
        await stream.collect()
