"""Replicas over cores in threads: who gets a request, who gets it next, and that an engine's end is its own affair."""

import asyncio
import functools
import inspect
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fake_client
import pytest
import toy_tokenizers
from fake_core import LIMITS, FakeCore, echo, outputs

from quire.frontend import replicas as module
from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.beam_search import BeamSearchParams, search_all
from quire.frontend.client.stream import EngineDown, InvalidRequest, Overloaded, Stream
from quire.frontend.replicas import Replicas, client_of
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.engine_stats import CacheInfo
from quire.ipc.links.frontend_to_core import LinkBusy
from quire.ipc.messages import Abort, AddRequest, Candidates, EngineLimits, Finish, RequestError, Utility, UtilityResult
from quire.ipc.sampling import SamplingParams
from quire.ipc.utilities import (
    GetServerInfo,
    ProfileDone,
    ResetDone,
    ResetPrefixCache,
    ServerInfo,
    StopProfile,
    UtilityFailed,
)

TOKENIZER = Tokenizer.from_files(toy_tokenizers.files())
THE, CAT, WORLD = (TOKENIZER.encode(t)[0] for t in (" the", " cat", " world"))
ENDLESS = SamplingParams(max_tokens=None)
CACHE = CacheInfo(4, 1000, True, 0.9, "auto")  # blocks of 4 tokens


def with_cores(*options: dict[str, Any]) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run the test in a loop of its own with FakeCores, and a client of all of them; at its end nothing is left behind."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def run(**kwargs: Any) -> None:
            folder = tempfile.mkdtemp()
            cores = [FakeCore(**{"cache": CACHE, "address": f"ipc://{folder}/{i}", **each}) for i, each in enumerate(options)]
            try:
                async with Replicas([core.address for core in cores], [None] * len(cores)) as client:
                    await test(cores, client, **kwargs)
                    client.check()
            finally:
                for core in cores:
                    core.stop()

        @functools.wraps(test)
        def start(**kwargs: Any) -> None:
            asyncio.run(asyncio.wait_for(run(**kwargs), 100))

        start.__signature__ = inspect.Signature(list(inspect.signature(test).parameters.values())[2:])  # type: ignore[attr-defined]
        return start

    return decorate


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def heard(core: FakeCore, kind: type) -> Any:
    return await asyncio.to_thread(core.next, kind)


def engine_of(client: Replicas, stream: Stream) -> int:
    return client._sent[stream.id].engine


async def refuse(core: FakeCore) -> AddRequest:
    request = await heard(core, AddRequest)
    core.say(RequestError(core.epoch, request.id, "overloaded", "too many requests are waiting; try again later"))
    return request


