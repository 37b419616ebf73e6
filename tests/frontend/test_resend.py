"""Requests that outlive their engine: they are sent again, with the output that they have, to the next one or to another."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_tokenizers
from fake_core import LIMITS, FakeCore, echo, outputs, prompt_of
from own_loop import heard, until
from replica_cases import ended, engine_of, with_cores

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.beam_search import BeamSearch, BeamSearchParams
from quire.frontend.client.stream import EngineDown, EngineError, Stream
from quire.frontend.replicas.replicas import Replicas
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.links.frontend_to_core import FrontendToCore, LinkBusy
from quire.ipc.messages.frontend import AddRequest, FrontendMessage, Resume, ShuttingDown, Started
from quire.ipc.sampling import RequestOutputKind, SamplingParams

TOKENIZER = Tokenizer.from_files(toy_tokenizers.files())
THE, CAT, WORLD = (TOKENIZER.encode(t)[0] for t in (" the", " cat", " world"))
LONG = SamplingParams(max_tokens=12, seed=7)


class Cores:
    """One core after another at one address. `lose` ends the present one, `next` starts another."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.address, self._options = f"ipc://{folder}/core", {"replay": True, **options}
        self.now = FakeCore(address=self.address, **self._options)

    def next(self, **options: Any) -> FakeCore:
        self.now.stop()
        self.now = FakeCore(address=self.address, **{**self._options, **options})
        return self.now


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[Cores]:
    cores = Cores(tmp_path)
    yield cores
    cores.now.stop()


def in_loop(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100))


@asynccontextmanager
async def client_of(cores: Cores, **options: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cores.address, **options) as client:
        yield client


async def say(core: FakeCore, request: AddRequest, tokens: list[int], seed: int | None = None, child: int = 0) -> None:
    """Tokens for one child; with a seed they are its first ones."""
    key = request.id << 8 | child
    started = [] if seed is None else [Started(key, 0, 0.0, seed)]
    core.say(outputs([(key, token) for token in tokens], epoch=core.epoch, started=started))


async def lose(cores: Cores, client: AsyncClient, **options: Any) -> FakeCore:
    """Lose the core; the client is connected to the next one."""
    epoch = client.welcome.epoch
    core = cores.next(**options)
    await until(lambda: client.is_connected and client.welcome.epoch != epoch)
    return core


def ids_of(resume: Resume | None) -> list[list[int] | None]:
    assert resume is not None
    return [None if output is None else np.frombuffer(output, "<i4").tolist() for output in resume.outputs]


async def tokens_of(stream: Stream) -> list[int]:
    return (await stream.collect())[0].token_ids


