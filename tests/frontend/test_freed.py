"""What a request leaves is freed by its reference counts, however it ends: a busy server collects all garbage once an hour."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from stream_bench import CAT, EOS, THE, Bench, rest

from quire.frontend.client.beam_search import BeamStream
from quire.frontend.client.stream import ClientError, EngineDown, EngineError
from quire.frontend.http.api.generate import _collect, run_all
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.batches.run import beside
from quire.ipc.messages.frontend import TokenLogprobs
from quire.ipc.sampling import SamplingParams

Work = Callable[[], Awaitable[None]]


def left_by(work: Work) -> list[str]:
    """Names of our types, and of exceptions and frames, that only the collector would free."""

    async def twice() -> list[str]:
        await work()  # what is made once, and kept, is made here
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await work()
            await next_turn()  # callbacks of tasks that have ended
            gc.collect()
            return [
                type(each).__name__
                for each in gc.garbage
                if type(each).__module__.startswith("quire") or isinstance(each, BaseException)
            ]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    return asyncio.run(twice())


async def next_turn() -> None:
    """Returns when all that the event loop was to call now has been called."""
    called = asyncio.Event()
    asyncio.get_running_loop().call_soon(called.set)
    await called.wait()


async def failure_of(work: Awaitable[object]) -> str:
    """What it raises, as text: the exception, which pytest.raises would keep, would refer to the test."""
    try:
        await work
    except ClientError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


async def to_the_end() -> None:
    bench = Bench()
    streams = [bench.submit(), bench.submit(n=2), bench.submit(stop=[" cat"]), bench.submit(logprobs=1), bench.submit()]
    row = TokenLogprobs(-1.0, 1, THE.to_bytes(4, "little"), b"\0\0\x80\xbf")
    bench.arrive([(1, THE), (2 << 8, THE), (2 << 8 | 1, CAT), (3, THE), (3, CAT), (4, THE)], {1: "length"}, logprobs=[row])
    bench.arrive([(4, EOS)], {2 << 8: "length", 2 << 8 | 1: "stop", 4: "stop", 5: "error"}, logprobs=[row])
    for stream in streams:
        assert stream.finished and (await rest(stream))[-1].finish_reason is not None


async def aborted() -> None:
    bench = Bench()
    stream, dropped = bench.submit(n=3), bench.submit(stop=["x"])
    bench.arrive([(1 << 8, THE), (2, THE)])
    stream.cancel()
    del dropped
    await next_turn()
    assert not bench.dispatcher.requests and len(await rest(stream)) == 3


async def failed(read: Callable[[Any], Awaitable[object]]) -> None:
    bench = Bench()
    stream = bench.submit(n=2)
    waiting = asyncio.ensure_future(failure_of(read(stream)))
    await next_turn()
    bench.dispatcher.fail(1, EngineError("no"))
    assert await waiting == await failure_of(read(stream)) == "EngineError: no"
    assert isinstance(stream.error, EngineError)


async def engine_lost() -> None:
    bench = Bench()
    stream = bench.submit()
    bench.arrive([(1, THE)])
    bench.dispatcher.fail_all(EngineDown("gone"))
    assert await failure_of(rest(stream)) == "EngineDown: gone"


async def search_that_fails() -> None:
    async def run() -> NoReturn:
        raise EngineError("no")

    stream = BeamStream(SimpleNamespace(run=run), SamplingParams(), "mine")  # type: ignore[arg-type]
    assert await failure_of(stream.collect()) == "EngineError: no"
    assert isinstance(stream.error, EngineError) and str(stream.error) == "no"


async def answers_that_fail() -> None:
    """Of several prompts, and of one with more logprobs than an answer may hold."""
    bench = Bench()
    streams = [bench.submit(logprobs=5) for _ in range(3)]
    runs = [PromptRun(stream, stream.params, [], 0) for stream in streams]

    async def lose_engine() -> None:
        bench.dispatcher.fail_all(EngineError("no"))

    work: list[Coroutine[Any, Any, Any]] = [runs[0].collect(), runs[1].collect(), lose_engine()]  # begun in this order
    assert await failure_of(run_all(work)) == "EngineError: no"
    assert await failure_of(_collect(runs[2], most_bytes=1)) == "EngineError: no"


async def batch_that_ends() -> None:
    has_begun = asyncio.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.Event().wait()  # until it is cancelled

    async def keep() -> NoReturn:
        await has_begun.wait()
        raise EngineError("cancelled")

    assert await failure_of(beside(work(), keep())) == "EngineError: cancelled"


@pytest.mark.parametrize(
    "work",
    [
        to_the_end,
        aborted,
        lambda: failed(rest),
        lambda: failed(lambda stream: stream.collect()),
        engine_lost,
        search_that_fails,
        answers_that_fail,
        batch_that_ends,
    ],
    ids=["ended", "aborted", "failed", "failed_while_collected", "engine_lost", "search", "answers", "batch"],
)
def test_nothing_is_left_for_the_garbage_collector(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    assert left_by(work) == []
    assert caplog.records == []  # as of a failure that nobody has looked at