async def ended(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.cancel()
    await asyncio.sleep(0)


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


@with_cores({}, {})
async def test_all_sequences_of_a_request_run_on_one_engine(cores: list[FakeCore], client: Replicas) -> None:
    stream = client.submit([THE], SamplingParams(n=3, max_tokens=9))
    core = cores[engine_of(client, stream)]
    request = await heard(core, AddRequest)
    assert request.task.params.n == 3
    ends = {request.id << 8 | child: "length" for child in range(3)}
    core.say(outputs([(key, CAT) for key in ends], ends, epoch=core.epoch))
    assert [list(delta.token_ids) for delta in await stream.collect()] == [[CAT]] * 3


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
    monkeypatch.setattr(module, "RequestState", lambda *_: 1 // 0)
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
async def test_without_any_engine_requests_are_told_so(cores: list[FakeCore], client: Replicas) -> None:
    for core in cores:
        core.stop()
    await until(lambda: not client.is_connected)
    with pytest.raises(EngineDown):
        client.submit([THE], ENDLESS)
    with pytest.raises(EngineDown):
        await client.utility(ResetPrefixCache(), ResetDone)
    assert client.health() == "there is no connection to the engine"


@with_cores({}, {})
async def test_engines_that_are_not_well_get_nothing_while_others_are(cores: list[FakeCore], client: Replicas) -> None:
    cores[0].announce(ready=False)
    await until(lambda: client.engines[0].health() == "the engine's workers are starting")
    client._looked = 0.0
    streams = [client.submit([THE, i], ENDLESS) for i in range(8)]
    assert {engine_of(client, stream) for stream in streams} == {1} and client.health() is None
    cores[1].announce(ready=False)
    await until(lambda: client.health() == "the engine's workers are starting")
    client._looked = 0.0
    streams += [client.submit([THE, i], ENDLESS) for i in range(8)]  # they wait for the workers
    assert {engine_of(client, stream) for stream in streams} == {0, 1}
    await ended(streams)


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
        ({"name": "dog"}, r"the engine at ipc://\S+ serves 'toy', the one at ipc://\S+ 'dog'"),
        (
            {"files": {**toy_tokenizers.files(), "chat_template.jinja": b"{{ x }}"}},
            "different models: their chat_template",
        ),
        ({"limits": EngineLimits(64, 401, 4, 20)}, "different models: their vocabularies"),
        ({"eos": (3,)}, "vocabularies or end tokens differ"),
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


def test_an_engine_that_comes_back_as_another_model_gets_nothing(monkeypatch, caplog) -> None:
    async def main() -> None:
        folders = [tempfile.mkdtemp() for _ in range(2)]
        addresses = [f"ipc://{folder}/s.sock" for folder in folders]
        cores = [FakeCore(address=address) for address in addresses]
        async with Replicas(addresses, [None, None]) as client:
            cores[0].stop()
            await until(lambda: not client.engines[0].is_connected)
            cores[0] = FakeCore(address=addresses[0], name="dog")
            await until(lambda: client.engines[0].is_connected)
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


def test_one_that_is_not_there_yet_is_not_waited_for_long(monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "OTHERS_S", 0.05)

    async def main() -> None:
        address = f"ipc://{tempfile.mkdtemp()}/s.sock"
        with FakeCore() as one:
            async with Replicas([address, one.address], [None, None]) as client:
                assert client.health() is None and not client.engines[0].is_connected
                await client.connect()  # nothing to do
                with FakeCore(address=address):
                    await until(lambda: client.engines[0].health() is None)
                    client._looked = 0.0
                    streams = [client.submit([THE, i], ENDLESS) for i in range(20)]
                    assert {engine_of(client, stream) for stream in streams} == {0, 1}
            with pytest.raises(EngineDown):
                client.submit([THE], ENDLESS)

    asyncio.run(asyncio.wait_for(main(), 100))


def test_without_any_engine_in_time_there_is_no_client() -> None:
    async def main() -> None:
        addresses = [f"ipc://{tempfile.mkdtemp()}/s.sock" for _ in range(2)]
        with pytest.raises(EngineDown, match=r"no engine at any of ipc://.*, ipc://.* for 0.05 s"):
            await Replicas(addresses, [None, None]).connect(timeout_s=0.05)
        with pytest.raises(ValueError, match="an address starts with"):
            await Replicas([addresses[0], "nonsense"], [None, None]).connect()

    asyncio.run(asyncio.wait_for(main(), 100))


SMALL = EngineLimits(max_model_len=32, vocab_size=400, max_num_seqs=2, max_logprobs=5)


@with_cores({}, {"limits": SMALL})
async def test_what_holds_for_all_is_what_clients_are_told(cores: list[FakeCore], client: Replicas) -> None:
    assert client.welcome.limits == EngineLimits(32, 400, LIMITS.max_num_seqs + 2, 5)
    assert client.tokenizer is client.engines[0].tokenizer is client.engines[1].tokenizer
    for core in cores:
        core.announce(num_running=3, num_waiting=1)
    await until(lambda: client.beat is not None and (client.beat.num_running, client.beat.num_waiting) == (6, 2))


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


# ---------------------------------------------------------------------------------------------------------------- HTTP
@with_cores({"script": echo}, {"script": echo})
async def test_routes_need_not_know(cores: list[FakeCore], client: Replicas) -> None:
    api = fake_client.Api(client)
    status, body = await api.json("POST", fake_client.COMPLETIONS, {"model": "toy", "prompt": [THE, CAT], "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    for core in cores:
        core.announce(num_running=int(core is cores[0]))
    await until(lambda: all(engine.beat for engine in client.engines))
    await until(lambda: client.engines[0].beat.num_running == 1)
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