# ---------------------------------------------------------------------------------------------------------- one engine
def test_a_stream_goes_on_where_it_was_when_a_core_is_back(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            stream = client.submit([THE, CAT], SamplingParams(max_tokens=6))
            request = await heard(cores.now, AddRequest)
            assert request.task.resume is None
            await say(cores.now, request, [THE], seed=99)
            text = (await anext(stream))[0].text
            await say(cores.now, request, [CAT])
            await until(lambda: stream.num_output_tokens == 2)  # one is taken by the reader, and one is not
            core = await lose(cores, client)
            assert not stream.finished and client.num_requests == 1
            again = await heard(core, AddRequest)
            assert (again.id, again.epoch, again.arrival_time) == (request.id, core.epoch, request.arrival_time)
            assert again.inputs == request.inputs
            assert ids_of(again.task.resume) == [[THE, CAT]] and again.task.resume.seed == 99
            await say(core, again, [THE, CAT, THE])
            await until(lambda: stream.num_output_tokens == 5)
            core = await lose(cores, client, script=echo)  # and again; this one knows the rest
            text += "".join([delta.text async for deltas in stream for delta in deltas])
            assert text == " the cat the cat the cat" and stream.num_output_tokens == 6
            assert stream.num_cached_tokens == 0 and client.num_requests == 0

    in_loop(run)


def test_an_answer_in_one_piece_goes_on_as_streams_do(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            params = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY, logprobs=None)
            stream = client.submit([THE], params)
            collecting = asyncio.create_task(stream.collect())
            request = await heard(cores.now, AddRequest)
            await say(cores.now, request, [THE, THE], seed=1)
            await until(lambda: stream.num_output_tokens == 2)
            await lose(cores, client, script=echo)
            [delta] = await collecting
            assert delta.token_ids == [THE] * 6 and delta.finish_reason == "length"

    in_loop(run)


def test_children_that_have_ended_are_not_asked_for_again(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            stream = client.submit([THE], SamplingParams(max_tokens=4, n=3))
            request = await heard(cores.now, AddRequest)
            key = request.id << 8
            first = outputs([(key, CAT), (key + 1, CAT)], {key + 1: "stop"}, epoch=cores.now.epoch)
            cores.now.say(first)
            await until(lambda: stream.num_output_tokens == 2)
            core = await lose(cores, client)
            again = await heard(core, AddRequest)
            assert ids_of(again.task.resume) == [[CAT], None, []] and again.task.resume.seed is None
            core.say(outputs([(key, THE), (key + 2, THE)], {key: "length", key + 2: "length"}, epoch=core.epoch))
            deltas = await stream.collect()
            assert [delta.token_ids for delta in deltas] == [[CAT, THE], [CAT], [THE]]

    in_loop(run)


def test_many_requests_are_sent_again_in_their_order(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            streams = [client.submit([THE, i], LONG) for i in range(50)]
            await until(lambda: client.num_requests == 50)
            core = await lose(cores, client, script=echo)
            assert [await tokens_of(stream) for stream in streams] == [[THE, i] * 6 for i in range(50)]
            assert [prompt_of(await heard(core, AddRequest))[1] for _ in range(50)] == list(range(50))

    in_loop(run)


def test_a_request_that_runs_at_two_losses_without_a_token_between_ends_with_an_error(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            stream, other = client.submit([THE], LONG), client.submit([CAT], LONG)
            requests = [await heard(cores.now, AddRequest) for _ in range(2)]
            await say(cores.now, requests[1], [CAT], seed=1)
            await until(lambda: other.num_output_tokens)
            core = await lose(cores, client)
            await say(core, requests[1], [CAT])
            await until(lambda: other.num_output_tokens == 2)
            await lose(cores, client, script=echo)
            with pytest.raises(EngineError, match="twice"):
                await stream.collect()
            assert await tokens_of(other) == [CAT] * 12

    in_loop(run)


def test_several_requests_without_a_token_between_two_losses_have_more_chances(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            streams = [client.submit([THE, i], LONG) for i in range(3)]
            for _ in range(3):
                for _ in streams:
                    await heard(cores.now, AddRequest)
                await lose(cores, client)
                assert not any(stream.finished for stream in streams)
            cores.next(script=echo)
            for stream in streams:
                with pytest.raises(EngineError):
                    await stream.collect()

    in_loop(run)


def test_a_request_that_may_only_have_waited_has_more_chances(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            stream = client.submit([THE], LONG)
            for _ in range(3):
                cores.now.announce(num_waiting=1)
                await until(lambda: client.heartbeat is not None and client.heartbeat.num_waiting == 1)
                await lose(cores, client)
                assert not stream.finished
            cores.now.announce(num_waiting=1)
            await until(lambda: client.heartbeat is not None and client.heartbeat.num_waiting == 1)
            cores.next()
            with pytest.raises(EngineError):
                await stream.collect()

    in_loop(run)


def test_a_sequence_with_all_its_tokens_ends_by_length(cores: Cores) -> None:
    """The engine had not said yet whether its grammar had ended, too."""

    async def run() -> None:
        async with client_of(cores) as client:
            stream = client.submit([THE], SamplingParams(max_tokens=2))
            request = await heard(cores.now, AddRequest)
            await say(cores.now, request, [CAT, CAT], seed=1)
            await until(lambda: stream.num_output_tokens == 2)
            await lose(cores, client)
            [delta] = await stream.collect()
            assert (delta.token_ids, delta.finish_reason) == ([CAT, CAT], "length")

    in_loop(run)


def test_another_model_does_not_go_on(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            stream = client.submit([THE], LONG)
            await heard(cores.now, AddRequest)
            await lose(cores, client, model_digest="another")
            with pytest.raises(EngineDown, match="another model"):
                await stream.collect()

    in_loop(run)


def test_requests_without_an_engine_can_be_aborted_and_end_with_the_client(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            aborted, named, kept = (client.submit([THE], LONG, request_name=name) for name in ("a", "b", "c"))
            await until(lambda: client.num_requests == 3)
            cores.now.stop()
            await until(lambda: not client.is_connected)
            aborted.cancel()
            client.abort("b")
            assert [delta.finish_reason for delta in await aborted.collect()] == ["abort"]
            assert [delta.finish_reason for delta in await named.collect()] == ["abort"] and client.num_requests == 1
        with pytest.raises(EngineDown, match="closed"):
            await kept.collect()

    in_loop(run)


@pytest.mark.parametrize("says_so", [False, True])
def test_requests_end_if_no_core_comes(cores: Cores, says_so: bool) -> None:
    """At once, if it was told to stop; otherwise when hold_s are over."""

    async def run() -> None:
        async with client_of(cores, hold_s=60.0 if says_so else 0.05) as client:
            stream = client.submit([THE], LONG)
            await heard(cores.now, AddRequest)
            if says_so:
                cores.now.say_that_it_stops()
            else:
                cores.now.stop()
            with pytest.raises(EngineDown):
                await stream.collect()
            assert client.num_requests == 0

    in_loop(run)


def test_a_beam_search_ends_with_its_engine(cores: Cores) -> None:
    async def run() -> None:
        async with client_of(cores) as client:
            search = asyncio.create_task(BeamSearch(client, [THE], BeamSearchParams(beam_width=2, max_tokens=4)).run())
            await heard(cores.now, AddRequest)
            cores.next()
            with pytest.raises(EngineError):
                await search

    in_loop(run)


def test_a_busy_link_is_tried_again(cores: Cores) -> None:
    async def run() -> None:
        attempts, send = [], FrontendToCore.send

        def busy(link: FrontendToCore, message: FrontendMessage) -> None:
            attempts.append(message)
            if len(attempts) < 3:
                raise LinkBusy("later")
            send(link, message)

        async with client_of(cores) as client:
            stream = client.submit([THE], LONG)
            await heard(cores.now, AddRequest)
            FrontendToCore.send = busy  # type: ignore[method-assign]
            try:
                await lose(cores, client, script=echo)
                assert await tokens_of(stream) == [THE] * 12 and len(attempts) == 3
            finally:
                FrontendToCore.send = send  # type: ignore[method-assign]

    in_loop(run)


# ------------------------------------------------------------------------------------------------------ several engines
@with_cores({"replay": True}, {"replay": True})
async def test_requests_of_a_lost_engine_go_on_at_another_at_once(cores: list[FakeCore], client: Replicas) -> None:
    streams = [client.submit([THE, i], LONG) for i in range(20)]
    mine = [stream for stream in streams if engine_of(client, stream) == 0]
    assert 0 < len(mine) < 20
    for _ in mine:
        request = await heard(cores[0], AddRequest)
        await say(cores[0], request, [prompt_of(request)[0]], seed=5)
    await until(lambda: all(stream.num_output_tokens for stream in mine))
    cores[0].stop()
    await until(lambda: {engine_of(client, stream) for stream in streams} == {1})
    client.check()
    for _ in streams:
        request = await heard(cores[1], AddRequest)
        is_mine = request.id in [stream.id for stream in mine]
        assert (request.task.resume is not None) == is_mine
        if is_mine:
            assert (ids_of(request.task.resume) == [[THE]] and request.task.resume.seed == 7) or request.task.resume.seed == 5
        rest = (prompt_of(request) * 6)[is_mine:]
        cores[1].say(outputs([(request.id << 8, i) for i in rest], {request.id << 8: "length"}, epoch=cores[1].epoch))
    for i, stream in enumerate(streams):
        assert await tokens_of(stream) == [THE, i] * 6
    client.check()
    await ended(streams)


@with_cores({"replay": True}, {"replay": True})
async def test_requests_that_an_engine_has_begun_go_on_elsewhere_when_it_stops(cores: list[FakeCore], client: Replicas) -> None:
    streams = [client.submit([THE, i], LONG) for i in range(8)]
    begun = next(stream for stream in streams if engine_of(client, stream) == 0)
    request = await heard(cores[0], AddRequest)
    await say(cores[0], request, [CAT], seed=1)
    await until(lambda: begun.num_output_tokens)
    cores[0].say(ShuttingDown(cores[0].epoch))
    await until(lambda: {engine_of(client, stream) for stream in streams} == {1})
    assert not begun.finished
    client.check()
    await ended(streams)


@with_cores({"replay": True}, {"replay": True})
async def test_requests_wait_for_whichever_engine_is_back_first(cores: list[FakeCore], client: Replicas) -> None:
    streams = [client.submit([THE, i], LONG) for i in range(8)]
    for core in cores:
        core.stop()
    await until(lambda: not client.is_connected)
    client.check()
    assert client.num_requests == 8 and not any(stream.finished for stream in streams)
    streams.pop().cancel()
    assert client.num_requests == 7
    cores[1] = FakeCore(echo, address=cores[1].address, replay=True)
    assert [await tokens_of(stream) for stream in streams] == [[THE, i] * 6 for i in range(7)]
    client.check()


def test_limits_leave_room_for_these_tests() -> None:
    assert LIMITS.max_model_len > 2 + 12 and WORLD != CAT
